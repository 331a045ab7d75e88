"""Lookahead decoding (Fu et al., arXiv:2402.02057): the target drafts for itself, in the rows beside its own.

Each pass verifies n-grams that were seen to begin with the last token, and runs a window of guesses at later
places, which gets right line by line as in a Jacobi iteration and yields new n-grams. Both are one tree. Knows
nothing of what it costs but what fitting() is told.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from edgespec.costs import PassCosts
from edgespec.types import Ask, Draft, Logits, Sampler, TokenIds

_WINDOW_CLASS = 16  # evidence of the window's nodes; guesses have 0 … 15


class Window(NamedTuple):
    """num_columns places ahead (W), n-grams of size tokens (N), at most num_guesses verified in a pass (G).

    Jacobi decoding is size 2.
    """

    num_columns: int
    size: int
    num_guesses: int

    @property
    def width(self) -> int:
        """The most tokens of a pass."""
        return (self.size - 1) * (self.num_columns + self.num_guesses)

    @property
    def depth(self) -> int:
        """Of its deepest node, behind the last committed token."""
        return max(self.num_columns + self.size - 3, self.size - 1)

    def with_guesses_of(self, num_tokens: int) -> "Window":
        """With guesses of so many tokens, and no more columns than lie within them."""
        return self._replace(num_columns=min(self.num_columns, 2), size=num_tokens + 1)


# Tokens a pass on the text that each served best of seven (docs/log.md, 2026-11-21).
_YIELDS = {Window(3, 3, 2): 2.15, Window(5, 3, 5): 2.03, Window(7, 4, 7): 2.55}
SMALLEST = min(_YIELDS, key=lambda window: window.width)


def fitting(costs: PassCosts) -> Window | None:
    """The window with the most to gain where passes cost so much; None where even its best text would not pay."""
    gains = {window: tokens / costs.ratio(window.width) for window, tokens in _YIELDS.items()}
    best = max(gains, key=gains.__getitem__)
    return best if gains[best] > 1.0 else None


@dataclass(slots=True)
class NgramPool:
    """The n-grams seen last behind each token, the latest last, and how often each was seen."""

    num_kept: int  # a token
    _tails: dict[int, dict[tuple[int, ...], int]] = field(default_factory=dict)

    def add(self, ngram: Sequence[int]) -> None:
        first, *rest = map(int, ngram)
        tails = self._tails.setdefault(first, {})
        tails[tuple(rest)] = tails.pop(tuple(rest), 0) + 1
        if len(tails) > self.num_kept:
            del tails[next(iter(tails))]

    def behind(self, token: int) -> list[tuple[tuple[int, ...], int]]:
        """Tails and how often they were seen, the latest first."""
        return list(self._tails.get(token, {}).items())[::-1]


@dataclass(slots=True)
class _Nodes:
    """A tree in the making."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    evidence: list[int] = field(default_factory=list)
    _children: dict[tuple[int, int], int] = field(default_factory=dict)

    def add(self, token: int, parent: int, evidence: int) -> int:
        self.tokens.append(token)
        self.parents.append(parent)
        self.evidence.append(evidence)
        return len(self.tokens) - 1

    def add_guess(self, tail: Sequence[int], num_seen: int) -> None:
        """A branch from the root, over the nodes that it shares with guesses before it."""
        node = -1
        for depth, token in enumerate(tail):
            key = (node, token)
            if key not in self._children:
                self._children[key] = self.add(token, node, guess_class(depth, num_seen))
            node = self._children[key]


def guess_class(depth: int, num_seen: int) -> int:
    """The evidence for a guessed token: how deep it lies, and how often its n-gram was seen."""
    return 4 * min(depth, 3) + min(num_seen - 1, 3)


@dataclass(slots=True)
class Lookahead:
    """Drafts of one answer. A draft is run whole or not at all, and what is not run teaches nothing.

    Column i of level l is a guess at the token i + l places behind the last committed one, made behind column i of
    the levels above; level 0 is a chain, whose column 0 is that token itself. The row behind the lowest level is
    the next level: with those above it, an n-gram a column.
    """

    window: Window
    name: str = "lookahead"
    is_free: bool = True
    _pool: NgramPool = field(init=False)
    _levels: list[list[int]] = field(init=False)
    _num_read: int = field(init=False, default=0)  # tokens of the text whose n-grams are pooled
    _position: int = field(init=False, default=0)  # how many tokens were committed where the window lies
    _lowest: list[int] = field(init=False, default_factory=list)  # rows behind the lowest level of the last draft
    _rng: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self._pool = NgramPool(self.window.num_guesses)
        self._rng = np.random.default_rng(0)
        self._levels = [[] for _ in range(self.window.size - 1)]

    def draft(self, tokens: TokenIds, ask: Ask, sampler: Sampler) -> Draft:
        """A tree: what may follow, then the window; no deeper than ask.num_tokens."""
        self._read(tokens)
        self._align(tokens)
        nodes = _Nodes()
        for tail, num_seen in self._pool.behind(int(tokens[-1])):
            nodes.add_guess(tail[: ask.num_tokens], num_seen)
        self._add_window(nodes, ask.num_tokens)
        return Draft(
            np.array(nodes.tokens, np.int32), tuple(nodes.evidence), tuple(nodes.parents), source=self.name
        )

    def learn(self, tokens: TokenIds, draft: Draft, logits: Logits) -> None:
        if draft.source != self.name or not self._lowest:
            return
        latest = logits[self._lowest].argmax(axis=1).tolist()
        self._levels[0][0] = int(tokens[-1])
        for ngram in zip(*self._levels, latest, strict=True):
            self._pool.add(ngram)
        # Each level comes up by one, and a token nearer: what stood at a place still does.
        self._levels = [*self._levels[1:], latest]
        self._position += 1
        self._lowest = []

    def _add_window(self, nodes: _Nodes, deepest: int) -> None:
        num_columns, size, _ = self.window
        above = [-1]  # the node of each column, one level up
        for column in range(1, min(num_columns, deepest + 1)):
            above.append(nodes.add(self._levels[0][column], above[-1], _WINDOW_CLASS))
        for number in range(1, size - 1):
            fitting = above[: max(0, deepest - number + 1)]
            level = self._levels[number]
            above = [nodes.add(level[i], parent, _WINDOW_CLASS) for i, parent in enumerate(fitting)]
        self._lowest = [node + 1 for node in above] if len(above) == num_columns else []

    def _read(self, tokens: TokenIds) -> None:
        """Pool the n-grams of the text that came since."""
        size = self.window.size
        for end in range(max(size, self._num_read + 1), len(tokens) + 1):
            self._pool.add(tokens[end - size : end].tolist())
        self._num_read = len(tokens)

    def _align(self, tokens: TokenIds) -> None:
        """Leave the columns behind that the text has reached, and begin new ones with tokens of the text."""
        num_passed = max(0, len(tokens) - self._position)
        for level in self._levels:
            del level[:num_passed]
            num_new = self.window.num_columns - len(level)
            level += self._rng.choice(tokens, num_new).tolist()
        self._position = len(tokens)
