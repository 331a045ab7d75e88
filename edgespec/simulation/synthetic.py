"""A target and a drafter without weights whose acceptance rate is given, to measure schedules and nothing else.

The next token is hashed from the last ones and their position: texts do not repeat. A row costs microseconds.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import log

import numpy as np
import numpy.typing as npt

from edgespec.decoding.decoder import Can, Decoder, ForwardingDecoder, Pass, Rows, reusable_prefix
from edgespec.decoding.noise import mix_bits
from edgespec.decoding.tree import NO_DRAFT, Tree
from edgespec.errors import require_context
from edgespec.system.clock import VirtualClock
from edgespec.types import Logits, Row, TokenIds

VOCAB_SIZE = 64
WINDOW = 4  # how many tokens a row depends on, in addition to its position
_CERTAIN = 1 - 1e-9
_memoize = lru_cache(maxsize=1 << 12)  # a growing tree needs its rows again with each pass

Context = tuple[int, ...]  # the last tokens, at most WINDOW
RowOf = Callable[[Context, int], Row]  # and how many tokens there are → [VOCAB_SIZE]


@dataclass(slots=True)
class HeldTokens:
    """The tokens that a KV cache would hold; num_fed counts those that it did not hold and that were run."""

    num_fed: int = 0
    _tokens: TokenIds = field(default_factory=lambda: np.zeros(0, np.int32))
    _tree: Tree = NO_DRAFT  # after them

    def feed(self, tokens: TokenIds, num_last: int, context_length: int) -> None:
        """Count a pass for the logits of the last num_last of tokens.

        Raises ContextOverflow: tokens are more than context_length.
        """
        require_context(len(tokens), context_length)
        self._settle(tokens)
        self.num_fed += len(tokens) - reusable_prefix(self._tokens, tokens, num_last)
        self._tokens = tokens

    def feed_tree(self, given: Pass, context_length: int) -> None:
        """Count a pass over a tree; raises ContextOverflow: a branch is more than fits after the text."""
        tokens, num_nodes = given.text, len(given.tree.tokens)
        require_context(len(tokens) + given.tree.depth, context_length)
        if num_held := given.num_held(self._tokens, self._tree):
            self.num_fed += num_nodes - num_held
        else:
            self._settle(tokens)
            self.num_fed += len(tokens) - reusable_prefix(self._tokens, tokens, 1) + num_nodes
        self._tokens, self._tree = tokens, given.tree

    def _settle(self, tokens: TokenIds) -> None:
        """Hold the branch of the last tree that tokens run through."""
        if path := self._tree.path_behind(self._tokens, tokens):
            self._tokens = tokens[: len(self._tokens) + len(path)]
        self._tree = NO_DRAFT


@dataclass
class SyntheticDecoder(Decoder):
    """Rows by a given rule, after a cache that only counts.

    num_fed counts the tokens that a real decoder with a KV cache would have had to run.
    """

    row_of: RowOf
    context_length: int = 1 << 20
    vocab_size: int = VOCAB_SIZE
    _held: HeldTokens = field(default_factory=HeldTokens)

    @property
    def num_fed(self) -> int:
        return self._held.num_fed

    @property
    def can(self) -> Can:
        return Can(trees=True)

    def run(self, given: Pass) -> Rows:
        if given.is_tree:
            return Rows(self._tree_rows(given))
        tokens, num_rows = given.tokens, given.num_rows
        self._held.feed(tokens, num_rows, self.context_length)
        last: list[int] = tokens[max(0, len(tokens) - num_rows - WINDOW) :].tolist()
        ends = range(len(last) - num_rows + 1, len(last) + 1)
        passed = len(tokens) - len(last)
        return Rows(np.stack([self.row_of(tuple(last[max(0, end - WINDOW) : end]), passed + end) for end in ends]))

    def _tree_rows(self, given: Pass) -> Logits:
        self._held.feed_tree(given, self.context_length)
        last, ids, found = given.text[-WINDOW:].tolist(), given.tree.tokens.tolist(), []
        for tip in range(len(ids) - given.num_rows, len(ids)):
            path = given.tree.path(tip)
            context = (*last, *(ids[node] for node in path[-WINDOW:]))[-WINDOW:]
            found.append(self.row_of(context, len(given.text) + len(path)))
        return np.stack(found)


def synthetic_target(seed: int = 0) -> SyntheticDecoder:
    """A random text, each of whose tokens is all but certain given the ones before it."""
    log_probs = _log_probs(1.0)

    def row_of(context: Context, num_tokens: int) -> Row:
        return log_probs[VOCAB_SIZE - _token(seed, context, num_tokens) :][:VOCAB_SIZE]

    return SyntheticDecoder(_memoize(row_of))


def synthetic_drafter(acceptance: float, seed: int = 0, known: Sequence[bool | None] = ()) -> SyntheticDecoder:
    """Drafts the token of `synthetic_target(seed)` with a given chance, independently at each position.

    Where it drafts another token, the target's has rank i in its row with probability a (1 − a)^(i − 1), as though
    each further attempt had that chance; that is what hedging can hope for. Real drafters have a heavier tail. Its
    own probability of rank i is a (1 − a)^(i − 1) too: right on average, and blind to the single token.

    Args:
        acceptance: The chance a, from 0 to 1.
        seed: The target's.
        known: For each position of a text whether its token is the target's, or None for chance.
    """
    assert 0 <= acceptance <= 1
    chance, known, log_probs = float(acceptance), tuple(known), _log_probs(float(acceptance))

    def num_before(context: Context, num_tokens: int) -> int:
        """How many tokens rank before the target's."""
        is_right = known[num_tokens] if num_tokens < len(known) else None
        if is_right:
            return 0
        num_wrong = 0 if chance == 1 else VOCAB_SIZE  # attempts that fail before one succeeds
        if 0 < chance < 1:
            num_wrong = int(log((_hash(2 * seed + 1, context, num_tokens) + 1) / 2**64) / log(1 - chance))
        return min(num_wrong + (is_right is False), VOCAB_SIZE - 1)

    def row_of(context: Context, num_tokens: int) -> Row:
        first = (_token(seed, context, num_tokens) - num_before(context, num_tokens)) % VOCAB_SIZE
        return log_probs[VOCAB_SIZE - first :][:VOCAB_SIZE]

    return SyntheticDecoder(_memoize(row_of))


