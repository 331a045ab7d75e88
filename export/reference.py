"""The transformer written out in numpy over the stored weights, to check an export against.

Reads one chunk of one matrix at a time, so it needs little memory for any model. It shares with the graph only the
description of the model and the decoding of blocks.
"""

import math
from collections.abc import Mapping

import numpy as np

from edgespec.export.blocks import Floats
from edgespec.export.families import DecoderConfig, Routing
from edgespec.export.rotary import Rotary
from edgespec.export.tensors import StoredTensor
from edgespec.types import Logits, TokenIds


def reference_logits(config: DecoderConfig, tensors: Mapping[str, StoredTensor], tokens: TokenIds) -> Logits:
    """Logits that follow each token, [num_tokens, vocab_size], in float32."""
    x = np.concatenate([tensors["embedding"].row(int(token)) for token in tokens])
    x *= np.float32(config.embedding_scale)
    residual = np.float32(config.residual_scale)
    for i in range(config.num_layers):
        layer = {role.partition(".")[2]: tensor for role, tensor in tensors.items() if role.startswith(f"{i}.")}
        attended = _attention(config, i, layer, _norm(config, layer, "input_norm", x))
        x += residual * _norm(config, layer, "attended_norm", attended)
        normed = _norm(config, layer, "mlp_norm", x)
        fed = (
            _mlp(config, layer, normed) if config.routing is None else _mix(config, config.routing, layer, normed)
        )
        x += residual * _norm(config, layer, "fed_norm", fed)
    normed = _norm(config, tensors, "final_norm", x) * np.float32(config.logit_scale)
    return _cap(_linear(normed, tensors.get("head", tensors["embedding"])), config.logit_cap)


def _mlp(config: DecoderConfig, layer: Mapping[str, StoredTensor], x: Floats, expert: str = "") -> Floats:
    gate, up = (_linear(x, layer[part + expert]) for part in ("gate", "up"))
    return _linear(_ACTIVATIONS[config.activation](gate) * up, layer[f"down{expert}"])


def _mix(config: DecoderConfig, routing: Routing, layer: Mapping[str, StoredTensor], x: Floats) -> Floats:
    """The experts' outputs for their tokens, weighted by the router's probabilities."""
    scores = _linear(x, layer["router"])
    share = np.exp(scores - scores.max(axis=-1, keepdims=True))
    share /= share.sum(axis=-1, keepdims=True)
    chosen = np.argsort(-share, axis=-1, kind="stable")[:, : routing.num_used]
    kept = np.zeros_like(share)
    np.put_along_axis(kept, chosen, np.take_along_axis(share, chosen, axis=-1), axis=-1)
    if routing.is_normalized:
        kept /= kept.sum(axis=-1, keepdims=True)
    mixed = np.zeros_like(x)
    for number in range(routing.num_experts):
        own = np.flatnonzero(kept[:, number])
        if own.size:
            mixed[own] += kept[own, number, None] * _mlp(config, layer, x[own], f".{number}")
    return mixed


def _silu(x: Floats) -> Floats:
    result: Floats = x / (1 + np.exp(-x))
    return result


def _gelu_tanh(x: Floats) -> Floats:
    """The approximation by tanh of Hendrycks and Gimpel, arXiv:1606.08415."""
    inner = np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x**3)
    result: Floats = np.float32(0.5) * x * (1 + np.tanh(inner))
    return result


_ACTIVATIONS = {"silu": _silu, "gelu_pytorch_tanh": _gelu_tanh}


def _cap(x: Floats, cap: float | None) -> Floats:
    return x if cap is None else np.float32(cap) * np.tanh(x / np.float32(cap))


def _linear(x: Floats, weight: StoredTensor, bias: StoredTensor | None = None) -> Floats:
    product = np.concatenate([x @ part.T for part in weight.floats()], axis=-1)
    return product if bias is None else product + bias.vector()


def _norm(config: DecoderConfig, tensors: Mapping[str, StoredTensor], role: str, x: Floats) -> Floats:
    """RMSNorm over groups of as many values as gains; x itself where the model has no such norm."""
    if role not in tensors:
        return x
    gain = tensors[role].vector()
    parts = x.reshape(len(x), -1, len(gain))
    scaled = parts / np.sqrt(np.square(parts).mean(axis=-1, keepdims=True) + np.float32(config.rms_eps))
    result: Floats = (scaled * gain).reshape(x.shape)
    return result


def _attention(config: DecoderConfig, i: int, layer: Mapping[str, StoredTensor], x: Floats) -> Floats:
    num_tokens = len(x)
    q, k, v = (_linear(x, layer[part], layer.get(f"{part}_bias")) for part in "qkv")
    q, k = _norm(config, layer, "q_norm", q), _norm(config, layer, "k_norm", k)
    q, k, v = (y.reshape(num_tokens, -1, config.head_dim) for y in (q, k, v))
    own = config.layers[i]
    if own.rotary is not None:
        q, k = _rotate(q, own.rotary), _rotate(k, own.rotary)
    groups = config.num_heads // config.num_kv_heads
    k, v = np.repeat(k, groups, axis=1), np.repeat(v, groups, axis=1)
    scores = np.einsum("qhd,khd->hqk", q, k) * np.float32(config.attention_scale)
    scores = _cap(scores, config.attention_cap) + _mask(own.sliding_window, num_tokens)
    share = np.exp(scores - scores.max(axis=-1, keepdims=True))
    share /= share.sum(axis=-1, keepdims=True)
    return _linear(np.einsum("hqk,khd->qhd", share, v).reshape(num_tokens, -1), layer["o"])


def _mask(sliding_window: int | None, num_tokens: int) -> Floats:
    """−∞ where a key lies ahead of the query, or as far behind as the sliding window is wide."""
    ahead = np.arange(num_tokens) - np.arange(num_tokens)[:, None]
    hidden = ahead > 0
    if sliding_window is not None:
        hidden |= ahead <= -sliding_window
    return np.where(hidden, np.float32(-np.inf), np.float32(0))


def _rotate(x: Floats, rotary: Rotary) -> Floats:
    angles = np.outer(np.arange(len(x), dtype=np.float32), rotary.inv_freq)[:, None]
    cos, sin = np.cos(angles) * np.float32(rotary.scale), np.sin(angles) * np.float32(rotary.scale)
    half = rotary.rotated // 2
    first, second, rest = np.split(x, [half, 2 * half], axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)
