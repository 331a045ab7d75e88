"""Cores, GPUs, NPUs and graphics drivers of this machine, as the system lists them. Knows nothing of ONNX Runtime.

Versions of drivers were tried on Linux only.
"""

import hashlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from edgespec.system.system_info import physical_cores
from edgespec.system.text_files import read_plain

_CPUS = Path("/sys/devices")
_PCI = Path("/sys/bus/pci/devices")
_VENDORS = {0x10DE: "NVIDIA", 0x1002: "AMD", 0x8086: "Intel", 0x5143: "Qualcomm", 0x106B: "Apple"}
_DISPLAY, _ACCELERATOR = 0x03, 0x12  # classes of PCI


@dataclass(frozen=True, slots=True, kw_only=True)
class Cores:
    """physical counts those that this process may use.

    performance and efficiency count logical processors, None where all are alike or the system does not say.
    """

    physical: int
    logical: int
    performance: int | None = None
    efficiency: int | None = None


@dataclass(frozen=True, slots=True)
class Accelerator:
    """A GPU or NPU on a bus, whether or not anything can use it."""

    kind: str
    vendor: str


def cores() -> Cores:
    """The cores of this machine by kind."""
    fast, slow = _core_kinds()
    return Cores(physical=physical_cores(), logical=psutil.cpu_count() or 1, performance=fast, efficiency=slow)


def _core_kinds() -> tuple[int | None, int | None]:
    """Logical processors of the fast and the slow kind, on Linux with Intel's and on macOS."""
    with suppress(OSError, ValueError, subprocess.SubprocessError):
        if sys.platform == "darwin":
            levels = [f"hw.perflevel{level}.logicalcpu" for level in (0, 1)]
            printed = subprocess.run(
                ["sysctl", "-n", *levels], capture_output=True, text=True, timeout=5, check=True
            )
            fast, slow = map(int, printed.stdout.split())
            return fast, slow
        fast, slow = (count_listed((_CPUS / kind / "cpus").read_text()) for kind in ("cpu_core", "cpu_atom"))
        return fast, slow
    return None, None


def count_listed(ranges: str) -> int:
    """Count the numbers of a list of ranges; `0-3,8` has 5."""
    bounds = [[int(bound) for bound in part.split("-")] for part in ranges.strip().split(",")]
    return sum(part[-1] - part[0] + 1 for part in bounds)


def accelerators() -> list[Accelerator]:
    """GPUs and NPUs on the PCI bus, where the system shows them as files."""
    return sorted(set(_read_bus(_PCI)), key=lambda found: (found.kind, found.vendor))


def _read_bus(bus: Path) -> Iterator[Accelerator]:
    for device in bus.iterdir() if bus.is_dir() else []:
        with suppress(OSError, ValueError):
            device_class, vendor = (int((device / name).read_text(), 16) for name in ("class", "vendor"))
            kind = {_DISPLAY: "gpu", _ACCELERATOR: "npu"}.get(device_class >> 16)
            if kind and vendor in _VENDORS:
                yield Accelerator(kind, _VENDORS[vendor])


_VULKAN = tuple(Path(root) / "vulkan" / "icd.d" for root in ("/etc", "/usr/local/share", "/usr/share"))
_LIBRARIES = ("usr/lib", "usr/lib64", "usr/lib/*-linux-gnu*", "usr/local/lib")
_LARGEST_BYTES = 1 << 16
_WINDOWS_DISPLAYS = r"SYSTEM\CurrentControlSet\Control\Class\{4d36e968-e325-11ce-bfc1-08002be10318}"


def graphics_drivers() -> tuple[str, ...]:
    """Names and versions of drivers: on Linux those of Vulkan in one hash, on macOS the system's version."""
    if sys.platform == "win32":
        return tuple(_windows_drivers())
    if sys.platform == "darwin":
        return (f"macOS {platform.mac_ver()[0]}",)
    listed = "\n".join(vulkan_drivers(os.environ))
    return (f"Vulkan drivers {hashlib.sha256(listed.encode()).hexdigest()[:8]}",) if listed else ()


def vulkan_drivers(environment: Mapping[str, str], folders: tuple[Path, ...] = _VULKAN) -> Iterator[str]:
    """The files by which Vulkan's loader finds its drivers: what each states, and the library that it names.

    A description is told by its content, whenever it was written; a library by its size and time.
    """
    named = environment.get("VK_DRIVER_FILES") or environment.get("VK_ICD_FILENAMES")
    files = [Path(each) for each in named.split(os.pathsep)] if named else []
    for path in files or sorted(path for folder in folders for path in folder.glob("*.json")):
        with suppress(OSError, ValueError, LookupError, TypeError):
            content = read_plain(path, _LARGEST_BYTES)
            stated = json.loads(content)["ICD"]
            version, digest = str(stated["api_version"])[:20], hashlib.sha256(content).hexdigest()[:8]
            library = _library(path, str(stated["library_path"]))
            yield f"{path.stem} {version} {digest}, {library}"


def _library(description: Path, named: str) -> str:
    """Size and time of a driver's library; a name without a folder is looked for where the system keeps them."""
    places = [description.parent / named]
    if "/" not in named and os.sep not in named:
        places = [place for pattern in _LIBRARIES for place in sorted(Path("/").glob(f"{pattern}/{named}"))]
    for place in places:
        with suppress(OSError):
            found = place.stat()
            return f"{found.st_size} bytes of {int(found.st_mtime)}"
    return "a library of the system"


def _windows_drivers() -> Iterator[str]:
    if sys.platform != "win32":
        return
    import winreg

    with suppress(OSError), winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, _WINDOWS_DISPLAYS) as displays:
        for i in range(winreg.QueryInfoKey(displays)[0]):
            with suppress(OSError), winreg.OpenKey(displays, winreg.EnumKey(displays, i)) as display:
                name, _ = winreg.QueryValueEx(display, "DriverDesc")
                version, _ = winreg.QueryValueEx(display, "DriverVersion")
                yield f"{name} {version}"
