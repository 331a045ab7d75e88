"""A mixture of experts in a graph: MoE over floats, QMoE over blocks (Shazeer et al., arXiv:1701.06538).

Both take the matrices of all experts stacked, [num_experts, rows, columns], gate and up interleaved by rows. QMoE
has no minima of blocks, so experts whose stored blocks have minima are rounded to 8 bits.

The kernels are given routes, pairs of a token and an expert, instead of tokens, and add nothing up themselves. On
the CPU they add the experts of a token in an order that depends on the other tokens of the pass, QMoE normalises
the weights of the chosen experts whether it is told to or not, and both have another product for one row, or the
last of an odd number. So an expert that has an odd number of routes gets one more, which nobody reads.

In the gpu form they are given tokens, since routes cost a GPU some fifteen kernels a layer. They choose by scores
from which their softmax makes the weights of the experts, and experts that may not be chosen score very low.
"""

from collections.abc import Iterator, Sequence
from functools import partial, reduce
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from edgespec.errors import SourceError
from edgespec.export.blocks import Bytes, Floats, pack
from edgespec.export.linear import DATA_TYPES, read_blocks, read_floats
from edgespec.export.precision import BITS, BLOCK_SIZES, Form
from edgespec.export.routing import Routing
from edgespec.export.tensors import StoredTensor
from edgespec.types import Array

if TYPE_CHECKING:
    from edgespec.export.layers import LayerWriter

_BOOL, _FLOAT, _HALF = (int(kind) for kind in (ir.DataType.BOOL, ir.DataType.FLOAT, ir.DataType.FLOAT16))
_CUDA_BLOCK = 64  # CUDA's kernel takes blocks of 64 and 128 weights on every card

Expert = tuple[StoredTensor, ...]
"""Matrices of one expert that are interleaved: gate and up, or down alone."""


