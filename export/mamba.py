"""Mamba-2 layers (Dao and Gu, arXiv:2405.21060), as in Granite 4 and Falcon-H1: sizes, and sums in numpy."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from edgespec.errors import SourceError
from edgespec.export.blocks import Floats
from edgespec.export.settings import SETTING_NAMES, SourceSettings

_NO_LIMITS = ([0, float("inf")], [0, {"__float__": "Infinity"}])  # of time steps


class MambaScales(NamedTuple):
    """Factors of the parts that a layer projects its input to, and of its output."""

    gate: float = 1.0
    values: float = 1.0
    keys: float = 1.0
    queries: float = 1.0
    steps: float = 1.0
    output: float = 1.0


@dataclass(frozen=True, kw_only=True)
class MambaRule:
    """Sizes of a layer whose state takes in each token's values where its key points, and decays.

    num_groups: Neighbouring heads form groups that have a key and a query in common.
    state_size: Numbers in a key.
    head_size: Values of a head.
    convolved: Tokens that the short convolution of values, keys and queries reads, its own included.
    is_gguf: The decay is no logarithm.
    """

    num_heads: int
    num_groups: int
    state_size: int
    head_size: int
    convolved: int
    is_gguf: bool
    scales: MambaScales

    @property
    def num_values(self) -> int:
        return self.num_heads * self.head_size

    @property
    def num_mixed(self) -> int:
        """Numbers of a token that the convolution runs over: values of heads, keys and queries of groups."""
        return self.num_values + 2 * self.num_groups * self.state_size

    @property
    def row_width(self) -> int:
        """Those, and of each head the number that its time step is made of."""
        return self.num_mixed + self.num_heads

    @property
    def state_shape(self) -> tuple[int, int, int]:
        return self.num_heads, self.state_size, self.head_size

    def shapes(self, hidden: int) -> dict[str, tuple[int, int]]:
        """Rows and columns of a layer's tensors by role."""
        heads, values = self.num_heads, self.num_values
        return {
            "mamba_z": (values, hidden), "mamba_mixed": (self.num_mixed, hidden), "mamba_dt": (heads, hidden),
            "mamba_conv": (self.num_mixed, self.convolved), "mamba_conv_bias": (1, self.num_mixed),
            "mamba_decay": (1, heads), "mamba_shift": (1, heads), "mamba_skip": (1, heads),
            "mamba_gain": (1, values), "mamba_out": (hidden, values),
        }  # fmt: skip

    def convolution(self, stored: Floats) -> Floats:
        """Weights of the convolution with the scales of what it runs over."""
        size, each = self.num_groups * self.state_size, (self.scales.values, self.scales.keys, self.scales.queries)
        by_channel = np.repeat(np.array(each, np.float32), [self.num_values, size, size])
        scaled: Floats = stored.reshape(-1, self.convolved) * by_channel[:, None]
        return scaled

    def decay(self, stored: Floats) -> Floats:
        """The factor of decay, which is below 0."""
        return stored if self.is_gguf else -np.exp(stored)


def mamba_rule(stated: SourceSettings, *, is_gguf: bool) -> MambaRule:
    """The sizes by the settings of a source.

    Raises SourceError: One is missing, they contradict each other, time steps have limits, or a norm comes before
        its gate.
    """
    scales = MambaScales()
    if is_gguf:
        heads, values, groups, state_size, convolved = map(stated.count, SETTING_NAMES["gguf"]["mamba"])
        head_size = values // heads
    else:
        _require_plain(stated)
        usual = stated.count("mamba_expand", 2) * stated.count("hidden_size")
        heads, values = stated.count("mamba_n_heads"), stated.count("mamba_d_ssm", usual)
        groups, convolved = stated.count("mamba_n_groups", 1), stated.count("mamba_d_conv", 4)
        is_auto = stated.get("mamba_d_head", "auto") == "auto"
        head_size = values // heads if is_auto else stated.count("mamba_d_head")
        state_size, scales = stated.count("mamba_d_state"), _scales(stated)
    if heads * head_size != values or heads % groups or convolved < 2:
        raise SourceError(
            f"{stated.path} has Mamba layers of {values} values, {heads} heads, {groups} groups, a convolution "
            f"over {convolved} tokens; wanted whole heads, a multiple of the groups, and 2 tokens or more"
        )
    return MambaRule(
        num_heads=heads,
        num_groups=groups,
        state_size=state_size,
        head_size=head_size,
        convolved=convolved,
        is_gguf=is_gguf,
        scales=scales,
    )


def _require_plain(stated: SourceSettings) -> None:
    if (limits := stated.get("time_step_limit")) is not None and [*limits] not in _NO_LIMITS:
        raise SourceError(f"{stated.path} sets time_step_limit to {limits}; its layers are read without limits")
    if stated.get("mamba_rms_norm") and stated.get("mamba_norm_before_gate", True):
        raise SourceError(f"{stated.path} norms what Mamba layers give before its gate, which is not supported")


def _scales(stated: SourceSettings) -> MambaScales:
    own, common = stated.get("ssm_multipliers", [1.0] * 5), stated.number("ssm_in_multiplier", 1.0)
    if not isinstance(own, list) or len(own) != 5 or not all(isinstance(each, float | int) for each in own):
        raise SourceError(f"{stated.path}: ssm_multipliers is {own!r}, wanted five numbers")
    gate, values, keys, queries, steps = (common * each for each in own)
    return MambaScales(gate, values, keys, queries, steps, stated.number("ssm_out_multiplier", 1.0))


def scan(rule: MambaRule, mixed: Floats, steps: Floats, factor: Floats) -> Floats:
    """The values that each token reads from the state, [num_tokens, num_heads, head_size].

    Args:
        mixed: Values, keys and queries, [num_tokens, num_mixed].
        steps: How far a token takes the state on, [num_tokens, num_heads].
        factor: Of decay, [num_heads].
    """
    size = rule.num_groups * rule.state_size
    own, keys, queries = np.split(mixed, [rule.num_values, rule.num_values + size], axis=-1)
    values = own.reshape(len(mixed), rule.num_heads, rule.head_size)
    times = rule.num_heads // rule.num_groups
    k, q = (np.repeat(y.reshape(len(y), rule.num_groups, -1), times, axis=1) for y in (keys, queries))
    state = np.zeros(rule.state_shape, np.float32)
    read = []
    for at in range(len(mixed)):
        kept = np.exp(steps[at] * factor)[:, None, None]
        state = state * kept + k[at][:, :, None] * (values[at] * steps[at][:, None])[:, None, :]
        read.append(np.einsum("hkv,hk->hv", state, q[at]))
    return np.stack(read)
