"""A target and a drafter without weights whose acceptance is given, to measure schedules and nothing else.

Both are pure functions of their tokens: what follows is hashed from the last tokens and their position, so that
texts neither repeat nor depend on who asks. A row costs microseconds.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import log

import numpy as np
import numpy.typing as npt

from edgespec import trees
from edgespec.errors import ContextOverflow
from edgespec.runtimes.table import HeldTokens
from edgespec.types import Logits, Row, TokenIds

VOCAB_SIZE = 64
WINDOW = 4  # how many tokens a row depends on, besides its position
_MASK = 2**64 - 1
_CERTAIN = 1 - 1e-9

Context = tuple[int, ...]  # the last tokens, at most WINDOW
RowOf = Callable[[Context, int], Row]  # and how many tokens there are → [VOCAB_SIZE]


@dataclass(slots=True)
class SyntheticDecoder:
    """Rows of a given rule behind a cache that only counts.

    num_fed counts the tokens that a real decoder with a KV cache would have had to run.
    """

    row_of: RowOf
    context_length: int = 1 << 20
    vocab_size: int = VOCAB_SIZE
    _held: HeldTokens = field(default_factory=HeldTokens)

    @property
    def num_fed(self) -> int:
        return self._held.num_fed

    def logits(self, tokens: TokenIds, num_last: int) -> Logits:
        if len(tokens) > self.context_length:
            raise ContextOverflow(len(tokens), self.context_length)
        self._held.feed(tokens, num_last)
        last: list[int] = tokens[max(0, len(tokens) - num_last - WINDOW) :].tolist()
        ends = range(len(last) - num_last + 1, len(last) + 1)
        passed = len(tokens) - len(last)
        return np.stack([self.row_of(tuple(last[max(0, end - WINDOW) : end]), passed + end) for end in ends])

    def tree_logits(
        self, tokens: TokenIds, nodes: TokenIds, parents: Sequence[int], num_last: int | None = None
    ) -> Logits:
        longest = len(tokens) + int(trees.depths(parents).max(initial=0))
        if longest > self.context_length:
            raise ContextOverflow(longest, self.context_length)
        self._held.feed_tree(tokens, nodes, parents, num_last)
        contexts: list[tuple[Context, int]] = [(tuple(tokens[-WINDOW:].tolist()), len(tokens))]
        for node, parent in zip(nodes.tolist(), parents, strict=True):
            above, num_tokens = contexts[parent + 1]
            contexts.append(((*above, node)[-WINDOW:], num_tokens + 1))
        return np.stack([self.row_of(*context) for context in contexts[-(num_last or len(contexts)) :]])


def synthetic_target(seed: int = 0) -> SyntheticDecoder:
    """A random text, of which each token is all but certain given those before it."""
    return SyntheticDecoder(_remembered(_TargetRows(seed)))


def synthetic_drafter(acceptance: float, seed: int = 0, known: Sequence[bool | None] = ()) -> SyntheticDecoder:
    """Says the token of `synthetic_target(seed)` with a given chance, at each position apart from every other.

    Where it says another token, the target's has rank i in its row with probability a (1 − a)^(i − 1), as though
    the chance were the same at each further attempt; that is what hedging can hope for. Real drafters have a
    heavier tail. Its own probabilities say the same: rank i has a (1 − a)^(i − 1), so that it knows what its
    tokens are worth on the whole, and nothing of the single one.

    Args:
        acceptance: The chance a, from 0 to 1.
        seed: The target's.
        known: For each position of a text whether it says the target's token there, or None for chance.
    """
    assert 0 <= acceptance <= 1
    return SyntheticDecoder(_remembered(_DrafterRows(seed, float(acceptance), tuple(known))))


def _remembered(row_of: RowOf) -> RowOf:
    """A growing tree asks for its rows once more with each pass."""
    return lru_cache(maxsize=1 << 12)(row_of)


class _TargetRows:
    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._ranked = _ranked(1.0)

    def __call__(self, context: Context, num_tokens: int) -> Row:
        return self._ranked[VOCAB_SIZE - _token(self._seed, context, num_tokens) :][:VOCAB_SIZE]


class _DrafterRows:
    def __init__(self, seed: int, chance: float, known: tuple[bool | None, ...]) -> None:
        self._seed = seed
        self._chance = chance
        self._known = known
        self._ranked = _ranked(chance)

    def __call__(self, context: Context, num_tokens: int) -> Row:
        said = _token(self._seed, context, num_tokens)
        first = (said - self._num_before(context, num_tokens)) % VOCAB_SIZE
        return self._ranked[VOCAB_SIZE - first :][:VOCAB_SIZE]

    def _num_before(self, context: Context, num_tokens: int) -> int:
        """How many tokens stand before the target's."""
        is_right = self._known[num_tokens] if num_tokens < len(self._known) else None
        if is_right:
            return 0
        num_wrong = _num_wrong(_hash(2 * self._seed + 1, context, num_tokens), self._chance)
        return min(num_wrong + (is_right is False), VOCAB_SIZE - 1)


def _ranked(chance: float) -> npt.NDArray[np.float32]:
    """Log-probabilities by rank, twice, so that a slice of them begins at any rank."""
    base = np.arange(VOCAB_SIZE) * log(1 - min(max(chance, 1e-6), _CERTAIN))
    return np.tile(base.astype(np.float32), 2)


def _token(seed: int, context: Context, num_tokens: int) -> int:
    return _hash(2 * seed, context, num_tokens) % VOCAB_SIZE


def _num_wrong(bits: int, chance: float) -> int:
    """Attempts that fail before one succeeds, by 64 random bits."""
    if chance >= 1.0:
        return 0
    if chance <= 0.0:
        return VOCAB_SIZE
    return int(log((bits + 1) / 2**64) / log(1 - chance))


def _hash(seed: int, context: Context, num_tokens: int) -> int:
    """64 bits by the SplitMix64 generator's step (Steele et al., 2014), of all that counts as one number."""
    key = seed << 20 | num_tokens
    for token in context:
        key = key << 6 | token
    return _mixed(_mixed(key))


def _mixed(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK
    return x ^ (x >> 31)
