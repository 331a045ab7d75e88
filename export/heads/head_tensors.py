"""Tensors of a head by their names in its files and their roles in its graphs, and its settings, both checked.

Sizes and constants of a head's own layers come from its settings and, where these are wrong, from its tensors.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from edgespec.errors import SourceError
from edgespec.export.decoder_config import DecoderConfig, Layer
from edgespec.export.heads.head_source import HeadSource, nested
from edgespec.export.roles import LAYER_TENSORS, PARTS
from edgespec.export.rotary import rotaries_from_huggingface
from edgespec.export.settings import SourceSettings
from edgespec.export.sources import LoadedSource
from edgespec.export.tensors import StoredTensor, Tensors
from edgespec.system.tables import read_table

PUBLISHED = read_table(__file__, "published.toml")
# Derived constants, and copies of the target's that only training reads.
_IGNORED = ("rotary_emb.inv_freq", "verifier_norm.weight", "verifier_lm_head.weight")
_LAYER_ROLES = (*"qkvo", "q_bias", "k_bias", "v_bias", "q_norm", "k_norm", "input_norm", "mlp_norm", *PARTS)
LAYER_NAMES = {role: LAYER_TENSORS[role][1] for role in _LAYER_ROLES}
_LAYER_NEEDS = ("q", "k", "v", "o", "mlp_norm", "gate", "up", "down")
_TOGETHER = (("q_bias", "k_bias", "v_bias"), ("q_norm", "k_norm"))  # a layer has all of them or none

_ACTIVATIONS = ("silu", "gelu_pytorch_tanh")


class Reader:
    """Takes the tensors of a head by name; what nobody took at the end is what no graph would use."""

    def __init__(self, source: HeadSource) -> None:
        self.source = source
        self._tensors = {name.removeprefix("model."): tensor for name, tensor in source.tensors.items()}
        self._taken: set[str] = set()

    def optional(self, name: str, rows: int | None = None, *, is_needed: object = False) -> StoredTensor | None:
        """A matrix or vector that a head may lack: None then, or where it is_needed the errors of take."""
        return self.take(name, rows) if is_needed or name in self._tensors else None

    def take(self, name: str, rows: int | None = None, columns: int | None = None) -> StoredTensor:
        """A matrix, or a vector, which has one row; of any number of rows and columns unless they are given.

        Raises SourceError: It is missing, or has another shape.
        """
        if (found := self._tensors.get(name)) is None:
            raise SourceError(
                f"{self.source.path} has no tensor {name}, which a head of its kind needs; it is incomplete or of "
                "a kind that is not read"
            )
        shape = found.rows if rows is None else rows, found.columns if columns is None else columns
        require_shapes(self.source, {name: found}, {name: shape})
        self._taken.add(name)
        return found

    def layer(self, prefix: str, i: int, needs: Sequence[str] = ()) -> dict[str, StoredTensor]:
        """The roles of a decoder layer whose tensors begin with a prefix.

        needs: Those that there must be, beside what each layer needs.

        Raises SourceError: One that is needed is missing, or one of several that belong together.
        """
        found = {}
        for role, name in LAYER_NAMES.items():
            is_needed = role in _LAYER_NEEDS or role in needs
            if (tensor := self.optional(prefix + name, is_needed=is_needed)) is not None:
                found[f"{i}.{role}"] = tensor
        for roles in _TOGETHER:
            missing = [role for role in roles if f"{i}.{role}" not in found]
            if 0 < len(missing) < len(roles):
                self.take(prefix + LAYER_NAMES[missing[0]])
        return found

    def layers(self, first: str = "layers.0.", needs: Sequence[str] = ()) -> tuple[dict[str, StoredTensor], int]:
        """The roles of all decoder layers, of which there has to be one, and how many there are.

        first: What the names of the first layer begin with.

        Raises SourceError: As layer does.
        """
        found, number = self.layer(first, 0, needs), 1
        while self.has_layer(f"layers.{number}."):
            found |= self.layer(f"layers.{number}.", number, needs)
            number += 1
        return found, number

    def has_layer(self, prefix: str) -> bool:
        return any(name.startswith(prefix) for name in self._tensors)

    def require_all_taken(self, kind: str, pattern: str = "") -> None:
        """Raises SourceError: A tensor would not be used, of those whose names begin with a pattern."""
        left = [name for name in self._tensors if re.match(pattern, name) and name not in self._taken]
        if left := [name for name in left if not name.endswith(_IGNORED)]:
            raise SourceError(
                f"{self.source.path} has tensor {left[0]}, which no {kind} head uses, or only with others that "
                "are missing; it is incomplete or of a kind that is not read"
            )


def unpaired_heads(tensors: Tensors, config: DecoderConfig) -> dict[str, StoredTensor]:
    """Tensors of layers that rotate values (2i, 2i + 1) together, for graphs that rotate (i, i + head_dim / 2)."""
    order = np.arange(config.head_dim).reshape(-1, 2).T.reshape(-1)
    found = dict(tensors)
    for role, tensor in tensors.items():
        part, _, kind = role.rpartition(".")[2].partition("_")
        if part in ("q", "k") and kind in ("", "bias", "norm"):
            num_rows = tensor.rows if not kind else tensor.columns  # a vector is one row
            rows = (np.arange(0, num_rows, config.head_dim)[:, None] + order).reshape(-1)
            found[role] = replace(tensor, rows=num_rows, columns=tensor.columns if not kind else 1, row_order=rows)
    return found


def require_shapes(source: HeadSource, tensors: Tensors, shapes: Mapping[str, tuple[int, int]]) -> None:
    """Raises SourceError: A tensor has another shape than its role asks for."""
    for role, tensor in tensors.items():
        wanted = shapes.get(role) or shapes.get(role.partition(".")[2])
        if wanted is not None and (tensor.rows, tensor.columns) != wanted:
            raise SourceError(
                f"{source.path}: tensor {tensor.name} is {tensor.rows}×{tensor.columns}, wanted "
                f"{wanted[0]}×{wanted[1]}; the head was made for another target, or is damaged"
            )


def require_hidden_size(source: HeadSource, target: LoadedSource, size: int) -> None:
    """Raises SourceError: A head reads hidden states of another size than its target's."""
    if size != target.config.hidden_size:
        raise SourceError(
            f"{source.path} is a head for hidden states of {size} numbers, and those of {target.source.name} have "
            f"{target.config.hidden_size}; it was made for another model: name a head that was made for this one"
        )


