"""Weight matrices as graph nodes: x · Wᵀ + bias, and rows of an embedding."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from edgespec.errors import SourceError
from edgespec.export.blocks import Blocks, Bytes, Floats, pack
from edgespec.export.nodes import Nodes, make_output
from edgespec.export.precision import Form, Rule
from edgespec.export.quantize import (
    append_offset_columns,
    join_blocks,
    quantize,
    quantize_asymmetric,
    quantize_symmetric,
)
from edgespec.export.tensors import StoredTensor, Tensors
from edgespec.export.weights import WeightsFile

_LARGEST_HALF = float(np.finfo(np.float16).max)
Halves = npt.NDArray[np.float16]
DATA_TYPES = {"F32": ir.DataType.FLOAT, "F16": ir.DataType.FLOAT16, "BF16": ir.DataType.BFLOAT16}


@dataclass(frozen=True, slots=True)
class _Packed:
    """Initializers of one quantised matrix, [rows, columns]."""

    rows: int
    columns: int
    num_inputs: int  # columns, and one more per block where the form has offsets
    form: Form
    levels: ir.Value  # uint8 [rows, num_blocks, block_size · bits / 8]
    scales: ir.Value  # in the type of activations, [rows, num_blocks]
    zero_points: ir.Value | None  # uint8 [rows, ⌈num_blocks · bits / 8⌉]

    @property
    def layout(self) -> dict[str, int | None]:
        """The attributes of operators over the blocks."""
        return {"bits": self.form.bits, "block_size": self.form.block_size}


def read_blocks(tensor: StoredTensor, form: Form) -> Iterator[Blocks]:
    """Rows in blocks of the form, which are those of the file where the form says that they are kept."""
    assert form.bits is not None
    if form.rounding == "symmetric":
        rounded = quantize if form.bits == 8 else quantize_symmetric
        return (rounded(part, form.bits, form.block_size) for part in tensor.floats())
    if form.rounding == "asymmetric":
        return (quantize_asymmetric(part, form.bits, form.block_size) for part in tensor.floats())
    if tensor.storage == "Q6_K":
        return (join_blocks(part, form.block_size) for part in tensor.blocks())
    return tensor.blocks()


def read_floats(storage: str, tensor: StoredTensor) -> Iterator[Bytes | Floats | Halves]:
    """Rows in a storage type, as bytes where the file has it. Raises SourceError: A half float cannot hold one."""
    if storage in ("F32", tensor.storage):
        yield from tensor.raw_floats() if storage == tensor.storage else tensor.floats()
        return
    for part in tensor.floats():
        if np.abs(part).max(initial=0) > _LARGEST_HALF:
            raise SourceError(
                f"{tensor.path}: tensor {tensor.name} holds values above {_LARGEST_HALF:g}, which half floats "
                "cannot; use another --precision"
            )
        yield part.astype(np.float16)


class PartWriter:
    """Writes parts of one graph, and their weights into the file. Tensors are named by their roles."""

    def __init__(self, tensors: Tensors, weights: WeightsFile, rule: Rule) -> None:
        self.tensors, self.weights, self.rule = tensors, weights, rule
        self.nodes = Nodes()
        self.op, self.ints, self.constant = self.nodes.op, self.nodes.ints, self.nodes.constant
        self.type = ir.DataType.FLOAT16 if rule.is_half else ir.DataType.FLOAT
        self.floats = np.float16 if rule.is_half else np.float32
        self._extended: dict[tuple[ir.Value, int], ir.Value] = {}

    def as_activation(self, x: ir.Value) -> ir.Value:
        """A value of float32 in the type of activations."""
        return x if self.type == ir.DataType.FLOAT else self.op("Cast", x, to=int(self.type))

    def output(self, name: str, x: ir.Value, shape: Sequence[str | int]) -> ir.Value:
        """An output of the graph in float32, apart from x, which may be an input."""
        return make_output(self.op("Cast", x, to=int(ir.DataType.FLOAT)), name, ir.DataType.FLOAT, shape)

    def vector(self, role: str, change: Callable[[Floats], Floats] = lambda stored: stored) -> ir.Value:
        """The numbers of a small tensor, changed."""
        vector = change(self.tensors[role].vector()).astype(self.floats)
        return self.weights.append(role, [vector], vector.shape)

    def silu(self, x: ir.Value) -> ir.Value:
        """x · sigmoid(x)."""
        return self.op("QuickGelu", x, alpha=1.0)

    def product(self, role: str, x: ir.Value) -> ir.Value:
        """x times a matrix, with its bias where it has one."""
        return self.products(role, x, [role])[0]

    def products(self, name: str, x: ir.Value, roles: Sequence[str]) -> list[ir.Value]:
        """x times each matrix: one value for all that can be stacked under the name, else one for each."""
        forms = [self.rule.form(self.tensors[role], name) for role in roles]
        has_bias = {f"{role}_bias" in self.tensors for role in roles}
        if len(set(forms)) == 1 and len(has_bias) == 1:
            return [self._matrix(name, x, roles, forms)]
        own = enumerate(zip(roles, forms, strict=True))
        return [self._matrix(f"{name}.{i}", x, [role], [form]) for i, (role, form) in own]

    def float_product(self, role: str, x: ir.Value, name: str = "") -> ir.Value:
        """x times a small matrix that is kept in floats in every precision; name is that in the graph."""
        form = Form(None, storage=self.rule.storage)
        return self._multiply_floats(x, self._write_floats(name or role, [self.tensors[role]], form), form)

    def head(self, role: str, x: ir.Value) -> ir.Value:
        """x times a vocabulary head."""
        return self._matrix(role, x, [role], [self.rule.form(self.tensors[role], "head")])

    def rows(self, role: str, input_ids: ir.Value) -> ir.Value:
        """Rows of an embedding that is no vocabulary head."""
        return self._look_up(role, input_ids)[0]

    def embedding(
        self, input_ids: ir.Value, head: str = "head"
    ) -> tuple[ir.Value, Callable[[ir.Value], ir.Value]]:
        """Rows of the embedding for input_ids, and the head as a function of the last hidden state.

        A separate head is written when called; a tied one shares the embedding's bytes.
        """
        rows, own = self._look_up("embedding", input_ids)
        return rows, partial(self.head, head) if head in self.tensors else own

    def _look_up(self, role: str, input_ids: ir.Value) -> tuple[ir.Value, Callable[[ir.Value], ir.Value]]:
        """Rows of a matrix for input_ids, and the product with it as a function."""
        tensor = self.tensors[role]
        form = self.rule.embedding_form(tensor)
        _require_blocks(tensor, form)
        if form.bits is None:
            floats = self._write_floats(role, [tensor], form)
            rows = self._as_float(self.op("Gather", floats, input_ids, axis=0), form)
            return rows, lambda x: self._multiply_floats(x, floats, form)
        packed = self._pack(role, [tensor], [form])
        return self._gather_rows(f"{role}.rows", packed, input_ids), lambda x: self._multiply_blocks(
            x, packed, None
        )

    def _matrix(self, name: str, x: ir.Value, roles: Sequence[str], forms: Sequence[Form]) -> ir.Value:
        tensors, bias = [self.tensors[role] for role in roles], None
        if f"{roles[0]}_bias" in self.tensors:
            values = np.concatenate([self.tensors[f"{role}_bias"].vector() for role in roles]).astype(self.floats)
            bias = self.weights.append(f"{name}.bias", [values], values.shape)
        if forms[0].bits is not None:
            return self._multiply_blocks(x, self._pack(name, tensors, forms), bias)
        product = self._multiply_floats(x, self._write_floats(name, tensors, forms[0]), forms[0])
        return self.op("Add", product, bias) if bias is not None else product

    def _write_floats(self, name: str, tensors: Sequence[StoredTensor], form: Form) -> ir.Value:
        parts = (part for tensor in tensors for part in read_floats(form.storage, tensor))
        shape = [sum(tensor.rows for tensor in tensors), tensors[0].columns]
        return self.weights.append(name, parts, shape, DATA_TYPES[form.storage])

    def _as_float(self, x: ir.Value, form: Form) -> ir.Value:
        if form.storage == self.rule.storage:
            return x
        return self.op("Cast", x, to=int(DATA_TYPES[self.rule.storage]))

    def _multiply_floats(self, x: ir.Value, matrix: ir.Value, form: Form) -> ir.Value:
        # Operators on a constant are folded when the session loads; the file keeps its storage type.
        matrix = self._as_float(matrix, form)
        if self.rule.has_fused_products:
            return self.op("FusedMatMul", x, matrix, transB=1)
        return self.op("MatMul", x, self.op("Transpose", matrix, perm=[1, 0]))

    def _pack(self, name: str, tensors: Sequence[StoredTensor], forms: Sequence[Form]) -> _Packed:
        form = forms[0]
        assert form.bits is not None
        bits, size = form.bits, form.block_size
        scales: list[npt.NDArray[np.generic]] = []
        zero_points: list[Bytes] = []

        def levels() -> Iterator[Bytes]:
            for tensor, own in zip(tensors, forms, strict=True):
                for blocks in read_blocks(tensor, own):
                    stored = append_offset_columns(blocks) if form.has_offsets else blocks
                    scales.append(stored.scales.astype(self.floats))
                    if stored.zero_points is not None:
                        zero_points.append(pack(stored.zero_points, bits))
                    yield pack(stored.levels, bits)

        rows, columns = sum(tensor.rows for tensor in tensors), tensors[0].columns
        num_blocks = -(-columns // size)
        num_inputs = columns + num_blocks if form.has_offsets else columns
        num_blocks = -(-num_inputs // size)
        append, find = self.weights.append, self.weights.find
        # levels() fills the lists of scales and zero points; they stay empty where the levels were written before.
        written_levels = append(f"{name}.levels", levels(), [rows, num_blocks, size * bits // 8])
        written_scales = append(f"{name}.scales", scales, [rows, num_blocks])
        written_zeros = find(f"{name}.zero_points")
        if zero_points:
            written_zeros = append(f"{name}.zero_points", zero_points, [rows, zero_points[0].shape[1]])
        return _Packed(rows, columns, num_inputs, form, written_levels, written_scales, written_zeros)

    def _multiply_blocks(self, x: ir.Value, packed: _Packed, bias: ir.Value | None) -> ir.Value:
        if packed.form.has_offsets:
            x = self._append_block_means(x, packed.form.block_size)
        inputs = [x, packed.levels, packed.scales, packed.zero_points, None, bias]
        while inputs[-1] is None:
            inputs.pop()
        sizes = {"K": packed.num_inputs, "N": packed.rows}
        accuracy = 0 if self.rule.is_half else 4
        return self.op("MatMulNBits", *inputs, **sizes, **packed.layout, accuracy_level=accuracy)

    def _append_block_means(self, x: ir.Value, block_size: int) -> ir.Value:
        """Append to x the mean of each of its blocks, which the offset columns multiply."""
        if (x, block_size) not in self._extended:
            means = self.op("AveragePool", x, kernel_shape=[block_size], strides=[block_size])
            self._extended[x, block_size] = self.op("Concat", x, means, axis=-1)
        return self._extended[x, block_size]

    def _gather_rows(self, name: str, packed: _Packed, input_ids: ir.Value) -> ir.Value:
        inputs = [self._flatten(name, packed), input_ids, packed.scales, packed.zero_points]
        rows = self.op("GatherBlockQuantized", *inputs, **packed.layout, gather_axis=0, quantize_axis=1)
        return self._add_offsets(rows, packed) if packed.form.has_offsets else rows

    def _add_offsets(self, rows: ir.Value, packed: _Packed) -> ir.Value:
        constant, ints, op = self.constant, self.ints, self.op
        size, columns = packed.form.block_size, packed.columns
        zero, middle, end, last = (ints(at) for at in (0, columns, packed.num_inputs, -1))
        weights = op("Reshape", op("Slice", rows, zero, middle, last), ints(0, 0, columns // size, size))
        offsets = op("Unsqueeze", op("Slice", rows, middle, end, last), last)
        scaled = op("Div", offsets, constant("block_size", np.array(size, self.floats)))
        return op("Reshape", op("Add", weights, scaled), ints(0, 0, columns))

    def _flatten(self, name: str, packed: _Packed) -> ir.Value:
        """A matrix over bytes written before: gathered rows and the head's blocks share a place in the file."""
        tensor = packed.levels.const_value
        assert isinstance(tensor, ir.ExternalTensor)
        assert tensor.offset is not None
        assert tensor.length is not None
        shape = [packed.rows, tensor.length // packed.rows]
        return self.weights.initializer(name, ir.DataType.UINT8, shape, tensor.offset, tensor.length)


def _require_blocks(tensor: StoredTensor, form: Form) -> None:
    """Raises SourceError: The rows of an embedding are no whole blocks."""
    if form.bits is not None and tensor.columns % form.block_size:
        raise SourceError(
            f"the rows of {tensor.name} have {tensor.columns} numbers, not a multiple of {form.block_size}, as a "
            "quantised embedding needs; use --precision source, or for a drafting head --drafter-precision source"
        )
