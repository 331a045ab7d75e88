"""The graph of a decoder-only transformer in ONNX, weights and all.

Inputs, for a batch of one:
    input_ids            int64 [batch, num_tokens]   the tokens that the cache does not hold
    attention_mask       int64 [batch, total]        ones; total counts cached and new tokens
    num_logits_to_keep   int64 [1]                   how many of the last positions get logits
    past_key_values.{i}.key, .value  float32 or float16 [batch, num_kv_heads, capacity, head_dim]
Outputs:
    logits               float32 [batch, num_logits_to_keep, vocab_size]
    present.{i}.key, .value          the same buffers as past_key_values
A graph with a best token also outputs
    best                 float32 [batch, num_logits_to_keep, 2]   for each row the id of the likeliest token,
                                                                  the lowest of equal ones, and the sum of logits
A tree graph also takes
    position_ids         int64 [batch, num_tokens]
    attention_bias       float32 [batch, 1, num_tokens, total]   added to the scores, large and negative to hide
    local_attention_bias the bias of layers that see a window, if there are any; it states the window
and needs a past that is not empty: ONNX Runtime's CPU provider ignores position_ids otherwise. In the gpu form
RotaryEmbedding rotates queries and keys before attention, since WebGPU's attention never reads position_ids.
A graph with hidden states also outputs, for some layers,
    hidden_states.{i}    float32 [batch, num_tokens, hidden_size]   the residual stream behind layer i, before any
                                                                    norm; with i = num_layers the state behind the
                                                                    final norm

Attention is com.microsoft GroupQueryAttention with rotary inside; quantised weights are MatMulNBits with
activations in 8 bits (accuracy_level 4). Knows nothing of sources and folders.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from edgespec.export.experts import ExpertsWriter
from edgespec.export.families import DecoderConfig, Routing
from edgespec.export.linear import LinearWriter
from edgespec.export.nodes import Nodes, make_output, typed_value
from edgespec.export.precision import Rule
from edgespec.export.rotary import Rotary
from edgespec.export.tensors import StoredTensor
from edgespec.export.weights import WeightsFile


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One of the graphs over a weights file.

    layers: The layers to keep, all unless given (self-speculative drafting: Zhang et al., arXiv:2309.08168).
    head: Role of the head among the tensors.
    rotates_apart: RotaryEmbedding rotates queries and keys, and not the attention.
    """

    layers: tuple[int, ...] | None = None
    head: str = "head"
    has_tree_inputs: bool = False
    rotates_apart: bool = False
    has_best: bool = False
    hidden_layers: tuple[int, ...] = ()


def build_graph(
    config: DecoderConfig,
    tensors: Mapping[str, StoredTensor],
    weights: WeightsFile,
    rule: Rule,
    variant: Variant = Variant(),
) -> ir.Model:
    """Write the weights that the file does not hold yet, and return the graph over it."""
    return _Decoder(config, tensors, weights, rule, variant).build()


