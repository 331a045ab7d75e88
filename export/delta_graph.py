"""A Gated DeltaNet layer as graph nodes. Knows no whole graph."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import onnx_ir as ir

from edgespec.export.delta import EPS, DeltaRule
from edgespec.export.nodes import typed_value
from edgespec.manifest.caches import NUM_SETTLED

if TYPE_CHECKING:
    from edgespec.export.layers import LayerWriter


class _Spans(NamedTuple):
    """Where the rows of a pass are cut, for all layers.

    lengths: How many rows go into the state, and how many come behind them.
    first_new: The first row of a new token.
    """

    lengths: ir.Value
    first_new: ir.Value


class DeltaWriter:
    """Writes Gated DeltaNet layers with the parts of a transformer; num_settled is an input of the graph."""

    def __init__(self, write: "LayerWriter") -> None:
        self._write = write
        self.num_settled = typed_value(NUM_SETTLED, ir.DataType.INT64, [1])
        self._spans: _Spans | None = None

    def __call__(
        self, i: int, rule: DeltaRule, x: ir.Value, past: Sequence[ir.Value], present: Sequence[ir.Value]
    ) -> ir.Value:
        """The layer's output for x; past and present are state and rows."""
        write, op, tensors = self._write, self._write.op, self._write.tensors
        qkv = write.linear(f"{i}.delta_qkv", x, [tensors[f"{i}.delta_qkv"]])[0]
        gates = [write.linear.floats(f"{i}.delta_{part}", x, tensors[f"{i}.delta_{part}"]) for part in "ab"]
        rows = op("Concat", past[1], op("Concat", qkv, *gates, axis=-1), axis=1)
        axis, end = (
            write.constant("axis_1", np.array([1])),
            write.constant("end", np.array([np.iinfo(np.int64).max])),
        )
        write.nodes.node("Slice", [rows, self.num_settled, end, axis], [present[1]])
        heads = rule.num_value_heads
        mixed, a, b = self._split(f"{i}.row", rows, [rule.num_mixed, heads, heads])
        mixed = write.weighted_sum(f"{i}.delta_conv", mixed, rule.convolved)
        parts = self._heads(i, rule, op("QuickGelu", mixed, alpha=1.0))
        before = write.constant("rows_before", np.array([rule.convolved - 1]))
        a, b = (op("Slice", gate, before, end, axis) for gate in (a, b))
        shifted = op("Softplus", op("Add", a, self._vector(f"{i}.delta_shift")))
        decay = rule.decay(tensors[f"{i}.delta_decay"].vector()).astype(write.floats)
        factor = write.weights.append(f"{i}.delta_decay", [decay], decay.shape)
        parts += [op("Mul", shifted, factor), op("Sigmoid", b)]
        read = self._recur(i, rule, parts, past[0], present[0], x)
        return self._gated(i, rule, read, x)

    def _recur(
        self,
        i: int,
        rule: DeltaRule,
        parts: Sequence[ir.Value],
        past: ir.Value,
        present: ir.Value,
        x: ir.Value,
    ) -> ir.Value:
        """The values that new tokens read from the state, which is given as it is behind the settled rows."""
        write = self._write
        spans = self._find_spans(parts[0], x)
        cut = [
            write.nodes.node(
                "Split", [part, spans.lengths], [ir.Value(name=f"{i}.{at}.{n}") for n in "ab"], axis=1
            )
            for at, part in enumerate(parts)
        ]
        settled, guessed = zip(*cut, strict=True)
        heads = rule.num_value_heads
        how = {"q_num_heads": heads, "kv_num_heads": heads, "update_rule": "gated_delta", "scale": 0.0}
        first = ir.Value(name=f"{i}.settled")
        write.nodes.node("LinearAttention", [*settled[:3], past, *settled[3:]], [first, present], **how)
        outputs = [ir.Value(name=f"{i}.guessed"), ir.Value(name=f"{i}.guessed_state")]
        write.nodes.node("LinearAttention", [*guessed[:3], present, *guessed[3:]], outputs, **how)
        whole = write.op("Concat", first, outputs[0], axis=1)
        axis, end = (
            write.constant("axis_1", np.array([1])),
            write.constant("end", np.array([np.iinfo(np.int64).max])),
        )
        return write.op("Slice", whole, spans.first_new, end, axis)

    def _find_spans(self, rows: ir.Value, x: ir.Value) -> _Spans:
        if self._spans is None:
            op = self._write.op
            total, new = (op("Shape", y, start=1, end=2) for y in (rows, x))
            rest = op("Sub", total, self.num_settled)
            self._spans = _Spans(op("Concat", self.num_settled, rest, axis=0), op("Sub", total, new))
        return self._spans

    def _heads(self, i: int, rule: DeltaRule, mixed: ir.Value) -> list[ir.Value]:
        """Queries and keys of length 1, one for each value head, and values."""
        keys = rule.num_key_heads * rule.key_size
        sizes = [keys, keys, rule.num_value_heads * rule.value_size]
        queries, keys_, values = self._split(f"{i}.mixed", mixed, sizes)
        return [self._unit(rule, queries), self._unit(rule, keys_), values]

    def _unit(self, rule: DeltaRule, x: ir.Value) -> ir.Value:
        write, op, size = self._write, self._write.op, rule.key_size
        gain = write.constant("unit_gain", np.full(size, size**-0.5, write.floats))
        heads = op("Reshape", x, write.constant("delta_heads", np.array([0, 0, -1, size])))
        unit = op("SimplifiedLayerNormalization", heads, gain, axis=-1, epsilon=EPS / size, stash_type=1)
        times = rule.num_value_heads // rule.num_key_heads
        if times > 1 and rule.is_gguf:
            unit = op("Concat", *[unit] * times, axis=2)
        elif times > 1:
            apart = op("Unsqueeze", unit, write.constant("axis_3", np.array([3])))
            unit = op("Expand", apart, write.constant("delta_times", np.array([1, 1, 1, times, 1])))
        width = rule.num_value_heads * size
        return op("Reshape", unit, write.constant("delta_row", np.array([1, -1, width])))

    def _gated(self, i: int, rule: DeltaRule, read: ir.Value, x: ir.Value) -> ir.Value:
        write, op, tensors = self._write, self._write.op, self._write.tensors
        z = write.linear(f"{i}.delta_z", x, [tensors[f"{i}.delta_z"]])[0]
        heads = op("Reshape", read, write.constant("value_heads", np.array([0, 0, -1, rule.value_size])))
        kind, gain = "SimplifiedLayerNormalization", self._vector(f"{i}.delta_gain")
        normed = op(kind, heads, gain, axis=-1, epsilon=write.config.rms_eps, stash_type=1)
        width = rule.num_value_heads * rule.value_size
        row = op("Reshape", normed, write.constant("value_row", np.array([0, 0, width])))
        gated = op("Mul", row, op("QuickGelu", z, alpha=1.0))
        return write.linear(f"{i}.delta_out", gated, [tensors[f"{i}.delta_out"]])[0]

    def _split(self, name: str, x: ir.Value, sizes: Sequence[int]) -> Sequence[ir.Value]:
        outputs = [ir.Value(name=f"{name}.{at}") for at in range(len(sizes))]
        lengths = self._write.constant(f"sizes_{'_'.join(map(str, sizes))}", np.array(sizes))
        return self._write.nodes.node("Split", [x, lengths], outputs, axis=-1)

    def _vector(self, role: str) -> ir.Value:
        vector = self._write.tensors[role].vector().astype(self._write.floats)
        return self._write.weights.append(role, [vector], vector.shape)
