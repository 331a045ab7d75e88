"""Weights that anyone can draw again from a model type and the shapes of its tensors."""

import zlib
from collections.abc import Mapping, Sequence

import numpy as np


def draw(model_type: str, shapes: Mapping[str, Sequence[int]]) -> dict[str, np.ndarray]:
    """Weights by name; gains are about 1, which gemma before gemma4, qwen3_5 and qwen3_next store as 0."""
    gain = 0 if model_type.startswith(("gemma2", "gemma3", "qwen3_5", "qwen3_next")) else 1
    own = {name: 1 if name.endswith("linear_attn.norm.weight") else gain for name in shapes}
    return {name: _one(name, shape, np.float32(own[name])) for name, shape in shapes.items()}


def _one(name: str, shape: Sequence[int], gain: np.float32) -> np.ndarray:
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    values = rng.normal(0, 1, shape).astype(np.float32)
    if name.endswith(("norm.weight", "layer_scalar")):
        return gain + np.float32(0.1) * values
    return values * np.float32(0.3 if len(shape) == 1 or "embed" in name else 1.5 / np.sqrt(shape[-1]))