@dataclass
class _Decoder:
    config: DecoderConfig
    tensors: Mapping[str, StoredTensor]
    weights: WeightsFile
    rule: Rule
    variant: Variant

    def __post_init__(self) -> None:
        self.nodes = Nodes()
        self.op, self.constant = self.nodes.op, self.nodes.constant
        self.linear = LinearWriter(self.nodes, self.weights, self.rule)
        self.experts = ExpertsWriter(self.nodes, self.weights, self.rule)
        self.type = ir.DataType.FLOAT16 if self.rule.is_half else ir.DataType.FLOAT
        self.floats = np.float16 if self.rule.is_half else np.float32
        self.tables: dict[Rotary, tuple[ir.Value, ir.Value]] = {}
        self.biases: dict[ir.Value, ir.Value] = {}
        self.tree = _tree_inputs(self.config) if self.variant.has_tree_inputs else {}

    def build(self) -> ir.Model:
        config = self.config
        input_ids = typed_value("input_ids", ir.DataType.INT64, ["batch", "num_tokens"])
        mask = typed_value("attention_mask", ir.DataType.INT64, ["batch", "total_tokens"])
        num_logits = typed_value("num_logits_to_keep", ir.DataType.INT64, [1])
        lengths = self._lengths(mask)
        inputs, outputs = [input_ids, mask, num_logits, *self.tree.values()], []
        layers = range(config.num_layers) if self.variant.layers is None else self.variant.layers

        embedded, head = self.linear.embedding(
            self.tensors["embedding"], input_ids, self.variant.head, self.tensors.get(self.variant.head)
        )
        residual = self._scale(embedded, self.config.embedding_scale)
        norms = [*(f"{i}.input_norm" for i in layers), "final_norm"]
        normed = self._norm(residual, norms[0])
        for number, i in enumerate(layers):
            past = [self._cache(f"past_key_values.{number}.{part}") for part in ("key", "value")]
            present = [self._cache(f"present.{number}.{part}") for part in ("key", "value")]
            attended = self._norm(self._attention(i, normed, past, present, lengths), f"{i}.attended_norm")
            attended = self._scale(attended, config.residual_scale)
            normed, residual = self._add_norm(attended, residual, f"{i}.mlp_norm")
            fed = self._scale(self._norm(self._mlp(i, normed), f"{i}.fed_norm"), config.residual_scale)
            normed, residual = self._add_norm(fed, residual, norms[number + 1])
            inputs += past
            outputs += present
            if i in self.variant.hidden_layers:
                outputs.append(self._hidden_output(i, residual))
        if config.num_layers in self.variant.hidden_layers:
            outputs.append(self._hidden_output(config.num_layers, normed))
        logits = self._cap(head(self._scale(self._last_rows(normed, num_logits), config.logit_scale)))
        rows = self.tensors.get(self.variant.head, self.tensors["embedding"]).rows
        shape = ("batch", "num_logits", rows)
        logits = make_output(self._as_float(logits), "logits", ir.DataType.FLOAT, shape)
        if self.variant.has_best:
            outputs.append(self._best(logits, rows))
        return self.nodes.model("decoder", inputs, [logits, *outputs], context_length=str(config.context_length))

    def _best(self, logits: ir.Value, vocab_size: int) -> ir.Value:
        """The likeliest token of each row and the sum of the row, [batch, num_logits, 2].

        Not by ArgMax: WebGPU's scans a row with one thread, and CUDA's did until August 2026 (5 ms a row of
        200,000: onnxruntime pull request 32092). Maxima can hide NaN, a sum does not.
        """
        last = self.constant("axis_2", np.array([2]))
        ids = self.weights.append("token_ids", [np.arange(vocab_size, dtype=np.float32)], [vocab_size])
        none = self.constant("no_token", np.array(vocab_size, np.float32))
        is_largest = self.op("Equal", logits, self.op("ReduceMax", logits, last))
        first = self.op("ReduceMin", self.op("Where", is_largest, ids, none), last)
        best = self.op("Concat", first, self.op("ReduceSum", logits, last), axis=2)
        return make_output(best, "best", ir.DataType.FLOAT, ["batch", "num_logits", 2])

    def _hidden_output(self, i: int, state: ir.Value) -> ir.Value:
        hidden = self.op("Cast", state, to=int(ir.DataType.FLOAT))
        shape = ("batch", "num_tokens", self.config.hidden_size)
        return make_output(hidden, f"hidden_states.{i}", ir.DataType.FLOAT, shape)

    def _cache(self, name: str) -> ir.Value:
        return typed_value(name, self.type, ["batch", self.config.num_kv_heads, "capacity", self.config.head_dim])

    def _cast_bias(self, bias: ir.Value) -> ir.Value:
        if self.type == ir.DataType.FLOAT:
            return bias
        if bias not in self.biases:
            self.biases[bias] = self.op("Cast", bias, to=int(self.type))
        return self.biases[bias]

    def _as_float(self, x: ir.Value) -> ir.Value:
        return x if self.type == ir.DataType.FLOAT else self.op("Cast", x, to=int(ir.DataType.FLOAT))

    def _vector(self, role: str) -> ir.Value:
        vector = self.tensors[role].vector().astype(self.floats)
        return self.weights.append(role, [vector], vector.shape)

    def _norm(self, x: ir.Value, role: str) -> ir.Value:
        """RMSNorm of x; x itself where the model has no such norm."""
        if role not in self.tensors:
            return x
        kind, gain = "SimplifiedLayerNormalization", self._vector(role)
        return self.op(kind, x, gain, axis=-1, epsilon=self.config.rms_eps, stash_type=1)

    def _lengths(self, mask: ir.Value) -> tuple[ir.Value, ir.Value]:
        """GroupQueryAttention's seqlens_k (total − 1, int32 [batch]) and total_sequence_length (int32)."""
        counted = self.op("ReduceSum", mask, self.constant("axis_1", np.array([1])), keepdims=0)
        last = self.op("Sub", counted, self.constant("one", np.array([1])))
        total = self.op("Gather", self.op("Shape", mask), self.constant("index_1", np.array(1)), axis=0)
        int32 = int(ir.DataType.INT32)
        return self.op("Cast", last, to=int32), self.op("Cast", total, to=int32)

    def _tables(self, rotary: Rotary) -> tuple[ir.Value, ir.Value]:
        """Cosines and sines by position, shared by all layers with the rotary."""
        if rotary not in self.tables:
            angles = np.outer(np.arange(self.config.context_length, dtype=np.float32), rotary.inv_freq)
            scale, number = np.float32(rotary.scale), self._number(rotary)
            cos, sin = ((wave(angles) * scale).astype(self.floats) for wave in (np.cos, np.sin))
            self.tables[rotary] = (
                self.weights.append(f"cos_{number}", [cos], cos.shape),
                self.weights.append(f"sin_{number}", [sin], sin.shape),
            )
        return self.tables[rotary]

    def _number(self, rotary: Rotary) -> int:
        """Its index among the rotaries of the whole model, whichever layers are kept."""
        return list(dict.fromkeys(layer.rotary for layer in self.config.layers)).index(rotary)

    def _attention(
        self,
        i: int,
        x: ir.Value,
        past: Sequence[ir.Value],
        present: Sequence[ir.Value],
        lengths: tuple[ir.Value, ir.Value],
    ) -> ir.Value:
        roles = [f"{i}.{part}" for part in "qkv"]
        weights = [self.tensors[role] for role in roles]
        biases = [self.tensors.get(f"{role}_bias") for role in roles]
        projected: list[ir.Value | None] = [*self.linear(f"{i}.qkv", x, weights, biases)]
        if f"{i}.q_norm" in self.tensors:
            projected = self._norm_heads(i, projected)
        layer = self.config.layers[i]
        tables = () if layer.rotary is None else self._tables(layer.rotary)
        if layer.rotary is not None and self.variant.rotates_apart:
            *rotated, value = self._split_heads(i, projected)
            projected = [*(self._rotate(x, layer.rotary, at) for at, x in enumerate(rotated)), value]
            tables = ()
        projected += [None] * (3 - len(projected))  # one value: query, key and value packed
        inputs = [*projected, *past, *lengths, *tables]
        if self.tree:
            inputs += [None] * (9 - len(inputs))
            bias = "local_attention_bias" if layer.sliding_window else "attention_bias"
            inputs += [self.tree["position_ids"] if tables else None, self._cast_bias(self.tree[bias])]
        attended = self.nodes.node(
            "GroupQueryAttention",
            inputs,
            outputs=[ir.Value(name=f"{i}.attended"), *present],
            do_rotary=int(bool(tables)),
            # A window counts cache entries, which in a tree are not positions.
            local_window_size=-1 if self.tree else layer.sliding_window or -1,
            num_heads=self.config.num_heads,
            kv_num_heads=self.config.num_kv_heads,
            scale=self.config.attention_scale,
            softcap=self.config.attention_cap or 0.0,
        )[0]
        return self.linear(f"{i}.o", attended, [self.tensors[f"{i}.o"]])[0]

    def _norm_heads(self, i: int, projected: list[ir.Value | None]) -> list[ir.Value | None]:
        """RMSNorm of queries and keys over each head, or over all heads at once, by the number of gains."""
        projected = self._split_heads(i, projected)
        for at, part in enumerate("qk"):
            role = f"{i}.{part}_norm"
            heads = self.constant(f"{part}_heads", np.array([0, 0, -1, self.tensors[role].columns]))
            row = self.constant(f"{part}_row", np.array([0, 0, self._head_sizes()[at]]))
            norm = self._norm(self.op("Reshape", projected[at], heads), role)
            projected[at] = self.op("Reshape", norm, row)
        return projected

    def _split_heads(self, i: int, projected: list[ir.Value | None]) -> list[ir.Value | None]:
        """Queries, keys and values as a value each."""
        if len(projected) == 3:
            return projected
        outputs = [ir.Value(name=f"{i}.{part}.out") for part in "qkv"]
        lengths = self.constant("qkv_sizes", np.array(self._head_sizes()))
        return [*self.nodes.node("Split", [*projected, lengths], outputs=outputs, axis=-1)]

    def _head_sizes(self) -> list[int]:
        """Columns of all queries, keys and values."""
        heads = (self.config.num_heads, self.config.num_kv_heads, self.config.num_kv_heads)
        return [num_heads * self.config.head_dim for num_heads in heads]

    def _rotate(self, x: ir.Value | None, rotary: Rotary, part: int) -> ir.Value:
        """Queries, part 0, or keys, part 1, rotated by position."""
        inputs = (x, self.tree["position_ids"], *self._tables(rotary))
        if rotary.rotated == self.config.head_dim:
            return self.op("RotaryEmbedding", *inputs)
        heads = self._head_sizes()[part] // self.config.head_dim
        return self.op("RotaryEmbedding", *inputs, num_heads=heads, rotary_embedding_dim=rotary.rotated)

    def _scale(self, x: ir.Value, scale: float) -> ir.Value:
        if scale == 1.0:
            return x
        return self.op("Mul", x, self.constant(f"scale_{scale:g}", np.array(scale, self.floats)))

    def _cap(self, logits: ir.Value) -> ir.Value:
        cap = self.config.logit_cap
        return logits if cap is None else self._scale(self.op("Tanh", self._scale(logits, 1 / cap)), cap)

    def _mlp(self, i: int, x: ir.Value) -> ir.Value:
        if self.config.routing is not None:
            return self._experts(i, x, self.config.routing)
        parts = self.linear(f"{i}.gate_up", x, [self.tensors[f"{i}.gate"], self.tensors[f"{i}.up"]])
        if len(parts) == 1:
            outputs = [ir.Value(name=f"{i}.{part}.out") for part in ("gate", "up")]
            parts = self.nodes.node("Split", parts, outputs=outputs, axis=-1, num_outputs=2)
        gate, up = parts
        is_silu = self.config.activation == "silu"  # x · sigmoid(x)
        active = self.op("QuickGelu", gate, alpha=1.0) if is_silu else self.op("Gelu", gate, approximate="tanh")
        return self.linear(f"{i}.down", self.op("Mul", active, up), [self.tensors[f"{i}.down"]])[0]

    def _experts(self, i: int, x: ir.Value, routing: Routing) -> ir.Value:
        router = self.linear.floats(f"{i}.router", x, self.tensors[f"{i}.router"])
        flat = self.constant("router_logits", np.array([-1, routing.num_experts]))
        numbers = range(routing.num_experts)
        gates_ups = [tuple(self.tensors[f"{i}.{part}.{number}"] for part in ("gate", "up")) for number in numbers]
        downs = [(self.tensors[f"{i}.down.{number}"],) for number in numbers]
        return self.experts(f"{i}.experts", x, self.op("Reshape", router, flat), routing, (gates_ups, downs))

    def _add_norm(self, x: ir.Value, residual: ir.Value, role: str) -> tuple[ir.Value, ir.Value]:
        """RMSNorm of x + residual, and the sum itself; the sum twice where the model has no such norm."""
        if role not in self.tensors:
            total = self.op("Add", x, residual)
            return total, total
        kind, inputs = "SkipSimplifiedLayerNormalization", [x, residual, self._vector(role)]
        outputs = [ir.Value(name=name) for name in (f"{role}.out", "", "", f"{role}.sum")]
        self.nodes.node(kind, inputs, outputs, epsilon=self.config.rms_eps)
        return outputs[0], outputs[3]

    def _last_rows(self, x: ir.Value, num_logits: ir.Value) -> ir.Value:
        # Counted from the shape, since the host computes lengths; a negated number would be computed on the device
        # and copied back in the midst of the pass.
        start = self.op("Sub", self.op("Shape", x, start=1, end=2), num_logits)
        ends = self.constant("end", np.array([np.iinfo(np.int64).max]))
        return self.op("Slice", x, start, ends, self.constant("axis_1", np.array([1])))


def _tree_inputs(config: DecoderConfig) -> dict[str, ir.Value]:
    windows = {layer.sliding_window is not None for layer in config.layers}
    names = {False: "attention_bias", True: "local_attention_bias"}
    shape: list[str | int] = ["batch", 1, "num_tokens", "total_tokens"]
    biases = [typed_value(names[is_local], ir.DataType.FLOAT, shape) for is_local in sorted(windows)]
    positions = typed_value("position_ids", ir.DataType.INT64, ["batch", "num_tokens"])
    return {str(value.name): value for value in (positions, *biases)}
