"""The families of decoders that are read, each by its differences from llama.

llama (Llama 2 and 3, SmolLM2, TinyLlama), mistral, ministral3, qwen2 (and 2.5), mimo, qwen3, granite, smollm3,
olmo2, olmo3, gemma2, gemma3, phi3 (Phi-3, 3.5 and 4), ernie4_5, seed_oss, glm4, exaone4, hunyuan_v1_dense, lfm2
(LFM2 and 2.5), qwen3_5 and gemma4, and with a mixture of experts mixtral, qwen3_moe, olmoe, granitemoe and
gpt_oss, with shared experts too qwen2_moe, qwen3_5_moe, qwen3_next, hunyuan_v1_moe and ernie4_5_moe, and with
experts that sigmoids choose lfm2_moe, glm4_moe, minimax_m2 and dots1. granitemoehybrid (Granite 4) has two
entries, since some have experts. falcon_h1 has a Mamba-2 layer beside attention in each layer. A gemma3, gemma4 or
mistral3 that sees or hears is read without these parts; Qwen2-VL and Qwen3-VL are qwen2 and qwen3 without them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any, NamedTuple

from edgespec.errors import SourceError


@dataclass(frozen=True, kw_only=True)
class Family:
    """The differences of a family from llama."""

    norms: tuple[str, ...] = ("input_norm", "mlp_norm")
    norms_whole_projections: bool = False  # q_norm and k_norm are over all heads at once
    gain_addend: float = 0.0  # a checkpoint, though not a GGUF file, stores gains less this
    # Which files store the rows of queries and keys in pairs that are rotated together: "gguf", "huggingface".
    paired_in: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()  # tensors that a file must have though other families do without
    may_lack: tuple[str, ...] = ()  # those that its smaller models do without
    fused: tuple[str, ...] = ()  # what one matrix holds: "qkv", query, key and value; "gate_up", gate and up
    names: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # as in roles.py, where others differ
    activation: str = "silu"
    scales_embedding: bool = False  # by √hidden_size
    # One of so many layers sees all tokens, the others a window; 0: all see a window, None: none does.
    full_attention_every: int | None = None
    is_local_plain: bool = False  # layers that see a window rotate by the plain base, without scaling
    rotates_local_alone: bool = False  # where some layers see a window, the others have no positions
    defaults: Mapping[str, Any] = field(default_factory=dict)  # settings that transformers assumes
    is_mixture: bool = False  # its layers have experts
    normalizes_routing: bool = True  # unless norm_topk_prob says otherwise
    routes_by_sigmoid: bool = False  # unless a GGUF file says otherwise
    has_rounded_yarn: bool = True  # borders of YaRN are whole pairs of values, unless truncate says otherwise
    norms_rotated: bool = False  # q_norm and k_norm are of rotated values
    has_convolutions: bool = False  # some layers have a short convolution in the place of attention
    has_layer_sizes: bool = False  # layers differ in their heads and widths, and may share keys and values
    has_mamba: bool = False  # some have a Mamba-2 layer in the place of attention
    has_both: bool = False  # all have a Mamba-2 layer beside attention
    has_delta: bool = False  # some have a Gated DeltaNet, and attention has a gate of its output


_AROUND = ("input_norm", "attended_norm", "mlp_norm", "fed_norm")
_HEAD_NORMS = ("q_norm", "k_norm")
_WITH_HEAD_NORMS = ("input_norm", *_HEAD_NORMS, "mlp_norm")
_BIASES = ("q_bias", "k_bias", "v_bias")
_LAYER = "model.layers.{i}"
# The one norm before an MLP under the name that others have for one behind attention.
_MLP_NORM_BEHIND = {
    "{i}.mlp_norm": ("blk.{i}.post_attention_norm.weight", f"{_LAYER}.post_attention_layernorm.weight")
}
_GGUF, _FUSED = ("gguf",), ("qkv", "gate_up")
_GEMMA = Family(
    norms=_AROUND,
    gain_addend=1.0,
    activation="gelu_pytorch_tanh",
    scales_embedding=True,
    full_attention_every=2,
    defaults={
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
    },
)
_GEMMA2 = {"max_position_embeddings": 8192, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
_GEMMA3 = {"max_position_embeddings": 131072, "rope_theta": 1e6, "rope_local_base_freq": 1e4}
_OLMO = Family(norms=(*_HEAD_NORMS, "attended_norm", "fed_norm"), norms_whole_projections=True)
_LFM2 = Family(
    norms=_WITH_HEAD_NORMS,
    names={
        "final_norm": ("token_embd_norm.weight", "model.embedding_norm.weight"),
        "{i}.input_norm": ("blk.{i}.attn_norm.weight", f"{_LAYER}.operator_norm.weight"),
        "{i}.mlp_norm": ("blk.{i}.ffn_norm.weight", f"{_LAYER}.ffn_norm.weight"),
        "{i}.q_norm": ("blk.{i}.attn_q_norm.weight", f"{_LAYER}.self_attn.q_layernorm.weight"),
        "{i}.k_norm": ("blk.{i}.attn_k_norm.weight", f"{_LAYER}.self_attn.k_layernorm.weight"),
        "{i}.o": ("blk.{i}.attn_output.weight", f"{_LAYER}.self_attn.out_proj.weight"),
        "{i}.gate": ("blk.{i}.ffn_gate.weight", f"{_LAYER}.feed_forward.w1.weight"),
        "{i}.up": ("blk.{i}.ffn_up.weight", f"{_LAYER}.feed_forward.w3.weight"),
        "{i}.down": ("blk.{i}.ffn_down.weight", f"{_LAYER}.feed_forward.w2.weight"),
    },
    has_convolutions=True,
    defaults={"rope_theta": 1e6, "conv_L_cache": 3},
)
_HUNYUAN = Family(
    norms=_WITH_HEAD_NORMS,
    norms_rotated=True,
    names={
        "{i}.q_norm": ("blk.{i}.attn_q_norm.weight", f"{_LAYER}.self_attn.query_layernorm.weight"),
        "{i}.k_norm": ("blk.{i}.attn_k_norm.weight", f"{_LAYER}.self_attn.key_layernorm.weight"),
    },
)
_GRANITE4 = Family(
    paired_in=_GGUF,
    fused=("gate_up",),
    names={
        "{i}.gate_up": ("blk.{i}.ffn_up.weight", f"{_LAYER}.shared_mlp.input_linear.weight"),
        "{i}.down": ("blk.{i}.ffn_down.weight", f"{_LAYER}.shared_mlp.output_linear.weight"),
    },
    has_mamba=True,
)
_QWEN3_5 = Family(
    norms=_WITH_HEAD_NORMS,
    gain_addend=1.0,
    names=_MLP_NORM_BEHIND,
    has_delta=True,
    defaults={"full_attention_interval": 4, "partial_rotary_factor": 0.25},
)
FAMILIES = {
    "llama": Family(paired_in=_GGUF),
    "mistral": Family(paired_in=_GGUF, full_attention_every=0),
    "qwen2": Family(needs=_BIASES),
    "mimo": Family(needs=_BIASES),
    "qwen3": Family(norms=_WITH_HEAD_NORMS),
    "granite": Family(paired_in=_GGUF),
    "smollm3": Family(paired_in=_GGUF),
    "olmo2": _OLMO,
    "olmo3": replace(_OLMO, full_attention_every=4, is_local_plain=True),
    "gemma2": replace(_GEMMA, defaults={**_GEMMA.defaults, **_GEMMA2}),
    "gemma3": replace(
        _GEMMA,
        norms=(*_AROUND, *_HEAD_NORMS),
        full_attention_every=6,
        is_local_plain=True,
        defaults={**_GEMMA.defaults, **_GEMMA3},
    ),
    "gemma4": replace(
        _GEMMA,
        norms=(*_AROUND, *_HEAD_NORMS, "added_norm"),
        gain_addend=0.0,
        full_attention_every=6,
        is_local_plain=True,
        has_layer_sizes=True,
        defaults={
            "attention_multiplier": 1.0,
            "head_dim": 256,
            "sliding_window": 512,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "phi3": Family(fused=_FUSED, full_attention_every=0),
    "ernie4_5": Family(paired_in=(*_GGUF, "huggingface")),
    "seed_oss": Family(needs=_BIASES, names=_MLP_NORM_BEHIND),
    "glm4": Family(
        norms=_AROUND,
        defaults={"partial_rotary_factor": 0.5, "rms_norm_eps": 1.5625e-07},
        paired_in=(*_GGUF, "huggingface"),
        needs=_BIASES,
        fused=("gate_up",),
        names={
            "{i}.attended_norm": (
                "blk.{i}.post_attention_norm.weight",
                f"{_LAYER}.post_self_attn_layernorm.weight",
            ),
            "{i}.mlp_norm": ("blk.{i}.ffn_norm.weight", f"{_LAYER}.post_attention_layernorm.weight"),
            "{i}.fed_norm": ("blk.{i}.post_ffw_norm.weight", f"{_LAYER}.post_mlp_layernorm.weight"),
        },
    ),
    "exaone4": Family(
        norms=(*_HEAD_NORMS, "attended_norm", "fed_norm"), full_attention_every=4, rotates_local_alone=True
    ),
    "hunyuan_v1_dense": _HUNYUAN,
    "ministral3": Family(paired_in=_GGUF, full_attention_every=0),
    "granitemoehybrid": _GRANITE4,
    "granitemoehybrid_moe": replace(_GRANITE4, is_mixture=True),
    "falcon_h1": Family(
        names={
            "final_norm": ("output_norm.weight", "model.final_layernorm.weight"),
            "{i}.mlp_norm": ("blk.{i}.ffn_norm", f"{_LAYER}.pre_ff_layernorm.weight"),
            **{
                f"{{i}}.{part}": (f"blk.{{i}}.ffn_{part}.weight", f"{_LAYER}.feed_forward.{part}_proj.weight")
                for part in ("gate", "up", "down")
            },
        },
        may_lack=("mamba_gain",),
        has_mamba=True,
        has_both=True,
    ),
    "lfm2": replace(
        _LFM2,
        defaults={
            **_LFM2.defaults,
            "block_auto_adjust_ff_dim": True,
            "block_multiple_of": 256,
            "block_ffn_dim_multiplier": 1.0,
        },
    ),
    "lfm2_moe": replace(
        _LFM2,
        is_mixture=True,
        routes_by_sigmoid=True,
        defaults={**_LFM2.defaults, "block_auto_adjust_ff_dim": False, "num_dense_layers": 2},
    ),
    "qwen3_5": _QWEN3_5,
    **dict.fromkeys(("qwen3_5_moe", "qwen3_next"), replace(_QWEN3_5, is_mixture=True)),
    "mixtral": Family(paired_in=_GGUF, full_attention_every=0, is_mixture=True),
    "qwen3_moe": Family(norms=_WITH_HEAD_NORMS, is_mixture=True, defaults={"norm_topk_prob": False}),
    "olmoe": Family(
        norms=_WITH_HEAD_NORMS, norms_whole_projections=True, is_mixture=True, normalizes_routing=False
    ),
    "granitemoe": Family(paired_in=_GGUF, is_mixture=True),
    "qwen2_moe": Family(needs=_BIASES, is_mixture=True, normalizes_routing=False),
    "hunyuan_v1_moe": replace(_HUNYUAN, is_mixture=True),
    "ernie4_5_moe": Family(
        paired_in=(*_GGUF, "huggingface"), is_mixture=True, defaults={"moe_layer_start_index": 1}
    ),
    "glm4_moe": Family(
        norms=_WITH_HEAD_NORMS,
        needs=("router_choice",),
        may_lack=_HEAD_NORMS,
        names=_MLP_NORM_BEHIND,
        is_mixture=True,
        routes_by_sigmoid=True,
        defaults={"partial_rotary_factor": 0.5, "first_k_dense_replace": 1},
    ),
    "dots1": Family(
        norms=_WITH_HEAD_NORMS,
        needs=("router_choice",),
        is_mixture=True,
        normalizes_routing=False,
        routes_by_sigmoid=True,
    ),
    "minimax_m2": Family(
        norms=_WITH_HEAD_NORMS,
        norms_whole_projections=True,
        needs=("router_choice",),
        is_mixture=True,
        routes_by_sigmoid=True,
    ),
    "gpt_oss": Family(
        needs=(*_BIASES, "o_bias", "sinks", "router_bias", "expert_bias"),
        names=_MLP_NORM_BEHIND,
        full_attention_every=2,
        is_mixture=True,
        defaults={"swiglu_alpha": 1.702, "swiglu_limit": 7.0},
        has_rounded_yarn=False,
    ),
}
# Further settings that transformers assumes where a config.json lacks them, and llama.cpp does not.
_EPS = dict.fromkeys(
    (
        *("olmo2", "olmo3", "phi3", "ernie4_5", "exaone4", "hunyuan_v1_dense", "ministral3", "falcon_h1"),
        *("mixtral", "olmoe", "hunyuan_v1_moe", "ernie4_5_moe", "glm4_moe", "gpt_oss"),
    ),
    1e-5,
)
_THETAS = {
    "smollm3": 2e6,
    "olmo3": 5e5,
    "ernie4_5": 5e5,
    "ernie4_5_moe": 5e5,
    "mixtral": 1e6,
    "minimax_m2": 5e6,
    "gpt_oss": 1.5e5,
}
_WINDOWS = {"mistral": 4096, "olmo3": 4096, "exaone4": 4096, "gpt_oss": 128}
_ROTARY = {
    "gpt_oss": {
        "rope_type": "yarn",
        "rope_theta": 1.5e5,
        "factor": 32.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "ministral3": {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 16.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 16384,
        "llama_4_scaling_beta": 0.1,
    },
}


def with_defaults(architecture: str, stated: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a config.json, and those that transformers assumes where that has none."""
    assumed: dict[str, Any] = {"rms_norm_eps": _EPS.get(architecture, 1e-6)}
    if architecture.startswith("granite"):
        assumed["attention_multiplier"] = 1.0
    for key, values in (("rope_theta", _THETAS), ("sliding_window", _WINDOWS), ("rope_parameters", _ROTARY)):
        assumed |= {key: values[architecture]} if architecture in values else {}
    assumed |= FAMILIES[architecture].defaults if architecture in FAMILIES else {}
    given = {**assumed, **stated}
    if not (stated.get("rope_parameters") or stated.get("rope_scaling")):
        given["rope_parameters"] = assumed.get("rope_parameters")
    elif not stated.get("rope_parameters") and architecture in _ROTARY:
        given["rope_parameters"] = None
    return given


