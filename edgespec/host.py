"""The machine and the versions that a figure was measured with."""

import os
import platform
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import psutil

from edgespec import __version__

_PACKAGES = ("onnxruntime", "onnxruntime-gpu", "numpy", "tokenizers")


def host() -> dict[str, str]:
    """Label and text, for people."""
    memory_bytes = psutil.virtual_memory().total
    return {
        "processor": processor(),
        "cores": f"{psutil.cpu_count(logical=False) or '?'} of {os.cpu_count()} logical",
        "memory": f"{memory_bytes / 1e9:.1f} GB",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "edgespec": __version__,
        "python": platform.python_version(),
        **{name: version for name in _PACKAGES if (version := installed(name))},
    }


def installed(distribution: str) -> str | None:
    """The version of an installed distribution; None where it is absent."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def processor() -> str:
    """Its model name; Linux tells it in a file alone."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def peak_rss_bytes() -> int:
    """The most memory that this process has had resident so far."""
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    with suppress(OSError, StopIteration):
        # What getrusage tells of Linux begins with the process that started this one.
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) << 10
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10
