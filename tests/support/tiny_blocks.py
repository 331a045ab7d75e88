"""Heads that draft a block in one pass: tiny ones with random weights, and their forward pass in numpy."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tiny
from tiny_steps import matrix, rms, sigmoid, silu, vector, write_head

H, V, INNER = tiny.HIDDEN, tiny.VOCAB, 96
HEADS, KV_HEADS, HEAD_DIM, LAYERS = 4, 2, 16, 2
EPS, THETA, RANK = 1e-6, 5e4, 32
GROUP = 8  # numbers of a state that share what a convolution adds to its kernel
MASK = 7


@dataclass(frozen=True)
class BlockCase:
    """A head in one of the dialects.

    target_layers: What its folder must say that it reads, of a target of three layers.
    skips_known: The row of the known token predicts nothing.
    windows: How many tokens each layer sees; None for all.
    are_causal: True for each layer whose rows do not see those after them.
    counts_from_known: A window ends before the known token for all rows of a block.
    is_interleaved: Values 2i and 2i + 1 of a head are rotated together.
    num_taps: Rows of the block that its convolutions read; 0 for none.
    eps, theta, mask: As its config states them.
    given: Its tensors, where they are not drawn.
    num_candidates: Of the tokens among which it chooses by the one before; 0 where it has no selector.
    """

    config: dict[str, Any]
    target_layers: tuple[int, ...]
    num_tokens: int
    skips_known: bool
    markov: str | None = None
    confidence: str | None = None  # with or without the token before
    windows: tuple[int | None, ...] = (None,) * LAYERS
    are_causal: tuple[bool, ...] = (False,) * LAYERS
    counts_from_known: bool = False
    is_interleaved: bool = False
    eps: float = EPS
    theta: float = THETA
    mask: int = MASK
    given: dict[str, Any] | None = None
    num_taps: int = 0
    num_candidates: int = 0
    tokens: np.ndarray | None = None  # of each row of a trimmed vocabulary head
    has_own_vocabulary: bool = False
    seed: int = 21
    leave_out: tuple[str, ...] = ()
    change: dict[str, Any] = field(default_factory=dict)

    @property
    def num_drafted(self) -> int:
        return self.num_tokens - (1 if self.skips_known else 0)

    def write(self, folder: Path) -> Path:
        tensors = {
            name: each for name, each in (self.tensors() | self.change).items() if name not in self.leave_out
        }
        return write_head(folder, self.config, tensors)

    def tensors(self) -> dict[str, Any]:
        if self.given is not None:
            return self.given
        rng = np.random.default_rng(self.seed)
        w: dict[str, Any] = {
            "fc.weight": matrix(rng, H, len(self.target_layers) * H),
            "hidden_norm.weight": vector(rng, H, 1),
            "norm.weight": vector(rng, H, 1),
        }
        for i in range(LAYERS):
            layer, sizes = f"layers.{i}.", {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS}
            for part, heads in sizes.items():
                w[f"{layer}self_attn.{part}_proj.weight"] = matrix(rng, heads * HEAD_DIM, H)
            for part in "qk":
                w[f"{layer}self_attn.{part}_norm.weight"] = vector(rng, HEAD_DIM, 1)
            w[f"{layer}self_attn.o_proj.weight"] = matrix(rng, H, HEADS * HEAD_DIM, 2)
            w[f"{layer}mlp.gate_proj.weight"] = matrix(rng, INNER, H)
            w[f"{layer}mlp.up_proj.weight"] = matrix(rng, INNER, H)
            w[f"{layer}mlp.down_proj.weight"] = matrix(rng, H, INNER, 3)
            for name in ("input_layernorm", "post_attention_layernorm"):
                w[f"{layer}{name}.weight"] = vector(rng, H, 1)
            for part in ("attention_conv", "mlp_conv") if self.num_taps else ():
                w[f"{layer}{part}.base_kernel"] = vector(rng, 2 * self.num_taps * H).reshape(2, self.num_taps, H)
                w[f"{layer}{part}.base_kernel"][:, 0] += 1
                shares = matrix(rng, 2 * self.num_taps * H // GROUP, H, 0.5)
                w[f"{layer}{part}.kernel_projection.weight"] = shares
        if self.num_candidates:
            for name in ("predecessor_codebook", "successor_codebook"):
                w[f"candidate_selector.{name}"] = matrix(rng, V, RANK, 4)
            w["candidate_selector.hidden_projection.weight"] = matrix(rng, RANK, H)
        rows = V if self.tokens is None else len(self.tokens)
        if self.has_own_vocabulary:
            w["embed_tokens.weight"], w["lm_head.weight"] = matrix(rng, V, H, 2.4), matrix(rng, rows, H, 3)
        if self.tokens is not None:
            w["d2t"] = self.tokens - np.arange(rows)
            w["t2d"] = np.isin(np.arange(V), self.tokens)
        if self.markov:
            w["markov_head.markov_w1.weight"] = matrix(rng, V, RANK, 4)
            w["markov_head.markov_w2.weight"] = matrix(rng, rows, RANK, 3)
        if self.markov == "gated":
            w["markov_head.gate_proj.weight"] = matrix(rng, RANK, H + RANK)
            w["markov_head.gate_proj.bias"] = vector(rng, RANK)
        if self.markov == "rnn":
            w["markov_head.joint_proj.weight"] = matrix(rng, 3 * RANK, H + 2 * RANK)
            w["markov_head.joint_proj.bias"] = vector(rng, 3 * RANK)
        if self.confidence:
            w["confidence_head.proj.weight"] = matrix(rng, 1, H + (RANK if self.confidence == "with" else 0))
            w["confidence_head.proj.bias"] = vector(rng, 1)
        return w


def rotate(case: BlockCase, x: np.ndarray, positions: np.ndarray) -> np.ndarray:  # [rows, heads, head_dim]
    head_dim = x.shape[-1]
    angles = positions[:, None] * case.theta ** (-np.arange(0, head_dim, 2) / head_dim)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    if case.is_interleaved:
        first, second = x[..., ::2], x[..., 1::2]
        return np.stack([first * cos - second * sin, second * cos + first * sin], axis=-1).reshape(x.shape)
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def sees(case: BlockCase, layer: int, num_before: int, num_tokens: int) -> np.ndarray:
    """Which tokens before the block and of it each row sees, [num_tokens, num_before + num_tokens]."""
    window, row = case.windows[layer], num_before + np.arange(num_tokens)[:, None]
    other = np.arange(num_before + num_tokens)
    seen = (other <= row) | (not case.are_causal[layer])
    if window is None:
        return seen
    if case.counts_from_known:
        return seen & (other >= num_before - window)
    return seen & (abs(row - other) < window)


def convolved(w: dict[str, Any], part: str, x: np.ndarray, run: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """What a part of a layer gives for rows of a block, convolved along the block before and after it."""
    if f"{part}.base_kernel" not in w:
        return run(x)
    kernels = w[f"{part}.base_kernel"]
    num_taps = kernels.shape[1]
    shares = (x @ w[f"{part}.kernel_projection.weight"].T).reshape(len(x), 2, num_taps, -1)

    def convolve(y: np.ndarray, side: int) -> np.ndarray:
        total = np.zeros_like(y)
        for row in range(len(y)):
            for tap in range(min(num_taps, row + 1)):
                total[row] += (
                    kernels[side, tap] + np.repeat(shares[row, side, tap], y.shape[1] // shares.shape[-1])
                ) * y[row - tap]
        return total

    return convolve(run(convolve(x, 0)), 1)


def attended(case: BlockCase, i: int, w: dict[str, Any], before: np.ndarray, h: np.ndarray) -> np.ndarray:
    num_before, num_tokens = len(before), len(h)
    positions, head_dim = np.arange(num_before + num_tokens), w["self_attn.q_norm.weight"].size
    q, k, v = (
        (rows @ w[f"self_attn.{part}_proj.weight"].T).reshape(len(rows), -1, head_dim)
        for part, rows in (("q", h), ("k", np.concatenate([before, h])), ("v", np.concatenate([before, h])))
    )
    q = rotate(case, rms(q, case.eps) * w["self_attn.q_norm.weight"], positions[num_before:])
    k = rotate(case, rms(k, case.eps) * w["self_attn.k_norm.weight"], positions)
    k, v = (np.repeat(each, q.shape[1] // k.shape[1], axis=1) for each in (k, v))
    scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(head_dim)
    scores[:, ~sees(case, i, num_before, num_tokens)] = -np.inf
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", shares, v).reshape(num_tokens, -1) @ w["self_attn.o_proj.weight"].T


def fed(w: dict[str, Any], h: np.ndarray) -> np.ndarray:
    gate, up = h @ w["mlp.gate_proj.weight"].T, h @ w["mlp.up_proj.weight"].T
    return (silu(gate) * up) @ w["mlp.down_proj.weight"].T


def block_states(case: BlockCase, w: dict[str, Any], x: np.ndarray, features: np.ndarray) -> np.ndarray:
    """States of all rows of a block, [num_tokens, H], of its embeddings and features of the tokens before."""
    before = rms(features @ w["fc.weight"].T, case.eps) * w["hidden_norm.weight"]
    for i in range(len(case.windows)):
        layer = {
            name.removeprefix(f"layers.{i}."): each for name, each in w.items() if name.startswith(f"layers.{i}.")
        }
        x = x + convolved(
            layer,
            "attention_conv",
            rms(x, case.eps) * layer["input_layernorm.weight"],
            partial(attended, case, i, layer, before),
        )
        h = rms(x, case.eps) * layer["post_attention_layernorm.weight"]
        x = x + convolved(layer, "mlp_conv", h, partial(fed, layer))
    return rms(x, case.eps) * w["norm.weight"]


def expected_draft(
    case: BlockCase,
    target: dict[str, Any],
    text: np.ndarray,
    features: np.ndarray,
    num_tokens: int,
    dtype: type[np.floating[Any]] = np.float64,
) -> tuple[np.ndarray, list[float]]:
    """Rows and chances of a greedy draft behind a text, [num_tokens, columns], with features of all its tokens."""
    w = {name: np.asarray(each, dtype) for name, each in (case.tensors() | case.change).items()}
    embedding = w.get("embed_tokens.weight", target["model.embed_tokens.weight"])
    head = w.get("lm_head.weight", target.get("lm_head.weight", target["model.embed_tokens.weight"]))
    block = np.append(text[-1], [case.mask] * (case.num_tokens - 1))
    states = block_states(case, w, embedding[block], features[: len(text) - 1])[
        case.num_tokens - case.num_drafted :
    ]
    rows, chances, token, memory = [], [], int(text[-1]), np.zeros(RANK)
    for state in states[:num_tokens]:
        row = state @ head.T
        if case.num_candidates:
            known = w["candidate_selector.predecessor_codebook"][token]
            known = known * (w["candidate_selector.hidden_projection.weight"] @ state)
            best = np.argsort(-row)[: case.num_candidates]
            scores = row[best] + w["candidate_selector.successor_codebook"][best] @ known
            row = np.full_like(row, -30000.0)
            row[best] = scores
        if case.markov:
            mixed = before = w["markov_head.markov_w1.weight"][token]
            if case.markov == "gated":
                joined = np.concatenate([state, before])
                gate = w["markov_head.gate_proj.weight"] @ joined + w["markov_head.gate_proj.bias"]
                mixed = sigmoid(gate) * before
            if case.markov == "rnn":
                joined = w["markov_head.joint_proj.weight"] @ np.concatenate([memory, before, state])
                gate, candidate, mixed = np.split(joined + w["markov_head.joint_proj.bias"], 3)
                memory = sigmoid(gate) * memory + (1 - sigmoid(gate)) * np.tanh(candidate)
                mixed = np.tanh(mixed)
            row = row + w["markov_head.markov_w2.weight"] @ mixed
        if case.confidence:
            known = [state, before] if case.confidence == "with" else [state]
            chance = w["confidence_head.proj.weight"] @ np.concatenate(known) + w["confidence_head.proj.bias"]
            chances.append(float(sigmoid(chance)[0]))
        rows.append(row)
        token = int(row.argmax()) if case.tokens is None else int(case.tokens[row.argmax()])
    return np.stack(rows), chances


# As Qwen3's configuration has it; Z Lab and DeepSeek state it on top.
LAYERS_CONFIG = {
    "model_type": "qwen3",
    "hidden_size": H,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "rms_norm_eps": EPS,
    "rope_theta": THETA,
    "vocab_size": V,
    "max_position_embeddings": tiny.CONTEXT,
    "hidden_act": "silu",
    "attention_bias": False,
    "layer_types": ["full_attention"] * LAYERS,
}


def windowed(case: BlockCase, window: int, kinds: str = "SS", **stated: Any) -> BlockCase:
    """A head whose layers of kind S see a window, causally unless its settings say otherwise."""
    types = ["sliding_attention" if kind == "S" else "full_attention" for kind in kinds]
    changed = {"layer_types": types, "sliding_window": window, "use_sliding_window": True}
    inner = case.config.get("transformer_layer_config")
    config = {**case.config, **stated}
    config |= {"transformer_layer_config": inner | changed} if inner else changed
    is_causal = not stated.get("sliding_window_non_causal") and stated.get("is_causal", True)
    are_windows = [kind == "S" for kind in kinds]
    return replace(
        case,
        config=config,
        windows=tuple(window if is_window else None for is_window in are_windows),
        are_causal=tuple(is_causal and is_window for is_window in are_windows),
        counts_from_known=inner is not None,
    )


def zlab(
    layers: list[int] | None, target_layers: tuple[int, ...], *, within: bool = False, **more: Any
) -> BlockCase:
    own: dict[str, Any] = {"mask_token_id": MASK} | ({} if layers is None else {"target_layer_ids": layers})
    config = {**LAYERS_CONFIG, "architectures": ["DFlashDraftModel"], "num_target_layers": tiny.LAYERS}
    config |= {"dflash_config": own | {"block_size": 6}} if within else {"dflash_config": own, "block_size": 6}
    return BlockCase(config, target_layers, 6, True, **more)


def deepseek(*, markov: str | None = "vanilla", confidence: str | None = "with", **more: Any) -> BlockCase:
    config = {
        **LAYERS_CONFIG,
        "architectures": ["Qwen3DSparkModel"],
        "target_layer_ids": [0],
        "mask_token_id": MASK,
        "block_size": 5,
        "num_anchors": 8,
        "markov_rank": RANK if markov else 0,
        "enable_confidence_head": confidence is not None,
    }
    if markov:
        config["markov_head_type"] = markov
    if confidence:
        config["confidence_head_with_markov"] = confidence == "with"
    return BlockCase(config, (0,), 5, False, markov, confidence, has_own_vocabulary=True, **more)


def specforge(**more: Any) -> BlockCase:
    """DeepSeek's DSpark as SpecForge writes it, whose own settings are all in dflash_config."""
    made = deepseek(markov="gated", **more)
    names = ("target_layer_ids", "mask_token_id", "markov_rank", "markov_head_type", "enable_confidence_head")
    moved = {name: made.config[name] for name in (*names, "confidence_head_with_markov")}
    config = {name: value for name, value in made.config.items() if name not in moved}
    config |= {"architectures": ["DSparkDraftModel"], "dflash_config": {**moved, "projector_type": "dspark"}}
    return replace(made, config=config)


