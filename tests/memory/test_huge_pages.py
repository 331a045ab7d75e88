"""Memory in use is moved into huge pages, and no memory is taken by that."""

import logging
import mmap
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from edgespec.memory import huge_pages

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux moves memory into huge pages")


def bytes_of(array: np.ndarray, field: str) -> int:
    """What the system says of the region of memory that an array lies in, such as Rss."""
    address = array.ctypes.data
    is_it = False
    for line in Path("/proc/self/smaps").read_text("utf-8", "replace").splitlines():
        if region := re.match(r"(\w+)-(\w+) ", line):
            is_it = int(region[1], 16) <= address < int(region[2], 16)
        elif is_it and line.startswith(f"{field}:"):
            return int(line.split()[1]) << 10
    raise AssertionError(f"no {field} at {address:x}")


@needs_linux
def test_only_memory_in_use_is_moved(caplog: pytest.LogCaptureFixture) -> None:
    if not (huge_bytes := huge_pages._read_huge_bytes()):
        pytest.skip("this system has no huge pages, or is set to use none")
    memory = mmap.mmap(-1, 32 * huge_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    array = np.frombuffer(memory, np.uint8)
    array[: 16 * huge_bytes] = 7
    before = bytes_of(array, "Rss")
    with caplog.at_level(logging.DEBUG, "edgespec.memory.huge_pages"):
        huge_pages._move(huge_bytes)
    moved = bytes_of(array, "AnonHugePages")
    if not moved:
        pytest.skip("this system moves no memory: Linux before 6.1, or no free huge page")
    assert moved >= 14 * huge_bytes
    assert bytes_of(array, "Rss") < before + huge_bytes
    assert (array[: 16 * huge_bytes] == 7).all()
    assert "MB are in huge pages" in caplog.text


@pytest.mark.parametrize(
    ("enabled", "size", "wanted"),
    [
        ("always [madvise] never", "2097152\n", 2097152),
        ("[always] madvise never", "33554432\n", 33554432),
        ("always madvise [never]", "2097152\n", 0),
        ("always [madvise] never", None, 0),
        (None, None, 0),
    ],
)
def test_what_the_system_says_of_huge_pages_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, enabled: str | None, size: str | None, wanted: int
) -> None:
    monkeypatch.setattr(huge_pages, "_SETTINGS", tmp_path)
    for name, text in (("enabled", enabled), ("hpage_pmd_size", size)):
        if text is not None:
            (tmp_path / name).write_text(text)
    assert huge_pages._read_huge_bytes() == wanted


@needs_linux
def test_memory_that_a_fork_uses_too_is_not_copied() -> None:
    if not (huge_bytes := huge_pages._read_huge_bytes()):
        pytest.skip("this system has no huge pages, or is set to use none")
    memory = mmap.mmap(-1, 32 * huge_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    array = np.frombuffer(memory, np.uint8)
    array[:] = 7
    program = os.fork()
    if not program:
        signal.pause()
        os._exit(0)
    try:
        before = bytes_of(array, "Pss")
        huge_pages._move(huge_bytes)
        assert bytes_of(array, "Pss") < before + huge_bytes
    finally:
        os.kill(program, signal.SIGKILL)
        os.waitpid(program, 0)


@needs_linux
def test_ranges_end_where_a_page_is_not_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third of ten huge pages has a small page that is not in memory, the last one that a fork uses too."""
    huge_bytes, start = 1 << 21, 5 << 21
    states = np.full((start + 10 * huge_bytes) // mmap.PAGESIZE, 1 << 63 | 1 << 56, np.uint64)
    states[[(start + 2 * huge_bytes) // mmap.PAGESIZE, -1]] = 1 << 56, 1 << 63
    states.tofile(tmp_path / "pagemap")
    monkeypatch.setattr(huge_pages, "_PAGES", tmp_path / "pagemap")
    monkeypatch.setattr(huge_pages, "_STEP_PAGES", 4)
    monkeypatch.setattr(huge_pages, "_regions", lambda: iter([(start - 4096, start + 10 * huge_bytes + 4096)]))
    found = [((first - start) // huge_bytes, num) for first, num in huge_pages._used_ranges(huge_bytes)]
    assert found == [(0, 2), (3, 1), (4, 4), (8, 1)]


@needs_linux
def test_a_system_that_does_not_tell_of_its_memory_keeps_it_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(huge_pages, "_PAGES", tmp_path / "none")
    with caplog.at_level(logging.DEBUG, "edgespec.memory.huge_pages"):
        huge_pages._move(1 << 21)
    assert caplog.text == ""


@needs_linux
def test_moving_ends_where_programs_wait_for_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    waited = tmp_path / "memory"
    waited.write_text("some avg10=0.00 avg60=0.00 avg300=0.00 total=1000\n")
    monkeypatch.setattr(huge_pages, "_WAITED", waited)

    def ranges(huge_bytes: int) -> Iterator[tuple[int, int]]:
        yield 0, 1  # of no memory
        waited.write_text("some avg10=1.00 avg60=0.00 avg300=0.00 total=200000\n")
        yield 0, 1
        raise AssertionError("went on")

    monkeypatch.setattr(huge_pages, "_used_ranges", ranges)
    with caplog.at_level(logging.DEBUG, "edgespec.memory.huge_pages"):
        huge_pages._move(1 << 21)
    assert "0 MB are in huge pages" in caplog.text


@needs_linux
def test_small_models_are_left_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []
    timer = SimpleNamespace(start=lambda: begun.append("moving"))
    monkeypatch.setattr(huge_pages, "_read_huge_bytes", lambda: 1 << 21)
    monkeypatch.setattr(huge_pages, "Timer", lambda rest_s, work, given: timer)
    huge_pages.move_to_huge_pages(huge_pages._WORTH_BYTES)
    assert begun == []
    huge_pages.move_to_huge_pages(huge_pages._WORTH_BYTES + 1)
    assert begun == ["moving"]
