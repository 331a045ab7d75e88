"""The machine, its versions and the memory of this process."""

import os
import platform
import sys
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path

import psutil

if sys.platform != "win32":
    import resource

_PACKAGES = ("edgespec", "onnxruntime", "onnxruntime-gpu", "numpy", "tokenizers")


def system_info() -> dict[str, str]:
    """Describe what a figure is measured with: label and text."""
    return {
        "processor": processor_name(),
        "cores": f"{psutil.cpu_count(logical=False) or '?'} of {os.cpu_count()} logical",
        "memory": f"{psutil.virtual_memory().total / 1e9:.1f} GB",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in _PACKAGES if [*metadata.distributions(name=name)]},
    }


@cache  # the file has hundreds of kB on a machine of many cores
def processor_name() -> str:
    """The model name of the processor."""
    with suppress(OSError):  # Linux has it in this file alone
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


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
