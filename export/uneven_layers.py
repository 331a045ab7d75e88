"""Layers of a source that are not all alike.

They differ in their heads and widths and share keys and values, as in Gemma 4, or have more or other than
attention: convolutions, Gated DeltaNets, Mamba-2. Some see a window of the text, or rotate nothing.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from edgespec.errors import SourceError
from edgespec.export.decoder_config import DecoderConfig, Layer
from edgespec.export.delta import delta_rule
from edgespec.export.families import FAMILIES, Family
from edgespec.export.mamba import mamba_rule
from edgespec.export.rotary import Rotary
from edgespec.export.settings import SourceSettings
from edgespec.export.tensors import Tensors

# Windows by architecture and context length of GGUF files from before they stated them.
_UNSTATED_WINDOWS = {("gemma2", 8192): 4096, ("phi3", 4096): 2047}


class LayerSize(NamedTuple):
    """The sizes of a layer; has_values: it has a matrix for values too."""

    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    has_values: bool = True


class LayerSizes(NamedTuple):
    """The sizes of all layers, how many of the last ones share keys and values, and the size of own inputs."""

    layers: Sequence[LayerSize]
    num_sharing: int
    input_size: int

    def applied(self, path: object, config: DecoderConfig) -> DecoderConfig:
        """A model with these sizes, by one whose layers are alike.

        Raises SourceError: A layer shares keys and values of an earlier one of its kind, and there is none.
        """
        first = config.num_layers - self.num_sharing
        kinds = [layer.sliding_window is not None for layer in config.layers]
        sources = {kind: i for i, kind in enumerate(kinds[:first])}
        if set(kinds) - sources.keys():
            raise SourceError(
                f"{path}: its last {self.num_sharing} layers read keys and values of earlier ones of their kind, "
                "and one kind has none; its settings are damaged"
            )
        layers = tuple(
            replace(layer, **own._asdict(), keys_of=sources[kinds[i]] if i >= first else None)
            for i, (layer, own) in enumerate(zip(config.layers, self.layers, strict=True))
        )
        return replace(config, layers=layers, layer_input_size=self.input_size, norms_values=True)


def sizes_from_huggingface(stated: SourceSettings, is_local: Sequence[bool]) -> LayerSizes:
    """The sizes by a config.json, of transformers since 5.20 or before. Raises SourceError: A number is odd."""
    num_sharing = _whole(stated, "num_kv_shared_layers", len(is_local))
    own = {int(number): sizes for number, sizes in stated.get("per_layer_config", {}).items()}  # of "05" too
    heads, inner = stated.count("num_key_value_heads"), stated.count("intermediate_size")
    is_one = bool(stated.get("attention_k_eq_v"))  # one matrix for keys and values
    full_heads = stated.count("num_global_key_value_heads", heads) if is_one else heads

    def sizes() -> Iterator[LayerSize]:
        for i, local in enumerate(is_local):
            width = inner * (1 + bool(stated.get("use_double_wide_mlp") and i >= len(is_local) - num_sharing))
            if local:
                yield LayerSize(heads, stated.count("head_dim"), width)
                continue
            at = SourceSettings(stated.path, own.get(i, {}))
            head_dim = at.count("head_dim", stated.count("global_head_dim", 512))
            yield LayerSize(at.count("num_key_value_heads", full_heads), head_dim, width, not is_one)

    return LayerSizes([*sizes()], num_sharing, _whole(stated, "hidden_size_per_layer_input"))


def sizes_from_gguf(stated: SourceSettings, is_local: Sequence[bool], tensors: Tensors) -> LayerSizes:
    """The sizes by the keys of a GGUF file, which says by its tensors which layers have no values.

    Raises SourceError: A number is missing or odd.
    """
    key = "attention.key_length"
    head_dims = {True: stated.count(f"{key}_swa", stated.count(key)), False: stated.count(key)}
    for kind, suffix in ((True, "_swa"), (False, "")):
        for other in ("attention.value_length", "rope.dimension_count"):
            if stated.count(other + suffix, head_dims[kind]) != head_dims[kind]:
                raise SourceError(
                    f"{stated.path}: {stated.prefix}{other}{suffix} is {stated.get(other + suffix)}, wanted the "
                    f"size of its heads, {head_dims[kind]}; unsupported"
                )
    heads, widths = (
        _of_layers(stated, key, len(is_local)) for key in ("attention.head_count_kv", "feed_forward_length")
    )
    has_values = [
        any(f"blk.{i}.attn_{part}.weight" in tensors for part in ("v", "qkv")) for i in range(len(is_local))
    ]
    sizes = [LayerSize(heads[i], head_dims[local], widths[i], has_values[i]) for i, local in enumerate(is_local)]
    num_sharing = _whole(stated, "attention.shared_kv_layers", len(is_local))
    return LayerSizes(sizes, num_sharing, _whole(stated, "embedding_length_per_layer_input"))


def _of_layers(stated: SourceSettings, key: str, num_layers: int) -> Sequence[int]:
    """A number of each layer; a file may state one for all."""
    found = stated.get(key)
    if not isinstance(found, list):
        return [stated.count(key)] * num_layers
    if len(found) != num_layers:
        raise SourceError(f"{stated.path}: {stated.prefix}{key} has {len(found)} numbers for {num_layers} layers")
    return [SourceSettings(stated.path, {key: value}).count(key) for value in found]


def _whole(stated: SourceSettings, key: str, end: int = 1 << 16) -> int:
    """A number that may be 0, and is below an end."""
    found = stated.get(key, 0)
    if type(found) is not int or not 0 <= found < end:
        raise SourceError(f"{stated.path}: {stated.prefix}{key} is {found!r}, wanted 0 to {end - 1}")
    return found


def kv_heads(stated: SourceSettings, family: Family, heads: int, num_layers: int) -> tuple[int, Sequence[int]]:
    """The heads of keys and values, and the layers that a GGUF file gives none, since they have no attention."""
    key = "attention.head_count_kv"
    counts = stated.get(key, heads)
    if not (family.has_convolutions or family.has_mamba or family.has_delta) or not isinstance(counts, list):
        return stated.count(key, heads), ()
    if len(counts) != num_layers:
        raise SourceError(f"{stated.path}: {stated.prefix}{key} is {counts}, wanted a number for each layer")
    attending = SourceSettings(stated.path, {key: [count for count in counts if count != 0]})
    return attending.count(key), [i for i, count in enumerate(counts) if count == 0]


def layers_by_kind(stated: SourceSettings, family: Family) -> Sequence[int]:
    """The layers that a config.json lists as those without attention."""
    names = ("conv",) if family.has_convolutions else ("mamba", "linear_attention") if family.has_mamba else ()
    return [i for i, kind in enumerate(stated.get("layer_types", ())) if kind in names]


def mixed_layers(
    stated: SourceSettings, family: Family, num_layers: int, others: Sequence[int], *, is_gguf: bool
) -> dict[int, Layer]:
    """The layers with something else than attention or beside it, by number.

    others: Those without attention, but for DeltaNets, whose layers are found here.
    """
    if family.has_delta:
        return _delta_layers(stated, num_layers, is_gguf=is_gguf)
    if not family.has_mamba:
        return _convolved(stated, others, "shortconv.l_cache" if is_gguf else "conv_L_cache")
    layers = range(num_layers) if family.has_both else others
    rule = mamba_rule(stated, is_gguf=is_gguf) if layers else None
    return dict.fromkeys(layers, Layer(rotary=None, mamba=rule, has_both=family.has_both))


def _convolved(stated: SourceSettings, layers: Sequence[int], key: str) -> dict[int, Layer]:
    """The layers with a short convolution, of the length under a key."""
    if layers and stated.count(key) == 1:
        raise SourceError(f"{stated.path}: {stated.prefix}{key} is 1, wanted 2 or more tokens")
    return {i: Layer(rotary=None, convolved=stated.count(key)) for i in layers}


def _delta_layers(stated: SourceSettings, num_layers: int, *, is_gguf: bool) -> dict[int, Layer]:
    """The layers with a Gated DeltaNet, which are listed, or all but every so many."""
    kinds, every = stated.get("layer_types"), stated.count("full_attention_interval", 4)
    # Since September 2026 llama.cpp's converter lists all blocks, also those that predict further tokens.
    key, periodic = "attention.recurrent_layers", [(i + 1) % every != 0 for i in range(num_layers)]
    listed = stated.get(key, periodic)
    if len(listed) < num_layers or not {*listed} <= {True, False}:
        raise SourceError(f"{stated.path}: {stated.prefix}{key} is {listed}, wanted true or false for each layer")
    listed = listed[:num_layers] if kinds is None else [kind == "linear_attention" for kind in kinds]
    layer = Layer(rotary=None, delta=delta_rule(stated, is_gguf=is_gguf))
    return {i: layer for i, is_recurrent in enumerate(listed) if is_recurrent}


def layers_of(
    stated: SourceSettings,
    architecture: str,
    rotaries: tuple[Rotary, Rotary],
    window: int | None,
    is_local: Sequence[bool],
    mixed: Mapping[int, Layer],
) -> tuple[Layer, ...]:
    """All layers of a source; rotaries are those of layers that see all tokens, and of those that see a window."""
    full, local = Layer(rotary=rotaries[0]), Layer(rotary=rotaries[1], sliding_window=window)
    without_rotary = _layers_without_rotary(stated, architecture, is_local, window)
    layers = [local if sees_window else full for sees_window in is_local]
    turned = [replace(layer, rotary=None) if i in without_rotary else layer for i, layer in enumerate(layers)]
    return tuple(
        replace(own, rotary=layer.rotary) if (own := mixed.get(i, layer)).has_both else own
        for i, layer in enumerate(turned)
    )


def local_layers(stated: SourceSettings, family: Family, pattern: Any, num_layers: int) -> list[bool]:
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


def window_from_gguf(stated: SourceSettings, family: Family, architecture: str, context_length: int) -> int | None:
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
