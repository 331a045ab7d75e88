"""The tree of guesses that a lane grows while the target verifies, and which of its branches are worth a row.

An outcome of a pass is how many tokens are accepted, and which token the target puts after them. The likeliest
are the drafter's own next choices, for drafter and target share their noise. Each may be drafted on from, with a
row of the drafter's step (Kumar et al., 2026, arXiv:2603.03251). A step has the rows that yield the most tokens
that come to be used in the time that it takes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from heapq import nlargest
from typing import NamedTuple

import numpy as np

from edgespec.drafters.guess import Guess
from edgespec.policy.draft_model import UNKNOWN_WORTH
from edgespec.policy.limits import MAX_AHEAD_TOKENS
from edgespec.types import Missed, TokenIds, Worth

_TYPICAL_DRAFT = 2


class Step(NamedTuple):
    """Guesses, each after an earlier one.

    num_rows: Rows of the pass that they took; 0 if they took none.
    is_timed: The pass read no more of the text than was emitted since the last one.
    text: From here on guesses lie after this text, and earlier ones are void; None for the text as it was.
    """

    guesses: Sequence[Guess]
    num_rows: int = 1
    is_timed: bool = True
    text: TokenIds | None = None


def typical_branching(row_costs: Sequence[float]) -> tuple[int, float]:
    """The rows of a step, and the share of misses whose outcome they cover, where chances are unknown.

    Args:
        row_costs: Time of a step by its rows, over that of a step of one, [max_rows].
    """
    odds = replace(UNKNOWN_WORTH, step_times=row_costs)
    token = Guess(0, others=tuple(range(1, len(odds.others) + 1)))
    branches = Branches(np.zeros(0, np.int32), [token] * (_TYPICAL_DRAFT + 1))
    _, nodes = branches.choose(_TYPICAL_DRAFT, odds, len(row_costs), MAX_AHEAD_TOKENS)
    missed = 1 - odds.reached(_TYPICAL_DRAFT + 1)
    return max(1, len(nodes)), branches.chance_of_alternatives / missed


@dataclass(slots=True)
class GuessTree:
    """Guesses after a text, in the order in which they were given.

    A long text may follow it from end to end, so each guess is added once, and a search continues where the last
    one ended.
    """

    _guesses: list[Guess] = field(default_factory=list)
    _children: dict[int, list[int]] = field(default_factory=dict)
    _last: TokenIds = field(default_factory=lambda: np.zeros(0, np.int32))  # tokens of the last search
    _node: int = -1  # where it ended
    _missed: Missed | None = None
    is_last_guessed: bool | None = None  # of the last token that was searched for; None without a guess

    def add(self, guesses: Sequence[Guess]) -> None:
        for guess in guesses:
            self._children.setdefault(guess.after, []).append(len(self._guesses))
            self._guesses.append(guess)

    def path_after(self, tokens: TokenIds) -> list[Guess] | None:
        """The first guess after tokens, the first after that, and so on; None where tokens leave the tree."""
        start, node, self.is_last_guessed = len(self._last), self._node, None
        if not np.array_equal(tokens[:start], self._last):
            start, node = 0, -1
        new = tokens[start:].tolist()
        for i, token in enumerate(new, 1):
            children: Sequence[int] = self._children.get(node, ())
            self.is_last_guessed = self._guesses[children[0]].token == token if children else None
            if self.is_last_guessed is False:
                self._missed = self._missed or _missed(self._guesses[children[0]], token)
            node = next((child for child in children if self._guesses[child].token == token), -2)
            if node == -2:
                self.is_last_guessed = self.is_last_guessed if i == len(new) else None
                return None
        self._last, self._node = tokens, node
        path = []
        while node in self._children:
            node = self._children[node][0]
            path.append(self._guesses[node])
        return path

    def take_missed(self) -> Missed | None:
        """The first guess since the last call that tokens did not follow, if its alternatives were named."""
        missed, self._missed = self._missed, None
        return missed


def _missed(guess: Guess, token: int) -> Missed | None:
    if not guess.others:
        return None
    is_named = token in guess.others
    return Missed(guess.others.index(token) if is_named else len(guess.others), is_named)


class _Branch(NamedTuple):
    """A guess that may be drafted on from.

    chance: That the text comes to run through it.
    rank: Orders branches of one chance: those that were found first come first.
    guess: Its after counts the nodes that a step has run.
    position: Its place after the text.
    number: Among the guesses that were given; None for an alternative that was not given yet.
    """

    chance: float
    rank: int
    guess: Guess
    position: int
    number: int | None
    is_chain: bool = False


class Branches:
    """A chain of guesses after a text, and what is drafted after other outcomes of the pass that verifies it.

    nodes: The guesses that were drafted on from, as a decoder's cache holds them. A step appends those that it
        runs, so that it runs no others again.
    chain: The likeliest guesses.
    """

    def __init__(self, tokens: TokenIds, chain: Sequence[Guess] = ()) -> None:
        self.tokens = tokens
        self.nodes: list[Guess] = []
        self.chain: list[Guess] = []
        self._numbers: list[int] = []  # of the nodes, among the guesses that were given
        self._given = GuessTree()
        self._num_given = 0
        self._rank = 0
        self._tip = _Branch(1.0, 0, Guess(-1), -1, -1, is_chain=True)  # the end of the chain; at first the text
        self._others: list[_Branch] = []
        self._num_explored = 0  # positions whose alternatives are among the others
        self._chosen: list[_Branch] = []
        self.first = Step([self.extend(guess).guesses[0] for guess in chain], 0, text=tokens)

    def chain_after(self, tokens: TokenIds) -> list[Guess] | None:
        """The guesses after a longer text; None where it leaves the tree."""
        return self._given.path_after(tokens[len(self.tokens) :])

    def extend(self, guess: Guess) -> Step:
        """Put a guess at the end of the chain."""
        self._chosen = [self._tip]
        return self.add([guess], self._run())

    def choose(self, num_verified: int, odds: Worth, max_rows: int, longest: int) -> tuple[Step, list[int]]:
        """The nodes to draft on from, and those alternatives among them that are given with this step.

        Args:
            num_verified: How many tokens of the chain the target verifies.
            longest: The most tokens that lie after each other.
        """
        self._find_alternatives(num_verified, odds)
        self._tip = self._tip._replace(chance=odds.reached(len(self.chain)))
        branches = [branch for branch in (self._tip, *self._others) if branch.position + 1 < longest]
        branches = nlargest(max_rows, branches, key=_by_chance)
        chosen = branches[: odds.num_branches([branch.chance for branch in branches])]
        if not chosen:
            return Step((), 0), []
        ranks = {each.rank for each in chosen}
        self._others = [branch for branch in self._others if branch.rank not in ranks]
        self._chosen, alternatives = [], []
        for branch in chosen:
            if branch.number is None:
                branch = branch._replace(number=self._num_given)
                alternatives.append(self._give(branch.guess))
            self._chosen.append(branch)
        return Step(alternatives, 0), self._run()

    @property
    def chance_of_alternatives(self) -> float:
        """The chance that the text takes one of the alternatives that the next step drafts on from."""
        return sum(branch.chance for branch in self._chosen if not branch.is_chain)

    def add(self, guesses: Sequence[Guess], nodes: Sequence[int], odds: Worth | None = None) -> Step:
        """Add what was drafted after the nodes that were chosen."""
        given = []
        for branch, node, guess in zip(self._chosen, nodes, guesses, strict=True):
            position, guess = branch.position + 1, guess._replace(after=node)
            chance = branch.chance * odds.acceptance(position) if odds else 1.0
            found = self._branch(chance, guess, position, self._num_given, is_chain=branch.is_chain)
            given.append(self._give(guess))
            if branch.is_chain:
                self._tip = found
                self.chain.append(guess)
            else:
                self._others.append(found)
        return Step(given, len(nodes))

    def _find_alternatives(self, num_verified: int, odds: Worth) -> None:
        """Name what else may come after each number of accepted tokens, once the token there is drafted."""
        for position in range(self._num_explored, min(num_verified + 1, len(self.chain))):
            guess = self.chain[position]
            left = odds.reached(position) * (1 - odds.acceptance(position))
            for other, rate in zip(guess.others, odds.others, strict=False):
                alternative = Guess(other, after=guess.after)
                self._others.append(self._branch(left * rate, alternative, position, None))
                left *= 1 - rate
            self._num_explored = position + 1

    def _branch(
        self, chance: float, guess: Guess, position: int, number: int | None, *, is_chain: bool = False
    ) -> _Branch:
        self._rank += 1
        return _Branch(chance, self._rank, guess, position, number, is_chain)

    def _run(self) -> list[int]:
        """Append what was chosen to the nodes; -1 stands for the text."""
        if self._chosen[0].position < 0:
            return [-1]
        first = len(self.nodes)
        for branch in self._chosen:
            assert branch.number is not None
            self.nodes.append(branch.guess)
            self._numbers.append(branch.number)
        return list(range(first, len(self.nodes)))

    def _give(self, guess: Guess) -> Guess:
        """A guess whose after counts the guesses that were given."""
        given = guess._replace(after=self._numbers[guess.after] if guess.after >= 0 else -1)
        self._given.add([given])
        self._num_given += 1
        return given


def _by_chance(branch: _Branch) -> tuple[float, int]:
    return branch.chance, -branch.rank
