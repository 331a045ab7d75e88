"""A checkpoint of random half floats of a published shape, by the names of tensors that its family's own have."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
import tiny

LOGITS_SPREAD = 1.5  # standard deviation
_COMMON: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


def write_source(folder: Path, config: dict[str, Any], num_layers: int) -> None:
    """Write a Hugging Face folder of num_layers layers, with the tokenizer of the tests' models."""
    settings = {**_COMMON, **config, "num_hidden_layers": num_layers}
    tiny.write_huggingface(folder, {"lm_head.weight": np.zeros((1, 1), np.float32)}, config=settings)
    rng = np.random.default_rng(3)
    embedding = 0.3
    if settings["tie_word_embeddings"]:  # logits of a larger spread than real ones have lose too much in 4 bits
        embedding = LOGITS_SPREAD * settings.get("logits_scaling", 1.0) / np.sqrt(settings["hidden_size"])
    weights = {name: _draw(rng, name, size, embedding) for name, size in _sizes(settings)}
    if settings["model_type"] == "gemma4_text":  # nothing but these gains keeps its scores small
        for name in weights:
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                weights[name] *= np.float16(weights[name].size ** -0.25)
    if settings["model_type"].startswith("qwen3_5"):  # whose norms multiply by one more than is stored
        for name in weights:
            if name.endswith("norm.weight") and "linear_attn" not in name:
                weights[name] -= np.float16(1)
    if multiplier := settings.get("lm_head_multiplier"):
        weights["lm_head.weight"] /= np.float16(multiplier)
    save_file(weights, folder / "model.safetensors")


def _draw(rng: np.random.Generator, name: str, size: tuple[int, ...], embedding: float) -> np.ndarray:
    if name.endswith(("norm.weight", "layer_scalar")):
        return (1 + 0.1 * rng.standard_normal(size, np.float32)).astype(np.float16)
    if "embed" in name:
        scale = np.float32(embedding)
    else:
        scale = np.float32(0.3 if len(size) == 1 else LOGITS_SPREAD / np.sqrt(size[-1]))
    drawn = np.empty(size, np.float16)
    for part in drawn.reshape(size[0], -1):
        part[:] = scale * rng.standard_normal(part.shape, np.float32)
    return drawn


def _sizes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The tensors of a checkpoint, by the names that the family's own have."""
    family, hidden, inner = config["model_type"], config["hidden_size"], config["intermediate_size"]
    if family in ("lfm2", "lfm2_moe", "gemma4_text"):
        yield from (_lfm2_sizes if family != "gemma4_text" else _gemma4_sizes)(config)
        return
    if family == "falcon_h1":
        yield from _falcon_sizes(config)
        return
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim", hidden // heads)
    query, key = heads * head_dim, kv_heads * head_dim
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], hidden)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        yield layer + "input_layernorm.weight", (hidden,)
        yield layer + "post_attention_layernorm.weight", (hidden,)
        if (every := config.get("full_attention_interval")) and (i + 1) % every:
            yield from _delta_sizes(layer + "linear_attn.", config)
            yield from _mlp_sizes(layer, config)
            continue
        if config.get("layer_types", ["attention"] * (i + 1))[i] == "mamba":
            yield from _mamba_sizes(layer + "mamba.", config)
            yield from _mlp_sizes(layer, config)
            continue
        yield layer + "self_attn.o_proj.weight", (hidden, query)
        if family == "phi3":
            yield layer + "self_attn.qkv_proj.weight", (query + 2 * key, hidden)
            yield layer + "mlp.gate_up_proj.weight", (2 * inner, hidden)
            yield layer + "mlp.down_proj.weight", (hidden, inner)
            continue
        for part, rows in (("q", 2 * query if every else query), ("k", key), ("v", key)):
            yield f"{layer}self_attn.{part}_proj.weight", (rows, hidden)
            if family in ("qwen2", "gpt_oss"):
                yield f"{layer}self_attn.{part}_proj.bias", (rows,)
        if family == "gpt_oss":
            yield layer + "self_attn.o_proj.bias", (hidden,)
            yield layer + "self_attn.sinks", (heads,)
        if family in ("olmoe", "qwen3_moe", "qwen3_5_text"):
            whole = family == "olmoe"
            yield layer + "self_attn.q_norm.weight", (query if whole else head_dim,)
            yield layer + "self_attn.k_norm.weight", (key if whole else head_dim,)
        yield from _mlp_sizes(layer, config)


def _falcon_sizes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, key = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    yield "model.final_layernorm.weight", (hidden,)
    yield "lm_head.weight", (config["vocab_size"], hidden)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        yield from _mamba_sizes(layer + "mamba.", config)
        for name in ("input_layernorm", "pre_ff_layernorm"):
            yield f"{layer}{name}.weight", (hidden,)
        for part, shape in (
            ("q", (query, hidden)),
            ("k", (key, hidden)),
            ("v", (key, hidden)),
            ("o", (hidden, query)),
        ):
            yield f"{layer}self_attn.{part}_proj.weight", shape
        for part, shape in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
            yield f"{layer}feed_forward.{part}_proj.weight", shape


