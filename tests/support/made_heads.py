"""Small random drafting heads, as the files in which each dialect publishes them, and a numpy forward of each."""

import json
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import tiny
from safetensors.numpy import save_file

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM = tiny.HIDDEN, 80, 4, 2, 16
ROWS = 100  # of a trimmed vocabulary head
MASK = 9  # of P-EAGLE
EPS, THETA = 1e-6, 5000.0  # others than the target's
TARGET_LAYERS = 6  # so that layers 1, 2 and 2 are behind those that a head reads by default


@dataclass(frozen=True, kw_only=True)
class MadeHead:
    """A head as its file holds it.

    tensors: By the names of the dialect. config: config.json.
    wide: As in EAGLE-3 queries, keys and values read embedding and state side by side.
    window: How many tokens its layers see, the newest included.
    num_proposed: How many tokens it drafts in a pass.
    """

    tensors: dict[str, np.ndarray]
    config: dict[str, Any]
    wide: bool
    layers: tuple[int, ...]
    switches: frozenset[str] = field(default_factory=frozenset)
    window: int = sys.maxsize
    num_proposed: int = 1

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        save_file(self.tensors, folder / "model.safetensors")
        return folder


def target_weights(seed: int = 0, *, tied: bool = False, bias: bool = False) -> dict[str, np.ndarray]:
    """Weights of a target of six layers, under their Hugging Face names."""
    first = tiny.random_weights(seed, tied=tied, bias=bias)
    whole = dict(first)
    for number in range(1, TARGET_LAYERS // tiny.LAYERS):
        for name, value in tiny.random_weights(seed + number, bias=bias).items():
            if name.startswith("model.layers."):
                _, _, layer, rest = name.split(".", 3)
                whole[f"model.layers.{int(layer) + tiny.LAYERS * number}.{rest}"] = value
    return whole


def target_config(model_type: str = "llama", *, tied: bool = False) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "hidden_size": tiny.HIDDEN,
        "intermediate_size": tiny.INNER,
        "num_hidden_layers": TARGET_LAYERS,
        "num_attention_heads": tiny.HEADS,
        "num_key_value_heads": tiny.KV_HEADS,
        "max_position_embeddings": tiny.CONTEXT,
        "rms_norm_eps": tiny.EPS,
        "rope_theta": tiny.THETA,
        "eos_token_id": 2,
        "tie_word_embeddings": tied,
    }


def write_target(folder: Path, *, tied: bool = False) -> Path:
    tiny.write_huggingface(folder, target_weights(tied=tied), config=target_config(tied=tied))
    return folder


def _matrix(rng: np.random.Generator, rows: int, columns: int, scale: float = 1.0) -> np.ndarray:
    return rng.normal(0, scale / np.sqrt(columns), (rows, columns)).astype(np.float32)


def _norm(rng: np.random.Generator, size: int) -> np.ndarray:
    return (1 + 0.2 * rng.normal(0, 1, size)).astype(np.float32)


def _layer(
    rng: np.random.Generator, prefix: str, inputs: int, *, bias: bool = False, head_norms: bool = False
) -> dict[str, np.ndarray]:
    sizes = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM}
    made = {f"{prefix}self_attn.{part}_proj.weight": _matrix(rng, rows, inputs) for part, rows in sizes.items()}
    if bias:
        made |= {f"{prefix}self_attn.{part}_proj.bias": _matrix(rng, 1, rows)[0] for part, rows in sizes.items()}
    if head_norms:
        made |= {f"{prefix}self_attn.{part}_norm.weight": _norm(rng, HEAD_DIM) for part in "qk"}
    made[f"{prefix}self_attn.o_proj.weight"] = _matrix(rng, HIDDEN, HEADS * HEAD_DIM, 2)
    made[f"{prefix}post_attention_layernorm.weight"] = _norm(rng, HIDDEN)
    made[f"{prefix}mlp.gate_proj.weight"] = _matrix(rng, INNER, HIDDEN)
    made[f"{prefix}mlp.up_proj.weight"] = _matrix(rng, INNER, HIDDEN)
    made[f"{prefix}mlp.down_proj.weight"] = _matrix(rng, HIDDEN, INNER, 3)
    return made


def _config(**changed: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 512,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "vocab_size": tiny.VOCAB,
        "hidden_act": "silu",
    } | changed


def trimmed_tokens(rng: np.random.Generator, rows: int = ROWS) -> np.ndarray:
    return np.sort(rng.choice(tiny.VOCAB, rows, replace=False))


