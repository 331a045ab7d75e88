"""Quantised checkpoints of Hugging Face: their tensors as the weights that they stand for.

Where a method's arithmetic is a scale times integers, in groups of columns, its levels, scales and zero points
are kept as they are (GPTQ, AWQ, integers of compressed-tensors, LLM.int8 of bitsandbytes). Floats of 8 and 4 bits
are read as the floats that they are, times their scales, and MXFP4 of gpt-oss as blocks. Nothing is rounded here.
Layers that a checkpoint leaves alone are read as in any other. Knows nothing of families and graphs.
"""

import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from edgespec.errors import SourceError
from edgespec.export.blocks import Bytes, Floats, unpack_pairs
from edgespec.export.quantized_tensors import Checkpoint, of_floats, of_groups, unpack
from edgespec.export.safetensors import StoredIntegers
from edgespec.export.settings import UNUSUAL
from edgespec.export.tensors import StoredTensor, Tensors
from edgespec.types import Array

# Scales of activations and of a KV cache in 8 bits, which do not exist here.
_UNUSED = re.compile(
    r".*\.(?:input|output|activation|kv|[qkv]|prob(?:_output)?)_(?:scale|global_scale|scale_ub|zero_point)"
)


def read_quantized(
    path: Path, stated: Mapping[str, Any], floats: Tensors, integers: Mapping[str, StoredIntegers]
) -> tuple[dict[str, StoredTensor], tuple[str, ...]]:
    """The weights of a checkpoint by the names that they have where nothing is quantised, and lines on them.

    stated: quantization_config of its config.json.

    Raises SourceError: The method is unknown, or tensors are missing or of other shapes.
    """
    method = require_method(path, stated)
    found = Checkpoint(path, stated, floats, integers)
    try:
        made = dict(_METHODS[method](found))
    except UNUSUAL as error:
        name = next(reversed(found.taken), "none")
        raise SourceError(
            f"{path}: tensor {name} or one beside it is damaged ({error}); fetch it again"
        ) from error
    done = {name for name in (*floats, *integers) if name in found.taken or _UNUSED.fullmatch(name)}
    if left := integers.keys() - done:
        name = min(left)
        is_stack = not name.endswith(".weight") and f"{name}_scale_inv" in floats
        how = "with experts in one tensor," if is_stack else "but has no scales for"
        raise _unread(path, f"quantised by {method}, {how} {name} ({integers[name].storage})")
    kept = {name: tensor for name, tensor in floats.items() if name not in done}
    return kept | made, _notes(method, made.values())


def require_method(path: Path, stated: Mapping[str, Any]) -> str:
    """The name of the method of a checkpoint. Raises SourceError: It is unknown."""
    unnamed = {"load_in_4bit": "bitsandbytes", "group_size": "MLX"}
    guesses = (name for key, name in unnamed.items() if key in stated)
    method = stated.get("quant_method", next(guesses, "a method that config.json does not name"))
    if method not in _METHODS:
        raise _unread(path, f"quantised by {method}")
    return str(method)


def _unread(path: Path, found: str) -> SourceError:
    return SourceError(
        f"{path} is {found}, which is not read; get the model unquantised, as a GGUF file, or quantised by one of "
        f"{', '.join(_METHODS)}"
    )


def _notes(method: str, made: Iterable[StoredTensor]) -> tuple[str, ...]:
    widened = sum(not tensor.is_blocks for tensor in made)
    if not widened:
        return ()
    return (
        f"{widened} matrices are quantised by {method} in a way that no kernel here takes; their exact values are "
        "read as floats, which take 4 bytes each with --precision source, and fewer with int8 or int4",
    )


