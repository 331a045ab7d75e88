"""The graph of a decoder-only transformer in ONNX, weights and all.

Inputs, for a batch of one:
    input_ids            int64 [batch, num_tokens]   the tokens that the cache does not hold
    attention_mask       int64 [batch, total]        ones; total counts cached and new tokens
    num_logits_to_keep   int64 [1]                   how many of the last positions get logits
    past_key_values.{i}.key, .value  float32 or float16 [batch, num_kv_heads, capacity, head_dim]
Outputs:
    logits               float32 [batch, num_logits_to_keep, vocab_size]
    present.{i}.key, .value          the same buffers as past_key_values
A graph that chooses also gives
    best                 float32 [batch, num_logits_to_keep, 2]   of each row the id of the likeliest token,
                                                                  the lowest of equal ones, and the sum of logits
A tree graph also takes
    position_ids         int64 [batch, num_tokens]
    attention_bias       float32 [batch, 1, num_tokens, total]   added to the scores, large and negative to hide
    local_attention_bias likewise, for layers that see a window, which it states; only where there are such layers
and runs behind a past that is not empty: ONNX Runtime's CPU provider does not look at position_ids otherwise.
A graph with hidden states also gives, for some layers,
    hidden_states.{i}    float32 [batch, num_tokens, hidden_size]   what layer i leaves in the residual stream

Attention is com.microsoft GroupQueryAttention with rotary inside; quantised weights are MatMulNBits with
activations in 8 bits (accuracy_level 4). Knows nothing of files to read from or folders to write to.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from edgespec.export.families import DecoderConfig
from edgespec.export.linear import LinearWriter
from edgespec.export.nodes import Nodes
from edgespec.export.precision import Rule
from edgespec.export.rotary import Rotary
from edgespec.export.tensors import StoredTensor
from edgespec.export.weights import WeightsFile

_OPSET = 21
_IR_VERSION = 10


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Which of the graphs that one weights file serves.

    layers: Those that are kept, all unless given; the others are left out (self-speculative drafting: Zhang et
        al., arXiv:2309.08168).
    head: Name of the tensors' head, where it is not the model's own.
    """

    layers: tuple[int, ...] | None = None
    head: str = "head"
    has_tree_inputs: bool = False
    has_best: bool = False
    hidden_layers: tuple[int, ...] = ()


def build_graph(
    config: DecoderConfig,
    tensors: Mapping[str, StoredTensor],
    weights: WeightsFile,
    rule: Rule,
    variant: Variant = Variant(),
) -> ir.Model:
    """Convert the weights that the file does not hold yet, and return the graph over it."""
    return _Decoder(config, tensors, weights, rule, variant).build()


