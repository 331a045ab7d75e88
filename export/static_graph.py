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
float is float32, or float16 where the rule says so. In w8a16 matrices have 8 bits, a scale a row; what goes from
operator to operator, and the cache with it, has 16 (activations). The mask, the logits, the residual stream and
the inside of norms stay floats, for which HTP takes half floats. Arrays have two or three dimensions, for HTP,
which is Qualcomm's, goes wrong on norms of four.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from edgespec.export.activations import Activations, Levels, Observed, Plain
from edgespec.export.blocks import Floats
from edgespec.export.families import DecoderConfig
from edgespec.export.levels import Encoding, range_of, row_levels
from edgespec.export.nodes import Nodes
from edgespec.export.precision import Rule
from edgespec.export.rotary import Rotary
from edgespec.export.tensors import StoredTensor
from edgespec.export.weights import WeightsFile
from edgespec.types import Range

_OPSET = 21  # the first that quantises to 16 bits
_IR_VERSION = 10
_HIDDEN = Range(-30000.0, 0.0)
_TYPES = {"F32": (ir.DataType.FLOAT, np.float32), "F16": (ir.DataType.FLOAT16, np.float16)}


def build_static_graph(
    config: DecoderConfig,
    tensors: Mapping[str, StoredTensor],
    weights: WeightsFile,
    rule: Rule,
    *,
    num_tokens: int,
    capacity: int,
    ranges: Mapping[str, Range] | None = None,
) -> ir.Model:
    """Convert the weights that the file does not hold yet, and return the graph over it.

    Args:
        ranges: Of what goes from operator to operator, for w8a16; without them the graph holds it in floats and
            gives the least and the largest of each NAME as NAME.low and NAME.high.
    """
    return _StaticDecoder(config, tensors, weights, rule, num_tokens, capacity, ranges).build()


