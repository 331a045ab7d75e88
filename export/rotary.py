"""Rotary positions (Su et al., arXiv:2104.09864) from the settings of a source, scaled as transformers does.

longrope has two sets of factors: one for sequences up to the length of the first training, one for longer ones.
transformers switches when a sequence outgrows that length. A table of cosines cannot switch, so an export takes
the short factors and that length as its context: every sequence in it is exact.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from edgespec.errors import SourceError
from edgespec.export.blocks import Floats
from edgespec.export.settings import Settings
from edgespec.export.tensors import StoredTensor


@dataclass(frozen=True, eq=False)
class Rotary:
    """Frequencies, [head_dim / 2], and the factor of cosines and sines."""

    inv_freq: Floats
    scale: float = 1.0
    max_positions: int | None = None  # that the frequencies are right for, if not all


def plain_rotary(theta: float, head_dim: int) -> Rotary:
    exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    return Rotary(np.exp(-exponents * math.log(theta)).astype(np.float32))


def rotary_from_gguf(
    stated: Settings, tensors: Mapping[str, StoredTensor], head_dim: int, context_length: int
) -> Rotary:
    if stated.get("rope.dimension_count", head_dim) != head_dim:
        raise SourceError(f"{stated.path} rotates only a part of each head, which is not supported")
    kind, short = stated.get("rope.scaling.type", "none"), tensors.get("rope_factors_short.weight")
    if kind not in ("none", "linear") and not (kind == "longrope" and short is not None):
        raise SourceError(
            f"{stated.path} uses rotary scaling '{kind}'; known are none, linear, llama3 and longrope"
        )
    inv_freq = plain_rotary(stated.number("rope.freq_base", 1e4), head_dim).inv_freq
    if kind == "linear":
        inv_freq /= np.float32(stated.number("rope.scaling.factor"))
    if (factors := tensors.get("rope_freqs.weight")) is not None:
        inv_freq /= factors.vector()
    if short is None:
        return Rotary(inv_freq, stated.number("rope.scaling.attn_factor", 1.0))
    trained = stated.count("rope.scaling.original_context_length")
    scale = stated.number("rope.scaling.attn_factor", _longrope_scale(context_length / trained, trained))
    return _longrope(stated.path, inv_freq, short.vector(), scale, trained)


def rotaries_from_huggingface(stated: Settings, head_dim: int, context_length: int) -> tuple[Rotary, Rotary]:
    """The rotaries of layers that see all tokens and of those that see a window, which differ in gemma3."""
    rope = stated.get("rope_parameters") or stated.get("rope_scaling") or {}
    above = {
        "rope_theta": stated.get("rope_theta", 1e4),
        "original_max_position_embeddings": stated.get("original_max_position_embeddings"),
        "partial_rotary_factor": stated.get("partial_rotary_factor"),
    }
    within = {key: value for key, value in rope.get("full_attention", rope).items() if value is not None}
    full = Settings(stated.path, above | within)
    if full.get("partial_rotary_factor", 1) != 1:
        raise SourceError(f"{stated.path} rotates only a part of each head, which is not supported")
    rotary = _read_rotary(full, head_dim, context_length)
    if (theta := stated.get("rope_local_base_freq")) is None:
        return rotary, rotary
    local = Settings(stated.path, {"rope_theta": theta, **rope.get("sliding_attention", {})})
    return rotary, _read_rotary(local, head_dim, context_length)


def _read_rotary(rope: Settings, head_dim: int, context_length: int) -> Rotary:
    """rope has rope_theta, rope_type and what the type needs, under the names of a config.json."""
    inv_freq = plain_rotary(rope.number("rope_theta"), head_dim).inv_freq
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return Rotary(inv_freq)
    if kind == "linear":
        return Rotary(inv_freq / np.float32(rope.number("factor")))
    if kind == "llama3":
        return Rotary(_llama3(rope, inv_freq))
    if kind in ("longrope", "su"):
        trained = rope.count("original_max_position_embeddings")
        factor = rope.number("factor", context_length / trained)
        scale = rope.number("attention_factor", _longrope_scale(factor, trained))
        return _longrope(rope.path, inv_freq, rope.get("short_factor"), scale, trained)
    raise SourceError(f"{rope.path} uses rotary scaling '{kind}'; known are default, linear, llama3 and longrope")


def _longrope(path: object, inv_freq: Floats, factors: Any, scale: float, trained: int) -> Rotary:
    """Frequencies for sequences up to the length of the first training (Ding et al., arXiv:2402.13753)."""
    divisors = np.array(factors, np.float32)
    if divisors.shape != inv_freq.shape or not (divisors > 0).all():
        raise SourceError(
            f"{path}: the short factors of longrope are {factors}, wanted {len(inv_freq)} positive numbers"
        )
    return Rotary(inv_freq / divisors, scale, trained)


def _longrope_scale(factor: float, trained: int) -> float:
    return math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0


def _llama3(rope: Settings, inv_freq: Floats) -> Floats:
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    factor, low, high, trained = (rope.number(name) for name in names)
    turns = trained * inv_freq / (2 * math.pi)
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    result: Floats = (((1 - smooth) / factor + smooth) * inv_freq).astype(np.float32)
    return result
