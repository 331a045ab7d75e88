"""Parts of a transformer as graph nodes: norms, attention over a cache, MLPs and experts. Knows no whole graph."""

import math
from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from edgespec.export.blocks import Floats
from edgespec.export.decoder_config import DecoderConfig, QueryGrowth
from edgespec.export.experts import ExpertsWriter
from edgespec.export.linear import PartWriter
from edgespec.export.nodes import Values
from edgespec.export.precision import Rule
from edgespec.export.recurrent_graph import RecurrenceWriter
from edgespec.export.rotary import Rotary
from edgespec.export.tensors import Tensors
from edgespec.export.weights import WeightsFile
from edgespec.manifest.caches import row_names, state_names

Lengths = tuple[ir.Value, ir.Value]  # what LayerWriter.lengths gives


class LayerWriter(PartWriter):
    """Writes parts of a transformer into one graph, and their weights into the file.

    tree: The inputs of a tree graph by name; empty in another one.
    """

    def __init__(
        self,
        config: DecoderConfig,
        tensors: Tensors,
        weights: WeightsFile,
        rule: Rule,
        *,
        has_tree_inputs: bool = False,
    ) -> None:
        super().__init__(tensors, weights, rule)
        self.config = config
        self.experts = ExpertsWriter(self)
        self.tables: dict[Rotary, tuple[ir.Value, ir.Value]] = {}
        self.biases: dict[ir.Value, ir.Value] = {}
        self._positions: ir.Value | None = None
        self._scales: ir.Value | None = None
        # GPUs, whose attention without new keys ignores windows in WebGPU, get those of the other layer.
        self.lends_new_keys = not rule.has_fused_products
        # WebGPU's attention never reads position_ids.
        self.rotates_apart = has_tree_inputs and not rule.has_fused_products
        self._lent: dict[int, list[ir.Value | None]] = {}
        self.recurrence = RecurrenceWriter(self)
        self.tree = _tree_inputs(self.config) if has_tree_inputs else {}

    def caches(self, number: int, layer: int | None = None) -> tuple[list[ir.Value], list[ir.Value]]:
        """Keys and values of a layer, or the rows of its convolution, as inputs of the graph and as its outputs.

        number: Of the layer among those that the graph has, where these are not all of the model's.
        """
        at = number if layer is None else layer
        own_layer = self.config.layers[at]
        states: tuple[list[ir.Value], list[ir.Value]] = [], []
        if (kept := self.config.recurrence) and own_layer.recurrent:
            shapes = (1, *kept.state_shape), ("batch", f"rows.{number}", kept.row_width)
            for names, shape in zip((state_names(number), row_names(number)), shapes, strict=True):
                for side, name in zip(states, names, strict=True):
                    side.append(ir.val(name, self.type, shape))
            if not own_layer.has_both:
                return states
        if tokens := own_layer.convolved:
            (before, own), width = row_names(number), self.config.hidden_size
            read = ir.val(before, self.type, ("batch", tokens - 1, width))
            return [read], [ir.val(own, self.type, ("batch", "num_tokens", width))]
        shape = ("batch", self.config.kv_heads(at), "capacity", self.config.head_size(at))
        past, present = (
            [ir.val(f"{side}.{number}.{part}", self.type, shape) for part in ("key", "value")]
            for side in ("past_key_values", "present")
        )
        return past + states[0], present + states[1]

    def as_float(self, x: ir.Value) -> ir.Value:
        return x if self.type == ir.DataType.FLOAT else self.op("Cast", x, to=int(ir.DataType.FLOAT))

    def norm(self, x: ir.Value, role: str) -> ir.Value:
        """RMSNorm of x; x itself where the model has no such norm."""
        return self.rms_norm(x, self.vector(role)) if role in self.tensors else x

    def rms_norm(self, x: ir.Value, gain: ir.Value) -> ir.Value:
        kind, epsilon = "SimplifiedLayerNormalization", self.config.rms_eps
        return self.op(kind, x, gain, axis=-1, epsilon=epsilon, stash_type=1)

    def lengths(self, mask: ir.Value) -> tuple[ir.Value, ir.Value]:
        """GroupQueryAttention's seqlens_k (total − 1, int32 [batch]) and total_sequence_length (int32)."""
        counted = self.op("ReduceSum", mask, self.ints(1), keepdims=0)
        last = self.op("Sub", counted, self.ints(1))
        total = self.op("Gather", self.op("Shape", mask), self.constant("index_1", np.array(1)), axis=0)
        int32 = int(ir.DataType.INT32)
        return self.op("Cast", last, to=int32), self.op("Cast", total, to=int32)

    def rotary_tables(self, rotary: Rotary) -> tuple[ir.Value, ir.Value]:
        """Cosines and sines by position, shared by all layers with the rotary."""
        if rotary not in self.tables:
            angles = np.outer(np.arange(self.config.context_length, dtype=np.float32), rotary.inv_freq)
            # Its index among the rotaries of the whole model, whichever layers are kept.
            number = list(dict.fromkeys(layer.rotary for layer in self.config.layers)).index(rotary)
            scale = np.float32(rotary.scale)
            cos, sin = ((wave(angles) * scale).astype(self.floats) for wave in (np.cos, np.sin))
            self.tables[rotary] = (
                self.weights.append(f"cos_{number}", [cos], cos.shape),
                self.weights.append(f"sin_{number}", [sin], sin.shape),
            )
        return self.tables[rotary]

    def positions(self, x: ir.Value, lengths: Lengths) -> ir.Value:
        """Positions of the tokens of a pass, int64 [batch, num_tokens]; by lengths where they are no input."""
        if self.tree:
            return self.tree["position_ids"]
        if self._positions is None:
            int64 = int(ir.DataType.INT64)
            count = self.op("Gather", self.op("Shape", x), self.constant("index_1", np.array(1)), axis=0)
            first, step = self.constant("first", np.array(0)), self.constant("step", np.array(1))
            behind = self.op("Sub", self.op("Range", first, count, step), self.op("Sub", count, step))
            last = self.op("Unsqueeze", self.op("Cast", lengths[0], to=int64), self.ints(1))
            self._positions = self.op("Add", last, behind)
        return self._positions

    def _query_scales(self, growth: QueryGrowth, x: ir.Value, lengths: Lengths) -> ir.Value:
        """The factor of each token's query, [batch, num_tokens, 1]."""
        if self._scales is None:
            table = growth.scales(self.config.context_length).astype(self.floats)[:, None]
            scales = self.weights.append("query_scales", [table], table.shape)
            self._scales = self.op("Gather", scales, self.positions(x, lengths), axis=0)
        return self._scales

    def attention(
        self,
        i: int,
        x: ir.Value,
        past: Values,
        present: Values,
        lengths: Lengths,
        num_wanted: ir.Value | None = None,
    ) -> ir.Value:
        """num_wanted: How many rows, the last ones, are computed whole; of others keys and values alone."""
        roles = [f"{i}.{part}" for part in self.config.projections(i)]
        projected: list[ir.Value | None] = [*self.products(f"{i}.qkv", x, roles)]
        if f"{i}.q_norm" in self.tensors and not self.config.norms_rotated:
            projected = self._norm_heads(i, projected)
        layer = self.config.layers[i]
        if layer.keys_of is not None:
            projected, present = self._with_keys_of(layer.keys_of, projected, i)
        elif self.lends_new_keys and i in {other.keys_of for other in self.config.layers}:
            projected = self._split_heads(i, projected)
            self._lent[i] = projected[1:]
        tables = () if layer.rotary is None else self.rotary_tables(layer.rotary)
        if layer.rotary is not None and (self.rotates_apart or self.config.norms_rotated):
            *rotated, value = self._split_heads(i, projected)
            at = self.positions(x, lengths)
            projected = [*(self.rotate(y, layer.rotary, part, at, i) for part, y in enumerate(rotated)), value]
            tables = ()
            if self.config.norms_rotated:
                projected = self._norm_heads(i, projected)
        growth = self.config.query_growth
        if growth is not None and growth.period < self.config.context_length:
            query, *others = self._split_heads(i, projected)
            projected = [self.op("Mul", query, self._query_scales(growth, x, lengths)), *others]
        projected += [None] * (3 - len(projected))  # one value: query, key and value packed
        inputs = [*projected, *past, *lengths, *tables]
        if self.tree:
            inputs += [None] * (9 - len(inputs))
            bias = self.tree["local_attention_bias" if layer.sliding_window else "attention_bias"]
            if bias not in self.biases:
                self.biases[bias] = self.as_activation(bias)
            inputs += [self.tree["position_ids"] if tables else None, self.biases[bias]]
        if f"{i}.sinks" in self.tensors:
            inputs += [None] * (11 - len(inputs)) + [self.vector(f"{i}.sinks")]
        attended = self.nodes.node(
            "GroupQueryAttention",
            inputs,
            outputs=[ir.Value(name=f"{i}.attended"), *present],
            do_rotary=int(bool(tables)),
            # A window counts cache entries, which in a tree are not positions.
            local_window_size=-1 if self.tree else layer.sliding_window or -1,
            num_heads=self.config.num_heads,
            kv_num_heads=self.config.kv_heads(i),
            scale=self.config.attention_scale,
            softcap=self.config.attention_cap or 0.0,
        )[0]
        if num_wanted is not None:
            attended = self.last_rows(attended, num_wanted)
        if f"{i}.q_gate" in self.tensors:
            x = x if num_wanted is None else self.last_rows(x, num_wanted)
            attended = self.op("Mul", attended, self.op("Sigmoid", self.product(f"{i}.q_gate", x)))
        return self.scale(self.product(f"{i}.o", attended), self.config.attended_scale)

    def _with_keys_of(
        self, source: int, query: list[ir.Value | None], i: int
    ) -> tuple[list[ir.Value | None], list[ir.Value]]:
        """Query, key and value of a layer that has keys of another one, and what it gives beside attention.

        Its past is that of the other layer with the new tokens, so that it has no keys. In the gpu form its past
        is without them, and it has the keys of the other layer.
        """
        if self.lends_new_keys:
            return query + self._lent[source], [ir.Value(name=f"{i}.{part}_again") for part in "kv"]
        size = self._head_sizes(i)[1]
        none = self.constant(f"no_keys_of_{size}", np.zeros((1, 0, size), self.floats))
        return [*query, none, none], []

    def convolution(self, i: int, x: ir.Value, past: ir.Value, present: ir.Value) -> ir.Value:
        """A gated short convolution over the rows of tokens, as in LFM2.

        A token's row is gated; the last rows, each times its weights, are added and gated once more.
        """
        names = [f"{i}.{part}" for part in ("row_gate", "sum_gate", "ungated")]
        row_gate, sum_gate, ungated = self.nodes.split(self.product(f"{i}.conv_in", x), names)
        self.nodes.node("Mul", [row_gate, ungated], [present])
        rows = self.op("Concat", past, present, axis=1)
        total = self.weighted_sum(f"{i}.conv", rows, self.config.layers[i].convolved)
        total.name = f"{i}.convolved"
        return self.product(f"{i}.conv_out", self.op("Mul", sum_gate, total))

    def weighted_sum(
        self, role: str, rows: ir.Value, count: int, change: Callable[[Floats], Floats] = lambda stored: stored
    ) -> ir.Value:
        """A causal convolution by channel: each count rows in a row, times their changed weights, added up."""
        weights = change(self.tensors[role].vector()).astype(self.floats).reshape(-1, count)
        total: ir.Value | None = None
        for at in range(count):
            places = self.ints(at), self.ints(at + 1 - count or np.iinfo(np.int64).max), self.ints(1)
            own = self.weights.append(f"{role}.{at}", [np.ascontiguousarray(weights[:, at])], [len(weights)])
            term = self.op("Mul", self.op("Slice", rows, *places), own)
            total = term if total is None else self.op("Add", total, term)
        assert total is not None
        return total

    def _norm_heads(self, i: int, projected: list[ir.Value | None]) -> list[ir.Value | None]:
        """RMSNorm of queries and keys over each head, or over all heads at once, by the number of gains.

        Values that are normed have no gain.
        """
        projected = self._split_heads(i, projected)
        if not self.config.layers[i].has_values and len(projected) == 2:
            projected = [*projected, projected[1]]
        for at, part in enumerate("qkv"[: len(projected)]):
            if part == "v" and not self.config.norms_values:
                continue
            role, size = f"{i}.{part}_norm", self._head_sizes(i)[at]
            columns = self.config.head_size(i) if part == "v" else self.tensors[role].columns
            ones = np.ones(columns, self.floats)
            gain = self.weights.append(f"ones_{columns}", [ones], [columns]) if part == "v" else self.vector(role)
            norm = self.rms_norm(self.op("Reshape", projected[at], self.ints(0, 0, -1, columns)), gain)
            projected[at] = self.op("Reshape", norm, self.ints(0, 0, size))
        return projected

    def _split_heads(self, i: int, projected: list[ir.Value | None]) -> list[ir.Value | None]:
        """Queries, keys and values as a value each."""
        parts = self.config.projections(i)
        if len(projected) > 1 or len(parts) == 1:
            return projected
        (whole,) = projected
        assert whole is not None
        names, sizes = [f"{i}.{part}.out" for part in parts], self._head_sizes(i)[: len(parts)]
        return [*self.nodes.split(whole, names, *sizes)]

    def _head_sizes(self, i: int) -> list[int]:
        """Columns of all queries, keys and values of a layer."""
        heads = (self.config.num_heads, self.config.kv_heads(i), self.config.kv_heads(i))
        return [num_heads * self.config.head_size(i) for num_heads in heads]

    def rotate(self, x: ir.Value | None, rotary: Rotary, part: int, positions: ir.Value, i: int = 0) -> ir.Value:
        """Queries, part 0, or keys, part 1, of a layer rotated by position."""
        inputs = (x, positions, *self.rotary_tables(rotary))
        if rotary.rotated == self.config.head_size(i):
            return self.op("RotaryEmbedding", *inputs)
        heads = self._head_sizes(i)[part] // self.config.head_size(i)
        return self.op("RotaryEmbedding", *inputs, num_heads=heads, rotary_embedding_dim=rotary.rotated)

    def layer_inputs(self, input_ids: ir.Value, embedded: ir.Value) -> list[ir.Value]:
        """Inputs of layers beside the residual stream, [batch, num_tokens, layer_input_size] each.

        Half is an embedding of its own, half is made of the usual one.
        """
        config, op = self.config, self.op
        size, roles = config.layer_input_size, ("layer_embedding", "layer_projection", "layer_projection_norm")
        table = self.tensors[roles[0]]
        own = self.scale(self.rows(roles[0], input_ids), math.sqrt(size))
        made = self.scale(self.product(roles[1], embedded), config.hidden_size**-0.5)
        normed = self.norm(op("Reshape", made, self.ints(0, 0, config.num_layers, size)), roles[2])
        both = op("Add", op("Reshape", normed, self.ints(0, 0, table.columns)), own)
        names = [f"{i}.input" for i in range(config.num_layers)]
        return self.nodes.split(self.scale(both, math.sqrt(0.5)), names)

    def add_layer_input(self, i: int, residual: ir.Value, layer_input: ir.Value) -> ir.Value:
        """The residual stream with a layer's input, which a gate made of the stream opens."""
        gate = self.product(f"{i}.input_gate", residual)
        added = self.product(f"{i}.input_projection", self.op("Mul", self._activate(gate), layer_input))
        return self.op("Add", residual, self.norm(added, f"{i}.added_norm"))

    def scale_output(self, i: int, x: ir.Value) -> ir.Value:
        """The residual stream after a layer, times the layer's number where it has one."""
        return self.op("Mul", x, self.vector(role)) if (role := f"{i}.output_scale") in self.tensors else x

    def scale(self, x: ir.Value, scale: float) -> ir.Value:
        if scale == 1.0:
            return x
        return self.op("Mul", x, self.constant(f"scale_{scale:g}", np.array(scale, self.floats)))

    def cap(self, logits: ir.Value) -> ir.Value:
        cap = self.config.logit_cap
        return logits if cap is None else self.scale(self.op("Tanh", self.scale(logits, 1 / cap)), cap)

    def mlp(self, i: int, x: ir.Value) -> ir.Value:
        routing = self.config.routing
        if routing is None or i < routing.num_dense:
            return self._gated(str(i), x)
        mixed = self.experts(i, x, routing)
        return self.op("Add", mixed, self._shared(f"{i}.shared", x)) if routing.shared_size else mixed

    def _shared(self, name: str, x: ir.Value) -> ir.Value:
        """The expert that every token goes through, times a share of the token's own where there is one."""
        fed, router = self._gated(name, x), f"{name}.router"
        if router not in self.tensors:
            return fed
        return self.op("Mul", fed, self.op("Sigmoid", self.float_product(router, x)))

    def _gated(self, i: str, x: ir.Value) -> ir.Value:
        """An MLP whose roles begin with i."""
        parts = self.products(f"{i}.gate_up", x, [f"{i}.gate", f"{i}.up"])
        if len(parts) == 1:
            parts = self.nodes.split(parts[0], [f"{i}.gate.out", f"{i}.up.out"])
        gate, up = parts
        active = self.op("Mul", self._activate(self.scale(gate, self.config.gate_scale)), up)
        return self.scale(self.product(f"{i}.down", active), self.config.fed_scale)

    def _activate(self, gate: ir.Value) -> ir.Value:
        is_silu = self.config.activation == "silu"
        return self.silu(gate) if is_silu else self.op("Gelu", gate, approximate="tanh")

    def add_norm(self, x: ir.Value, residual: ir.Value, role: str) -> tuple[ir.Value, ir.Value]:
        """RMSNorm of x + residual, and the sum itself; the sum twice where the model has no such norm."""
        if role not in self.tensors:
            total = self.op("Add", x, residual)
            return total, total
        kind, inputs = "SkipSimplifiedLayerNormalization", [x, residual, self.vector(role)]
        outputs = [ir.Value(name=name) for name in (f"{role}.out", "", "", f"{role}.sum")]
        self.nodes.node(kind, inputs, outputs, epsilon=self.config.rms_eps)
        return outputs[0], outputs[3]

    def last_rows(self, x: ir.Value, num_logits: ir.Value) -> ir.Value:
        # Counted from the shape, since the host computes lengths; a negated number would be computed on the device
        # and copied back in the midst of the pass.
        start = self.op("Sub", self.op("Shape", x, start=1, end=2), num_logits)
        return self.op("Slice", x, start, self.ints(np.iinfo(np.int64).max), self.ints(1))


def _tree_inputs(config: DecoderConfig) -> dict[str, ir.Value]:
    windows = {layer.sliding_window is not None for layer in config.layers}
    names = {False: "attention_bias", True: "local_attention_bias"}
    shape: list[str | int] = ["batch", 1, "num_tokens", "total_tokens"]
    biases = [ir.val(names[is_local], ir.DataType.FLOAT, shape) for is_local in sorted(windows)]
    positions = ir.val("position_ids", ir.DataType.INT64, ["batch", "num_tokens"])
    return {str(value.name): value for value in (positions, *biases)}