def eagle3(
    dialect: str = "speculators",
    *switches: str,
    seed: int = 5,
    num_layers: int = 1,
    embedding: bool = True,
    rows: int = ROWS,
    head_norms: bool = False,
    layers: tuple[int, ...] | None = None,
    tied: bool = False,
    window: int | None = None,
    num_proposed: int = 0,
) -> MadeHead:
    """An EAGLE-3 head.

    dialect: speculators, specforge or original.
    layers: Those of the target behind which it reads, stated in the file; by default the usual ones, unstated.
    rows: Of its vocabulary head; all of the vocabulary have neither d2t nor t2d.
    window: How many tokens its layers see, the newest included; of speculators.
    num_proposed: How many tokens a P-EAGLE head drafts in a pass; 0 for another head.
    """
    rng = np.random.default_rng(seed)
    first = "midlayer." if dialect != "speculators" else "layers.0."
    read = layers or (1, TARGET_LAYERS // 2 - 1, TARGET_LAYERS - 4)
    made = {
        "fc.weight": _matrix(rng, HIDDEN, len(read) * HIDDEN),
        f"{first}input_layernorm.weight": _norm(rng, HIDDEN),
        f"{first}hidden_norm.weight": _norm(rng, HIDDEN),
        **_layer(rng, first, 2 * HIDDEN, head_norms=head_norms),
        "norm.weight": _norm(rng, HIDDEN),
        "lm_head.weight": _matrix(rng, rows, HIDDEN),
    }
    for number in range(1, num_layers):
        made |= _layer(rng, f"layers.{number}.", HIDDEN, head_norms=head_norms)
        made[f"layers.{number}.input_layernorm.weight"] = _norm(rng, HIDDEN)
    if embedding:
        made["embed_tokens.weight"] = _matrix(rng, tiny.VOCAB, HIDDEN, 2.4)
    if rows < tiny.VOCAB:
        tokens = trimmed_tokens(rng, rows)
        made["d2t"] = (tokens - np.arange(rows)).astype(np.int64)
        made["t2d"] = np.isin(np.arange(tiny.VOCAB), tokens)
    if "norm_before_fc" in switches:
        made["input_norm.weight"] = _norm(rng, len(read) * HIDDEN)
    if "fc_norm" in switches:
        made |= {f"fc_norm.{at}.weight": _norm(rng, HIDDEN) for at in range(len(read))}
    named: dict[str, Any] = dict.fromkeys(switches, True)
    if num_proposed:
        made["mask_hidden"] = rng.normal(0, 1.5, (1, 1, len(read) * HIDDEN)).astype(np.float32)
        named |= {"mask_token_id": MASK} if dialect == "speculators" else {"ptd_token_id": MASK}
    if dialect == "speculators":
        inner = _config(num_hidden_layers=num_layers, **({"head_dim": HEAD_DIM} if head_norms else {}))
        if window:
            inner |= {"layer_types": ["sliding_attention"] * num_layers, "sliding_window": window}
        config: dict[str, Any] = {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "peagle" if num_proposed else "eagle3",
            "speculators_config": {
                "algorithm": "peagle" if num_proposed else "eagle3",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": num_proposed or 3}],
                "verifier": {"name_or_path": "org/target"},
            },
            "transformer_layer_config": inner | ({"model_type": "qwen3"} if head_norms else {}),
            "draft_vocab_size": rows,
            **named,
        }
        if layers:  # counted from the embedding
            config["eagle_aux_hidden_state_layer_ids"] = [layer + 1 for layer in layers]
    else:
        architecture = "LlamaForCausalLMEagle3" if dialect == "specforge" else "LlamaForCausalLM"
        config = _config(architectures=[architecture], draft_vocab_size=rows, **named)
        if layers:
            config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": list(layers)}
    return MadeHead(
        tensors=made,
        config=config,
        wide=True,
        layers=read,
        switches=frozenset(switches),
        window=window or sys.maxsize,
        num_proposed=num_proposed or 1,
    )


def eagle(
    *switches: str,
    seed: int = 6,
    num_layers: int = 1,
    bias: bool = True,
    embedding: bool = True,
    head: bool = False,
) -> MadeHead:
    """An EAGLE-1 or 2 head, whose vocabulary head is mostly its target's."""
    rng = np.random.default_rng(seed)
    made = {"fc.weight": _matrix(rng, HIDDEN, 2 * HIDDEN, 0.5)}  # states that go round grow without a norm
    if bias:
        made["fc.bias"] = _matrix(rng, 1, HIDDEN)[0]
    for number in range(num_layers):
        made |= _layer(rng, f"layers.{number}.", HIDDEN)
        if number:
            made[f"layers.{number}.input_layernorm.weight"] = _norm(rng, HIDDEN)
    if embedding:
        made["embed_tokens.weight"] = _matrix(rng, tiny.VOCAB, HIDDEN, 2.4)
    if head:
        made["lm_head.weight"] = _matrix(rng, tiny.VOCAB, HIDDEN, 2)
    if "add_para_norm" in switches:
        made["embedding_layernorm.weight"] = _norm(rng, HIDDEN)
        made["hidden_states_layernorm.weight"] = _norm(rng, HIDDEN)
    config = _config(
        architectures=["LlamaForCausalLM"], num_hidden_layers=num_layers, **dict.fromkeys(switches, True)
    )
    return MadeHead(tensors=made, config=config, wide=False, layers=(TARGET_LAYERS,), switches=frozenset(switches))


def mtp(seed: int = 7) -> MadeHead:
    """The layer for multi-token prediction that a MiMo checkpoint has beside its own."""
    rng = np.random.default_rng(seed)
    prefix = "model.mtp_layers.0."
    made = _layer(rng, prefix, HIDDEN, bias=True)
    made[f"{prefix}input_proj.weight"] = _matrix(rng, HIDDEN, 2 * HIDDEN)
    for name in ("token_layernorm", "hidden_layernorm", "input_layernorm", "final_layernorm"):
        made[f"{prefix}{name}.weight"] = _norm(rng, HIDDEN)
    return MadeHead(tensors=made, config={}, wide=False, layers=(TARGET_LAYERS - 1,), switches=frozenset({"mtp"}))


def mtp_of_qwen(seed: int = 7) -> MadeHead:
    """The layer for multi-token prediction that a Qwen3.5 checkpoint has, whose gains are stored less one."""
    rng = np.random.default_rng(seed)
    layer = "mtp.layers.0."
    made = _layer(rng, layer, HIDDEN, head_norms=True)
    made[f"{layer}self_attn.q_proj.weight"] = _matrix(rng, 2 * HEADS * HEAD_DIM, HIDDEN)  # with gates
    made["mtp.fc.weight"] = _matrix(rng, HIDDEN, 2 * HIDDEN)
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "layers.0.input_layernorm"):
        made[f"mtp.{name}.weight"] = _norm(rng, HIDDEN)
    made = {name: value - 1 if "norm" in name else value for name, value in made.items()}
    switches = frozenset({"mtp", "token_first", "gains_less_one", "gates"})
    return MadeHead(tensors=made, config={}, wide=False, layers=(TARGET_LAYERS,), switches=switches)


