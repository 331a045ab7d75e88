"""The graph of a decoder for devices that take nothing but fixed shapes and primitive operators (NPUs).

No attention, rotary or quantised operator: these are written out in MatMul, Softmax and their like, and the mask
is an input. A pass takes num_tokens tokens, no more and no fewer, and gives the keys and values of these alone;
who runs it keeps them in a cache of capacity positions, of which the mask says which are filled. Inputs:
    input_ids            int32 [num_tokens]
    position_ids         int32 [num_tokens]
    attention_mask       float [num_tokens, capacity + num_tokens]   0 where a token looks, −30000 where not: the
                         cache first, then the tokens of the pass
    local_attention_mask likewise, for layers that see a window; only where there are such layers
    past_key_values.{i}.key, .value  float [num_kv_heads, capacity, head_dim]
Outputs:
    logits               float32 [num_tokens, vocab_size]
    present.{i}.key, .value          float [num_kv_heads, num_tokens, head_dim]
float is float32, or float16 where the rule says so. Arrays have two or three dimensions, for Qualcomm's HTP goes
wrong on norms of four.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from edgespec.export.families import DecoderConfig
from edgespec.export.nodes import Nodes
from edgespec.export.precision import Rule
from edgespec.export.rotary import Rotary
from edgespec.export.tensors import StoredTensor
from edgespec.export.weights import WeightsFile

_OPSET = 17  # what vendors' compilers know
_IR_VERSION = 10
_TYPES = {"F32": (ir.DataType.FLOAT, np.float32), "F16": (ir.DataType.FLOAT16, np.float16)}


def build_static_graph(
    config: DecoderConfig,
    tensors: Mapping[str, StoredTensor],
    weights: WeightsFile,
    rule: Rule,
    *,
    num_tokens: int,
    capacity: int,
) -> ir.Model:
    """Convert the weights that the file does not hold yet, and return the graph over it."""
    return _StaticDecoder(config, tensors, weights, rule, num_tokens, capacity).build()


class _StaticDecoder:
    def __init__(
        self,
        config: DecoderConfig,
        tensors: Mapping[str, StoredTensor],
        weights: WeightsFile,
        rule: Rule,
        num_tokens: int,
        capacity: int,
    ) -> None:
        self.config = config
        self.tensors = tensors
        self.weights = weights
        self.num_tokens, self.capacity = num_tokens, capacity
        self.type, self.floats = _TYPES[rule.storage]
        self.nodes = Nodes()
        self.rotations: dict[Rotary, tuple[ir.Value, ir.Value]] = {}
        self.positions = ir.Value(
            name="position_ids", type=ir.TensorType(ir.DataType.INT32), shape=ir.Shape([num_tokens])
        )

    def build(self) -> ir.Model:
        config, width = self.config, self.num_tokens
        input_ids = ir.Value(name="input_ids", type=ir.TensorType(ir.DataType.INT32), shape=ir.Shape([width]))
        is_local = {layer.sliding_window is not None for layer in config.layers}
        names = {False: "attention_mask", True: "local_attention_mask"}
        masks = {local: self._value(names[local], [width, self.capacity + width]) for local in sorted(is_local)}
        inputs, outputs = [input_ids, self.positions, *masks.values()], []

        x = self._op("Gather", self._matrix("embedding"), input_ids, axis=0)
        x = self._scaled(x, config.embedding_scale)
        for i, layer in enumerate(config.layers):
            sizes = [config.num_kv_heads, self.capacity, config.head_dim]
            past = [self._value(f"past_key_values.{i}.{part}", sizes) for part in ("key", "value")]
            mask = masks[layer.sliding_window is not None]
            attended, present = self._attention(i, self._normed(x, f"{i}.input_norm"), past, mask)
            attended = self._normed(attended, f"{i}.attended_norm")
            x = self._op("Add", x, self._scaled(attended, config.residual_scale))
            fed = self._normed(self._mlp(i, self._normed(x, f"{i}.mlp_norm")), f"{i}.fed_norm")
            x = self._op("Add", x, self._scaled(fed, config.residual_scale))
            inputs += past
            outputs += present
        x = self._scaled(self._normed(x, "final_norm"), config.logit_scale)
        head = "head" if "head" in self.tensors else "embedding"
        logits = self._capped(self._linear(x, head), config.logit_cap)
        logits = self._op("Cast", logits, to=int(ir.DataType.FLOAT))
        self._name(logits, "logits", [width, config.vocab_size], ir.DataType.FLOAT)
        graph = ir.Graph(
            inputs,
            [logits, *outputs],
            nodes=self.nodes.nodes,
            initializers=self.nodes.initializers,
            opset_imports={"": _OPSET},
            name="static_decoder",
        )
        return ir.Model(graph, ir_version=_IR_VERSION, producer_name="edgespec")

    # -- layers ------------------------------------------------------------------------------------

    def _attention(
        self, i: int, x: ir.Value, past: Sequence[ir.Value], mask: ir.Value
    ) -> tuple[ir.Value, list[ir.Value]]:
        """Queries of a key's group lie behind one another as rows, so that no key is repeated."""
        config, width = self.config, self.num_tokens
        groups, dim = config.num_heads // config.num_kv_heads, config.head_dim
        projected = [self._linear(x, f"{i}.{part}", f"{i}.{part}_bias") for part in "qkv"]
        projected[:2] = [
            self._head_normed(y, f"{i}.{part}_norm") for y, part in zip(projected[:2], "qk", strict=True)
        ]
        q, k, v = (self._by_head(y) for y in projected)
        rotary = config.layers[i].rotary
        if rotary is not None:
            q, k = self._rotated(q, rotary), self._rotated(k, rotary)
        present = [
            self._name(self._op("Identity", y), f"present.{i}.{part}", [config.num_kv_heads, width, dim])
            for y, part in ((k, "key"), (v, "value"))
        ]
        keys, values = (self._op("Concat", old, new, axis=1) for old, new in zip(past, (k, v), strict=True))
        q = self._reshape(q, [config.num_kv_heads, groups * width, dim])
        scores = self._op("MatMul", q, self._op("Transpose", keys, perm=[0, 2, 1]))
        scores = self._capped(self._scaled(scores, config.attention_scale), config.attention_cap)
        scores = self._reshape(scores, [config.num_heads, width, self.capacity + width])
        share = self._op("Softmax", self._op("Add", scores, mask), axis=-1)
        share = self._reshape(share, [config.num_kv_heads, groups * width, self.capacity + width])
        attended = self._reshape(self._op("MatMul", share, values), [config.num_heads, width, dim])
        attended = self._op("Transpose", attended, perm=[1, 0, 2])
        return self._linear(self._reshape(attended, [width, config.num_heads * dim]), f"{i}.o"), present

    def _by_head(self, x: ir.Value) -> ir.Value:
        """[num_tokens, heads · head_dim] → [heads, num_tokens, head_dim]."""
        heads = self._reshape(x, [self.num_tokens, -1, self.config.head_dim])
        return self._op("Transpose", heads, perm=[1, 0, 2])

    def _rotated(self, x: ir.Value, rotary: Rotary) -> ir.Value:
        """x · cos + (−second half, first half) · sin."""
        if rotary not in self.rotations:
            angles = np.outer(np.arange(self.capacity, dtype=np.float32), rotary.inv_freq)
            angles = np.concatenate([angles, angles], axis=1)
            number = len(self.rotations)
            tables = [
                self.weights.append(f"{name}_{number}", [table], table.shape)
                for name, wave in (("cos", np.cos), ("sin", np.sin))
                for table in [(wave(angles) * np.float32(rotary.scale)).astype(self.floats)]
            ]
            cos, sin = (self._op("Gather", table, self.positions, axis=0) for table in tables)
            self.rotations[rotary] = cos, sin
        cos, sin = self.rotations[rotary]
        halves = [ir.Value(name=f"half_{len(self.nodes.nodes)}.{at}") for at in (0, 1)]
        half = self.config.head_dim // 2
        sizes = self.nodes.constant("halves", np.array([half, half]))
        first, second = self.nodes.node("Split", [x, sizes], outputs=halves, axis=-1)
        turned = self._op("Concat", self._op("Neg", second), first, axis=-1)
        return self._op("Add", self._op("Mul", x, cos), self._op("Mul", turned, sin))

    def _mlp(self, i: int, x: ir.Value) -> ir.Value:
        gate, up = self._linear(x, f"{i}.gate"), self._linear(x, f"{i}.up")
        if self.config.activation == "silu":
            active = self._op("Mul", gate, self._op("Sigmoid", gate))
        else:
            active = self._gelu(gate)
        return self._linear(self._op("Mul", active, up), f"{i}.down")

    def _gelu(self, x: ir.Value) -> ir.Value:
        """The approximation by tanh of Hendrycks and Gimpel, arXiv:1606.08415."""
        cubed = self._op("Mul", self._op("Mul", x, x), x)
        inner = self._scaled(self._op("Add", x, self._scaled(cubed, 0.044715)), math.sqrt(2 / math.pi))
        one = self.nodes.constant("one", np.array(1, self.floats))
        return self._scaled(self._op("Mul", x, self._op("Add", self._op("Tanh", inner), one)), 0.5)

    # -- parts -------------------------------------------------------------------------------------

    def _linear(self, x: ir.Value, role: str, bias_role: str = "") -> ir.Value:
        bias = [self._vector(bias_role)] if bias_role in self.tensors else []
        return self._op("Gemm", x, self._matrix(role), *bias, transB=1)

    def _normed(self, x: ir.Value, role: str) -> ir.Value:
        """RMSNorm over the last dimension; x itself where the model has no such norm."""
        if role not in self.tensors:
            return x
        mean = self._op("ReduceMean", self._op("Mul", x, x), axes=[-1], keepdims=1)
        eps = self.nodes.constant("eps", np.array(self.config.rms_eps, self.floats))
        size = self._op("Sqrt", self._op("Add", mean, eps))
        return self._op("Mul", self._op("Div", x, size), self._vector(role))

    def _head_normed(self, x: ir.Value, role: str) -> ir.Value:
        """RMSNorm over as many values as there are gains: a head, or all of them."""
        if role not in self.tensors:
            return x
        parts = self._reshape(x, [self.num_tokens, -1, self.tensors[role].columns])
        return self._reshape(self._normed(parts, role), [self.num_tokens, -1])

    def _scaled(self, x: ir.Value, scale: float) -> ir.Value:
        if scale == 1.0:
            return x
        return self._op("Mul", x, self.nodes.constant(f"scale_{scale:g}", np.array(scale, self.floats)))

    def _capped(self, x: ir.Value, cap: float | None) -> ir.Value:
        return x if cap is None else self._scaled(self._op("Tanh", self._scaled(x, 1 / cap)), cap)

    def _reshape(self, x: ir.Value, shape: list[int]) -> ir.Value:
        name = "shape_" + "_".join(map(str, shape))
        return self._op("Reshape", x, self.nodes.constant(name, np.array(shape)))

    def _matrix(self, role: str) -> ir.Value:
        tensor = self.tensors[role]
        parts = (part.astype(self.floats) for part in tensor.floats())
        return self.weights.append(role, parts, [tensor.rows, tensor.columns])

    def _vector(self, role: str) -> ir.Value:
        vector = self.tensors[role].vector().astype(self.floats)
        return self.weights.append(role, [vector], vector.shape)

    def _op(self, kind: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
        return self.nodes.op(kind, *inputs, **attributes)

    def _value(self, name: str, shape: Sequence[int]) -> ir.Value:
        return ir.Value(name=name, type=ir.TensorType(self.type), shape=ir.Shape(shape))

    def _name(
        self, value: ir.Value, name: str, shape: Sequence[int], dtype: ir.DataType | None = None
    ) -> ir.Value:
        """Make value an output of the graph."""
        value.name, value.type, value.shape = name, ir.TensorType(dtype or self.type), ir.Shape(shape)
        return value
