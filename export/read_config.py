"""From the settings of a source, in GGUF or of Hugging Face, to the description of its decoder."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from edgespec.errors import SourceError, UsageError
from edgespec.export.decoder_config import DecoderConfig, GateLimit, Layer, QueryGrowth
from edgespec.export.families import (
    FAMILIES,
    GATED_EXPERTS,
    Family,
    family_of,
    family_of_huggingface,
    with_defaults,
)
from edgespec.export.rotary import plain_rotary, rotaries_from_huggingface, rotary_from_gguf
from edgespec.export.routing import GGUF_KEYS, HUGGINGFACE_KEYS, routing_of
from edgespec.export.settings import SourceSettings
from edgespec.export.tensors import StoredTensor, Tensors
from edgespec.export.uneven_layers import (
    kv_heads,
    mixed_from_gguf,
    mixed_from_huggingface,
    sizes_from_gguf,
    sizes_from_huggingface,
)

_MIN_CONTEXT_LENGTH, _MAX_CONTEXT_LENGTH = 2, 1 << 20


# The families by their names in GGUF files, where these differ from model types of transformers.
_GGUF_NAMES = {stored: name for name, family in FAMILIES.items() for stored in family.gguf_names}
# Keys of positions and attention in a GGUF file that are read, and values of others that change nothing.
_READ = {
    *(
        f"attention.{key}"
        for key in ("head_count", "head_count_kv", "key_length", "value_length", "scale", "causal")
    ),
    *(f"attention.{key}" for key in ("layer_norm_rms_epsilon", "layer_norm_epsilon")),
    *(f"attention.{key}" for key in ("sliding_window", "sliding_window_pattern")),
    *(f"rope.{key}" for key in ("dimension_count", "freq_base", "freq_base_swa", "scale_linear")),
    *(f"rope.scaling.{key}" for key in ("type", "factor", "original_context_length", "attn_factor", "finetuned")),
    *(f"rope.scaling.{key}" for key in ("yarn_beta_fast", "yarn_beta_slow")),
}
_READ_OF = {
    "mistral3.": ("attention.temperature_scale", "rope.scaling.yarn_log_multiplier"),
    **dict.fromkeys(  # of images alone
        ("qwen35.", "qwen35moe.", "qwen2vl.", "qwen3vl.", "qwen3vlmoe."), ("rope.dimension_sections",)
    ),
    "gemma4.": (
        *("attention.key_length_swa", "attention.value_length_swa", "attention.shared_kv_layers"),
        "rope.dimension_count_swa",
    ),
}
_UNUSED: dict[str, float] = {
    "attention.clamp_kqv": 0,
    "attention.max_alibi_bias": 0,
    "rope.scaling.yarn_attn_factor": 1,
    "rope.scaling.yarn_ext_factor": 1,
    "rope.scaling.yarn_log_multiplier": 0,
}
# Settings that change the arithmetic and have no place in the graph.
_UNSUPPORTED = (
    "use_sliding_window",
    "use_cla",
    "use_bidirectional_attention",
    "clip_qkv",
    "mlp_only_layers",
    "conv_bias",
)
# The beginnings of the names of layers for multi-token prediction, which checkpoints may have.
_FURTHER = {
    **dict.fromkeys(("mimo", "ernie4_5", "ernie4_5_moe"), "model.mtp_"),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_next"), "mtp."),
}
_FURTHER |= {"glm4_moe": "model.layers.{num_hidden_layers}."}
# Families of models that have parts that see or hear beside a text decoder.
_SEEING = ("gemma3", "gemma4", "gemma4_unified", "mistral3", "qwen3_5", "qwen3_5_moe", "lfm2_vl")
# Models that see whose text part is of another family. Positions in three dimensions are all one for text.
_TEXT_OF = {"qwen2_vl": "qwen2", "qwen2_5_vl": "qwen2", "qwen3_vl": "qwen3", "qwen3_vl_moe": "qwen3_moe"}
# The number of values within an MLP, by the first of these that a config.json has.
_INNER_SIZES = ("moe_intermediate_size", "shared_intermediate_size", "intermediate_size")
# Windows by architecture and context length of GGUF files from before they stated them.
_UNSTATED_WINDOWS = {("gemma2", 8192): 4096, ("phi3", 4096): 2047}
# The 27B models, known by their number of layers, scale attention by hidden_size / num_heads; no key states it.
_SCALED_BY_WIDTH = {("gemma2", 46), ("gemma3", 62)}


def _num_layers(stated: SourceSettings) -> int:
    """The layers of a GGUF file but the last ones that predict further tokens, if it has such."""
    blocks, further = stated.count("block_count"), stated.get("nextn_predict_layers", 0)
    if type(further) is not int or not 0 <= further < blocks:
        raise SourceError(
            f"{stated.path}: {stated.prefix}nextn_predict_layers is {further!r}, wanted less than the number of "
            f"its blocks, {blocks}"
        )
    return blocks - further


def _require_read(stated: SourceSettings) -> None:
    """Raises SourceError: A key of positions or attention is not read, so that the arithmetic might be another."""
    for name, value in stated.values.items():
        key = name.removeprefix(stated.prefix)
        if key == "attention.causal" and value is False:
            raise SourceError(f"{stated.path}: tokens see those that follow them; there is causal attention alone")
        is_known = key in _READ or _UNUSED.get(key) == value
        is_known |= key in _READ_OF.get(stated.prefix, ())
        if key == name or not key.startswith(("rope.", "attention.")) or is_known:
            continue
        raise SourceError(
            f"{stated.path} states {name} = {value!r}, which is not supported; use another file of this model"
        )


def _architecture_of(stored_name: str, stated: SourceSettings) -> str:
    """The name of a GGUF file's family here: some files name two families alike, and differ in a setting."""
    architecture = _GGUF_NAMES.get(stored_name, stored_name)
    if architecture == "olmo2" and stated.get("attention.sliding_window"):
        return "olmo3"
    with_experts = {"llama": "mixtral", "granitemoehybrid": "granitemoehybrid_moe"}
    return with_experts.get(architecture, architecture) if stated.get("expert_count") else architecture


