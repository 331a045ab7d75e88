"""Rounding weights to blocks of few bits, and converting blocks that MatMulNBits does not support.

Knows nothing of files and nothing of graphs.
"""

import numpy as np

from edgespec.export.blocks import Blocks, Floats, split_minimum
from edgespec.types import Array

# Scales tried for a symmetric block, as shares of the one that takes the largest magnitude to the lowest level; of
# the other sign they take it to the highest.
_SCALES = (1.0, 0.9, -1.0, -0.9)
# Ranges tried for an asymmetric block, as shares of the full one, each refined by least squares.
_RANGES = (1.0, 0.93, 0.86, 0.8)
_REFINEMENTS = 2


def quantize(weights: Floats, bits: int, block_size: int) -> Blocks:
    """Symmetric round-to-nearest of [rows, columns]: the largest magnitude of a block takes the lowest level.

    The last block of a row may be short and is padded with zeros.
    """
    block, scales = _split(weights, bits, block_size)
    middle = 1 << (bits - 1)
    levels = np.clip(np.rint(block * _inverse(scales)) + middle, 0, 2 * middle - 1).astype(np.uint8)
    return Blocks(bits, block_size, levels.reshape(len(weights), -1), scales[:, :, 0].astype(np.float32))


def _split(weights: Floats, bits: int, block_size: int) -> tuple[Floats, Floats]:
    """Weights by blocks, and scales that take the largest magnitude of each block to the lowest level."""
    block = np.pad(weights, ((0, 0), (0, -weights.shape[1] % block_size))).reshape(len(weights), -1, block_size)
    peak = np.take_along_axis(block, np.abs(block).argmax(axis=2)[:, :, None], axis=2)
    return block, peak / np.float32(-(1 << (bits - 1)))


def quantize_symmetric(weights: Floats, bits: int, block_size: int) -> Blocks:
    """Symmetric blocks with the scale, of either sign, that has the least squared error found.

    Starts from several scales and refines each by least squares for the levels it gives. In 8 bits there is
    nothing to gain: plain rounding is off by 1/256 of the range. Weights and padding are as in quantize.
    """
    block, plain = _split(weights, bits, block_size)
    middle = np.float32(1 << (bits - 1))
    best, best_scales = np.zeros_like(block), np.zeros_like(plain)
    # Arrays that are used again take a quarter of the time.
    levels, product = np.empty_like(block), np.empty_like(block)
    least: Floats = np.full_like(plain, np.inf)
    for share in _SCALES:
        scales = plain * np.float32(share)
        for has_next in (True, False):
            np.rint(np.multiply(block, _inverse(scales), out=levels), out=levels)
            np.clip(levels, -middle, middle - 1, out=levels)
            np.subtract(np.multiply(levels, scales, out=product), block, out=product)
            errors = np.square(product, out=product).sum(axis=2, keepdims=True)
            better = errors < least
            for kept, found in ((least, errors), (best, levels), (best_scales, scales)):
                np.copyto(kept, found, where=better)
            if has_next:
                covariance = np.multiply(levels, block, out=product).sum(axis=2, keepdims=True)
                energy = np.square(levels, out=levels).sum(axis=2, keepdims=True)
                scales = np.divide(covariance, energy, out=scales.copy(), where=energy > 0)
    best += middle
    return Blocks(bits, block_size, best.astype(np.uint8).reshape(len(weights), -1), best_scales[:, :, 0])