_NEAR = 0.7  # from 0 to 1, of names of families
THROUGH_PYTORCH = "edgespec export SOURCE --exporter transformers"


class Lacking(NamedTuple):
    """A part of models that is not read: what ONNX Runtime has of it, and the nearest model that is read."""

    part: str
    runtime: str
    nearest: str

    def __str__(self) -> str:
        return f"{self.part}: {self.runtime}. The nearest that is read is {self.nearest}"


_ANY = "ONNX Runtime could compute it, and edgespec does not write it"
_NEW = "ONNX Runtime has an operator for it, LinearAttention, and edgespec does not write it"
_NONE = "no ONNX Runtime up to 1.32 computes all of it"
GATED_EXPERTS = Lacking(
    "experts whose gates are GELUs",
    "ONNX Runtime computes them from 1.32 on for CUDA alone, and edgespec does not write them",
    "a Gemma 4 without experts, as 12B or E4B",
)
# What families that are not read need, by the starts of their names.
_LACKING = {
    ("olmo_hybrid",): Lacking("Gated DeltaNet layers with norms of another order", _NEW, "Qwen3.6-35B-A3B"),
    ("kimi_linear", "kimi-linear"): Lacking(
        "recurrent layers whose state decays by channel (KDA) beside latent attention", _NONE, "Qwen3.6-35B-A3B"
    ),
    ("qwen4",): Lacking("sparse attention and tables of word groups", _NONE, "Qwen3.6-35B-A3B"),
    ("minimax-m1", "minimax_m1"): Lacking(
        "recurrent layers of another kind (lightning attention)", _NEW, "MiniMax-M2"
    ),
    ("nemotron_h", "nemotron-h"): Lacking(
        "Mamba-2 layers between MLPs and attention, each with a norm of its own", _NEW, "Granite 4.0 H"
    ),
    ("mamba", "jamba", "bamba", "zamba", "plamo2"): Lacking(
        "Mamba layers of another kind, from whose state drafts have to be taken back", _NONE, "Granite 4.0 H"
    ),
    ("gemma3n",): Lacking(
        "several residual streams (AltUp), low-rank ones beside them (LAuReL) and sparse activations",
        _ANY,
        "Gemma 4 E2B or E4B",
    ),
    (
        *(
            "deepseek_v",
            "deepseek2",
            "deepseek3",
            "deepseek4",
            "kimi_k",
            "glm4_moe_lite",
            "glm_moe_dsa",
            "glm-dsa",
        ),
        *("minicpm3", "longcat"),
    ): Lacking(
        "latent attention, whose keys and values are of low rank",
        "no ONNX Runtime up to 1.32 has attention over these, and whole heads would take several times the memory",
        "GLM-4.5-Air or Qwen3-30B-A3B",
    ),
    ("llama4",): Lacking("experts that sigmoids choose, in every other layer", _ANY, "Qwen3-30B-A3B"),
}

