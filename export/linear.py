"""Weight matrices as graph nodes: x · Wᵀ + bias, and rows of an embedding.

What a precision means for a stored tensor is decided here:
    source  blocks keep their levels, scales and offsets; floats stay as they are
    fp32    dequantised
    int8, int4  symmetric blocks of 32, rounded to nearest; int4 keeps embedding and head in int8
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from edgespec.export.blocks import BLOCK_FORMATS, Blocks, Bytes, Floats, pack, quantize
from edgespec.export.nodes import Nodes
from edgespec.export.tensors import StoredTensor
from edgespec.export.weights import WeightsFile

PRECISIONS = ("source", "fp32", "int8", "int4")
_BLOCK_SIZE = 32
_OFFSET_BLOCK_SIZE = 32
_DATA_TYPES = {"F32": ir.DataType.FLOAT, "F16": ir.DataType.FLOAT16, "BF16": ir.DataType.BFLOAT16}


@dataclass(frozen=True, slots=True)
class _Form:
    """How a tensor is laid out in the graph; tensors of one form can be stacked into one matrix.

    bits is None for floats, whose stored type is kept.
    """

    bits: int | None
    block_size: int = 0
    has_zero_points: bool = False
    storage: str = ""


@dataclass(frozen=True, slots=True)
class _Packed:
    """Initializers of one quantised matrix, [rows, columns]."""

    rows: int
    columns: int
    form: _Form
    levels: ir.Value  # uint8 [rows, num_blocks, block_size · bits / 8]
    scales: ir.Value  # float32 [rows, num_blocks]
    zero_points: ir.Value | None  # uint8 [rows, ⌈num_blocks · bits / 8⌉]
    offsets: Floats | None  # [rows, num_blocks]


class LinearWriter:
    """Writes matrices into the weights file and their nodes into the graph."""

    def __init__(self, nodes: Nodes, weights: WeightsFile, precision: str) -> None:
        self.nodes = nodes
        self.weights = weights
        self.precision = precision
        self._sums: dict[ir.Value, ir.Value] = {}

    def __call__(
        self,
        name: str,
        x: ir.Value,
        tensors: Sequence[StoredTensor],
        biases: Sequence[StoredTensor | None] = (),
    ) -> list[ir.Value]:
        """x times each tensor: one value for all when they stack, else one each."""
        biases = list(biases) or [None] * len(tensors)
        forms = [self._form(tensor, self.precision) for tensor in tensors]
        has_bias = {bias is not None for bias in biases}
        if len(set(forms)) == 1 and len(has_bias) == 1:
            return [self._matrix(name, x, tensors, biases, forms[0])]
        return [
            self._matrix(f"{name}.{i}", x, [tensor], [bias], form)
            for i, (tensor, bias, form) in enumerate(zip(tensors, biases, forms, strict=True))
        ]

    def embedding(
        self, tensor: StoredTensor, input_ids: ir.Value, head: StoredTensor | None
    ) -> tuple[ir.Value, Callable[[ir.Value], ir.Value]]:
        """Rows of the embedding for input_ids, and the head as a function of the last hidden state.

        A head of its own is written when called; otherwise it shares the embedding's bytes.
        """
        precision = "int8" if self.precision == "int4" else self.precision
        form = self._form(tensor, precision)
        if form.bits is None:
            shared = self._float_matrix("embedding", [tensor], form)
            rows = self._as_float(self.nodes.op("Gather", shared, input_ids, axis=0), form)
            own: Callable[[ir.Value], ir.Value] = lambda x: self._float_product(x, shared, form)  # noqa: E731
        else:
            packed = self._packed("embedding", [tensor], form)
            rows = self._quantized_rows(packed, input_ids)
            own = lambda x: self._quantized_product("head", x, packed, None)  # noqa: E731
        if head is None:
            return rows, own
        head_form = self._form(head, precision)
        return rows, lambda x: self._matrix("head", x, [head], [None], head_form)

    def _form(self, tensor: StoredTensor, precision: str) -> _Form:
        if precision == "fp32" or (precision == "source" and not tensor.is_blocks):
            return _Form(None, storage="F32" if precision == "fp32" else tensor.storage)
        if precision == "source":
            stored = BLOCK_FORMATS[tensor.storage]
            return _Form(stored.bits, stored.block_size, stored.has_offsets)
        return _Form({"int8": 8, "int4": 4}[precision], _BLOCK_SIZE)

    def _matrix(
        self,
        name: str,
        x: ir.Value,
        tensors: Sequence[StoredTensor],
        biases: Sequence[StoredTensor | None],
        form: _Form,
    ) -> ir.Value:
        bias = self._bias(name, biases)
        if form.bits is not None:
            return self._quantized_product(name, x, self._packed(name, tensors, form), bias)
        product = self._float_product(x, self._float_matrix(name, tensors, form), form)
        return self.nodes.op("Add", product, bias) if bias is not None else product

    def _bias(self, name: str, biases: Sequence[StoredTensor | None]) -> ir.Value | None:
        present = [bias.vector() for bias in biases if bias is not None]
        if not present:
            return None
        values = np.concatenate(present)
        return self.nodes.add(self.weights.append(f"{name}.bias", [values], values.shape))

    # -- floats ------------------------------------------------------------------------------

    def _float_matrix(self, name: str, tensors: Sequence[StoredTensor], form: _Form) -> ir.Value:
        parts = (part for tensor in tensors for part in (tensor.floats() if form.storage == "F32" else tensor.chunks()))
        shape = [sum(tensor.rows for tensor in tensors), tensors[0].columns]
        return self.nodes.add(self.weights.append(name, parts, shape, _DATA_TYPES[form.storage]))

    def _as_float(self, x: ir.Value, form: _Form) -> ir.Value:
        return x if form.storage == "F32" else self.nodes.op("Cast", x, to=int(ir.DataType.FLOAT))

    def _float_product(self, x: ir.Value, matrix: ir.Value, form: _Form) -> ir.Value:
        # The cast of a constant is folded when the session loads; the file keeps the stored type.
        return self.nodes.op("FusedMatMul", x, self._as_float(matrix, form), transB=1)

    # -- blocks ------------------------------------------------------------------------------

    def _packed(self, name: str, tensors: Sequence[StoredTensor], form: _Form) -> _Packed:
        assert form.bits is not None
        rows, columns = sum(tensor.rows for tensor in tensors), tensors[0].columns
        num_blocks = -(-columns // form.block_size)
        scales: list[Floats] = []
        zero_points: list[Bytes] = []
        offsets: list[Floats] = []

        def levels() -> Iterator[Bytes]:
            assert form.bits is not None
            for tensor in tensors:
                for blocks in self._blocks(tensor, form):
                    scales.append(blocks.scales)
                    if blocks.zero_points is not None:
                        zero_points.append(pack(blocks.zero_points, form.bits))
                    if blocks.offsets is not None:
                        offsets.append(blocks.offsets)
                    yield pack(blocks.levels, form.bits)

        add = self.nodes.add
        level_bytes = form.block_size * form.bits // 8
        return _Packed(
            rows=rows,
            columns=columns,
            form=form,
            levels=add(self.weights.append(f"{name}.levels", levels(), [rows, num_blocks, level_bytes])),
            scales=add(self.weights.append(f"{name}.scales", scales, [rows, num_blocks])),
            zero_points=add(
                self.weights.append(f"{name}.zero_points", zero_points, [rows, zero_points[0].shape[1]])
            )
            if zero_points
            else None,
            offsets=np.concatenate(offsets) if offsets else None,
        )

    def _blocks(self, tensor: StoredTensor, form: _Form) -> Iterator[Blocks]:
        assert form.bits is not None
        if self.precision == "source":
            yield from tensor.blocks()
        else:
            yield from (quantize(part, form.bits, form.block_size) for part in tensor.floats())

    def _quantized_product(self, name: str, x: ir.Value, packed: _Packed, bias: ir.Value | None) -> ir.Value:
        product = self._matmul_nbits(
            x, packed.levels, packed.scales, packed.zero_points, bias, packed.rows, packed.columns, packed.form
        )
        if packed.offsets is None:
            return product
        return self.nodes.op("Add", product, self._offset_product(name, x, packed))

    def _offset_product(self, name: str, x: ir.Value, packed: _Packed) -> ir.Value:
        """What the offsets contribute: block sums of x times offsets, in 8 bits.

        An offset is at most half a scale, so its own 8 bits leave 1/250 of a level.
        """
        assert packed.offsets is not None
        blocks = quantize(packed.offsets, 8, _OFFSET_BLOCK_SIZE)
        rows, num_blocks = packed.offsets.shape
        groups = blocks.scales.shape[1]
        form = _Form(8, _OFFSET_BLOCK_SIZE)
        levels = self.weights.append(f"{name}.offsets", [blocks.levels], [rows, groups, _OFFSET_BLOCK_SIZE])
        scales = self.weights.append(f"{name}.offset_scales", [blocks.scales], [rows, groups])
        sums = self._block_sums(x, num_blocks, packed.form.block_size)
        add = self.nodes.add
        return self._matmul_nbits(sums, add(levels), add(scales), None, None, rows, num_blocks, form)

    def _block_sums(self, x: ir.Value, num_blocks: int, block_size: int) -> ir.Value:
        if x not in self._sums:
            shape = self.nodes.constant(f"blocks_{num_blocks}", np.array([0, 0, num_blocks, block_size]))
            last = self.nodes.constant("axis_last", np.array([-1]))
            self._sums[x] = self.nodes.op("ReduceSum", self.nodes.op("Reshape", x, shape), last, keepdims=0)
        return self._sums[x]

    def _matmul_nbits(
        self,
        x: ir.Value,
        levels: ir.Value,
        scales: ir.Value,
        zero_points: ir.Value | None,
        bias: ir.Value | None,
        rows: int,
        columns: int,
        form: _Form,
    ) -> ir.Value:
        inputs = [x, levels, scales, zero_points, None, bias]
        while inputs[-1] is None:
            inputs.pop()
        return self.nodes.op(
            "MatMulNBits",
            *inputs,
            K=columns,
            N=rows,
            bits=form.bits,
            block_size=form.block_size,
            accuracy_level=4,
        )

    def _quantized_rows(self, packed: _Packed, input_ids: ir.Value) -> ir.Value:
        rows = self.nodes.op(
            "GatherBlockQuantized",
            self._flat("embedding.rows", packed.levels, packed.rows),
            input_ids,
            packed.scales,
            packed.zero_points,
            bits=packed.form.bits,
            block_size=packed.form.block_size,
            gather_axis=0,
            quantize_axis=1,
        )
        if packed.offsets is None:
            return rows
        table = self.nodes.add(
            self.weights.append("embedding.offset_rows", [packed.offsets], packed.offsets.shape)
        )
        num_blocks = packed.offsets.shape[1]
        size = packed.form.block_size
        offsets = self.nodes.op("Unsqueeze", self.nodes.op("Gather", table, input_ids, axis=0), self._last_axis())
        split = self.nodes.constant(f"blocks_{num_blocks}", np.array([0, 0, num_blocks, size]))
        joined = self.nodes.constant("joined", np.array([0, 0, packed.columns]))
        summed = self.nodes.op("Add", self.nodes.op("Reshape", rows, split), offsets)
        return self.nodes.op("Reshape", summed, joined)

    def _last_axis(self) -> ir.Value:
        return self.nodes.constant("axis_last", np.array([-1]))

    def _flat(self, name: str, levels: ir.Value, rows: int) -> ir.Value:
        """The same bytes as a matrix: gathered rows and the head's blocks share one place in the file."""
        tensor = levels.const_value
        assert isinstance(tensor, ir.ExternalTensor)
        assert tensor.offset is not None
        assert tensor.length is not None
        return self.nodes.add(
            self.weights.initializer(
                name, ir.DataType.UINT8, [rows, tensor.length // rows], tensor.offset, tensor.length
            )
        )
