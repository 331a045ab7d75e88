import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rows import random_rows

from edgespec.export.blocks import BLOCK_FORMATS, Blocks
from edgespec.export.quantize import (
    append_offset_columns,
    join_blocks,
    quantize,
    quantize_asymmetric,
    quantize_symmetric,
)


@pytest.mark.parametrize("bits", [4, 8])
@given(seed=st.integers(0, 2**32))
def test_rounding_is_off_by_half_a_step_at_most_but_at_the_far_end(bits: int, seed: int) -> None:
    weights = np.random.default_rng(seed).normal(0, 1, (4, 96)).astype(np.float32)
    blocks = quantize(weights, bits, 32)
    error = np.abs(blocks.dequantize() - weights).reshape(4, 3, 32)
    far = -weights.reshape(4, 3, 32) / blocks.scales[:, :, None] < -(2 ** (bits - 1)) + 0.5
    assert (error <= np.abs(blocks.scales)[:, :, None] * np.where(far, 1.0, 0.5) * 1.001).all()


def test_zero_and_short_blocks_are_kept() -> None:
    weights = np.zeros((2, 40), np.float32)
    weights[1, 39] = 3.0
    blocks = quantize(weights, 4, 32)
    assert np.allclose(blocks.dequantize()[:, :40], weights)


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
    columns = append_offset_columns(decoded).dequantize()[:, decoded.levels.shape[1] :]
    kept = columns[:, : offsets.shape[1]] / decoded.block_size
    assert np.abs(kept - offsets).max() <= bound * np.abs(decoded.scales).max()


@pytest.mark.parametrize("block_size", [32, 64, 128])
def test_joined_blocks_move_weights_by_an_eighth_of_a_level_at_most(block_size: int) -> None:
    exact = BLOCK_FORMATS["Q6_K"].decode(random_rows("Q6_K", 3))
    joined = join_blocks(exact, block_size)
    largest = np.abs(exact.scales).reshape(3, -1, block_size // 16).max(axis=2).repeat(block_size, axis=1)
    error = np.abs(joined.dequantize() - exact.dequantize())
    lowest = exact.levels == 96  # may be clipped where signs differ
    assert (error <= largest * np.where(lowest, 0.25, 0.126)).all()


@given(seed=st.integers(0, 2**32))
def test_asymmetric_rounding_beats_plain_rounding(seed: int) -> None:
    weights = np.random.default_rng(seed).normal(0.1, 1, (8, 256)).astype(np.float32)
    plain = np.square(quantize(weights, 4, 32).dequantize() - weights).sum()
    assert np.square(quantize_asymmetric(weights, 4, 32).dequantize() - weights).sum() < 0.85 * plain


@given(seed=st.integers(0, 2**32))
def test_weights_of_a_four_bit_file_are_found_again(seed: int) -> None:
    weights = np.random.default_rng(seed).normal(0, 1, (4, 64)).astype(np.float32)
    stored = gguf.quants.quantize(weights, gguf.GGMLQuantizationType.Q4_1)
    exact = BLOCK_FORMATS["Q4_1"].decode(stored)
    error = np.abs(quantize_asymmetric(exact.dequantize(), 4, 32).dequantize() - exact.dequantize())
    assert error.max() < 1e-5


def test_constant_blocks_are_kept() -> None:
    weights = np.repeat(np.array([[0.0, 0.5, -2.0]], np.float32), 32, axis=1)
    assert np.allclose(quantize_asymmetric(weights, 4, 32).dequantize(), weights)


@given(seed=st.integers(0, 2**32))
def test_fitted_symmetric_scales_beat_plain_rounding(seed: int) -> None:
    weights = np.random.default_rng(seed).normal(0, 1, (8, 250)).astype(np.float32)
    plain, fitted = (rounded(weights, 4, 32).dequantize() for rounded in (quantize, quantize_symmetric))
    padded = np.pad(weights, ((0, 0), (0, 6)))
    errors = [np.square(found - padded).reshape(8, -1, 32).sum(axis=2) for found in (fitted, plain)]
    assert (errors[0] <= 1.0001 * errors[1]).all()
    assert errors[0].sum() < 0.96 * errors[1].sum()


def test_symmetric_blocks_that_fill_their_grid_are_found_again() -> None:
    stored = gguf.quants.quantize(
        np.random.default_rng(0).normal(0, 1, (4, 64)).astype(np.float32), gguf.GGMLQuantizationType.Q4_0
    )
    exact = BLOCK_FORMATS["Q4_0"].decode(stored).dequantize()
    assert np.abs(quantize_symmetric(exact, 4, 32).dequantize() - exact).max() < 1e-5
    assert not quantize_symmetric(np.zeros((1, 32), np.float32), 4, 32).dequantize().any()
