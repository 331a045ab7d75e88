"""Tiny models with random weights, in the formats that users bring, and a numpy reference for them."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import save_file

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 64, 96, 2, 4, 2, 16
EPS, THETA, CONTEXT = 1e-5, 10000.0, 700
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_pieces() -> list[str]:
    """The 256 printable stand-ins for bytes of byte-level BPE (GPT-2)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    table = {byte: chr(byte) for byte in plain} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [table[byte] for byte in range(256)]


MERGES = ["Ġ t", "h e", "Ġt he", "i n", "e r", "a n", "Ġ a", "o n", "r e", "Ã ©"]
PIECES = SPECIAL + byte_pieces() + [merge.replace(" ", "") for merge in MERGES]
TYPES = [3] * len(SPECIAL) + [1] * (len(PIECES) - len(SPECIAL))
VOCAB = len(PIECES)
# Other vocabularies of the same size: two ids exchanged, and hardly a piece in common.
SWAPPED = [*PIECES[:40], PIECES[41], PIECES[40], *PIECES[42:]]
FOREIGN = {
    "tokenizer.ggml.tokens": [*SPECIAL, "x", *("x" + piece for piece in PIECES[4:])],
    "tokenizer.ggml.merges": ["x x"],
}

GGUF_TOKENIZER: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": PIECES,
    "tokenizer.ggml.token_type": TYPES,
    "tokenizer.ggml.merges": MERGES,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.add_bos_token": False,
    "tokenizer.chat_template": TEMPLATE,
}


def random_weights(
    seed: int = 0, *, bias: bool = False, tied: bool = True, inner: int = INNER
) -> dict[str, np.ndarray]:
    """Weights under their Hugging Face names."""
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int, scale: float = 1.0) -> np.ndarray:
        return (rng.normal(0, scale / np.sqrt(columns), (rows, columns))).astype(np.float32)

    weights = {
        "model.embed_tokens.weight": matrix(VOCAB, HIDDEN, 2.4),
        "model.norm.weight": 1 + matrix(1, HIDDEN)[0],
    }
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        weights[layer + "input_layernorm.weight"] = 1 + matrix(1, HIDDEN)[0]
        weights[layer + "post_attention_layernorm.weight"] = 1 + matrix(1, HIDDEN)[0]
        for part, rows in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            weights[layer + f"self_attn.{part}_proj.weight"] = matrix(rows * HEAD_DIM, HIDDEN)
            if bias:
                weights[layer + f"self_attn.{part}_proj.bias"] = matrix(1, rows * HEAD_DIM)[0]
        weights[layer + "self_attn.o_proj.weight"] = matrix(HIDDEN, HEADS * HEAD_DIM, 2)
        weights[layer + "mlp.gate_proj.weight"] = matrix(inner, HIDDEN)
        weights[layer + "mlp.up_proj.weight"] = matrix(inner, HIDDEN)
        weights[layer + "mlp.down_proj.weight"] = matrix(HIDDEN, inner, 3)
    if not tied:
        weights["lm_head.weight"] = matrix(VOCAB, HIDDEN, 2)
    return weights


def reference_logits(weights: dict[str, np.ndarray], tokens: np.ndarray) -> np.ndarray:
    """The transformer written out in numpy float64, [num_tokens, vocab_size]."""
    final = reference_states(weights, tokens)[-1]
    return final @ weights.get("lm_head.weight", weights["model.embed_tokens.weight"]).astype(np.float64).T