def count_names(source: HeadSource, pattern: str) -> int:
    """How many numbers from 0 on the tensors have in a pattern with one group."""
    found = {int(match[1]) for name in source.tensors if (match := re.fullmatch(pattern, name))}
    return next(i for i in range(len(found) + 1) if i not in found)


def layer_settings(source: HeadSource, inner: str | None = None) -> SourceSettings:
    """The settings of the layers, with those that transformers assumes; inner is the object that holds them.

    Raises SourceError: They are those of another kind of model, or state what has no place in the graph.
    """
    stated = dict(nested(source.settings, inner) if inner else source.settings.values)
    kind = str(stated.get("model_type", "llama"))
    assumed = PUBLISHED["assumed"].get(kind, PUBLISHED["assumed"]["llama"])
    given = {key: value for key, value in stated.items() if value is not None}
    settings = SourceSettings(source.settings.path, {**assumed, **given})
    if (activation := settings.get("hidden_act", "silu")) not in _ACTIVATIONS:
        raise SourceError(f"{settings.path}: hidden_act is {activation}; known are {', '.join(_ACTIVATIONS)}")
    if settings.get("kv_lora_rank"):
        raise SourceError(f"{settings.path}: the head has latent attention (kv_lora_rank), which is not supported")
    if settings.get("mlp_bias"):
        raise SourceError(f"{settings.path}: mlp_bias is true, which is not supported")
    return settings