_READ = (
    "edgespec reads models of text, and the text part of Gemma 3 and 4, Mistral 3, Qwen2-VL to Qwen3-VL, Qwen3.5 "
    "and LFM2-VL"
)
_SOUND = ("whisper", "wav2vec2", "hubert", "voxtral", "qwen2_audio", "granite_speech")
_PICTURES = ("llava", "siglip", "vit", "idefics", "paligemma", "smolvlm", "internvl", "mllama", "blip", "lfm2_vl")
# What is no decoder of text by itself, by the starts of its names.
_PARTS = {
    ("clip",): "the part of a model that sees or hears; give the file of its text part",
    ("eagle3", "dflash", "dspark", "gemma4-assistant"): (
        "a drafting head, which is read from safetensors alone; give --drafter its folder or hub id"
    ),
    ("bert", "nomic-bert", "jina-bert", "modern-bert", "modernbert", "roberta", "xlm-roberta", "distilbert"): (
        "a model that reads text and writes none; for vectors of texts, Qwen3-Embedding is read"
    ),
    _SOUND: f"a model that takes sound; {_READ}",
    _PICTURES: f"a model that takes pictures; {_READ}",
    ("qwen2_5_omni", "qwen3_omni"): f"a model that takes pictures and sound; {_READ}",
    ("t5", "mt5", "umt5", "bart", "mbart", "marian", "pegasus"): (
        "a model with an encoder beside its decoder; edgespec reads models that write text with a decoder alone"
    ),
}