def config_from_gguf(
    path: object, metadata: Mapping[str, Any], tensors: Tensors, wanted_length: int | None = None
) -> DecoderConfig:
    """The description of a GGUF file's model, for texts of up to wanted_length tokens if that is given.

    Raises SourceError: An unknown architecture, a missing key, or a feature that the graph lacks.
    """
    stored_name = str(metadata.get("general.architecture"))
    stated = SourceSettings(path, metadata, f"{stored_name}.")
    architecture = _architecture_of(stored_name, stated)
    _require_read(stated)
    # A mistral file calls itself llama.
    family = family_of(path, "mistral" if architecture == "llama" else architecture)
    inner = stated.get("expert_feed_forward_length") if family.is_mixture else None
    sizes = None
    heads, hidden = stated.count("attention.head_count"), stated.count("embedding_length")
    head_dim = stated.count("attention.key_length", hidden // heads)
    num_layers, context_length = _num_layers(stated), stated.count("context_length")
    rotary = rotary_from_gguf(
        stated, tensors, head_dim, context_length, wanted_length, is_rounded=family.has_rounded_yarn
    )
    window = _window_from_gguf(stated, family, architecture, context_length)
    is_local = _local_layers(stated, family, stated.get("attention.sliding_window_pattern"), num_layers)
    if family.has_layer_sizes:
        _refuse_experts(path, stated.get("expert_count"))
        sizes = sizes_from_gguf(stated, is_local, tensors)
        usual = sizes.layers[is_local.index(True) if True in is_local else 0]
        keys = ("attention.head_count_kv", "attention.key_length", "feed_forward_length")
        own = {stated.prefix + key: value for key, value in zip(keys, usual, strict=False)}
        stated, head_dim = replace(stated, values={**stated.values, **own}), usual.head_dim
    num_kv_heads, others = kv_heads(stated, family, heads, num_layers)
    local_rotary = rotary
    if family.is_local_plain:
        base = 1e4 if architecture == "gemma3" else stated.number("rope.freq_base", 1e4)
        local_rotary = plain_rotary(stated.number("rope.freq_base_swa", base), head_dim)
    by_width = (architecture, num_layers) in _SCALED_BY_WIDTH
    scale = family.defaults.get("attention_multiplier", (hidden // heads if by_width else head_dim) ** -0.5)
    config = DecoderConfig(
        architecture=architecture,
        hidden_size=hidden,
        intermediate_size=inner or stated.count("feed_forward_length"),
        num_heads=heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=_vocab_size(path, tensors, "token_embd.weight"),
        context_length=_context_length(path, rotary.context_length or context_length, wanted_length),
        rms_eps=stated.number("attention.layer_norm_rms_epsilon"),
        layers=_layers(
            Layer(rotary=rotary),
            Layer(rotary=local_rotary, sliding_window=window),
            is_local,
            _layers_without_rotary(stated, architecture, is_local, window),
            mixed_from_gguf(stated, family, num_layers, others),
        ),
        activation=family.activation,
        gate_limit=_gate_limit(stated, family),
        attention_scale=stated.number("attention.scale", scale),
        attention_cap=stated.optional("attn_logit_softcapping", family.defaults.get("attn_logit_softcapping")),
        embedding_scale=stated.number("embedding_scale", _embedding_scale(family, hidden)),
        residual_scale=stated.number("residual_scale", 1.0),
        logit_scale=1 / stated.number("logit_scale", 1.0),
        logit_cap=stated.optional("final_logit_softcapping", family.defaults.get("final_logit_softcapping")),
        routing=routing_of(stated, family, GGUF_KEYS, tensors),
        norms_rotated=family.norms_rotated,
        query_growth=_query_growth(
            stated, "attention.temperature_scale", "rope.scaling.original_context_length", context_length
        ),
    )
    return sizes.applied(path, config) if sizes else config


def config_from_huggingface(
    path: object, settings: Mapping[str, Any], tensors: Tensors, wanted_length: int | None = None
) -> DecoderConfig:
    """The sizes and the structure of a decoder, from the settings of a Hugging Face folder's config.json.

    Arguments and errors are those of config_from_gguf.
    """
    architecture, family = family_of_huggingface(path, settings)
    stated = SourceSettings(path, settings)
    _require_supported(path, stated, architecture, family.activation)
    heads, hidden = stated.count("num_attention_heads"), stated.count("hidden_size")
    head_dim = stated.count("head_dim", hidden // heads)
    num_layers, context_length = stated.count("num_hidden_layers"), stated.count("max_position_embeddings")
    kinds, sizes = stated.get("layer_types", stated.get("sliding_window_pattern")), None
    is_local = _local_layers(stated, family, kinds, num_layers)
    if family.has_layer_sizes:
        _refuse_experts(path, stated.get("enable_moe_block"))
        sizes = sizes_from_huggingface(stated, is_local)
    rotary, local_rotary = rotaries_from_huggingface(
        stated,
        sizes.layers[is_local.index(False)].head_dim if sizes and False in is_local else head_dim,
        context_length,
        wanted_length,
        is_local_plain=family.is_local_plain,
        local_head_dim=head_dim,
    )
    is_shared = family.is_mixture and stated.get(
        "num_local_experts"
    )  # the MLP beside experts has a size of its own
    sizes_of_mlp = [key for key in _INNER_SIZES if not (is_shared and key.startswith("shared"))]
    window = stated.count("sliding_window") if any(is_local) and stated.get("sliding_window") else None
    scales = _scales(stated)
    config = DecoderConfig(
        architecture=architecture,
        hidden_size=hidden,
        intermediate_size=stated.count(next(filter(stated.get, sizes_of_mlp), _INNER_SIZES[-1])),
        num_heads=heads,
        num_kv_heads=stated.count("num_key_value_heads", heads),
        head_dim=head_dim,
        vocab_size=_vocab_size(path, tensors, "model.embed_tokens.weight"),
        context_length=_context_length(path, rotary.context_length or context_length, wanted_length),
        rms_eps=stated.number("rms_norm_eps"),
        layers=_layers(
            Layer(rotary=rotary),
            Layer(rotary=local_rotary, sliding_window=window),
            is_local,
            _layers_without_rotary(stated, architecture, is_local, window),
            mixed_from_huggingface(stated, family, num_layers, kinds),
        ),
        activation=family.activation,
        gate_limit=_gate_limit(stated, family),
        attention_scale=scales.score
        * stated.number("attention_multiplier", stated.number("query_pre_attn_scalar", head_dim) ** -0.5),
        attended_scale=scales.attended,
        gate_scale=scales.gate,
        fed_scale=scales.fed,
        attention_cap=stated.optional("attn_logit_softcapping"),
        embedding_scale=stated.number("embedding_multiplier", _embedding_scale(family, hidden)),
        residual_scale=stated.number("residual_multiplier", 1.0),
        logit_scale=stated.number("lm_head_multiplier", 1.0) / stated.number("logits_scaling", 1.0),
        logit_cap=stated.optional("final_logit_softcapping"),
        routing=routing_of(stated, family, HUGGINGFACE_KEYS, tensors),
        norms_rotated=family.norms_rotated,
        query_growth=_query_growth(
            SourceSettings(path, stated.get("rope_parameters", {})),
            "llama_4_scaling_beta",
            "original_max_position_embeddings",
            context_length,
        ),
    )
    return sizes.applied(path, config) if sizes else config


def _refuse_experts(path: object, found: Any) -> None:
    """Raises SourceError: A gemma4 has experts."""
    if found:
        raise SourceError(f"{path} is a Gemma 4 26B-A4B or the like, which needs {GATED_EXPERTS}")


def _require_supported(path: object, stated: SourceSettings, architecture: str, activation: str) -> None:
    """Raises SourceError: The settings of a config.json ask for what no layer here computes."""
    found = stated.get("hidden_activation", stated.get("hidden_act", activation))
    if found != activation:
        raise SourceError(f"{path} has the activation {found}; {architecture} is supported only with {activation}")
    for key in _UNSUPPORTED:
        # "vision": the tokens of an image alone see later ones.
        if stated.get(key) and (key, stated.get(key)) != ("use_bidirectional_attention", "vision"):
            raise SourceError(f"{path} sets {key} to {stated.get(key)}, which is not supported")
    if stated.get("decoder_sparse_step", 1) != 1:
        raise SourceError(f"{path} has experts in some layers only, which is not supported")


def decoder_part(settings: Mapping[str, Any], stored: Tensors) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """Settings and tensors of the text decoder.

    Fills in the settings that config.json omits, and leaves out the parts that see or hear and the layers for
    multi-token prediction, of which those of a mimo are read as a drafting head.
    """
    architecture = str(settings.get("model_type")).removesuffix("_text")
    inner = settings.get("text_config") if architecture in _SEEING else None
    if architecture == "gemma4_unified":  # without towers, which changes nothing for text
        architecture = "gemma4"
        inner = {**(settings if inner is None else inner), "model_type": architecture}
    if architecture in _TEXT_OF:
        inner = {**(settings.get("text_config") or settings), "model_type": _TEXT_OF[architecture]}
    if inner:
        seeing = (
            "vision_tower.",
            "audio_tower.",
            "embed_vision.",
            "embed_audio.",
            "multi_modal_projector.",
            "visual.",
        )
        stored = {
            name.replace("language_model.", "", 1): tensor
            for name, tensor in stored.items()
            if not name.removeprefix("model.").startswith(seeing)
        }
    given = {**settings, **(inner or {})}
    family = str(given.get("model_type")).removesuffix("_text")
    given = with_defaults(family, given)
    further = _FURTHER.get(architecture, "").format_map(given)
    stored = {name: tensor for name, tensor in stored.items() if not (further and name.startswith(further))}
    return given | (_lfm2_settings(given) if family in ("lfm2", "lfm2_moe") else {}), dict(stored)


def _lfm2_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings under the names of other families; a width may be stated as that of an MLP of two matrices."""
    inner = given.get("block_ff_dim", given.get("intermediate_size", 12288))
    if given["block_auto_adjust_ff_dim"]:
        inner = int(2 * inner / 3)
        if (factor := given["block_ffn_dim_multiplier"]) is not None:
            unit = given["block_multiple_of"]
            inner = -(-int(factor * inner) // unit) * unit
    numbers = range(given["num_hidden_layers"])
    attending = given.get("full_attn_idxs") or numbers
    types = given.get("layer_types") or ["full_attention" if i in attending else "conv" for i in numbers]
    return {"intermediate_size": inner, "rms_norm_eps": given.get("norm_eps", 1e-5), "layer_types": types}


def _embedding_scale(family: Family, hidden_size: int) -> float:
    return math.sqrt(hidden_size) if family.scales_embedding else 1.0


def _gate_limit(stated: SourceSettings, family: Family) -> GateLimit | None:
    keys = ("swiglu_alpha", "swiglu_limit")
    if not family.defaults.keys() >= {*keys}:
        return None
    return GateLimit(*(stated.number(key, family.defaults[key]) for key in keys))


class _Scales(NamedTuple):
    """Factors of scores, of what attention and MLPs give, and of what gates are made of."""

    score: float
    attended: float
    gate: float
    fed: float


def _scales(stated: SourceSettings) -> _Scales:
    """The factors by the settings of falcon_h1; 1 where there are none."""
    own = stated.get("mlp_multipliers", [1.0, 1.0])
    if not isinstance(own, list) or len(own) != 2 or not all(isinstance(each, float | int) for each in own):
        raise SourceError(f"{stated.path}: mlp_multipliers is {own!r}, wanted two numbers")
    attended = stated.number("attention_in_multiplier", 1.0)
    score = stated.number("key_multiplier", 1.0) * attended**2
    return _Scales(score, attended * stated.number("attention_out_multiplier", 1.0), *own)


def _query_growth(stated: SourceSettings, share: str, period: str, context_length: int) -> QueryGrowth | None:
    """The growth of queries by the keys of its numbers; None where the settings state none."""
    if not stated.get(share):
        return None
    return QueryGrowth(stated.number(share), stated.count(period, context_length))


def _context_length(path: object, longest: int, wanted: int | None) -> int:
    if longest < _MIN_CONTEXT_LENGTH:
        raise SourceError(
            f"{path} is for texts of up to {longest} token, wanted {_MIN_CONTEXT_LENGTH} or more; fetch its "
            "settings again"
        )
    if wanted is not None and wanted > longest:
        raise UsageError(
            f"--context-length is {wanted}, and {path} is for texts of up to {longest} tokens; give {longest} or "
            "less, or leave it out"
        )
    return min(wanted or longest, _MAX_CONTEXT_LENGTH)


def _vocab_size(path: object, tensors: Tensors, name: str) -> int:
    if name not in tensors:
        raise SourceError(f"{path} has no tensor {name}; it is incomplete or no language model")
    return tensors[name].rows


def _layers(
    full: Layer, local: Layer, is_local: Sequence[bool], without_rotary: frozenset[int], mixed: Mapping[int, Layer]
) -> tuple[Layer, ...]:
    layers = [local if sees_window else full for sees_window in is_local]
    turned = [replace(layer, rotary=None) if i in without_rotary else layer for i, layer in enumerate(layers)]
    return tuple(
        replace(own, rotary=layer.rotary) if (own := mixed.get(i, layer)).has_both else own
        for i, layer in enumerate(turned)
    )


def _local_layers(stated: SourceSettings, family: Family, pattern: Any, num_layers: int) -> list[bool]:
    """True for each layer that sees only a window; pattern lists the layers, or states a period."""
    every = family.full_attention_every
    if isinstance(pattern, str):  # such as LLLG, local and global, which is repeated
        pattern = [pattern[i % len(pattern)] == "L" for i in range(num_layers)]
    if isinstance(pattern, list):
        kinds = {"full_attention": False, "attention": False, "sliding_attention": True, False: False, True: True}
        kinds |= {"conv": False} if family.has_convolutions else {}
        kinds |= {"linear_attention": False} if family.has_delta or family.has_mamba else {}
        kinds |= {"mamba": False} if family.has_mamba else {}
        found = [kinds.get(kind) for kind in pattern]
        if len(found) != num_layers or None in found or (every is None and any(found)):
            raise SourceError(f"{stated.path} has layers of attention {pattern}, which is not supported")
        return [kind is True for kind in found]
    if every is None:
        return [False] * num_layers
    every = every if pattern is None else pattern
    return [every == 0 or (i + 1) % every != 0 for i in range(num_layers)]


def _window_from_gguf(
    stated: SourceSettings, family: Family, architecture: str, context_length: int
) -> int | None:
    key = "attention.sliding_window"
    if family.full_attention_every is None:
        if stated.get(key):
            raise SourceError(
                f"{stated.path} has a sliding window, which no {architecture} model has; unsupported"
            )
        return None
    may_lack = not family.full_attention_every or family.rotates_local_alone
    unstated = _UNSTATED_WINDOWS.get((architecture, context_length), 0 if may_lack else None)
    return None if stated.get(key, unstated) == 0 else stated.count(key, unstated)


def _layers_without_rotary(
    stated: SourceSettings, architecture: str, is_local: Sequence[bool], window: int | None
) -> frozenset[int]:
    """The layers without rotary positions; smollm3 lists 0 for these, and 1 for the others."""
    num_layers = len(is_local)
    family = FAMILIES[architecture]
    usual = "nope" if family.has_mamba and not family.has_both else "rope"
    is_rotated = stated.get("position_embedding_type", usual) != "nope"
    if not is_rotated and stated.get("rope.scaling.finetuned") is not True:
        return frozenset(range(num_layers))
    if family.rotates_local_alone and window is not None:
        return frozenset(i for i, sees_window in enumerate(is_local) if not sees_window)
    uses = stated.get("no_rope_layers")
    if uses is None:
        every = stated.count("no_rope_layer_interval", 4)
        uses = [int(architecture != "smollm3" or (i + 1) % every != 0) for i in range(num_layers)]
    if len(uses) != num_layers or not set(uses) <= {0, 1}:
        raise SourceError(f"{stated.path}: no_rope_layers is {uses}, wanted 0 or 1 for each layer")
    return frozenset(i for i, rotates in enumerate(uses) if not rotates)
