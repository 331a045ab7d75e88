"""The matrices of an exported model, read back from its files as its graph uses them, and their errors.

Errors are found row by row, and compared with what rounding can do.

Knows the layouts of MatMulNBits and QMoE and the names that PartWriter and ExpertsWriter give; knows nothing of
the source's formats.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from edgespec.export.blocks import Blocks, Floats, unpack_pairs
from edgespec.export.tensors import CHUNK_WEIGHTS, StoredTensor, Tensors

_STACKS = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}
# Of half floats, which round to 1/2048 and below 6e-5 more coarsely.
_HALF_ERROR = 2e-3
# Rounding errors of all rows together are about a third of the bound for one row, which no row reaches.
_MEAN_SHARE = 0.6
# How much longer a matrix may become where it is rounded; fitting shortens it by its squared error.
_GAIN = {None: 1e-3, 8: 5e-3, 4: 2.5e-2}


@dataclass(frozen=True, slots=True)
class _Rows:
    """Every stride-th row of an array in a file.

    It is read, and not mapped: Windows moves no folder with a mapped file.
    """

    path: Path
    offset: int
    row_bytes: int
    dtype: ir.DataType
    stride: int = 1

    def read(self, start: int, stop: int) -> npt.NDArray[np.generic]:
        count = max(0, (stop - start - 1) * self.stride + 1) * self.row_bytes
        raw = np.fromfile(self.path, np.uint8, count, offset=self.offset + start * self.stride * self.row_bytes)
        assert raw.size == count, f"{self.path} ends within an array"
        return np.ascontiguousarray(raw.reshape(-1, self.row_bytes)[:: self.stride]).view(self.dtype.numpy())

    def from_row(self, start: int, stride: int) -> "_Rows":
        offset = self.offset + start * self.stride * self.row_bytes
        return replace(self, offset=offset, stride=self.stride * stride)


@dataclass(frozen=True, slots=True)
class WrittenMatrix:
    """Some rows of a matrix in the weights file, [rows, columns].

    arrays: Floats, or packed levels, their scales, and zero points where there are any.
    bits: None for floats.
    has_offsets: A column for each block follows, that its mean is multiplied with.
    """

    rows: int
    columns: int
    arrays: tuple[_Rows, ...]
    bits: int | None = None
    block_size: int = 0
    has_offsets: bool = False

    def row(self, index: int) -> Floats:
        return self._read(index, index + 1)

    def floats(self) -> Iterator[Floats]:
        """All rows, in parts like those of a StoredTensor."""
        step = max(1, CHUNK_WEIGHTS // self.columns)
        return (self._read(start, min(start + step, self.rows)) for start in range(0, self.rows, step))

    def part(self, start: int, rows: int, stride: int = 1) -> "WrittenMatrix":
        """A matrix of so many rows from the start on, every stride-th of them."""
        return replace(self, rows=rows, arrays=tuple(each.from_row(start, stride) for each in self.arrays))

    def _read(self, start: int, stop: int) -> Floats:
        values, *scaling = (each.read(start, stop) for each in self.arrays)
        if self.bits is None:
            return values.astype(np.float32)
        scales, zeros = scaling[0].astype(np.float32), None
        levels = unpack_pairs(values.view(np.uint8), self.bits).reshape(len(scales), -1)
        if len(scaling) > 1:
            zeros = unpack_pairs(scaling[1].view(np.uint8), self.bits)[:, : scales.shape[1]]
        weights = Blocks(self.bits, self.block_size, levels, scales, zeros).dequantize()
        found = weights[:, : self.columns]
        if not self.has_offsets:
            return found
        count = self.columns // self.block_size
        offsets = weights[:, self.columns : self.columns + count] / np.float32(self.block_size)
        blocks = found.reshape(stop - start, count, self.block_size) + offsets[:, :, None]
        return blocks.reshape(stop - start, -1)


def read_written(graph: Path, tensors: Tensors) -> dict[str, WrittenMatrix]:
    """The matrices of a graph by their roles in the source; it was built for the cpu or the gpu form."""
    written = _matrices(ir.load(graph), graph.parent)
    found = {}
    for role, tensor in tensors.items():
        layer, _, part = role.rpartition(".")
        group = next((name for name, parts in _STACKS.items() if part in parts), None)
        if group is None:
            if role in written:
                found[role] = written[role]
        elif (name := f"{layer}.{group}") in written:
            before = _STACKS[group][: _STACKS[group].index(part)]
            start = sum(tensors[f"{layer}.{other}"].rows for other in before)
            found[role] = written[name].part(start, tensor.rows)
        else:
            found[role] = written[f"{name}.{_STACKS[group].index(part)}"]
    return {role: _like(matrix, tensors[role]) for role, matrix in found.items()}


def _like(matrix: WrittenMatrix, tensor: StoredTensor) -> WrittenMatrix:
    """The matrix with the source's columns; what lies after them are columns of offsets, or padding."""
    has_offsets = (
        matrix.bits is not None and matrix.columns - tensor.columns >= tensor.columns // matrix.block_size > 0
    )
    return replace(matrix, columns=tensor.columns, has_offsets=has_offsets and len(matrix.arrays) > 2)


