"""The start of a head: the tokens that it can draft, and its first weights.

The tokens are those that its target gives the most probability, over its own texts.

The weights are the target's last layer, after a matrix found by regression. The state f_{i-1} after the target's
final norm and the token x_i tell much of what the target's last layer reads at i. The matrix that joins them is
the least squares solution of that, so that the head, which ends as the target does, drafts before it is trained.
Where the layer is none that a head can have (norms after attention, experts), the matrix leads to what the layer
gives, and the head's layer starts as one that adds nothing.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from edgespec import TokenIds
from edgespec.export.decoder_config import DecoderConfig
from edgespec.export.heads.head_tensors import LAYER_NAMES
from edgespec.export.sources import LoadedSource
from edgespec.export.tensors import StoredTensor
from edgespec.training.network import (
    DOWN,
    FINAL_NORM,
    FUSE,
    HEAD,
    JOIN,
    LAYER,
    MARKOV_HEAD,
    MARKOV_ROWS,
    Q_BIAS,
    Q_NORM,
    HeadShape,
    O,
    Q,
)
from edgespec.training.packing import Floats

if TYPE_CHECKING:
    from torch import Tensor

_COUNTED_AT_ONCE = 256  # rows
_MARKOV_DEVIATION = 0.25
_DEVIATION = 0.02  # of weights that start at random
_DAMPING = 0.01  # of the regression, as a share of the mean square of each number that it reads
_FITTED_AT_ONCE = 8192  # rows
_FITTED_PRODUCTS = 2e12  # multiplications, some 20 s of two cores


def expected_counts(
    states: "Iterable[Tensor]", head: Floats, scale: float, cap: float | None, device: str
) -> npt.NDArray[np.float64]:
    """How often each token is expected after some rows, [vocab_size]: a sum of probabilities.

    Of the tokens of answers that are not among the texts these counts cover more than counts of tokens do, since
    every row says what else might have come.

    Args:
        states: After the target's final norm, [num_rows, hidden_size] each, on the device.
        head: The target's vocabulary head, [vocab_size, hidden_size].
        scale, cap: Of the target's logits.
        device: Of torch, which counts.
    """
    import torch

    counts = torch.zeros(len(head), dtype=torch.float64, device=device)
    columns = torch.from_numpy(head).to(device).T * scale
    for rows in states:
        for part in rows.float().split(_COUNTED_AT_ONCE):
            found = part @ columns if cap is None else cap * torch.tanh(part @ columns / cap)
            counts += found.softmax(-1).sum(0)
    summed: npt.NDArray[np.float64] = counts.cpu().numpy()
    return summed


def choose_tokens(counts: npt.NDArray[np.float64], size: int, always: Sequence[int]) -> TokenIds:
    """The most frequent tokens and those that always count, ascending, [size]."""
    ranked = counts.copy()
    ranked[list(always)] = np.inf
    return np.sort(np.argsort(-ranked, kind="stable")[:size]).astype(np.int32)


def matrix(tensor: StoredTensor) -> Floats:
    """All of a stored matrix, [rows, columns]."""
    return np.concatenate(list(tensor.floats()))


def can_copy_layer(source: LoadedSource) -> bool:
    """True if the target's last layer is one that a head can have."""
    last = source.config.num_layers - 1
    return f"{last}.attended_norm" not in source.tensors and f"{last}.down" in source.tensors


