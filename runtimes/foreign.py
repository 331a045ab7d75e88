"""Checks a graph that others made before ONNX Runtime opens it.

Its weights may lie in other files that it names. These must be plain files of its own folder, and hold all the
bytes that it refers to. Nothing in it may need code that ONNX Runtime does not bring. This guards against files
that were made to harm, not against a folder that changes while it is read.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.decoding.decoder import Decoder
from edgespec.errors import EdgeSpecError, IntegrityError, ManifestError, MemoryExhausted
from edgespec.manifest import Manifest
from edgespec.system.text_files import POINTER, is_pointer

_DOMAINS = {"", "ai.onnx", "com.microsoft"}
_EXTERNAL_KEYS = {"location", "offset", "length", "checksum"}
_MEMORY_MARKER = "_ORT_MEM_ADDR_"  # by which ONNX Runtime marks addresses in its own memory
_LARGEST_BYTES = 2 << 30  # what protobuf can hold
_FIX = "get the folder again from a place that you trust"


def inspect(folder: Path, manifest: Manifest) -> Manifest:
    """Check the graph of a foreign folder; returns the manifest with its cache's type and its optional inputs.

    Its context ends where longer texts take other angles (longrope), which the keys in the cache would lack.

    Raises:
        IntegrityError: Weights that lie outside the folder, in no plain file, or beyond its end.
        ManifestError: No graph, or one with operators that ONNX Runtime does not have.
    """
    model = _read(folder / manifest.graph)
    _check_domains(folder / manifest.graph, model)
    _check_weights(folder, model)
    manifest = replace(manifest, context_length=min([manifest.context_length, *_borders(folder, model.graph)]))
    return _complete(folder / manifest.graph, manifest, model.graph)


OWN = "what the signature in edgespec.json says; export the model again"
OTHERS = "what past_present_share_buffer in its configuration says; build the folder again"


def probe(decoder: Decoder, stated: str = OTHERS) -> None:
    """Run some tokens at once and again after a wrong turn: with a wrongly stated cache the rows differ.

    stated: Where the cache is stated, and what to do.

    Raises ManifestError: The rows differ by more than rounding.
    """
    tokens = np.arange(6, dtype=np.int32) % decoder.vocab_size
    if decoder.context_length < len(tokens):
        return
    try:
        whole = decoder.logits(tokens, 2).copy()
        decoder.logits(np.concatenate([tokens[:3], tokens[:2]]), 2)
        pieces = decoder.logits(tokens, 2)
    except MemoryExhausted:
        raise
    except EdgeSpecError as error:
        raise ManifestError(
            "the model cannot read several tokens after others, which drafting and long prompts need: build it "
            f"for cpu in int4 or fp32. Or its cache is not {stated} ({error})"
        ) from None
    scale = float(np.abs(whole - whole.mean(axis=1, keepdims=True)).max())
    if not float(np.abs(pieces - whole).max()) <= 0.1 * scale:
        raise ManifestError(
            f"the model gives other logits when a text is read in pieces: its cache is not {stated}"
        )


def _read(path: Path) -> Any:
    import onnx  # 0.15 s, and only foreign folders need it
    from google.protobuf.message import DecodeError

    _check_file(path.parent, path.name, "the graph")
    if path.stat().st_size > _LARGEST_BYTES:
        raise ManifestError(f"{path} has more than 2.1 GB, which no ONNX graph has; {_FIX}")
    model = onnx.ModelProto()
    try:
        model.ParseFromString(path.read_bytes())
    except DecodeError as error:
        raise ManifestError(f"{path} is not an ONNX graph, or is cut short ({error}); {_FIX}") from None
    if not model.graph.node:
        raise ManifestError(f"{path} is not an ONNX graph: it has no nodes; {_FIX}")
    return model


def _messages(message: Any, kind: str) -> Iterator[Any]:
    """All messages of a kind, wherever they are nested: subgraphs, functions, sparse tensors."""
    if message.DESCRIPTOR.name == kind:
        yield message
    if message.DESCRIPTOR.name == "TensorProto":
        return  # holds no other messages that count, and perhaps gigabytes
    for field, value in message.ListFields():
        if field.message_type is not None:
            for inner in [value] if hasattr(value, "ListFields") else value:
                yield from _messages(inner, kind)


def _check_domains(path: Path, model: Any) -> None:
    known = _DOMAINS | {function.domain for function in model.functions}
    for node in _messages(model, "NodeProto"):
        if node.domain not in known:
            raise ManifestError(
                f"{path} needs the operator {node.op_type} of {node.domain!r}, which is not part of ONNX Runtime; "
                "libraries of custom operators are not loaded"
            )
        if node.op_type == "EPContext":
            raise ManifestError(
                f"{path} holds a program compiled for one device (EPContext); build the folder again for cpu"
            )


def _check_weights(folder: Path, model: Any) -> None:
    from onnx import TensorProto

    parts: dict[str, set[tuple[int, int]]] = defaultdict(set)
    sizes: dict[str, int] = {}
    for tensor in _messages(model, "TensorProto"):
        if tensor.data_location != TensorProto.EXTERNAL and not tensor.external_data:
            continue
        name, start, stop = _location(folder, tensor)
        if name not in sizes:
            sizes[name] = _check_file(folder, name, f"tensor {tensor.name!r}")
        if stop > sizes[name]:
            raise IntegrityError(
                f"tensor {tensor.name!r} lies in bytes {start} to {stop} of {folder / name}, which has "
                f"{sizes[name]}; {_FIX}"
            )
        parts[name].add((start, stop))
    for name, ranges in parts.items():
        for (start, stop), (next_start, next_stop) in pairwise(sorted(ranges)):
            if next_start < stop and next_start < next_stop:
                raise IntegrityError(
                    f"{folder / name}: tensors at bytes {start} to {stop} and {next_start} to {next_stop} "
                    f"overlap; {_FIX}"
                )


def _location(folder: Path, tensor: Any) -> tuple[str, int, int]:
    """A tensor's file name, its first byte and the byte after its last."""
    entries = [(_text(entry.key), _text(entry.value)) for entry in tensor.external_data]
    stated = dict(entries)
    unknown = stated.keys() - _EXTERNAL_KEYS
    if unknown or len(stated) < len(entries) or "location" not in stated:
        keys = ", ".join(key for key, _ in entries)
        raise IntegrityError(
            f"{folder}: tensor {tensor.name!r} has external data with the keys {keys}; "
            f"wanted location, offset and length, each once; {_FIX}"
        )
    numbers = {}
    for key in ("offset", "length"):
        text = stated.get(key, "0")
        if not (text.isascii() and text.isdecimal() and len(text) < 20):
            raise IntegrityError(f"{folder}: tensor {tensor.name!r} has the {key} {text[:40]!r}; {_FIX}")
        numbers[key] = int(text)
    needed = _num_bytes(tensor)
    length = numbers["length"] if "length" in stated else needed
    if needed is None or length != needed:
        raise IntegrityError(
            f"{folder}: tensor {tensor.name!r} of {list(tensor.dims)} needs {needed} bytes and has {length}; "
            f"{_FIX}"
        )
    return stated["location"], numbers["offset"], numbers["offset"] + length


