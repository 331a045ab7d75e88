"""The external data file of a graph, written front to back while weights are converted."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from itertools import chain
from math import prod
from pathlib import Path

import numpy as np
import onnx_ir as ir

from edgespec.types import Array

# ONNX Runtime maps external data by page.
_ALIGNMENT = 4096
_SMALL_ALIGNMENT = 64
Parts = Iterable[Array]


def aligned(end: int, num_bytes: int) -> int:
    """The position at or after end where an array of so many bytes begins."""
    return end + -end % (_ALIGNMENT if num_bytes >= _ALIGNMENT else _SMALL_ALIGNMENT)


class WeightsFile:
    """Appends arrays; each becomes an initializer that points into the file.

    An array is written once for each name, so that several graphs can be built over one file.
    """

    def __init__(self, path: Path, progress: Callable[[int], None] = lambda done_bytes: None) -> None:
        self.path = path
        self._progress = progress
        self._file = path.open("wb")
        self.end = 0  # bytes so far
        self._written: dict[str, ir.ExternalTensor] = {}

    def __enter__(self) -> "WeightsFile":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with suppress(OSError) if error else nullcontext():  # buffered bytes may not fit either
            self._file.close()

    def flush(self) -> None:
        """Make appended arrays readable for others."""
        self._file.flush()

    def append(self, name: str, parts: Parts, shape: Iterable[int], dtype: ir.DataType | None = None) -> ir.Value:
        """Write parts one after another as one tensor of the given shape.

        dtype is the type of the parts unless given (bfloat16 arrives as bytes).
        """
        if (known := self.find(name)) is not None:
            return known
        others, extents = iter(parts), list(shape)
        first = next(others)
        kind = dtype or ir.DataType.from_numpy(first.dtype)
        start = self._place(first, others, int(prod(extents) * kind.itemsize))
        return self.initializer(name, kind, extents, start, self.end - start)

    def find(self, name: str) -> ir.Value | None:
        """A new initializer over the array of a name, if there is one; a value belongs to one graph."""
        return ir.val(name, const_value=self._written[name]) if name in self._written else None

    def initializer(
        self, name: str, dtype: ir.DataType, shape: Iterable[int], offset: int, length: int
    ) -> ir.Value:
        """A view of bytes written before; two initializers may share them under different shapes."""
        extents = ir.Shape(list(shape))
        tensor = ir.ExternalTensor(
            self.path.name, offset, length, dtype, shape=extents, name=name, base_dir=self.path.parent
        )
        assert tensor.size * dtype.itemsize == length, f"{name}: {extents} of {dtype} is not {length} bytes"
        self._written[name] = tensor
        return ir.val(name, const_value=tensor)

    def _place(self, first: Array, others: Parts, num_bytes: int) -> int:
        """Write the parts of an array, which has num_bytes; returns where it begins."""
        start = aligned(self.end, first.nbytes)
        for part in chain([np.zeros(start - self.end, np.uint8), first], others):
            self._file.write(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)
            self.end += part.nbytes
            self._progress(self.end)
        return start
