"""A Gated DeltaNet layer as graph nodes. Knows no whole graph."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from edgespec.export.delta import EPS, DeltaRule

if TYPE_CHECKING:
    from edgespec.export.layers import LayerWriter


class DeltaWriter:
    """Writes Gated DeltaNet layers with the parts of a transformer."""

    def __init__(self, write: "LayerWriter") -> None:
        self._write, self._states = write, write.recurrence

    def __call__(
        self, i: int, rule: DeltaRule, x: ir.Value, past: Sequence[ir.Value], present: Sequence[ir.Value]
    ) -> ir.Value:
        """The layer's output for x; past and present are state and rows."""
        write, op, states, tensors = self._write, self._write.op, self._states, self._write.tensors
        qkv = write.linear(f"{i}.delta_qkv", x, [tensors[f"{i}.delta_qkv"]])[0]
        gates = [write.linear.floats(f"{i}.delta_{part}", x, tensors[f"{i}.delta_{part}"]) for part in "ab"]
        rows = states.rows([qkv, *gates], past[1], present[1])
        heads = rule.num_value_heads
        mixed, a, b = states.split(f"{i}.row", rows, [rule.num_mixed, heads, heads])
        mixed = write.weighted_sum(f"{i}.delta_conv", mixed, rule.convolved)
        parts = self._heads(i, rule, op("QuickGelu", mixed, alpha=1.0))
        a, b = (states.behind(gate, rule.convolved - 1) for gate in (a, b))
        shifted = states.softplus(op("Add", a, write.vector(f"{i}.delta_shift")), heads)
        parts += [op("Mul", shifted, write.vector(f"{i}.delta_decay", rule.decay)), op("Sigmoid", b)]
        how = {"q_num_heads": heads, "kv_num_heads": heads, "update_rule": "gated_delta", "scale": 0.0}
        return self._gated(i, rule, states.read(i, parts, past[0], present[0], x, **how), x)

    def _heads(self, i: int, rule: DeltaRule, mixed: ir.Value) -> list[ir.Value]:
        """Queries and keys of length 1, one for each value head, and values."""
        keys = rule.num_key_heads * rule.key_size
        sizes = [keys, keys, rule.num_value_heads * rule.value_size]
        queries, keys_, values = self._states.split(f"{i}.mixed", mixed, sizes)
        return [self._unit(rule, queries), self._unit(rule, keys_), values]

    def _unit(self, rule: DeltaRule, x: ir.Value) -> ir.Value:
        write, op, size = self._write, self._write.op, rule.key_size
        gain = write.constant("unit_gain", np.full(size, size**-0.5, write.floats))
        heads = self._states.of_heads(x, size)
        unit = op("SimplifiedLayerNormalization", heads, gain, axis=-1, epsilon=EPS / size, stash_type=1)
        times = rule.num_value_heads // rule.num_key_heads
        if times > 1 and rule.is_apart:
            unit = op("Concat", *[unit] * times, axis=2)
        elif times > 1:
            unit = self._states.repeated(unit, times)
        return self._states.of_rows(unit, rule.num_value_heads * size)

    def _gated(self, i: int, rule: DeltaRule, read: ir.Value, x: ir.Value) -> ir.Value:
        write, op, tensors = self._write, self._write.op, self._write.tensors
        z = write.linear(f"{i}.delta_z", x, [tensors[f"{i}.delta_z"]])[0]
        normed = write.norm(self._states.of_heads(read, rule.value_size), f"{i}.delta_gain")
        row = self._states.of_rows(normed, rule.num_value_heads * rule.value_size)
        gated = op("Mul", row, op("QuickGelu", z, alpha=1.0))
        return write.linear(f"{i}.delta_out", gated, [tensors[f"{i}.delta_out"]])[0]
