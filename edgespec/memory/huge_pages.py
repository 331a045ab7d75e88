"""Moves the weights on a CPU into huge pages, through Linux's MADV_COLLAPSE (madvise(2), Linux 6.1).

Each pass reads all weights, and looks up the address of each page: 512 times fewer where pages have 2 MB instead
of 4 kB, which counts most on virtual machines. Only memory that is in use is moved, so the process takes no more.
"""

import ctypes
import logging
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from mmap import PAGESIZE
from pathlib import Path
from threading import Timer
from time import monotonic

import numpy as np

from edgespec.system.threads import lower_priority

_LOG = logging.getLogger("edgespec.memory.huge_pages")
_SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")
_WAITED = Path("/proc/pressure/memory")
_PAGES = Path("/proc/self/pagemap")  # 64 bits for each page (Documentation/admin-guide/mm/pagemap.rst)
_OWN = np.uint64(1 << 63 | 1 << 56)  # it is in memory, and mapped by no other process
_COLLAPSE = 25  # MADV_COLLAPSE
_WORTH_BYTES = 64 << 20  # of a model; smaller ones lie in the processor's caches
_LEAST_BYTES = 4 << 20  # of a region that is worth looking at
_REST_S = 5.0  # in which an answer begins, which the moving would slow down by 6 %
_STEP_PAGES = 16  # huge pages a call, between which others get at the process's memory
_MOST_WAITED_S = 0.1  # of programs for memory: then it is short, or free in small pieces alone


def move_to_huge_pages(model_bytes: int) -> None:
    """Move the memory of this process a little later, in a thread of low priority, where the system lets it.

    model_bytes: What a model that was just opened takes of it.
    """
    if sys.platform == "linux" and model_bytes > _WORTH_BYTES and (huge_bytes := _read_huge_bytes()):
        timer = Timer(_REST_S, _move, (huge_bytes,))
        timer.daemon, timer.name = True, "huge pages"
        timer.start()


def _read_huge_bytes() -> int:
    """The bytes of a huge page; 0 where the system has none, or is set to use none."""
    try:
        if "[never]" in (_SETTINGS / "enabled").read_text("ascii"):
            return 0
        return int((_SETTINGS / "hpage_pmd_size").read_text("ascii"))
    except (OSError, ValueError):
        return 0


def _move(huge_bytes: int) -> None:
    lower_priority()
    with suppress(OSError):  # where /proc is not mounted, or lacks a file
        began_s, waited_s, num_moved = monotonic(), _waited_s(), 0
        libc = ctypes.CDLL(None)
        libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        for first, num_pages in _used_ranges(huge_bytes):
            if libc.madvise(first, num_pages * huge_bytes, _COLLAPSE) == 0:
                num_moved += num_pages
            if _waited_s() - waited_s > _MOST_WAITED_S:
                break
        moved_mb = num_moved * huge_bytes >> 20
        _LOG.debug("%d MB are in huge pages after %.1f s", moved_mb, monotonic() - began_s)


def _waited_s() -> float:
    """How long programs of this machine have waited for memory so far; 0 where Linux does not say it."""
    try:
        return int(re.findall(r"some .*total=(\d+)", _WAITED.read_text("ascii"))[0]) / 1e6
    except (OSError, LookupError):
        return 0.0


def _used_ranges(huge_bytes: int) -> Iterator[tuple[int, int]]:
    """Address and number of huge pages of each range whose pages are all in use; one has _STEP_PAGES at most.

    Pages that a fork uses too are left alone: moving would copy them.
    """
    with _PAGES.open("rb", buffering=0) as pages:
        for start, end in _regions():
            first = -(-start // huge_bytes) * huge_bytes
            for begin in range(first, end - huge_bytes + 1, _STEP_PAGES * huge_bytes):
                num_pages = min(_STEP_PAGES, (end - begin) // huge_bytes)
                pages.seek(begin // PAGESIZE * 8)
                states = np.frombuffer(pages.read(num_pages * huge_bytes // PAGESIZE * 8), np.uint64)
                is_own = (states & _OWN == _OWN).reshape(num_pages, -1).all(axis=1)
                edges = np.flatnonzero(np.diff(is_own, prepend=False, append=False)).tolist()
                for left, right in zip(edges[::2], edges[1::2], strict=True):
                    yield begin + left * huge_bytes, right - left


def _regions() -> Iterator[tuple[int, int]]:
    """Start and end of the large regions of private memory that belongs to no file."""
    for line in Path("/proc/self/maps").read_text("utf-8", "replace").splitlines():
        found = re.fullmatch(r"(\w+)-(\w+) rw-p \w+ 00:00 0\s*(\[heap\]|\[anon.*)?", line)
        if found and (end := int(found[2], 16)) - (start := int(found[1], 16)) >= _LEAST_BYTES:
            yield start, end
