"""Arrays and drafts that cross module boundaries, and the protocols of samplers and drafters."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, takewhile
from math import prod
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from edgespec.system.cancel import Flag

T = TypeVar("T")
Report = Callable[[str], None]  # takes a line for the user
TokenIds = npt.NDArray[np.int32]  # [num_tokens]
Logits = npt.NDArray[np.float32]  # [num_rows, vocab_size]
Row = npt.NDArray[np.floating[Any]]  # [vocab_size]


class Range(NamedTuple):
    """The smallest and the largest value that were measured."""

    low: float
    high: float


class Distribution(NamedTuple):
    """Tokens with a chance to be sampled, after all processors; probabilities are weights divided by their sum."""

    ids: npt.NDArray[np.intp]  # [num_ids], rising
    weights: npt.NDArray[np.floating[Any]]  # [num_ids]

    @property
    def probs(self) -> npt.NDArray[np.floating[Any]]:
        """Probability of each of ids, [num_ids]; their sum is 1."""
        probs: npt.NDArray[np.floating[Any]] = self.weights / self.weights.sum()
        return probs

    def probability(self, token: int) -> float:
        place = int(np.searchsorted(self.ids, token))
        is_there = place < len(self.ids) and self.ids[place] == token
        return float(self.weights[place] / self.weights.sum()) if is_there else 0.0


@dataclass(frozen=True, slots=True)
class Worth:
    """The worth of nodes of a tree of guesses, and their cost: rows of the target and of a drafter alike.

    accepted: The chance that a drafted token is accepted if all before it were, by position; the last counts for
        all positions after it.
    step_times: Of the drafter's steps by the branches that they draft on from, from 1 on, as many as they may be.
        In tokens, or relative to a step of one where min_used is given.
    pass_times: Of the target's passes by width, from 1 on, as wide as a pass may be, in tokens.
    chances: The chance that a guess comes true if those before it do, by its class of confidence.
    others: Where a guess is wrong, the chance that the next best choice is right, then that the one after that is
        if this one is not either, and so on.
    min_used: Of steps that are done while the target works, which take no time from the text: a step is done where
        its tokens are used with more than this chance in all, for each time of a step. None for other steps.
    """

    accepted: Sequence[float]
    step_times: Sequence[float]
    pass_times: Sequence[float] = (0.0,)
    chances: Sequence[float] = ()
    others: Sequence[float] = ()
    min_used: float | None = None

    @property
    def is_of_trees(self) -> bool:
        """True if chances are told by how sure a drafter is of each guess, so that it can grow a tree."""
        return len(self.chances) > 0

    def acceptance(self, position: int) -> float:
        return self.accepted[min(position, len(self.accepted) - 1)]

    def reached(self, position: int) -> float:
        """The chance that all tokens before a position are accepted."""
        known = len(self.accepted)
        return prod(self.accepted[:position]) * self.accepted[-1] ** max(0, position - known)

    @property
    def row(self) -> float:
        """The time of one row more of a pass of the target, in tokens."""
        return (self.pass_times[-1] - self.pass_times[0]) / max(1, len(self.pass_times) - 1)

    def num_rows(self, chances: Sequence[float]) -> int:
        """How many of these a pass of the target runs for the most tokens in its time, at least one of any."""
        return _most_worth(chances, self.pass_times[1:])

    def num_branches(self, chances: Sequence[float]) -> int:
        """How many of these a step drafts on from for the most tokens in its time; 0 where no step is worth it.

        Args:
            chances: That a token behind each comes to be used, the likeliest first.
        """
        if self.min_used is None:
            num = _most_worth(chances, self.step_times)
            return num if num and sum(chances[:num]) > self.step_times[num - 1] else 0
        rates = [total / time for total, time in zip(accumulate(chances), self.step_times, strict=False)]
        num = max(range(1, len(rates) + 1), key=lambda num: rates[num - 1], default=0)
        return num if num and sum(chances[:num]) >= self.min_used * self.step_times[num - 1] else 0


def _most_worth(tokens: Sequence[float], times: Sequence[float]) -> int:
    """How many of these, in their order, yield the most tokens beyond what their time is worth; at least one."""
    values = [total - time for total, time in zip(accumulate(tokens), times, strict=False)]
    return max(range(len(values)), key=values.__getitem__, default=-1) + 1


class Tree(NamedTuple):
    """Guessed tokens after a text: the one shape of every guess. A chain is a tree without branches.

    buckets: for each token the bucket in which its source counts how often such tokens are accepted.
    parents: of a tree, the index of the node before each token, -1 for the last committed token; None for a chain.
    distributions: the distribution that each token was sampled from; None where each was certain.
    chances: where they are known, the chance that the text comes to run through each node.
    others: where they are known, the next best choices in place of each node, the best first.
    steps: of a tree that a drafter model grew, the nodes that each of its steps drafted on from.
    """

    tokens: TokenIds  # [num_draft]
    buckets: tuple[int, ...] = ()
    parents: tuple[int, ...] | None = None
    distributions: tuple[Distribution, ...] | None = None
    source: str = "none"
    chances: tuple[float, ...] = ()
    others: tuple[tuple[int, ...], ...] = ()
    steps: tuple[int, ...] = ()

    @property
    def above(self) -> tuple[int, ...]:
        """The parents, of a chain too."""
        return tuple(range(-1, len(self.tokens) - 1)) if self.parents is None else self.parents

    def cut(self, num_tokens: int) -> "Tree":
        """The first num_tokens tokens. Of a tree that is a tree too, since parents come before their children."""
        return self._part(slice(num_tokens))

    def _part(self, part: slice) -> "Tree":
        return self._replace(
            tokens=self.tokens[part],
            buckets=self.buckets[part],
            parents=self.parents and self.parents[part],
            distributions=self.distributions and self.distributions[part],
            chances=self.chances[part],
            others=self.others[part],
        )

    def after(self, tokens: TokenIds) -> "Tree | None":
        """The likeliest guesses that still serve once the text went on with tokens; None where it left."""
        if self.parents is None:
            if not np.array_equal(self.tokens[: len(tokens)], tokens):
                return None
            return self._part(slice(len(tokens), None))
        node = -1
        for token in tokens.tolist():
            found = next((child for child in self.children(node) if self.tokens[child] == token), None)
            if found is None:
                return None
            node = found
        return self.select(self._first_choices(node))._replace(parents=None)

    def children(self, node: int) -> Iterator[int]:
        """The nodes after a node, -1 for the text, the likeliest first."""
        above, child = self.above, node
        try:
            while True:
                child = above.index(node, child + 1)
                yield child
        except ValueError:  # there is no further one
            return

    def trunk(self) -> "Tree":
        """The chain that a draft begins with, without the nodes beside it."""
        if self.parents is None:
            return self
        length = sum(takewhile(bool, (parent == node - 1 for node, parent in enumerate(self.parents))))
        return self.cut(length)._replace(parents=None)

    @property
    def depths(self) -> list[int]:
        """How many tokens after the text each node is, from 1."""
        found: list[int] = []
        for parent in self.above:
            found.append(1 if parent < 0 else found[parent] + 1)
        return found

    @property
    def first_choices(self) -> list[int]:
        """The nodes that a drafter holds likeliest, each after the one before it."""
        return self._first_choices(-1)

    def _first_choices(self, node: int) -> list[int]:
        if self.parents is None:
            return list(range(node + 1, len(self.tokens)))
        found = []
        while (child := next(self.children(node), None)) is not None:
            node = child
            found.append(node)
        return found

    def best(self, worth: Worth) -> "Tree":
        """The nodes with which a pass of the target yields the most for its time, the first choices first."""
        # No node is likelier than its parent, which comes before it.
        nodes = sorted(range(len(self.tokens)), key=lambda node: (-self.chances[node], node))
        nodes = nodes[: worth.num_rows([self.chances[node] for node in nodes])]
        trunk = set(self.first_choices)
        nodes.sort(key=lambda node: (node not in trunk, node))
        found = self.select(nodes)
        return found._replace(parents=None) if trunk.issuperset(nodes) else found

    def select(self, nodes: Sequence[int]) -> "Tree":
        """The tree of some nodes in this order, each after its parent."""
        above, places = self.above, {-1: -1} | {node: place for place, node in enumerate(nodes)}
        return self._replace(
            tokens=self.tokens[list(nodes)],
            buckets=_pick(self.buckets, nodes),
            parents=tuple(places.get(above[node], -1) for node in nodes),
            distributions=self.distributions and _pick(self.distributions, nodes),
            chances=_pick(self.chances, nodes),
            others=_pick(self.others, nodes),
        )

    def tips(self, worth: Worth, deepest: int, *, has_branches: bool = True) -> list[int]:
        """The nodes to draft on from in one step, the likeliest first; none where no step is worth its time.

        Args:
            deepest: The most tokens that lie after each other.
            has_branches: Next best choices may be drafted on from; otherwise first choices alone.
        """
        if not self.steps:
            return [-1]
        depths, inner, first_choices = self.depths, set(self.above), self.first_choices
        nodes = [node for node, depth in enumerate(depths) if depth < deepest and node not in inner]
        if not has_branches:
            nodes = [node for node in nodes if node == first_choices[-1]]
        nodes.sort(key=lambda node: (-self.chances[node], node))
        # What the likeliest guess after a node adds to a pass, less its row.
        gains = [self.chances[node] * worth.acceptance(depths[node]) - worth.row for node in nodes]
        return nodes[: worth.num_branches(gains)]

    def grown(self, guesses: "Tree") -> "Tree":
        """This tree with more guesses, whose parents are nodes of both. A chain stays one as long as it can."""
        assert guesses.parents is not None
        is_chain = self.parents is None and guesses.parents == (len(self.tokens) - 1,)
        distributions = (self.distributions or ()) + (guesses.distributions or ())
        return self._replace(
            tokens=np.concatenate([self.tokens, guesses.tokens]),
            buckets=self.buckets + guesses.buckets,
            parents=None if is_chain else self.above + guesses.parents,
            distributions=distributions or None,
            chances=self.chances + guesses.chances,
            others=self.others + guesses.others,
            steps=self.steps + guesses.steps,
        )

    @property
    def run(self) -> list[int]:
        """The nodes that were drafted on from, in the order in which a decoder has run them."""
        return [node for node in dict.fromkeys(self.above) if node >= 0]


def _pick(values: tuple[T, ...], nodes: Sequence[int]) -> tuple[T, ...]:
    """The values of some nodes, where they are known."""
    return tuple(values[node] for node in nodes) if values else ()


NO_DRAFT = Tree(np.zeros(0, np.int32))


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """A policy's request for a draft.

    num_tokens: The most tokens; of a tree in its longest branch.
    min_probability: Stop where the chance that a token is reached falls below this.
    with_distributions: Give the distributions that tokens were sampled from, as rejection sampling needs.
    cancel: Once set, stop between two steps.
    is_ahead: Go on drafting while the target works, if the drafter can.
    min_tokens: How many tokens to wait for, from a drafter that works ahead.
    timeout_s: How long to wait for min_tokens; None to wait until a fault.
    worth: For a tree, or None for a chain. A draft ahead also goes on from other outcomes of the pass that are
        worth it; another one has all guesses of the steps that are, of which the best can be chosen.
    """

    num_tokens: int
    min_probability: float = 0.0
    with_distributions: bool = False
    cancel: Flag = field(default_factory=Flag)
    is_ahead: bool = False
    min_tokens: int = 0
    timeout_s: float | None = None
    worth: Worth | None = None


class LaneStep(NamedTuple):
    """A step of a drafter that works ahead.

    num_rows: Tokens that it drafts, each after another branch.
    shared: The share of its time in which the target worked too.
    """

    taken_s: float
    num_rows: int = 1
    shared: float = 1.0


class DraftAhead(NamedTuple):
    """The progress of a drafter that works ahead.

    draft: Tokens after the text that are ready.
    past: What it had guessed after the text that it was last asked about, as far as it was ready by now.
    running_s: Time of the running step so far; None while the drafter rests.
    steps: Those that ended since the last call, but for steps that read a text from its start.
    unfinished: The step that was running, so far; None if it reads a text from its start.
    shared: The share of the last pass in which the drafter worked; None where no pass was seen.
    """

    draft: Tree
    past: Tree = NO_DRAFT
    running_s: float | None = None
    steps: Sequence[LaneStep] = ()
    unfinished: LaneStep | None = None
    shared: float | None = None


class TokenMask(Protocol):
    """Which tokens may follow, as a pure function of the answer: each row of a pass is after another prefix.

    The rows of the target and of drafter models are masked alike, in several threads at once.
    """

    def __call__(self, answer: TokenIds) -> npt.NDArray[np.bool_] | None:
        """True for each token that may follow the answer so far, [vocab_size]; None where all may."""


class TokenConstraint(Protocol):
    """A form that an answer has to match, such as a JSON schema, and where it has to end.

    All is a pure function of the answer so far, which includes a beginning that was given. It is called in several
    threads at once.
    """

    def bias(self, answer: TokenIds) -> npt.NDArray[np.float32] | None:
        """0 for each token that may follow the answer and −∞ for any other, [vocab_size]; None where all may."""

    def forced(self, answer: TokenIds, max_tokens: int) -> TokenIds:
        """The tokens that follow the answer whatever a model says, at most max_tokens of them."""

    def num_allowed(self, answer: TokenIds, tokens: TokenIds) -> int:
        """How many of tokens may follow the answer, one after the other."""

    def has_ample_room(self, answer: TokenIds) -> bool:
        """True if any token that may follow leaves enough tokens to end the answer."""

    def leaves_room(self, answer: TokenIds, token: int) -> bool:
        """True if the answer can still end within its limit after a token that may follow; way_out's can."""

    def way_out(self, answer: TokenIds) -> int:
        """The next token on the shortest known way to the end of the answer."""