def read_layers(source: LoadedSource, num_states: int) -> tuple[int, ...]:
    """The layers of the target whose states are stored: those that a head reads, and the joined one."""
    size = source.config.num_layers
    joined = size - (2 if can_copy_layer(source) else 1)  # after which lies what the head's layer reads
    earlier = [joined - max(1, size // 4) * back for back in range(num_states - 2, 0, -1)]
    return (*(layer for layer in earlier if layer >= 0), joined, size)


def head_shape(
    source: LoadedSource, draft_vocab_size: int, num_states: int = 1, markov_rank: int = 0
) -> HeadShape:
    """A head with a layer of its target's sizes."""
    config, last = source.config, source.config.num_layers - 1
    return HeadShape(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        draft_vocab_size=draft_vocab_size,
        rms_eps=config.rms_eps,
        rope_theta=_rope_theta(config),
        context_length=config.context_length,
        activation=config.activation,
        has_biases=f"{last}.q_bias" in source.tensors,
        has_head_norms=f"{last}.q_norm" in source.tensors,
        num_states=num_states,
        markov_rank=markov_rank,
    )


def _rope_theta(config: DecoderConfig) -> float:
    """The base of rotary frequencies; where these are scaled, of those that come closest."""
    for layer in reversed(config.layers):
        if layer.rotary is not None and layer.rotary.rotated > 2:
            return math.pow(layer.rotary.inv_freq[1], -layer.rotary.rotated / 2)
    return 1e4


def start_weights(
    shape: HeadShape,
    source: LoadedSource,
    head: Floats,
    tokens: TokenIds,
    join: Floats,
    fuse: Floats | None = None,
) -> dict[str, Floats]:
    """Weights by name.

    Args:
        head: The target's vocabulary head, [vocab_size, hidden_size].
        tokens: The tokens that can be drafted, [draft_vocab_size].
        join, fuse: The matrices of fit_join.
    """
    rng = np.random.default_rng(0)
    weights: dict[str, Floats] = {}
    for name, size in shape.weights.items():
        one = np.ones(size) if len(size) == 1 else _DEVIATION * rng.standard_normal(size)
        weights[name] = one.astype(np.float32)
    last = source.config.num_layers - 1
    roles = {*LAYER_NAMES}
    if not can_copy_layer(source):
        roles -= {"o", "gate", "up", "down", "mlp_norm"}
        weights[O][:], weights[DOWN][:] = 0.0, 0.0
    for role in roles:
        name = LAYER + LAYER_NAMES[role]
        found, size = source.tensors.get(f"{last}.{role}"), weights[name].shape if name in weights else ()
        # The last layer of a target may have other heads than most of its layers, and than the head.
        if found is not None and size in ((found.rows, found.columns), (found.columns,)):
            weights[name] = matrix(found) if len(size) == 2 else found.vector()
    _fold_scales(weights, source.config)
    weights[JOIN] = join
    if FUSE in weights:
        assert fuse is not None
        weights[FUSE] = fuse
    if MARKOV_ROWS in weights:  # which say nothing before the training, and begin with what tokens have in common
        rows = matrix(source.tensors["embedding"]) @ rng.standard_normal((shape.hidden_size, shape.markov_rank))
        weights[MARKOV_ROWS] = (rows * (_MARKOV_DEVIATION / rows.std(axis=1, keepdims=True))).astype(np.float32)
        weights[MARKOV_HEAD][:] = 0.0
    weights[HEAD] = head[tokens] * np.float32(source.config.logit_scale)
    weights[FINAL_NORM] = source.tensors["final_norm"].vector()
    return weights


def _fold_scales(weights: dict[str, Floats], config: DecoderConfig) -> None:
    """Scales of the target's attention and residuals, which a head has not."""
    scale = np.float32(config.attention_scale * config.head_dim**0.5)
    for name in (Q_NORM,) if Q_NORM in weights else (Q, Q_BIAS):
        if name in weights:
            weights[name] = weights[name] * scale
    for name in (O, DOWN):
        weights[name] = weights[name] * np.float32(config.residual_scale)


class FittedRows(NamedTuple):
    """Rows of a regression.

    embedded: Embeddings of tokens, [num_rows, hidden_size].
    states: Of the target at the tokens before, the last one of each after its final norm.
    wanted: Hidden states at the tokens.
    """

    embedded: Floats
    states: Floats
    wanted: Floats


def sample_rows(num_rows: int, hidden_size: int, num_states: int) -> Iterator[slice]:
    """Parts of an even sample of so many rows, as many as there is time for: more rows give a better start."""
    width = (1 + num_states) * hidden_size
    most = max(1, int(_FITTED_PRODUCTS / (width * (width + hidden_size))))
    step = -(-num_rows // most)
    for start in range(0, num_rows, step * _FITTED_AT_ONCE):
        yield slice(start, start + step * _FITTED_AT_ONCE, step)


def fit_join(parts: Iterable[FittedRows], eps: float) -> tuple[Floats, Floats]:
    """The matrix from an embedding, normed, and a state to what is wanted, [hidden_size, 2 · hidden_size].

    The second matrix makes one state of several, [hidden_size, num_states · hidden_size], of which the first makes
    what comes closest. Rows count alike whatever their size, since norms read what comes of them.
    """
    squares, products = np.zeros((1, 1)), np.zeros((1, 1))
    for embedded, states, wanted in parts:
        normed = embedded / np.sqrt(np.square(embedded).mean(axis=1, keepdims=True) + eps)
        share = 1.0 / np.sqrt(np.square(wanted).mean(axis=1, keepdims=True) + eps)
        read = np.concatenate([normed, states], axis=1) * share
        squares, products = squares + read.T @ read, products + read.T @ (wanted * share)
    width, size = products.shape
    squares[np.diag_indices(width)] *= 1 + _DAMPING
    ends = np.r_[:size, width - size : width]
    join = np.linalg.solve(squares[np.ix_(ends, ends)], products[ends]).T
    token, state = np.split(join, 2, axis=1)
    gain = np.linalg.solve(squares[size:, size:], products[size:] - squares[size:, :size] @ token.T).T
    gain[:, -size:] -= state
    square = state @ state.T
    fuse = state.T @ np.linalg.solve(square + np.eye(size) * (_DAMPING * np.trace(square) / size), gain)
    fuse[:, -size:] += np.eye(size)
    return np.ascontiguousarray(join.astype(np.float32)), fuse.astype(np.float32)
