"""Random rows of each block format."""

import numpy as np

from edgespec.export.blocks import BLOCK_FORMATS

# Where the fp16 scales of a block lie: random bytes there would be infinities.
_HALVES = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82]}
_HALVES |= {"Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0], "IQ2_XXS": [0]}
_HALVES |= {"IQ4_XS": [0], "TQ1_0": [52], "TQ2_0": [64], "MXFP4": [], "Q1_0": [0], "Q2_0": [0]}


def random_rows(name: str, seed: int, num_blocks: int = 6) -> np.ndarray:
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (3, num_blocks, BLOCK_FORMATS[name].block_bytes), dtype=np.uint8)
    for at in _HALVES[name]:
        halves = rng.normal(0, 0.1, (3, num_blocks)).astype("<f2")
        raw[..., at : at + 2] = halves[..., None].view(np.uint8)
    if name == "MXFP4":
        raw[..., 0] = raw[..., 0] % 24 + 112  # the exponent; also the smallest that no half float holds
    return raw.reshape(3, -1)
