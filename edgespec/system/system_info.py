"""The machine, its versions, and what this process may use of it."""

import os
import platform
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from importlib import metadata
from math import ceil
from pathlib import Path

import psutil

if sys.platform != "win32":
    import resource

OWN_GROUPS, CGROUP_MOUNT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
_SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
_LEVEL2_CACHE_SIZE = 191  # _SC_LEVEL2_CACHE_SIZE in glibc's bits/confname.h, which os.sysconf_names lacks
_PACKAGES = ("edgespec", "onnxruntime", "onnxruntime-gpu", "numpy", "tokenizers")


def system_info() -> dict[str, str]:
    """Describe what a figure is measured with: label and text."""
    return {
        "processor": processor_name(),
        "cores": f"{physical_cores()} of {os.cpu_count()} logical",
        "memory": f"{psutil.virtual_memory().total / 1e9:.1f} GB",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in _PACKAGES if [*metadata.distributions(name=name)]},
    }


@cache  # the file has hundreds of kB on a machine of many cores
def cpuinfo_line(*beginnings: str) -> str:
    """The first line of Linux's /proc/cpuinfo that begins in one of these ways; empty where there is none."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith(beginnings):
                return line
    return ""


@cache  # Linux has it in that file alone
def processor_name() -> str:
    return cpuinfo_line("model name").partition(":")[2].strip() or platform.processor() or platform.machine()


@cache  # it is asked for three times as a model is opened
def read_l2_bytes() -> int | None:
    """The size of a core's L2 cache as ONNX Runtime reads it; None where the system's C library does not say."""
    with suppress(ValueError, OSError):
        if sys.platform.startswith("linux") and platform.libc_ver()[0] == "glibc":
            return max(0, os.sysconf(_LEVEL2_CACHE_SIZE)) or None
    return None


def physical_cores() -> int:
    """Physical cores that this process may use; logical ones where the system does not tell them apart.

    On Linux its affinity, as taskset and containers set it, and the CPU quotas of its control groups count; on
    Windows its affinity, as start /affinity sets it.
    """
    found = psutil.cpu_count(logical=False) or psutil.cpu_count() or 1
    if sys.platform == "win32":
        # None are told once threads run in several groups of processors, of 64 each.
        return min(found, len(psutil.Process().cpu_affinity()) or found)
    if sys.platform != "linux":
        return found
    own = os.sched_getaffinity(0)
    bounds = [found, len(own)]
    with suppress(OSError):
        bounds.append(len({Path(_SIBLINGS.format(each)).read_text() for each in own}))
    with suppress(OSError):
        bounds += cpu_quotas(OWN_GROUPS.read_text(encoding="utf-8"), CGROUP_MOUNT)
    return min(bounds)


def cpu_quotas(groups: str, mount: Path) -> Iterator[int]:
    """How many processors each control group above a process may keep busy, rounded up.

    groups is the text of /proc/self/cgroup, mount the folder of all control groups.
    """
    for folder, is_second in groups_above(groups, mount, "cpu"):
        with suppress(OSError, ValueError):  # no limit, or none that can be read
            names = ["cpu.max"] if is_second else ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
            quota, period = map(int, " ".join((folder / name).read_text() for name in names).split())
            if quota > 0:
                yield ceil(quota / period)


@cache  # it is asked before each answer
def groups_above(groups: str, mount: Path, controller: str) -> tuple[tuple[Path, bool], ...]:
    """Folders of the control groups above a process, and whether they are of the second version."""
    found: list[tuple[Path, bool]] = []
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = mount / controller if controllers else mount
        group = root / path.lstrip("/")
        # Within a container the path is often that of the host, and the mount is the group itself.
        folders = (group, *group.parents) if group.is_dir() else (root,)
        found += [(folder, not controllers) for folder in folders[: folders.index(root) + 1]]
    return tuple(found)


def peak_rss_bytes() -> int:
    """The most memory that this process has had resident so far."""
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    with suppress(OSError, StopIteration):
        # On Linux getrusage counts the process that started this one too.
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) << 10
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10
