"""A decoder without weights, for tests and demonstrations: logits hashed from the last tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from edgespec.decoders import Can, Decoder, Pass, Rows
from edgespec.decoding import trees
from edgespec.decoding.cached_prefix import reusable_prefix
from edgespec.errors import require_context
from edgespec.types import Logits, TokenIds, append

_ORDER = 3  # how many tokens a row depends on


@dataclass(slots=True)
class HeldTokens:
    """The tokens that a KV cache would hold; num_fed counts those that it did not hold and that were run."""

    num_fed: int = 0
    _tokens: TokenIds = field(default_factory=lambda: np.zeros(0, np.int32))
    _nodes: TokenIds = field(default_factory=lambda: np.zeros(0, np.int32))
    _parents: tuple[int, ...] = ()

    def feed(self, tokens: TokenIds, num_last: int, context_length: int) -> None:
        """Count a pass for the logits of the last num_last of tokens.

        Raises ContextOverflow: tokens are more than context_length.
        """
        require_context(len(tokens), context_length)
        self._settle(tokens)
        self.num_fed += len(tokens) - reusable_prefix(self._tokens, tokens, num_last)
        self._tokens = tokens

    def feed_tree(
        self, tokens: TokenIds, nodes: TokenIds, parents: Sequence[int], num_last: int | None, context_length: int
    ) -> None:
        """Count a pass over a tree after tokens, for the rows of all its nodes or of the last.

        Raises ContextOverflow: A branch is more than fits after tokens.
        """
        longest = len(tokens) + int(trees.depths(parents).max(initial=0))
        require_context(longest, context_length)
        tree = (self._nodes, self._parents)
        num_held = 0 if num_last is None else trees.num_held(self._tokens, tree, tokens, nodes, parents)
        if num_held and num_last is not None:
            self.num_fed += len(nodes) - min(num_held, len(nodes) - num_last)
        else:
            self._settle(tokens)
            self.num_fed += len(tokens) - reusable_prefix(self._tokens, tokens, 1) + len(nodes)
        self._tokens, self._nodes, self._parents = tokens, nodes, tuple(parents)

    def _settle(self, tokens: TokenIds) -> None:
        """Hold the branch of the last tree that tokens run through."""
        base = len(self._tokens)
        if len(self._nodes) and np.array_equal(self._tokens, tokens[:base]):
            path = trees.matching_path(self._nodes, self._parents, tokens[base:])
            self._tokens = tokens[: base + len(path)]
        self._nodes, self._parents = self._nodes[:0], ()


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
            return Rows(self.tree_logits(given.text, given.tree.tokens, given.parents, given.num_last))
        return Rows(self.logits(given.tokens, given.num_rows))

    def logits(self, tokens: TokenIds, num_last: int) -> Logits:
        self._held.feed(tokens, num_last, self.context_length)
        return np.stack([self._row(tokens[: len(tokens) - i]) for i in reversed(range(num_last))])

    def tree_logits(
        self, tokens: TokenIds, nodes: TokenIds, parents: Sequence[int], num_last: int | None = None
    ) -> Logits:
        self._held.feed_tree(tokens, nodes, parents, num_last, self.context_length)
        first = -1 if num_last is None else len(nodes) - num_last
        paths = [trees.path(parents, node) for node in range(first, len(nodes))]
        return np.stack([self._row(append(tokens, nodes[path])) for path in paths])

    def _row(self, tokens: TokenIds) -> npt.NDArray[np.float32]:
        seed = (self.seed, *(int(token) + 1 for token in tokens[-_ORDER:]))
        row = np.random.default_rng(seed).normal(0.0, 1.5, self.vocab_size)
        if self.near is not None:
            row = self.nearness * self.near._row(tokens) + (1 - self.nearness) * row
        return row.astype(np.float32)
