"""The layers of a source that have more or other than attention: convolutions, Gated DeltaNets, Mamba-2."""

from collections.abc import Sequence
from typing import Any

from edgespec.errors import SourceError
from edgespec.export.decoder_config import Layer
from edgespec.export.delta import DeltaRule, layers_every, rule_from_gguf, rule_from_huggingface
from edgespec.export.families import Family
from edgespec.export.mamba import MambaRule, mamba_from_gguf, mamba_from_huggingface
from edgespec.export.settings import SourceSettings


def kv_heads(stated: SourceSettings, family: Family, heads: int, num_layers: int) -> tuple[int, Sequence[int]]:
    """The heads of keys and values, and the layers that a GGUF file gives none, since they have no attention."""
    key = "attention.head_count_kv"
    counts = stated.get(key, heads)
    if not (family.has_convolutions or family.has_mamba) or not isinstance(counts, list):
        return stated.count(key, heads), ()
    if len(counts) != num_layers:
        raise SourceError(f"{stated.path}: {stated.prefix}{key} is {counts}, wanted a number for each layer")
    attending = SourceSettings(stated.path, {key: [count for count in counts if count != 0]})
    return attending.count(key), [i for i, count in enumerate(counts) if count == 0]


def mixed_from_gguf(
    stated: SourceSettings, family: Family, num_layers: int, others: Sequence[int]
) -> dict[int, Layer]:
    """The layers without attention, some of which have no heads of keys and values."""
    if family.has_delta:
        return _delta_layers(stated, num_layers, rule_from_gguf(stated))
    if family.has_mamba and (others or family.has_both):
        return _mamba_layers(family, num_layers, others, mamba_from_gguf(stated))
    return _convolved(stated, others, "shortconv.l_cache")


def mixed_from_huggingface(
    stated: SourceSettings, family: Family, num_layers: int, kinds: Any
) -> dict[int, Layer]:
    """The layers without attention, by the kinds of all layers."""
    if family.has_delta:
        return _delta_layers(stated, num_layers, rule_from_huggingface(stated))
    if family.has_convolutions:
        return _convolved(stated, [i for i, kind in enumerate(kinds) if kind == "conv"], "conv_L_cache")
    names = ("mamba", "linear_attention") if family.has_mamba else ()
    others = [i for i, kind in enumerate(kinds or ()) if kind in names]
    if not (others or family.has_both):
        return {}
    return _mamba_layers(family, num_layers, others, mamba_from_huggingface(stated))


def _mamba_layers(family: Family, num_layers: int, others: Sequence[int], rule: MambaRule) -> dict[int, Layer]:
    """The Mamba-2 layers by number: those without attention, or all where a family has both in each."""
    layers = range(num_layers) if family.has_both else others
    return dict.fromkeys(layers, Layer(rotary=None, mamba=rule, has_both=family.has_both))


def _convolved(stated: SourceSettings, layers: Sequence[int], key: str) -> dict[int, Layer]:
    """The layers with a short convolution, of the length under a key."""
    if layers and stated.count(key) == 1:
        raise SourceError(f"{stated.path}: {stated.prefix}{key} is 1, wanted 2 or more tokens")
    return {i: Layer(rotary=None, convolved=stated.count(key)) for i in layers}


def _delta_layers(stated: SourceSettings, num_layers: int, rule: DeltaRule) -> dict[int, Layer]:
    """The layers with a Gated DeltaNet, which are listed, or all but every so many."""
    kinds = stated.get("layer_types")
    every = layers_every(num_layers, stated.count("full_attention_interval", 4))
    numbers = every if kinds is None else (i for i, kind in enumerate(kinds) if kind == "linear_attention")
    return dict.fromkeys(numbers, Layer(rotary=None, delta=rule))