# GPTQ: qweight [columns · bits / 32, rows], qzeros [groups, rows · bits / 32], scales [groups, rows], and g_idx,
# the group of each column. Its first version stores zero points less one, taken from whole words: behind a zero
# point of 0 the next one in the word has lost another one.
def _gptq(found: Checkpoint) -> Iterator[tuple[str, StoredTensor]]:
    method = str(found.stated.get("checkpoint_format", "gptq"))
    if method not in ("gptq", "gptq_v2"):
        raise _unread(found.path, f"GPTQ in the layout {method}, not gptq or gptq_v2")
    for module in [*found.modules("qweight")]:
        weight, zeros = found.words(module, "qweight"), found.words(module, "qzeros")
        groups = found.integer(module, "g_idx").values() if found.has(module, "g_idx") else None
        num_groups, rows = found.sides_of(module, "scales")
        bits = 32 * zeros.shape[-1] // rows
        columns = weight.shape[0] * 32 // max(bits, 1)
        if bits not in (2, 4, 8):
            raise _unread(found.path, f"GPTQ in {bits} bits ({module}), not in 2, 4 or 8")
        if weight.shape[1:] != (rows,) or zeros.shape != (num_groups, rows * bits // 32):
            raise found.refuse(module, f"weights of {weight.shape} and zero points of {zeros.shape}")
        ones = np.uint32((method == "gptq") * (0xFFFFFFFF // ((1 << bits) - 1)))
        levels, read = partial(_gptq_levels, weight, bits), partial(_gptq_groups, found, module, bits, ones)
        yield f"{module}.weight", of_groups(found, module, (rows, columns), bits, read, groups, levels)


def _gptq_groups(found: Checkpoint, module: str, bits: int, ones: np.uint32) -> tuple[Floats, Bytes]:
    zeros = found.words(module, "qzeros").array().view(np.uint32)
    return found.numbers(module, "scales"), unpack(zeros + ones, bits)


def _gptq_levels(weight: StoredIntegers, bits: int, start: int, stop: int) -> Bytes:
    return unpack(np.ascontiguousarray(weight.array()[:, start:stop].T), bits)


# AWQ: qweight [columns, rows / 8], qzeros [groups, rows / 8], scales [groups, rows]; the eight in a word in this
# order.
_AWQ_ORDER = np.array([0, 4, 1, 5, 2, 6, 3, 7])


def _awq(found: Checkpoint) -> Iterator[tuple[str, StoredTensor]]:
    version, bits = str(found.stated.get("version", "gemm")).lower(), found.stated.get("bits", 4)
    if version != "gemm" or bits != 4:
        raise _unread(found.path, f"AWQ in {bits} bits for {version}, not in 4 for gemm")
    for module in [*found.modules("qweight")]:
        weight, zeros = found.words(module, "qweight"), found.words(module, "qzeros")
        num_groups, rows = found.sides_of(module, "scales")
        if weight.shape[-1] * 8 != rows or zeros.shape != (num_groups, rows // 8):
            raise found.refuse(module, f"weights of {weight.shape} and zero points of {zeros.shape}")
        levels, read = partial(_awq_levels, weight), partial(_awq_groups, found, module)
        yield f"{module}.weight", of_groups(found, module, (rows, weight.shape[0]), 4, read, None, levels)


def _awq_groups(found: Checkpoint, module: str) -> tuple[Floats, Bytes]:
    return found.numbers(module, "scales"), _awq_unpack(found.words(module, "qzeros").array())


def _awq_unpack(packed: Array) -> Bytes:
    eights = unpack(packed, 4).reshape(*packed.shape, 8)
    return np.ascontiguousarray(eights[..., _AWQ_ORDER]).reshape(len(packed), -1)


def _awq_levels(weight: StoredIntegers, start: int, stop: int) -> Bytes:
    first = start // 8
    words = np.ascontiguousarray(weight.array()[:, first : -(-stop // 8)])
    return np.ascontiguousarray(_awq_unpack(words).T[start - 8 * first : stop - 8 * first])


# AutoRound: packed as the methods above do, of GPTQ as its first or its second version.
_PACKINGS: dict[str, tuple[Callable[[Checkpoint], Iterator[tuple[str, StoredTensor]]], str]] = {
    **dict.fromkeys(("auto_round:auto_gptq", "auto_round:gptq", "auto_round:gptqmodel"), (_gptq, "gptq")),
    "auto_round": (_gptq, "gptq_v2"),
    **dict.fromkeys(("auto_round:auto_awq", "auto_round:awq"), (_awq, "")),
}


def _auto_round(found: Checkpoint) -> Iterator[tuple[str, StoredTensor]]:
    packing = str(found.stated.get("packing_format", "auto_round:auto_gptq"))
    if packing not in _PACKINGS:
        raise _unread(found.path, f"quantised by AutoRound as {packing}")
    read, layout = _PACKINGS[packing]
    return read(replace(found, stated={**found.stated, "checkpoint_format": layout}))


# compressed-tensors: weight_packed [rows, words of columns], or weight in 8 bits; weight_scale [rows, groups], or
# one for each row or for all; zero points likewise, packed along the rows. Integers are stored as levels less the
# middle.
_FORMATS = {
    *("dense", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision"),
    *("pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized"),
}


def _compressed(found: Checkpoint) -> Iterator[tuple[str, StoredTensor]]:
    parts = [found.stated, found.stated.get("sparsity_config") or {}, *_groups_of_modules(found.stated)]
    if unknown := {str(part.get("format") or "dense") for part in parts} - _FORMATS:
        raise _unread(found.path, f"compressed as {min(unknown)}")
    if (found.stated.get("transform_config") or {}).get("config_groups"):
        raise _unread(found.path, "compressed with transforms of its activations (transform_config)")
    for module in [*found.modules("weight_packed")]:
        packed = found.integer(module, "weight_packed")
        if packed.storage == "U8":
            yield f"{module}.weight", _fp4(found, module, packed)
            continue
        packed = found.words(module, "weight_packed")
        rows, columns = (int(size) for size in found.integer(module, "weight_shape").values())
        bits = 32 * packed.shape[-1] // columns
        if bits not in (2, 4, 8) or packed.shape != (rows, columns * bits // 32):
            raise found.refuse(module, f"packed weights of {packed.shape} for {rows} rows of {columns}")
        levels = partial(_packed_levels, packed, bits)
        yield f"{module}.weight", _by_rows(found, module, (rows, columns), bits, levels)
    for module in [*found.modules("weight_scale")]:
        if f"{module}.weight_scale" in found.taken:
            continue
        weight = found.integer(module, "weight")
        if weight.storage.startswith("F8"):
            yield f"{module}.weight", _fp8_matrix(found, weight, found.numbers(module, "weight_scale"))
        else:
            levels = partial(_signed_levels, weight)
            yield f"{module}.weight", _by_rows(found, module, found.sides(weight), 8, levels)


def _groups_of_modules(stated: Mapping[str, Any]) -> Collection[Mapping[str, Any]]:
    groups: Mapping[str, Mapping[str, Any]] = stated.get("config_groups") or {}
    return groups.values()


def _packed_levels(packed: StoredIntegers, bits: int, start: int, stop: int) -> Bytes:
    return unpack(packed.array()[start:stop], bits)


def _signed_levels(weight: StoredIntegers, start: int, stop: int) -> Bytes:
    return weight.array()[start:stop].view(np.uint8) ^ np.uint8(128)


def _by_rows(
    found: Checkpoint, module: str, shape: tuple[int, int], bits: int, levels: Callable[[int, int], Bytes]
) -> StoredTensor:
    groups = found.integer(module, "weight_g_idx").values() if found.has(module, "weight_g_idx") else None
    if groups is not None and (groups == -1).any():  # none was chosen
        groups = None
    return of_groups(
        found, module, shape, bits, partial(_groups_of_rows, found, module, shape[0], bits), groups, levels
    )


def _groups_of_rows(found: Checkpoint, module: str, rows: int, bits: int) -> tuple[Floats, Bytes]:
    scales = _spread(found, module, found.numbers(module, "weight_scale"), rows)
    middle = 1 << (bits - 1)
    points = np.full(scales.shape, middle, np.uint8)
    if found.has(module, "weight_zero_point"):
        stored = found.integer(module, "weight_zero_point")
        if stored.storage == "I32":
            own: Array = unpack(np.ascontiguousarray(stored.array().T), bits).T[:rows]
        else:
            own = (stored.array().astype(np.int16) + middle).astype(np.uint8)
        points = _spread(found, module, own.reshape(len(own), -1), rows)
    return scales.T, points.T


def _spread(found: Checkpoint, module: str, values: Array, rows: int) -> Array:
    """Values by row, [rows, num_groups], of one for each row or for all."""
    if values.size == 1:
        return np.broadcast_to(values.reshape(1, 1), (rows, 1))
    values = values.reshape(rows, -1) if len(values) == 1 and values.size == rows else values
    if len(values) != rows:
        raise found.refuse(module, f"scales of {values.shape} for {rows} rows")
    return values


def _fp4(found: Checkpoint, module: str, packed: StoredIntegers) -> StoredTensor:
    """Floats of 4 bits, two in a byte: MXFP4 with scales of 8 bits, powers of 2; NVFP4 with floats of 8 bits."""
    scales = found.integer(module, "weight_scale")
    rows, columns = packed.shape[0], 2 * packed.shape[-1]
    if scales.shape[0] != rows or columns % scales.shape[-1]:
        raise found.refuse(module, f"packed weights of {packed.shape} and scales of {scales.shape}")
    size = columns // scales.shape[-1]
    factor = np.float32(1)
    if found.has(module, "weight_global_scale"):
        factor = np.float32(1) / found.numbers(module, "weight_global_scale").reshape(-1)[0]
    if found.has(module, "weight_scale_2"):  # as modelopt writes it
        factor = found.numbers(module, "weight_scale_2").reshape(-1)[0]
    table = _E4M3 if scales.storage.startswith("F8") else _E8M0

    def values(start: int, stop: int) -> Floats:
        levels = unpack_pairs(packed.array()[start:stop], 4).reshape(stop - start, -1, size)
        weights: Floats = _E2M1[levels] * (table[scales.array()[start:stop]] * factor)[..., None]
        return weights.reshape(stop - start, -1)

    return of_floats(f"{module}.weight", packed.path, (rows, columns), values)


def _values_of_codes(kind: ir.DataType) -> Floats:
    codes = np.arange(1 << kind.bitwidth, dtype=np.uint8)
    return codes.view(kind.numpy()).astype(np.float32)


_E2M1, _E4M3 = _values_of_codes(ir.DataType.FLOAT4E2M1), _values_of_codes(ir.DataType.FLOAT8E4M3FN)
_E5M2, _E8M0 = _values_of_codes(ir.DataType.FLOAT8E5M2), _values_of_codes(ir.DataType.FLOAT8E8M0)


# FP8 of DeepSeek and Qwen: weight, and weight_scale_inv for blocks of 128 × 128; of others weight_scale for each
# row, or for all.
def _fp8(found: Checkpoint) -> Iterator[tuple[str, StoredTensor]]:
    for ending in ("weight_scale_inv", "weight_scale"):
        for module in [*found.modules(ending)]:
            scales = found.numbers(module, ending)
            yield f"{module}.weight", _fp8_matrix(found, found.integer(module, "weight"), scales)


# modelopt of NVIDIA: FP8 with a scale for all, or NVFP4 in bytes.
def _modelopt(found: Checkpoint) -> Iterator[tuple[str, StoredTensor]]:
    for module in [*found.modules("weight_scale")]:
        if (weight := found.integer(module, "weight")).storage == "U8":
            yield f"{module}.weight", _fp4(found, module, weight)
        else:
            yield f"{module}.weight", _fp8_matrix(found, weight, found.numbers(module, "weight_scale"))


def _sides_of_blocks(stated: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns of the blocks that have a scale each, where the settings state any."""
    schemes = [stated, *(group.get("weights") or {} for group in _groups_of_modules(stated))]
    sides = [scheme.get("weight_block_size") or scheme.get("block_structure") for scheme in schemes]
    return next(((int(found[0]), int(found[1])) for found in sides if found), None)


def _fp8_matrix(found: Checkpoint, weight: StoredIntegers, scales: Floats) -> StoredTensor:
    (rows, columns), table = found.sides(weight), _E4M3 if weight.storage == "F8_E4M3" else _E5M2
    if not weight.storage.startswith("F8"):
        raise found.refuse(weight.name, f"weights of type {weight.storage}")
    height, width = _sides_of_blocks(found.stated) or (rows, columns)
    if scales.shape != (-(-rows // height), -(-columns // width)):
        if scales.size not in (1, rows):
            raise found.refuse(weight.name, f"{weight.shape} weights and {scales.shape} scales")
        scales = scales.reshape(-1, 1)
        height, width = rows // scales.size, columns

    def values(start: int, stop: int) -> Floats:
        own = scales[np.arange(start, stop) // height]
        weights: Floats = table[weight.array()[start:stop]] * np.repeat(own, width, axis=1)[:, :columns]
        return weights

    return of_floats(weight.name, weight.path, (rows, columns), values)


# bitsandbytes: in 4 bits a table of 16 values, and the largest magnitude of each block of weights, which may be in
# 8 bits of a table itself; in 8 bits a scale for each row, SCB.
def _bitsandbytes(found: Checkpoint) -> Iterator[tuple[str, StoredTensor]]:
    for module in [*found.modules("SCB")]:
        weight, scales = found.integer(module, "weight"), found.numbers(module, "SCB").reshape(1, -1)
        if found.has(module, "weight_format") and (order := found.integer(module, "weight_format").values()).any():
            raise _unread(
                found.path, f"quantised for one kind of GPU (weight_format {order[0]} of {module}, not 0)"
            )
        shape, levels = found.sides(weight), partial(_signed_levels, weight)
        if scales.size != shape[0]:
            raise found.refuse(module, f"{scales.size} scales for {shape[0]} rows")
        yield f"{module}.weight", of_groups(found, module, shape, 8, partial(_row_scales, scales), None, levels)
    for name in [name for name in found.integers if ".weight.quant_state.bitsandbytes__" in name]:
        yield _bitsandbytes_4bit(found, *name.split(".weight.quant_state.", 1))


def _row_scales(peaks: Floats) -> tuple[Floats, Bytes]:
    return peaks / np.float32(127), np.full(peaks.shape, 128, np.uint8)


def _bitsandbytes_4bit(found: Checkpoint, module: str, kind: str) -> tuple[str, StoredTensor]:
    state = json.loads(found.integer(module, f"weight.quant_state.{kind}").values().astype(np.uint8).tobytes())
    rows, columns = (int(size) for size in state["shape"])
    packed, size = found.integer(module, "weight"), int(state["blocksize"])
    table = found.numbers(module, "weight.quant_map").reshape(-1)
    peaks = partial(_peaks, found, module, state)
    if packed.count * 2 != rows * columns or len(table) != 16 or len(peaks()) * size < rows * columns:
        raise found.refuse(module, f"{packed.count} bytes for {rows} rows of {columns} weights")

    def values(start: int, stop: int) -> Floats:
        first, last = start * columns, stop * columns
        pairs = packed.array().reshape(-1)[first // 2 : -(-last // 2)]
        levels = np.stack([pairs >> 4, pairs & 15], axis=-1).reshape(-1)[first % 2 :][: last - first]
        weights: Floats = table[levels] * peaks()[np.arange(first, last) // size]
        return weights.reshape(-1, columns)

    return f"{module}.weight", of_floats(f"{module}.weight", packed.path, (rows, columns), values)


def _peaks(found: Checkpoint, module: str, state: Mapping[str, Any]) -> Floats:
    """The largest magnitude of each block of weights."""
    if found.has(module, "weight.nested_absmax"):
        codes = found.numbers(module, "weight.nested_quant_map").reshape(-1)
        outer = np.repeat(
            found.numbers(module, "weight.nested_absmax").reshape(-1), int(state["nested_blocksize"])
        )
        inner = codes[found.integer(module, "weight.absmax").values()]
        peaks: Floats = inner * outer[: len(inner)] + np.float32(state["nested_offset"])
        return peaks
    return found.numbers(module, "weight.absmax").reshape(-1)


# MXFP4 of gpt-oss: the experts' NAME_blocks [experts, rows, groups, 16], two values in a byte, and NAME_scales
# [experts, rows, groups]. The blocks of a GGUF file have a scale, and the second half in the high nibbles.
def _mxfp4(found: Checkpoint) -> Iterator[tuple[str, StoredTensor]]:
    for name in [name for name in found.integers if name.endswith("_blocks")]:
        module, _, part = name.removesuffix("_blocks").rpartition(".")
        blocks, scales = (found.integer(module, f"{part}_{kind}") for kind in ("blocks", "scales"))
        if blocks.shape != (*scales.shape, 16) or {blocks.storage, scales.storage} != {"U8"}:
            raise found.refuse(name, f"blocks of {blocks.shape} and scales of {scales.shape}")
        *stack, groups = scales.shape
        make = partial(_mxfp4_rows, blocks, scales)
        tensor = StoredTensor(name, blocks.path, 0, math.prod(stack), 32 * groups, "MXFP4", make=make)
        yield f"{module}.{part}.weight", tensor


def _mxfp4_rows(blocks: StoredIntegers, scales: StoredIntegers, start: int, stop: int) -> Bytes:
    count, groups = stop - start, scales.shape[-1]
    pairs = blocks.array().reshape(-1, groups, 16)[start:stop]
    halves = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(count, groups, 2, 16)
    made = [scales.array().reshape(-1, groups, 1)[start:stop], halves[:, :, 0] | halves[:, :, 1] << 4]
    return np.concatenate(made, axis=-1).reshape(count, -1)


_METHODS: dict[str, Callable[[Checkpoint], Iterator[tuple[str, StoredTensor]]]] = {
    "gptq": _gptq,
    "awq": _awq,
    "auto-round": _auto_round,
    "compressed-tensors": _compressed,
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "modelopt": _modelopt,
    "bitsandbytes": _bitsandbytes,
    "mxfp4": _mxfp4,
}
