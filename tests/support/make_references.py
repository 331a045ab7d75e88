"""Write tests/support/data/references.{json,npz}: logits of tiny random models of each family by transformers.

Not run by the tests, which need neither torch nor transformers. Families that are named are made, or all:

    pip install torch==2.13.0 transformers numpy && python tests/support/make_references.py [FAMILY …]
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from reference_weights import draw

SHAPE = {
    "vocab_size": 269,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "bos_token_id": None,
    "pad_token_id": None,
}
ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPE |= {"original_max_position_embeddings": 64, "rope_theta": 500000.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 500000.0}
# Gated DeltaNet layers beside those of attention.
_DELTA = {
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}
# With one layer of attention, and experts with a shared one.
_DELTA_EXPERTS = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    **_DELTA,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 32,
    "num_experts": 6,
    "num_experts_per_tok": 3,
}
FALCON_SCALES = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e11},
    "embedding_multiplier": 3.0,
    "lm_head_multiplier": 0.4,
    "key_multiplier": 0.6,
    "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.9,
    "ssm_in_multiplier": 1.1,
    "ssm_out_multiplier": 0.7,
    "ssm_multipliers": [0.7, 0.8, 1.3, 0.9, 1.2],
    "mlp_multipliers": [0.8, 0.6],
}
FAMILIES = {
    "llama": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "llama3": {"model_type": "llama", "rope_parameters": ROPE, "tie_word_embeddings": True},
    "mistral": {"sliding_window": 7},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "granite": {
        "embedding_multiplier": 6.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.4,
        "logits_scaling": 3.0,
    },
    "smollm3": {"num_hidden_layers": 5},
    "olmo2": {},
    "gemma2": {
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "num_hidden_layers": 4,
        "sliding_window": 7,
        "attn_logit_softcapping": 4.0,
        "final_logit_softcapping": 6.0,
        "tie_word_embeddings": True,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "head_dim": 32,
        "query_pre_attn_scalar": 24,
        "num_hidden_layers": 7,
        "sliding_window": 7,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "tie_word_embeddings": True,
    },
    "phi3": {"sliding_window": 7, "original_max_position_embeddings": 512},
    "phi3-longrope": {
        "model_type": "phi3",
        "original_max_position_embeddings": 64,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0, 1.0, 1.1, 1.2, 1.4, 1.5, 1.9, 2.5],
            "long_factor": [1.0, 1.5, 2.0, 3.0, 5.0, 7.0, 9.0, 12.0],
        },
    },
    "phi3-partial": {  # as Phi-4-mini: rotates a part of each head, in a text longer than the first training
        "model_type": "phi3",
        "hidden_size": 128,
        "partial_rotary_factor": 0.5,
        "tie_word_embeddings": True,
        "original_max_position_embeddings": 16,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0, 1.0, 1.1, 1.2, 1.4, 1.5, 1.9, 2.5],
            "long_factor": [1.0, 1.5, 2.0, 3.0, 5.0, 7.0, 9.0, 12.0],
        },
    },
    "olmo3": {"num_hidden_layers": 5, "sliding_window": 7, "rope_scaling": YARN, "max_position_embeddings": 64},
    "ernie4_5": {"head_dim": 32, "tie_word_embeddings": True},
    "seed_oss": {"head_dim": 32, "attention_bias": True, "attention_out_bias": False},
    "glm4": {"head_dim": 32, "partial_rotary_factor": 0.5, "attention_bias": True},
    "exaone4": {"num_hidden_layers": 5, "sliding_window": 7, "sliding_window_pattern": 4},
    "exaone4-full": {
        "model_type": "exaone4",
        "layer_types": ["full_attention"] * 3,
        "sliding_window": None,
        "rope_scaling": ROPE,
    },
    "hunyuan_v1_dense": {
        "head_dim": 32,
        "rope_scaling": {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0, "rope_theta": 10000.0},
    },
    "ministral3": {  # its queries grow within the text
        "head_dim": 16,
        "max_position_embeddings": 64,
        "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
    },
    "granitemoehybrid": {
        "layer_types": ["attention"] * 3,
        "num_local_experts": 0,
        "shared_intermediate_size": 96,
        "position_embedding_type": "rope",
        "embedding_multiplier": 6.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.4,
        "logits_scaling": 3.0,
    },
    "lfm2": {  # a width of 144, of which two thirds are meant
        "num_hidden_layers": 5,
        "intermediate_size": 144,
        "block_multiple_of": 32,
        "layer_types": ["conv", "full_attention", "conv", "conv", "full_attention"],
        "norm_eps": 1e-5,
        "tie_word_embeddings": True,
    },
    "qwen3_5": {
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 5,
        "layer_types": ["linear_attention", "full_attention"] * 2 + ["linear_attention"],
        **_DELTA,
    },
    "lfm2_moe": {  # the first layer is dense
        "num_hidden_layers": 4,
        "layer_types": ["conv", "full_attention", "conv", "full_attention"],
        "norm_eps": 1e-5,
        "moe_intermediate_size": 64,
        "num_dense_layers": 1,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "tie_word_embeddings": True,
    },
    "glm4_moe": {  # experts of one of two groups
        "head_dim": 32,
        "attention_bias": True,
        "use_qk_norm": True,
        "moe_intermediate_size": 64,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 2,
        "topk_group": 1,
        "routed_scaling_factor": 2.5,
        "num_mtp_layers": 0,
    },
    "glm4_moe-air": {  # no norms of queries and keys
        "model_type": "glm4_moe",
        "num_hidden_layers": 2,
        "head_dim": 32,
        "attention_bias": True,
        "moe_intermediate_size": 64,
        "n_routed_experts": 6,
        "num_experts_per_tok": 5,
        "num_mtp_layers": 0,
    },
    "dots1": {
        "moe_intermediate_size": 64,
        "n_routed_experts": 6,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "max_window_layers": 3,
        "sliding_window": None,
    },
    "gemma4": {  # as the dense models: keys are values where all tokens are seen
        "model_type": "gemma4_text",
        "num_hidden_layers": 6,
        "layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 2,
        "head_dim": 16,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "sliding_window": 7,
        "final_logit_softcapping": 6.0,
        "hidden_size_per_layer_input": 0,
        "tie_word_embeddings": True,
    },
    "gemma4-shared": {  # as E2B and E4B
        "model_type": "gemma4_text",
        "num_hidden_layers": 7,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2 + ["full_attention"],
        "head_dim": 16,
        "global_head_dim": 32,
        "num_key_value_heads": 1,
        "num_kv_shared_layers": 4,
        "use_double_wide_mlp": True,
        "sliding_window": 7,
        "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": 269,
        "tie_word_embeddings": True,
    },
    "qwen3_5_moe": {"model_type": "qwen3_5_moe_text", **_DELTA_EXPERTS},
    "qwen3_next": _DELTA_EXPERTS,
    "minimax_m2": {
        "intermediate_size": 64,
        "head_dim": 32,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "rotary_dim": 16,
    },
    "granitemoehybrid-mamba": {
        "model_type": "granitemoehybrid",
        "num_hidden_layers": 4,
        "layer_types": ["mamba", "attention", "mamba", "mamba"],
        "num_local_experts": 0,
        "shared_intermediate_size": 96,
        "mamba_n_heads": 4,
        "mamba_n_groups": 2,
        "mamba_d_state": 16,
        "mamba_d_head": 32,
        "embedding_multiplier": 6.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.4,
        "logits_scaling": 3.0,
        "tie_word_embeddings": True,
    },
    "granitemoehybrid-experts": {
        "model_type": "granitemoehybrid",
        "layer_types": ["mamba", "attention", "mamba"],
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "intermediate_size": 64,
        "shared_intermediate_size": 96,
        "mamba_n_heads": 8,
        "mamba_n_groups": 1,
        "mamba_d_state": 16,
        "mamba_d_head": 16,
        "embedding_multiplier": 6.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.4,
        "logits_scaling": 3.0,
        "tie_word_embeddings": True,
    },
    "falcon_h1": {  # as 0.5B to 3B, whose Mamba layers have no norm; tests/export/test_families.py has 7B's
        "head_dim": 32,
        "mamba_d_ssm": 96,
        "mamba_n_heads": 6,
        "mamba_n_groups": 2,
        "mamba_d_state": 16,
        "mamba_d_head": 16,
        "mamba_rms_norm": False,
        **FALCON_SCALES,
    },
    "falcon_h1-normed": {  # as 7B
        "model_type": "falcon_h1",
        "head_dim": 32,
        "mamba_d_ssm": 96,
        "mamba_n_heads": 6,
        "mamba_n_groups": 2,
        "mamba_d_state": 16,
        "mamba_d_head": 16,
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": False,
        **FALCON_SCALES,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "rope_theta": 10000.0},
    "qwen3_moe": {
        "head_dim": 32,
        "moe_intermediate_size": 64,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
    },
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "granitemoe": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "embedding_multiplier": 6.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.4,
        "logits_scaling": 3.0,
    },
    "qwen2_moe": {
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 96,
        "num_experts": 6,
        "num_experts_per_tok": 3,
    },
    "hunyuan_v1_moe": {
        "head_dim": 32,
        "num_experts": 4,
        "moe_topk": 2,
        "rope_scaling": {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0, "rope_theta": 10000.0},
    },
    "ernie4_5_moe": {  # the first layer is dense
        "head_dim": 32,
        "moe_intermediate_size": 64,
        "moe_num_experts": 6,
        "moe_k": 3,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": -1,
        "moe_layer_interval": 1,
        "tie_word_embeddings": True,
    },
    "gpt_oss": {
        "head_dim": 32,
        "num_hidden_layers": 4,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "sliding_window": 7,
        "max_position_embeddings": 64,
        "rope_scaling": {**YARN, "truncate": False, "beta_fast": 4.0},
    },
    "gpt_oss-limit": {
        "model_type": "gpt_oss",
        "head_dim": 32,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "swiglu_limit": 0.75,
        "swiglu_alpha": 1.3,
    },
    "qwen2-yarn": {
        "model_type": "qwen2",
        "max_position_embeddings": 16,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "rope_theta": 10000.0,
        },
    },
}
TOKENS = np.random.default_rng(5).integers(0, 269, 40)
NUM_ROWS = 4


def main() -> None:
    folder = Path(__file__).parent / "data"
    described, logits = {}, {}
    if sys.argv[1:]:
        described = json.loads((folder / "references.json").read_text())["families"]
        logits = dict(np.load(folder / "references.npz"))
    for family in sys.argv[1:] or FAMILIES:
        special = FAMILIES[family]
        settings = {"model_type": family, **SHAPE, **special}
        config = transformers.AutoConfig.for_model(**settings)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        state = model.state_dict()
        shapes = {name: list(value.shape) for name, value in state.items() if name != "lm_head.weight"}
        if not config.tie_word_embeddings:
            shapes["lm_head.weight"] = list(state["lm_head.weight"].shape)
        drawn = {name: torch.from_numpy(value) for name, value in draw(config.model_type, shapes).items()}
        model.load_state_dict(drawn, strict=False)
        model.tie_weights()
        with torch.no_grad():
            found = model(torch.from_numpy(TOKENS)[None], use_cache=False).logits[0, -NUM_ROWS:]
        described[family] = {
            "made_with": {"transformers": transformers.__version__, "torch": torch.__version__},
            "config": json.loads(config.to_json_string(use_diff=False)),
            "shapes": shapes,
        }
        logits[family] = found.numpy()
        print(family, logits[family].std())
    document = {"tokens": TOKENS.tolist(), "families": described}
    (folder / "references.json").write_text(json.dumps(document, indent=1) + "\n")
    np.savez_compressed(folder / "references.npz", **logits)


if __name__ == "__main__":
    main()
