"""Checkpoints as quantisation methods write them, beside the weights that their tensors stand for.

Written plainly, from the formats' descriptions. Each takes the weights of one matrix, [rows, columns], and
gives its tensors by the ends of their names, and the weights that these stand for.
"""

import json
from typing import Any

import numpy as np

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
Made = tuple[dict[str, np.ndarray], np.ndarray]


def words(levels: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> np.ndarray:
    """32-bit words of the last axis, one integer after another from the lowest bits."""
    count = 32 // bits
    packed = np.zeros((*levels.shape[:-1], levels.shape[-1] // count), np.uint32)
    for place in range(count):
        packed |= levels[..., (order[place] if order else place) :: count].astype(np.uint32) << (place * bits)
    return packed.view(np.int32)


def rounded(weights: np.ndarray, bits: int, size: int, *, symmetric: bool) -> tuple[np.ndarray, ...]:
    """Levels [rows, columns], scales and zero points [rows, groups], and the weights that they stand for."""
    rows, columns = weights.shape
    blocks = weights.reshape(rows, -1, size)
    top = (1 << bits) - 1
    if symmetric:
        scales = np.abs(blocks).max(axis=2) / (1 << (bits - 1)) + 1e-6
        zeros = np.full(scales.shape, 1 << (bits - 1))
    else:
        blocks = np.where(np.arange(rows)[:, None, None] % 3, blocks, np.abs(blocks))  # some zero points are 0
        low, high = np.minimum(blocks.min(axis=2), 0), blocks.max(axis=2)
        scales = (high - low) / top + 1e-6
        zeros = np.clip(np.rint(-low / scales), 0, top).astype(int)
    scales = scales.astype(np.float16).astype(np.float32)
    levels = np.clip(np.rint(blocks / scales[..., None]) + zeros[..., None], 0, top).astype(int)
    back = ((levels - zeros[..., None]).astype(np.float32) * scales[..., None]).reshape(rows, columns)
    return levels.reshape(rows, columns), scales, zeros, back


def gptq(
    weights: np.ndarray, bits: int, size: int, *, symmetric: bool, shuffled: bool = False, v2: bool = False
) -> Made:
    _, columns = weights.shape
    size = columns if size < 0 else size
    order = np.random.default_rng(1).permutation(columns) if shuffled else np.arange(columns)
    levels, scales, zeros, back = rounded(weights[:, order], bits, size, symmetric=symmetric)
    inverse = np.argsort(order)
    points = words(zeros.T, bits)
    if not v2:  # the first version takes one from each, in whole words
        points = (points.view(np.uint32) - np.uint32(sum(1 << place for place in range(0, 32, bits)))).view(
            np.int32
        )
    tensors = {
        "qweight": words(levels[:, inverse], bits).T.copy(),  # words run along the columns
        "qzeros": points,
        "scales": scales.T.astype(np.float16).copy(),
        "g_idx": (inverse // size).astype(np.int32),
    }
    return tensors, back[:, inverse]


def awq(weights: np.ndarray, size: int) -> Made:
    levels, scales, zeros, back = rounded(weights, 4, size, symmetric=False)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {
        "qweight": words(levels.T.copy(), 4, order),
        "qzeros": words(zeros.T.copy(), 4, order),
        "scales": scales.T.astype(np.float16).copy(),
    }
    return tensors, back


def compressed_packed(weights: np.ndarray, bits: int, size: int, *, symmetric: bool) -> Made:
    levels, scales, zeros, back = rounded(weights, bits, size, symmetric=symmetric)
    tensors = {
        "weight_packed": words(levels, bits),
        "weight_scale": scales.astype(np.float16),
        "weight_shape": np.array(weights.shape, np.int64),
    }
    if not symmetric:
        tensors["weight_zero_point"] = words(zeros.T.copy(), bits).T.copy()
    return tensors, back


def compressed_int8(weights: np.ndarray) -> Made:
    levels, scales, _, back = rounded(weights, 8, weights.shape[1], symmetric=True)
    return {"weight": (levels - 128).astype(np.int8), "weight_scale": scales}, back


def e4m3(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes of the nearest floats of 8 bits, and these floats."""
    codes = np.arange(127)
    table = np.array(
        [code / 512 if code < 8 else (1 + code % 8 / 8) * 2.0 ** (code // 8 - 7) for code in codes], np.float32
    )
    nearest = np.searchsorted((table[1:] + table[:-1]) / 2, np.abs(values))
    signs = values < 0
    return (nearest + 128 * signs).astype(np.uint8), np.where(signs, -table[nearest], table[nearest])


def fp8(weights: np.ndarray, sides: tuple[int, int], name: str = "weight_scale_inv") -> Made:
    height, width = sides
    tall, wide = -(-weights.shape[0] // height), -(-weights.shape[1] // width)
    scales = np.zeros((tall, wide), np.float32)
    spread = np.zeros_like(weights)
    for i in range(tall):
        for j in range(wide):
            place = np.s_[i * height : (i + 1) * height, j * width : (j + 1) * width]
            scales[i, j] = np.abs(weights[place]).max() / 448
            spread[place] = scales[i, j]
    codes, floats = e4m3(weights / spread)
    return {"weight:F8_E4M3": codes, name: scales}, floats * spread


def mxfp4(weights: np.ndarray) -> Made:
    rows, columns = weights.shape
    blocks = weights.reshape(rows, -1, 32)
    exponents = np.floor(np.log2(np.abs(blocks).max(axis=2))) - 1
    scales = np.exp2(exponents).astype(np.float32)[..., None]
    codes = np.abs(blocks[..., None] / scales[..., None] - E2M1).argmin(axis=-1)
    flat = codes.reshape(rows, columns)
    packed = (flat[:, 0::2] | flat[:, 1::2] << 4).astype(np.uint8)
    return (
        {"weight_packed": packed, "weight_scale": (exponents + 127).astype(np.uint8)},
        (E2M1[codes] * scales).reshape(rows, columns).astype(np.float32),
    )


def nvfp4(weights: np.ndarray, *, of_modelopt: bool) -> Made:
    """Blocks of 16 with scales in floats of 8 bits, and one for all: compressed-tensors states its inverse."""
    rows, columns = weights.shape
    blocks, whole = weights.reshape(rows, -1, 16), np.float32(np.abs(weights).max() / (448 * 6))
    codes, inner = e4m3((np.abs(blocks).max(axis=2) / 6 / whole).astype(np.float32))
    if not of_modelopt:
        inverse = np.float32(1) / whole
        whole = np.float32(1) / inverse
    scales = (inner.astype(np.float32) * whole)[..., None]
    levels = np.abs(blocks[..., None] / scales[..., None] - E2M1).argmin(axis=-1)
    flat = levels.reshape(rows, columns)
    packed = (flat[:, 0::2] | flat[:, 1::2] << 4).astype(np.uint8)
    back = (E2M1[levels] * scales).reshape(rows, columns).astype(np.float32)
    unused = np.ones(1, np.float32)
    if of_modelopt:
        of_all = {"weight_scale_2": np.array(whole), "input_scale": unused}
        return {"weight": packed, "weight_scale:F8_E4M3": codes, **of_all}, back
    of_all = {"weight_global_scale": np.array([inverse]), "input_global_scale": unused}
    return {"weight_packed": packed, "weight_scale:F8_E4M3": codes, **of_all}, back


def nf4(weights: np.ndarray, *, nested: bool) -> Made:
    table = np.linspace(-1, 1, 16).astype(np.float32) ** 3
    flat = weights.reshape(-1, 64)
    peaks = np.abs(flat).max(axis=1).astype(np.float32)
    tensors: dict[str, np.ndarray] = {"weight.quant_map": table}
    state: dict[str, Any] = {
        "quant_type": "nf4",
        "blocksize": 64,
        "shape": list(weights.shape),
        "dtype": "float16",
    }
    if nested:
        offset = float(np.float32(peaks.mean()))
        codes = np.sort(np.random.default_rng(2).uniform(-1, 1, 256)).astype(np.float32)
        outer = np.array(
            [np.abs(part - offset).max() for part in np.split(peaks, range(256, len(peaks), 256))], np.float32
        )
        large = np.repeat(outer, 256)[: len(peaks)]
        inner = np.abs((peaks - np.float32(offset))[:, None] / large[:, None] - codes).argmin(axis=1)
        peaks = codes[inner] * large + np.float32(offset)
        tensors |= {"weight.absmax": inner.astype(np.uint8), "weight.nested_absmax": outer}
        tensors |= {"weight.nested_quant_map": codes}
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
    else:
        tensors["weight.absmax"] = peaks
    codes = np.abs(flat[..., None] / peaks[:, None, None] - table).argmin(axis=-1).reshape(-1)
    tensors["weight"] = (codes[0::2] << 4 | codes[1::2]).astype(np.uint8)[:, None]
    tensors["weight.quant_state.bitsandbytes__nf4"] = np.frombuffer(json.dumps(state).encode(), np.uint8)
    return tensors, (table[codes].reshape(flat.shape) * peaks[:, None]).reshape(weights.shape)


def llm_int8(weights: np.ndarray) -> Made:
    peaks = np.abs(weights).max(axis=1).astype(np.float32)
    levels = np.rint(weights * 127 / peaks[:, None]).astype(np.int8)
    back = levels.astype(np.float32) * (peaks / np.float32(127))[:, None]
    return {"weight": levels, "SCB": peaks, "weight_format": np.zeros((), np.uint8)}, back
