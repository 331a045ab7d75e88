"""How much memory this process may still take: the least that any of its bounds leaves.

Reads figures and decides nothing. `device_memory` reads the memory of accelerators.
"""

import ctypes
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from edgespec.memory.reserve import LIMIT_RESERVE, Reserve, machine_reserve
from edgespec.memory.windows_memory import open_kernel32, read_commit_bytes

_NO_LIMIT = 1 << 60  # control groups of the first version write a number where there is no limit
# Files of limit and use in a control group of the first and of the second version.
_LIMITS_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")
_LIMITS_2 = ("memory.max", "memory.current")
OWN_GROUPS, CGROUP_MOUNT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


class FreeMemory(NamedTuple):
    """Free bytes, the name of what bounds them, and how many of them stay free."""

    free_bytes: int
    bound: str
    counts_files: bool = False  # a mapped file counts as a whole, not only the pages in use
    used_bytes: int | None = None  # what this process holds already, where the user gave a limit
    reserve: Reserve = LIMIT_RESERVE


ReadFreeMemory = Callable[[], FreeMemory]
HOST = "host"  # the place that is the machine's own memory
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
        free = free_in_groups(OWN_GROUPS.read_text(encoding="utf-8"), CGROUP_MOUNT)
        bounds += [FreeMemory(free_bytes, "a control group's limit") for free_bytes in free]
    if (address_space := _address_space_limit()) is not None:
        free_bytes = address_space - psutil.Process().memory_info().vms
        bounds.append(FreeMemory(free_bytes, "the limit of the address space (ulimit -v)", counts_files=True))
    if limit_bytes is not None:
        used = psutil.Process().memory_info().rss
        bound = "the memory limit that was given (--memory)"
        bounds.append(FreeMemory(limit_bytes - used, bound, used_bytes=used))
    return tightest(bounds)


def tightest(bounds: Sequence[FreeMemory]) -> FreeMemory:
    """The bound that leaves the fewest bytes, with a reserve that keeps the reserve of each of them.

    Of 300 MiB that a limit leaves, 96 of them in reserve, and 600 MiB of the machine, 512 in reserve, 88 MiB may
    be used: the limit bounds, with a reserve of 212 MiB.
    """
    least = min(bounds)
    usable = zip(*([each.free_bytes - kept for kept in each.reserve] for each in bounds), strict=True)
    reserve = Reserve(*(least.free_bytes - min(each) for each in usable))
    return least._replace(free_bytes=max(0, least.free_bytes), reserve=reserve)


def free_in_groups(groups: str, mount: Path) -> Iterator[int]:
    """Free bytes of each control group above a process; pages of files that have been idle count as free.

    groups is the text of /proc/self/cgroup, mount the folder of all control groups.
    """
    for folder, names, idle in _groups_above(groups, mount):
        with suppress(OSError, ValueError):  # no limit, or none that can be read
            limit, used = (int((folder / name).read_text()) for name in names)
            if limit < _NO_LIMIT:
                yield limit - used + _read_stat(folder / "memory.stat", idle)


def limited_groups(groups: str, mount: Path) -> Iterator[Path]:
    """Folders of the control groups of the second version above a process whose memory is limited."""
    for folder, (limit, _), _ in _groups_above(groups, mount):
        with suppress(OSError, ValueError):
            if limit == _LIMITS_2[0] and int((folder / limit).read_text()) < _NO_LIMIT:
                yield folder


def _groups_above(groups: str, mount: Path) -> Iterator[tuple[Path, tuple[str, str], str]]:
    """Folders of control groups, with the names of the files of limit and use, and of idle pages."""
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, names, idle = mount, _LIMITS_2, "inactive_file"
        elif "memory" in controllers.split(","):
            root, names, idle = mount / "memory", _LIMITS_1, "total_inactive_file"
        else:
            continue
        group = root / path.lstrip("/")
        # Within a container the path is often that of the host, and the mount is the group itself.
        for folder in (group, *group.parents) if group.is_dir() else (root,):
            yield folder, names, idle
            if folder == root:
                break


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
