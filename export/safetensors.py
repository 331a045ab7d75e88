"""Read the headers of safetensors files, one or sharded: where each tensor lies.

Lists of integers, such as the token of each row of a trimmed vocabulary head, can be read too. By hand, since the
safetensors package reads tensors whole, and bfloat16 only through another framework. Every offset is checked.
Format: the safetensors README.
"""

import json
import math
import re
import stat
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgespec.errors import SourceError
from edgespec.export.settings import advise_gguf, missing, require_no_pointer
from edgespec.export.tensors import NO_SIZES, Sizes, StoredTensor, unread
from edgespec.system.typed_json import read_json, require_unique
from edgespec.types import Array

_MAX_HEADER_BYTES = 100_000_000  # the limit of the reference implementation
_MAX_SIDES = 5  # of a convolution over frames of video
_WRAPPERS = ("_orig_mod.", "module.", "")  # that torch.compile and DDP put before all names
_FLOATS = ("F32", "F16", "BF16")
# Floats of 8 bits are read as their bytes.
_INTEGERS = {"I64": "<i8", "I32": "<i4", "BOOL": "u1", "I8": "i1", "U8": "u1", "F8_E4M3": "u1", "F8_E5M2": "u1"}


@dataclass(frozen=True, slots=True)
class StoredIntegers:
    """Integers, or truths as 0 and 1, at an offset of a file."""

    name: str
    path: Path
    offset: int
    shape: tuple[int, ...]
    storage: str

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.count * np.dtype(_INTEGERS[self.storage]).itemsize

    def array(self) -> Array:
        """All of them in their shape, mapped and not read. Raises SourceError: The file ends too early."""
        try:
            return np.memmap(self.path, _INTEGERS[self.storage], "r", self.offset, self.shape)
        except ValueError:
            raise SourceError(
                f"{self.path} ends inside tensor {self.name}; the file is cut short, fetch it again"
            ) from None

    def values(self) -> npt.NDArray[np.int64]:
        """All of them in one dimension, in memory; raises as array does."""
        return np.array(self.array(), np.int64).reshape(-1)


def require_floats(integers: Mapping[str, StoredIntegers]) -> None:
    """Raises SourceError: There are integers among the weights of a checkpoint that is not quantised."""
    for one in integers.values():
        raise SourceError(f"{one.path}: tensor {one.name} has dtype {one.storage}; known are {', '.join(_FLOATS)}")