def family_of(path: object, architecture: str, advice: str = "", taken: str = "") -> Family:
    """The differences of a family of models, which take what is named beside text.

    Raises SourceError: It is not read, with what it needs where that is known.
    """
    if architecture in FAMILIES:
        return FAMILIES[architecture]
    if part := next((part for starts, part in _PARTS.items() if architecture.startswith(starts)), None):
        raise SourceError(f"{path} is {part}")
    needs = next((need for starts, need in _LACKING.items() if architecture.startswith(starts)), None)
    need = f"needs {needs}" if needs else f"takes {taken}" if taken else ""
    lacking, advice = (f", which {need}", "") if need else ("", advice)
    near = get_close_matches(architecture, FAMILIES, cutoff=_NEAR) if not needs else []
    newer = f"; near it by name are {', '.join(near)}, and a newer edgespec may read it" if near else ""
    known = ", ".join(FAMILIES)
    raise SourceError(f"{path} is of the family '{architecture}'{lacking}{newer}; known are {known}{advice}")


def family_of_huggingface(path: object, settings: Mapping[str, Any]) -> tuple[str, Family]:
    """The name of a family and its differences. Raises SourceError: It is not read."""
    architecture = str(settings.get("model_type")).removesuffix("_text")
    if architecture == "granitemoehybrid" and settings.get("num_local_experts"):
        architecture = "granitemoehybrid_moe"
    advice = f". Others may go through PyTorch, in fp32: {THROUGH_PYTORCH}"
    parts = {"vision_config": "pictures", "audio_config": "sound"}
    taken = " and ".join(word for key, word in parts.items() if settings.get(key))
    return architecture, family_of(path, architecture, advice, taken)
