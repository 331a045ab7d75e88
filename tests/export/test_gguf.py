"""Hostile GGUF headers: whatever the bytes, the answer is a SourceError or a good read."""

import shutil
import struct
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import tiny

from edgespec.errors import SourceError
from edgespec.export.gguf import read_gguf


def header(num_tensors: int = 0, num_pairs: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_pairs)


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def tensor(name: bytes, shape: list[int], kind: int = 0, offset: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def pair(key: bytes, kind: int, code: str, value: object) -> bytes:
    return string(key) + struct.pack("<I" + code, kind, value)


def tensors(*infos: tuple[list[int], int, int]) -> bytes:
    """A file of F32 tensors a, b, … with shape, type and offset, and 256 bytes of data."""
    stated = b"".join(tensor(bytes([97 + i]), *info) for i, info in enumerate(infos))
    return header(num_tensors=len(infos)) + stated + bytes(-len(stated) % 32 + 8 + 256)


def pairs(*stated: bytes) -> bytes:
    return header(num_pairs=len(stated)) + b"".join(stated) + bytes(64)


def array(kind: int, count: int) -> bytes:
    return string(b"k") + struct.pack("<IIQ", 9, kind, count)


ALIGNMENT = b"general.alignment"
DAMAGED = {
    "nothing at all": (b"", "0 bytes"),
    "only the magic": (b"GGUF", "4 bytes"),
    "counts cut off": (header()[:-1], "23 bytes"),
    "another magic": (b"ggjt" + header()[4:] + bytes(64), "not a GGUF file"),
    "magic in the other order": (b"FUGG" + header()[4:] + bytes(64), "not a GGUF file"),
    "version 0": (header(version=0) + bytes(64), "version 0"),
    "version 1": (header(version=1) + bytes(64), "version 1"),
    "version 99": (header(version=99) + bytes(64), "version 99"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 1, 1) + bytes(64), "big-endian"),
    "tensors beyond the file": (header(num_tensors=2**60) + bytes(64), "ends early"),
    "most tensors that can be said": (header(num_tensors=2**64 - 1) + bytes(64), "ends early"),
    "more tensors than any model has": (header(num_tensors=70_000) + bytes(70_000 * 24), "70000 tensors"),
    "pairs beyond the file": (header(num_pairs=2**63) + bytes(64), "ends early"),
    "pairs that end early": (header(num_pairs=2) + pair(b"k", 0, "B", 1) + bytes(3), "ends early"),
    "key beyond the file": (header(num_pairs=1) + struct.pack("<Q", 2**62) + bytes(64), "ends early"),
    "longest key that can be said": (header(num_pairs=1) + struct.pack("<Q", 2**64 - 1) + bytes(64), "ends early"),
    "text beyond the file": (pairs(pair(b"k", 8, "Q", 2**61)), "ends early"),
    "value of unknown type": (pairs(pair(b"k", 77, "B", 1)), "unknown type 77"),
    "value cut off": (header(num_pairs=1) + string(b"key") + struct.pack("<IH", 10, 1), "ends early"),
    "array of strings beyond the file": (pairs(array(8, 2**60)), "ends early"),
    "array of numbers beyond the file": (pairs(array(10, 2**61)), "ends early"),
    "array whose bytes overflow": (pairs(array(10, 2**64 - 1)), "ends early"),
    "array of unknown type": (pairs(array(13, 1)), "array of type 13"),
    "nested array": (pairs(array(9, 1)), "array of type 9"),
    "key twice": (pairs(pair(b"k", 0, "B", 1), pair(b"k", 0, "B", 1)), "twice"),
    "alignment 0": (pairs(pair(ALIGNMENT, 4, "I", 0)), "alignment 0"),
    "alignment 7": (pairs(pair(ALIGNMENT, 4, "I", 7)), "alignment 7"),
    "alignment below 0": (pairs(pair(ALIGNMENT, 5, "i", -32)), "alignment -32"),
    "alignment that is a number with a point": (pairs(pair(ALIGNMENT, 6, "f", 32.0)), "alignment 32.0"),
    "alignment that is yes": (pairs(pair(ALIGNMENT, 7, "?", True)), "alignment True"),
    "huge alignment": (
        header(num_tensors=1, num_pairs=1) + pair(ALIGNMENT, 10, "Q", 2**63) + tensor(b"t", [4]) + bytes(64),
        "ends early",
    ),
    "name of a tensor beyond the file": (
        header(num_tensors=1) + struct.pack("<Q", 2**62) + bytes(64),
        "ends early",
    ),
    "tensor infos that end early": (header(num_tensors=2) + tensor(b"t", [4, 4]) + bytes(9), "ends early"),
    "no dimensions": (tensors(([], 0, 0)), "0 dimensions"),
    "5 dimensions": (tensors(([1] * 5, 0, 0)), "5 dimensions"),
    "most dimensions that can be said": (
        header(num_tensors=1) + string(b"t") + struct.pack("<I", 2**32 - 1) + bytes(64),
        "dimensions",
    ),
    "extent 0": (tensors(([0, 4], 0, 0)), "impossible"),
    "extent -1": (tensors(([2**64 - 1, 1], 0, 0)), "ends early"),
    "extents whose product overflows": (tensors(([2**32, 2**32], 0, 0)), "ends early"),
    "rows whose bytes overflow": (tensors(([2**62], 0, 0)), "ends early"),
    "row that is no whole number of blocks": (tensors(([33, 4], 8, 0)), "impossible for Q8_0"),
    "K-quant row of 128": (tensors(([128, 2], 12, 0)), "impossible for Q4_K"),
    "type that is known and not read": (tensors(([4], 29, 0)), "IQ1_M"),
    "type that is not known": (tensors(([4], 12345, 0)), "number 12345"),
    "type that was withdrawn": (tensors(([4], 5, 0)), "number 5"),
    "type of an early ollama": (tensors(([4], 4, 0)), "pull it again"),
    "offset beyond the file": (tensors(([4], 0, 2**63)), "ends early"),
    "offset that is no multiple": (tensors(([4], 0, 8)), "no multiple of 32"),
    "data cut off": (tensors(([100], 0, 0)), "ends early"),
    "tensor twice": (header(num_tensors=2) + 2 * tensor(b"t", [4]) + bytes(64), "twice"),
    "tensors at one place": (tensors(([4], 0, 0), ([4], 0, 0)), "a and b overlap"),
    "tensors that overlap": (tensors(([4], 0, 64), ([20], 0, 0)), "b and a overlap"),
}