def read_tensors(
    files: Sequence[Path], sizes: Sizes = NO_SIZES
) -> tuple[dict[str, StoredTensor], dict[str, StoredIntegers]]:
    """The weights and the integers of some files by name; sizes: of files of which only the header is here.

    Raises SourceError: A damaged header, or a dtype that is not read.
    """
    tensors: dict[str, StoredTensor] = {}
    integers: dict[str, StoredIntegers] = {}
    for path in files:
        for one in _read_header(path, sizes.get(path)):
            if isinstance(one, StoredTensor):
                tensors[one.name] = one
            else:
                integers[one.name] = one
    prefix = next(each for each in _WRAPPERS if all(name.startswith(each) for name in (*tensors, *integers)))
    return (
        {name.removeprefix(prefix): one for name, one in tensors.items()},
        {name.removeprefix(prefix): one for name, one in integers.items()},
    )


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model. Raises SourceError: There are none, or one is missing.

    model.safetensors is all of it where the index does not name it, which is then one of earlier weights. Without
    either a file of any name is, if there is but one.
    """
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if not index.exists():
        if not single.exists():
            others = (path for path in folder.glob("*.safetensors") if path.name != "adapter_model.safetensors")
            if parts := sorted(others):
                if len(parts) == 1 and re.search("-of-(?!0*1[.])", parts[0].name) is None:
                    return parts
                raise SourceError(
                    f"{folder} has {parts[0].name}, but no model.safetensors.index.json, which lists the weights "
                    "of all parts; fetch it too"
                )
            advice = advise_gguf(folder) or "weights of .bin and .pt are not read, since loading them runs code"
            if any(folder.rglob("*.onnx")):
                advice = (
                    "ONNX models load where GenAI's builder made them: give the folder that has genai_config.json"
                )
            raise missing(single, "is missing, and so is model.safetensors.index.json", advice)
        return [single]
    require_no_pointer(index)
    try:
        names = sorted(set(read_json(index, _MAX_HEADER_BYTES)["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SourceError(f"{index} is damaged ({error}); fetch it again") from None
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not name.strip("."):
            raise SourceError(f"{index} names '{name}', which is not a file of its own folder; fetch it again")
    if single.name not in names and single.exists():
        return [single]
    for name in names:
        if not (folder / name).exists():
            raise missing(folder / name, f"is missing, one of {len(names)} files in {index.name}", "fetch it")
    return [folder / name for name in names]


def has_whole_header(path: Path, size: int) -> bool:
    """True if a file of size bytes, of which only the start is here, has its header, or is damaged."""
    with path.open("rb") as file:
        prefix = file.read(8)
    if len(prefix) < 8:
        return size < 8
    needed = 8 + struct.unpack("<Q", prefix)[0]
    is_here: bool = path.stat().st_size >= needed
    return is_here or needed > min(8 + _MAX_HEADER_BYTES, size)


def _read_header(path: Path, whole_bytes: int | None) -> list[StoredTensor | StoredIntegers]:
    """whole_bytes: The size of the file where only its start is here."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):  # opening a pipe waits until somebody writes
        raise SourceError(f"{path} is not a regular file; fetch it again")
    require_no_pointer(path)
    size = found.st_size if whole_bytes is None else whole_bytes
    with path.open("rb") as file:
        prefix = file.read(8)
        header_bytes = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if header_bytes > min(_MAX_HEADER_BYTES, size - 8):
            raise SourceError(
                f"{path} is cut short or not a safetensors file: it has {size} bytes, and its header alone needs "
                f"{header_bytes + 8 if len(prefix) == 8 else 'more than 8'}; fetch it again"
            )
        try:
            header = json.loads(file.read(header_bytes), object_pairs_hook=require_unique)
            header.pop("__metadata__", None)
            tensors = [_stored(path, name, info, 8 + header_bytes) for name, info in header.items()]
            if whole_bytes is not None:
                tensors = [unread(one) if isinstance(one, StoredTensor) else one for one in tensors]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise SourceError(f"{path} has a damaged header ({error}); fetch it again") from None
    require_apart(path, tensors, size)
    return tensors


def require_apart(path: Path, tensors: Iterable[StoredTensor | StoredIntegers], size: int) -> None:
    """Raises SourceError: Tensors of a file overlap, or lie beyond its size in bytes."""
    placed = sorted(tensors, key=lambda tensor: tensor.offset)
    if (needed := max((tensor.offset + tensor.num_bytes for tensor in placed), default=0)) > size:
        raise SourceError(
            f"{path} ends early: it has {size} bytes, and the tensors that it lists need {needed}; the download "
            "is not complete, fetch it again"
        )
    for one, next_ in pairwise(placed):
        if one.offset + one.num_bytes > next_.offset:
            raise SourceError(f"{path}: tensors {one.name} and {next_.name} overlap; the file is damaged")


def _stored(path: Path, name: str, info: dict[str, Any], start: int) -> StoredTensor | StoredIntegers:
    storage, shape, (begin, end) = info["dtype"], info["shape"], info["data_offsets"]
    if storage not in (*_FLOATS, *_INTEGERS):
        raise SourceError(f"{path}: tensor {name} has dtype {storage}; known are {', '.join(_FLOATS)}")
    if not all(type(number) is int for number in (*shape, begin, end)):
        raise SourceError(f"{path}: tensor {name} has shape {shape} at {begin} to {end}, wanted whole numbers")
    shape = shape or [1]  # as the scale of a whole matrix is
    if min(shape) < 1 or len(shape) > _MAX_SIDES:
        raise SourceError(
            f"{path}: tensor {name} has shape {shape}, wanted up to {_MAX_SIDES} numbers above 0; fetch it again"
        )
    rows = math.prod(shape[:-1])  # of a stack of matrices all rows, one matrix after another
    tensor: StoredTensor | StoredIntegers
    if storage in _FLOATS:
        tensor = StoredTensor(name, path, start + begin, rows, shape[-1], storage)
    else:
        tensor = StoredIntegers(name, path, start + begin, tuple(shape), storage)
    if begin < 0 or end - begin != tensor.num_bytes:
        raise SourceError(
            f"{path}: tensor {name} has {tensor.num_bytes} bytes, and the header states {begin} to {end}; the "
            "file is damaged, fetch it again"
        )
    return tensor
