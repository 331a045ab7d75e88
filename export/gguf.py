"""Read the header of a GGUF file, whole or split: metadata and where each tensor lies.

Checks every count, length and offset against the size of the file before it is used. The gguf package takes
520 MB and 6 s for the header of a model with 152,000 tokens; this takes 35 MB and 0.2 s. Format: the GGUF
specification, versions 2 and 3, little-endian.
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.errors import SourceError
from edgespec.export.blocks import BLOCK_FORMATS, BLOCK_TABLES
from edgespec.export.safetensors import require_apart
from edgespec.export.settings import missing, require_no_pointer
from edgespec.export.tensors import NO_SIZES, STORAGE_TYPES, Sizes, StoredTensor, unread
from edgespec.system.split_files import part_paths
from edgespec.system.units import format_bytes

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4
_DEFAULT_ALIGNMENT = 32
# Bounds for hostile files; the header of Qwen2.5, 152,000 tokens and as many merges, has 6 MB.
_MAX_HEADER_BYTES = 64 << 20
_LENGTH = struct.Struct("<Q")  # of a string
_MAX_TENSORS = 1 << 16
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}

_TYPE_NAMES: dict[int, str] = {int(number): name for number, name in BLOCK_TABLES["types"].items()}
_Info = tuple[str, list[int], int, int]  # of a tensor: name, shape, type, offset


@dataclass(frozen=True, slots=True)
class GGUF:
    """The header of a model; paths are the files that it was read from, in order."""

    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]
    paths: tuple[Path, ...]


def read_gguf(path: Path, sizes: Sizes = NO_SIZES) -> GGUF:
    """Read and check a header; no weights are read. Any part of a split file names the whole.

    sizes: Of parts of which only the header is here.

    Raises SourceError: Not a GGUF file, cut short, a count or offset beyond the file, an unknown tensor type, or a
    part that is missing or belongs to another file.
    """
    paths = part_paths(path)
    for part in paths:
        if not part.exists():
            why = f"is missing, one of {len(paths)} parts of one model"
            raise missing(part, why, "put all parts into one folder")
    files = []
    for part in paths:
        require_no_pointer(part)
        files.append(_read_header(part, sizes.get(part)))
    is_part = files[0].metadata.get("split.count", 1) not in (0, 1)
    return _join_parts(files) if len(files) > 1 or is_part else files[0]


def has_whole_header(path: Path, size: int) -> bool:
    """True if a file of size bytes, of which only the start is here, has its header, or is damaged."""
    try:
        if path.stat().st_size >= 24:
            _read_header(path, size)
    except _EndsEarly:
        return False
    except SourceError:
        pass
    return path.stat().st_size >= min(24, size)


class _EndsEarly(SourceError):
    """The file ends within its header."""


def _read_header(path: Path, whole_bytes: int | None) -> GGUF:
    """whole_bytes: The size of the file where only its start is here."""
    if (size := path.stat().st_size) < 24:
        raise SourceError(f"{path} has {size} bytes, too few for a GGUF file; fetch it again")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _Header(path, data, whole_bytes).read()


def _join_parts(files: list[GGUF]) -> GGUF:
    """Join parts to one model; the first holds the metadata, and each states its number and the count."""
    first = files[0].metadata
    tensors: dict[str, StoredTensor] = {}
    for number, file in enumerate(files):
        path, stated = file.paths[0], (file.metadata.get("split.no"), file.metadata.get("split.count"))
        if stated != (number, len(files)):
            raise SourceError(
                f"{path} states that it is part {stated[0]} (from 0) of {stated[1]}, but its name says part "
                f"{number} of {len(files)}; give it its own name, NAME-00001-of-0000N.gguf "
                "for the first, or fetch it again"
            )
        if other := [key for key, value in file.metadata.items() if key != "split.no" and first.get(key) != value]:
            raise SourceError(
                f"{path} is a part of another model than {files[0].paths[0].name}: they differ in {other[0]}; "
                "keep the parts of one model together"
            )
        if twice := tensors.keys() & file.tensors.keys():
            raise SourceError(f"{path} has tensor {min(twice)}, which an earlier part has; fetch all parts again")
        tensors |= file.tensors
    if len(tensors) != first.get("split.tensors.count", len(tensors)):
        raise SourceError(
            f"{files[0].paths[0]} states {first['split.tensors.count']} tensors, its {len(files)} parts have "
            f"{len(tensors)}; fetch all parts again"
        )
    return GGUF(first, tensors, tuple(path for file in files for path in file.paths))


@dataclass
class _Header:
    path: Path
    data: mmap.mmap
    whole_bytes: int | None = None
    position: int = 0

    def read(self) -> GGUF:
        if self._take(4) != _MAGIC:
            raise SourceError(
                f"{self.path} is not a GGUF file (it starts with {self.data[:4]!r}, wanted b'GGUF'). "
                "For safetensors give the folder; .bin and .pt are not read, since loading them runs code"
            )
        version = self._scalar("I")
        if version and version & 0xFFFF == 0:
            raise SourceError(f"{self.path} is big-endian; convert it to little-endian, or fetch another file")
        if version not in _VERSIONS:
            raise SourceError(f"{self.path} is GGUF version {version}; versions {_VERSIONS} are read")
        num_tensors, num_pairs = self._scalar("Q"), self._scalar("Q")
        self._require_room(num_tensors * 24 + num_pairs * 13, "its counts of tensors and metadata")
        if num_tensors > _MAX_TENSORS:
            raise SourceError(f"{self.path} has {num_tensors} tensors, at most {_MAX_TENSORS} are read")
        metadata: dict[str, Any] = {}
        for _ in range(num_pairs):
            key = self._string()
            if key in metadata:
                raise SourceError(f"{self.path} has the metadata key '{key}' twice; the file is damaged")
            metadata[key] = self._value(self._scalar("I"))
        infos: list[_Info] = []
        for _ in range(num_tensors):
            name, num_dimensions = self._string(), self._scalar("I")
            if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
                raise SourceError(
                    f"{self.path}: tensor {name} has {num_dimensions} dimensions; the file is damaged"
                )
            shape = [self._scalar("Q") for _ in range(num_dimensions)]
            infos.append((name, shape, self._scalar("I"), self._scalar("Q")))
        tensors = self._place_tensors(infos, metadata.get("general.alignment", _DEFAULT_ALIGNMENT))
        return GGUF(metadata, tensors, (self.path,))

    def _take(self, count: int) -> bytes:
        self._require_room(count, "a field")
        self.position += count
        return self.data[self.position - count : self.position]

    def _require_room(self, count: int, what: str) -> None:
        if count > len(self.data) - self.position:
            raise _EndsEarly(
                f"{self.path} ends early, within its header: {what} at byte {self.position} needs {count} bytes, "
                f"and the file has {len(self.data)} in all; it is cut short or damaged, fetch it again"
            )
        if self.position + count > _MAX_HEADER_BYTES:
            raise SourceError(
                f"{self.path}: {what} at byte {self.position} needs {count} bytes, but headers are read up to "
                f"{format_bytes(_MAX_HEADER_BYTES)}; the file is damaged or made to harm"
            )

    def _scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self._take(struct.calcsize(code)))[0]

    def _string(self) -> str:
        return self._take(self._scalar("Q")).decode("utf-8", errors="replace")

    def _strings(self, count: int) -> list[str]:
        """Strings one after the other; a call for each field would take a second for a large vocabulary."""
        data, at, end = self.data, self.position, min(len(self.data), _MAX_HEADER_BYTES)
        found = []
        for _ in range(count):
            size = _LENGTH.unpack_from(data, at)[0] if at + _LENGTH.size <= end else end
            start = at + _LENGTH.size
            if size > end - start:
                self.position = at
                self._string()  # raises what is wrong
            at = start + size
            found.append(data[start:at].decode("utf-8", errors="replace"))
        self.position = at
        return found

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        if kind not in _SCALARS:
            raise SourceError(f"{self.path} has a metadata value of unknown type {kind}; the file is damaged")
        return self._scalar(_SCALARS[kind])

    def _array(self) -> list[Any]:
        kind, count = self._scalar("I"), self._scalar("Q")
        if kind == _STRING:
            self._require_room(count * 8, "an array of strings")
            return self._strings(count)
        if kind not in _SCALARS:
            raise SourceError(f"{self.path} has a metadata array of type {kind}; numbers and strings are read")
        code = _SCALARS[kind]
        self._require_room(count * struct.calcsize(code), "an array")
        return list(struct.unpack(f"<{count}{code}", self._take(count * struct.calcsize(code))))

    def _place_tensors(self, infos: list[_Info], alignment: Any) -> dict[str, StoredTensor]:
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise SourceError(f"{self.path} has alignment {alignment}, wanted a power of two; the file is damaged")
        start = -(-self.position // alignment) * alignment
        tensors: dict[str, StoredTensor] = {}
        for name, shape, kind, offset in infos:
            if offset % alignment:
                raise SourceError(f"{self.path}: tensor {name} lies at {offset}, no multiple of {alignment}")
            tensor = self._stored_tensor(name, shape, kind, start + offset)
            if name in tensors:
                raise SourceError(f"{self.path} has tensor {name} twice; the file is damaged")
            tensors[name] = tensor
        require_apart(self.path, tensors.values(), self.whole_bytes or len(self.data))
        return tensors

    def _stored_tensor(self, name: str, shape: list[int], kind: int, offset: int) -> StoredTensor:
        storage = _TYPE_NAMES.get(kind, f"number {kind}")
        if storage not in STORAGE_TYPES:
            raise SourceError(
                f"{self.path}: tensor {name} is stored as {storage}, which is not read; take a file of the "
                f"model in one of {', '.join(STORAGE_TYPES)}: Q3_K_M and Q4_K_M are the nearest in size"
            )
        columns, rows = shape[0], math.prod(shape[1:])
        unit = BLOCK_FORMATS[storage].weights_per_block if storage in BLOCK_FORMATS else 1
        if rows < 1 or columns < 1 or columns % unit:
            raise SourceError(f"{self.path}: tensor {name} has shape {shape}, impossible for {storage}")
        tensor = StoredTensor(name, self.path, offset, rows, columns, storage)
        return tensor if self.whole_bytes is None else unread(tensor)
