"""Small random models of every family, as sources, and the logits that transformers gives for them."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import made_tokenizers
import numpy as np
import tiny
from mixtures import gguf_architecture, stored_experts
from reference_weights import draw

DATA = Path(__file__).parent / "data"
REFERENCES = json.loads((DATA / "references.json").read_text())
FAMILIES = REFERENCES["families"]
LOGITS = np.load(DATA / "references.npz")
TOKENS = np.array(REFERENCES["tokens"], np.int32)

_GRANITE = {"embedding_scale": 6.0, "attention.scale": 0.2, "residual_scale": 0.4, "logit_scale": 3.0}
_HEADS = {"attention.key_length": 32, "attention.value_length": 32}
# Gated DeltaNet layers, and experts with a shared one.
_DELTA_EXPERTS: dict[str, Any] = {
    **_HEADS,
    "full_attention_interval": 2,
    "rope.dimension_count": 16,
    "ssm.conv_kernel": 4,
    "ssm.state_size": 16,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 4,
    "ssm.inner_size": 96,
    "expert_count": 6,
    "expert_used_count": 3,
    "expert_feed_forward_length": 64,
    "expert_shared_feed_forward_length": 32,
}
_FALCON: dict[str, Any] = {
    **_HEADS,
    "ssm.conv_kernel": 4,
    "ssm.state_size": 16,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 6,
    "ssm.inner_size": 96,
    "rope.freq_base": 1e11,
}
# What a GGUF file of a family says beside the common keys.
GGUF_KEYS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {**_HEADS},
    "granite": {"embedding_scale": 6.0, "attention.scale": 0.2, "residual_scale": 0.4, "logit_scale": 3.0},
    "smollm3": {"rope.freq_base": 2000000.0},
    "olmo2": {},
    "gemma2": {
        **_HEADS,
        "attention.sliding_window": 7,
        "attn_logit_softcapping": 4.0,
        "final_logit_softcapping": 6.0,
    },
    "gemma3": {
        **_HEADS,
        "attention.sliding_window": 7,
        "attention.scale": 24**-0.5,
        "rope.freq_base": 1e6,
        "rope.scaling.type": "linear",
        "rope.scaling.factor": 8.0,
    },
    "phi3": {"attention.sliding_window": 7, "rope.scaling.original_context_length": 512},
    "phi3-longrope": {
        "context_length": 512,
        "attention.sliding_window": 0,
        "rope.scaling.original_context_length": 64,
        "rope.scaling.attn_factor": math.sqrt(1 + math.log(512 / 64) / math.log(64)),
    },
    "phi3-partial": {
        "embedding_length": 128,
        "context_length": 512,
        "attention.sliding_window": 0,
        "rope.dimension_count": 16,
        "rope.scaling.original_context_length": 16,
        "rope.scaling.attn_factor": math.sqrt(1 + math.log(512 / 16) / math.log(16)),
    },
    "olmo3": {
        "context_length": 64,
        "attention.sliding_window": 7,
        "rope.freq_base": 500000.0,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 16,
    },
    "ernie4_5": {**_HEADS, "rope.freq_base": 500000.0},
    "seed_oss": {**_HEADS},
    "glm4": {**_HEADS, "rope.dimension_count": 16},
    "exaone4": {"attention.sliding_window": 7},
    "hunyuan_v1_dense": {**_HEADS, "rope.freq_base": 10000.0 * 1000.0 ** (32 / 30)},
    "ministral3": {
        "context_length": 64,
        "attention.temperature_scale": 0.1,
        "rope.freq_base": 500000.0,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 16,
        "rope.scaling.yarn_log_multiplier": 1.0,
    },
    "lfm2": {
        "attention.head_count_kv": [0, 2, 0, 0, 2],
        "shortconv.l_cache": 3,
        "rope.freq_base": 1e6,
    },
    "qwen3_5": {
        **_HEADS,
        "full_attention_interval": 2,
        "rope.dimension_count": 16,
        "rope.dimension_sections": [4, 2, 2, 0],
        "ssm.conv_kernel": 4,
        "ssm.state_size": 16,
        "ssm.group_count": 2,
        "ssm.time_step_rank": 4,
        "ssm.inner_size": 96,
    },
    "lfm2_moe": {
        "attention.head_count_kv": [0, 2, 0, 2],
        "shortconv.l_cache": 3,
        "rope.freq_base": 1e6,
        "expert_count": 6,
        "expert_used_count": 3,
        "expert_feed_forward_length": 64,
        "leading_dense_block_count": 1,
        "expert_gating_func": 2,
    },
    "glm4_moe": {
        **_HEADS,
        "rope.dimension_count": 16,
        "expert_count": 8,
        "expert_used_count": 3,
        "expert_feed_forward_length": 64,
        "expert_shared_count": 1,
        "expert_group_count": 2,
        "expert_group_used_count": 1,
        "expert_weights_scale": 2.5,
        "expert_weights_norm": True,
        "leading_dense_block_count": 1,
        "nextn_predict_layers": 0,
    },
    "glm4_moe-air": {
        **_HEADS,
        "rope.dimension_count": 16,
        "expert_count": 6,
        "expert_used_count": 5,
        "expert_feed_forward_length": 64,
        "leading_dense_block_count": 1,
    },
    "qwen3_5_moe": {**_DELTA_EXPERTS, "rope.dimension_sections": [4, 2, 2, 0]},
    "qwen3_next": _DELTA_EXPERTS,
    "granitemoehybrid-mamba": {
        **_GRANITE,
        "attention.head_count_kv": [0, 2, 0, 0],
        "ssm.conv_kernel": 4,
        "ssm.state_size": 16,
        "ssm.group_count": 2,
        "ssm.time_step_rank": 4,
        "ssm.inner_size": 128,
        "rope.scaling.finetuned": False,
    },
    "granitemoehybrid-experts": {
        **_GRANITE,
        "attention.head_count_kv": [0, 2, 0],
        "ssm.conv_kernel": 4,
        "ssm.state_size": 16,
        "ssm.group_count": 1,
        "ssm.time_step_rank": 8,
        "ssm.inner_size": 128,
        "rope.scaling.finetuned": False,
        "feed_forward_length": 64,
        "expert_count": 6,
        "expert_used_count": 3,
        "expert_shared_feed_forward_length": 96,
    },
    "falcon_h1": _FALCON,
    "falcon_h1-normed": _FALCON,
    "minimax_m2": {
        **_HEADS,
        "feed_forward_length": 64,
        "expert_gating_func": 2,
        "rope.dimension_count": 16,
        "rope.freq_base": 5e6,
        "expert_count": 6,
        "expert_used_count": 3,
        "expert_feed_forward_length": 64,
    },
    "dots1": {
        "expert_count": 6,
        "expert_used_count": 3,
        "expert_feed_forward_length": 64,
        "expert_shared_count": 2,
        "expert_weights_scale": 1.5,
        "expert_weights_norm": True,
        "expert_gating_func": 2,
        "leading_dense_block_count": 1,
    },
    "gemma4": {
        "attention.head_count_kv": [2, 2, 1, 2, 2, 1],
        "attention.key_length": 32,
        "attention.value_length": 32,
        "attention.key_length_swa": 16,
        "attention.value_length_swa": 16,
        "attention.sliding_window": 7,
        "attention.sliding_window_pattern": [True, True, False] * 2,
        "attention.shared_kv_layers": 0,
        "embedding_length_per_layer_input": 0,
        "rope.dimension_count": 32,
        "rope.dimension_count_swa": 16,
        "rope.freq_base": 1e6,
        "rope.freq_base_swa": 1e4,
        "final_logit_softcapping": 6.0,
    },
    "gemma4-shared": {
        "attention.head_count_kv": 1,
        "attention.key_length": 32,
        "attention.value_length": 32,
        "attention.key_length_swa": 16,
        "attention.value_length_swa": 16,
        "attention.sliding_window": 7,
        "attention.sliding_window_pattern": [True, True, False, True, True, False, False],
        "attention.shared_kv_layers": 4,
        "embedding_length_per_layer_input": 32,
        "feed_forward_length": [96] * 3 + [192] * 4,
        "rope.dimension_count": 32,
        "rope.dimension_count_swa": 16,
        "rope.freq_base": 1e6,
        "rope.freq_base_swa": 1e4,
        "final_logit_softcapping": 1e6,  # none; llama.cpp takes 30 where a file states nothing
    },
    "mixtral": {"expert_count": 4, "expert_used_count": 2},
    "qwen3_moe": {
        **_HEADS,
        "expert_count": 6,
        "expert_used_count": 3,
        "expert_feed_forward_length": 64,
    },
    "olmoe": {"expert_count": 4, "expert_used_count": 2},
    "granitemoe": {
        "embedding_scale": 6.0,
        "attention.scale": 0.2,
        "residual_scale": 0.4,
        "logit_scale": 3.0,
        "expert_count": 4,
        "expert_used_count": 2,
    },
    "qwen2_moe": {"expert_count": 6, "expert_used_count": 3, "expert_feed_forward_length": 64},
    "hunyuan_v1_moe": {
        **_HEADS,
        "rope.freq_base": 10000.0 * 1000.0 ** (32 / 30),
        "expert_count": 4,
        "expert_used_count": 2,
        "expert_feed_forward_length": 96,
    },
    "ernie4_5_moe": {
        **_HEADS,
        "expert_count": 6,
        "expert_used_count": 3,
        "expert_feed_forward_length": 64,
        "rope.freq_base": 500000.0,
        "leading_dense_block_count": 1,
        "interleave_moe_layer_step": 1,
        "expert_shared_count": 2,
        "expert_shared_feed_forward_length": 128,
    },
    "gpt_oss": {
        **_HEADS,
        "expert_feed_forward_length": 96,
        "context_length": 64,
        "attention.sliding_window": 7,
        "expert_count": 6,
        "expert_used_count": 3,
        "rope.freq_base": 500000.0,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 16,
        "rope.scaling.yarn_beta_fast": 4.0,
    },
    "qwen2-yarn": {
        "context_length": 16,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 16,
    },
}
_SHARING = ("qwen2_moe", "hunyuan_v1_moe", "ernie4_5_moe")
_SIGMOID = ("lfm2_moe", "glm4_moe", "dots1")
MIXTURES = (
    *("mixtral", "qwen3_moe", "olmoe", "granitemoe", *_SHARING, "gpt_oss", "gpt_oss-limit", *_SIGMOID),
    *("qwen3_5_moe", "minimax_m2", "granitemoehybrid-experts", "glm4_moe-air", "qwen3_next"),
)
CONVOLVED = (
    "lfm2",
    "qwen3_5",
    "lfm2_moe",
    "qwen3_5_moe",
    "qwen3_next",
    "granitemoehybrid-mamba",
    "granitemoehybrid-experts",
    "falcon_h1",
    "falcon_h1-normed",
)  # run on the CPU alone, and no trees
UNEVEN = ("gemma4", "gemma4-shared")  # not for NPUs: their layers have different heads
CONTEXT_LENGTHS = {"phi3-partial": 512}  # to ask for; others have their own
SOURCES = [(family, "huggingface") for family in FAMILIES] + [(family, "gguf") for family in GGUF_KEYS]


def weights_of(family: str) -> dict[str, np.ndarray]:
    return draw(FAMILIES[family]["config"]["model_type"], FAMILIES[family]["shapes"])


def _apart(weights: dict[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """Queries, keys, values and gates of qwen3_next as the converter writes them: all heads of each together."""
    for name, value in weights.items():
        if not name.endswith("in_proj_qkvz.weight"):
            yield name, value
            continue
        *mixed, gates = np.split(value.reshape(2, 128, -1), [16, 32, 80], axis=1)  # by key head
        layer = name.replace("model.layers.", "blk.").partition(".linear_attn")[0]
        yield f"{layer}.attn_qkv.weight", np.concatenate([part.reshape(-1, 64) for part in mixed])
        yield f"{layer}.attn_gate.weight", gates.reshape(-1, 64)


def _multiplied(config: dict[str, Any], weights: dict[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """The weights of falcon_h1 with its multipliers in them, as the converter writes them."""
    attended, (gate, down) = config["attention_in_multiplier"], config["mlp_multipliers"]
    sizes = [config["mamba_d_ssm"]] * 2 + [config["mamba_n_groups"] * config["mamba_d_state"]] * 2
    own = np.repeat(config["ssm_multipliers"], [*sizes, config["mamba_n_heads"]])
    factors = {
        **dict.fromkeys(("q_proj", "v_proj"), attended),
        "k_proj": attended * config["key_multiplier"],
        "o_proj": config["attention_out_multiplier"],
        "gate_proj": gate,
        "down_proj": down,
        "in_proj": config["ssm_in_multiplier"] * own[:, None],
        "out_proj": config["ssm_out_multiplier"],
        "embed_tokens": config["embedding_multiplier"],
        "lm_head": config["lm_head_multiplier"],
    }
    for name, value in weights.items():
        yield name, (value * factors.get(name.split(".")[-2], 1.0)).astype(np.float32)


def write_source(folder: Path, family: str, form: str) -> Path:
    """The model of a family as a Hugging Face folder or as a GGUF file, with a tokenizer of the family's kind."""
    weights, config = stored_experts(family, form, weights_of(family)), FAMILIES[family]["config"]
    if form == "huggingface":
        tokenizer = made_tokenizers.tokenizer_json(made_tokenizers.kind_of(family))
        tiny.write_huggingface(folder / "hf", weights, config=config, tokenizer=tokenizer)
        return folder / "hf"
    if "short_factor" in (config.get("rope_parameters") or {}):
        for kind in ("short", "long"):
            factors = np.array(config["rope_parameters"][f"{kind}_factor"], np.float32)
            weights[f"rope_factors_{kind}.weight"] = factors
    weights = dict(_apart(weights)) if family == "qwen3_next" else weights
    weights = dict(_multiplied(config, weights)) if family.startswith("falcon_h1") else weights
    if family.startswith("gemma4"):  # a quarter of each wide head turns
        weights["rope_freqs.weight"] = np.array([1.0] * 4 + [1e30] * 12, np.float32)
    architecture = gguf_architecture(config["model_type"].removesuffix("_text"))
    keys = {"block_count": config["num_hidden_layers"], **GGUF_KEYS[family]}
    override = {f"{architecture}.{key}": value for key, value in keys.items()}
    override |= made_tokenizers.gguf_keys(made_tokenizers.kind_of(family))
    tiny.write_gguf(folder / "a.gguf", weights, architecture=architecture, override=override)
    return folder / "a.gguf"
