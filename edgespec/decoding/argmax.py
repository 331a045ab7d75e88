"""Greedy decoding without copying logits, from a target that finds the likeliest token on its own device.

The device gives one id for each row, 8 bytes; the row that is read gives every other token no chance. So sampling,
acceptance and learning need no second way.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from edgespec.decoders import (
    Argmax,
    ArgmaxDecoder,
    ArgmaxTreeDecoder,
    Decoder,
    ForwardingDecoder,
    TreeDecoder,
)
from edgespec.decoding.sampling import SamplingParams
from edgespec.types import Logits, TokenIds


def decoder_for(sampling: SamplingParams, target: Decoder) -> Decoder:
    """ArgmaxRows of the target where the likeliest tokens are enough and it finds them, else the target."""
    is_enough = sampling.is_greedy and not sampling.has_penalties and not sampling.logit_bias
    if not is_enough or not isinstance(target, ArgmaxDecoder) or not target.has_argmax:
        return target
    if isinstance(target, TreeDecoder):
        return ArgmaxTreeRows(target) if isinstance(target, ArgmaxTreeDecoder) else target
    return ArgmaxRows(target)


class _KnownRow(np.ndarray[Any, np.dtype[np.float32]]):
    """A row whose largest entry is known: to search one of 152,000 takes 9 to 30 µs."""

    largest: int

    def argmax(self, *arguments: Any, **options: Any) -> Any:
        return self.largest


class _KnownRows(Sequence[Any]):
    """Rows of −inf with a single 0 each, as an array of rows but without its memory.

    Each is a piece of one line, so that making them touches no row.
    """

    def __init__(self, line: _KnownRow, ids: npt.NDArray[np.int64]) -> None:
        """line has −inf for a vocabulary, 0, and −inf for a vocabulary; ids are where the rows have their 0."""
        self._line, self._ids, self._size = line, ids.tolist(), len(line) // 2

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: Any) -> Any:
        largest = self._ids[index]
        row: Any = self._line[self._size - largest : 2 * self._size - largest]
        row.largest = largest
        return row

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return np.stack([np.asarray(row) for row in self]).astype(dtype or np.float32)


def _is_sound(found: Argmax) -> bool:
    return all(found.is_sound.tolist())  # 0.3 µs for a few rows, the array's own all 2


class ArgmaxRows(ForwardingDecoder):
    """A decoder whose rows are −inf except for the likeliest token, which has 0."""

    _decoder: ArgmaxDecoder

    def __init__(self, decoder: ArgmaxDecoder) -> None:
        super().__init__(decoder)
        self._line = np.full(2 * decoder.vocab_size + 1, -np.inf, np.float32).view(_KnownRow)
        self._line[decoder.vocab_size] = 0
        self._line.flags.writeable = False

    def logits(self, tokens: TokenIds, num_last: int) -> Logits:
        """Rows after the last num_last tokens, [num_last, vocab_size], read-only.

        Where one holds a value that is not finite the target's own rows come instead, for the sampler to judge.
        """
        found = self._decoder.argmax(tokens, num_last)
        return self._rows_of(found.ids) if _is_sound(found) else self._decoder.logits(tokens, num_last)

    def _rows_of(self, ids: npt.NDArray[np.int64]) -> Logits:
        return _KnownRows(self._line, ids)  # type: ignore[return-value]  # serves as an array of rows


class ArgmaxTreeRows(ArgmaxRows):
    """ArgmaxRows that runs trees too."""

    _decoder: ArgmaxTreeDecoder

    def tree_logits(
        self, tokens: TokenIds, nodes: TokenIds, parents: Sequence[int], num_last: int | None = None
    ) -> Logits:
        """Rows of a tree as in logits, [num_nodes + 1, vocab_size], or the last num_last of them."""
        found = self._decoder.tree_argmax(tokens, nodes, parents)
        if not _is_sound(found):
            return self._decoder.tree_logits(tokens, nodes, parents, num_last)
        return self._rows_of(found.ids if num_last is None else found.ids[-num_last:])
