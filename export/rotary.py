"""Rotary positions (Su et al., arXiv:2104.09864) from the settings of a source, scaled as transformers does.

longrope has two sets of factors: one for sequences up to the length of the first training, one for longer ones.
transformers switches when a sequence outgrows that length. A table of cosines cannot switch, so an export takes
the short factors and that length as its context, or, where a longer context is asked for, the long factors for
all sequences, as transformers does once a sequence is longer.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from edgespec.errors import SourceError
from edgespec.export.blocks import Floats
from edgespec.export.settings import SourceSettings
from edgespec.export.tensors import Tensors


@dataclass(frozen=True, eq=False)
class Rotary:
    """Frequencies of the values of a head that are rotated, [rotated / 2], and the factor of cosines and sines.

    The first values of a head are rotated, the others stay as they are.
    """

    inv_freq: Floats
    scale: float = 1.0
    context_length: int | None = None  # that the frequencies are made for, if not the model's own

    @property
    def rotated(self) -> int:
        """How many values of each head are rotated."""
        return 2 * len(self.inv_freq)


def plain_rotary(theta: float, rotated: int) -> Rotary:
    """Frequencies by the base theta for values of a head that are rotated, without scaling."""
    exponents = np.arange(0, rotated, 2, dtype=np.float64) / rotated
    return Rotary(np.exp(-exponents * math.log(theta)).astype(np.float32))


def rotary_from_gguf(
    stated: SourceSettings,
    tensors: Tensors,
    head_dim: int,
    context_length: int,
    wanted_length: int | None,
    *,
    is_rounded: bool,
) -> Rotary:
    """The rotary of a model with context_length, for texts of up to wanted_length tokens if that is given.

    is_rounded: YaRN's borders are whole pairs of values, which no file states.
    """
    rotated = _require_rotated(stated.path, stated.count("rope.dimension_count", head_dim), head_dim)
    factors = {name: tensors.get(f"rope_factors_{name}.weight") for name in ("short", "long")}
    # Files from before November 2023 have the factor alone, by one of two names.
    factor = stated.get("rope.scaling.factor") or stated.get("rope.scale_linear")
    kind = stated.get("rope.scaling.type") or ("linear" if factor and factors["short"] is None else "none")
    theta = stated.number("rope.freq_base", 1e4)
    inv_freq = plain_rotary(theta, rotated).inv_freq
    if (divisors := tensors.get("rope_freqs.weight")) is not None:
        inv_freq /= divisors.vector()
    scale = stated.optional("rope.scaling.attn_factor")
    if factors["short"] is not None and kind in ("none", "longrope"):
        trained = stated.count("rope.scaling.original_context_length")
        scale = scale or _longrope_scale(context_length / trained, trained)
        read = {name: None if each is None else each.vector() for name, each in factors.items()}
        return _longrope(stated.path, inv_freq, read, scale, trained, wanted_length)
    if kind == "none":
        return Rotary(inv_freq, scale or 1.0)
    if kind == "linear":
        key = "rope.scaling.factor" if stated.get("rope.scaling.factor") else "rope.scale_linear"
        return Rotary(inv_freq / np.float32(stated.number(key)), scale or 1.0)
    if kind == "yarn":
        for key in ("factor", "original_context_length"):
            stated.number(f"rope.scaling.{key}")
        names = {"factor": "factor", "original_max_position_embeddings": "original_context_length"}
        names |= {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
        names |= dict.fromkeys(("mscale", "mscale_all_dim"), "yarn_log_multiplier")
        given = {name: stated.get(f"rope.scaling.{key}") for name, key in names.items()}
        # Up to 1 it is a factor beside that of the method, which transformers and llama.cpp leave out.
        whole = stated.number("rope.scaling.yarn_attn_factor", 1.0)
        given |= {"truncate": is_rounded, "attention_factor": whole if whole > 1 else None}
        # attn_factor is beside the factor of the method, as in llama.cpp; converters of OLMo 3 wrote the whole.
        if scale and stated.prefix in ("olmo2.", "olmo3."):
            given["attention_factor"], scale = scale, None
        found = _yarn(SourceSettings(stated.path, given), theta, inv_freq)
        return replace(found, scale=found.scale * (scale or 1.0))
    raise SourceError(
        f"{stated.path} uses rotary scaling '{kind}'; known are none, linear, yarn and longrope, and that of "
        "Llama 3 by its tensor rope_freqs"
    )


def rotaries_from_huggingface(
    stated: SourceSettings,
    head_dim: int,
    context_length: int,
    wanted_length: int | None,
    *,
    is_local_plain: bool,
    local_head_dim: int | None = None,
) -> tuple[Rotary, Rotary]:
    """The rotaries of layers that see all tokens and of those that see a window.

    Args:
        is_local_plain: The latter do not scale, by a base of their own if the settings state one, as in gemma3 and
            olmo3.
        local_head_dim: The size of their heads, where it is another one.
    """
    rope = stated.get("rope_scaling") or stated.get("rope_parameters") or {}  # as transformers
    if not isinstance(rope, Mapping):
        raise SourceError(f"{stated.path}: its rotary scaling is {rope!r}; wanted an object with a rope_type")
    above = {
        "rope_theta": stated.get("rope_theta", 1e4),
        "original_max_position_embeddings": stated.get("original_max_position_embeddings"),
        "partial_rotary_factor": stated.get(
            "partial_rotary_factor", stated.get("rotary_dim", head_dim) / head_dim
        ),
    }
    within = {key: value for key, value in rope.get("full_attention", rope).items() if value is not None}
    full = SourceSettings(stated.path, above | within)
    rotary = _read_rotary(full, head_dim, context_length, wanted_length)
    if not is_local_plain:
        return rotary, rotary
    theta = stated.get("rope_local_base_freq", full.get("rope_theta"))
    local = SourceSettings(stated.path, {"rope_theta": theta, **rope.get("sliding_attention", {})})
    return rotary, _read_rotary(local, local_head_dim or head_dim, context_length, wanted_length)


def _read_rotary(rope: SourceSettings, head_dim: int, context_length: int, wanted_length: int | None) -> Rotary:
    """rope has rope_theta, rope_type and what the type needs, under the names of a config.json."""
    rotated = int(head_dim * rope.number("partial_rotary_factor", 1.0))
    theta = rope.number("rope_theta")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "proportional":  # the other values of a head turn by no angle
        inv_freq = plain_rotary(theta, head_dim).inv_freq / np.float32(rope.number("factor", 1.0))
        return Rotary(np.where(np.arange(len(inv_freq)) < rotated // 2, inv_freq, np.float32(0)))
    inv_freq = plain_rotary(theta, _require_rotated(rope.path, rotated, head_dim)).inv_freq
    if kind == "dynamic" and rope.get("alpha"):  # a larger base, whatever the length
        base = theta * math.pow(rope.number("alpha"), rotated / (rotated - 2))
        return plain_rotary(base, rotated)
    # mrope is in three dimensions, which are one for text; dynamic scales texts beyond the model's length alone.
    if kind in ("default", "mrope", "dynamic"):
        return Rotary(inv_freq)
    if kind == "linear":
        return Rotary(inv_freq / np.float32(rope.number("factor")))
    if kind == "llama3":
        return Rotary(_llama3(rope, inv_freq))
    if kind == "yarn":
        trained = rope.get("original_max_position_embeddings", context_length)
        settings = {**rope.values, "original_max_position_embeddings": trained}
        return _yarn(replace(rope, values=settings), theta, inv_freq)
    if kind in ("longrope", "su"):
        trained = rope.count("original_max_position_embeddings")
        factor = rope.number("factor", context_length / trained)
        scale = rope.number("attention_factor", _longrope_scale(factor, trained))
        factors = {name: rope.get(f"{name}_factor") for name in ("short", "long")}
        return _longrope(rope.path, inv_freq, factors, scale, trained, wanted_length)
    raise SourceError(
        f"{rope.path} uses rotary scaling '{kind}'; known are default, linear, dynamic, proportional, "
        "llama3, yarn and longrope"
    )


def _require_rotated(path: object, rotated: int, head_dim: int) -> int:
    """GroupQueryAttention rotates whole heads, or a part of them whose half is a multiple of 8."""
    if rotated == head_dim or (0 < rotated < head_dim and rotated % 16 == 0):
        return rotated
    raise SourceError(
        f"{path} rotates {rotated} of the {head_dim} values of each head; ONNX Runtime rotates all of them, or a "
        "multiple of 16"
    )


def _longrope(
    path: object,
    inv_freq: Floats,
    factors: Mapping[str, Any],
    scale: float,
    trained: int,
    wanted_length: int | None,
) -> Rotary:
    """Frequencies for texts up to the length of the first training, or for longer ones.

    LongRoPE (Ding et al., arXiv:2402.13753).
    """
    is_long = wanted_length is not None and wanted_length > trained
    name = "long" if is_long else "short"
    divisors = np.array(factors[name], np.float32)
    if divisors.shape != inv_freq.shape or not (divisors > 0).all():
        raise SourceError(
            f"{path}: the {name} factors of longrope are {factors[name]}, wanted {len(inv_freq)} positive numbers"
        )
    return Rotary(inv_freq / divisors, scale, None if is_long else trained)


def _longrope_scale(factor: float, trained: int) -> float:
    return math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0


def _yarn(rope: SourceSettings, theta: float, inv_freq: Floats) -> Rotary:
    """Frequencies that turn often within the first training's length stay, the others are divided.

    YaRN (Peng et al., arXiv:2309.00071), with the borders of transformers and llama.cpp, which are rounded unless
    truncate is false.
    """
    factor, trained = rope.number("factor"), rope.number("original_max_position_embeddings")
    fast, slow = rope.number("beta_fast", 32.0), rope.number("beta_slow", 1.0)
    pairs = len(inv_freq)

    def pair_with(turns: float) -> float:
        """The index of the pair of values that turns so often within the length."""
        return pairs * math.log(trained / (turns * 2 * math.pi)) / math.log(theta)

    low, high = pair_with(fast), pair_with(slow)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    divided = np.clip((np.arange(pairs) - low) / max(high - low, 0.001), 0, 1)
    scaled = (inv_freq * (1 - divided) + inv_freq / factor * divided).astype(np.float32)
    return Rotary(scaled, _yarn_scale(rope, factor), round(trained * factor))


def _yarn_scale(rope: SourceSettings, factor: float) -> float:
    if (stated := rope.optional("attention_factor")) is not None:
        return stated

    def scale_of(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return scale_of(rope.number("mscale")) / scale_of(rope.number("mscale_all_dim"))
    return scale_of(1.0)


def _llama3(rope: SourceSettings, inv_freq: Floats) -> Floats:
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    factor, low, high, trained = (rope.number(name) for name in names)
    if not 0 < low < high:
        raise SourceError(
            f"{rope.path}: low_freq_factor is {low:g} and high_freq_factor {high:g}; wanted the first smaller"
        )
    turns = trained * inv_freq / (2 * math.pi)
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    result: Floats = (((1 - smooth) / factor + smooth) * inv_freq).astype(np.float32)
    return result