class _StaticDecoder:
    def __init__(
        self,
        config: DecoderConfig,
        tensors: Mapping[str, StoredTensor],
        weights: WeightsFile,
        rule: Rule,
        num_tokens: int,
        capacity: int,
        ranges: Mapping[str, Range] | None,
    ) -> None:
        self.config = config
        self.tensors = tensors
        self.weights = weights
        self.num_tokens, self.capacity = num_tokens, capacity
        self.type, self.floats = _TYPES[rule.storage]
        self.nodes = Nodes()
        self.is_quantised = rule.precision == "w8a16"
        self.observed = Observed(self.nodes) if self.is_quantised and ranges is None else None
        self.activations: Activations = self.observed or (
            Plain(self.nodes, self.type) if ranges is None else Levels(self.nodes, ranges)
        )
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
        shown = {local: self._shown(mask) for local, mask in masks.items()}

        table = self.tensors["embedding"]
        embedding = self._table("embedding", table.floats, [table.rows, table.columns])
        x = self._moved("Gather", embedding, input_ids, axis=0)
        x = self._scaled(x, config.embedding_scale)
        for i, layer in enumerate(config.layers):
            sizes = [config.num_kv_heads, self.capacity, config.head_dim]
            cache_type = self.activations.cache_type
            past = [self._value(f"past_key_values.{i}.{part}", sizes, cache_type) for part in ("key", "value")]
            mask = shown[layer.sliding_window is not None]
            attended, present = self._attention(i, self._normed(x, f"{i}.input_norm"), past, mask)
            attended = self._normed(attended, f"{i}.attended_norm")
            x = self._added(x, self._scaled(attended, config.residual_scale))
            fed = self._normed(self._mlp(i, self._normed(x, f"{i}.mlp_norm")), f"{i}.fed_norm")
            x = self._added(x, self._scaled(fed, config.residual_scale))
            inputs += past
            outputs += present
        x = self._scaled(self._normed(x, "final_norm"), config.logit_scale)
        head = "head" if "head" in self.tensors else "embedding"
        logits = self._capped(self._linear(x, head), config.logit_cap)
        if self.type != ir.DataType.FLOAT:
            logits = self.nodes.op("Cast", logits, to=int(ir.DataType.FLOAT))
        self._name(logits, "logits", [width, config.vocab_size], ir.DataType.FLOAT)
        graph = ir.Graph(
            inputs,
            [logits, *outputs, *(self.observed.outputs if self.observed else [])],
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
        """The queries of a token that share a key lie behind one another as rows, so that no key is repeated."""
        config, width = self.config, self.num_tokens
        heads, dim = config.num_kv_heads, config.head_dim
        groups = config.num_heads // heads
        projected = [self._linear(x, f"{i}.{part}", f"{i}.{part}_bias") for part in "qkv"]
        projected[:2] = [
            self._head_normed(y, f"{i}.{part}_norm") for y, part in zip(projected[:2], "qk", strict=True)
        ]
        q, k, v = (self._reshape(y, [width, -1, dim]) for y in projected)
        rotary = config.layers[i].rotary
        if rotary is not None:
            q, k = self._rotated(q, rotary), self._rotated(k, rotary)
        q, k, v = (self._swapped(y) for y in (self._reshape(q, [width, heads, groups * dim]), k, v))
        present = [
            self._name(
                self.activations.present(y),
                f"present.{i}.{part}",
                [heads, width, dim],
                self.activations.cache_type,
            )
            for y, part in ((k, "key"), (v, "value"))
        ]
        keys, values = (
            self._moved("Concat", self.activations.past(old, new), new, axis=1)
            for old, new in zip(past, (k, v), strict=True)
        )
        q = self._reshape(q, [heads, width * groups, dim])
        scores = self._op("MatMul", q, self._moved("Transpose", keys, perm=[0, 2, 1]))
        scores = self._capped(self._scaled(scores, config.attention_scale), config.attention_cap)
        scores = self.activations.masked(self.nodes.op("Add", scores, mask), scores)
        attended = self._op("MatMul", self._op("Softmax", scores, axis=-1), values)
        attended = self._swapped(self._reshape(attended, [heads, width, groups * dim]))
        return self._linear(self._reshape(attended, [width, config.num_heads * dim]), f"{i}.o"), present

    def _swapped(self, x: ir.Value) -> ir.Value:
        """[num_tokens, num_kv_heads, any] ↔ [num_kv_heads, num_tokens, any]."""
        return self._moved("Transpose", x, perm=[1, 0, 2])

    def _shown(self, mask: ir.Value) -> ir.Value:
        """A mask with a row for each query of a token that shares a key."""
        mask = self.activations.given(mask, Encoding.of(_HIDDEN))
        groups = self.config.num_heads // self.config.num_kv_heads
        if groups == 1:
            return mask
        rows = self.nodes.constant("rows", np.repeat(np.arange(self.num_tokens, dtype=np.int32), groups))
        return self._moved("Gather", mask, rows, axis=0)

    def _rotated(self, x: ir.Value, rotary: Rotary) -> ir.Value:
        """x · cos + (second half, first half) · sin, the first half of whose table is negated."""
        if rotary not in self.rotations:
            angles = np.outer(np.arange(self.capacity, dtype=np.float32), rotary.inv_freq)
            cosines = np.concatenate([np.cos(angles), np.cos(angles)], axis=1)
            sines = np.concatenate([-np.sin(angles), np.sin(angles)], axis=1)
            number = len(self.rotations)
            self.rotations[rotary] = (
                self._wave(f"cos_{number}", cosines * np.float32(rotary.scale)),
                self._wave(f"sin_{number}", sines * np.float32(rotary.scale)),
            )
        cos, sin = self.rotations[rotary]
        halves = [ir.Value(name=f"half_{len(self.nodes.nodes)}.{at}") for at in (0, 1)]
        half = self.config.head_dim // 2
        sizes = self.nodes.constant("halves", np.array([half, half]))
        halves = self.nodes.node("Split", [x, sizes], outputs=halves, axis=-1)
        first, second = (self.activations.moved(part, x) for part in halves)
        turned = self._moved("Concat", second, first, axis=-1)
        return self._op("Add", self._op("Mul", x, cos), self._op("Mul", turned, sin))

    def _wave(self, name: str, table: Floats) -> ir.Value:
        """Of each position, [num_tokens, 1, head_dim]."""
        return self._moved("Gather", self._array(name, table[:, None]), self.positions, axis=0)

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
        opened = self._op("Add", self._op("Tanh", inner), self._number(1.0))
        return self._scaled(self._op("Mul", x, opened), 0.5)

    # -- parts -------------------------------------------------------------------------------------

    def _linear(self, x: ir.Value, role: str, bias_role: str = "") -> ir.Value:
        product = self._op("Gemm", x, self._matrix(role), transB=1)
        if bias_role not in self.tensors:
            return product
        return self._op("Add", product, self._array(bias_role, self.tensors[bias_role].vector()))

    def _normed(self, x: ir.Value, role: str) -> ir.Value:
        """RMSNorm over the last dimension, in floats within; x itself where the model has no such norm.

        Everything is divided by the largest magnitude first, for half floats do not hold the square of 256.
        """
        if role not in self.tensors:
            return x
        op, last = self.nodes.op, self.nodes.constant("last", np.array([-1]))
        root = self.nodes.constant("root_of_eps", np.array(math.sqrt(self.config.rms_eps), self.floats))
        peak = op("Add", op("ReduceMax", op("Abs", x), last, keepdims=1), root)
        x, root = op("Div", x, peak), op("Div", root, peak)
        mean = op("ReduceMean", op("Mul", x, x), last, keepdims=1)
        size = op("Sqrt", op("Add", mean, op("Mul", root, root)))
        return self._op("Mul", op("Div", x, size), self._gains(role))

    def _added(self, x: ir.Value, y: ir.Value) -> ir.Value:
        """The residual stream, in floats: one token of a text can be a thousand times as large as others in it."""
        return self.nodes.op("Add", x, y)

    def _head_normed(self, x: ir.Value, role: str) -> ir.Value:
        """RMSNorm over as many values as there are gains: a head, or all of them."""
        if role not in self.tensors:
            return x
        parts = self._reshape(x, [self.num_tokens, -1, self.tensors[role].columns])
        return self._reshape(self._normed(parts, role), [self.num_tokens, -1])

    def _scaled(self, x: ir.Value, scale: float) -> ir.Value:
        return x if scale == 1.0 else self._op("Mul", x, self._number(scale))

    def _capped(self, x: ir.Value, cap: float | None) -> ir.Value:
        return x if cap is None else self._scaled(self._op("Tanh", self._scaled(x, 1 / cap)), cap)

    def _reshape(self, x: ir.Value, shape: list[int]) -> ir.Value:
        name = "shape_" + "_".join(map(str, shape))
        return self._moved("Reshape", x, self.nodes.constant(name, np.array(shape)))

    # -- constants ---------------------------------------------------------------------------------

    def _matrix(self, role: str) -> ir.Value:
        """What a Gemm reads."""
        tensor = self.tensors[role]
        shape = [tensor.rows, tensor.columns]
        if not self.is_quantised:
            return self.weights.append(role, (part.astype(self.floats) for part in tensor.floats()), shape)
        scales: list[Floats] = []
        levels = self.weights.append(f"{role}.levels", self._rows(tensor, scales), shape)
        scale = self.weights.append(f"{role}.scales", iter([np.concatenate(scales)] if scales else []), shape[:1])
        zero = self.weights.append(f"{role}.zero_points", [np.zeros(tensor.rows, np.int8)], shape[:1])
        return self.nodes.op("DequantizeLinear", levels, scale, zero, axis=0)

    def _rows(self, tensor: StoredTensor, scales: list[Floats]) -> Iterator[npt.NDArray[np.int8]]:
        """Levels of some rows at a time, whose scales are appended."""
        for part in tensor.floats():
            levels, found = row_levels(part)
            scales.append(found)
            yield levels

    def _table(self, name: str, parts: Callable[[], Iterable[Floats]], shape: Sequence[int]) -> ir.Value:
        """What is looked up, or added to a product; in w8a16 it has 16 bits."""
        if not self.is_quantised:
            return self.weights.append(name, (part.astype(self.floats) for part in parts()), shape)
        encoding = Encoding.of(range_of(parts()))
        levels = self.weights.append(f"{name}.levels16", (encoding.levels(part) for part in parts()), shape)
        return self.activations.stored(levels, encoding)

    def _array(self, name: str, array: Floats) -> ir.Value:
        return self._table(name, lambda: [array], array.shape)

    def _number(self, number: float) -> ir.Value:
        name = f"number_{number:g}"
        if not self.is_quantised:
            return self.nodes.constant(name, np.array(number, self.floats))
        encoding = Encoding.of(Range(number, number))
        return self.activations.stored(self.nodes.constant(name, encoding.levels(np.array(number))), encoding)

    def _gains(self, role: str) -> ir.Value:
        vector = self.tensors[role].vector().astype(self.floats)
        return self.weights.append(role, [vector], vector.shape)

    # -- nodes -------------------------------------------------------------------------------------

    def _op(self, kind: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
        """A node whose output is computed."""
        return self.activations.held(self.nodes.op(kind, *inputs, **attributes))

    def _moved(self, kind: str, x: ir.Value, *others: ir.Value, **attributes: Any) -> ir.Value:
        """A node whose output is x in other places, and what others hold in the same levels."""
        return self.activations.moved(self.nodes.op(kind, x, *others, **attributes), x)

    def _value(self, name: str, shape: Sequence[int], dtype: ir.DataType | None = None) -> ir.Value:
        return ir.Value(name=name, type=ir.TensorType(dtype or self.type), shape=ir.Shape(shape))

    def _name(
        self, value: ir.Value, name: str, shape: Sequence[int], dtype: ir.DataType | None = None
    ) -> ir.Value:
        """Make value an output of the graph."""
        value.name, value.type, value.shape = name, ir.TensorType(dtype or self.type), ir.Shape(shape)
        return value
