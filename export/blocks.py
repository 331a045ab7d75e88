"""Block-quantised weights as integer levels, scales, zero points and offsets.

Every format of the GGUF specification that is read here stores a row as blocks of 16 or 32 weights that
share a scale and mostly a minimum: w = scale · (level − zero_point) + offset. MatMulNBits takes no offset.
Splitting scale · zero_point out of the minimum leaves an offset of at most half a
scale, which the graph adds as (sum of the activations in a block) · offset.

Knows nothing of files and nothing of graphs. Layouts: ggml-common.h of the GGUF reference implementation.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from edgespec.system.tables import read_table

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

# Levels, scales, and minima or zero points where a format has them.
_Fields = tuple[Bytes, Floats, Floats | Bytes | None]
_4, _16 = np.uint8(4), np.uint8(16)


@dataclass(frozen=True, slots=True)
class Blocks:
    """Rows of w = scales · (levels − zero_points) + offsets.

    levels is [rows, columns] in 0 … 2**bits − 1, scales [rows, num_blocks]; offsets and zero_points have
    the shape of scales, or are None for zero and for 2**(bits − 1).
    """

    bits: int
    block_size: int
    levels: Bytes
    scales: Floats
    zero_points: Bytes | None = None
    offsets: Floats | None = None

    def dequantize(self) -> Floats:
        rows, columns = self.levels.shape
        weights = self.levels.reshape(rows, -1, self.block_size).astype(np.float32)
        zero = np.float32(1 << (self.bits - 1)) if self.zero_points is None else self.zero_points[:, :, None]
        np.subtract(weights, zero, out=weights, dtype=np.float32)
        weights *= self.scales[:, :, None]
        if self.offsets is not None:
            weights += self.offsets[:, :, None]
        return weights.reshape(rows, columns)

    def cut(self, block_size: int) -> "Blocks":
        """These weights in blocks of block_size, which divides their own; each shorter block repeats its scale."""
        if (count := self.block_size // block_size) == 1:
            return self
        assert self.offsets is None
        zero_points = None if self.zero_points is None else np.repeat(self.zero_points, count, axis=1)
        return replace(
            self, block_size=block_size, scales=np.repeat(self.scales, count, axis=1), zero_points=zero_points
        )


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """One storage type: weights_per_block weights in block_bytes bytes, decoded to bits per level."""

    weights_per_block: int
    block_bytes: int
    bits: int
    block_size: int
    has_offsets: bool
    split: Callable[[Bytes], _Fields]  # from stored blocks, [rows, num_blocks, block_bytes], to their fields
    has_zero_points: bool = False

    def decode(self, raw: Bytes) -> Blocks:
        rows = len(raw)
        levels, scales, more = self.split(raw.reshape(rows, -1, self.block_bytes))
        if self.has_offsets and more is not None:
            return split_minimum(self.bits, self.block_size, levels, scales, more.astype(np.float32, copy=False))
        zero_points = None if more is None else more.astype(np.uint8, copy=False)
        return Blocks(self.bits, self.block_size, levels.reshape(rows, -1), scales.reshape(rows, -1), zero_points)


def _half(raw: Bytes) -> Floats:
    """Little-endian fp16 in the last axis, [rows, blocks, 2] → [rows, blocks]."""
    return np.ascontiguousarray(raw).view("<f2")[..., 0].astype(np.float32)


def _nibbles(raw: Bytes) -> Bytes:
    """Low nibbles, then high ones, along the last axis."""
    return np.concatenate([raw & 15, raw >> 4], axis=-1)


def split_minimum(bits: int, block_size: int, levels: Bytes, scales: Floats, minima: Floats) -> Blocks:
    """Blocks of w = scale · level + minimum; the minimum becomes the nearest zero point and an offset."""
    rows = levels.shape[0]
    scales, minima = scales.reshape(rows, -1), minima.reshape(rows, -1)
    with np.errstate(divide="ignore", invalid="ignore"):
        zero = np.where(scales != 0, np.rint(-minima / scales), 0)
    zero = np.clip(zero, 0, (1 << bits) - 1).astype(np.float32)
    offsets = minima + zero * scales
    return Blocks(
        bits, block_size, levels.reshape(rows, -1), scales, zero.astype(np.uint8), offsets.astype(np.float32)
    )


def _scaled(read: Callable[[Bytes], Bytes], has_minima: bool, block: Bytes) -> _Fields:
    """A scale, in some formats a minimum, and bytes that are read as levels."""
    levels = read(block[..., 4 if has_minima else 2 :])
    return levels, _half(block[..., :2]), _half(block[..., 2:4]) if has_minima else None


def _five_bits(raw: Bytes) -> Bytes:
    """Fifth bits, 32 of them stored little-endian, then nibbles."""
    return _nibbles(raw[..., 4:]) | np.unpackbits(raw[..., :4], axis=-1, bitorder="little") * _16


def _k_scales(block: Bytes) -> tuple[Floats, Floats]:
    """Eight scales and eight minima of a Q4_K or Q5_K super-block: a factor for each kind, and 6 bits each."""
    low, middle, high = block[..., 4:8], block[..., 8:12], block[..., 12:16]
    scales = np.concatenate([low & 63, (high & 15) | ((low >> 6) << 4)], axis=-1)
    minima = np.concatenate([middle & 63, (high >> 4) | ((middle >> 6) << 4)], axis=-1)
    return scales * _half(block[..., 0:2])[..., None], minima * -_half(block[..., 2:4])[..., None]


def _k_nibbles(raw: Bytes) -> Bytes:
    """128 bytes → eight sub-blocks of 32: each 32 bytes hold the low nibbles of one, the high of the next."""
    pairs = raw.reshape(*raw.shape[:-1], 4, 32)
    return np.stack([pairs & 15, pairs >> 4], axis=-2)


def _q5_k(block: Bytes) -> _Fields:
    bits = np.unpackbits(block[..., 16:48, None], axis=-1, bitorder="little")  # [rows, blocks, 32, 8]
    fifth = np.swapaxes(bits, -1, -2) * _16  # bit i of byte j belongs to weight j of sub-block i
    return _k_nibbles(block[..., 48:]).reshape(fifth.shape) | fifth, *_k_scales(block)


def _q6_k(block: Bytes) -> _Fields:
    low = block[..., :128].reshape(*block.shape[:2], 2, 2, 32)  # [.., half, 32-group, 32]
    high = _pairs(block[..., 128:192].reshape(*block.shape[:2], 2, 1, 32))
    low = np.concatenate([low & 15, low >> 4], axis=-2)
    levels = (low | (high * _16)) + np.uint8(128 - 32)
    scales = block[..., 192:208].view(np.int8).astype(np.float32) * _half(block[..., 208:210])[..., None]
    return levels, scales, None


def _q2_k(block: Bytes) -> _Fields:
    packed = block[..., :16]
    scales = (packed & 15) * _half(block[..., 80:82])[..., None]
    minima = (packed >> 4) * -_half(block[..., 82:84])[..., None]
    # Two bits as four: with smaller steps, where a zero point still reaches the minimum, a smaller offset is left.
    with np.errstate(divide="ignore", invalid="ignore"):
        room = np.float32(15) / np.abs(minima / scales)
    steps = np.where(room >= 4, 4, np.where(room >= 2, 2, 1)).astype(np.uint8)
    levels = _two_bits(block[..., 16:80]).reshape(*steps.shape, 16) * steps[..., None]
    return levels, (scales / steps).astype(np.float32), minima


def _two_bits(raw: Bytes) -> Bytes:
    """64 bytes → 256 levels: each half of 32 bytes holds four groups of 32, two bits each."""
    return _pairs(raw.reshape(*raw.shape[:-1], 2, 1, 32))


def _pairs(raw: Bytes) -> Bytes:
    """The four pairs of bits in each byte, along the axis before the last."""
    return np.concatenate([raw & 3, (raw >> 2) & 3, (raw >> 4) & 3, raw >> 6], axis=-2)


def _q3_k(block: Bytes) -> _Fields:
    bits = np.unpackbits(block[..., :32, None], axis=-1, bitorder="little")
    third = np.swapaxes(bits, -1, -2)  # [rows, blocks, 8 groups, 32]
    levels = _two_bits(block[..., 32:96]).reshape(third.shape) | (third * _4)
    packed = block[..., 96:108]
    low = np.concatenate([packed[..., :8] & 15, packed[..., :8] >> 4], axis=-1)
    high = _pairs(packed[..., None, 8:12])
    scales = (low | (high.reshape(low.shape) << 4)).astype(np.float32) - np.float32(32)
    # The third bit is stored inverted: set means no 4 is subtracted, so levels are centred on 4.
    return levels + np.uint8(8 - 4), scales * _half(block[..., 108:110])[..., None], None


# The sixteen values of IQ4_NL, from the reference implementation's table kvalues_iq4nl.
_IQ4_NL = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int16)
_IQ4_LEVELS = (_IQ4_NL + 128).astype(np.uint8)


def _iq4_xs(block: Bytes) -> _Fields:
    """Eight scales of 6 bits: two high ones each in 16 bits, then the low nibbles."""
    high = np.ascontiguousarray(block[..., 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16)
    low = np.stack([block[..., 4:8] & 15, block[..., 4:8] >> 4], axis=-1).reshape(high.shape)
    scales = (low | (high & 3) << 4).astype(np.float32) - np.float32(32)
    levels = _IQ4_LEVELS[_nibbles(block[..., 8:].reshape(*block.shape[:2], 8, 16))]
    return levels, scales * _half(block[..., :2])[..., None], None


# Twice the sixteen floats of 4 bits (E2M1); a scale is half a power of two (OCP Microscaling Formats 1.0).
_MXFP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int16)
_MXFP4_LEVELS = (_MXFP4 + 128).astype(np.uint8)
_NO_NUMBER = 255


def _mxfp4(block: Bytes) -> _Fields:
    exponents = block[..., 0].astype(np.int32)
    scales = np.where(exponents == _NO_NUMBER, np.float32(np.nan), np.ldexp(np.float32(1), exponents - 128))
    return _MXFP4_LEVELS[_nibbles(block[..., 1:])], scales, None


def _ternary(levels: Bytes, scales: Floats) -> _Fields:
    """256 levels 0, 1 and 2 that mean -1, 0 and 1, as eight blocks with the scale of all."""
    return levels + np.uint8(8 - 1), np.repeat(scales, 8, axis=-1), None


def _tq1_0(block: Bytes) -> _Fields:
    """Digits of base 3, four or five of a number below 1 in each byte, as 256ths."""
    parts = ((block[..., :32], 5), (block[..., 32:48], 5), (block[..., 48:52], 4))
    powers = np.array([[1], [3], [9], [27], [81]], np.uint8)
    shifted = (part[..., None, :] * powers[:count] for part, count in parts)
    digits = np.concatenate([part.reshape(*block.shape[:2], -1) for part in shifted], axis=-1)
    return _ternary((digits.astype(np.uint16) * 3 >> 8).astype(np.uint8), _half(block[..., 52:54]))


def _tq2_0(block: Bytes) -> _Fields:
    return _ternary(_two_bits(block[..., :64]), _half(block[..., 64:66]))


def _q1_0(block: Bytes) -> _Fields:
    """A bit for each weight: set for the scale, else for its negative."""
    bits = np.unpackbits(block[..., 2:], axis=-1, bitorder="little")
    return bits * np.uint8(2) + np.uint8(8 - 1), _half(block[..., :2]), None


def _q2_0(block: Bytes) -> _Fields:
    """Two bits for each weight: 0, 1, 2 and 3 for -1, 0, 1 and 2 times the scale."""
    pairs = _pairs(block[..., None, 2:])  # those of one byte belong to weights beside each other
    return np.swapaxes(pairs, -1, -2) + np.uint8(8 - 1), _half(block[..., :2]), None


BLOCK_TABLES = read_table(__file__, "block_tables.toml")
_IQ2_XXS = np.frombuffer(bytes.fromhex(BLOCK_TABLES["iq2_xxs"]), "<u2")
_IQ2_MAGNITUDES = np.array([8, 25, 43], np.uint8)
_EIGHT = np.arange(8)
# Eight bytes at a time: the magnitudes of each pattern, and 255 for each minus sign, an even number of which the
# eighth sign makes.
_IQ2_PATTERNS = _IQ2_MAGNITUDES[(_IQ2_XXS[:, None] >> (2 * _EIGHT)) & 3].view(np.uint64)[:, 0]
_SEVEN_SIGNS = np.arange(128)[:, None] >> _EIGHT & 1
_IQ2_SIGNS = np.where(_EIGHT == 7, _SEVEN_SIGNS.sum(axis=1, keepdims=True) & 1, _SEVEN_SIGNS)
_IQ2_SIGNS = (_IQ2_SIGNS * 255).astype(np.uint8).view(np.uint64)[:, 0]


def _iq2_xxs(block: Bytes) -> _Fields:
    """Each 32 weights: four numbers of patterns, and in 32 bits four times 7 signs, and a scale of 4 bits."""
    groups = np.ascontiguousarray(block[..., 2:]).reshape(*block.shape[:2], 8, 8)
    packed = np.ascontiguousarray(groups[..., 4:]).view("<u4")
    signs = _IQ2_SIGNS[(packed >> np.arange(0, 28, 7, dtype=np.uint32)) & 127]
    levels = (_IQ2_PATTERNS[groups[..., :4]] ^ signs).view(np.uint8)
    levels -= signs.view(np.uint8)  # with the bits flipped above, 256 less the magnitude
    levels += np.uint8(128)
    scales = (np.float32(0.5) + (packed[..., 0] >> 28)) * np.float32(0.25) * _half(block[..., :2])[..., None]
    return levels, scales.astype(np.float32), None


BLOCK_FORMATS = {
    "Q4_0": BlockFormat(32, 18, 4, 32, False, partial(_scaled, _nibbles, False)),
    "Q4_1": BlockFormat(32, 20, 4, 32, True, partial(_scaled, _nibbles, True)),
    "Q5_0": BlockFormat(
        32, 22, 8, 32, False, partial(_scaled, lambda raw: _five_bits(raw) + np.uint8(128 - 16), False)
    ),
    "Q5_1": BlockFormat(32, 24, 8, 32, True, partial(_scaled, _five_bits, True)),
    "Q8_0": BlockFormat(32, 34, 8, 32, False, partial(_scaled, lambda raw: raw ^ np.uint8(128), False)),
    "Q2_K": BlockFormat(256, 84, 4, 16, True, _q2_k),
    "Q3_K": BlockFormat(256, 110, 4, 16, False, _q3_k),
    "Q4_K": BlockFormat(256, 144, 4, 32, True, lambda block: (_k_nibbles(block[..., 16:]), *_k_scales(block))),
    "Q5_K": BlockFormat(256, 176, 8, 32, True, _q5_k),
    "Q6_K": BlockFormat(256, 210, 8, 16, False, _q6_k),
    "IQ4_NL": BlockFormat(32, 18, 8, 32, False, partial(_scaled, lambda raw: _IQ4_LEVELS[_nibbles(raw)], False)),
    "IQ4_XS": BlockFormat(256, 136, 8, 32, False, _iq4_xs),
    "IQ2_XXS": BlockFormat(256, 66, 8, 32, False, _iq2_xxs),
    "Q1_0": BlockFormat(128, 18, 4, 128, False, _q1_0),
    "Q2_0": BlockFormat(64, 18, 4, 64, False, _q2_0),
    "TQ1_0": BlockFormat(256, 54, 4, 32, False, _tq1_0),
    "TQ2_0": BlockFormat(256, 66, 4, 32, False, _tq2_0),
    "MXFP4": BlockFormat(32, 17, 8, 32, False, _mxfp4),
}


def _integers(bits: int, has_zero_points: bool, block: Bytes) -> _Fields:
    scales = np.ascontiguousarray(block[..., :4]).view("<f4")[..., 0]
    return unpack_pairs(block[..., 5:], bits), scales, block[..., 4] if has_zero_points else None


def integer_storage(bits: int, block_size: int, has_zero_points: bool) -> str:
    """The name of the format of INTEGER_FORMATS that has these."""
    return f"int{bits}, blocks of {block_size}{' with zero points' * has_zero_points}"


# Levels as other quantisations make them: by block a scale of 4 bytes, a byte for the zero point, and levels as
# pack has them. No file stores rows so; they are made of its tensors (integer_rows).
INTEGER_FORMATS = {
    integer_storage(bits, size, zeros): BlockFormat(
        size, 5 + size * bits // 8, bits, size, False, partial(_integers, bits, zeros), zeros
    )
    for bits in (4, 8)
    for size in (16, 32, 64, 128)
    for zeros in (False, True)
}


def integer_rows(bits: int, block_size: int, levels: Bytes, scales: Floats, zero_points: Bytes | None) -> Bytes:
    """Rows of such a format, [rows, row_bytes].

    Args:
        levels: [rows, columns].
        scales: [rows, num_groups], of columns // num_groups each, which are whole blocks; zero_points likewise.
    """
    rows, columns = levels.shape
    repeats = columns // block_size // scales.shape[1]
    made = np.zeros((rows, columns // block_size, 5 + block_size * bits // 8), np.uint8)
    bytes_of_scales = np.ascontiguousarray(scales, "<f4").view(np.uint8).reshape(*scales.shape, 4)
    made[..., :4] = np.repeat(bytes_of_scales, repeats, axis=1)
    if zero_points is not None:
        made[..., 4] = np.repeat(zero_points, repeats, axis=1)
    made[..., 5:] = pack(levels, bits).reshape(*made.shape[:2], -1)
    return made.reshape(rows, -1)


def pack(levels: Bytes, bits: int) -> Bytes:
    """Levels along the last axis as MatMulNBits stores them: the even one of a pair in the low nibble."""
    if bits == 8:
        return np.ascontiguousarray(levels)
    if levels.shape[-1] % 2:
        levels = np.pad(levels, [(0, 0)] * (levels.ndim - 1) + [(0, 1)])
    return levels[..., 0::2] | (levels[..., 1::2] * _16)


def unpack_pairs(packed: Bytes, bits: int) -> Bytes:
    """Levels as pack has stored them."""
    return packed if bits == 8 else np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
