"""Sizes and constants of a head's own decoder layers, and the layers of the target that it reads.

They come from its settings and, where these are wrong, from its tensors.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from edgespec.errors import SourceError
from edgespec.export.families import DecoderConfig, Layer
from edgespec.export.heads.head_source import HeadSource, nested
from edgespec.export.rotary import rotaries_from_huggingface
from edgespec.export.settings import SourceSettings
from edgespec.export.sources import LoadedSource
from edgespec.export.tensors import StoredTensor

# What the libraries assume that wrote the settings: speculators leaves out a value that transformers assumes.
_ASSUMED: dict[str, dict[str, Any]] = {
    "llama": {"num_attention_heads": 32, "rms_norm_eps": 1e-6, "max_position_embeddings": 2048, "rope_theta": 1e4},
    "qwen3": {
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "rope_theta": 1e4,
    },
}
_ACTIVATIONS = ("silu", "gelu_pytorch_tanh")


def layer_settings(source: HeadSource, inner: str | None = None) -> SourceSettings:
    """The settings of the layers, with those that transformers assumes; inner is the object that holds them.

    Raises SourceError: They are those of another kind of model, or state what has no place in the graph.
    """
    stated = dict(nested(source.settings, inner) if inner else source.settings.values)
    kind = str(stated.get("model_type", "llama"))
    assumed = _ASSUMED.get(kind, _ASSUMED["llama"])
    given = {key: value for key, value in stated.items() if value is not None}
    settings = SourceSettings(source.settings.path, {**assumed, **given})
    if (activation := settings.get("hidden_act", "silu")) not in _ACTIVATIONS:
        raise SourceError(f"{settings.path}: hidden_act is {activation}; known are {', '.join(_ACTIVATIONS)}")
    if "sliding_attention" in (settings.get("layer_types") or ()):
        raise SourceError(f"{settings.path}: a layer of the head sees a window only, which is not supported")
    if settings.get("mlp_bias"):
        raise SourceError(f"{settings.path}: mlp_bias is true, which is not supported")
    return settings


def layers_config(
    settings: SourceSettings, tensors: Mapping[str, StoredTensor], target: LoadedSource, num_layers: int
) -> DecoderConfig:
    """The description of the layers whose tensors are given, for texts as long as the target's.

    The numbers of layers and of inner values are those of the tensors, since settings state others.

    Raises SourceError: Sizes and tensors do not fit.
    """
    q, k, o = (tensors[f"0.{part}"] for part in "qko")
    heads = settings.count("num_attention_heads")
    head_dim = settings.count("head_dim", max(1, q.rows // heads))
    kv_heads = settings.count("num_key_value_heads", heads)
    if q.rows != heads * head_dim or k.rows != kv_heads * head_dim:
        raise SourceError(
            f"{settings.path} states {heads} heads of {head_dim} values and {kv_heads} of keys; tensors "
            f"{q.name} and {k.name} have {q.rows} and {k.rows} rows; the file is damaged"
        )
    longest = settings.count("max_position_embeddings")
    rotary, _ = rotaries_from_huggingface(settings, head_dim, longest, None)
    return DecoderConfig(
        architecture="llama",
        hidden_size=o.rows,
        intermediate_size=tensors["0.gate"].rows,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=target.config.vocab_size,
        context_length=target.config.context_length,
        rms_eps=settings.number("rms_norm_eps"),
        layers=(Layer(rotary=rotary),) * num_layers,
        activation=str(settings.get("hidden_act", "silu")),
        attention_scale=head_dim**-0.5,
        logit_scale=settings.number("logit_scale", 1.0),
    )


def read_numbers(source: HeadSource, key: str, found: Any) -> list[int]:
    """The value of a setting that lists layers. Raises SourceError: It is something else."""
    if isinstance(found, list) and found and all(type(number) is int for number in found):
        return found
    raise SourceError(f"{source.settings.path}: {key} is {found!r}, wanted numbers of layers")


def require_layers(source: HeadSource, layers: Sequence[int], num_layers: int) -> None:
    """Raises SourceError: The target has no such layers, or its embedding is meant."""
    if min(layers) < 0:
        raise SourceError(f"{source.path} reads the embedding of its target, which is not supported")
    if max(layers) >= num_layers:
        raise SourceError(
            f"{source.path} reads the states after layers {', '.join(map(str, layers))} of its target, which has "
            f"layers 0 to {num_layers - 1}; it was made for another model: name a head that was made for this one"
        )
