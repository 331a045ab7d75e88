"""One description of a decoder, which the graph builder understands, whatever source it was read from."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from edgespec.export.blocks import Floats
from edgespec.export.delta import DeltaRule
from edgespec.export.mamba import MambaRule
from edgespec.export.rotary import Rotary
from edgespec.export.routing import Routing
from edgespec.manifest.caches import Convolutions, OtherHeads, Recurrence


@dataclass(frozen=True, kw_only=True)
class Layer:
    """The differences between the attention of layers."""

    rotary: Rotary | None  # None: positions are not encoded
    sliding_window: int | None = None  # how many tokens back attention sees
    convolved: int = 0  # tokens that a short convolution in the place of attention reads, its own included
    delta: DeltaRule | None = None  # a Gated DeltaNet in the place of attention
    mamba: MambaRule | None = None  # a Mamba-2 layer in the place of attention
    has_both: bool = False  # attention too, of the same rows; their outputs are added
    # Where these differ from those of most layers: its heads of keys and values, their size, its MLP's.
    num_kv_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    keys_of: int | None = None  # the earlier layer whose keys and values it reads; it makes none
    has_values: bool = True  # False: what its keys are made of, before norm and rotation, are its values

    @property
    def recurrent(self) -> DeltaRule | MambaRule | None:
        """The sizes of its recurrence, if it has a state."""
        return self.delta or self.mamba

    @property
    def attends(self) -> bool:
        return self.has_both or not (self.convolved or self.recurrent)


class QueryGrowth(NamedTuple):
    """Queries grow with their position, by a step at each multiple of period (temperature scaling of Llama 4).

    share: How much of the logarithm of the number of periods is added to 1.
    """

    share: float
    period: int

    def scales(self, num_tokens: int) -> Floats:
        """The factor of a query at each position, [num_tokens]."""
        periods = np.arange(num_tokens) // self.period
        return (1 + self.share * np.log1p(periods)).astype(np.float32)


class GateLimit(NamedTuple):
    """Gates and ups are cut at a limit: gate · sigmoid(slope · gate) · (up + 1), as in gpt_oss."""

    slope: float
    limit: float


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Shape and constants of a decoder-only transformer with RMSNorm, rotary positions and gated MLPs.

    The weights decide which norms a layer has. granite and gemma have scales; elsewhere they are 1. A layer has
    one MLP of intermediate_size, or with routing so many experts of that size. With a layer_input_size each layer
    adds an embedding of its own of each token, of so many numbers. With norms_values each head norms its values.
    Outputs of attention and of MLPs have scales, as what a gate is made of does.
    """

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    rms_eps: float
    layers: tuple[Layer, ...]
    activation: str = "silu"  # or gelu_pytorch_tanh
    gate_limit: GateLimit | None = None
    attention_scale: float  # of query · key
    attended_scale: float = 1.0
    gate_scale: float = 1.0
    fed_scale: float = 1.0
    attention_cap: float | None = None  # c · tanh(score / c), before the mask
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float | None = None
    routing: Routing | None = None
    norms_rotated: bool = False  # norms of queries and keys come after their rotation
    query_growth: QueryGrowth | None = None
    layer_input_size: int = 0
    norms_values: bool = False

    def kv_heads(self, i: int) -> int:
        """How many heads the keys and values of a layer have."""
        return self.layers[i].num_kv_heads or self.num_kv_heads

    def head_size(self, i: int) -> int:
        """How many numbers a head of a layer has."""
        return self.layers[i].head_dim or self.head_dim

    def projections(self, i: int) -> str:
        """Which of queries, keys and values a layer makes by a matrix."""
        layer = self.layers[i]
        return "q" if layer.keys_of is not None else "qkv" if layer.has_values else "qk"

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def convolutions(self) -> Convolutions | None:
        """The rows that a cache keeps for layers with a short convolution; None where there are none."""
        layers = tuple(i for i, layer in enumerate(self.layers) if layer.convolved)
        num_before = self.layers[layers[0]].convolved - 1 if layers else 0
        return Convolutions(layers=layers, width=self.hidden_size, num_before=num_before) if layers else None

    @property
    def sharing_layers(self) -> tuple[int, ...]:
        """The layers that read the keys and values of others."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.keys_of is not None)

    @property
    def other_heads(self) -> OtherHeads | None:
        """The layers with other heads of keys and values than most; None where there are none."""
        heads = {i: (self.kv_heads(i), self.head_size(i)) for i in range(self.num_layers)}
        other = {i: own for i, own in heads.items() if own != (self.num_kv_heads, self.head_dim)}
        if not other:
            return None
        num_kv_heads, head_dim = next(iter(other.values()))
        return OtherHeads(layers=tuple(other), num_kv_heads=num_kv_heads, head_dim=head_dim)

    @property
    def is_mixed(self) -> bool:
        """True if some layers have no attention, or something else beside it."""
        return any(layer.convolved or layer.recurrent for layer in self.layers)

    @property
    def recurrence(self) -> Recurrence | None:
        """The states that a cache keeps; None where no layer has one."""
        rules = {i: layer.recurrent for i, layer in enumerate(self.layers) if layer.recurrent}
        if not rules:
            return None
        rule = next(iter(rules.values()))
        return Recurrence(
            layers=tuple(rules),
            state_shape=rule.state_shape,
            row_width=rule.row_width,
            num_before=rule.convolved - 1,
            has_attention=any(layer.recurrent and layer.has_both for layer in self.layers),
        )
