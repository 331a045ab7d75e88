"""A decoder without weights: logits hashed from the last tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from double import tree_pass

from edgespec.decoding.decoder import Can, Decoder, Pass, Rows
from edgespec.simulation.synthetic import HeldTokens
from edgespec.types import Logits, TokenIds, append

_ORDER = 3  # how many tokens a row depends on


@dataclass
class TableDecoder(Decoder):
    """A fixed random language: each row is drawn from a seed and the last three tokens.

    near mixes in the rows of another decoder: 0.8 of it agree with that one often, as a good drafter does.
    num_fed counts the tokens that a real decoder with a KV cache would have had to run.
    """

    vocab_size: int
    seed: int
    near: "TableDecoder | None" = None
    nearness: float = 0.8
    context_length: int = 1 << 20
    _held: HeldTokens = field(default_factory=HeldTokens)

    @property
    def num_fed(self) -> int:
        return self._held.num_fed

    @property
    def can(self) -> Can:
        return Can(trees=True)

    def run(self, given: Pass) -> Rows:
        if given.is_tree:
            return Rows(self.tree_logits(given.text, given.tree.tokens, given.tree.above, given.num_last))
        return Rows(self.logits(given.tokens, given.num_rows))

    def logits(self, tokens: TokenIds, num_last: int) -> Logits:
        self._held.feed(tokens, num_last, self.context_length)
        return np.stack([self._row(tokens[: len(tokens) - i]) for i in reversed(range(num_last))])

    def tree_logits(
        self, tokens: TokenIds, nodes: TokenIds, parents: Sequence[int], num_last: int | None = None
    ) -> Logits:
        given = tree_pass(tokens, nodes, parents, num_last)
        self._held.feed_tree(given, self.context_length)
        paths = [given.tree.path(node) for node in range(len(nodes) - given.num_rows, len(nodes))]
        return np.stack([self._row(append(tokens, nodes[path])) for path in paths])

    def _row(self, tokens: TokenIds) -> npt.NDArray[np.float32]:
        row = _random_row(self.vocab_size, self.seed, tuple(tokens[-_ORDER:].tolist()))
        if self.near is not None:
            row = self.nearness * self.near._row(tokens) + (1 - self.nearness) * row
        return row.astype(np.float32)


@lru_cache(1 << 14)
def _random_row(vocab_size: int, seed: int, last: tuple[int, ...]) -> npt.NDArray[np.float64]:
    return np.random.default_rng((seed, *(token + 1 for token in last))).normal(0.0, 1.5, vocab_size)
