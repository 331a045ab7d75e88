"""The same transformer written out in numpy over the stored weights: what an export is checked against.

Reads one chunk of one matrix at a time, so it needs little memory whatever the model's size. Independent of
the graph: it shares with it the description of the model and the decoding of blocks, nothing else.
"""

from collections.abc import Mapping

import numpy as np

from edgespec.export.blocks import Floats
from edgespec.export.families import DecoderConfig
from edgespec.export.tensors import StoredTensor
from edgespec.types import Logits, TokenIds


def reference_logits(config: DecoderConfig, tensors: Mapping[str, StoredTensor], tokens: TokenIds) -> Logits:
    """Logits that follow each token, [num_tokens, vocab_size], in float32."""
    x = np.concatenate([tensors["embedding"].row(int(token)) for token in tokens])
    x *= np.float32(config.embedding_scale)
    residual = np.float32(config.residual_scale)
    for i in range(config.num_layers):
        layer = {role.partition(".")[2]: tensor for role, tensor in tensors.items() if role.startswith(f"{i}.")}
        normed = _norm(x, layer["input_norm"].vector(), config.rms_eps)
        x += residual * _attention(config, layer, normed, rotates=i not in config.layers_without_rope)
        normed = _norm(x, layer["mlp_norm"].vector(), config.rms_eps)
        gate, up = _linear(normed, layer["gate"]), _linear(normed, layer["up"])
        x += residual * _linear(gate / (1 + np.exp(-gate)) * up, layer["down"])
    normed = _norm(x, tensors["final_norm"].vector(), config.rms_eps) * np.float32(config.logit_scale)
    return _linear(normed, tensors.get("head", tensors["embedding"]))


def _linear(x: Floats, weight: StoredTensor, bias: StoredTensor | None = None) -> Floats:
    product = np.concatenate([x @ part.T for part in weight.floats()], axis=-1)
    return product if bias is None else product + bias.vector()


def _norm(x: Floats, gain: Floats, eps: float) -> Floats:
    scaled: Floats = x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + np.float32(eps))
    return scaled * gain


def _attention(config: DecoderConfig, layer: Mapping[str, StoredTensor], x: Floats, *, rotates: bool) -> Floats:
    num_tokens = len(x)
    q, k, v = (
        _linear(x, layer[part], layer.get(f"{part}_bias")).reshape(num_tokens, -1, config.head_dim)
        for part in "qkv"
    )
    if "q_norm" in layer:
        q, k = (_norm(y, layer[f"{part}_norm"].vector(), config.rms_eps) for part, y in (("q", q), ("k", k)))
    if rotates:
        q, k = _rotated(q, config.inv_freq), _rotated(k, config.inv_freq)
    groups = config.num_heads // config.num_kv_heads
    k, v = np.repeat(k, groups, axis=1), np.repeat(v, groups, axis=1)
    scores = np.einsum("qhd,khd->hqk", q, k) * np.float32(config.attention_scale) + _mask(config, num_tokens)
    share = np.exp(scores - scores.max(axis=-1, keepdims=True))
    share /= share.sum(axis=-1, keepdims=True)
    return _linear(np.einsum("hqk,khd->qhd", share, v).reshape(num_tokens, -1), layer["o"])


def _mask(config: DecoderConfig, num_tokens: int) -> Floats:
    """−∞ where a key lies ahead of the query, or as far behind as the sliding window is wide."""
    ahead = np.arange(num_tokens) - np.arange(num_tokens)[:, None]
    hidden = ahead > 0
    if config.sliding_window is not None:
        hidden |= ahead <= -config.sliding_window
    return np.where(hidden, np.float32(-np.inf), np.float32(0))


def _rotated(x: Floats, inv_freq: Floats) -> Floats:
    """Rotary positions on the halves of each head (Su et al., arXiv:2104.09864), [num_tokens, heads, head_dim]."""
    angles = np.outer(np.arange(len(x), dtype=np.float32), inv_freq)[:, None]
    cos, sin = np.cos(angles), np.sin(angles)
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
