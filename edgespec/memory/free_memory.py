"""How much memory this process may still take, the least that any of its bounds leaves, and how much stays free.

A limit that somebody set for this process, such as --memory or a container's, says how much may be used, so nearly
all of it is. The memory of a machine and of a GPU is shared with other programs, so more of it stays free. Reads
figures and decides nothing; `device_memory` reads the memory of accelerators. What kernel32 of Windows reports was
tried with an imitation of it alone, not on Windows.
"""

import ctypes
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from edgespec.system.system_info import CGROUP_MOUNT, OWN_GROUPS, groups_above


class _MemoryStatus(ctypes.Structure):
    """MEMORYSTATUSEX of sysinfoapi.h"""

    _fields_ = (
        ("dwLength", ctypes.c_uint32),
        ("dwMemoryLoad", ctypes.c_uint32),
        ("ullTotalPhys", ctypes.c_uint64),
        ("ullAvailPhys", ctypes.c_uint64),
        ("ullTotalPageFile", ctypes.c_uint64),
        ("ullAvailPageFile", ctypes.c_uint64),
        ("ullTotalVirtual", ctypes.c_uint64),
        ("ullAvailVirtual", ctypes.c_uint64),
        ("ullAvailExtendedVirtual", ctypes.c_uint64),
    )


def open_kernel32() -> Any:
    """The library; None on other systems."""
    if sys.platform != "win32":
        return None
    library = ctypes.WinDLL("kernel32", use_last_error=True)
    library.CreateMemoryResourceNotification.restype = ctypes.c_void_p
    library.QueryMemoryResourceNotification.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    return library


def read_commit_bytes(kernel32: Any) -> int:
    """Bytes that Windows still promises to this process, in memory and page file; raises OSError: it does not say.

    Windows refuses an allocation beyond them, however much physical memory is free.
    """
    status = _MemoryStatus(dwLength=ctypes.sizeof(_MemoryStatus))
    if not kernel32.GlobalMemoryStatusEx(ctypes.byref(status)):
        raise OSError("GlobalMemoryStatusEx failed")
    return int(status.ullAvailPageFile)


# For texts, Python and the rounding of allocators, whatever bounds the memory.
RESERVE_BYTES = 96 << 20


class Reserve(NamedTuple):
    """Bytes that stay free.

    opening_bytes: what must remain once a drafter model is open.
    floor_bytes: with less than this free, drafter models are closed. It is half of what opening leaves, so that a
        model that was just opened is not closed by the next reading.
    """

    opening_bytes: int
    floor_bytes: int

    @property
    def context_bytes(self) -> int:
        """The bytes that must remain beside the target once its context is full."""
        return max(RESERVE_BYTES, self.floor_bytes)


