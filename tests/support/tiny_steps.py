"""Heads with a graph for each token of a draft: tiny ones with random weights, and their forward passes in numpy.

A forward pass takes the token before and the state, and gives logits and the next state; step counts from 0.
"""

import json
import re
from collections.abc import Callable, Mapping
from math import erf, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tiny
from safetensors.numpy import save_file

Floats = npt.NDArray[np.floating[Any]]
Tensors = Mapping[str, npt.NDArray[Any]]
Forward = Callable[[Tensors, int, int, Floats], tuple[Floats, Floats]]
H, V, INNER = tiny.HIDDEN, tiny.VOCAB, 96


def write_head(folder: Path, config: Mapping[str, Any], tensors: Tensors, name: str = "model.safetensors") -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dict(tensors), folder / name)
    return folder


def matrix(rng: np.random.Generator, rows: int, columns: int, scale: float = 1.0) -> npt.NDArray[np.float32]:
    return rng.normal(0, scale / np.sqrt(columns), (rows, columns)).astype(np.float32)


def vector(rng: np.random.Generator, size: int, mean: float = 0.0) -> npt.NDArray[np.float32]:
    return (mean + 0.2 * rng.normal(size=size)).astype(np.float32)


def silu(x: Floats) -> Floats:
    return x / (1 + np.exp(-x))


def sigmoid(x: Floats) -> Floats:
    return 1 / (1 + np.exp(-x))


def gelu(x: Floats) -> Floats:
    return 0.5 * x * (1 + np.vectorize(erf)(x / sqrt(2)))


def rms(x: Floats, eps: float = 1e-6) -> Floats:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps)


# Medusa as its authors save it, and as vLLM does.


def medusa_tensors(num_heads: int = 3, num_blocks: int = 2, *, is_vllm: bool = False) -> dict[str, Any]:
    rng = np.random.default_rng(11)
    tensors: dict[str, Any] = {}
    for i in range(num_heads):
        for k in range(num_blocks):
            name = f"medusa_heads.blocks.{i}.layers.{k}" if is_vllm else f"{i}.{k}.linear"
            tensors[f"{name}.weight"], tensors[f"{name}.bias"] = matrix(rng, H, H), vector(rng, H)
        tensors[f"medusa_heads.lm_heads.{i}.weight" if is_vllm else f"{i}.{num_blocks}.weight"] = matrix(
            rng, V, H, 3
        )
    return tensors


def medusa_forward(w: Tensors, step: int, token: int, state: Floats) -> tuple[Floats, Floats]:
    x, k = state, 0
    for block in ("{}.{}.linear", "medusa_heads.blocks.{}.layers.{}"):
        while (name := block.format(step, k)) + ".weight" in w:
            x, k = x + silu(x @ w[f"{name}.weight"].T + w[f"{name}.bias"]), k + 1
    head = w.get(f"{step}.{k}.weight", w.get(f"medusa_heads.lm_heads.{step}.weight"))
    assert head is not None
    return x @ head.T, state


# Hydra, whose steps read the embeddings of all tokens since.


def hydra_tensors(num_heads: int = 3, num_blocks: int = 2) -> dict[str, Any]:
    rng = np.random.default_rng(12)
    tensors: dict[str, Any] = {}
    for i in range(num_heads):
        for k in range(num_blocks):
            columns = H * (i + 2) if k == 0 else H
            for part in ("linear", "res_connection")[: 2 if k == 0 else 1]:
                name = f"hydra_mlp.{i}.{k}.{part}"
                tensors[f"{name}.weight"], tensors[f"{name}.bias"] = matrix(rng, H, columns), vector(rng, H)
        tensors[f"hydra_lm_head.{i}.weight"], tensors[f"hydra_lm_head.{i}.bias"] = (
            matrix(rng, V, H, 3),
            vector(rng, V),
        )
    return tensors


def hydra_forward(embedding: Floats) -> Forward:
    def forward(w: Tensors, step: int, token: int, state: Floats) -> tuple[Floats, Floats]:
        state, name = np.concatenate([state, embedding[token]]), f"hydra_mlp.{step}"
        x = state @ w[f"{name}.0.res_connection.weight"].T + w[f"{name}.0.res_connection.bias"]
        x = x + silu(state @ w[f"{name}.0.linear.weight"].T + w[f"{name}.0.linear.bias"])
        k = 1
        while f"{name}.{k}.linear.weight" in w:
            x, k = x + silu(x @ w[f"{name}.{k}.linear.weight"].T + w[f"{name}.{k}.linear.bias"]), k + 1
        return x @ w[f"hydra_lm_head.{step}.weight"].T + w[f"hydra_lm_head.{step}.bias"], state

    return forward