def _text(stored: str | bytes) -> str:
    """Protobuf returns bytes where a text is not valid UTF-8."""
    return stored if isinstance(stored, str) else stored.decode("utf-8", "backslashreplace")


def _num_bytes(tensor: Any) -> int | None:
    """Size of a tensor's elements; None for a type or shape without one."""
    from onnx import helper

    try:
        bits = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    except (KeyError, ValueError, TypeError):
        return None
    if bits == np.dtype(object) or any(dimension < 0 for dimension in tensor.dims):
        return None
    count: int = prod(tensor.dims)
    packed = {"int4": 4, "uint4": 4, "float4_e2m1fn": 4, "int2": 2, "uint2": 2}.get(bits.name)
    return (count * packed + 7) // 8 if packed else count * int(bits.itemsize)


def _check_file(folder: Path, name: str, what: str) -> int:
    """Returns the size of a file, which must be a plain one directly in the folder."""
    if _MEMORY_MARKER in name:
        raise IntegrityError(f"{folder}: {what} points into memory; {_FIX}")
    if not name or Path(name).name != name or name in (".", "..") or "\\" in name or "\0" in name:
        raise IntegrityError(f"{folder}: {what} lies in {name[:200]!r}, not in a file of its folder; {_FIX}")
    path = folder / name
    try:
        inside = path.resolve(strict=True).parent == folder.resolve()
        is_plain, state = path.is_file(), path.stat()
    except (OSError, RuntimeError) as error:
        raise ManifestError(f"{path} cannot be opened ({error}); {_FIX}") from None
    if not inside:
        raise IntegrityError(f"{path} is a link out of its folder; copy the file there instead")
    if not is_plain:
        raise IntegrityError(f"{path} is not a regular file; {_FIX}")
    if state.st_nlink > 1:
        raise IntegrityError(f"{path} is known under {state.st_nlink} names (hard links); copy the file instead")
    if is_pointer(path):
        raise IntegrityError(f"{path} {POINTER}")
    return state.st_size


def _borders(folder: Path, graph: Any) -> list[int]:
    """The lengths in tokens that a graph compares the text's with, to choose its table of angles."""
    from onnx import TensorProto, numpy_helper

    constants = (node for node in graph.node if node.op_type == "Constant")
    values = {tensor.name: tensor for tensor in graph.initializer}
    values |= {name: part.t for node in constants for name in node.output for part in node.attribute}
    conditions = {name for node in graph.node if node.op_type == "If" for name in node.input}
    # Without If, as for DirectML, the last position says whether all move to the second half of one table.
    lasts = {name for node in graph.node if node.op_type == "ReduceMax" for name in node.output}
    compared = (node for node in graph.node if node.op_type in ("Greater", "GreaterOrEqual"))
    chosen = (node for node in compared if conditions & {*node.output} or lasts & {*node.input})
    found = [values[name] for node in chosen for name in node.input if name in values]
    whole = [each for each in found if each.data_type in (TensorProto.INT64, TensorProto.INT32)]
    try:
        numbers = [int(numpy_helper.to_array(each, str(folder))) for each in whole]
    except (ValueError, TypeError) as error:
        raise ManifestError(f"{folder} has a damaged number in its graph ({error}); {_FIX}") from None
    return [number for number in numbers if number > 0]


def _complete(path: Path, manifest: Manifest, graph: Any) -> Manifest:
    from onnx import TensorProto

    inputs = {value.name: value.type.tensor_type.elem_type for value in graph.input}
    names, kv = manifest.signature, manifest.kv_cache
    past = names.caches(kv.attention_layers)[0][0]
    dtype = {TensorProto.FLOAT: "float32", TensorProto.FLOAT16: "float16"}.get(inputs.get(past, TensorProto.FLOAT))
    if dtype is None:
        kind = TensorProto.DataType.Name(inputs[past]).lower()
        raise ManifestError(f"{path} has a cache of {kind}, wanted float32 or float16; build the folder again")
    return replace(
        manifest,
        kv_cache=replace(kv, dtype=dtype),
        signature=replace(
            names,
            attention_mask=names.attention_mask if names.attention_mask in inputs else None,
            position_ids=names.position_ids if names.position_ids in inputs else None,
        ),
    )
