"""What memory this process may still take: the least of all that bounds it.

Reads figures and decides nothing. An accelerator's own memory is told by `device_memory`.
"""

import ctypes
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from edgespec.errors import UsageError

_UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:I?B)?", re.IGNORECASE)
_LEAST_LIMIT = 1 << 20
_NO_LIMIT = 1 << 60  # control groups of the first version write a number where there is no limit
_GROUPS, _MOUNT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


class Room(NamedTuple):
    """What is free, and what bounds it, in words.

    counts_files: a mapped file takes of it as a whole, not only what is in use.
    used_bytes: what this process holds already, where its limit was given.
    """

    free_bytes: int
    bound: str
    counts_files: bool = False
    used_bytes: int | None = None


Headroom = Callable[[], Room]
HOST = "host"  # the place of what lies in the machine's own memory
Rooms = Mapping[str, Room]
"""What is free by place; nothing is known of a place that is not named."""


def headroom(limit_bytes: int | None = None) -> Room:
    """The least of what the machine, control groups and the address space leave, and of a limit that was given.

    Takes about a quarter of a millisecond.

    Args:
        limit_bytes: What this process may hold in all.
    """
    rooms = [Room(psutil.virtual_memory().available, "the memory of this machine")]
    with suppress(OSError):
        free = group_rooms(_GROUPS.read_text(encoding="utf-8"), _MOUNT)
        rooms += [Room(free_bytes, "a control group's limit") for free_bytes in free]
    if (address_space := _address_space_limit()) is not None:
        free_bytes = address_space - psutil.Process().memory_info().vms
        rooms.append(Room(free_bytes, "the limit of the address space (ulimit -v)", counts_files=True))
    if limit_bytes is not None:
        used = psutil.Process().memory_info().rss
        bound = "the memory limit that was given (--memory)"
        rooms.append(Room(limit_bytes - used, bound, used_bytes=used))
    least = min(rooms)
    return least._replace(free_bytes=max(0, least.free_bytes))


def group_rooms(groups: str, mount: Path) -> Iterator[int]:
    """What each control group above a process leaves, in bytes.

    Pages of files that were not touched of late count as free.

    Args:
        groups: What /proc/self/cgroup says.
        mount: Where control groups are mounted.
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
            with suppress(OSError, ValueError):  # no limit, or none that is told
                limit, used = (int((folder / name).read_text()) for name in names)
                if limit < _NO_LIMIT:
                    yield limit - used + _stat(folder / "memory.stat", idle)
            if folder == root:
                break


def _stat(path: Path, name: str) -> int:
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


def parse_bytes(written: int | str) -> int:
    """Bytes of 512M, 2G, 1.5GiB or a plain number; a K is 1024.

    Raises:
        UsageError: It is none of these, or less than a megabyte.
    """
    match = _SIZE.fullmatch(written.strip()) if isinstance(written, str) else None
    if match:
        wanted = float(match[1]) * (1 << _UNITS[match[2].upper()])
        found = int(min(wanted, _NO_LIMIT))  # so many digits that they are infinite among them
    elif type(written) is int:
        found = written
    else:
        raise UsageError(f"the memory limit is {str(written)[:40]!r}; wanted bytes, such as 2G or 512M")
    if not _LEAST_LIMIT <= found < _NO_LIMIT:
        raise UsageError(
            f"the memory limit is '{str(written)[:40]}'; wanted 1M to a million T, such as 2G or 512M"
        )
    return found


def return_freed() -> None:
    """Give the system back what was freed, where the C library keeps it: of SmolLM2's session 36 of 315 MiB."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # another C library than GNU's
            ctypes.CDLL(None).malloc_trim(0)
