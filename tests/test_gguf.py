"""Hostile GGUF headers: whatever the bytes, the answer is a SourceError or a good read."""

import struct
from pathlib import Path

import numpy as np
import pytest

from edgespec.errors import SourceError
from edgespec.export.gguf import read_gguf


def header(num_tensors: int = 0, num_pairs: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_pairs)


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def tensor(name: bytes, shape: list[int], kind: int = 0, offset: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (header(version=1) + bytes(64), "version 1"),
        (header(version=99) + bytes(64), "version 99"),
        (header(num_tensors=2**60) + bytes(64), "ends early"),
        (header(num_pairs=2**63) + bytes(64), "ends early"),
        (header(num_pairs=1) + struct.pack("<Q", 2**62) + bytes(64), "ends early"),
        (header(num_pairs=1) + string(b"k") + struct.pack("<I", 77) + bytes(64), "unknown type 77"),
        (header(num_pairs=1) + string(b"k") + struct.pack("<IIQ", 9, 8, 2**60) + bytes(64), "ends early"),
        (header(num_pairs=1) + string(b"k") + struct.pack("<IIQ", 9, 9, 1) + bytes(64), "array of type 9"),
        (header(num_pairs=2) + 2 * (string(b"k") + struct.pack("<IB", 0, 1)) + bytes(64), "twice"),
        (header(num_tensors=1) + tensor(b"t", []) + bytes(64), "0 dimensions"),
        (header(num_tensors=1) + tensor(b"t", [1] * 5) + bytes(64), "5 dimensions"),
        (header(num_tensors=1) + tensor(b"t", [0, 4]) + bytes(64), "impossible"),
        (header(num_tensors=1) + tensor(b"t", [33, 4], kind=8) + bytes(64), "impossible for Q8_0"),
        (header(num_tensors=1) + tensor(b"t", [2**40, 2**40]) + bytes(64), "ends early"),
        (header(num_tensors=1) + tensor(b"t", [4], offset=2**63) + bytes(64), "ends early"),
        (header(num_tensors=1) + tensor(b"t", [4], kind=29) + bytes(64), "IQ1_M"),
        (header(num_tensors=1) + tensor(b"t", [4], kind=12345) + bytes(64), "number 12345"),
        (header(num_tensors=2) + 2 * tensor(b"t", [4]) + bytes(64), "twice"),
    ],
)
def test_damaged_header_is_refused_in_words(tmp_path: Path, data: bytes, words: str) -> None:
    (tmp_path / "a.gguf").write_bytes(data)
    with pytest.raises(SourceError, match=words):
        read_gguf(tmp_path / "a.gguf")


def test_alignment_must_be_a_power_of_two(tmp_path: Path) -> None:
    pair = string(b"general.alignment") + struct.pack("<II", 4, 7)
    (tmp_path / "a.gguf").write_bytes(header(num_pairs=1) + pair + bytes(64))
    with pytest.raises(SourceError, match="alignment 7"):
        read_gguf(tmp_path / "a.gguf")


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
