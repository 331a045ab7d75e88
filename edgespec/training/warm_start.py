"""The weights from which the training of a head starts: where it can, those of its target's last layer and head."""

from math import sqrt

import numpy as np
import numpy.typing as npt

from edgespec.export.families import DecoderConfig
from edgespec.export.sources import LoadedSource
from edgespec.export.tensors import StoredTensor
from edgespec.training.shape import (
    DOWN,
    FINAL_NORM,
    FUSE,
    GATE,
    HEAD,
    K_BIAS,
    MLP_NORM,
    Q_BIAS,
    STATE_NORM,
    UP,
    V_BIAS,
    HeadShape,
    K,
    O,
    Q,
    V,
)
from edgespec.types import TokenIds

Floats = npt.NDArray[np.float32]
_DEVIATION = 0.02  # of weights that start at random


def default_layers(num_layers: int) -> tuple[int, ...]:
    """Layers whose hidden states a head reads: an early, a middle and a late one, but of few layers fewer."""
    wanted = (1, num_layers // 2 - 1, num_layers - 4)
    return tuple(sorted({min(max(0, layer), num_layers - 1) for layer in wanted}))


def head_shape(
    config: DecoderConfig, layers: tuple[int, ...], draft_vocab_size: int, *, has_biases: bool
) -> HeadShape:
    """A head with a layer of its target's sizes."""
    rotary = next((layer.rotary for layer in reversed(config.layers) if layer.rotary is not None), None)
    theta = 1e4
    if rotary is not None and rotary.rotated > 2:  # the last frequency but one step is theta^(-1 + 2 / rotated)
        theta = float(rotary.inv_freq[1]) ** (-rotary.rotated / 2)
    return HeadShape(
        layers=layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        draft_vocab_size=draft_vocab_size,
        rms_eps=config.rms_eps,
        rope_theta=theta,
        context_length=config.context_length,
        activation=config.activation,
        has_biases=has_biases,
    )


def matrix(tensor: StoredTensor) -> Floats:
    """All of a stored matrix, [rows, columns]."""
    return np.concatenate(list(tensor.floats()))


def has_biases(source: LoadedSource) -> bool:
    return f"{source.config.num_layers - 1}.q_bias" in source.tensors


def start_weights(
    shape: HeadShape, source: LoadedSource, head: Floats, tokens: TokenIds, feature_scales: Floats
) -> dict[str, Floats]:
    """Weights by name.

    Queries, keys and values read the state as the target's last layer reads its own, and the token hardly at first.

    Args:
        head: The target's vocabulary head, [vocab_size, hidden_size].
        tokens: The tokens that can be drafted, [draft_vocab_size].
        feature_scales: Root mean square of the hidden states of each layer that is read, [num_layers].
    """
    rng = np.random.default_rng(0)
    weights: dict[str, Floats] = {}
    for name, size in shape.weights.items():
        one = np.ones(size) if len(size) == 1 else _DEVIATION * rng.standard_normal(size)
        weights[name] = one.astype(np.float32)
    for bias in (Q_BIAS, K_BIAS, V_BIAS):
        if bias in weights:
            weights[bias][:] = 0.0
    h = shape.hidden_size
    weights[FUSE] /= np.repeat(feature_scales, h)[None]
    weights[HEAD] = head[tokens]
    weights[FINAL_NORM] = source.tensors["final_norm"].vector()
    _copy_last_layer(weights, source, h)
    return weights


def _copy_last_layer(weights: dict[str, Floats], source: LoadedSource, hidden_size: int) -> None:
    last = source.config.num_layers - 1
    tensors = source.tensors
    for name, part in ((Q, "q"), (K, "k"), (V, "v")):
        weights[name][:, hidden_size:] = matrix(tensors[f"{last}.{part}"])
    for name, part in ((Q_BIAS, "q"), (K_BIAS, "k"), (V_BIAS, "v")):
        if name in weights:
            weights[name] = tensors[f"{last}.{part}_bias"].vector()
    for name, part in ((O, "o"), (GATE, "gate"), (UP, "up"), (DOWN, "down")):
        if (found := tensors.get(f"{last}.{part}")) is not None:  # a mixture of experts has no such MLP
            weights[name] = matrix(found)
    for name, part in ((STATE_NORM, "input_norm"), (MLP_NORM, "mlp_norm")):
        if (found := tensors.get(f"{last}.{part}")) is not None:
            weights[name] = found.vector()


def feature_scales(rows: Floats, num_layers: int) -> Floats:
    """Root mean square of each layer's part of some rows of hidden states, [num_rows, layers · hidden_size]."""
    parts = np.split(rows.astype(np.float64), num_layers, axis=1)
    return np.array([sqrt(float(np.square(part).mean())) or 1.0 for part in parts], np.float32)
