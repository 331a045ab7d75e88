"""Arrays and drafts that cross module boundaries, and the protocols of samplers and drafters."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from math import prod
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from edgespec.system.cancel import Flag

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


class Growth(NamedTuple):
    """The whole tree of guesses of which a drafter model's draft is a part.

    parents: The index of the guess before each, -1 for the last committed token.
    confidence: The class of each guess by how sure the drafter was of it.
    num_rows: Of each step of the drafter, the guesses that it drafted on from.
    expected: Tokens that a pass over the draft is expected to yield.
    """

    tokens: TokenIds  # [num_guesses]
    parents: tuple[int, ...]
    confidence: tuple[int, ...]
    num_rows: tuple[int, ...]
    expected: float


class Tree(NamedTuple):
    """Guessed tokens.

    buckets: for each token the bucket in which its source counts how often such tokens are accepted.
    parents: of a tree, the index of the node before each token, -1 for the last committed token; None for a chain.
    distributions: the distribution that each token was sampled from; None where each was certain.
    growth: of a draft that a request for a tree gave; None of others, and of a part of one.
    """

    tokens: TokenIds  # [num_draft]
    buckets: tuple[int, ...] = ()
    parents: tuple[int, ...] | None = None
    distributions: tuple[Distribution, ...] | None = None
    source: str = "none"
    growth: Growth | None = None

    def cut(self, num_tokens: int) -> "Tree":
        """The first num_tokens tokens. Of a tree that is a tree too, since parents come before their children."""
        return self._replace(
            tokens=self.tokens[:num_tokens],
            buckets=self.buckets[:num_tokens],
            parents=self.parents and self.parents[:num_tokens],
            distributions=self.distributions and self.distributions[:num_tokens],
            growth=None,
        )

    def trunk(self) -> "Tree":
        """The chain that a draft begins with, without the nodes beside it."""
        if self.parents is None:
            return self
        length = sum(takewhile(bool, (parent == node - 1 for node, parent in enumerate(self.parents))))
        return self.cut(length)._replace(parents=None)


NO_DRAFT = Tree(np.zeros(0, np.int32))


@dataclass(frozen=True, slots=True)
class Branching:
    """What branches of a tree of guesses are worth to a drafter, and what they cost it.

    accepted: The chance that a drafted token is accepted if all before it were, by position; the last counts for
        all positions after it.
    alternatives: Where a guess is wrong, the chance that the next best choice is right, then that the one after
        that is if this one is not either, and so on.
    row_costs: Time of a step of the drafter by its rows, over that of a step of one; as many as a step may have.
    min_used: A step is done where its tokens are used with more than this chance in all, for each time of a step.
    """

    accepted: Sequence[float]
    alternatives: Sequence[float]
    row_costs: Sequence[float]
    min_used: float = 0.0

    def acceptance(self, position: int) -> float:
        return self.accepted[min(position, len(self.accepted) - 1)]

    def reached(self, position: int) -> float:
        """The chance that all tokens before a position are accepted."""
        known = len(self.accepted)
        return prod(self.accepted[:position]) * self.accepted[-1] ** max(0, position - known)


@dataclass(frozen=True, slots=True)
class TreeWorth:
    """What nodes of a tree of guesses are worth to a pass, and what they cost, both in tokens.

    accepted: The chance that a drafted token is accepted if all before it were, by position; the last counts for
        all positions after it.
    chances: The chance that a guess comes true if those before it do, by its class of confidence.
    pass_times: Of the target's passes by width, from 1 on, as wide as a pass may be.
    step_times: Of the drafter's steps by the branches that they draft on from, from 1 on.
    chain_length: The most tokens of a drafter that drafts chains alone.
    """

    accepted: Sequence[float]
    chances: Sequence[float]
    pass_times: Sequence[float]
    step_times: Sequence[float]
    chain_length: int


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
    branching: Also draft on from other outcomes of the pass that are worth it; None for the likeliest alone.
    num_others: How many alternatives to name for each token.
    tree: Draft all nodes that are worth it instead, if the drafter names alternatives; None for a chain.
    """

    num_tokens: int
    min_probability: float = 0.0
    with_distributions: bool = False
    cancel: Flag = field(default_factory=Flag)
    is_ahead: bool = False
    min_tokens: int = 0
    timeout_s: float | None = None
    branching: Branching | None = None
    num_others: int = 0
    tree: TreeWorth | None = None