def _matrices(model: ir.Model, folder: Path) -> dict[str, WrittenMatrix]:
    """Matrices by the names that they were written under; columns count the ones of offsets too."""
    found = {}
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        if isinstance(tensor, ir.ExternalTensor) and len(tensor.shape) == 2 and tensor.dtype != ir.DataType.UINT8:
            rows, columns = tensor.shape.numpy()
            found[name] = WrittenMatrix(rows, columns, (_rows_of(tensor, rows, folder),))
    for node in model.graph:
        if node.op_type in ("MoE", "QMoE"):
            found |= _experts(node, folder)
        if node.op_type not in ("MatMulNBits", "GatherBlockQuantized"):
            continue
        levels, *scaling = node.inputs[1 if node.op_type == "MatMulNBits" else 0], *node.inputs[2:4]
        tensors = [_constant(levels), *(_constant(value) for value in scaling if value is not None)]
        rows = tensors[0].shape.numpy()[0]
        bits, size = (node.attributes[name].as_int() for name in ("bits", "block_size"))
        inner = node.attributes["K"].as_int() if "K" in node.attributes else tensors[0].size // rows * 8 // bits
        name = str(tensors[0].name).rpartition(".")[0]
        arrays = tuple(_rows_of(tensor, rows, folder) for tensor in tensors)
        found[name] = WrittenMatrix(rows, inner, arrays, bits, size)
    return found


def _experts(node: ir.Node, folder: Path) -> dict[str, WrittenMatrix]:
    """Matrices of all experts of a layer; gate and up are interleaved by rows."""
    found, is_quantized = {}, node.op_type == "QMoE"
    places = ((2, 3, 11), (5, 6, 12)) if is_quantized else ((2,), (4,))
    for at, parts, bits in zip(places, (("gate", "up"), ("down",)), ("", "fc2_"), strict=True):
        given = [node.inputs[i] for i in at if i < len(node.inputs)]
        tensors = [_constant(value) for value in given if value is not None]
        num_experts, rows, columns = tensors[0].shape.numpy()
        layer = str(tensors[0].name).partition(".experts.")[0]
        arrays = tuple(_rows_of(tensor, num_experts * rows, folder) for tensor in tensors)
        whole = WrittenMatrix(rows, columns, arrays)
        if is_quantized:
            num_bits, size = (
                node.attributes[name].as_int() for name in (f"{bits}expert_weight_bits", "block_size")
            )
            whole = replace(whole, columns=columns * 8 // num_bits, bits=num_bits, block_size=size)
        for number, (index, part) in product(range(num_experts), enumerate(parts)):
            own = whole.part(number * rows + index, rows // len(parts), len(parts))
            found[f"{layer}.{part}.{number}"] = own
    return found


def _constant(value: ir.Value | None) -> ir.TensorProtocol:
    """The tensor of an input, which may be widened before it is used."""
    assert value is not None
    if (widening := value.producer()) is not None:
        return _constant(widening.inputs[0])
    assert value.const_value is not None
    return value.const_value


def _rows_of(tensor: ir.TensorProtocol, rows: int, folder: Path) -> _Rows:
    assert isinstance(tensor, ir.ExternalTensor)
    assert tensor.length is not None
    return _Rows(folder / tensor.location, tensor.offset or 0, tensor.length // rows, tensor.dtype)


@dataclass(frozen=True, slots=True)
class WeightError:
    """A matrix whose written values lie farther from the source's than its form explains."""

    role: str
    found: float
    allowed: float


@dataclass
class WeightErrors:
    """Errors of written rows relative to the source's; called with each part of each matrix."""

    written: Mapping[str, WrittenMatrix]
    largest: float = 0.0  # of all rows of all matrices
    wrong: list[WeightError] = field(default_factory=list)

    def __call__(self, role: str, parts: Sequence[Floats]) -> None:
        source, written = parts[:2]
        difference = written - source
        energy, error = _products(source, source), _products(difference, difference)
        excess = _products(difference, source).sum()
        is_used = energy > 0
        worst = math.sqrt(np.divide(error, energy, out=np.zeros_like(error), where=is_used).max(initial=0.0))
        if np.isnan(error).any() or (error[~is_used] > 0).any():
            worst = math.inf
        self.largest = max(self.largest, worst)
        matrix = self.written[role]
        mean = math.sqrt(error.sum() / energy.sum()) if energy.any() else 0.0
        gain = abs(float(excess / energy.sum())) if energy.any() else 0.0
        bound = row_bound(matrix)
        for found, allowed in ((worst, bound), (mean, _MEAN_SHARE * bound), (gain, _GAIN[matrix.bits])):
            if not found <= allowed:
                self.wrong.append(WeightError(role, found, allowed))


def _products(some: Floats, others: Floats) -> npt.NDArray[np.float64]:
    """The inner product of each two rows, whose terms are added in single precision."""
    products: npt.NDArray[np.float64] = np.einsum("ij,ij->i", some, others).astype(np.float64)
    return products


def row_bound(matrix: WrittenMatrix) -> float:
    """The largest relative error of a row that rounding to the matrix's form can make.

    A block of n weights whose largest is m is rounded by half a step, m / 2**bits, at most. The sum of its squared
    errors is n · (m / 2**bits)² then, and the sum of its squares at least m². Blocks with a minimum have no better
    bound, though they are closer.
    """
    if matrix.bits is None:
        return _HALF_ERROR
    return 1.05 * math.sqrt(matrix.block_size) / (1 << matrix.bits)