# Names of MiMo's parts by those that Qwen3.5 has.
_OF_QWEN = {"mtp.fc": "layers.0.input_proj", "mtp.norm": "layers.0.final_layernorm", "mtp.layers.0": "layers.0"}
_OF_QWEN |= {"mtp.pre_fc_norm_embedding": "layers.0.token_layernorm"}
_OF_QWEN |= {"mtp.pre_fc_norm_hidden": "layers.0.hidden_layernorm"}


class Reference:
    """A head written out in numpy float64, without a cache.

    embedding, head: Those of the target, for a file that lacks them.
    """

    def __init__(
        self, made: MadeHead, embedding: np.ndarray, head: np.ndarray, *, eps: float = EPS, theta: float = THETA
    ) -> None:
        self._made, self._eps, self._theta = made, eps, theta
        names = {name.removeprefix("model."): value for name, value in made.tensors.items()}
        names = {name.replace("midlayer.", "layers.0.").replace("mtp_layers.0.", "layers.0."): value
                 for name, value in names.items()}  # fmt: skip
        for own, usual in _OF_QWEN.items():
            names = {name.replace(own, usual): value for name, value in names.items()}
        less = 1 if "gains_less_one" in made.switches else 0
        names = {name: value + less if "norm" in name else value for name, value in names.items()}
        self._w = {name: value.astype(np.float64) for name, value in names.items()}
        self._embedding = self._w.get("embed_tokens.weight", embedding.astype(np.float64))
        self._head = self._w.get("lm_head.weight", head.astype(np.float64))
        self.num_layers = sum(name.endswith("mlp.down_proj.weight") for name in self._w)

    @property
    def tokens(self) -> np.ndarray:
        """The token of each row of its logits."""
        if "d2t" in self._made.tensors:
            return self._made.tensors["d2t"] + np.arange(len(self._made.tensors["d2t"]))
        return np.arange(len(self._head))

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        if name not in self._w:
            return x
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + self._eps) * self._w[name]

    def fuse(self, features: np.ndarray) -> np.ndarray:
        """States of rows of features, [num_rows, layers · hidden_size]."""
        x = features.astype(np.float64)
        if self._made.wide:
            x = self._norm(x, "input_norm.weight")
            if "fc_norm" in self._made.switches:
                parts = np.split(x, len(self._made.layers), axis=-1)
                normed = [self._norm(part, f"fc_norm.{at}.weight") for at, part in enumerate(parts)]
                x = np.concatenate(normed, axis=-1)
        if self._made.wide or "fused" in self._made.switches:
            x = x @ self._w["fc.weight"].T
        return x

    def rows(self, tokens: np.ndarray, states: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Logits and the states that go with tokens, each behind a state; positions count from 0."""
        token, state = self._embedding[tokens], states.astype(np.float64)
        switches, w = self._made.switches, self._w
        if self._made.wide:
            normed = self._norm(state, "layers.0.hidden_norm.weight")
            x = np.concatenate([self._norm(token, "layers.0.input_layernorm.weight"), normed], axis=-1)
            residual = normed if "norm_before_residual" in switches else state
        elif "mtp" in switches:
            token = self._norm(token, "layers.0.token_layernorm.weight")
            state = self._norm(state, "layers.0.hidden_layernorm.weight")
            sides = [token, state] if "token_first" in switches else [state, token]
            residual = np.concatenate(sides, axis=-1) @ w["layers.0.input_proj.weight"].T
            x = self._norm(residual, "layers.0.input_layernorm.weight")
        else:
            if "add_para_norm" in switches:
                token = self._norm(token, "embedding_layernorm.weight")
                state = self._norm(state, "hidden_states_layernorm.weight")
            x = np.concatenate([token, state], axis=-1) @ w["fc.weight"].T + w.get("fc.bias", 0.0)
            residual = x
        for number in range(self.num_layers):
            prefix = f"layers.{number}."
            if number:
                x = self._norm(residual, prefix + "input_layernorm.weight")
            residual = residual + self._attend(x, prefix)
            h = self._norm(residual, prefix + "post_attention_layernorm.weight")
            gate, up = h @ w[prefix + "mlp.gate_proj.weight"].T, h @ w[prefix + "mlp.up_proj.weight"].T
            residual = residual + (gate / (1 + np.exp(-gate)) * up) @ w[prefix + "mlp.down_proj.weight"].T
        final = "layers.0.final_layernorm.weight" if "mtp" in switches else "norm.weight"
        normed = self._norm(residual, final)
        is_normed = switches & {"norm_output", "mtp"}
        logits = normed @ self._head.T
        if (markov := "markov_head.markov_w{}.weight".format)(1) in w:
            logits += w[markov(1)][tokens] @ w[markov(2)].T
        return logits, normed if is_normed else residual

    def drafted(self, text: np.ndarray, features: np.ndarray, num_tokens: int) -> np.ndarray:
        """Rows of a P-EAGLE head after a text all of whose features but the newest token's are known."""
        masks = np.full(num_tokens - 1, MASK)
        states = [self.fuse(features), np.repeat(self.fuse(self._w["mask_hidden"][0]), len(masks), 0)]
        return self.rows(np.append(text[1:], masks), np.concatenate(states))[0][-num_tokens:]

    def _attend(self, x: np.ndarray, prefix: str) -> np.ndarray:
        w, length = self._w, len(x)
        parts = []
        for part in "qkv":
            own = x @ w[f"{prefix}self_attn.{part}_proj.weight"].T + w.get(
                f"{prefix}self_attn.{part}_proj.bias", 0.0
            )
            own = own.reshape(length, -1, HEAD_DIM)
            if part == "q" and "gates" in self._made.switches:  # a head's queries, then its gates
                own, gates = own[:, ::2], own[:, 1::2].reshape(length, -1)
            parts.append(self._norm(own, f"{prefix}self_attn.{part}_norm.weight"))
        angles = np.arange(length)[:, None] * self._theta ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]

        def rotate(y: np.ndarray) -> np.ndarray:
            first, second = np.split(y, 2, axis=-1)
            return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

        groups = HEADS // KV_HEADS
        q, k, v = rotate(parts[0]), np.repeat(rotate(parts[1]), groups, 1), np.repeat(parts[2], groups, 1)
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(HEAD_DIM)
        behind = np.subtract.outer(np.arange(length), np.arange(length))
        scores[:, (behind < 0) | (behind >= self._made.window)] = -np.inf
        share = np.exp(scores - scores.max(-1, keepdims=True))
        share /= share.sum(-1, keepdims=True)
        attended = np.einsum("hqk,khd->qhd", share, v).reshape(length, -1)
        if "gates" in self._made.switches:
            attended = attended / (1 + np.exp(-gates))
        return attended @ w[f"{prefix}self_attn.o_proj.weight"].T