class _Decoder:
    def __init__(
        self,
        config: DecoderConfig,
        tensors: Mapping[str, StoredTensor],
        weights: WeightsFile,
        rule: Rule,
        variant: Variant,
    ) -> None:
        self.config = config
        self.tensors = tensors
        self.nodes = Nodes()
        self.weights = weights
        self.linear = LinearWriter(self.nodes, weights, rule)
        self.variant = variant
        self.type = ir.DataType.FLOAT16 if rule.is_half else ir.DataType.FLOAT
        self.floats = np.float16 if rule.is_half else np.float32
        self.tables: dict[Rotary, tuple[ir.Value, ir.Value]] = {}
        self.biases: dict[ir.Value, ir.Value] = {}
        self.tree = _tree_inputs(config) if variant.has_tree_inputs else {}

    def build(self) -> ir.Model:
        config = self.config
        input_ids = _tensor("input_ids", ir.DataType.INT64, ["batch", "num_tokens"])
        mask = _tensor("attention_mask", ir.DataType.INT64, ["batch", "total_tokens"])
        num_logits = _tensor("num_logits_to_keep", ir.DataType.INT64, [1])
        lengths = self._lengths(mask)
        inputs, outputs = [input_ids, mask, num_logits, *self.tree.values()], []
        layers = range(config.num_layers) if self.variant.layers is None else self.variant.layers

        embedded, head = self.linear.embedding(
            self.tensors["embedding"], input_ids, self.variant.head, self.tensors.get(self.variant.head)
        )
        residual = self._scaled(embedded, self.config.embedding_scale)
        normed = self._normed(residual, f"{layers[0]}.input_norm")
        for number, i in enumerate(layers):
            past = [self._cache(f"past_key_values.{number}.{part}") for part in ("key", "value")]
            present = [self._cache(f"present.{number}.{part}") for part in ("key", "value")]
            attended = self._normed(self._attention(i, normed, past, present, lengths), f"{i}.attended_norm")
            attended = self._scaled(attended, config.residual_scale)
            normed, residual = self._add_norm(attended, residual, f"{i}.mlp_norm")
            fed = self._normed(self._mlp(i, normed), f"{i}.fed_norm")
            fed = self._scaled(fed, config.residual_scale)
            is_last = number + 1 == len(layers)
            following = "final_norm" if is_last else f"{layers[number + 1]}.input_norm"
            normed, residual = self._add_norm(fed, residual, following)
            inputs += past
            outputs += present
            if i in self.variant.hidden_layers:
                outputs.append(self._hidden(i, residual))
        logits = self._capped(head(self._scaled(self._last(normed, num_logits), config.logit_scale)))
        logits = self._as_float(logits)
        logits.name = "logits"
        logits.type = ir.TensorType(ir.DataType.FLOAT)
        rows = self.tensors.get(self.variant.head, self.tensors["embedding"]).rows
        logits.shape = ir.Shape(["batch", "num_logits", rows])
        if self.variant.has_best:
            outputs.append(self._best(logits, rows))
        graph = ir.Graph(
            inputs,
            [logits, *outputs],
            nodes=self.nodes.nodes,
            initializers=self.nodes.initializers,
            opset_imports={"": _OPSET, "com.microsoft": 1},
            name="decoder",
        )
        stated = {"context_length": str(config.context_length)}
        return ir.Model(graph, ir_version=_IR_VERSION, producer_name="edgespec", metadata_props=stated)

    def _op(self, kind: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
        return self.nodes.op(kind, *inputs, **attributes)

    def _best(self, logits: ir.Value, vocab_size: int) -> ir.Value:
        """The likeliest token of each row and the sum of the row, [batch, num_logits, 2].

        Not by ArgMax: WebGPU's goes through a row with one thread, and CUDA's did until August 2026 (5 ms a row of
        200,000: onnxruntime pull request 32092). Maxima may leave out what is no number, a sum does not.
        """
        last = self.nodes.constant("axis_2", np.array([2]))
        ids = self.weights.append("token_ids", [np.arange(vocab_size, dtype=np.float32)], [vocab_size])
        none = self.nodes.constant("no_token", np.array(vocab_size, np.float32))
        is_largest = self._op("Equal", logits, self._op("ReduceMax", logits, last))
        first = self._op("ReduceMin", self._op("Where", is_largest, ids, none), last)
        best = self._op("Concat", first, self._op("ReduceSum", logits, last), axis=2)
        best.name = "best"
        best.type = ir.TensorType(ir.DataType.FLOAT)
        best.shape = ir.Shape(["batch", "num_logits", 2])
        return best

    def _hidden(self, i: int, residual: ir.Value) -> ir.Value:
        hidden = self._op("Cast", residual, to=int(ir.DataType.FLOAT))
        hidden.name = f"hidden_states.{i}"
        hidden.type = ir.TensorType(ir.DataType.FLOAT)
        hidden.shape = ir.Shape(["batch", "num_tokens", self.config.hidden_size])
        return hidden

    def _cache(self, name: str) -> ir.Value:
        config = self.config
        return _tensor(name, self.type, ["batch", config.num_kv_heads, "capacity", config.head_dim])

    def _as_activation(self, bias: ir.Value) -> ir.Value:
        if self.type == ir.DataType.FLOAT:
            return bias
        if bias not in self.biases:
            self.biases[bias] = self._op("Cast", bias, to=int(self.type))
        return self.biases[bias]

    def _as_float(self, x: ir.Value) -> ir.Value:
        return x if self.type == ir.DataType.FLOAT else self._op("Cast", x, to=int(ir.DataType.FLOAT))

    def _vector(self, role: str) -> ir.Value:
        vector = self.tensors[role].vector().astype(self.floats)
        return self.weights.append(role, [vector], vector.shape)

    def _normed(self, x: ir.Value, role: str) -> ir.Value:
        """RMSNorm of x; x itself where the model has no such norm."""
        if role not in self.tensors:
            return x
        kind, gain = "SimplifiedLayerNormalization", self._vector(role)
        return self._op(kind, x, gain, axis=-1, epsilon=self.config.rms_eps, stash_type=1)

    def _lengths(self, mask: ir.Value) -> tuple[ir.Value, ir.Value]:
        """GroupQueryAttention's seqlens_k (total − 1, int32 [batch]) and total_sequence_length (int32)."""
        counted = self._op("ReduceSum", mask, self.nodes.constant("axis_1", np.array([1])), keepdims=0)
        last = self._op("Sub", counted, self.nodes.constant("one", np.array([1])))
        total = self._op("Gather", self._op("Shape", mask), self.nodes.constant("index_1", np.array(1)), axis=0)
        int32 = int(ir.DataType.INT32)
        return self._op("Cast", last, to=int32), self._op("Cast", total, to=int32)

    def _tables(self, rotary: Rotary) -> tuple[ir.Value, ir.Value]:
        """Cosines and sines by position, one pair for all layers that share the rotary."""
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
        """Where it comes among those of the whole model, whichever layers are kept."""
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
        projected: list[ir.Value | None] = [
            *self.linear(
                f"{i}.qkv",
                x,
                [self.tensors[role] for role in roles],
                [self.tensors.get(f"{role}_bias") for role in roles],
            )
        ]
        if f"{i}.q_norm" in self.tensors:
            projected = self._normed_heads(i, projected)
        projected += [None] * (3 - len(projected))  # one value: query, key and value packed
        layer = self.config.layers[i]
        tables = () if layer.rotary is None else self._tables(layer.rotary)
        inputs = [*projected, *past, *lengths, *tables]
        if self.tree:
            inputs += [None] * (9 - len(inputs))
            bias = "local_attention_bias" if layer.sliding_window else "attention_bias"
            inputs += [self.tree["position_ids"] if tables else None, self._as_activation(self.tree[bias])]
        attended = self.nodes.node(
            "GroupQueryAttention",
            inputs,
            outputs=[ir.Value(name=f"{i}.attended"), *present],
            do_rotary=int(layer.rotary is not None),
            # A window counts places in the cache, which in a tree are not positions.
            local_window_size=-1 if self.tree else layer.sliding_window or -1,
            num_heads=self.config.num_heads,
            kv_num_heads=self.config.num_kv_heads,
            scale=self.config.attention_scale,
            softcap=self.config.attention_cap or 0.0,
        )[0]
        return self.linear(f"{i}.o", attended, [self.tensors[f"{i}.o"]])[0]

    def _normed_heads(self, i: int, projected: list[ir.Value | None]) -> list[ir.Value | None]:
        """Queries and keys normalised over as many values as there are gains: a head, or all of them."""
        config = self.config
        sizes = [heads * config.head_dim for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]
        if len(projected) == 1:
            outputs = [ir.Value(name=f"{i}.{part}.out") for part in "qkv"]
            lengths = self.nodes.constant("qkv_sizes", np.array(sizes))
            projected = [*self.nodes.node("Split", [*projected, lengths], outputs=outputs, axis=-1)]
        for at, part in enumerate("qk"):
            role = f"{i}.{part}_norm"
            heads = self.nodes.constant(f"{part}_heads", np.array([0, 0, -1, self.tensors[role].columns]))
            row = self.nodes.constant(f"{part}_row", np.array([0, 0, sizes[at]]))
            norm = self._normed(self._op("Reshape", projected[at], heads), role)
            projected[at] = self._op("Reshape", norm, row)
        return projected

    def _scaled(self, x: ir.Value, scale: float) -> ir.Value:
        if scale == 1.0:
            return x
        return self._op("Mul", x, self.nodes.constant(f"scale_{scale:g}", np.array(scale, self.floats)))

    def _capped(self, logits: ir.Value) -> ir.Value:
        cap = self.config.logit_cap
        return logits if cap is None else self._scaled(self._op("Tanh", self._scaled(logits, 1 / cap)), cap)

    def _mlp(self, i: int, x: ir.Value) -> ir.Value:
        parts = self.linear(f"{i}.gate_up", x, [self.tensors[f"{i}.gate"], self.tensors[f"{i}.up"]])
        if len(parts) == 1:
            outputs = [ir.Value(name=f"{i}.gate.out"), ir.Value(name=f"{i}.up.out")]
            parts = self.nodes.node("Split", parts, outputs=outputs, axis=-1, num_outputs=2)
        gate, up = parts
        if self.config.activation == "silu":
            active = self._op("QuickGelu", gate, alpha=1.0)  # x · sigmoid(x)
        else:
            active = self._op("Gelu", gate, approximate="tanh")
        return self.linear(f"{i}.down", self._op("Mul", active, up), [self.tensors[f"{i}.down"]])[0]

    def _add_norm(self, x: ir.Value, residual: ir.Value, role: str) -> tuple[ir.Value, ir.Value]:
        """RMSNorm of x + residual, and the sum itself; the sum twice where the model has no such norm."""
        if role not in self.tensors:
            total = self._op("Add", x, residual)
            return total, total
        outputs = [
            ir.Value(name=f"{role}.out"),
            ir.Value(name=""),
            ir.Value(name=""),
            ir.Value(name=f"{role}.sum"),
        ]
        self.nodes.node(
            "SkipSimplifiedLayerNormalization",
            [x, residual, self._vector(role)],
            outputs=outputs,
            epsilon=self.config.rms_eps,
        )
        return outputs[0], outputs[3]

    def _last(self, x: ir.Value, num_logits: ir.Value) -> ir.Value:
        # Counted from the shape, as sums of lengths are left to the host; a negated number would be made on the
        # device and have to come back in the midst of the pass.
        start = self._op("Sub", self._op("Shape", x, start=1, end=2), num_logits)
        ends = self.nodes.constant("end", np.array([np.iinfo(np.int64).max]))
        return self._op("Slice", x, start, ends, self.nodes.constant("axis_1", np.array([1])))


def _tree_inputs(config: DecoderConfig) -> dict[str, ir.Value]:
    windows = {layer.sliding_window is not None for layer in config.layers}
    names = {False: "attention_bias", True: "local_attention_bias"}
    shape: list[str | int] = ["batch", 1, "num_tokens", "total_tokens"]
    biases = [_tensor(names[is_local], ir.DataType.FLOAT, shape) for is_local in sorted(windows)]
    positions = _tensor("position_ids", ir.DataType.INT64, ["batch", "num_tokens"])
    return {str(value.name): value for value in (positions, *biases)}


def _tensor(name: str, dtype: ir.DataType, shape: Sequence[str | int]) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(list(shape)))