class Sampler(Protocol):
    """The rule that chooses a token from one row of logits."""

    def __call__(self, logits: Row, tokens: TokenIds) -> int:
        """The token that follows tokens, [num_tokens], given its logits, [vocab_size]."""

    def distribution(self, logits: Row, tokens: TokenIds) -> Distribution:
        """The distribution that a call samples from, after all processors."""

    def least(self, logits: Row, tokens: TokenIds, token: int) -> float:
        """A lower bound of a token's probability; 0 where a bound takes as long to find as the probability."""

    def pick(self, distribution: Distribution, position: int) -> int:
        """A token sampled from a distribution with the noise of a position."""

    def uniform(self, position: int) -> float:
        """A number from 0 below 1 from the noise of a position."""

    def ranked(self, logits: Row, tokens: TokenIds, num_tokens: int) -> list[int]:
        """The token that a call gives, then the one that it would give without that token, and so on."""

    def apart(self, domain: int) -> "Sampler":
        """This rule with other noise, independent for each domain."""

    def drafting(self, domain: int) -> "Sampler":
        """The rule to draft with for rejection sampling, with the noise of apart(domain)."""


class DrafterCan(NamedTuple):
    """A drafter's abilities.

    is_free: A draft costs next to nothing, so that it is made before the policy decides.
    trees: It names its next best choices, of which a tree can be grown.
    run_ahead: It can go on while the target verifies.
    num_alternatives: How many alternatives it can draft on from meanwhile.
    tokens_per_step: How many tokens take the time of one.
    max_unread: The most tokens that it reads before it drafts; None where it reads whatever it has not read.
    """

    is_free: bool = True
    trees: bool = False
    run_ahead: bool = False
    num_alternatives: int = 0
    tokens_per_step: int = 1
    max_unread: int | None = None


