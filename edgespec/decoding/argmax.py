"""Greedy decoding without copying logits, from a target that finds the likeliest token on its own device.

The device gives one id for each row, 8 bytes; the row that is read gives every other token no chance. So sampling,
acceptance and learning need no second way.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from edgespec.decoding.sampling import SamplingParams
from edgespec.types import (
    ArgmaxDecoder,
    ArgmaxTreeDecoder,
    Decoder,
    ForwardingDecoder,
    Logits,
    TokenIds,
    TreeDecoder,
)


def decoder_for(sampling: SamplingParams, target: Decoder) -> Decoder:
    """ArgmaxRows of the target where the likeliest tokens are enough and it finds them, else the target."""
    is_enough = sampling.is_greedy and not sampling.has_penalties
    if not is_enough or not isinstance(target, ArgmaxDecoder) or not target.has_argmax:
        return target
    if isinstance(target, TreeDecoder):
        return ArgmaxTreeRows(target) if isinstance(target, ArgmaxTreeDecoder) else target
    return ArgmaxRows(target)


class ArgmaxRows(ForwardingDecoder):
    """A decoder whose rows are −inf except for the likeliest token, which has 0."""

    _decoder: ArgmaxDecoder

    def __init__(self, decoder: ArgmaxDecoder) -> None:
        super().__init__(decoder)
        self._rows = np.zeros((0, decoder.vocab_size), np.float32)
        self._ids = np.zeros(0, np.int64)  # where its first rows are not −inf

    def logits(self, tokens: TokenIds, num_last: int) -> Logits:
        """Rows behind the last num_last tokens, [num_last, vocab_size], read-only, until the next call.

        Where one holds a value that is not finite the target's own rows come instead, for the sampler to judge.
        """
        found = self._decoder.argmax(tokens, num_last)
        return self._rows_of(found.ids) if found.is_sound.all() else self._decoder.logits(tokens, num_last)

    def _rows_of(self, ids: npt.NDArray[np.int64]) -> Logits:
        # The array is reused: to fill a row of 152,000 takes as long as to search it.
        self._rows[np.arange(len(self._ids)), self._ids] = -np.inf
        if len(ids) > len(self._rows):
            self._rows = np.full((len(ids), self.vocab_size), -np.inf, np.float32)
        self._ids = ids
        self._rows[np.arange(len(ids)), ids] = 0
        rows = self._rows[: len(ids)]
        rows.flags.writeable = False
        return rows


class ArgmaxTreeRows(ArgmaxRows):
    """ArgmaxRows that runs trees too."""

    _decoder: ArgmaxTreeDecoder

    def tree_logits(
        self, tokens: TokenIds, nodes: TokenIds, parents: Sequence[int], num_last: int | None = None
    ) -> Logits:
        """Rows of a tree as in logits, [num_nodes + 1, vocab_size], or the last num_last of them."""
        found = self._decoder.tree_argmax(tokens, nodes, parents)
        if not found.is_sound.all():
            return self._decoder.tree_logits(tokens, nodes, parents, num_last)
        return self._rows_of(found.ids if num_last is None else found.ids[-num_last:])
