"""Small random assistants of Gemma 4, as their files have them, and a numpy forward of them."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tiny
from families import FAMILIES, weights_of
from safetensors.numpy import save_file

INNER, HEADS, CHOSEN = 48, 4, 40
KINDS = ("sliding_attention", "sliding_attention", "full_attention")
Weights = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class MadeAssistant:
    """An assistant for a family of tests/support/families.py.

    ordered: Tokens outside the likeliest clusters, which have one token each, get no logit.
    """

    family: str
    ordered: bool = False
    hidden: int = 32
    change: Weights = field(default_factory=dict)

    @property
    def target(self) -> dict[str, Any]:
        config: dict[str, Any] = FAMILIES[self.family]["config"]
        return config

    @property
    def config(self) -> dict[str, Any]:
        rest = {"num_centroids": tiny.VOCAB, "centroid_intermediate_top_k": CHOSEN}
        text = {"model_type": "gemma4_text", "layer_types": [*KINDS], "num_attention_heads": HEADS}
        return {
            "architectures": ["Gemma4AssistantForCausalLM"],
            "model_type": "gemma4_assistant",
            "backbone_hidden_size": self.target["hidden_size"],
            "use_ordered_embeddings": self.ordered,
            "text_config": text | {"rms_norm_eps": self.target["rms_norm_eps"]},
        } | rest

    def source(self, kind: str) -> int:
        """The layer of the target whose keys layers of a kind read."""
        last = self.target["num_hidden_layers"] - self.target["num_kv_shared_layers"]
        return max(i for i, each in enumerate(self.target["layer_types"][:last]) if each == kind)

    def head_dim(self, kind: str) -> int:
        own: int = self.target["per_layer_config"].get(str(self.source(kind)), self.target)["head_dim"]
        return own

    def tensors(self) -> Weights:
        rng, wide = np.random.default_rng(4), self.target["hidden_size"]

        def matrix(rows: int, columns: int) -> np.ndarray:
            return rng.normal(0, 1.5 / np.sqrt(columns), (rows, columns)).astype(np.float32)

        def gain(size: int) -> np.ndarray:
            return (1 + 0.2 * rng.normal(size=size)).astype(np.float32)

        made = {
            "pre_projection.weight": matrix(self.hidden, 2 * wide),
            "post_projection.weight": matrix(wide, self.hidden),
        }
        made |= {
            "model.norm.weight": gain(self.hidden),
            "model.embed_tokens.weight": matrix(tiny.VOCAB, self.hidden),
        }
        for i, kind in enumerate(KINDS):
            layer, rows = f"model.layers.{i}.", HEADS * self.head_dim(kind)
            made[f"{layer}self_attn.q_proj.weight"] = matrix(rows, self.hidden)
            made[f"{layer}self_attn.q_norm.weight"] = gain(self.head_dim(kind))
            made[f"{layer}self_attn.o_proj.weight"] = matrix(self.hidden, rows)
            names = ("input", "post_attention", "pre_feedforward", "post_feedforward")
            made |= {f"{layer}{name}_layernorm.weight": gain(self.hidden) for name in names}
            made |= {f"{layer}mlp.{part}_proj.weight": matrix(INNER, self.hidden) for part in ("gate", "up")}
            made[f"{layer}mlp.down_proj.weight"] = matrix(self.hidden, INNER)
            made[f"{layer}layer_scalar"] = np.array([0.9], np.float32)
        if self.ordered:
            made["masked_embedding.centroids.weight"] = matrix(tiny.VOCAB, self.hidden)
            made["masked_embedding.token_ordering"] = rng.permutation(tiny.VOCAB)
        return made | self.change

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        save_file(self.tensors(), folder / "model.safetensors")
        return folder

    def expected(self, text: np.ndarray, features: np.ndarray, drafted: np.ndarray) -> np.ndarray:
        """Rows of a draft behind a text, whose states all tokens but the newest have, [num_drafted, VOCAB]."""
        w = {name: value.astype(np.float64) for name, value in self.tensors().items()}
        of_target = {name: value.astype(np.float64) for name, value in weights_of(self.family).items()}
        wide, size = self.target["hidden_size"], len(text) - 1
        parts, kinds = np.split(features[:size].astype(np.float64), 3, axis=-1), [*dict.fromkeys(KINDS)]
        held = {kind: self._keys(of_target, kind, part) for kind, part in zip(kinds, parts, strict=False)}
        state, rows = parts[-1][-1], []
        for token in (text[-1], *drafted[:-1]):
            embedded = of_target["model.embed_tokens.weight"][token] * np.sqrt(wide)
            x = w["pre_projection.weight"] @ np.concatenate([embedded, state])
            for i, kind in enumerate(KINDS):
                layer = {
                    name.removeprefix(f"model.layers.{i}."): each
                    for name, each in w.items()
                    if f"layers.{i}." in name
                }
                x = x + self._norm(
                    self._attend(layer, kind, x, held[kind], size), layer["post_attention_layernorm.weight"]
                )
                h = self._norm(x, layer["pre_feedforward_layernorm.weight"])
                gate, up = layer["mlp.gate_proj.weight"] @ h, layer["mlp.up_proj.weight"] @ h
                gelu = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
                fed = layer["mlp.down_proj.weight"] @ (gelu * up)
                x = (x + self._norm(fed, layer["post_feedforward_layernorm.weight"])) * layer["layer_scalar"]
            x = self._norm(x, w["model.norm.weight"])
            rows.append(self._logits(w, x))
            state = w["post_projection.weight"] @ x
        return np.stack(rows)

    def _norm(self, x: np.ndarray, gain: np.ndarray | float = 1.0) -> np.ndarray:
        found: np.ndarray = x / np.sqrt((x**2).mean(-1, keepdims=True) + self.target["rms_norm_eps"]) * gain
        return found

    def _rotate(self, kind: str, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Heads, [rows, heads, size], of which a layer that sees all turns a share alone."""
        rope, size = self.target["rope_parameters"][kind], x.shape[-1]
        pairs = np.arange(size // 2)
        turns = rope["rope_theta"] ** (-2 * pairs / size) * (
            pairs < rope.get("partial_rotary_factor", 1) * size // 2
        )
        angles = positions[:, None, None] * turns
        first, second = np.split(x, 2, axis=-1)
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    def _keys(self, w: Weights, kind: str, states: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        layer, size = f"model.layers.{self.source(kind)}.", self.head_dim(kind)
        x = self._norm(states, w[f"{layer}input_layernorm.weight"])
        keys = (x @ w[f"{layer}self_attn.k_proj.weight"].T).reshape(len(x), -1, size)
        matrix = w.get(f"{layer}self_attn.v_proj.weight")
        values = keys if matrix is None else (x @ matrix.T).reshape(keys.shape)
        keys = self._rotate(kind, self._norm(keys, w[f"{layer}self_attn.k_norm.weight"]), np.arange(len(x)))
        return keys, self._norm(values)

    def _attend(
        self, layer: Weights, kind: str, x: np.ndarray, held: tuple[np.ndarray, np.ndarray], position: int
    ) -> np.ndarray:
        query = layer["self_attn.q_proj.weight"] @ self._norm(x, layer["input_layernorm.weight"])
        query = self._norm(query.reshape(1, HEADS, -1), layer["self_attn.q_norm.weight"])
        query = self._rotate(kind, query, np.array([position]))[0]
        first = max(0, position - 1 - self.target["sliding_window"]) if kind == KINDS[0] else 0
        keys, values = (np.repeat(each[first:], HEADS // each.shape[1], axis=1) for each in held)
        scores = np.einsum("hd,khd->hk", query, keys)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        return layer["self_attn.o_proj.weight"] @ np.einsum("hk,khd->hd", shares, values).reshape(-1)

    def _logits(self, w: Weights, x: np.ndarray) -> np.ndarray:
        logits: np.ndarray = w["model.embed_tokens.weight"] @ x
        if self.ordered:
            clusters = np.argsort(-(w["masked_embedding.centroids.weight"] @ x))[CHOSEN:]
            logits[self.tensors()["masked_embedding.token_ordering"][clusters]] = -30000.0
        return logits
