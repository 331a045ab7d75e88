"""The experts of the references, which transformers stacks, under the names that files have."""

from collections.abc import Iterator

import numpy as np

# By family the names of the router and of an expert's gate, up and down in a checkpoint.
_MLP = ("mlp.gate", *(f"mlp.experts.{{}}.{part}_proj" for part in ("gate", "up", "down")))
_SPARSE = ("block_sparse_moe.gate", *(f"block_sparse_moe.experts.{{}}.{part}" for part in ("w1", "w3", "w2")))
_NAMES = {
    **dict.fromkeys(("mixtral", "minimax_m2"), _SPARSE),
    **dict.fromkeys(("qwen3_5_moe", "qwen3_next"), _MLP),
    **dict.fromkeys(
        ("qwen2_moe", "qwen3_moe", "olmoe", "ernie4_5_moe", "glm4_moe", "glm4_moe-air", "dots1"), _MLP
    ),
    "lfm2_moe": ("feed_forward.gate", *(f"feed_forward.experts.{{}}.{part}" for part in ("w1", "w3", "w2"))),
    "hunyuan_v1_moe": ("mlp.gate.wg", *_MLP[1:]),
}
_GGUF = {"granitemoehybrid": "granitehybrid", "qwen3_moe": "qwen3moe", "mixtral": "llama", "olmo3": "olmo2"} | {
    "hunyuan_v1_dense": "hunyuan-dense",
    "ministral3": "mistral3",
    "qwen3_5": "qwen35",
    "gpt_oss": "gpt-oss",
    "qwen2_moe": "qwen2moe",
    "hunyuan_v1_moe": "hunyuan-moe",
    "ernie4_5_moe": "ernie4_5-moe",
    "lfm2_moe": "lfm2moe",
    "glm4_moe": "glm4moe",
    "qwen3_5_moe": "qwen35moe",
    "qwen3_next": "qwen3next",
    "minimax_m2": "minimax-m2",
    "falcon_h1": "falcon-h1",
}


_CHOICE = {
    "ernie4_5_moe": "mlp.moe_statics.e_score_correction_bias",
    "minimax_m2": "block_sparse_moe.e_score_correction_bias",
}
_BLOCKS = ("mlp", "shared_mlp", "block_sparse_moe", "feed_forward")


_Named = Iterator[tuple[str, np.ndarray]]


def gguf_architecture(family: str) -> str:
    """The name of a family in a GGUF file."""
    return _GGUF.get(family, family)


def stored_experts(family: str, form: str, weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The weights with their experts as a checkpoint, form huggingface, or a GGUF file has them."""
    if family.startswith("gpt_oss"):
        return weights if form == "huggingface" else dict(_of_gpt_oss(weights))
    return dict(_renamed(family, form, weights))


def _of_gpt_oss(weights: dict[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """With gate and up apart and no expert transposed, as a GGUF file has them."""
    for name, value in weights.items():
        layer, _, kind = name.partition(".mlp.experts.")
        own, ending = kind.removesuffix("_bias"), ".bias" if kind.endswith("_bias") else ".weight"
        stored = value if value.ndim < 3 else value.swapaxes(1, 2)
        if own == "gate_up_proj":
            yield f"{layer}.ffn_gate_exps{ending}", np.ascontiguousarray(stored[:, ::2])
            yield f"{layer}.ffn_up_exps{ending}", np.ascontiguousarray(stored[:, 1::2])
        elif own == "down_proj":
            yield f"{layer}.ffn_down_exps{ending}", np.ascontiguousarray(stored)
        elif ".sinks" in name:
            yield name.replace("self_attn.sinks", "attn_sinks.weight"), value
        else:
            yield name.replace("mlp.router", "ffn_gate_inp"), value


def _shared_of_granite(layer: str, part: str, value: np.ndarray, ending: str) -> _Named:
    """The MLP of a granitemoehybrid as a GGUF file has it; ending says if it lies beside experts."""
    if part == "output_linear.weight":
        yield f"{layer}.ffn_down{ending}.weight", value
        return
    for own, half in zip(("gate", "up"), np.split(value, 2), strict=True):
        yield f"{layer}.ffn_{own}{ending}.weight", half


def _renamed(family: str, form: str, weights: dict[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    for name, value in weights.items():
        own_block = next((each for each in _BLOCKS if f".{each}." in name), "mlp")
        layer, _, kind = name.partition(f".{own_block}.")
        layer = layer.replace("model.layers.", "blk.") if form == "gguf" else layer
        module, _, part = kind.partition(".")
        if kind.endswith(("e_score_correction_bias", "expert_bias")):
            theirs = _CHOICE.get(family, f"{own_block}.{kind}")
            yield f"{layer}.{'exp_probs_b.bias' if form == 'gguf' else theirs}", value
        elif own_block == "shared_mlp" and form == "gguf":
            yield from _shared_of_granite(layer, kind, value, "_shexp" if family.endswith("experts") else "")
        elif module.startswith("shared_") and form == "gguf":
            own = "ffn_gate_inp_shexp" if part == "weight" else f"ffn_{part.partition('_')[0]}_shexp"
            yield f"{layer}.{own}.weight", value
        elif kind in ("gate.weight", "gate.wg.weight", "router.weight"):
            router = "router.layer" if family.startswith("granitemoe") else _NAMES[family][0].partition(".")[2]
            block = "block_sparse_moe" if family in ("mixtral", "minimax_m2") else own_block
            yield f"{layer}.ffn_gate_inp.weight" if form == "gguf" else f"{layer}.{block}.{router}.weight", value
        elif kind == "experts.gate_up_proj":
            inner = value.shape[1] // 2
            if form == "gguf":
                yield f"{layer}.ffn_gate_exps.weight", value[:, :inner]
                yield f"{layer}.ffn_up_exps.weight", value[:, inner:]
            elif family.startswith("granitemoe"):
                yield f"{layer}.block_sparse_moe.input_linear.weight", value
            elif family == "qwen3_5_moe":
                yield name, value
            else:
                for i, both in enumerate(value):
                    yield f"{layer}.{_NAMES[family][1].format(i)}.weight", both[:inner]
                    yield f"{layer}.{_NAMES[family][2].format(i)}.weight", both[inner:]
        elif kind == "experts.down_proj":
            if form == "gguf":
                yield f"{layer}.ffn_down_exps.weight", value
            elif family.startswith("granitemoe"):
                yield f"{layer}.block_sparse_moe.output_linear.weight", value
            elif family == "qwen3_5_moe":
                yield name, value
            else:
                for i, down in enumerate(value):
                    yield f"{layer}.{_NAMES[family][3].format(i)}.weight", down
        else:
            yield name, value
