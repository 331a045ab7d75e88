"""Lookahead decoding (Fu et al., arXiv:2402.02057): the target drafts for itself, in spare rows of its passes.

Each pass verifies earlier n-grams that begin with the last token, and runs a window of guesses at later
positions, which becomes right level by level as in a Jacobi iteration and yields new n-grams. Both are one tree.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from edgespec.decoding.tree import Tree
from edgespec.draft.acceptance_rates import Key, runs_of
from edgespec.draft.costs import PassCosts
from edgespec.draft.drafter import Drafter, DraftRequest
from edgespec.types import Logits, Sampler, TokenIds

NAME = "lookahead"
_FIRST_WINDOW_BUCKET = 16  # nodes of windows have this one and later ones, a window each; guesses have 0 … 15
# Passes are judged by so many tokens before what they yielded counts.
_LEAST_JUDGED = 100.0


class Window(NamedTuple):
    """num_columns positions ahead (W), n-grams of size tokens (N), at most num_guesses verified in a pass (G).

    With size 2 it is Jacobi decoding.
    """

    num_columns: int
    size: int
    num_guesses: int

    @property
    def width(self) -> int:
        """The most tokens of a pass."""
        return (self.size - 1) * (self.num_columns + self.num_guesses)

    def with_guesses_of(self, num_tokens: int) -> "Window":
        """A window with guesses of num_tokens tokens, and no more columns than lie within them."""
        return self._replace(num_columns=min(self.num_columns, 2), size=num_tokens + 1)


# Tokens a pass that three of four texts gave at least, of 13 with two models, 9 for the widest
# (docs/log/drafters.md). Lookahead is opened where these pay, and then used where the text lets it pay.
_YIELDS = {Window(3, 3, 2): 1.36, Window(5, 3, 5): 1.44, Window(7, 4, 7): 1.51}
SMALLEST = min(_YIELDS, key=lambda window: window.width)


def best_window(costs: PassCosts, counts: Mapping[Key, tuple[float, float]] | None = None) -> Window | None:
    """The window that gains most at these costs of passes; None where none pays.

    counts: Tokens accepted and judged in earlier answers. A window that gave more there counts as that; one that
        gave less may have met other texts.
    """
    gains = {}
    for window, tokens in _YIELDS.items():
        accepted, judged = (counts or {}).get((runs_of(NAME), window_bucket(window)), (0.0, 0.0))
        past = 1.0 / (1.0 - accepted / judged) if judged >= _LEAST_JUDGED else 1.0
        gains[window] = max(tokens, past) / costs.ratio(window.width)
    best = max(gains, key=gains.__getitem__)
    return best if gains[best] > 1.0 else None


def window_bucket(window: Window) -> int:
    """The bucket of the nodes of a window; windows of other sizes share one."""
    known = list(_YIELDS)
    return _FIRST_WINDOW_BUCKET + (known.index(window) if window in known else len(known))


@dataclass(slots=True)
class NgramTable:
    """The latest n-grams that begin with each token, the latest last, with their counts."""

    max_tails: int  # N-grams of one token
    _tails: dict[int, dict[tuple[int, ...], int]] = field(default_factory=dict)

    def add(self, ngram: Sequence[int]) -> None:
        first, *rest = map(int, ngram)
        tails = self._tails.setdefault(first, {})
        tails[tuple(rest)] = tails.pop(tuple(rest), 0) + 1
        if len(tails) > self.max_tails:
            del tails[next(iter(tails))]

    def continuations(self, token: int) -> list[tuple[tuple[int, ...], int]]:
        """The continuations of a token with their counts, the latest first."""
        return list(self._tails.get(token, {}).items())[::-1]


@dataclass(slots=True)
class _Nodes:
    """A tree under construction."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    buckets: list[int] = field(default_factory=list)
    _children: dict[tuple[int, int], int] = field(default_factory=dict)

    def add(self, token: int, parent: int, bucket: int) -> int:
        self.tokens.append(token)
        self.parents.append(parent)
        self.buckets.append(bucket)
        return len(self.tokens) - 1

    def add_guess(self, tail: Sequence[int], num_seen: int) -> None:
        """Add a branch from the root, sharing nodes with earlier guesses."""
        node = -1
        for depth, token in enumerate(tail):
            key = (node, token)
            if key not in self._children:
                bucket = 4 * min(depth, 3) + min(num_seen - 1, 3)  # by depth and the count of the n-gram
                self._children[key] = self.add(token, node, bucket)
            node = self._children[key]