def _lfm2_sizes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head_dim = hidden // config["num_attention_heads"]
    key = config["num_key_value_heads"] * head_dim
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    yield "model.embedding_norm.weight", (hidden,)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        yield layer + "operator_norm.weight", (hidden,)
        yield layer + "ffn_norm.weight", (hidden,)
        experts, size = [""], inner
        if i >= config.get("num_dense_layers", i + 1):
            experts = [f"experts.{number}." for number in range(config["num_experts"])]
            size = config["moe_intermediate_size"]
            yield layer + "feed_forward.gate.weight", (len(experts), hidden)
            yield layer + "feed_forward.expert_bias", (len(experts),)
        for expert in experts:
            for part, shape in (("w1", (size, hidden)), ("w3", (size, hidden)), ("w2", (hidden, size))):
                yield f"{layer}feed_forward.{expert}{part}.weight", shape
        if i not in config["full_attn_idxs"]:
            yield layer + "conv.conv.weight", (hidden, 1, config["conv_L_cache"])
            yield layer + "conv.in_proj.weight", (3 * hidden, hidden)
            yield layer + "conv.out_proj.weight", (hidden, hidden)
            continue
        for part, rows in (("q_proj", hidden), ("k_proj", key), ("v_proj", key), ("out_proj", hidden)):
            yield f"{layer}self_attn.{part}.weight", (rows, hidden)
        for part in "qk":
            yield f"{layer}self_attn.{part}_layernorm.weight", (head_dim,)


def _gemma4_sizes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, count, own = config["hidden_size"], config["num_hidden_layers"], config["hidden_size_per_layer_input"]
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    yield "model.norm.weight", (hidden,)
    yield "model.embed_tokens_per_layer.weight", (config["vocab_size"], count * own)
    yield "model.per_layer_model_projection.weight", (count * own, hidden)
    yield "model.per_layer_projection_norm.weight", (own,)
    for i, kind in enumerate(config["layer_types"]):
        layer, is_own = f"model.layers.{i}.", i < count - config["num_kv_shared_layers"]
        size = config["head_dim" if kind == "sliding_attention" else "global_head_dim"]
        inner = config["intermediate_size"] * (1 if is_own else 2)
        for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            yield f"{layer}{name}_layernorm.weight", (hidden,)
        for name in ("q_norm", "k_norm")[: 1 + is_own]:
            yield f"{layer}self_attn.{name}.weight", (size,)
        for name in ("k_proj", "v_proj") if is_own else ():
            yield f"{layer}self_attn.{name}.weight", (config["num_key_value_heads"] * size, hidden)
        yield layer + "self_attn.q_proj.weight", (config["num_attention_heads"] * size, hidden)
        yield layer + "self_attn.o_proj.weight", (hidden, config["num_attention_heads"] * size)
        for name in ("gate_proj", "up_proj"):
            yield f"{layer}mlp.{name}.weight", (inner, hidden)
        yield layer + "mlp.down_proj.weight", (hidden, inner)
        yield layer + "per_layer_input_gate.weight", (own, hidden)
        yield layer + "per_layer_projection.weight", (hidden, own)
        yield layer + "post_per_layer_input_norm.weight", (hidden,)
        yield layer + "layer_scalar", (1,)


def _delta_sizes(part: str, config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, heads = config["hidden_size"], config["linear_num_value_heads"]
    values = heads * config["linear_value_head_dim"]
    mixed = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"] + values
    yield part + "in_proj_qkv.weight", (mixed, hidden)
    yield part + "in_proj_z.weight", (values, hidden)
    yield part + "out_proj.weight", (hidden, values)
    yield part + "conv1d.weight", (mixed, 1, config["linear_conv_kernel_dim"])
    yield part + "norm.weight", (config["linear_value_head_dim"],)
    for name in ("in_proj_a.weight", "in_proj_b.weight"):
        yield part + name, (heads, hidden)
    for name in ("A_log", "dt_bias"):
        yield part + name, (heads,)


def _mamba_sizes(part: str, config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, heads = config["hidden_size"], config["mamba_n_heads"]
    values = heads * config["mamba_d_head"]
    mixed = values + 2 * config["mamba_n_groups"] * config["mamba_d_state"]
    yield part + "in_proj.weight", (values + mixed + heads, hidden)
    yield part + "out_proj.weight", (hidden, values)
    yield part + "conv1d.weight", (mixed, 1, config["mamba_d_conv"])
    yield part + "conv1d.bias", (mixed,)
    yield part + "norm.weight", (values,)
    for name in ("A_log", "D", "dt_bias"):
        yield part + name, (heads,)


def _mlp_sizes(layer: str, config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner = config["hidden_size"], config.get("moe_intermediate_size", config["intermediate_size"])
    if shared := config.get("shared_intermediate_size"):
        yield layer + "shared_mlp.input_linear.weight", (2 * shared, hidden)
        yield layer + "shared_mlp.output_linear.weight", (hidden, shared)
    if config["model_type"].startswith("granitemoe"):
        count = config["num_local_experts"]
        yield layer + "block_sparse_moe.router.layer.weight", (count, hidden)
        yield layer + "block_sparse_moe.input_linear.weight", (count, 2 * inner, hidden)
        yield layer + "block_sparse_moe.output_linear.weight", (count, hidden, inner)
        return
    if config["model_type"] == "gpt_oss":  # as transformers writes it in floats
        count = config["num_local_experts"]
        yield layer + "mlp.router.weight", (count, hidden)
        yield layer + "mlp.router.bias", (count,)
        yield layer + "mlp.experts.gate_up_proj", (count, hidden, 2 * inner)
        yield layer + "mlp.experts.gate_up_proj_bias", (count, 2 * inner)
        yield layer + "mlp.experts.down_proj", (count, inner, hidden)
        yield layer + "mlp.experts.down_proj_bias", (count, hidden)
        return
    experts = [""]
    if "num_experts" in config:
        experts = [f"experts.{number}." for number in range(config["num_experts"])]
        yield layer + "mlp.gate.weight", (config["num_experts"], hidden)
    for expert in experts:
        yield f"{layer}mlp.{expert}gate_proj.weight", (inner, hidden)
        yield f"{layer}mlp.{expert}up_proj.weight", (inner, hidden)
        yield f"{layer}mlp.{expert}down_proj.weight", (hidden, inner)