class ExpertsWriter:
    """Writes the experts of layers with the parts of a transformer."""

    def __init__(self, write: "LayerWriter") -> None:
        self._write, self._nodes, self._rule = write, write.nodes, write.rule

    def __call__(self, i: int, x: ir.Value, routing: Routing) -> ir.Value:
        """The weighted sum of the chosen experts' outputs of a layer for x, [1, num_tokens, hidden_size]."""
        write, op, ints = self._write, self._nodes.op, self._nodes.ints
        router = write.float_product(f"{i}.router", x)
        if f"{i}.router_bias" in write.tensors:
            router = op("Add", router, write.vector(f"{i}.router_bias"))
        choice = None  # what is added to the probabilities of the experts as they are chosen, [num_experts]
        if (role := f"{i}.router_choice") in write.tensors:  # floats, as the shares are that it is added to
            stored = write.tensors[role].vector()
            choice = write.weights.append(role, [stored], stored.shape)
        router_logits = op("Reshape", router, ints(-1, routing.num_experts))
        mix = self._routed if self._rule.has_fused_products else self._mixed
        return mix(i, x, router_logits, routing, choice)

    def _routed(
        self, i: int, x: ir.Value, router_logits: ir.Value, routing: Routing, choice: ir.Value | None
    ) -> ir.Value:
        """The sum over outputs of routes, in the form that the CPU takes."""
        op, ints, constant = self._nodes.op, self._nodes.ints, self._nodes.constant
        hidden = self._write.config.hidden_size
        shares, experts = self._choose(router_logits, routing, choice)
        each = constant("one_expert", np.eye(routing.num_experts, dtype=np.float32))
        routes = op("Gather", each, op("Reshape", experts, ints(-1)), axis=0)
        counts = op("ReduceSum", routes, ints(0), keepdims=0)
        is_odd = op("Cast", op("Mod", counts, constant("two", np.array([2], np.float32)), fmod=1), to=_BOOL)
        added = op("Compress", each, is_odd, axis=0)

        tokens = op("Reshape", x, ints(-1, 1, hidden))
        copies = op("Tile", tokens, ints(1, routing.num_used, 1))
        first = op("Slice", op("Reshape", x, ints(-1, hidden)), ints(0), ints(1))
        shape = op("Concat", op("Shape", added, start=0, end=1), ints(hidden), axis=0)
        fed = op("Concat", op("Reshape", copies, ints(-1, hidden)), op("Expand", first, shape), axis=0)
        outputs = self._experts(i, fed, op("Concat", routes, added, axis=0))
        num_routes = op("Shape", routes, start=0, end=1)
        outputs = op("Slice", outputs, ints(0), num_routes, ints(0))
        apart = op("Reshape", outputs, ints(-1, routing.num_used, hidden))
        weighted = op("Mul", apart, op("Unsqueeze", shares, ints(2)))
        return op("Unsqueeze", op("ReduceSum", weighted, ints(1), keepdims=0), ints(0))

    def _mixed(
        self, i: int, x: ir.Value, router_logits: ir.Value, routing: Routing, choice: ir.Value | None
    ) -> ir.Value:
        """The output of a kernel that chooses and adds up itself, in the form that WebGPU and CUDA take."""
        op, ints, constant = self._nodes.op, self._nodes.ints, self._nodes.constant
        logits = op("Cast", router_logits, to=_FLOAT) if self._rule.is_half else router_logits
        shares = op("Sigmoid", logits) if routing.is_sigmoid else op("Softmax", logits, axis=-1)
        kept, scores = shares, op("Log", shares)
        if choice is not None or routing.num_used_groups < routing.num_groups:
            judged = shares if choice is None else op("Add", shares, choice)
            judged = self._within_groups(judged, routing)
            largest = self._largest("num_used", judged, routing.num_used)
            least = op("Gather", largest, ints(routing.num_used - 1), axis=1)
            is_chosen = op("GreaterOrEqual", judged, least)
            scores = op("Where", is_chosen, scores, constant("unchosen", np.array(-1e4, np.float32)))
            kept = op("Where", is_chosen, shares, constant("no_share", np.array(0, np.float32)))
        scores = op("Cast", scores, to=_HALF) if self._rule.is_half else scores
        mixed = self._experts(i, x, scores, routing.num_used)
        scale = constant("routed_scale", np.array(routing.scale, np.float32))
        if not routing.is_normalized:
            total = op("ReduceSum", self._largest("num_used", kept, routing.num_used), ints(-1))
            scale = op("Mul", total, scale)
        elif routing.scale == 1:
            return mixed
        return op("Mul", mixed, op("Cast", scale, to=_HALF) if self._rule.is_half else scale)

    def _choose(
        self, router_logits: ir.Value, routing: Routing, choice: ir.Value | None
    ) -> tuple[ir.Value, ir.Value]:
        """The weights of the chosen experts of each token, and their numbers, [num_tokens, num_used] both."""
        op, constant, shares = self._nodes.op, self._nodes.constant, None
        if routing.is_sigmoid:
            shares = op("Sigmoid", router_logits)
        elif choice is not None or not routing.is_normalized:
            shares = op("Softmax", router_logits, axis=-1)
        judged = router_logits if choice is None or shares is None else op("Add", shares, choice)
        judged = self._within_groups(judged, routing)
        outputs = [ir.Value(name=f"{router_logits.name}.{what}") for what in ("largest", "chosen")]
        largest, chosen = self._nodes.node("TopK", [judged, self._nodes.ints(routing.num_used)], outputs)
        if shares is None:
            return op("Softmax", largest, axis=-1), chosen
        own = op("GatherElements", shares, chosen, axis=1)
        if routing.is_normalized:
            own = op("Div", own, self._sum_columns(own, routing.num_used))
        if routing.scale != 1:
            own = op("Mul", own, constant("routed_scale", np.array(routing.scale, np.float32)))
        return own, chosen

    def _within_groups(self, judged: ir.Value, routing: Routing) -> ir.Value:
        """The scores of experts in the best groups, by the sum of their best two, and -inf for the others."""
        if routing.num_used_groups == routing.num_groups:
            return judged
        op, ints, constant = self._nodes.op, self._nodes.ints, self._nodes.constant
        size = routing.num_experts // routing.num_groups
        groups = op("Reshape", judged, ints(-1, routing.num_groups, size))
        best = self._largest("best_two", groups, 2)
        sums = op("ReduceSum", best, ints(-1), keepdims=0)
        used = self._largest("used_groups", sums, routing.num_used_groups)
        is_used = op("GreaterOrEqual", sums, op("ReduceMin", used, ints(-1)))
        none = constant("no_score", np.array(-np.inf, np.float32))
        kept = op("Where", op("Unsqueeze", is_used, ints(-1)), groups, none)
        return op("Reshape", kept, ints(-1, routing.num_experts))

    def _sum_columns(self, x: ir.Value, count: int) -> ir.Value:
        """The sum of each row, [num_tokens, 1]; ReduceSum adds in an order by the place of a row in memory."""
        columns = self._nodes.split(x, [f"{x.name}.{at}" for at in range(count)])
        return reduce(partial(self._nodes.op, "Add"), columns)

    def _largest(self, name: str, x: ir.Value, count: int) -> ir.Value:
        outputs = [ir.Value(name=f"{x.name}.{name}"), ir.Value(name=f"{x.name}.{name}_at")]
        return self._nodes.node("TopK", [x, self._nodes.ints(count)], outputs)[0]

    def _experts(self, i: int, x: ir.Value, scores: ir.Value, num_used: int = 1) -> ir.Value:
        """The output of the num_used best experts of a layer for each row, as x is.

        scores: Of the experts for each row; of routes 1 for the expert of the row and 0 for the others.
        """
        attributes: dict[str, Any] = {"k": num_used, "normalize_routing_weights": 1, **self._activation()}
        names, parts = (f"{i}.experts.gate_up", f"{i}.experts.down"), (("gate", "up"), ("down",))
        matrices = [self._each(i, own) for own in parts]
        bias, other = (self._write_biases(name, i, own) for name, own in zip(names, parts, strict=True))
        if self._rule.form(matrices[0][0][0]).bits is None:
            floats = [self._write_floats(*each) for each in zip(names, matrices, strict=True)]
            ends = (floats[1], other) if other else (floats[1],)
            return self._nodes.op("MoE", x, scores, floats[0], bias, *ends, **attributes)
        size = self._block_size(matrices)
        forms = [self._form(experts, size) for experts in matrices]
        if not self._rule.has_fused_products:
            # WebGPU has one number of bits for both; CUDA lays matrices out by itself only if it is told to.
            forms = forms if forms[0].bits == forms[1].bits else [Form(8, size, rounding="symmetric")] * 2
            attributes["weights_prepacked"] = 0
        packed = [self._pack(*each) for each in zip(names, matrices, forms, strict=True)]
        (*first, zeros), (*second, more) = packed
        inputs = [x, scores, *first, bias, *second, other, None, None, None, zeros, more]
        while inputs[-1] is None:
            inputs.pop()
        return self._nodes.op(
            "QMoE",
            *inputs,
            **attributes,
            expert_weight_bits=forms[0].bits,
            fc2_expert_weight_bits=forms[1].bits,
            block_size=size,
            accuracy_level=4,
        )

    def _activation(self) -> dict[str, Any]:
        """The attributes of gate · sigmoid(alpha · gate) · (up + beta), with gate and up within a limit."""
        swiglu = {"activation_type": "swiglu", "swiglu_fusion": 1}
        if (gates := self._write.config.gate_limit) is None:
            return {**swiglu, "activation_alpha": 1.0, "activation_beta": 0.0}
        slope, limit = float(gates.slope), float(gates.limit)
        return {**swiglu, "activation_alpha": slope, "activation_beta": 1.0, "swiglu_limit": limit}

    def _each(self, i: int, parts: Sequence[str], ending: str = "") -> Sequence[Expert]:
        """The tensors of all experts of a layer."""
        routing, tensors = self._write.config.routing, self._write.tensors
        assert routing is not None
        numbers = range(routing.num_experts)
        return [tuple(tensors[f"{i}.{part}.{number}{ending}"] for part in parts) for number in numbers]

    def _write_biases(self, name: str, i: int, parts: Sequence[str]) -> ir.Value | None:
        if f"{i}.{parts[0]}.0_bias" not in self._write.tensors:
            return None
        biases = self._each(i, parts, "_bias")
        rows = np.stack([np.stack([part.vector() for part in expert], axis=1).reshape(-1) for expert in biases])
        rows = rows.astype(self._write.floats)
        return self._write.weights.append(f"{name}.bias", [rows], rows.shape)

    def _block_size(self, matrices: Sequence[Sequence[Expert]]) -> int:
        """The one block size of both matrices: as asked for if they are rounded, and dividing their columns."""
        columns = [experts[0][0].columns for experts in matrices]
        largest = self._rule.block_size if self._rule.precision in BITS else BLOCK_SIZES[0]
        if not self._rule.has_fused_products and self._rule.precision in BITS:
            largest = max(largest, _CUDA_BLOCK)
        fitting = (size for size in BLOCK_SIZES if size <= largest and not any(each % size for each in columns))
        if (size := max(fitting, default=None)) is None:
            raise SourceError(
                f"{matrices[0][0][0].path}: its experts have rows of {columns[0]} and {columns[1]} weights, which "
                f"are not multiples of {BLOCK_SIZES[0]}; use --precision fp32"
            )
        return size

    def _form(self, experts: Sequence[Expert], size: int) -> Form:
        """Blocks as they are stored, if all are alike and such as the kernel takes; else rounded."""
        bits = BITS.get(self._rule.precision)
        storages = {tensor.storage for expert in experts for tensor in expert}
        stored = experts[0][0].block_format
        rounded = Form(bits or 8, size, rounding="symmetric")
        if stored is None or len(storages) > 1 or stored.has_offsets or bits not in (None, stored.bits):
            return rounded
        if stored.has_zero_points and not self._rule.has_fused_products:  # which WebGPU's kernel does not take
            return rounded
        # Blocks of Q6_K are joined, and longer ones than the kernel's are cut.
        if stored.block_size % size and not (storages == {"Q6_K"} and size == BLOCK_SIZES[0]):
            return rounded
        return Form(stored.bits, size, has_zero_points=stored.has_zero_points)

    def _write_floats(self, name: str, experts: Sequence[Expert]) -> ir.Value:
        storage = self._rule.form(experts[0][0]).storage
        parts = (
            _interleave(parts)
            for expert in experts
            for parts in zip(*(read_floats(storage, tensor) for tensor in expert), strict=True)
        )
        matrix = self._write.weights.append(name, parts, _shape(experts), DATA_TYPES[storage])
        return matrix if storage == self._rule.storage else self._nodes.op("Cast", matrix, to=_FLOAT)

    def _pack(
        self, name: str, experts: Sequence[Expert], form: Form
    ) -> tuple[ir.Value, ir.Value, ir.Value | None]:
        """Levels [num_experts, rows, columns · bits / 8], scales [num_experts, rows, num_blocks], zero points.

        Zero points, packed as levels are, are None where the form has none.
        """
        assert form.bits is not None
        bits, scales, zeros = form.bits, list[Floats](), list[Bytes]()

        def levels() -> Iterator[Bytes]:
            for expert in experts:
                for whole in zip(*(read_blocks(tensor, form) for tensor in expert), strict=True):
                    parts = [part.cut(form.block_size) for part in whole]
                    if form.has_zero_points:
                        points = [pack(part.zero_points, bits) for part in parts if part.zero_points is not None]
                        zeros.append(_interleave(points))
                    scales.append(_interleave([part.scales for part in parts]).astype(self._write.floats))
                    yield _interleave([pack(part.levels, bits).reshape(len(part.levels), -1) for part in parts])

        count, rows, columns = _shape(experts)
        written = self._write.weights.append(f"{name}.levels", levels(), [count, rows, columns * bits // 8])
        shape = [count, rows, columns // form.block_size]
        packed = [*shape[:2], -(-shape[2] * bits // 8)]
        return (
            written,
            self._write.weights.append(f"{name}.scales", scales, shape),
            self._write.weights.append(f"{name}.zero_points", zeros, packed) if form.has_zero_points else None,
        )


def _shape(experts: Sequence[Expert]) -> tuple[int, int, int]:
    return len(experts), sum(tensor.rows for tensor in experts[0]), experts[0][0].columns


def _interleave(parts: Sequence[Array]) -> Array:
    """Row 0 of each part, row 1 of each part, and so on; all parts have one shape."""
    return np.stack(parts, axis=1).reshape(-1, parts[0].shape[-1])