def layers_config(
    settings: SourceSettings, tensors: Tensors, target: LoadedSource, num_layers: int
) -> DecoderConfig:
    """The description of the layers whose tensors are given, for texts as long as the target's.

    The numbers of layers and of inner values are those of the tensors, since settings state others.

    Raises SourceError: Sizes and tensors do not fit.
    """
    q, k, o = (tensors[f"0.{part}"] for part in "qko")
    heads = settings.count("num_attention_heads")
    head_dim = settings.count("head_dim", max(1, q.rows // heads))
    kv_heads = settings.count("num_key_value_heads", heads)
    if q.rows == 2 * heads * head_dim:
        raise SourceError(f"{settings.path}: tensor {q.name} has gates beside its queries, which is not supported")
    if q.rows != heads * head_dim or k.rows != kv_heads * head_dim:
        raise SourceError(
            f"{settings.path} states {heads} heads of {head_dim} values and {kv_heads} of keys; tensors "
            f"{q.name} and {k.name} have {q.rows} and {k.rows} rows; the file is damaged"
        )
    if str(kind := settings.get("model_type", "")).startswith("gemma4"):
        raise SourceError(
            f"{settings.path} has layers of {kind}, which norm values, scale no scores and turn a proportional "
            "part of each head; heads with layers of llama and qwen3 are read"
        )
    longest = settings.count("max_position_embeddings")
    stated = _whole_rotation(settings)
    rotary, _ = rotaries_from_huggingface(stated, head_dim, longest, None, is_local_plain=False)
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
        layers=tuple(Layer(rotary=rotary, sliding_window=window) for window in _windows(settings, num_layers)),
        activation=str(settings.get("hidden_act", "silu")),
        attention_scale=head_dim**-0.5,
        logit_scale=settings.number("logit_scale", 1.0),
    )


def _whole_rotation(settings: SourceSettings) -> SourceSettings:
    """The settings without a share of each head that is rotated.

    Many heads have that of their target in a copy of its settings, and transformers' llama and qwen3, as which
    heads are trained, rotate whole heads all the same, but where positions are scaled.
    """
    values = dict(settings.values)
    values.pop("partial_rotary_factor", None)
    for key in ("rope_parameters", "rope_scaling"):
        rope = values.get(key)
        if isinstance(rope, dict) and rope.get("rope_type", rope.get("type", "default")) == "default":
            values[key] = {name: value for name, value in rope.items() if name != "partial_rotary_factor"}
    return replace(settings, values=values)


def _windows(settings: SourceSettings, num_layers: int) -> list[int | None]:
    """How many tokens each layer sees, the newest included; None for all. As transformers' qwen3 reads it.

    Raises SourceError: The settings contradict each other.
    """
    kinds, can_slide = settings.get("layer_types"), settings.get("use_sliding_window", True) is not False
    if kinds is None:
        first = settings.get("max_window_layers", 28) if settings.get("use_sliding_window") else num_layers
        kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    # Some lists are copies of the target's; a layer that has keys is no linear attention.
    if len(kinds) < num_layers or not {*kinds} <= {"sliding_attention", "full_attention", "linear_attention"}:
        raise SourceError(
            f"{settings.path}: layer_types is {kinds}, wanted sliding_attention or full_attention for each of "
            f"{num_layers} layers"
        )
    sees_window = [can_slide and kind == "sliding_attention" for kind in kinds[:num_layers]]
    return [settings.count("sliding_window") if sees else None for sees in sees_window]


def read_numbers(source: HeadSource, key: str, found: Any) -> list[int]:
    """The value of a setting that lists layers. Raises SourceError: It is something else."""
    if isinstance(found, list) and found and all(type(number) is int for number in found):
        return found
    raise SourceError(f"{source.settings.path}: {key} is {found!r}, wanted numbers of layers")


def read_mask_token(source: HeadSource, found: Any, target: LoadedSource) -> int:
    """The token that stands for those that are not known yet. Raises SourceError: It is none of the target's."""
    if type(found) is int and 0 <= found < target.config.vocab_size:
        return found
    raise SourceError(
        f"{source.settings.path}: mask_token_id is {found!r}, wanted a token id below {target.config.vocab_size}"
    )


def require_layers(source: HeadSource, layers: Sequence[int], num_layers: int) -> None:
    """Raises SourceError: The target has no such layers, or its embedding is meant."""
    if min(layers) < 0:
        raise SourceError(f"{source.path} reads the embedding of its target, which is not supported")
    if max(layers) >= num_layers:
        raise SourceError(
            f"{source.path} reads the states after layers {', '.join(map(str, layers))} of its target, which has "
            f"layers 0 to {num_layers - 1}; it was made for another model: name a head that was made for this one"
        )
