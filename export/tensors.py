"""Weights in their files, read a few rows at a time and never all at once; knows nothing of their roles."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from edgespec.errors import SourceError
from edgespec.export.blocks import BLOCK_FORMATS, INTEGER_FORMATS, BlockFormat, Blocks, Bytes, Floats

# Keeps a chunk of unpacked weights and its temporaries within some ten MB.
CHUNK_WEIGHTS = 1 << 20
_FLOAT_TYPES = {"F32": 4, "F16": 2, "BF16": 2}
STORAGE_TYPES = (*_FLOAT_TYPES, *BLOCK_FORMATS)

Index = npt.NDArray[np.intp]
Sizes = Mapping[Path, int]
"""The sizes of files of which only the start is on this machine, as far as their headers go."""
NO_SIZES: Sizes = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A matrix [rows, columns] (a vector has one row) at an offset of a file.

    row_order, where given, lists the stored rows to read, in order; addend is added to each value of a vector
    (gemma's checkpoints store gains less one). make, where given, makes the rows from start to stop of other
    tensors, [stop - start, row_bytes]; offset counts the bytes of such rows.
    """

    name: str
    path: Path
    offset: int
    rows: int
    columns: int
    storage: str  # one of STORAGE_TYPES, or of INTEGER_FORMATS
    row_order: Index | None = None
    addend: float = 0.0
    make: Callable[[int, int], Bytes] | None = None

    @property
    def block_format(self) -> BlockFormat | None:
        """The format of its blocks; None for floats."""
        return BLOCK_FORMATS.get(self.storage) or INTEGER_FORMATS.get(self.storage)

    @property
    def is_blocks(self) -> bool:
        return self.block_format is not None

    @property
    def row_bytes(self) -> int:
        if (block := self.block_format) is not None:
            return self.columns // block.weights_per_block * block.block_bytes
        return self.columns * _FLOAT_TYPES[self.storage]

    @property
    def num_bytes(self) -> int:
        return self.rows * self.row_bytes

    def chunks(self) -> Iterator[Bytes]:
        """The stored bytes, [some rows, row_bytes], in order. Raises SourceError: The file ends too early."""
        step = max(1, CHUNK_WEIGHTS // self.columns)
        if self.row_order is None:
            yield from (self._read(start, min(start + step, self.rows)) for start in range(0, self.rows, step))
            return
        for start in range(0, self.rows, step):
            wanted = self.row_order[start : start + step]
            first = int(wanted.min())
            yield self._read(first, int(wanted.max()) + 1)[wanted - first]

    def _read(self, start: int, stop: int) -> Bytes:
        if self.make is not None:
            first = self.offset // self.row_bytes
            return self.make(first + start, first + stop)
        count = (stop - start) * self.row_bytes
        with self.path.open("rb") as file:
            file.seek(self.offset + start * self.row_bytes)
            raw = np.fromfile(file, np.uint8, count)
        if raw.size != count:
            raise SourceError(f"{self.path} ends inside tensor {self.name}; the file is cut short, fetch it again")
        return raw.reshape(stop - start, self.row_bytes)

    def blocks(self) -> Iterator[Blocks]:
        block = self.block_format
        assert block is not None
        for raw in self.chunks():
            with np.errstate(all="ignore"):  # damage is reported below
                decoded = block.decode(raw)
            self._require_finite(decoded.scales)
            if decoded.offsets is not None:
                self._require_finite(decoded.offsets)
            yield decoded

    def floats(self) -> Iterator[Floats]:
        """Rows as float32, dequantised where stored in blocks."""
        if self.is_blocks:
            yield from (blocks.dequantize() for blocks in self.blocks())
            return
        for raw in self.chunks():
            values = _as_float32(raw, self.storage)
            self._require_finite(values)
            yield values.reshape(-1, self.columns)

    def raw_floats(self) -> Iterator[Bytes]:
        """Rows in their stored bytes, checked like floats."""
        for raw in self.chunks():
            self._require_finite(_as_float32(raw, self.storage))
            yield raw

    def _require_finite(self, values: Floats) -> None:
        if not np.isfinite(values).all():
            raise SourceError(
                f"{self.path}: tensor {self.name} holds values that are not finite numbers; the file is damaged"
            )

    def holds_same(self, other: "StoredTensor") -> bool:
        """True if another tensor is stored in the same bytes; reading ends where they differ."""
        if (self.rows, self.columns, self.storage) != (other.rows, other.columns, other.storage):
            return False
        return all(map(np.array_equal, self.chunks(), other.chunks()))

    def part(self, start: int, rows: int) -> "StoredTensor":
        """A tensor of some of the rows."""
        assert self.row_order is None
        return replace(self, offset=self.offset + start * self.row_bytes, rows=rows)

    def transposed(self, count: int) -> "StoredTensor":
        """Turns each of count matrices, stored one after another, so that its columns become rows."""
        size, height, width = self.row_bytes // self.columns, self.rows // count, self.columns

        def make(start: int, stop: int) -> Bytes:
            number, first = divmod(start, width)
            stored = np.memmap(self.path, f"u{size}", "r", self.offset, (count, height, width))
            rows = np.ascontiguousarray(stored[number, :, first : first + stop - start].T)
            return rows.view(np.uint8).reshape(stop - start, -1)

        return replace(self, offset=0, rows=count * width, columns=height, make=make)

    def row(self, index: int) -> Floats:
        """One row as float32, [1, columns]."""
        return next(self.part(index, 1).floats())

    def vector(self) -> Floats:
        """All values in one dimension, for norms and biases."""
        return np.concatenate([part.reshape(-1) for part in self.floats()]) + np.float32(self.addend)


class UnreadTensor(StoredTensor):
    """A tensor of which every operation sees one row of zeros, or a vector of ones, so that nothing is read."""

    def chunks(self) -> Iterator[Bytes]:
        yield np.zeros((1, self.row_bytes), np.uint8)

    def vector(self) -> Floats:
        return np.ones(self.rows * self.columns, np.float32)


def unread(tensor: StoredTensor) -> UnreadTensor:
    """A tensor of the same place and shape that reads nothing."""
    return UnreadTensor(**{field.name: getattr(tensor, field.name) for field in fields(tensor)})


def _as_float32(raw: Bytes, storage: str) -> Floats:
    if storage == "F32":
        return raw.reshape(-1).view("<f4").astype(np.float32, copy=False)
    if storage == "F16":
        return raw.reshape(-1).view("<f2").astype(np.float32)
    return (raw.reshape(-1).view("<u2").astype(np.uint32) << 16).view(np.float32)


Tensors = Mapping[str, StoredTensor]
"""Tensors by name, or by their role in the graph."""