def _log_probs(chance: float) -> npt.NDArray[np.float32]:
    """Log-probabilities by rank, twice, so that a slice of them begins at any rank."""
    base = np.arange(VOCAB_SIZE) * log(1 - min(max(chance, 1e-6), _CERTAIN))
    return np.tile(base.astype(np.float32), 2)


def _token(seed: int, context: Context, num_tokens: int) -> int:
    return _hash(2 * seed, context, num_tokens) % VOCAB_SIZE


def _hash(seed: int, context: Context, num_tokens: int) -> int:
    """64 bits of tokens and position."""
    key = seed << 20 | num_tokens
    for token in context:
        key = key << 6 | token
    return mix_bits(mix_bits(key))


Pace = Callable[[int, int], float]
"""Tokens that a pass runs (those that the cache does not hold), and the rows it returns → seconds."""


class PacedDecoder(ForwardingDecoder):
    """Another decoder's logits, at the pace of a device in virtual time."""

    def __init__(self, decoder: Decoder, pace: Pace, clock: VirtualClock) -> None:
        super().__init__(decoder)
        self._pace, self._clock = pace, clock

    def run(self, given: Pass) -> Rows:
        fed = self._decoder.num_fed
        rows = self._decoder.run(given)
        self._clock.sleep(self._pace(self._decoder.num_fed - fed, given.num_rows))
        return rows