LIMIT_RESERVE = Reserve(RESERVE_BYTES, RESERVE_BYTES // 2)


def _shared_reserve(total_bytes: int, *, share: int, most_bytes: int) -> Reserve:
    """What stays free of total_bytes of memory that other programs use too."""
    opening_bytes = max(RESERVE_BYTES, min(most_bytes, total_bytes // share))
    return Reserve(opening_bytes, opening_bytes // 2)


# Of a whole machine: a tenth, and 1 GiB from 10 GiB on. A desktop with less free begins to swap.
machine_reserve = partial(_shared_reserve, share=10, most_bytes=1 << 30)
# Of a GPU, which may drive the screen, and whose libraries load kernels as they are first used.
device_reserve = partial(_shared_reserve, share=16, most_bytes=512 << 20)


_NO_LIMIT = 1 << 60  # control groups of the first version write a number where there is no limit
# Files of limit and use in a control group of the first and of the second version, and the name of idle pages.
_FILES = (
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ("memory.max", "memory.current", "inactive_file"),
)


class FreeMemory(NamedTuple):
    """Free bytes, the name of what bounds them, and how many of them stay free."""

    free_bytes: int
    bound: str
    counts_files: bool = False  # a mapped file counts as a whole, not only the pages in use
    used_bytes: int | None = None  # what this process holds already, where the user gave a limit
    reserve: Reserve = LIMIT_RESERVE


ReadFreeMemory = Callable[[], FreeMemory]
HOST = "host"  # the place that is the machine's own memory
Bytes = Mapping[str, int]
"""By place: the host, and devices with memory of their own."""
FreeByPlace = Mapping[str, FreeMemory]
"""Free memory by place; a place that is not named is not checked."""


def free_memory(limit_bytes: int | None = None) -> FreeMemory:
    """The least that the machine, control groups, the address space and a limit of the user leave; takes 0.25 ms.

    limit_bytes is what this process may hold in all.
    """
    machine = psutil.virtual_memory()
    reserve = machine_reserve(machine.total)
    bounds = [FreeMemory(machine.available, "the memory of this machine", reserve=reserve)]
    if (kernel32 := open_kernel32()) is not None:
        with suppress(OSError):
            commit_bytes = read_commit_bytes(kernel32)
            bounds.append(FreeMemory(commit_bytes, "what Windows still promises to programs", reserve=reserve))
    with suppress(OSError):
        bounds += free_in_groups(OWN_GROUPS.read_text(encoding="utf-8"), CGROUP_MOUNT)
    if (address_space := _address_space_limit()) is not None:
        free_bytes = address_space - psutil.Process().memory_info().vms
        bounds.append(FreeMemory(free_bytes, "the limit of the address space (ulimit -v)", counts_files=True))
    if limit_bytes is not None:
        used = psutil.Process().memory_info().rss
        bound = "the memory limit that was given"
        bounds.append(FreeMemory(limit_bytes - used, bound, used_bytes=used))
    return tightest(bounds)


def free_on_host(read: ReadFreeMemory = free_memory) -> FreeByPlace:
    """The free memory by place of a machine whose devices have none of their own."""
    return {HOST: read()}


def total_memory() -> int:
    """The most bytes that a process can hold here: the memory of the machine, or a control group's limit."""
    bounds = [psutil.virtual_memory().total]
    with suppress(OSError):
        for folder, is_second in groups_above(OWN_GROUPS.read_text(encoding="utf-8"), CGROUP_MOUNT, "memory"):
            with suppress(OSError, ValueError):  # no limit, or none that can be read
                bounds.append(int((folder / _FILES[is_second][0]).read_text()))
    return min(bounds)


def tightest(bounds: Sequence[FreeMemory]) -> FreeMemory:
    """The bound that leaves the fewest bytes, with a reserve that keeps the reserve of each of them.

    Of 300 MiB that a limit leaves, 96 of them in reserve, and 600 MiB of the machine, 512 in reserve, 88 MiB may
    be used: the limit bounds, with a reserve of 212 MiB.
    """
    least = min(bounds)
    opening = floor = least.free_bytes
    for free_bytes, _, _, _, reserve in bounds:
        opening = min(opening, free_bytes - reserve.opening_bytes)
        floor = min(floor, free_bytes - reserve.floor_bytes)
    kept = Reserve(least.free_bytes - opening, least.free_bytes - floor)
    return least._replace(free_bytes=max(0, least.free_bytes), reserve=kept)


def free_in_groups(groups: str, mount: Path) -> Iterator[FreeMemory]:
    """What each control group above a process leaves; pages of files that have been idle count as free.

    groups is the text of /proc/self/cgroup, mount the folder of all control groups.
    """
    for folder, is_second in groups_above(groups, mount, "memory"):
        *names, idle = _FILES[is_second]
        with suppress(OSError, ValueError):  # no limit, or none that can be read
            limit, used = (int((folder / name).read_text()) for name in names)
            if limit < _NO_LIMIT:
                free_bytes = limit - used + _read_stat(folder / "memory.stat", idle)
                yield FreeMemory(free_bytes, "a control group's limit")


def limited_groups(groups: str, mount: Path) -> Iterator[Path]:
    """Folders of the control groups of the second version above a process whose memory is limited."""
    for folder, is_second in groups_above(groups, mount, "memory"):
        with suppress(OSError, ValueError):
            if is_second and int((folder / _FILES[1][0]).read_text()) < _NO_LIMIT:
                yield folder


def _read_stat(path: Path, name: str) -> int:
    with suppress(OSError):
        for line in path.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    return 0


def _address_space_limit() -> int | None:
    if sys.platform == "win32":
        return None
    import resource

    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def return_freed() -> None:
    """Return freed memory that the C library keeps to the system: 36 of 315 MiB of SmolLM2's session."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # another C library than GNU's
            ctypes.CDLL(None).malloc_trim(0)
