"""Weight matrices as graph nodes: x · Wᵀ + bias, and rows of an embedding.

What a precision means for a stored tensor is decided here:
    source  blocks keep their levels, scales and offsets; floats stay as they are
    fp32    dequantised
    int8    symmetric blocks of 32, rounded to nearest
    int4    blocks of 32 with a minimum each, at least squared error; an embedding in int8, since it is read
            by rows and, where it is the head as well, loses 0.07 nats a token in 4 bits (SmolLM2)
Blocks that are stored in just the bits asked for are kept as they are.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from edgespec.errors import SourceError
from edgespec.export.blocks import BLOCK_FORMATS, Blocks, Bytes, Floats, pack
from edgespec.export.nodes import Nodes
from edgespec.export.quantize import quantize, quantize_asymmetric, with_offset_columns, with_paired_blocks
from edgespec.export.tensors import StoredTensor
from edgespec.export.weights import WeightsFile

PRECISIONS = ("source", "fp32", "int8", "int4")
_BLOCK_SIZE = 32
_DATA_TYPES = {"F32": ir.DataType.FLOAT, "F16": ir.DataType.FLOAT16, "BF16": ir.DataType.BFLOAT16}


@dataclass(frozen=True, slots=True)
class _Form:
    """How a tensor is laid out in the graph; tensors of one form can be stacked into one matrix.

    bits is None for floats, whose stored type is kept. rounding says how the levels are come by.
    """

    bits: int | None
    block_size: int = 0
    has_offsets: bool = False
    storage: str = ""
    rounding: str = field(default="none", compare=False)  # none (kept), symmetric or asymmetric


@dataclass(frozen=True, slots=True)
class _Packed:
    """Initializers of one quantised matrix, [rows, columns]."""

    rows: int
    columns: int
    num_inputs: int  # columns, and one more per block where the form has offsets
    form: _Form
    levels: ir.Value  # uint8 [rows, num_blocks, block_size · bits / 8]
    scales: ir.Value  # float32 [rows, num_blocks]
    zero_points: ir.Value | None  # uint8 [rows, ⌈num_blocks · bits / 8⌉]


def _form(tensor: StoredTensor, precision: str) -> _Form:
    if precision == "fp32" or (precision == "source" and not tensor.is_blocks):
        return _Form(None, storage="F32" if precision == "fp32" else tensor.storage)
    bits = {"int8": 8, "int4": 4}.get(precision)
    if tensor.is_blocks:
        stored = BLOCK_FORMATS[tensor.storage]
        size = 32 if tensor.storage == "Q6_K" else stored.block_size  # in pairs, see _blocks
        if bits is None or (bits, _BLOCK_SIZE) == (stored.bits, size):
            return _Form(stored.bits, size, stored.has_offsets)
    if bits == 4 and tensor.columns % _BLOCK_SIZE == 0:
        return _Form(4, _BLOCK_SIZE, has_offsets=True, rounding="asymmetric")
    return _Form(bits, _BLOCK_SIZE, rounding="symmetric")


def _embedding_form(tensor: StoredTensor, precision: str) -> _Form:
    form = _form(tensor, precision)
    return _form(tensor, "int8") if form.bits == 4 and form.rounding != "none" else form


def _blocks(tensor: StoredTensor, form: _Form) -> Iterator[Blocks]:
    assert form.bits is not None
    if form.rounding == "symmetric":
        return (quantize(part, form.bits, form.block_size) for part in tensor.floats())
    if form.rounding == "asymmetric":
        return (quantize_asymmetric(part, form.bits, form.block_size) for part in tensor.floats())
    return map(with_paired_blocks, tensor.blocks()) if tensor.storage == "Q6_K" else tensor.blocks()


class LinearWriter:
    """Writes matrices into the weights file and their nodes into the graph."""

    def __init__(self, nodes: Nodes, weights: WeightsFile, precision: str) -> None:
        self.nodes = nodes
        self.weights = weights
        self.precision = precision
        self._extended: dict[ir.Value, ir.Value] = {}

    def __call__(
        self,
        name: str,
        x: ir.Value,
        tensors: Sequence[StoredTensor],
        biases: Sequence[StoredTensor | None] = (),
    ) -> list[ir.Value]:
        """x times each tensor: one value for all when they stack, else one each."""
        biases = list(biases) or [None] * len(tensors)
        forms = [_form(tensor, self.precision) for tensor in tensors]
        has_bias = {bias is not None for bias in biases}
        if len(set(forms)) == 1 and len(has_bias) == 1:
            return [self._matrix(name, x, tensors, biases, forms)]
        return [
            self._matrix(f"{name}.{i}", x, [tensor], [bias], [form])
            for i, (tensor, bias, form) in enumerate(zip(tensors, biases, forms, strict=True))
        ]

    def embedding(
        self, tensor: StoredTensor, input_ids: ir.Value, head: StoredTensor | None
    ) -> tuple[ir.Value, Callable[[ir.Value], ir.Value]]:
        """Rows of the embedding for input_ids, and the head as a function of the last hidden state.

        A head of its own is written when called; otherwise it shares the embedding's bytes.
        """
        form = _embedding_form(tensor, self.precision)
        if form.bits is not None and tensor.columns % form.block_size:
            raise SourceError(
                f"the hidden size {tensor.columns} is not a multiple of {form.block_size}, as a quantised "
                "embedding needs; use --precision fp32"
            )
        if form.bits is None:
            shared = self._float_matrix("embedding", [tensor], form)
            rows = self._as_float(self.nodes.op("Gather", shared, input_ids, axis=0), form)
            own: Callable[[ir.Value], ir.Value] = lambda x: self._float_product(x, shared, form)  # noqa: E731
        else:
            packed = self._packed("embedding", [tensor], [form])
            rows = self._quantized_rows(packed, input_ids)
            own = lambda x: self._quantized_product(x, packed, None)  # noqa: E731
        if head is None:
            return rows, own
        return rows, lambda x: self._matrix("head", x, [head], [None], [_form(head, self.precision)])

    def _matrix(
        self,
        name: str,
        x: ir.Value,
        tensors: Sequence[StoredTensor],
        biases: Sequence[StoredTensor | None],
        forms: Sequence[_Form],
    ) -> ir.Value:
        bias = self._bias(name, biases)
        if forms[0].bits is not None:
            return self._quantized_product(x, self._packed(name, tensors, forms), bias)
        product = self._float_product(x, self._float_matrix(name, tensors, forms[0]), forms[0])
        return self.nodes.op("Add", product, bias) if bias is not None else product

    def _bias(self, name: str, biases: Sequence[StoredTensor | None]) -> ir.Value | None:
        present = [bias.vector() for bias in biases if bias is not None]
        if not present:
            return None
        values = np.concatenate(present)
        return self.weights.append(f"{name}.bias", [values], values.shape)

    # -- floats ------------------------------------------------------------------------------

    def _float_matrix(self, name: str, tensors: Sequence[StoredTensor], form: _Form) -> ir.Value:
        parts = (
            part
            for tensor in tensors
            for part in (tensor.floats() if form.storage == "F32" else tensor.stored_floats())
        )
        shape = [sum(tensor.rows for tensor in tensors), tensors[0].columns]
        return self.weights.append(name, parts, shape, _DATA_TYPES[form.storage])

    def _as_float(self, x: ir.Value, form: _Form) -> ir.Value:
        return x if form.storage == "F32" else self.nodes.op("Cast", x, to=int(ir.DataType.FLOAT))

    def _float_product(self, x: ir.Value, matrix: ir.Value, form: _Form) -> ir.Value:
        # The cast of a constant is folded when the session loads; the file keeps the stored type.
        return self.nodes.op("FusedMatMul", x, self._as_float(matrix, form), transB=1)

    # -- blocks ------------------------------------------------------------------------------

    def _packed(self, name: str, tensors: Sequence[StoredTensor], forms: Sequence[_Form]) -> _Packed:
        form = forms[0]
        assert form.bits is not None
        bits, size = form.bits, form.block_size
        scales: list[Floats] = []
        zero_points: list[Bytes] = []

        def levels() -> Iterator[Bytes]:
            for tensor, own in zip(tensors, forms, strict=True):
                for blocks in _blocks(tensor, own):
                    stored = with_offset_columns(blocks) if form.has_offsets else blocks
                    scales.append(stored.scales)
                    if stored.zero_points is not None:
                        zero_points.append(pack(stored.zero_points, bits))
                    yield pack(stored.levels, bits)

        rows, columns = sum(tensor.rows for tensor in tensors), tensors[0].columns
        num_blocks = -(-columns // size)
        num_inputs = columns + num_blocks if form.has_offsets else columns
        num_blocks = -(-num_inputs // size)
        append = self.weights.append
        return _Packed(
            rows=rows,
            columns=columns,
            num_inputs=num_inputs,
            form=form,
            levels=append(f"{name}.levels", levels(), [rows, num_blocks, size * bits // 8]),
            scales=append(f"{name}.scales", scales, [rows, num_blocks]),
            zero_points=append(f"{name}.zero_points", zero_points, [rows, zero_points[0].shape[1]])
            if zero_points
            else None,
        )

    def _quantized_product(self, x: ir.Value, packed: _Packed, bias: ir.Value | None) -> ir.Value:
        if packed.form.has_offsets:
            x = self._with_block_means(x, packed.form.block_size)
        inputs = [x, packed.levels, packed.scales, packed.zero_points, None, bias]
        while inputs[-1] is None:
            inputs.pop()
        return self.nodes.op(
            "MatMulNBits",
            *inputs,
            K=packed.num_inputs,
            N=packed.rows,
            bits=packed.form.bits,
            block_size=packed.form.block_size,
            accuracy_level=4,
        )

    def _with_block_means(self, x: ir.Value, block_size: int) -> ir.Value:
        """x and behind it the mean of each of its blocks, which meet the offset columns."""
        if x not in self._extended:
            means = self.nodes.op("AveragePool", x, kernel_shape=[block_size], strides=[block_size])
            self._extended[x] = self.nodes.op("Concat", x, means, axis=-1)
        return self._extended[x]

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
        return self._with_offsets_added(rows, packed) if packed.form.has_offsets else rows

    def _with_offsets_added(self, rows: ir.Value, packed: _Packed) -> ir.Value:
        """Gathered rows with their offset columns → the rows themselves."""
        constant, op = self.nodes.constant, self.nodes.op
        size, columns = packed.form.block_size, packed.columns
        num_blocks = columns // size
        zero, middle, end, last = (
            constant(f"row_{at}", np.array([at])) for at in (0, columns, packed.num_inputs, -1)
        )
        weights = op(
            "Reshape",
            op("Slice", rows, zero, middle, last),
            constant("as_blocks", np.array([0, 0, num_blocks, size])),
        )
        offsets = op("Unsqueeze", op("Slice", rows, middle, end, last), last)
        scaled = op("Div", offsets, op("Cast", constant("block_size", np.array(size)), to=int(ir.DataType.FLOAT)))
        return op("Reshape", op("Add", weights, scaled), constant("as_rows", np.array([0, 0, columns])))

    def _flat(self, name: str, levels: ir.Value, rows: int) -> ir.Value:
        """The same bytes as a matrix: gathered rows and the head's blocks share one place in the file."""
        tensor = levels.const_value
        assert isinstance(tensor, ir.ExternalTensor)
        assert tensor.offset is not None
        assert tensor.length is not None
        return self.weights.initializer(
            name, ir.DataType.UINT8, [rows, tensor.length // rows], tensor.offset, tensor.length
        )
