import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.export.blocks import (
    BLOCK_FORMATS,
    Blocks,
    pack,
    quantize,
    with_offset_columns,
    with_paired_blocks,
)

# Where the fp16 scales of a block lie: random bytes there would be infinities.
_HALVES = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82]}
_HALVES |= {"Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0]}


def random_rows(name: str, seed: int, num_blocks: int = 6) -> np.ndarray:
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (3, num_blocks, BLOCK_FORMATS[name].block_bytes), dtype=np.uint8)
    for at in _HALVES[name]:
        halves = rng.normal(0, 0.1, (3, num_blocks)).astype("<f2")
        raw[..., at : at + 2] = halves[..., None].view(np.uint8)
    return raw.reshape(3, -1)


@pytest.mark.parametrize("name", BLOCK_FORMATS)
@given(seed=st.integers(0, 2**32))
def test_decoding_equals_the_reference_dequantiser(name: str, seed: int) -> None:
    raw, block = random_rows(name, seed), BLOCK_FORMATS[name]
    decoded = block.decode(raw)
    reference = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name])
    assert np.allclose(decoded.dequantized(), reference, rtol=1e-5, atol=1e-6 * np.abs(reference).max())
    assert (decoded.bits, decoded.block_size) == (block.bits, block.block_size)
    assert (decoded.offsets is not None) == block.has_offsets


@pytest.mark.parametrize("bits", [4, 8])
@given(seed=st.integers(0, 2**32))
def test_rounding_is_off_by_half_a_step_at_most_but_at_the_far_end(bits: int, seed: int) -> None:
    weights = np.random.default_rng(seed).normal(0, 1, (4, 96)).astype(np.float32)
    blocks = quantize(weights, bits, 32)
    error = np.abs(blocks.dequantized() - weights).reshape(4, 3, 32)
    far = -weights.reshape(4, 3, 32) / blocks.scales[:, :, None] < -(2 ** (bits - 1)) + 0.5
    assert (error <= np.abs(blocks.scales)[:, :, None] * np.where(far, 1.0, 0.5) * 1.001).all()


def test_zero_and_short_blocks_are_kept() -> None:
    weights = np.zeros((2, 40), np.float32)
    weights[1, 39] = 3.0
    blocks = quantize(weights, 4, 32)
    assert np.allclose(blocks.dequantized()[:, :40], weights)


@pytest.mark.parametrize(
    ("name", "bound"), [("Q4_1", 1 / 28), ("Q4_K", 1 / 28), ("Q5_1", 1 / 500), ("Q5_K", 1 / 500)]
)
def test_offset_columns_keep_the_minimum_of_a_block(name: str, bound: float) -> None:
    """Read back as the graph does: a column times the mean of its block."""
    decoded = BLOCK_FORMATS[name].decode(random_rows(name, 5, num_blocks=8))
    assert decoded.offsets is not None
    assert decoded.zero_points is not None
    typical = np.abs(decoded.offsets) <= 0.501 * np.abs(decoded.scales)  # the zero point was not clipped
    offsets = np.where(typical, decoded.offsets, 0)
    decoded = Blocks(
        decoded.bits, decoded.block_size, decoded.levels, decoded.scales, decoded.zero_points, offsets
    )
    columns = with_offset_columns(decoded).dequantized()[:, decoded.levels.shape[1] :]
    kept = columns[:, : offsets.shape[1]] / decoded.block_size
    assert np.abs(kept - offsets).max() <= bound * np.abs(decoded.scales).max()


def test_paired_blocks_move_weights_by_an_eighth_of_a_level_at_most() -> None:
    exact = BLOCK_FORMATS["Q6_K"].decode(random_rows("Q6_K", 3))
    paired = with_paired_blocks(exact)
    larger = np.abs(exact.scales).reshape(3, -1, 2).max(axis=2).repeat(32, axis=1)
    error = np.abs(paired.dequantized() - exact.dequantized())
    lowest = exact.levels == 96  # may be clipped where the signs of a pair differ
    assert (error <= larger * np.where(lowest, 0.25, 0.126)).all()


def test_packing_puts_the_even_level_into_the_low_nibble() -> None:
    levels = np.array([[1, 2, 3]], np.uint8)
    assert pack(levels, 4).tolist() == [[0x21, 0x03]]
    assert pack(levels, 8).tolist() == [[1, 2, 3]]