@pytest.mark.parametrize(("data", "words"), DAMAGED.values(), ids=DAMAGED)
def test_damaged_header_is_refused_in_words(tmp_path: Path, data: bytes, words: str) -> None:
    (tmp_path / "a.gguf").write_bytes(data)
    started = time.process_time()
    with traced() as peak, pytest.raises(SourceError, match=words):
        read_gguf(tmp_path / "a.gguf")
    assert time.process_time() - started < 1
    assert peak() < 8 << 20


@contextmanager
def traced() -> Iterator[Callable[[], int]]:
    """Gives the most bytes allocated at once so far."""
    tracemalloc.start()
    try:
        yield lambda: tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "claim",
    [
        struct.pack("<Q", 1 << 33),
        string(b"k") + struct.pack("<IQ", 8, 1 << 33),
        array(0, 1 << 33),
        array(8, 1 << 30),
    ],
    ids=["key", "text", "array of bytes", "array of strings"],
)
def test_claims_of_a_large_file_cost_no_memory(tmp_path: Path, claim: bytes) -> None:
    """A sparse file is large enough for any claim."""
    path = tmp_path / "a.gguf"
    with path.open("wb") as file:
        file.write(header(num_pairs=1) + claim)
        file.truncate(1 << 34)
    with traced() as peak, pytest.raises(SourceError, match="made to harm"):
        read_gguf(path)
    assert peak() < 8 << 20