class Graphs:
    """The graphs of an exported head, run with a cache that grows."""

    def __init__(self, folder: Path, *, has_trees: bool = False) -> None:
        import onnxruntime

        from edgespec.manifest import read_manifest

        self.manifest = read_manifest(folder)
        assert self.manifest.head is not None
        graph = self.manifest.tree_graph if has_trees else self.manifest.graph
        self._main, self._has_trees = onnxruntime.InferenceSession(folder / graph), has_trees
        fuse = self.manifest.head.fuse_graph
        self._fuse = onnxruntime.InferenceSession(folder / fuse) if fuse else None
        self.forget(0)

    def fuse(self, features: np.ndarray) -> np.ndarray:
        rows = features[None].astype(np.float32)
        return self._fuse.run(["hidden"], {"features": rows})[0][0] if self._fuse else rows[0]

    def forget(self, length: int) -> None:
        """Hold the first slots alone."""
        kv = self.manifest.kv_cache
        empty = np.zeros((1, kv.num_kv_heads, 0, kv.head_dim), kv.dtype)
        held = getattr(self, "_cache", [empty] * 2 * kv.num_layers)
        self._cache = [one[:, :, :length] for one in held]

    @property
    def length(self) -> int:
        return self._cache[0].shape[2]

    def rows(self, tokens: np.ndarray, states: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Logits and states of tokens behind what is held, which are held then."""
        pairs = self.manifest.signature.caches(self.manifest.kv_cache.attention_layers)
        inputs = {
            "input_ids": np.asarray(tokens, np.int64)[None],
            "hidden": states[None].astype(np.float32),
            "attention_mask": np.ones((1, self.length + len(tokens)), np.int64),
            "num_logits_to_keep": np.array([len(tokens)], np.int64),
            **{past: cache for (past, _), cache in zip(pairs, self._cache, strict=True)},
        }
        if self._has_trees:  # as a chain
            length, total = len(tokens), self.length + len(tokens)
            behind = np.subtract.outer(np.arange(self.length, total), np.arange(total))
            inputs["position_ids"] = np.arange(self.length, total)[None]
            for name, window in (
                ("attention_bias", total),
                ("local_attention_bias", self.manifest.sliding_window),
            ):
                if name in (each.name for each in self._main.get_inputs()):
                    seen = (behind >= 0) & (behind < window)
                    inputs[name] = np.where(seen, 0, -1e4).astype(np.float32).reshape(1, 1, length, total)
        outputs = ["logits", "state", *(present for _, present in pairs)]
        logits, state, *self._cache = self._main.run(outputs, inputs)
        return logits[0], state[0]


def quiet(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A target whose layers add little, so that its next token follows from the last one."""
    shares = {"o_proj.weight": 0.005, "down_proj.weight": 0.005}
    made = {
        name: value * np.float32(shares.get(".".join(name.split(".")[-2:]), 1)) for name, value in weights.items()
    }
    made["model.norm.weight"] = np.ones_like(made["model.norm.weight"])
    return made


def agreeing_eagle3(
    weights: dict[str, np.ndarray], heads: int = HEADS, *, rows: int = ROWS, seed: int = 8
) -> MadeHead:
    """An EAGLE-3 head that names the tokens of a quiet target, by handing the embedding of the last token on.

    Its queries and keys find the row itself, and its values are the embedding.
    """
    rng = np.random.default_rng(seed)
    embedding = weights["model.embed_tokens.weight"]
    vocabulary_head = weights.get("lm_head.weight", embedding)
    vocab_size, hidden = embedding.shape
    nothing, identity = np.zeros((hidden, hidden), np.float32), np.eye(hidden, dtype=np.float32)
    found = np.concatenate([4 * _matrix(rng, hidden, hidden), nothing], axis=1)
    tokens = np.unique(np.concatenate([(vocabulary_head @ embedding[:rows].T).argmax(0), np.arange(rows)]))
    layer = _layer(rng, "midlayer.", 2 * hidden)
    inner = len(layer["midlayer.mlp.gate_proj.weight"])
    ones = np.ones(hidden, np.float32)
    made = {
        "fc.weight": np.zeros((hidden, 3 * hidden), np.float32),
        "midlayer.input_layernorm.weight": ones,
        "midlayer.hidden_norm.weight": ones,
        "midlayer.post_attention_layernorm.weight": ones,
        "midlayer.self_attn.q_proj.weight": found,
        "midlayer.self_attn.k_proj.weight": found.copy(),
        "midlayer.self_attn.v_proj.weight": np.concatenate([identity, nothing], axis=1),
        "midlayer.self_attn.o_proj.weight": identity,
        "midlayer.mlp.gate_proj.weight": np.zeros((inner, hidden), np.float32),
        "midlayer.mlp.up_proj.weight": np.zeros((inner, hidden), np.float32),
        "midlayer.mlp.down_proj.weight": np.zeros((hidden, inner), np.float32),
        "norm.weight": ones,
        "lm_head.weight": vocabulary_head[tokens],
        "d2t": (tokens - np.arange(len(tokens))).astype(np.int64),
        "t2d": np.isin(np.arange(vocab_size), tokens),
    }
    config = _config(
        architectures=["LlamaForCausalLMEagle3"],
        draft_vocab_size=len(tokens),
        hidden_size=hidden,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        vocab_size=vocab_size,
    )
    return MadeHead(tensors=made, config=config, wide=True, layers=(1, 2, 2))


def require_rows_of_reference(graphs: Graphs, reference: Reference, seed: int = 3) -> None:
    """Prefill, drafting of 5, rejection of 3 of them and going on, each against a forward without a cache."""
    rng = np.random.default_rng(seed)
    width = graphs.manifest.head.target_hidden_size * len(graphs.manifest.head.target_layers)
    text = rng.integers(0, tiny.VOCAB, 30)
    features = rng.normal(0, 1.5, (30, width)).astype(np.float32)

    def draft(num_exact: int, first: np.ndarray, num_tokens: int, last: int) -> None:
        """Draft behind text[: num_exact + 1]; first are rows whose states are known, last is their number."""
        tokens, states = list(text[1 : num_exact + 1]), list(reference.fuse(features[:num_exact]))
        logits, state = graphs.rows(text[num_exact + 1 - last : num_exact + 1], first)
        for number in range(num_tokens):
            wanted, wanted_states = reference.rows(np.array(tokens), np.array(states))
            assert np.abs(logits[-1] - wanted[-1]).max() < 1e-4
            assert np.abs(state[-1] - wanted_states[-1]).max() < 1e-4
            if number == 0:
                assert np.abs(logits - wanted[-len(logits) :]).max() < 1e-4
            chosen = reference.tokens[logits[-1].argmax()]
            tokens.append(chosen)
            states.append(wanted_states[-1])
            logits, state = graphs.rows(np.array([chosen]), state[-1:])

    assert np.abs(graphs.fuse(features) - reference.fuse(features)).max() < 1e-4
    draft(9, graphs.fuse(features[:9]), 5, 9)
    assert graphs.length == 14
    graphs.forget(9)  # two of the five were accepted, whose states the target has given meanwhile
    draft(12, graphs.fuse(features[9:12]), 5, 3)
    graphs.forget(12)  # none was accepted
    draft(13, graphs.fuse(features[12:13]), 5, 1)


def agreeing_mtp() -> MadeHead:
    """Layers for multi-token prediction that name the tokens of a quiet target: they give the embedding back."""
    made = mtp()
    prefix, identity = "model.mtp_layers.0.", np.eye(HIDDEN, dtype=np.float32)
    changed = {
        f"{prefix}input_proj.weight": np.concatenate([0 * identity, identity], axis=1),
        f"{prefix}self_attn.o_proj.weight": 0 * made.tensors[f"{prefix}self_attn.o_proj.weight"],
        f"{prefix}mlp.down_proj.weight": 0 * made.tensors[f"{prefix}mlp.down_proj.weight"],
        f"{prefix}token_layernorm.weight": np.ones(HIDDEN, np.float32),
        f"{prefix}final_layernorm.weight": np.ones(HIDDEN, np.float32),
    }
    return replace(made, tensors=made.tensors | changed)
