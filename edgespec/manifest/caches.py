"""Caches of a graph as its manifest states them: keys and values, rows of convolutions, recurrent states."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Annotated

from msgspec import Meta

KEPT_STATES = 4  # of a text: the last two, and two behind passes over a part of a prompt
CACHE_FORMS = ("shared_buffer", "growing", "static")
CACHE_DTYPES = {"float32": 4, "float16": 2, "uint16": 2}  # bytes of a value

# Bounds that no real model reaches. A file that was edited by hand or by an attacker may state larger numbers, and
# memory would be reserved for these before the graph is seen to have fewer.
Size = Annotated[int, Meta(ge=1, le=1 << 12)]  # heads, and numbers in a head of attention
Layers = Annotated[int, Meta(ge=0, le=1 << 12)]
Width = Annotated[int, Meta(ge=1, le=1 << 16)]  # numbers in a hidden state
Index = Annotated[int, Meta(ge=0)]


@dataclass(frozen=True, kw_only=True)
class Convolutions:
    """Layers with a short convolution in the place of attention; what it reads is kept as a row for each token.

    width: Numbers in a row.
    num_before: How many tokens before its own the convolution reads.
    """

    layers: tuple[Index, ...]
    width: Width
    num_before: Size

    @property
    def names(self) -> list[tuple[str, str]]:
        """Pairs for the layers: the graph's input of rows before a pass, and its output of new ones."""
        return [row_names(layer) for layer in self.layers]


@dataclass(frozen=True, kw_only=True)
class Recurrence:
    """Layers with a recurrent state, which a pass takes on from token to token.

    A pass takes a state, the rows of the tokens behind it and of a few before, and new tokens. It gives the state
    behind the last token that the text has for certain, and the rows from a few before that on.

    state_shape: Of the state of a layer, [heads, ...].
    row_width: Numbers in the row of a token, from which its step of the recurrence is worked out again.
    num_before: How many rows before a state belong to it.
    has_attention: These layers have keys and values too.
    """

    layers: tuple[Index, ...]
    state_shape: tuple[Size, ...]
    row_width: Width
    num_before: Size
    has_attention: bool = False

    @property
    def numbers(self) -> int:
        """How many numbers the states of all layers have."""
        return len(self.layers) * prod(self.state_shape)

    @property
    def names(self) -> list[tuple[str, str]]:
        """Pairs of the graph's input and output, two for each layer: for its state, then for its rows."""
        return [pair for layer in self.layers for pair in (state_names(layer), row_names(layer))]


@dataclass(frozen=True, kw_only=True)
class OtherHeads:
    """Layers whose keys and values have other heads than those of most layers: how many, and of what size."""

    layers: tuple[Index, ...]
    num_kv_heads: Size
    head_dim: Size


def state_names(layer: int) -> tuple[str, str]:
    """Names of the recurrent state that a pass reads, and of that which it gives."""
    return f"past_state.{layer}", f"present_state.{layer}"


NUM_SETTLED = "num_settled"  # int64 [1], an input of a graph with a recurrence: rows that go into the given state


def row_names(layer: int) -> tuple[str, str]:
    """Names of the rows of a short convolution that a pass reads, and of those that it makes."""
    return f"past_rows.{layer}", f"present_rows.{layer}"


@dataclass(frozen=True, kw_only=True)
class KVCache:
    """Keys and values of each layer, [1, num_kv_heads, positions, head_dim].

    form: shared_buffer, where one buffer longer than its content is bound as past and present, and a shorter total
        length rewinds it; growing, where present is past with the new positions appended; or static, where past
        is as long as the context, without the batch, and present holds the new positions alone.
    dtype: A static cache may be of uint16, quantized by scales that are in the graph.
    num_layers: All layers of the model; 0 for a drafting head without attention, which has no cache.
    convolutions: The layers among them that have a row for each token in place of keys and values.
    recurrence: Those that have a state.
    other_heads: Those that have other heads than num_kv_heads of head_dim.
    sharing_layers: Those that read the keys and values of an earlier layer, and have none.
    """

    form: str = "shared_buffer"
    num_layers: Layers
    num_kv_heads: Size
    head_dim: Size
    dtype: str = "float32"
    convolutions: Convolutions | None = None
    recurrence: Recurrence | None = None
    other_heads: OtherHeads | None = None
    sharing_layers: tuple[Index, ...] = ()

    @property
    def why_no_trees(self) -> str | None:
        """Why a graph with this cache runs no trees of guesses; None where it may."""
        if self.convolutions is None and self.recurrence is None:
            return None
        return "has layers of another kind than attention, which run chains of guesses, not trees"

    @cached_property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers that have keys and values."""
        others = {*self.sharing_layers}
        if self.convolutions:
            others |= {*self.convolutions.layers}
        if self.recurrence and not self.recurrence.has_attention:
            others |= {*self.recurrence.layers}
        return tuple(layer for layer in range(self.num_layers) if layer not in others)

    @cached_property
    def heads(self) -> Mapping[int, tuple[int, int]]:
        """By layer that has keys and values, how many heads they have, and how many numbers a head has."""
        heads = dict.fromkeys(self.attention_layers, (self.num_kv_heads, self.head_dim))
        if other := self.other_heads:
            heads |= dict.fromkeys(heads.keys() & {*other.layers}, (other.num_kv_heads, other.head_dim))
        return heads

    @cached_property
    def head_dims(self) -> set[int]:
        """The sizes of heads that there are."""
        return {head_dim for _, head_dim in self.heads.values()} or {self.head_dim}

    @cached_property
    def numbers_per_token(self) -> int:
        rows = len(self.convolutions.layers) * self.convolutions.width if self.convolutions else 0
        return 2 * sum(map(prod, self.heads.values())) + rows

    @cached_property
    def bytes_per_token(self) -> int:
        return self.numbers_per_token * CACHE_DTYPES[self.dtype]

    @cached_property
    def recurrent_bytes(self) -> int:
        """The bytes of the recurrent states that are kept, however long a text is."""
        return KEPT_STATES * self.recurrence.numbers * CACHE_DTYPES[self.dtype] if self.recurrence else 0

    def of_layers(self, kept: Sequence[int]) -> "KVCache":
        """The cache of a model that has some of the layers alone, numbered anew."""

        def numbered(layers: Sequence[int]) -> tuple[int, ...]:
            return tuple(number for number, layer in enumerate(kept) if layer in layers)

        parts = {
            name: replace(part, layers=numbered(part.layers))
            for name in ("convolutions", "recurrence", "other_heads")
            if (part := getattr(self, name)) is not None
        }
        return replace(self, num_layers=len(kept), sharing_layers=numbered(self.sharing_layers), **parts)