def dflash2(**more: Any) -> BlockCase:
    """DFlash 2 of Z Lab: all layers see a window, on both sides, and its own settings are in one place."""
    made = windowed(zlab([0, 1], (0, 2), within=True, num_taps=2, num_candidates=16, **more), 9, is_causal=False)
    own = {"conv_kernel_size": 2, "conv_group_size": GROUP, "selector_rank": RANK, "selector_top_k": 16}
    config = {**made.config, "architectures": ["DFlash2DraftModel"]}
    return replace(made, config=config | {"dflash_config": {**made.config["dflash_config"], **own}})


def liquid(**more: Any) -> BlockCase:
    """DSpark as Liquid publishes it: without projector_type, with the target's vocabulary, rotated in pairs."""
    made = deepseek(is_interleaved=True, **more)
    own = {name: made.config[name] for name in ("target_layer_ids", "mask_token_id")}
    config = {name: value for name, value in made.config.items() if name not in own}
    config |= {"architectures": ["Lfm2DSparkDraftModel"], "rope_is_neox_style": False, "dflash_config": own}
    return replace(made, config=config, has_own_vocabulary=False)


def speculators(method: str, *, tokens: np.ndarray | None = None, **more: Any) -> BlockCase:
    is_dspark = method == "dspark"
    config = {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": method,
        "speculators_config": {"algorithm": method, "verifier": {"name_or_path": "some/model"}},
        "transformer_layer_config": LAYERS_CONFIG,
        "draft_vocab_size": V if tokens is None else len(tokens),
        "aux_hidden_state_layer_ids": [1, 2],
        "mask_token_id": MASK,
        "block_size": 6,
    }
    if is_dspark:
        config |= {"markov_rank": RANK, "markov_head_type": "vanilla", "enable_confidence_head": True}
    return BlockCase(
        config,
        (0, 1),
        6,
        True,
        "vanilla" if is_dspark else None,
        "with" if is_dspark else None,
        tokens=tokens,
        has_own_vocabulary=True,
        **more,
    )
