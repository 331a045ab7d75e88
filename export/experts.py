"""A mixture of experts as one node: MoE over floats, QMoE over blocks (Shazeer et al., arXiv:1701.06538).

Both take the matrices of all experts stacked, [num_experts, rows, columns], gate and up interleaved by rows. QMoE
has no minima of blocks, so experts whose stored blocks have minima are rounded to 8 bits.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from edgespec.errors import SourceError
from edgespec.export.blocks import BLOCK_FORMATS, Bytes, Floats, pack
from edgespec.export.families import Routing
from edgespec.export.linear import DATA_TYPES, read_blocks, read_floats
from edgespec.export.nodes import Nodes
from edgespec.export.precision import BITS, BLOCK_SIZES, Form, Rule
from edgespec.export.tensors import StoredTensor
from edgespec.export.weights import WeightsFile

Expert = tuple[StoredTensor, ...]
"""Matrices of one expert that are interleaved: gate and up, or down alone."""


class ExpertsWriter:
    """Writes the matrices of experts into the weights file and their nodes into the graph."""

    def __init__(self, nodes: Nodes, weights: WeightsFile, rule: Rule) -> None:
        self._nodes, self._weights, self._rule = nodes, weights, rule

    def __call__(
        self,
        name: str,
        x: ir.Value,
        router_logits: ir.Value,
        routing: Routing,
        matrices: tuple[Sequence[Expert], Sequence[Expert]],
    ) -> ir.Value:
        """The weighted sum of the chosen experts' outputs for x, [1, num_tokens, hidden_size].

        Args:
            router_logits: [num_tokens, num_experts].
            matrices: Of each expert gate and up, and of each expert down.
        """
        attributes: dict[str, Any] = {
            "k": routing.num_used,
            "normalize_routing_weights": int(routing.is_normalized),
            "activation_type": "swiglu",  # gate · sigmoid(alpha · gate) · (up + beta)
            "activation_alpha": 1.0,
            "activation_beta": 0.0,
            "swiglu_fusion": 1,
        }
        names = (f"{name}.gate_up", f"{name}.down")
        if self._rule.form(matrices[0][0][0]).bits is None:
            floats = [self._write_floats(*each) for each in zip(names, matrices, strict=True)]
            return self._nodes.op("MoE", x, router_logits, floats[0], None, floats[1], **attributes)
        size = self._block_size(matrices)
        forms = [self._form(experts, size) for experts in matrices]
        first, second = (self._pack(*each) for each in zip(names, matrices, forms, strict=True))
        return self._nodes.op(
            "QMoE",
            *(x, router_logits, *first, None, *second),
            **attributes,
            expert_weight_bits=forms[0].bits,
            fc2_expert_weight_bits=forms[1].bits,
            block_size=size,
            accuracy_level=4,
        )

    def _block_size(self, matrices: Sequence[Sequence[Expert]]) -> int:
        """The one block size of both matrices: as asked for if they are rounded, and dividing their columns."""
        columns = [experts[0][0].columns for experts in matrices]
        largest = self._rule.block_size if self._rule.precision in BITS else BLOCK_SIZES[0]
        fitting = (size for size in BLOCK_SIZES if size <= largest and not any(each % size for each in columns))
        if (size := max(fitting, default=None)) is None:
            raise SourceError(
                f"{matrices[0][0][0].path}: its experts have rows of {columns[0]} and {columns[1]} weights, which "
                f"are not multiples of {BLOCK_SIZES[0]}; use --precision fp32"
            )
        return size

    def _form(self, experts: Sequence[Expert], size: int) -> Form:
        """Blocks as they are stored, if all are alike, have no minima and as many bits as wanted; else rounded."""
        bits = BITS.get(self._rule.precision)
        formats = {BLOCK_FORMATS.get(tensor.storage) for expert in experts for tensor in expert}
        stored = formats.pop()
        if stored is None or formats or stored.has_offsets or bits not in (None, stored.bits) or size != 32:
            return Form(bits or 8, size, rounding="symmetric")
        return Form(stored.bits, size)

    def _write_floats(self, name: str, experts: Sequence[Expert]) -> ir.Value:
        storage = self._rule.form(experts[0][0]).storage
        parts = (
            _interleave(parts)
            for expert in experts
            for parts in zip(*(read_floats(storage, tensor) for tensor in expert), strict=True)
        )
        matrix = self._weights.append(name, parts, _shape(experts), DATA_TYPES[storage])
        return matrix if storage == "F32" else self._nodes.op("Cast", matrix, to=int(ir.DataType.FLOAT))

    def _pack(self, name: str, experts: Sequence[Expert], form: Form) -> tuple[ir.Value, ir.Value]:
        """Levels, [num_experts, rows, columns · bits / 8], and scales, [num_experts, rows, num_blocks]."""
        assert form.bits is not None
        bits, scales = form.bits, list[Floats]()

        def levels() -> Iterator[Bytes]:
            for expert in experts:
                for parts in zip(*(read_blocks(tensor, form) for tensor in expert), strict=True):
                    scales.append(_interleave([part.scales for part in parts]))
                    yield _interleave([pack(part.levels, bits).reshape(len(part.levels), -1) for part in parts])

        count, rows, columns = _shape(experts)
        written = self._weights.append(f"{name}.levels", levels(), [count, rows, columns * bits // 8])
        return written, self._weights.append(f"{name}.scales", scales, [count, rows, columns // form.block_size])


def _shape(experts: Sequence[Expert]) -> tuple[int, int, int]:
    return len(experts), sum(tensor.rows for tensor in experts[0]), experts[0][0].columns


def _interleave(parts: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Row 0 of each part, row 1 of each part, and so on; all parts have one shape."""
    return np.stack(parts, axis=1).reshape(-1, parts[0].shape[-1])
