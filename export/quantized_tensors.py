"""Tensors of a quantised checkpoint, and the matrices that they make, row by row as they are read.

Knows nothing of the methods that quantise.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from edgespec.errors import SourceError
from edgespec.export.blocks import Bytes, Floats, integer_rows, integer_storage
from edgespec.export.safetensors import StoredIntegers
from edgespec.export.tensors import Index, StoredTensor, Tensors
from edgespec.types import Array

T = TypeVar("T")
_LEAST_BLOCK = 16  # columns


@dataclass(slots=True)
class Checkpoint:
    """The tensors of a quantised checkpoint by name, what its settings say, and which tensors were taken."""

    path: Path
    stated: Mapping[str, Any]
    floats: Tensors
    integers: Mapping[str, StoredIntegers]
    taken: dict[str, None] = field(default_factory=dict)  # in order

    def modules(self, ending: str) -> Iterator[str]:
        """The names of modules that have a tensor with this ending."""
        for name in (*self.floats, *self.integers):
            if name.endswith(f".{ending}"):
                yield name.removesuffix(f".{ending}")

    def integer(self, module: str, part: str) -> StoredIntegers:
        found = self.integers.get(name := f"{module}.{part}")
        return self._take(name, found)

    def words(self, module: str, part: str) -> StoredIntegers:
        """Integers that are packed in words of 32 bits."""
        found = self.integer(module, part)
        if found.storage != "I32" or len(found.shape) != 2:
            raise self.refuse(
                module, f"{part} of type {found.storage} and shape {found.shape}, not a matrix of I32"
            )
        return found

    def sides(self, weight: StoredIntegers) -> tuple[int, int]:
        """Rows and columns of a matrix."""
        if len(weight.shape) != 2:
            raise self.refuse(weight.name, f"shape {weight.shape}, not rows and columns")
        return weight.shape[0], weight.shape[1]

    def numbers(self, module: str, part: str) -> Floats:
        """A tensor of floats, whole, [rows, columns]."""
        tensor = self._take(name := f"{module}.{part}", self.floats.get(name))
        return np.concatenate([*tensor.floats()])

    def sides_of(self, module: str, part: str) -> tuple[int, int]:
        """Rows and columns of a tensor of floats."""
        tensor = self._take(name := f"{module}.{part}", self.floats.get(name))
        return tensor.rows, tensor.columns

    def file(self, module: str) -> Path:
        """The file that has the integers of a matrix."""
        names = (f"{module}.{ending}" for ending in ("qweight", "weight_packed", "weight"))
        return next(self.integers[name].path for name in names if name in self.integers)

    def has(self, module: str, part: str) -> bool:
        return f"{module}.{part}" in self.floats or f"{module}.{part}" in self.integers

    def _take(self, name: str, found: T | None) -> T:
        if found is None:
            raise SourceError(
                f"{self.path} has no tensor {name}, or one of another type than its quantisation "
                f"({self.stated.get('quant_method')}) has; it is incomplete, fetch it again"
            )
        self.taken[name] = None
        return found

    def refuse(self, module: str, found: str) -> SourceError:
        return SourceError(f"{self.path}: {module} has {found}, which its settings do not allow; fetch it again")


def of_floats(name: str, path: Path, shape: tuple[int, int], read: Callable[[int, int], Floats]) -> StoredTensor:
    def make(start: int, stop: int) -> Bytes:
        with np.errstate(all="ignore"):  # damage is reported by what reads the rows
            values = np.ascontiguousarray(read(start, stop), "<f4")
        return values.view(np.uint8).reshape(stop - start, -1)

    return StoredTensor(name, path, 0, *shape, "F32", make=make)


def unpack(packed: Array, bits: int) -> Bytes:
    """The integers in the last axis of 32-bit words, the first in the lowest bits."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    levels = (np.ascontiguousarray(packed).view(np.uint32)[..., None] >> shifts) & np.uint32((1 << bits) - 1)
    return levels.astype(np.uint8).reshape(*packed.shape[:-1], -1)


def of_groups(
    found: Checkpoint,
    module: str,
    shape: tuple[int, int],
    bits: int,
    read_groups: Callable[[], tuple[Floats, Bytes]],
    groups: Index | npt.NDArray[np.int64] | None,
    levels: Callable[[int, int], Bytes],
) -> StoredTensor:
    """A matrix by levels of its rows.

    read_groups: Its scales and zero points, [num_groups, rows]; read for each part, since those of all matrices of
    a model are hundreds of MB.
    groups: The group of each column; None where each group is of as many columns in their order.
    """
    scales, points = read_groups()
    if scales.shape != points.shape:
        raise found.refuse(
            module, f"scales of {scales.shape} and zero points of {points.shape}, by groups and rows"
        )
    name, path, num_groups, columns = f"{module}.weight", found.file(module), len(points), shape[1]
    if groups is None and columns % num_groups:
        raise found.refuse(module, f"{num_groups} groups of {columns} columns")
    in_order = np.arange(columns) * num_groups // columns
    if groups is not None and (len(groups) != columns or groups.min() < 0 or groups.max() >= num_groups):
        raise found.refuse(module, "groups of columns that do not fit its scales")
    stored_bits = 4 if bits <= 4 and points.max(initial=0) < 16 else 8
    is_symmetric = bool((points == 1 << (stored_bits - 1)).all())
    del scales, points
    of_columns = in_order if groups is None else groups

    def values(start: int, stop: int) -> Floats:
        factors, zeros = (each[:, start:stop].T[:, of_columns] for each in read_groups())
        weights: Floats = (levels(start, stop).astype(np.float32) - zeros) * factors
        return weights

    plain = of_floats(name, path, shape, values)
    # The longest blocks that groups of columns are made of.
    size = math.gcd(columns // num_groups, 128) if columns % num_groups == 0 else 0
    if size < _LEAST_BLOCK or not (groups is None or np.array_equal(groups, in_order)):
        return plain

    def make(start: int, stop: int) -> Bytes:
        factors, zeros = read_groups()
        own = None if is_symmetric else zeros[:, start:stop].T
        scales = np.ascontiguousarray(factors[:, start:stop].T)
        return integer_rows(stored_bits, size, levels(start, stop), scales, own)

    return replace(plain, storage=integer_storage(stored_bits, size, not is_symmetric), make=make)