@dataclass(slots=True)
class Lookahead(Drafter):
    """A drafter for one answer. A draft is run whole or not at all, and only a draft that is run teaches anything.

    Column i of level l is a guess at the token i + l positions after the last committed one, made after column i
    of the levels above; level 0 is a chain, whose column 0 is the last committed token. The rows after the lowest
    level give the next level, and so an n-gram for each column.
    """

    window: Window
    name: str = NAME
    _ngrams: NgramTable = field(init=False)
    _levels: list[list[int]] = field(init=False)
    _num_read: int = field(init=False, default=0)  # tokens of the text whose n-grams are in the table
    _position: int = field(init=False, default=0)  # committed tokens before the window
    _lowest: list[int] = field(init=False, default_factory=list)  # rows after the lowest level of the last draft
    _rng: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self._ngrams = NgramTable(self.window.num_guesses)
        self._rng = np.random.default_rng(0)
        self._levels = [[] for _ in range(self.window.size - 1)]

    def draft(self, tokens: TokenIds, request: DraftRequest, sampler: Sampler) -> Tree:
        """A tree of guesses, then the window; no deeper than request.num_tokens."""
        self._read(tokens)
        self._align(tokens)
        nodes = _Nodes()
        for tail, num_seen in self._ngrams.continuations(int(tokens[-1])):
            nodes.add_guess(tail[: request.num_tokens], num_seen)
        self._add_window(nodes, request.num_tokens)
        return Tree(np.array(nodes.tokens, np.int32), tuple(nodes.buckets), tuple(nodes.parents), source=self.name)

    def learn(self, tokens: TokenIds, draft: Tree, logits: Logits) -> None:
        if draft.source != self.name or not self._lowest:
            return
        latest = [int(logits[row].argmax()) for row in self._lowest]
        self._levels[0][0] = int(tokens[-1])
        for ngram in zip(*self._levels, latest, strict=True):
            self._ngrams.add(ngram)
        # Each level moves up by one, and a token nearer, so that every guess is still for its position.
        self._levels = [*self._levels[1:], latest]
        self._position += 1
        self._lowest = []

    def _add_window(self, nodes: _Nodes, deepest: int) -> None:
        num_columns, size, _ = self.window
        bucket = window_bucket(self.window)
        above = [-1]  # the node of each column, one level up
        for column in range(1, min(num_columns, deepest + 1)):
            above.append(nodes.add(self._levels[0][column], above[-1], bucket))
        for number in range(1, size - 1):
            level, parents = self._levels[number], above[: max(0, deepest - number + 1)]
            above = [nodes.add(level[i], parent, bucket) for i, parent in enumerate(parents)]
        self._lowest = [node + 1 for node in above] if len(above) == num_columns else []

    def _read(self, tokens: TokenIds) -> None:
        """Add the n-grams of the text's new tokens."""
        size = self.window.size
        for end in range(max(size, self._num_read + 1), len(tokens) + 1):
            self._ngrams.add(tokens[end - size : end].tolist())
        self._num_read = len(tokens)

    def _align(self, tokens: TokenIds) -> None:
        """Drop the columns that the text has reached, and begin new ones with tokens of the text."""
        num_passed = max(0, len(tokens) - self._position)
        for level in self._levels:
            del level[:num_passed]
            num_new = self.window.num_columns - len(level)
            level += self._rng.choice(tokens, num_new).tolist()
        self._position = len(tokens)