@pytest.mark.slow
def test_no_byte_of_the_header_can_be_changed_into_a_crash(tiny_gguf: Path, tmp_path: Path) -> None:
    whole = tiny_gguf.read_bytes()
    rng = np.random.default_rng(0)
    path = tmp_path / "a.gguf"
    outcomes = set()
    for _ in range(400):
        damaged = bytearray(whole)
        for at in rng.integers(4, 9000, 3):
            damaged[at] = rng.integers(0, 256)
        path.write_bytes(damaged)
        try:
            read_gguf(path)
            outcomes.add("read")
        except SourceError:
            outcomes.add("refused")
    assert outcomes == {"read", "refused"}


# -- split files -------------------------------------------------------------------------------------


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """The tiny model in three or more parts."""
    tiny.write_gguf(tmp_path / "tiny.gguf", tiny.random_weights(), tensors_per_part=8)
    paths = sorted(tmp_path.glob("tiny-*.gguf"))
    assert len(paths) >= 3
    return paths


def test_any_part_of_a_split_file_stands_for_all(parts: list[Path], tiny_gguf: Path) -> None:
    whole = read_gguf(tiny_gguf)
    for part in parts:
        split = read_gguf(part)
        assert split.paths == tuple(parts)
        assert split.tensors.keys() == whole.tensors.keys()
        for name, tensor in whole.tensors.items():
            assert np.array_equal(split.tensors[name].vector(), tensor.vector())
        assert {
            key: value for key, value in split.metadata.items() if not key.startswith("split.")
        } == whole.metadata


def test_missing_part_is_named(parts: list[Path]) -> None:
    parts[1].unlink()
    with pytest.raises(SourceError, match=f"{parts[1].name} is missing"):
        read_gguf(parts[2])


def test_part_of_another_model_is_named(parts: list[Path], tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    tiny.write_gguf(tmp_path / "other" / "tiny.gguf", tiny.random_weights(tied=False), tensors_per_part=8)
    (tmp_path / "other" / parts[1].name).replace(parts[1])
    with pytest.raises(SourceError, match=rf"{parts[1].name} .*another model.*split\.tensors\.count"):
        read_gguf(parts[0])


def test_parts_that_changed_places_are_named(parts: list[Path]) -> None:
    first, second = parts[0].read_bytes(), parts[1].read_bytes()
    parts[0].write_bytes(second)
    parts[1].write_bytes(first)
    with pytest.raises(SourceError, match=f"{parts[0].name} states that it is part 1"):
        read_gguf(parts[0])


def test_part_that_was_renamed_is_not_taken_for_the_whole(parts: list[Path], tmp_path: Path) -> None:
    parts[0].rename(tmp_path / "model.gguf")
    with pytest.raises(SourceError, match="give it its own name"):
        read_gguf(tmp_path / "model.gguf")


def test_whole_file_with_the_name_of_a_part_is_read(tiny_gguf: Path, tmp_path: Path) -> None:
    only = Path(shutil.copy(tiny_gguf, tmp_path / "tiny-00001-of-00001.gguf"))
    assert read_gguf(only).tensors.keys() == read_gguf(tiny_gguf).tensors.keys()


@pytest.mark.parametrize("stated", [("B", 0, 3), ("f", 6, 3.0)])
def test_split_keys_of_other_types_are_no_crash(tmp_path: Path, stated: tuple[str, int, object]) -> None:
    code, kind, value = stated
    data = pairs(pair(b"split.count", kind, code, value), pair(b"split.no", 8, "Q", 0))
    (tmp_path / "a.gguf").write_bytes(data)
    with pytest.raises(SourceError, match="its name says part 0 of 1"):
        read_gguf(tmp_path / "a.gguf")