def reference_states(weights: dict[str, np.ndarray], tokens: np.ndarray) -> list[np.ndarray]:
    """Hidden states behind each layer, before any norm, and behind the final norm, [num_tokens, HIDDEN] each."""
    w = {name: value.astype(np.float64) for name, value in weights.items()}

    def norm(x: np.ndarray, gain: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * gain

    def rotate(x: np.ndarray) -> np.ndarray:  # [tokens, heads, HEAD_DIM]
        angles = np.arange(len(x))[:, None] * THETA ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        first, second = np.split(x, 2, axis=-1)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    x, states = w["model.embed_tokens.weight"][tokens], []
    masked = np.triu(np.full((len(tokens), len(tokens)), -np.inf), 1)
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        h = norm(x, w[layer + "input_layernorm.weight"])
        q, k, v = (
            (
                h @ w[layer + f"self_attn.{part}_proj.weight"].T
                + w.get(layer + f"self_attn.{part}_proj.bias", np.zeros(1))
            ).reshape(len(tokens), -1, HEAD_DIM)
            for part in "qkv"
        )
        q, k = rotate(q), np.repeat(rotate(k), HEADS // KV_HEADS, axis=1)
        v = np.repeat(v, HEADS // KV_HEADS, axis=1)
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(HEAD_DIM) + masked
        share = np.exp(scores - scores.max(-1, keepdims=True))
        share /= share.sum(-1, keepdims=True)
        attended = np.einsum("hqk,khd->qhd", share, v).reshape(len(tokens), -1)
        x = x + attended @ w[layer + "self_attn.o_proj.weight"].T
        h = norm(x, w[layer + "post_attention_layernorm.weight"])
        gate, up = h @ w[layer + "mlp.gate_proj.weight"].T, h @ w[layer + "mlp.up_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[layer + "mlp.down_proj.weight"].T
        states.append(x)
    return [*states, norm(x, w["model.norm.weight"])]


_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.query_layernorm": "attn_q_norm",
    "self_attn.key_layernorm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def _converted_delta(name: str, value: np.ndarray, metadata: dict[str, Any], architecture: str) -> np.ndarray:
    """A tensor of qwen3_5 or qwen3_next as the converter writes it: gains whole.

    In qwen3_5 value heads with the same key are far apart.
    """
    keys, heads, size, inner = (
        metadata[f"{architecture}.ssm.{key}"]
        for key in ("group_count", "time_step_rank", "state_size", "inner_size")
    )
    order = np.arange(heads)
    order = order if architecture == "qwen3next" else order.reshape(keys, -1).T.reshape(-1)
    order = {True: order, False: (order[:, None] * (inner // heads) + np.arange(inner // heads)).reshape(-1)}
    if "linear_attn" not in name:
        return 1 + value if name.endswith("norm.weight") else value
    part = name.removesuffix(".weight").rpartition(".")[2]
    if part in ("in_proj_qkv", "conv1d"):
        value = value.reshape(len(value), -1)
        return np.concatenate([value[: 2 * keys * size], value[2 * keys * size :][order[False]]])
    if part == "out_proj":
        return value[:, order[False]]
    if part == "A_log":
        return -np.exp(value)[order[True]]
    return (
        value
        if part in ("norm", "in_proj_qkvz", "in_proj_ba")
        else value[order[part in ("in_proj_a", "in_proj_b", "dt_bias")]]
    )


def _converted_mamba(name: str, value: np.ndarray, num_groups: int) -> np.ndarray:
    """A tensor of a Mamba-2 layer as the converter writes it."""
    if name.endswith((".A_log", ".D")):
        return (-np.exp(value) if name.endswith("A_log") else value)[:, None]
    if name.endswith("conv1d.weight"):
        return value.reshape(len(value), -1)
    return value.reshape(num_groups, -1) if name.endswith("norm.weight") else value


_CONVERTED = ("lfm2", "lfm2moe", "qwen35", "qwen35moe", "qwen3next", "gemma4", "granitehybrid", "falcon-h1")
_GLM_NAMES = {
    "post_self_attn_layernorm": "post_attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "post_mlp_layernorm": "post_ffw_norm",
}


def _gguf_name(name: str, architecture: str) -> str:
    if name.startswith("blk."):
        return name
    if architecture in _CONVERTED:  # by the names of llama.cpp's converter
        name = name.replace("dt_bias", "dt_proj.bias").replace("layer_scalar", "layer_scalar.weight")
        converted = _converted_names(architecture).get_name(name, try_suffixes=(".weight", ".bias"))
        assert converted is not None, name
        return converted
    name = name.replace("model.layers.", "blk.")
    for theirs, ours in _GLM_NAMES.items() if architecture == "glm4" else ():
        name = name.replace(theirs, ours)
    has_norm_after = architecture in (*("olmo2", "gemma2", "gemma3", "exaone4", "seed_oss", "gpt-oss", "glm4moe"),)
    name = name.replace("post_attention_layernorm", "post_attention_norm" if has_norm_after else "ffn_norm")
    for theirs, ours in _GGUF_NAMES.items():
        name = name.replace(theirs, ours)
    return name


@cache
def _converted_names(architecture: str) -> gguf.TensorNameMap:
    """Which takes 60 ms to make."""
    number = next(at for at, each in gguf.MODEL_ARCH_NAMES.items() if each == architecture)
    return gguf.get_tensor_name_map(number, 64)


def write_gguf(
    path: Path,
    weights: dict[str, np.ndarray],
    *,
    architecture: str = "llama",
    storage: str = "F32",
    override: dict[str, Any] | None = None,
    skip: tuple[str, ...] = (),
    tensors_per_part: int = 0,
) -> dict[str, np.ndarray]:
    """Write a GGUF file, matrices in the given storage; returns the weights as they can be read back.

    With tensors_per_part it is split, and NAME.gguf gives NAME-00001-of-0000N.gguf.
    """
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=tensors_per_part)
    numbers = {
        "block_count": LAYERS,
        "context_length": CONTEXT,
        "embedding_length": HIDDEN,
        "feed_forward_length": INNER,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
    }
    metadata: dict[str, Any] = {
        **{f"{architecture}.{key}": value for key, value in numbers.items()},
        f"{architecture}.rope.freq_base": THETA,
        f"{architecture}.attention.layer_norm_rms_epsilon": EPS,
        **GGUF_TOKENIZER,
    } | (override or {})
    for key, value in metadata.items():
        if key in skip:
            continue
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    read_back = {}
    for name, value in weights.items():
        if name in skip:
            continue
        kind = gguf.GGMLQuantizationType[storage if value.ndim > 1 else "F32"]
        if value.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
            kind = gguf.GGMLQuantizationType.Q8_0  # as llama.cpp does
        permute = architecture in ("llama", "granite", "granitemoe", "granitehybrid", "smollm3", "mistral3")
        stored = _permuted(name, value) if permute else value
        if architecture.startswith(("qwen35", "qwen3next")):
            stored = _converted_delta(name, value, metadata, architecture)
        if name.endswith("conv.conv.weight"):
            stored = value.reshape(len(value), -1)
        if ".mamba." in name:
            stored = _converted_mamba(name, value, metadata[f"{architecture}.ssm.group_count"])
        if architecture in ("gemma2", "gemma3") and name.endswith("norm.weight"):
            stored = 1 + stored
        if stored.shape[-1] % 32:  # convolutions and numbers of heads
            kind = gguf.GGMLQuantizationType.F32
        data = gguf.quants.quantize(stored, kind)
        back = gguf.quants.dequantize(data, kind).astype(np.float32).reshape(stored.shape)
        read_back[name] = _permuted(name, back, inverse=True) if permute else back
        writer.add_tensor(_gguf_name(name, architecture), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read_back


def _permuted(name: str, value: np.ndarray, *, inverse: bool = False) -> np.ndarray:
    """The order of query and key rows that llama GGUF files have, or back."""
    if "q_proj" not in name and "k_proj" not in name:
        return value
    shape = (-1, HEAD_DIM // 2, 2) if inverse else (-1, 2, HEAD_DIM // 2)
    return value.reshape(*shape, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)


def write_huggingface(
    folder: Path,
    weights: dict[str, np.ndarray],
    *,
    model_type: str = "llama",
    shards: int = 1,
    dtype: str = "F32",
    config: dict[str, Any] | None = None,
    tokenizer: str | None = None,
) -> None:
    """Write a local Hugging Face folder, with the tokenizer of SmolLM2's kind if no tokenizer.json is given."""
    from edgespec.export.vocabulary import vocabulary_from_gguf

    folder.mkdir(parents=True)
    config = config or {
        "model_type": model_type,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "eos_token_id": 2,
        "tie_word_embeddings": "lm_head.weight" not in weights,
    }
    (folder / "config.json").write_text(json.dumps(config))
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": PIECES,
        "tokenizer.ggml.token_type": TYPES,
        "tokenizer.ggml.merges": MERGES,
    }
    made = tokenizer or vocabulary_from_gguf("tiny", metadata).tokenizer_json
    (folder / "tokenizer.json").write_text(made, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    stored = {name: value.astype(np.float16) if dtype == "F16" else value for name, value in weights.items()}
    names = sorted(stored)
    if shards == 1:
        save_file(stored, folder / "model.safetensors")
        return
    placed = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = names[shard::shards]
        save_file({name: stored[name] for name in part}, folder / file)
        placed |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