def quantize_asymmetric(weights: Floats, bits: int, block_size: int) -> Blocks:
    """Blocks with the scale and minimum that have the least squared error found.

    Starts from several ranges and refines each by least squares for the levels it gives, as the k-quants of
    GGUF do. Weights that fill such a grid already, like those of a Q4_1 file, are found exactly. Columns are a
    multiple of block_size.
    """
    rows = weights.shape[0]
    block = weights.reshape(rows, -1, block_size)
    highest = np.float32((1 << bits) - 1)
    low = block.min(axis=2, keepdims=True)
    extent = block.max(axis=2, keepdims=True) - low
    best: list[Floats] = []  # levels, scales, minima
    least: Floats = np.full_like(low, np.inf)
    for share in _RANGES:
        scales, minima = extent * np.float32(share / highest), low + extent * np.float32((1 - share) / 2)
        for _ in range(1 + _REFINEMENTS):
            levels = np.clip(np.rint((block - minima) * _inverse(scales)), 0, highest)
            errors = np.square(levels * scales + minima - block).sum(axis=2, keepdims=True)
            better = errors < least
            least = np.where(better, errors, least)
            found = [levels, scales, minima]
            best = [np.where(better, new, old) for new, old in zip(found, best or found, strict=True)]
            scales, minima = _least_squares(block, levels, scales)
    return split_minimum(bits, block_size, best[0].astype(np.uint8), best[1][..., 0], best[2][..., 0])


def _least_squares(block: Floats, levels: Floats, scales: Floats) -> tuple[Floats, Floats]:
    """The best scale and minimum for block ≈ scale · level + minimum; the old scale where all levels are equal."""
    mean_level, mean = levels.mean(axis=2, keepdims=True), block.mean(axis=2, keepdims=True)
    spread = levels - mean_level
    variance = np.square(spread).sum(axis=2, keepdims=True)
    covariance = (spread * (block - mean)).sum(axis=2, keepdims=True)
    fitted = np.divide(covariance, variance, out=scales.copy(), where=variance > 0)
    return fitted, mean - fitted * mean_level


def _inverse(scales: Array) -> Floats:
    inverse: Floats = np.divide(1, scales, out=np.zeros_like(scales), where=scales != 0)
    return inverse


def join_blocks(blocks: Blocks, block_size: int) -> Blocks:
    """Symmetric 6-bit levels in blocks of 16 → 8-bit levels in larger blocks.

    The block with the largest scale is kept exactly, at four steps a level; levels of the other blocks are rounded
    to a quarter of that scale, an error of an eighth of its level at most.
    """
    assert blocks.bits == 8
    assert blocks.zero_points is None
    rows, count = blocks.levels.shape[0], block_size // blocks.block_size
    scales = blocks.scales.reshape(rows, -1, count)
    largest = np.take_along_axis(scales, np.abs(scales).argmax(axis=2)[:, :, None], axis=2)
    factors = np.divide(4 * scales, largest, out=np.zeros_like(scales), where=largest != 0)
    levels = blocks.levels.reshape(rows, -1, count, blocks.block_size).astype(np.float32) - 128
    # Where two scales differ in sign, the lowest level would become 128, one step too far.
    levels = np.minimum(np.rint(levels * factors[..., None]) + 128, 255)
    quarters = (largest[..., 0] / 4).astype(np.float32)
    return Blocks(8, block_size, levels.astype(np.uint8).reshape(rows, -1), quarters)


def append_offset_columns(blocks: Blocks) -> Blocks:
    """Append the offsets as columns, one a block, to be multiplied by the mean of the activations in the block.

    w · x = Σ scale · (level − zero_point) · x + Σ_blocks (block_size · offset) · mean(x in the block).
    The columns are quantised like the weights. An offset is at most half a scale, so at 4 bits they keep a
    minimum to 1/30 of a level and at 8 bits to 1/500.
    """
    assert blocks.offsets is not None
    assert blocks.zero_points is not None
    columns = quantize(blocks.offsets * np.float32(blocks.block_size), blocks.bits, blocks.block_size)
    middle = np.full(columns.scales.shape, 1 << (blocks.bits - 1), np.uint8)
    return Blocks(
        blocks.bits,
        blocks.block_size,
        np.concatenate([blocks.levels, columns.levels], axis=1),
        np.concatenate([blocks.scales, columns.scales], axis=1),
        np.concatenate([blocks.zero_points, middle], axis=1),
    )
