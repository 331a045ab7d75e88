"""An ONNX decoder of a folder, and calls of it that grow, shrink, diverge and start over."""

from pathlib import Path

import numpy as np
import tiny

from edgespec.manifest import read_manifest
from edgespec.runtimes.devices import find_device
from edgespec.runtimes.onnx import OnnxDecoder
from edgespec.types import TokenIds


def decoder(folder: Path, *, deterministic: bool = True) -> OnnxDecoder:
    return OnnxDecoder(folder, read_manifest(folder), find_device("cpu"), deterministic=deterministic)


def random_calls(seed: int, count: int, longest: int) -> list[tuple[TokenIds, int]]:
    """Prompts that grow, shrink, diverge and start over, with the number of rows asked for."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, tiny.VOCAB, 5).astype(np.int32)
    calls = []
    for _ in range(count):
        kept = rng.integers(0, len(tokens) + 1) if rng.random() < 0.4 else len(tokens)
        more = rng.integers(0, tiny.VOCAB, rng.integers(0, 9)).astype(np.int32)
        tokens = np.concatenate([tokens[:kept], more])[:longest]
        if not len(tokens) or rng.random() < 0.03:
            tokens = rng.integers(0, tiny.VOCAB, rng.integers(1, longest)).astype(np.int32)
        calls.append((tokens, int(rng.integers(1, min(len(tokens), 9) + 1))))
    return calls
