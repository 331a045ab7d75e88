"""Gated DeltaNet layers (Yang et al., arXiv:2412.06464), as in Qwen3.5: their sizes, and their sums in numpy."""

from dataclasses import dataclass

import numpy as np

from edgespec.errors import SourceError
from edgespec.export.blocks import Floats
from edgespec.export.settings import SETTING_NAMES, SourceSettings
from edgespec.export.tensors import Index

EPS = 1e-6  # of the lengths of queries and keys


@dataclass(frozen=True, kw_only=True)
class DeltaRule:
    """Sizes of a layer whose state takes in each token's value where its key points, and decays.

    convolved: Tokens that the short convolution of queries, keys and values reads, its own included.
    is_gguf: The decay is no logarithm. is_apart: Value heads with the same key are num_key_heads apart, and no
        neighbours.
    """

    num_key_heads: int
    num_value_heads: int
    key_size: int
    value_size: int
    convolved: int
    is_gguf: bool
    is_apart: bool

    @property
    def num_mixed(self) -> int:
        """Numbers of a token that the convolution runs over: query, key and value of all heads."""
        return 2 * self.num_key_heads * self.key_size + self.num_value_heads * self.value_size

    @property
    def row_width(self) -> int:
        """Those, and of each value head the numbers that decay and the share of the new value are made of."""
        return self.num_mixed + 2 * self.num_value_heads

    @property
    def state_shape(self) -> tuple[int, int, int]:
        return self.num_value_heads, self.key_size, self.value_size

    def shapes(self, hidden: int) -> dict[str, tuple[int, int]]:
        """Rows and columns of a layer's tensors by role."""
        heads, values = self.num_value_heads, self.num_value_heads * self.value_size
        return {
            "delta_qkv": (self.num_mixed, hidden), "delta_z": (values, hidden), "delta_out": (hidden, values),
            "delta_a": (heads, hidden), "delta_b": (heads, hidden), "delta_conv": (self.num_mixed, self.convolved),
            "delta_decay": (1, heads), "delta_shift": (1, heads), "delta_gain": (1, self.value_size),
        }  # fmt: skip

    def joined(self) -> dict[str, dict[str, Index]]:
        """The rows of parts by role in the matrices of Qwen3-Next, which have them key head by key head."""
        keys, times = self.num_key_heads, self.num_value_heads // self.num_key_heads

        def rows(*sizes: int) -> list[Index]:
            heads = np.arange(keys * sum(sizes)).reshape(keys, -1)
            return [part.reshape(-1) for part in np.split(heads, np.cumsum(sizes)[:-1], axis=1)]

        *mixed, z = rows(self.key_size, self.key_size, times * self.value_size, times * self.value_size)
        b, a = rows(times, times)
        return {"qkvz": {"qkv": np.concatenate(mixed), "z": z}, "ba": {"b": b, "a": a}}

    def decay(self, stored: Floats) -> Floats:
        """The factor of decay, which is below 0."""
        return stored if self.is_gguf else -np.exp(stored)

    def expanded(self, heads: Floats) -> Floats:
        """Queries or keys as one for each value head, [num_tokens, num_value_heads, key_size]."""
        times = self.num_value_heads // self.num_key_heads
        return np.tile(heads, (1, times, 1)) if self.is_apart else np.repeat(heads, times, axis=1)


def delta_rule(stated: SourceSettings, *, is_gguf: bool) -> DeltaRule:
    """The sizes by the settings of a source. Raises SourceError: One is missing, or they contradict each other."""
    names = SETTING_NAMES["gguf" if is_gguf else "huggingface"]["delta"]
    num_keys, num_values, key_size, value_size, convolved = map(stated.count, names)
    if num_values % num_keys or convolved < 2:
        raise SourceError(
            f"{stated.path} has layers of {num_keys} key heads, {num_values} value heads and a convolution over "
            f"{convolved} tokens; wanted a multiple of the key heads, and 2 tokens or more"
        )
    return DeltaRule(
        num_key_heads=num_keys,
        num_value_heads=num_values,
        key_size=key_size,
        value_size=value_size // num_values if is_gguf else value_size,
        convolved=convolved,
        is_gguf=is_gguf,
        is_apart=is_gguf and not stated.prefix.startswith("qwen3next"),
    )


def recur(rule: DeltaRule, mixed: Floats, decay: Floats, share: Floats) -> Floats:
    """The value that each token reads from the state, [num_tokens, num_value_heads, value_size].

    Args:
        mixed: Queries, keys and values, [num_tokens, num_mixed].
        decay: Logarithm of what is kept of the state, [num_tokens, num_value_heads].
        share: How much of a new value is taken in, of the same shape.
    """
    num_tokens, keys = len(mixed), rule.num_key_heads * rule.key_size
    queries, keys_, values = np.split(mixed, [keys, 2 * keys], axis=-1)
    q, k = (rule.expanded(_unit(y.reshape(num_tokens, -1, rule.key_size))) for y in (queries, keys_))
    v = values.reshape(num_tokens, -1, rule.value_size)
    state = np.zeros((rule.num_value_heads, rule.key_size, rule.value_size), np.float32)
    read = []
    for at in range(num_tokens):
        state = state * np.exp(decay[at])[:, None, None]
        wrong = v[at] - np.einsum("hkv,hk->hv", state, k[at])
        state = state + k[at][:, :, None] * (share[at][:, None] * wrong)[:, None, :]
        read.append(np.einsum("hkv,hk->hv", state, q[at]) * np.float32(rule.key_size**-0.5))
    return np.stack(read)


def _unit(heads: Floats) -> Floats:
    found: Floats = heads / np.sqrt(np.square(heads).sum(axis=-1, keepdims=True) + np.float32(EPS))
    return found
