"""The tree of guessed tokens, and what its nodes are worth. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile
from math import prod
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from edgespec.types import Distribution, TokenIds

T = TypeVar("T")


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

    buckets: for each token a small whole number; tokens with one number are accepted about equally often, as is
        counted for each source. 0 for all where nothing tells them apart.
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
        found = [-1, *self.matching(tokens)]
        return (
            self.select(self.first_choices(found[-1]))._replace(parents=None) if len(found) > len(tokens) else None
        )

    def matching(self, tokens: TokenIds) -> list[int]:
        """The nodes from the text down that agree with tokens."""
        found: list[int] = []
        for token in tokens.tolist():
            children = self.children(found[-1] if found else -1)
            child = next((child for child in children if self.tokens[child] == token), None)
            if child is None:
                break
            found.append(child)
        return found

    def judged(self, tokens: TokenIds) -> list[tuple[int, bool]]:
        """The children of all nodes that agree with tokens, and whether each child agrees too."""
        wanted = dict(
            zip([-1, *self.matching(tokens)], tokens, strict=False)
        )  # the token that follows each of them
        above = enumerate(self.above)
        return [(node, bool(self.tokens[node] == wanted[parent])) for node, parent in above if parent in wanted]

    def path_behind(self, held: TokenIds, tokens: TokenIds, *, can_move: bool = True) -> list[int]:
        """The nodes that tokens run through, where this tree fills the places of a cache after tokens held.

        Args:
            can_move: Those in other places than their path's count too.
        """
        if not len(self.tokens) or not np.array_equal(held, tokens[: len(held)]):
            return []
        path = self.matching(tokens[len(held) :])
        in_place = takewhile(bool, (node == place for place, node in enumerate(path)))
        return path if can_move else path[: sum(in_place)]

    def path(self, node: int) -> list[int]:
        """The nodes from the text down to a node, the node included; none for -1."""
        above, found = self.above, list[int]()
        while node >= 0:
            found.append(node)
            node = above[node]
        return found[::-1]

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
    def depth(self) -> int:
        """How many tokens lie after each other at the most."""
        return len(self.tokens) if self.parents is None else max(self.depths, default=0)

    def first_choices(self, node: int = -1) -> list[int]:
        """The nodes after a node that a drafter holds likeliest, each after the one before it."""
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
        trunk = set(self.first_choices())
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
        depths, inner, first_choices = self.depths, set(self.above), self.first_choices()
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
    def nodes_run(self) -> list[int]:
        """The nodes that were drafted on from, in the order in which a decoder has run them."""
        return [node for node in dict.fromkeys(self.above) if node >= 0]


def _pick(values: tuple[T, ...], nodes: Sequence[int]) -> tuple[T, ...]:
    """The values of some nodes, where they are known."""
    return tuple(values[node] for node in nodes) if values else ()


NO_DRAFT = Tree(np.zeros(0, np.int32))


def attention_mask(parents: Sequence[int]) -> npt.NDArray[np.bool_]:
    """A mask in which each row attends to itself and its ancestors, [num_nodes + 1, num_nodes + 1].

    Row 0 is the last committed token, to which all rows attend.
    """
    mask = np.eye(len(parents) + 1, dtype=bool)
    mask[:, 0] = True
    for node, parent in enumerate(parents):
        mask[node + 1] |= mask[parent + 1]
    return mask
