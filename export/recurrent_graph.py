"""Recurrent layers as graph nodes: Gated DeltaNets, Mamba-2 layers, and the parts that they share.

These are rows, the state behind the certain ones, and its reading. Knows no whole graph.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import onnx_ir as ir

from edgespec.export.delta import EPS, DeltaRule
from edgespec.export.mamba import MambaRule
from edgespec.export.nodes import Values
from edgespec.manifest.caches import NUM_SETTLED

if TYPE_CHECKING:
    from edgespec.export.layers import LayerWriter


_PACKET = 16  # numbers, of AVX-512


class _Spans(NamedTuple):
    """Where the rows of a pass are cut, for all layers.

    lengths: How many rows go into the state, and how many come behind them.
    first_new: The first row of a new token.
    first_read: The same among the rows that are read, which begin with an empty one in the gpu form.
    """

    lengths: ir.Value
    first_new: ir.Value
    first_read: ir.Value


class RecurrenceWriter:
    """Writes recurrent layers with the parts of a transformer; num_settled is an input of the graph."""

    def __init__(self, write: "LayerWriter") -> None:
        self._write = write
        self.num_settled = ir.val(NUM_SETTLED, ir.DataType.INT64, [1])
        self._spans: _Spans | None = None
        self._has_edges = not write.rule.has_fused_products

    def __call__(self, i: int, x: ir.Value, past: Values, present: Values) -> ir.Value:
        """The layer's output for x; past and present are state and rows."""
        layer = self._write.config.layers[i]
        if layer.delta is not None:
            return self._delta(i, layer.delta, x, past, present)
        assert layer.mamba is not None
        return self._mamba(i, layer.mamba, x, past, present)

    def _rows(self, parts: Values, past: ir.Value, present: ir.Value) -> ir.Value:
        """The rows of the past and of new tokens, of which present gets those that the next pass needs."""
        rows = self._write.op("Concat", past, self._write.op("Concat", *parts, axis=-1), axis=1)
        self._write.nodes.node("Slice", [rows, self.num_settled, *self._ends()], [present])
        return rows

    def _behind(self, x: ir.Value, count: int) -> ir.Value:
        """The rows of x behind the first ones, which the convolution alone reads."""
        return self._write.op("Slice", x, self._write.ints(count), *self._ends())

    def _new(self, x: ir.Value) -> ir.Value:
        """The rows of x of new tokens, after a call of _read."""
        assert self._spans is not None
        return self._write.op("Slice", x, self._spans.first_new, *self._ends())

    def _read(self, i: int, parts: Values, past: ir.Value, present: ir.Value, x: ir.Value, **how: Any) -> ir.Value:
        """The values that new tokens read from the state, which is given as it is behind the settled rows.

        In the gpu form a row of zeros stands before all rows and one behind them, so that both parts have a row:
        without one, WebGPU's kernel ends the process. Zeros leave a state as it is.

        Args:
            parts: Queries, keys, values and what the rule takes beside them, of all rows.
            how: Attributes of LinearAttention.
        """
        write = self._write
        spans = self._find_spans(parts[0], x)
        if self._has_edges:
            pads = write.ints(0, 1, 0, 0, 1, 0)
            parts = [write.op("Pad", part, pads) for part in parts]
        cut = []
        for at, part in enumerate(parts):
            halves = [ir.Value(name=f"{i}.{at}.{n}") for n in "ab"]
            cut.append(write.nodes.node("Split", [part, spans.lengths], halves, axis=1))
        settled, guessed = zip(*cut, strict=True)
        first = ir.Value(name=f"{i}.settled")
        write.nodes.node("LinearAttention", [*settled[:3], past, *settled[3:]], [first, present], **how)
        outputs = [ir.Value(name=f"{i}.guessed"), ir.Value(name=f"{i}.guessed_state")]
        write.nodes.node("LinearAttention", [*guessed[:3], present, *guessed[3:]], outputs, **how)
        rows, (end, axis) = write.op("Concat", first, outputs[0], axis=1), self._ends()
        end = write.ints(-1) if self._has_edges else end
        return write.op("Slice", rows, spans.first_read, end, axis)

    def _split(self, name: str, x: ir.Value, sizes: Sequence[int]) -> Values:
        return self._write.nodes.split(x, [f"{name}.{at}" for at in range(len(sizes))], *sizes)

    def _softplus(self, x: ir.Value, width: int) -> ir.Value:
        """log(1 + exp(x)) of rows of a width.

        The kernel computes the last numbers of a whole pass in another way than those in packets before them. So
        rows are lengthened to whole packets, for which all numbers of a row are alike wherever it lies.
        """
        missing = -width % _PACKET
        if not missing:
            return self._write.op("Softplus", x)
        pads = self._write.ints(0, 0, 0, 0, 0, missing)
        longer = self._write.op("Softplus", self._write.op("Pad", x, pads))
        return self._split(f"{longer.name}.cut", longer, [width, missing])[0]

    def _of_heads(self, x: ir.Value, size: int) -> ir.Value:
        """x as heads of a size, [1, num_tokens, num_heads, size]."""
        return self._write.op("Reshape", x, self._write.ints(0, 0, -1, size))

    def _of_rows(self, x: ir.Value, width: int) -> ir.Value:
        """Heads, or heads of heads, side by side again."""
        return self._write.op("Reshape", x, self._write.ints(1, -1, width))

    def _repeated(self, x: ir.Value, times: int) -> ir.Value:
        """Each head of x so many times in a row, as heads of heads."""
        apart = self._write.op("Unsqueeze", x, self._write.ints(3))
        return self._write.op("Expand", apart, self._write.ints(1, 1, 1, times, 1))

    def _find_spans(self, rows: ir.Value, x: ir.Value) -> _Spans:
        if self._spans is None:
            op = self._write.op
            total, new = (op("Shape", y, start=1, end=2) for y in (rows, x))
            first_new, first_read = (op("Sub", total, new),) * 2
            lengths = op("Concat", self.num_settled, op("Sub", total, self.num_settled), axis=0)
            if self._has_edges:
                one = self._write.ints(1)
                lengths, first_read = op("Add", lengths, one), op("Add", first_new, one)
            self._spans = _Spans(lengths, first_new, first_read)
        return self._spans

    def _ends(self) -> tuple[ir.Value, ir.Value]:
        return self._write.ints(np.iinfo(np.int64).max), self._write.ints(1)

    def _delta(self, i: int, rule: DeltaRule, x: ir.Value, past: Values, present: Values) -> ir.Value:
        write, op, heads = self._write, self._write.op, rule.num_value_heads
        qkv = write.product(f"{i}.delta_qkv", x)
        gates = [write.float_product(f"{i}.delta_{part}", x) for part in "ab"]
        rows = self._rows([qkv, *gates], past[1], present[1])
        mixed, a, b = self._split(f"{i}.row", rows, [rule.num_mixed, heads, heads])
        mixed = write.silu(write.weighted_sum(f"{i}.delta_conv", mixed, rule.convolved))
        keys = rule.num_key_heads * rule.key_size
        queries, keys_, values = self._split(f"{i}.mixed", mixed, [keys, keys, heads * rule.value_size])
        parts = [self._unit(rule, queries), self._unit(rule, keys_), values]
        a, b = (self._behind(gate, rule.convolved - 1) for gate in (a, b))
        shifted = self._softplus(op("Add", a, write.vector(f"{i}.delta_shift")), heads)
        parts += [op("Mul", shifted, write.vector(f"{i}.delta_decay", rule.decay)), op("Sigmoid", b)]
        how = {"q_num_heads": heads, "kv_num_heads": heads, "update_rule": "gated_delta", "scale": 0.0}
        read = self._read(i, parts, past[0], present[0], x, **how)
        z = write.product(f"{i}.delta_z", x)
        normed = write.norm(self._of_heads(read, rule.value_size), f"{i}.delta_gain")
        row = self._of_rows(normed, heads * rule.value_size)
        return write.product(f"{i}.delta_out", op("Mul", row, write.silu(z)))

    def _unit(self, rule: DeltaRule, x: ir.Value) -> ir.Value:
        """Queries or keys of length 1, one for each value head."""
        write, op, size = self._write, self._write.op, rule.key_size
        gain = write.constant("unit_gain", np.full(size, size**-0.5, write.floats))
        heads = self._of_heads(x, size)
        unit = op("SimplifiedLayerNormalization", heads, gain, axis=-1, epsilon=EPS / size, stash_type=1)
        times = rule.num_value_heads // rule.num_key_heads
        if times > 1 and rule.is_apart:
            unit = op("Concat", *[unit] * times, axis=2)
        elif times > 1:
            unit = self._repeated(unit, times)
        return self._of_rows(unit, rule.num_value_heads * size)

    def _mamba(self, i: int, rule: MambaRule, x: ir.Value, past: Values, present: Values) -> ir.Value:
        write, op, heads = self._write, self._write.op, rule.num_heads
        mixed = write.product(f"{i}.mamba_mixed", x)
        step = write.float_product(f"{i}.mamba_dt", x)
        rows = self._rows([mixed, step], past[1], present[1])
        mixed, step = self._split(f"{i}.row", rows, [rule.num_mixed, heads])
        mixed = write.weighted_sum(f"{i}.mamba_conv", mixed, rule.convolved, rule.convolution)
        if f"{i}.mamba_conv_bias" in write.tensors:
            mixed = op("Add", mixed, write.vector(f"{i}.mamba_conv_bias"))
        size = rule.num_groups * rule.state_size
        values, *keys_queries = self._split(f"{i}.mixed", write.silu(mixed), [rule.num_values, size, size])
        key, query = (self._of_all_heads(rule, y) for y in keys_queries)
        step = write.scale(self._behind(step, rule.convolved - 1), rule.scales.steps)
        step = op("Add", step, write.vector(f"{i}.mamba_shift"))
        step = self._softplus(step, heads)
        taken = self._by_head(rule, values, op("Unsqueeze", step, write.ints(3)))
        parts = [query, key, taken, op("Mul", step, write.vector(f"{i}.mamba_decay", rule.decay))]
        how = {"q_num_heads": heads, "kv_num_heads": heads, "update_rule": "gated", "scale": 1.0}
        read = self._read(i, parts, past[0], present[0], x, **how)
        skip = write.vector(f"{i}.mamba_skip", lambda stored: stored[:, None])
        read = op("Add", read, self._by_head(rule, self._new(values), skip))
        z = write.scale(write.product(f"{i}.mamba_z", x), rule.scales.gate)
        row, size = op("Mul", read, write.silu(z)), rule.num_values // rule.num_groups
        if f"{i}.mamba_gain" in write.tensors:
            one = write.constant(f"ones_{size}", np.ones(size, write.floats))
            normed = write.rms_norm(self._of_heads(row, size), one)
            row = op("Mul", self._of_rows(normed, rule.num_values), write.vector(f"{i}.mamba_gain"))
        return write.scale(write.product(f"{i}.mamba_out", row), rule.scales.output)

    def _of_all_heads(self, rule: MambaRule, x: ir.Value) -> ir.Value:
        """Keys or queries of groups as one for each head."""
        repeated = self._repeated(self._of_heads(x, rule.state_size), rule.num_heads // rule.num_groups)
        return self._of_rows(repeated, rule.num_heads * rule.state_size)

    def _by_head(self, rule: MambaRule, values: ir.Value, factor: ir.Value) -> ir.Value:
        product = self._write.op("Mul", self._of_heads(values, rule.head_size), factor)
        return self._of_rows(product, rule.num_values)