class Drafter(Protocol):
    """A source of drafts. One that drafts from the text needs a name, and draft; the rest is for others."""

    @property
    def name(self) -> str: ...

    @property
    def can(self) -> DrafterCan:
        return DrafterCan()

    def draft(self, tokens: TokenIds, request: DraftRequest, sampler: Sampler) -> Tree:
        """Guess up to request.num_tokens tokens that follow; fewer when cancelled or without a guess."""

    def learn(self, tokens: TokenIds, draft: Tree, logits: Logits) -> None:
        """Learn from a pass of the target.

        Args:
            tokens: The committed tokens before it.
            draft: The draft that it verified, from any drafter.
            logits: After the last committed token and after each drafted one, [num_draft + 1, vocab_size].
        """
        return

    def draft_ahead(self, tokens: TokenIds, request: DraftRequest, sampler: Sampler) -> DraftAhead:
        """The tokens that are ready, at most request.num_tokens; one that can run ahead goes on from there."""
        return DraftAhead(NO_DRAFT)

    def pause(self) -> None:
        """Stop drafting until the next draft is asked for."""
        return


Acceptance = Callable[[TokenIds, Tree, Logits, Sampler], TokenIds]
"""Committed tokens, a draft, and target logits, [num_draft + 1, vocab_size] → the tokens that are emitted."""


def append(tokens: TokenIds, more: Sequence[int] | TokenIds) -> TokenIds:
    """Tokens and more tokens, as one array."""
    return np.concatenate([tokens, np.asarray(more, np.int32)])
