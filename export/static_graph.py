"""The graph of a decoder for devices that take nothing but fixed shapes and primitive operators (NPUs).

Attention, rotary positions and quantised products are written out in MatMul, Softmax and the like, and the mask is
an input. A pass takes exactly num_tokens tokens and outputs their keys and values; the caller keeps these in a
cache of capacity positions, and the mask says which positions are filled. Inputs:
    input_ids            int32 [num_tokens]
    position_ids         int32 [num_tokens]
    attention_mask       float [num_tokens, capacity + num_tokens]   0 where a token looks, −30000 where not: the
                         cache first, then the tokens of the pass
    local_attention_mask the mask of layers that see a window, if there are any
    past_key_values.{i}.key, .value  float [num_kv_heads, capacity, head_dim]
Outputs:
    logits               float32 [num_tokens, vocab_size]
    present.{i}.key, .value          float [num_kv_heads, num_tokens, head_dim]
float is float32, or float16 where the rule says so. In w8a16 matrices have 8 bits and a scale a row; activations
and the cache have 16 bits. The mask, the logits, the residual stream and the inside of norms stay floats, which
run as half floats on HTP (Qualcomm's NPU). Arrays have two or three dimensions, since HTP fails on norms of four.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from edgespec.export.activations import (
    Activations,
    Encoding,
    LevelActivations,
    ObservedActivations,
    range_of,
    row_levels,
)
from edgespec.export.blocks import Floats
from edgespec.export.decoder_config import DecoderConfig
from edgespec.export.nodes import Nodes, Values, make_output
from edgespec.export.precision import Rule
from edgespec.export.rotary import Rotary
from edgespec.export.tensors import StoredTensor, Tensors
from edgespec.export.weights import WeightsFile
from edgespec.types import Range

_HIDDEN = Range(-30000.0, 0.0)
_TYPES = {"F32": (ir.DataType.FLOAT, np.float32), "F16": (ir.DataType.FLOAT16, np.float16)}


@dataclass
class StaticGraph:
    """A graph over the weights file; build writes the weights that the file does not hold yet.

    ranges: Of activations, for w8a16; without them such a graph holds floats and outputs the least and the largest
        of each NAME as NAME.low and NAME.high.
    """

    config: DecoderConfig
    tensors: Tensors
    weights: WeightsFile
    rule: Rule
    num_tokens: int
    capacity: int
    ranges: Mapping[str, Range] | None = None

    def __post_init__(self) -> None:
        self.type, self.floats = _TYPES[self.rule.storage]
        self.nodes = Nodes()
        self.is_quantised = self.rule.precision == "w8a16"
        self.activations = Activations(self.nodes, self.type)
        if self.ranges is not None:
            self.activations = LevelActivations(self.nodes, self.ranges)
        elif self.is_quantised:
            self.activations = ObservedActivations(self.nodes)
        self.rotations: dict[Rotary, tuple[ir.Value, ir.Value]] = {}
        self.positions = ir.val("position_ids", ir.DataType.INT32, [self.num_tokens])

    def build(self) -> ir.Model:
        config, width = self.config, self.num_tokens
        input_ids = ir.val("input_ids", ir.DataType.INT32, [width])
        is_local = {layer.sliding_window is not None for layer in config.layers}
        names = {False: "attention_mask", True: "local_attention_mask"}
        sizes = [width, self.capacity + width]
        masks = {local: ir.val(names[local], self.type, sizes) for local in sorted(is_local)}
        inputs, outputs = [input_ids, self.positions, *masks.values()], []
        shown = {local: self._repeat_mask(mask) for local, mask in masks.items()}

        table = self.tensors["embedding"]
        embedding = self._table("embedding", table.floats, [table.rows, table.columns])
        x = self._move("Gather", embedding, input_ids, axis=0)
        x = self._scale(x, config.embedding_scale)
        cache, cache_type = [config.num_kv_heads, self.capacity, config.head_dim], self.activations.cache_type
        # Sums stay floats: one token of the residual stream can be a thousand times as large as the others.
        for i, layer in enumerate(config.layers):
            past = [ir.val(f"past_key_values.{i}.{part}", cache_type, cache) for part in ("key", "value")]
            mask = shown[layer.sliding_window is not None]
            attended, present = self._attention(i, self._norm(x, f"{i}.input_norm"), past, mask)
            attended = self._norm(attended, f"{i}.attended_norm")
            x = self.nodes.op("Add", x, self._scale(attended, config.residual_scale))
            fed = self._norm(self._mlp(i, self._norm(x, f"{i}.mlp_norm")), f"{i}.fed_norm")
            x = self.nodes.op("Add", x, self._scale(fed, config.residual_scale))
            inputs += past
            outputs += present
        x = self._scale(self._norm(x, "final_norm"), config.logit_scale)
        head = "head" if "head" in self.tensors else "embedding"
        logits = self._cap(self._linear(x, head), config.logit_cap)
        if self.type != ir.DataType.FLOAT:
            logits = self.nodes.op("Cast", logits, to=int(ir.DataType.FLOAT))
        make_output(logits, "logits", ir.DataType.FLOAT, [width, config.vocab_size])
        return self.nodes.model("static_decoder", inputs, [logits, *outputs, *self.activations.outputs])

    def _attention(self, i: int, x: ir.Value, past: Values, mask: ir.Value) -> tuple[ir.Value, list[ir.Value]]:
        """The queries of a token that share a key become rows of one matrix, so that no key is repeated."""
        config, width = self.config, self.num_tokens
        heads, dim = config.num_kv_heads, config.head_dim
        groups = config.num_heads // heads
        projected = [self._linear(x, f"{i}.{part}", f"{i}.{part}_bias") for part in "qkv"]
        if not config.norms_rotated:
            projected[:2] = [
                self._norm_heads(y, f"{i}.{part}_norm") for y, part in zip(projected[:2], "qk", strict=True)
            ]
        q, k, v = (self._reshape(y, [width, -1, dim]) for y in projected)
        rotary = config.layers[i].rotary
        if rotary is not None:
            q, k = self._rotate(q, rotary), self._rotate(k, rotary)
        if config.norms_rotated:
            q, k = self._norm(q, f"{i}.q_norm"), self._norm(k, f"{i}.k_norm")
        growth = config.query_growth
        if growth is not None and growth.period < self.capacity:
            q = self._op("Mul", q, self._look_up_wave("query_scales", growth.scales(self.capacity)[:, None]))
        q, k, v = (self._swap(y) for y in (self._reshape(q, [width, heads, groups * dim]), k, v))
        held, cache_type = self.activations.to_cache, self.activations.cache_type
        present = [
            make_output(held(y), f"present.{i}.{part}", cache_type, [heads, width, dim])
            for y, part in ((k, "key"), (v, "value"))
        ]
        keys, values = (
            self._move("Concat", self.activations.from_cache(old, new), new, axis=1)
            for old, new in zip(past, (k, v), strict=True)
        )
        q = self._reshape(q, [heads, width * groups, dim])
        scores = self._op("MatMul", q, self._move("Transpose", keys, perm=[0, 2, 1]))
        scores = self._cap(self._scale(scores, config.attention_scale), config.attention_cap)
        scores = self.activations.encode_masked(self.nodes.op("Add", scores, mask), scores)
        attended = self._op("MatMul", self._op("Softmax", scores, axis=-1), values)
        attended = self._swap(self._reshape(attended, [heads, width, groups * dim]))
        attended = self._reshape(attended, [width, config.num_heads * dim])
        return self._linear(attended, f"{i}.o", f"{i}.o_bias"), present

    def _swap(self, x: ir.Value) -> ir.Value:
        """[num_tokens, num_kv_heads, any] ↔ [num_kv_heads, num_tokens, any]."""
        return self._move("Transpose", x, perm=[1, 0, 2])

    def _repeat_mask(self, mask: ir.Value) -> ir.Value:
        """A mask with a row for each query of a token that shares a key."""
        mask = self.activations.encode_as(mask, Encoding.of(_HIDDEN))
        groups = self.config.num_heads // self.config.num_kv_heads
        if groups == 1:
            return mask
        rows = self.nodes.constant("rows", np.repeat(np.arange(self.num_tokens, dtype=np.int32), groups))
        return self._move("Gather", mask, rows, axis=0)

    def _rotate(self, x: ir.Value, rotary: Rotary) -> ir.Value:
        """x · cos + (second half, first half) · sin, the first half of whose table is negated.

        Values that are not rotated are multiplied by 1 and by 0.
        """
        if rotary not in self.rotations:
            angles = np.outer(np.arange(self.capacity, dtype=np.float32), rotary.inv_freq)
            cosines, sines = (wave(angles) * np.float32(rotary.scale) for wave in (np.cos, np.sin))
            kept = np.zeros((self.capacity, self.config.head_dim - rotary.rotated), np.float32)
            number = len(self.rotations)
            self.rotations[rotary] = (
                self._look_up_wave(f"cos_{number}", np.concatenate([cosines, cosines, kept + 1], axis=1)),
                self._look_up_wave(f"sin_{number}", np.concatenate([-sines, sines, kept], axis=1)),
            )
        cos, sin = self.rotations[rotary]
        half, rest = rotary.rotated // 2, self.config.head_dim - rotary.rotated
        lengths = [half, half, rest] if rest else [half, half]
        names = [f"part_{len(self.nodes.nodes)}.{at}" for at in range(len(lengths))]
        first, second, *others = (self.activations.reencode(y, x) for y in self.nodes.split(x, names, *lengths))
        turned = self._move("Concat", second, first, *others, axis=-1)
        return self._op("Add", self._op("Mul", x, cos), self._op("Mul", turned, sin))

    def _look_up_wave(self, name: str, table: Floats) -> ir.Value:
        """The row of a table for each position, [num_tokens, 1, head_dim]."""
        return self._move("Gather", self._array(name, table[:, None]), self.positions, axis=0)

    def _mlp(self, i: int, x: ir.Value) -> ir.Value:
        gate, up = self._linear(x, f"{i}.gate"), self._linear(x, f"{i}.up")
        is_silu = self.config.activation == "silu"
        active = self._op("Mul", gate, self._op("Sigmoid", gate)) if is_silu else self._gelu(gate)
        return self._linear(self._op("Mul", active, up), f"{i}.down")

    def _gelu(self, x: ir.Value) -> ir.Value:
        """The approximation by tanh of Hendrycks and Gimpel, arXiv:1606.08415."""
        cubed = self._op("Mul", self._op("Mul", x, x), x)
        inner = self._scale(self._op("Add", x, self._scale(cubed, 0.044715)), math.sqrt(2 / math.pi))
        opened = self._op("Add", self._op("Tanh", inner), self._number(1.0))
        return self._scale(self._op("Mul", x, opened), 0.5)

    def _linear(self, x: ir.Value, role: str, bias_role: str = "") -> ir.Value:
        product = self._op("Gemm", x, self._matrix(role), transB=1)
        if bias_role not in self.tensors:
            return product
        return self._op("Add", product, self._array(bias_role, self.tensors[bias_role].vector()))

    def _norm(self, x: ir.Value, role: str) -> ir.Value:
        """RMSNorm over the last dimension, computed in floats; x itself where the model has no such norm.

        Values are divided by the largest magnitude first, since half floats do not hold the square of 256.
        """
        if role not in self.tensors:
            return x
        op, last = self.nodes.op, self.nodes.ints(-1)
        root = self.nodes.constant("root_of_eps", np.array(math.sqrt(self.config.rms_eps), self.floats))
        peak = op("Add", op("ReduceMax", op("Abs", x), last, keepdims=1), root)
        x, root = op("Div", x, peak), op("Div", root, peak)
        mean = op("ReduceMean", op("Mul", x, x), last, keepdims=1)
        size = op("Sqrt", op("Add", mean, op("Mul", root, root)))
        gains = self.tensors[role].vector().astype(self.floats)
        return self._op("Mul", op("Div", x, size), self.weights.append(role, [gains], gains.shape))

    def _norm_heads(self, x: ir.Value, role: str) -> ir.Value:
        """RMSNorm over each head, or over all heads at once, by the number of gains."""
        if role not in self.tensors:
            return x
        parts = self._reshape(x, [self.num_tokens, -1, self.tensors[role].columns])
        return self._reshape(self._norm(parts, role), [self.num_tokens, -1])

    def _scale(self, x: ir.Value, scale: float) -> ir.Value:
        return x if scale == 1.0 else self._op("Mul", x, self._number(scale))

    def _cap(self, x: ir.Value, cap: float | None) -> ir.Value:
        return x if cap is None else self._scale(self._op("Tanh", self._scale(x, 1 / cap)), cap)

    def _reshape(self, x: ir.Value, shape: list[int]) -> ir.Value:
        return self._move("Reshape", x, self.nodes.ints(*shape))

    def _matrix(self, role: str) -> ir.Value:
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
        """Levels, some rows at a time; their scales are appended to the list."""
        for part in tensor.floats():
            levels, found = row_levels(part)
            scales.append(found)
            yield levels

    def _table(self, name: str, parts: Callable[[], Iterable[Floats]], shape: Sequence[int]) -> ir.Value:
        """A table to look rows up in, or to add to a product; 16 bits in w8a16."""
        if not self.is_quantised:
            return self.weights.append(name, (part.astype(self.floats) for part in parts()), shape)
        encoding = Encoding.of(range_of(parts()))
        levels = self.weights.append(f"{name}.levels16", (encoding.levels(part) for part in parts()), shape)
        return self.activations.decode(levels, encoding)

    def _array(self, name: str, array: Floats) -> ir.Value:
        return self._table(name, lambda: [array], array.shape)

    def _number(self, number: float) -> ir.Value:
        name = f"number_{number:g}"
        if not self.is_quantised:
            return self.nodes.constant(name, np.array(number, self.floats))
        encoding = Encoding.of(Range(number, number))
        return self.activations.decode(self.nodes.constant(name, encoding.levels(np.array(number))), encoding)

    def _op(self, kind: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
        """A node whose output is computed."""
        return self.activations.encode(self.nodes.op(kind, *inputs, **attributes))

    def _move(self, kind: str, x: ir.Value, *others: ir.Value, **attributes: Any) -> ir.Value:
        """A node whose output is x in other places, with others in the levels of x."""
        return self.activations.reencode(self.nodes.op(kind, x, *others, **attributes), x)
