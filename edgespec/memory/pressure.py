"""True if programs wait for memory, whatever is free: what the system reports of stalls, swap and low memory.

Free memory says how much may be taken; pressure says that other programs wait for it already, as when a system has
begun to swap. Reads figures and decides nothing. It has run on Linux, and on imitations of what macOS and Windows
report.
"""

import ctypes
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import psutil

from edgespec.memory.free_memory import limited_groups, open_kernel32
from edgespec.system.system_info import CGROUP_MOUNT, OWN_GROUPS
from edgespec.system.units import format_bytes

# What Linux reports is a mean over 10 s, so it is not read more often than this.
_READ_S = 1.0
# Shares of the last 10 s. systemd-oomd ends programs at 60 % over 30 s; a desktop is slow long before that.
_SOME_WAITED, _MANY_WAITED, _ALL_WAITED = 0.10, 0.40, 0.10
# Growth of the swap in use within so many seconds. Idle pages trickle out at a few MiB a second.
_SWAP_WINDOW_S = 10.0
_SWAP_BEGINS, _SWAP_RUNS = 64 << 20, 256 << 20
_LOW, _HIGH = 0, 1  # MEMORY_RESOURCE_NOTIFICATION_TYPE of memoryapi.h
# kern.memorystatus_vm_pressure_level of macOS
_MACOS_LEVELS = {2: "warning", 4: "critical"}


class Level(IntEnum):
    """How short memory is."""

    NONE = 0
    SOME = 1  # nothing more should be opened
    HIGH = 2  # something should be closed


class Pressure(NamedTuple):
    """How short memory is, and what shows it."""

    level: Level = Level.NONE
    sign: str = ""


ReadPressure = Callable[[], Pressure]
NO_PRESSURE = Pressure()


@dataclass(slots=True)
class PressureReader:
    """The highest pressure that any source reports, read once a second at most. Used by one thread at a time.

    A source that cannot be read (any more) counts as no pressure.
    """

    sources: Sequence[ReadPressure] | None = None  # by default those that can be read here
    clock: Callable[[], float] = monotonic  # seconds
    _read_s: float = field(init=False, default=float("-inf"))
    _last: Pressure = field(init=False, default=NO_PRESSURE)

    def __call__(self) -> Pressure:
        if (now_s := self.clock()) - self._read_s >= _READ_S:
            self._read_s = now_s
            if self.sources is None:
                self.sources = pressure_sources()
            self._last = max((_read(source) for source in self.sources), default=NO_PRESSURE)
        return self._last


def _read(source: ReadPressure) -> Pressure:
    with suppress(OSError, ValueError, LookupError):
        return source()
    return NO_PRESSURE


def pressure_sources(platform: str = sys.platform) -> list[ReadPressure]:
    """The sources that can be read on this system."""
    if platform == "win32":
        with suppress(OSError):
            return [windows_source(kernel32)] if (kernel32 := open_kernel32()) is not None else []
        return []
    if platform == "darwin":
        return [lambda: read_macos(ctypes.CDLL(None)), SwapGrowth(lambda: int(psutil.swap_memory().used))]
    return [read_linux, SwapGrowth(lambda: swap_used(Path("/proc/meminfo").read_text(encoding="ascii")))]


def read_linux() -> Pressure:
    """Stalls in the control groups that limit this process's memory, if there are any, or else in the machine.

    Within such a limit the rest of the machine may be shared with programs that fill limits of their own.
    """
    files = stall_files(OWN_GROUPS.read_text(encoding="utf-8"), CGROUP_MOUNT, Path("/proc/pressure/memory"))
    return max(parse_stalls(file.read_text(encoding="ascii")) for file in files)


def stall_files(groups: str, mount: Path, machine: Path) -> list[Path]:
    """The files that report stalls to a process in these groups, the text of /proc/self/cgroup."""
    limited = (folder / "memory.pressure" for folder in limited_groups(groups, mount))
    return [file for file in limited if file.is_file()] or [machine]


def parse_stalls(text: str) -> Pressure:
    """Pressure by Linux's pressure stall information: shares of time that some tasks, or all, waited for memory.

    Raises ValueError or LookupError: It is something else.
    """
    shares = {}
    for line in text.splitlines():
        name, *figures = line.split()
        shares[name] = float(dict(each.split("=") for each in figures)["avg10"]) / 100
    some, all_ = shares.get("some", 0.0), shares.get("full", 0.0)
    sign = f"programs waited for memory in {some:.0%} of the last 10 seconds"
    if all_ >= _ALL_WAITED or some >= _MANY_WAITED:
        return Pressure(Level.HIGH, sign)
    return Pressure(Level.SOME, sign) if some >= _SOME_WAITED else NO_PRESSURE


def swap_used(meminfo: str) -> int:
    """Bytes of swap in use, by the text of /proc/meminfo; raises ValueError: it does not say."""
    sizes = dict(line.split(":") for line in meminfo.splitlines() if line.startswith(("SwapTotal", "SwapFree")))
    if len(sizes) < 2:
        raise ValueError("no swap is listed")
    total, free = (int(sizes[name].split()[0]) << 10 for name in ("SwapTotal", "SwapFree"))
    return total - free


@dataclass(slots=True)
class SwapGrowth:
    """Pressure by how fast the swap in use grows. Swap that is merely in use says nothing: it may be old."""

    read_used: Callable[[], int]
    clock: Callable[[], float] = monotonic  # seconds
    _seen: deque[tuple[float, int]] = field(init=False, default_factory=deque)

    def __call__(self) -> Pressure:
        now_s, used = self.clock(), self.read_used()
        self._seen.append((now_s, used))
        while now_s - self._seen[0][0] > _SWAP_WINDOW_S:
            self._seen.popleft()
        grown = used - min(each for _, each in self._seen)
        sign = f"{format_bytes(grown)} went to swap within {_SWAP_WINDOW_S:.0f} seconds"
        if grown >= _SWAP_RUNS:
            return Pressure(Level.HIGH, sign)
        return Pressure(Level.SOME, sign) if grown >= _SWAP_BEGINS else NO_PRESSURE


def read_macos(library: Any) -> Pressure:
    """Pressure as macOS reports it to programs; raises OSError: it does not."""
    level, size = ctypes.c_int(0), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
    name = b"kern.memorystatus_vm_pressure_level"
    if library.sysctlbyname(name, ctypes.byref(level), ctypes.byref(size), None, ctypes.c_size_t(0)):
        raise OSError("macOS does not report its memory pressure")
    if (word := _MACOS_LEVELS.get(level.value)) is None:
        return NO_PRESSURE
    return Pressure(Level.HIGH if word == "critical" else Level.SOME, f"macOS reports memory pressure: {word}")


def windows_source(kernel32: Any) -> ReadPressure:
    """Pressure by what Windows signals to programs; raises OSError: it gives no such signals."""
    handles = [kernel32.CreateMemoryResourceNotification(kind) for kind in (_LOW, _HIGH)]
    if not all(handles):
        raise OSError("CreateMemoryResourceNotification failed")

    def is_signalled(handle: Any) -> bool:
        state = ctypes.c_int(0)  # BOOL
        if not kernel32.QueryMemoryResourceNotification(handle, ctypes.byref(state)):
            raise OSError("QueryMemoryResourceNotification failed")
        return bool(state.value)

    def read() -> Pressure:
        is_low, is_plentiful = map(is_signalled, handles)
        if is_low:
            return Pressure(Level.HIGH, "Windows signals that memory is nearly used up")
        if is_plentiful:
            return NO_PRESSURE
        return Pressure(Level.SOME, "Windows signals that memory is not plentiful")

    return read
