"""Weights that anyone can draw again from a name and a shape."""

import zlib

import numpy as np


def draw(name: str, shape: list[int]) -> np.ndarray:
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    values = rng.normal(0, 1, shape).astype(np.float32)
    if name.endswith("norm.weight"):
        return 1 + np.float32(0.1) * values
    return values * np.float32(0.3 if len(shape) == 1 or "embed" in name else 1.5 / np.sqrt(shape[-1]))
