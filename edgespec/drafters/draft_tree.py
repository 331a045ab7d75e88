"""A tree of guesses that the target verifies in one pass, drafted step by step while a step is worth its time.

A node is worth its row where the chance that the text runs through it is greater than the tokens that the row's
time is worth; so is a step of the drafter where the chances that it adds are. Chances are products along the path,
of the rates at which guesses as sure as these came true, as in EAGLE-2 (Li et al., arXiv:2406.16858) and OPT-Tree
(Wang et al., arXiv:2406.17276); costs are measured. Where rows are dear the tree is a chain.

Knows nothing of models.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from edgespec.drafters.guess import Guess
from edgespec.policy.acceptance_rates import position_bucket
from edgespec.policy.confidence import confidence_class
from edgespec.types import Growth, Tree, TreeWorth


class _Node(NamedTuple):
    """A guess that may be verified and drafted on from.

    parent: Number of the node before it; -1 for the text.
    depth: Its place after the text, from 1.
    chance: That the text comes to run through it.
    confidence: Its class.
    is_trunk: It and all before it are the drafter's first choices.
    """

    token: int
    parent: int
    depth: int
    chance: float
    confidence: int
    is_trunk: bool


class DraftTree:
    """The tree of one draft.

    run: The guesses that were drafted on from, as a decoder's cache holds them.
    """

    def __init__(self, worth: TreeWorth, max_depth: int, *, has_branches: bool = True) -> None:
        """An empty tree.

        Args:
            max_depth: The most tokens that lie after each other.
            has_branches: Next best choices may be drafted on from; otherwise the trunk alone.
        """
        self.run: list[Guess] = []
        self._worth = worth
        self._max_depth = max_depth
        self._has_branches = has_branches
        self._row = (worth.pass_times[-1] - worth.pass_times[0]) / max(1, len(worth.pass_times) - 1)
        self._nodes: list[_Node] = []
        self._open: list[int] = []  # numbers of the nodes that were not drafted on from
        self._places: dict[int, int] = {-1: -1}  # by number, in run
        self._chosen: list[int] = []
        self._rows: list[int] = []  # of each step

    def choose(self) -> list[int]:
        """The places in run to draft on from next, -1 for the text; none where no step is worth its time."""
        self._chosen = self._worth_a_step() if self._rows else [-1]
        for number in self._chosen:
            if number >= 0:
                node = self._nodes[number]
                self._places[number] = len(self.run)
                self.run.append(Guess(node.token, after=self._places[node.parent]))
                self._open.remove(number)
        return [self._places[number] for number in self._chosen]

    def add(self, guesses: Sequence[Guess]) -> None:
        """Add what was drafted after the nodes that were chosen, with its next best choices."""
        self._rows.append(len(guesses))
        for parent, guess in zip(self._chosen, guesses, strict=True):
            reached, depth, is_trunk = 1.0, 1, True
            if parent >= 0:
                reached, depth = self._nodes[parent].chance, self._nodes[parent].depth + 1
                is_trunk = self._nodes[parent].is_trunk
            chance = 1.0
            choices = zip(
                (guess.token, *guess.others), (guess.probability, *guess.other_probabilities), strict=True
            )
            for rank, (token, probability) in enumerate(choices):
                confidence = confidence_class(probability, is_first=rank == 0)
                # A next best choice never counts as likelier than a better one.
                chance = min(chance, self._worth.chances[confidence])
                self._open.append(len(self._nodes))
                self._nodes.append(
                    _Node(token, parent, depth, reached * chance, confidence, is_trunk and rank == 0)
                )

    def draft(self, source: str) -> Tree:
        """The nodes that are worth their rows, the trunk first; the likeliest one in any case."""
        numbers = self._worth_a_row()
        numbers.sort(key=lambda number: (not self._nodes[number].is_trunk, number))
        nodes = [self._nodes[number] for number in numbers]
        places = {-1: -1} | {number: place for place, number in enumerate(numbers)}
        is_chain = all(node.is_trunk for node in nodes)
        return Tree(
            np.array([node.token for node in nodes], np.int32),
            tuple(position_bucket(node.depth - 1) for node in nodes),
            None if is_chain else tuple(places[node.parent] for node in nodes),
            source=source,
            growth=Growth(
                np.array([node.token for node in self._nodes], np.int32),
                tuple(node.parent for node in self._nodes),
                tuple(node.confidence for node in self._nodes),
                tuple(self._rows),
                1 + sum(node.chance for node in nodes),
            ),
        )

    def _worth_a_step(self) -> list[int]:
        """The open nodes to draft on from in one step, the likeliest first."""
        numbers = [number for number in self._open if self._nodes[number].depth < self._max_depth]
        if not self._has_branches:
            numbers = [number for number in numbers if self._nodes[number].is_trunk]
        numbers.sort(key=lambda number: (-self._nodes[number].chance, number))
        gains = [self._gain(self._nodes[number]) for number in numbers]
        values = [total - time for total, time in zip(accumulate(gains), self._worth.step_times, strict=False)]
        best = max(range(len(values)), key=values.__getitem__, default=0)
        return numbers[: best + 1] if values and values[best] > 0 else []

    def _gain(self, node: _Node) -> float:
        """What the likeliest guess after a node adds to a pass, less its row."""
        accepted = self._worth.accepted
        return node.chance * accepted[min(node.depth, len(accepted) - 1)] - self._row

    def _worth_a_row(self) -> list[int]:
        """Numbers of the nodes with which a pass yields the most for its time."""
        # No node is likelier than its parent, which has a lower number.
        numbers = sorted(range(len(self._nodes)), key=lambda number: (-self._nodes[number].chance, number))
        totals = accumulate(self._nodes[number].chance for number in numbers)
        values = [total - time for total, time in zip(totals, self._worth.pass_times[1:], strict=False)]
        return numbers[: max(range(len(values)), key=values.__getitem__) + 1] if values else []
