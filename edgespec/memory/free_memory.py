"""How much memory this process may still take: the least that any of its bounds leaves.

Reads figures and decides nothing. `device_memory` reads the memory of accelerators.
"""

import ctypes
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

_NO_LIMIT = 1 << 60  # control groups of the first version write a number where there is no limit
_GROUPS, _MOUNT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


class FreeMemory(NamedTuple):
    """Free bytes, and the name of what bounds them."""

    free_bytes: int
    bound: str
    counts_files: bool = False  # a mapped file counts as a whole, not only the pages in use
    used_bytes: int | None = None  # what this process holds already, where the user gave a limit


ReadFreeMemory = Callable[[], FreeMemory]
HOST = "host"  # the place that is the machine's own memory
FreeByPlace = Mapping[str, FreeMemory]
"""Free memory by place; a place that is not named is not checked."""


def free_memory(limit_bytes: int | None = None) -> FreeMemory:
    """The least that the machine, control groups, the address space and a limit of the user leave; takes 0.25 ms.

    limit_bytes is what this process may hold in all.
    """
    bounds = [FreeMemory(psutil.virtual_memory().available, "the memory of this machine")]
    with suppress(OSError):
        free = free_in_groups(_GROUPS.read_text(encoding="utf-8"), _MOUNT)
        bounds += [FreeMemory(free_bytes, "a control group's limit") for free_bytes in free]
    if (address_space := _address_space_limit()) is not None:
        free_bytes = address_space - psutil.Process().memory_info().vms
        bounds.append(FreeMemory(free_bytes, "the limit of the address space (ulimit -v)", counts_files=True))
    if limit_bytes is not None:
        used = psutil.Process().memory_info().rss
        bound = "the memory limit that was given (--memory)"
        bounds.append(FreeMemory(limit_bytes - used, bound, used_bytes=used))
    least = min(bounds)
    return least._replace(free_bytes=max(0, least.free_bytes))


def free_in_groups(groups: str, mount: Path) -> Iterator[int]:
    """Free bytes of each control group above a process; pages of files that have been idle count as free.

    groups is the text of /proc/self/cgroup, mount the folder of all control groups.
    """
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, names, idle = mount, ("memory.max", "memory.current"), "inactive_file"
        elif "memory" in controllers.split(","):
            root, idle = mount / "memory", "total_inactive_file"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        group = root / path.lstrip("/")
        # Within a container the path is often that of the host, and the mount is the group itself.
        for folder in (group, *group.parents) if group.is_dir() else (root,):
            with suppress(OSError, ValueError):  # no limit, or none that can be read
                limit, used = (int((folder / name).read_text()) for name in names)
                if limit < _NO_LIMIT:
                    yield limit - used + _read_stat(folder / "memory.stat", idle)
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
