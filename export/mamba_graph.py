"""A Mamba-2 layer as graph nodes. Knows no whole graph."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from edgespec.export.mamba import MambaRule

if TYPE_CHECKING:
    from edgespec.export.layers import LayerWriter


class MambaWriter:
    """Writes Mamba-2 layers with the parts of a transformer."""

    def __init__(self, write: "LayerWriter") -> None:
        self._write, self._states = write, write.recurrence

    def __call__(
        self, i: int, rule: MambaRule, x: ir.Value, past: Sequence[ir.Value], present: Sequence[ir.Value]
    ) -> ir.Value:
        """The layer's output for x; past and present are state and rows."""
        write, op, states, heads = self._write, self._write.op, self._states, rule.num_heads
        mixed = write.linear(f"{i}.mamba_mixed", x, [write.tensors[f"{i}.mamba_mixed"]])[0]
        step = write.linear.floats(f"{i}.mamba_dt", x, write.tensors[f"{i}.mamba_dt"])
        rows = states.rows([mixed, step], past[1], present[1])
        mixed, step = states.split(f"{i}.row", rows, [rule.num_mixed, heads])
        mixed = write.weighted_sum(f"{i}.mamba_conv", mixed, rule.convolved)
        if f"{i}.mamba_conv_bias" in write.tensors:
            mixed = op("Add", mixed, write.vector(f"{i}.mamba_conv_bias"))
        size = rule.num_groups * rule.state_size
        whole = op("QuickGelu", mixed, alpha=1.0)
        values, *keys_queries = states.split(f"{i}.mixed", whole, [rule.num_values, size, size])
        key, query = (self._of_all_heads(rule, y) for y in keys_queries)
        step = op("Add", states.behind(step, rule.convolved - 1), write.vector(f"{i}.mamba_shift"))
        step = states.softplus(step, heads)
        taken = self._by_head(rule, values, op("Unsqueeze", step, write.constant("axis_3", np.array([3]))))
        parts = [query, key, taken, op("Mul", step, write.vector(f"{i}.mamba_decay", rule.decay))]
        how = {"q_num_heads": heads, "kv_num_heads": heads, "update_rule": "gated", "scale": 1.0}
        read = states.read(i, parts, past[0], present[0], x, **how)
        skip = write.vector(f"{i}.mamba_skip", lambda stored: stored[:, None])
        return self._gated(i, rule, op("Add", read, self._by_head(rule, states.new(values), skip)), x)

    def _of_all_heads(self, rule: MambaRule, x: ir.Value) -> ir.Value:
        """Keys or queries of groups as one for each head."""
        repeated = self._states.repeated(
            self._states.of_heads(x, rule.state_size), rule.num_heads // rule.num_groups
        )
        return self._states.of_rows(repeated, rule.num_heads * rule.state_size)

    def _by_head(self, rule: MambaRule, values: ir.Value, factor: ir.Value) -> ir.Value:
        product = self._write.op("Mul", self._states.of_heads(values, rule.head_size), factor)
        return self._states.of_rows(product, rule.num_values)

    def _gated(self, i: int, rule: MambaRule, read: ir.Value, x: ir.Value) -> ir.Value:
        """The output, of values that a gate opens and that are normed by groups."""
        write, op = self._write, self._write.op
        z = write.linear(f"{i}.mamba_z", x, [write.tensors[f"{i}.mamba_z"]])[0]
        gated, size = op("Mul", read, op("QuickGelu", z, alpha=1.0)), rule.num_values // rule.num_groups
        one = write.constant(f"ones_{size}", np.ones(size, write.floats))
        eps = write.config.rms_eps
        normed = op(
            *("SimplifiedLayerNormalization", self._states.of_heads(gated, size), one),
            axis=-1,
            epsilon=eps,
            stash_type=1,
        )
        row = op("Mul", self._states.of_rows(normed, rule.num_values), write.vector(f"{i}.mamba_gain"))
        return write.linear(f"{i}.mamba_out", row, [write.tensors[f"{i}.mamba_out"]])[0]
