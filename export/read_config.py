"""From the settings of a source, in GGUF or of Hugging Face, to the description of its decoder."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from edgespec.errors import SourceError, UsageError
from edgespec.export.decoder_config import DecoderConfig, GateLimit, QueryGrowth
from edgespec.export.families import FAMILIES, GATED_EXPERTS, Family, family_of, family_of_huggingface
from edgespec.export.rotary import plain_rotary, rotaries_from_huggingface, rotary_from_gguf
from edgespec.export.routing import routing_of
from edgespec.export.settings import SETTING_NAMES, SourceSettings, UnreadLayout
from edgespec.export.tensors import Tensors
from edgespec.export.uneven_layers import (
    kv_heads,
    layers_by_kind,
    layers_of,
    local_layers,
    mixed_layers,
    sizes_from_gguf,
    sizes_from_huggingface,
    window_from_gguf,
)

_MIN_CONTEXT_LENGTH, _MAX_CONTEXT_LENGTH = 2, 1 << 20

# The families by their names in GGUF files, where these differ from model types of transformers.
_GGUF_NAMES = {stored: name for name, family in FAMILIES.items() for stored in family.gguf_names}
_GGUF, _HUGGINGFACE = SETTING_NAMES["gguf"], SETTING_NAMES["huggingface"]
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
    """Raises UnreadLayout: A key of positions or attention is not read, so the arithmetic may be another."""
    for name, value in stated.values.items():
        key = name.removeprefix(stated.prefix)
        if key == "attention.causal" and value is False:
            raise SourceError(f"{stated.path}: tokens see those that follow them; there is causal attention alone")
        is_known = key in _GGUF["read"] or _GGUF["unused"].get(key) == value
        is_known |= key in _GGUF["read_of"].get(stated.prefix.removesuffix("."), ())
        if key == name or not key.startswith(("rope.", "attention.")) or is_known:
            continue
        raise UnreadLayout(
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
    # A mistral file calls itself llama.
    family = family_of(path, "mistral" if architecture == "llama" else architecture)
    _require_read(stated)
    inner = stated.get("expert_feed_forward_length") if family.is_mixture else None
    sizes = None
    heads, hidden = stated.count("attention.head_count"), stated.count("embedding_length")
    head_dim = stated.count("attention.key_length", hidden // heads)
    num_layers, context_length = _num_layers(stated), stated.count("context_length")
    rotary = rotary_from_gguf(
        stated, tensors, head_dim, context_length, wanted_length, is_rounded=family.has_rounded_yarn
    )
    window = window_from_gguf(stated, family, architecture, context_length)
    is_local = local_layers(stated, family, stated.get("attention.sliding_window_pattern"), num_layers)
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
    mixed = mixed_layers(stated, family, num_layers, others, is_gguf=True)
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
        layers=layers_of(stated, architecture, (rotary, local_rotary), window, is_local, mixed),
        activation=family.activation,
        gate_limit=_gate_limit(stated, family),
        attention_scale=stated.number("attention.scale", scale),
        attention_cap=stated.optional("attn_logit_softcapping", family.defaults.get("attn_logit_softcapping")),
        embedding_scale=stated.number("embedding_scale", _embedding_scale(family, hidden)),
        residual_scale=stated.number("residual_scale", 1.0),
        logit_scale=1 / stated.number("logit_scale", 1.0),
        logit_cap=stated.optional("final_logit_softcapping", family.defaults.get("final_logit_softcapping")),
        routing=routing_of(stated, family, _GGUF["routing"], tensors),
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
    pattern, sizes = stated.get("layer_types", stated.get("sliding_window_pattern")), None
    is_local = local_layers(stated, family, pattern, num_layers)
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
    mixed = mixed_layers(stated, family, num_layers, layers_by_kind(stated, family), is_gguf=False)
    has_window = stated.get("sliding_window") and (any(is_local) or family.rotates_local_alone)
    window = stated.count("sliding_window") if has_window else None
    rope = SourceSettings(path, stated.get("rope_parameters", {}))
    growth = "llama_4_scaling_beta", "original_max_position_embeddings"
    config = DecoderConfig(
        architecture=architecture,
        hidden_size=hidden,
        intermediate_size=_inner_size(stated, family),
        num_heads=heads,
        num_kv_heads=stated.count("num_key_value_heads", heads),
        head_dim=head_dim,
        vocab_size=_vocab_size(path, tensors, "model.embed_tokens.weight"),
        context_length=_context_length(path, rotary.context_length or context_length, wanted_length),
        rms_eps=stated.number("rms_norm_eps"),
        layers=layers_of(stated, architecture, (rotary, local_rotary), window, is_local, mixed),
        activation=family.activation,
        gate_limit=_gate_limit(stated, family),
        attention_cap=stated.optional("attn_logit_softcapping"),
        logit_cap=stated.optional("final_logit_softcapping"),
        routing=routing_of(stated, family, _HUGGINGFACE["routing"], tensors),
        norms_rotated=family.norms_rotated,
        query_growth=_query_growth(rope, *growth, context_length),
        **_scales(stated, family, hidden, head_dim),
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
    # Biases of falcon_h1 would need its multipliers, which the graph applies behind them.
    for key in (*_HUGGINGFACE["unsupported"], *(("attention_bias",) if FAMILIES[architecture].has_both else ())):
        # "vision": the tokens of an image alone see later ones.
        if stated.get(key) and (key, stated.get(key)) != ("use_bidirectional_attention", "vision"):
            raise SourceError(f"{path} sets {key} to {stated.get(key)}, which is not supported")
    if stated.get("decoder_sparse_step", 1) != 1:
        raise SourceError(f"{path} has experts in some layers only, which is not supported")


def _inner_size(stated: SourceSettings, family: Family) -> int:
    """The number of values within an MLP; with experts, one beside them has a size of its own."""
    has_shared = family.is_mixture and stated.get("num_local_experts")
    keys = [key for key in _HUGGINGFACE["inner_sizes"] if not (has_shared and key.startswith("shared"))]
    return stated.count(next(filter(stated.get, keys), keys[-1]))


def _embedding_scale(family: Family, hidden_size: int) -> float:
    return math.sqrt(hidden_size) if family.scales_embedding else 1.0


def _gate_limit(stated: SourceSettings, family: Family) -> GateLimit | None:
    keys = ("swiglu_alpha", "swiglu_limit")
    if not family.defaults.keys() >= {*keys}:
        return None
    return GateLimit(*(stated.number(key, family.defaults[key]) for key in keys))


def _scales(stated: SourceSettings, family: Family, hidden_size: int, head_dim: int) -> dict[str, Any]:
    """The factors in a decoder by the settings of a config.json; attended, gate and fed are those of falcon_h1."""
    own = stated.get("mlp_multipliers", [1.0, 1.0])
    if not isinstance(own, list) or len(own) != 2 or not all(isinstance(each, float | int) for each in own):
        raise SourceError(f"{stated.path}: mlp_multipliers is {own!r}, wanted two numbers")
    attended = stated.number("attention_in_multiplier", 1.0)
    score = stated.number("attention_multiplier", stated.number("query_pre_attn_scalar", head_dim) ** -0.5)
    return {
        "attention_scale": stated.number("key_multiplier", 1.0) * attended**2 * score,
        "attended_scale": attended * stated.number("attention_out_multiplier", 1.0),
        "gate_scale": own[0],
        "fed_scale": own[1],
        "embedding_scale": stated.number("embedding_multiplier", _embedding_scale(family, hidden_size)),
        "residual_scale": stated.number("residual_multiplier", 1.0),
        "logit_scale": stated.number("lm_head_multiplier", 1.0) / stated.number("logits_scaling", 1.0),
    }


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