class DraftStep(NamedTuple):
    """A step of a drafter that works ahead.

    num_rows: Tokens that it drafts, each after another branch.
    beside: The share of its time in which the target worked too.
    """

    taken_s: float
    num_rows: int = 1
    beside: float = 1.0


class Missed(NamedTuple):
    """A guess that the text did not follow: how many alternatives were named before the token that came.

    is_named: The token was one of them.
    """

    num_before: int
    is_named: bool


class Foreseen(NamedTuple):
    """A guess for the token that the target put after a draft all of which it accepted.

    position: Its place after the text, which is the length of the draft.
    is_right: It was the target's own token.
    """

    position: int
    is_right: bool


class DraftAhead(NamedTuple):
    """The progress of a drafter that works ahead.

    draft: Tokens after the text that are ready.
    running_s: Time of the running step so far; None while the drafter rests.
    steps: Those that ended since the last call, but for steps that read a text from its start.
    unfinished: The running step so far; None if it reads a text from its start.
    beside: The share of the last pass in which the drafter worked; None where no pass was seen.
    missed: The guess at which the text left the likeliest ones since the last call; None if it did not.
    foreseen: The guess for the token that the target put after a draft that was accepted whole; None without one.
    """

    draft: Tree
    running_s: float | None = None
    steps: Sequence[DraftStep] = ()
    unfinished: DraftStep | None = None
    beside: float | None = None
    missed: Missed | None = None
    foreseen: Foreseen | None = None


class TokenMask(Protocol):
    """Which tokens may follow, as a pure function of the answer: each row of a pass is after another prefix.

    The rows of the target and of drafter models are masked alike, in several threads at once.
    """

    def __call__(self, answer: TokenIds) -> npt.NDArray[np.bool_] | None:
        """Whether each token may follow the answer so far, [vocab_size]; None where all may."""


class TokenConstraint(Protocol):
    """What an answer has to match, such as a JSON schema, and where it has to end.

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
        """Whether any token that may follow leaves enough tokens to end the answer."""

    def leaves_room(self, answer: TokenIds, token: int) -> bool:
        """Whether the answer can still end within its limit after a token that may follow; way_out's can."""

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


class Drafter(Protocol):
    """A source of drafts. The last four members are for drafters that work while the target works."""

    @property
    def name(self) -> str: ...

    @property
    def is_free(self) -> bool:
        """Whether a draft costs next to nothing, so that it is made before the policy decides."""
        return True

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

    @property
    def can_run_ahead(self) -> bool:
        """Whether the drafter can go on while the target verifies."""
        return False

    @property
    def num_alternatives(self) -> int:
        """How many alternatives it can draft on from while the target verifies."""
        return 0

    @property
    def tokens_per_step(self) -> int:
        """How many tokens take the time of one."""
        return 1

    @property
    def max_unread(self) -> int | None:
        """The most tokens that it reads before it drafts; None where it reads whatever it has not read."""
        return None

    def draft_ahead(self, tokens: TokenIds, request: DraftRequest, sampler: Sampler) -> DraftAhead:
        """The tokens that are ready, at most request.num_tokens; the drafter goes on from there."""
        return DraftAhead(NO_DRAFT)

    def pause(self) -> None:
        """Stop drafting until the next draft is asked for."""
        return


Acceptance = Callable[[TokenIds, Tree, Logits, Sampler], TokenIds]
"""Committed tokens, a draft, and target logits, [num_draft + 1, vocab_size] → the tokens that are emitted."""


def append(tokens: TokenIds, more: Sequence[int] | TokenIds) -> TokenIds:
    """Tokens and more tokens, as one array."""
    return np.concatenate([tokens, np.asarray(more, np.int32)])
