"""Memory pressure as systems report it, here and in imitations of what others report."""

import ctypes
import sys
from pathlib import Path
from typing import Any

import pytest

from edgespec.memory.free_memory import read_commit_bytes
from edgespec.memory.pressure import (
    NO_PRESSURE,
    Level,
    Pressure,
    PressureReader,
    SwapGrowth,
    parse_stalls,
    pressure_sources,
    read_linux,
    read_macos,
    stall_files,
    swap_used,
    windows_source,
)
from edgespec.system.clock import VirtualClock

MIB = 1 << 20


def stalls(some: float, full: float) -> str:
    return (
        f"some avg10={some:.2f} avg60=1.00 avg300=1.00 total=123456\n"
        f"full avg10={full:.2f} avg60=1.00 avg300=1.00 total=12345\n"
    )


@pytest.mark.parametrize(
    ("some", "full", "wanted"),
    [
        (0.0, 0.0, Level.NONE),
        (9.9, 3.0, Level.NONE),
        (10.0, 3.0, Level.SOME),
        (39.0, 9.9, Level.SOME),
        (40.0, 3.0, Level.HIGH),
        (12.0, 10.0, Level.HIGH),
    ],
)
def test_linux_reports_shares_of_time_that_programs_waited(some: float, full: float, wanted: Level) -> None:
    found = parse_stalls(stalls(some, full))
    assert found.level == wanted
    assert (f"{some:.0f}% of the last 10 seconds" in found.sign) == (wanted > Level.NONE)


@pytest.mark.parametrize("text", ["some avg10=x", "some", "some avg60=1.0 total=3"])
def test_what_is_no_report_of_stalls_is_an_error_and_no_pressure(text: str) -> None:
    with pytest.raises((ValueError, KeyError)):
        parse_stalls(text)
    assert PressureReader([lambda: parse_stalls(text)])() == NO_PRESSURE


def test_the_group_that_limits_this_process_reports_for_it(tmp_path: Path) -> None:
    machine, group = tmp_path / "pressure", tmp_path / "a"
    (group / "b").mkdir(parents=True)
    assert stall_files("0::/a/b\n", tmp_path, machine) == [machine]
    (group / "memory.max").write_text("1000\n")
    (group / "b" / "memory.max").write_text("max\n")
    assert stall_files("0::/a/b\n", tmp_path, machine) == [machine], "a kernel without such reports"
    (group / "memory.pressure").write_text(stalls(50, 0))
    assert stall_files("0::/a/b\n", tmp_path, machine) == [group / "memory.pressure"]
    assert stall_files("4:memory:/a/b\n", tmp_path, machine) == [machine], "the first version has none"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, which only Linux has")
def test_this_system_can_be_asked() -> None:
    assert len(pressure_sources()) == 2
    assert PressureReader()().level in Level
    if Path("/proc/pressure/memory").exists():
        assert read_linux().level in Level


def test_swap_in_use_is_what_is_not_free() -> None:
    assert swap_used("MemTotal: 5 kB\nSwapCached: 9 kB\nSwapTotal:  300 kB\nSwapFree:  100 kB\n") == 200 << 10
    with pytest.raises(ValueError, match="no swap"):
        swap_used("MemTotal: 5 kB\n")


def test_swap_that_grows_is_pressure_and_swap_in_use_is_none() -> None:
    clock, used = VirtualClock(), [3000 * MIB]
    read = SwapGrowth(lambda: used[-1], clock)
    levels = []
    for grown in [0, 10, 10, 50, 100, 100, *[0] * 12]:
        used.append(used[-1] + grown * MIB)
        clock.sleep(1.0)
        levels.append(read().level)
    assert levels[:6] == [Level.NONE, Level.NONE, Level.NONE, Level.SOME, Level.SOME, Level.HIGH]
    assert levels[-1] == Level.NONE
    used.append(0)
    assert read() == NO_PRESSURE


def test_swap_that_trickles_is_no_pressure() -> None:
    clock, used = VirtualClock(), [0]
    read = SwapGrowth(lambda: used[0], clock)
    for _ in range(200):
        used[0] += 5 * MIB
        clock.sleep(1.0)
        assert read() == NO_PRESSURE


class Macos:
    """sysctlbyname of macOS."""

    def __init__(self, level: int, *, fails: bool = False) -> None:
        self.level, self.fails = level, fails

    def sysctlbyname(self, name: bytes, found: Any, size: Any, new: None, new_size: ctypes.c_size_t) -> int:
        assert (name, size._obj.value, new) == (b"kern.memorystatus_vm_pressure_level", 4, None)
        found._obj.value = self.level
        return -1 if self.fails else 0


@pytest.mark.parametrize(
    ("level", "wanted", "said"), [(1, Level.NONE, ""), (2, Level.SOME, "warning"), (4, Level.HIGH, "critical")]
)
def test_macos_reports_a_level(level: int, wanted: Level, said: str) -> None:
    found = read_macos(Macos(level))
    assert found.level == wanted
    assert found.sign.endswith(said)


def test_macos_that_does_not_report_is_an_error_and_no_pressure() -> None:
    with pytest.raises(OSError, match="does not report"):
        read_macos(Macos(4, fails=True))
    assert PressureReader([lambda: read_macos(Macos(4, fails=True))])() == NO_PRESSURE


class Kernel32:
    """The functions of Windows's kernel32 that are in use."""

    def __init__(self, *, is_low: bool = False, is_plentiful: bool = True, commit_bytes: int = 0) -> None:
        self.signals = {1: is_low, 2: is_plentiful}
        self.commit_bytes = commit_bytes
        self.has_signals = True

    def CreateMemoryResourceNotification(self, kind: int) -> int:
        return kind + 1 if self.has_signals else 0

    def QueryMemoryResourceNotification(self, handle: int, state: Any) -> int:
        state._obj.value = self.signals[handle]
        return 1

    def GlobalMemoryStatusEx(self, status: Any) -> int:
        if status._obj.dwLength != 64:  # as Windows checks it
            return 0
        status._obj.ullAvailPageFile = self.commit_bytes
        return 1


@pytest.mark.parametrize(
    ("is_low", "is_plentiful", "wanted"),
    [(False, True, Level.NONE), (False, False, Level.SOME), (True, False, Level.HIGH)],
)
def test_windows_signals_low_and_plentiful_memory(is_low: bool, is_plentiful: bool, wanted: Level) -> None:
    found = windows_source(Kernel32(is_low=is_low, is_plentiful=is_plentiful))()
    assert found.level == wanted
    assert bool(found.sign) == (wanted > Level.NONE)


def test_windows_without_signals_is_an_error() -> None:
    library = Kernel32()
    library.has_signals = False
    with pytest.raises(OSError, match="CreateMemoryResourceNotification"):
        windows_source(library)


def test_windows_tells_what_it_still_promises() -> None:
    assert read_commit_bytes(Kernel32(commit_bytes=5 << 30)) == 5 << 30


def test_pressure_is_read_once_a_second_and_the_highest_counts() -> None:
    clock, asked = VirtualClock(), list[float]()

    def some() -> Pressure:
        asked.append(clock.now)
        return Pressure(Level.SOME, "some")

    read = PressureReader([some, lambda: Pressure(Level.HIGH, "high"), lambda: NO_PRESSURE], clock)
    for _ in range(20):
        assert read() == Pressure(Level.HIGH, "high")
        clock.sleep(0.125)
    assert asked == pytest.approx([0.0, 1.0, 2.0])
