"""Versions of the graphics drivers that WebGPU and DirectML go through, as the system states them.

Tried on Linux only. Knows nothing of ONNX Runtime.
"""

import hashlib
import json
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

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
            if path.stat().st_size <= _LARGEST_BYTES:
                content = path.read_bytes()
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