# MLP speculators.


def mlp_config(*, tied: bool, scaled: bool, num_steps: int = 4) -> dict[str, Any]:
    return {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "vocab_size": V,
        "emb_dim": H,
        "inner_dim": INNER,
        "n_predict": num_steps,
        "tie_weights": tied,
        "scale_input": scaled,
    }


def mlp_tensors(*, tied: bool, num_steps: int = 4, nested: bool = False) -> dict[str, Any]:
    rng, dot = np.random.default_rng(13), ".0" if nested else ""
    tensors: dict[str, Any] = {}
    for i in range(num_steps):
        if i < 2 or not tied:
            tensors[f"speculator.proj.{i}{dot}.weight"] = matrix(rng, INNER, H if i == 0 else INNER)
        if i == 0 or not tied:
            tensors[f"speculator.emb.{i}{dot}.weight"] = matrix(rng, V, INNER)
            tensors[f"speculator.head.{i}.weight"] = matrix(rng, V, INNER, 3)
            tensors[f"speculator.ln.{i}{dot}.weight"] = vector(rng, INNER, 1)
            tensors[f"speculator.ln.{i}{dot}.bias"] = vector(rng, INNER)
    return tensors


def alpha(num_steps: int, size: int) -> float:
    state = 0.5 ** (0.5 / num_steps)
    return sqrt((1 - state**2) * (size / 2)) / state


def mlp_forward(config: Mapping[str, Any]) -> Forward:
    def forward(w: Tensors, step: int, token: int, state: Floats) -> tuple[Floats, Floats]:
        w = {re.sub(r"^speculator\.(\w+\.\d+)(\.0)?\.", r"\1.", name): value for name, value in w.items()}
        own, projection = (0, min(step, 1)) if config["tie_weights"] else (step, step)
        if step == 0 and config["scale_input"]:
            state = rms(state) / sqrt(2)
        x = state @ w[f"proj.{projection}.weight"].T
        x = x + alpha(config["n_predict"], config["inner_dim"]) * w[f"emb.{own}.weight"][token]
        state = gelu(rms(x) * w[f"ln.{own}.weight"] + w[f"ln.{own}.bias"])
        return state @ w[f"head.{own}.weight"].T, state

    return forward


# LSTM speculators (Snowflake), whose parts are tied over all steps; the state here is output and cell.


def lstm_config(*, scaled: bool = True) -> dict[str, Any]:
    return {
        "architectures": ["ArcticLSTMSpeculatorPreTrainedModel"],
        "method": "sum_lstm",
        "vocab_size": V,
        "input_hidden_dim": H,
        **dict.fromkeys(("emb_dim", "inner_dim", "proj_dim"), str(INNER)),
        "n_predict": 3,
        "num_lookahead_tokens": 5,
        "tie_weights": True,
        "tie_lstm_embs": True,
        "scale_input": scaled,
    }


def lstm_tensors() -> dict[str, Any]:
    rng = np.random.default_rng(14)
    tensors: dict[str, Any] = {
        "projs.0.weight": matrix(rng, 4 * INNER, H),
        "projs.1.weight": matrix(rng, 4 * INNER, INNER),
        "forget_emb.0.weight": matrix(rng, V, INNER, 2),
        "head.0.weight": matrix(rng, V, INNER, 3),
    }
    for name in ("cell_ln", "state_ln"):
        tensors[f"{name}.0.weight"], tensors[f"{name}.0.bias"] = vector(rng, INNER, 1), vector(rng, INNER)
    return tensors


def lstm_forward(w: Tensors, step: int, token: int, state: Floats) -> tuple[Floats, Floats]:
    output, cell = (rms(state) / sqrt(2), np.zeros(INNER)) if step == 0 else np.split(state, 2)
    mixed = output @ w[f"projs.{min(step, 1)}.weight"].T + alpha(3, INNER) * np.tile(
        w["forget_emb.0.weight"][token], 4
    )
    forget, enter, leave, candidate = np.split(mixed, 4)
    candidate = gelu(rms(candidate) * w["cell_ln.0.weight"] + w["cell_ln.0.bias"])
    cell = cell * sigmoid(forget) + candidate * sigmoid(enter)
    output = gelu(rms(cell) * w["state_ln.0.weight"] + w["state_ln.0.bias"]) * sigmoid(leave)
    return output @ w["head.0.weight"].T, np.concatenate([output, cell])
