"""What the system tells of this machine: cores, GPUs and NPUs, NVIDIA's driver. Knows nothing of ONNX Runtime."""

import ctypes
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

_CPUS = Path("/sys/devices")
_PCI = Path("/sys/bus/pci/devices")
_NAME_BYTES = 96
_VENDORS = {0x10DE: "NVIDIA", 0x1002: "AMD", 0x8086: "Intel", 0x5143: "Qualcomm", 0x106B: "Apple"}
_DISPLAY, _ACCELERATOR = 0x03, 0x12  # classes of PCI


@dataclass(frozen=True, slots=True, kw_only=True)
class Cores:
    """performance and efficiency count logical processors, None where all are alike or nobody tells."""

    physical: int
    logical: int
    performance: int | None = None
    efficiency: int | None = None


@dataclass(frozen=True, slots=True)
class NvidiaGpu:
    name: str
    memory_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Nvidia:
    """An NVIDIA driver that answers: its version, the newest CUDA that it knows, its GPUs."""

    driver: str
    cuda: tuple[int, int]
    gpus: tuple[NvidiaGpu, ...]


@dataclass(frozen=True, slots=True)
class Accelerator:
    """A GPU or NPU on a bus, whether or not anything can use it."""

    kind: str
    vendor: str


def cores() -> Cores:
    logical = psutil.cpu_count() or 1
    fast, slow = _hybrid()
    return Cores(
        physical=psutil.cpu_count(logical=False) or logical, logical=logical, performance=fast, efficiency=slow
    )


def _hybrid() -> tuple[int | None, int | None]:
    """Logical processors of two kinds, on Linux with Intel's and on macOS."""
    with suppress(OSError, ValueError, subprocess.SubprocessError):
        if sys.platform == "darwin":
            levels = [f"hw.perflevel{level}.logicalcpu" for level in (0, 1)]
            told = subprocess.run(["sysctl", "-n", *levels], capture_output=True, text=True, timeout=5, check=True)
            fast, slow = map(int, told.stdout.split())
            return fast, slow
        fast, slow = (num_listed((_CPUS / kind / "cpus").read_text()) for kind in ("cpu_core", "cpu_atom"))
        return fast, slow
    return None, None


def num_listed(ranges: str) -> int:
    """How many numbers `0-3,8` names: 5."""
    bounds = [[int(bound) for bound in part.split("-")] for part in ranges.strip().split(",")]
    return sum(part[-1] - part[0] + 1 for part in bounds)


def accelerators() -> list[Accelerator]:
    """GPUs and NPUs on the PCI bus, where the system shows it as files."""
    return sorted(set(_on_bus(_PCI)), key=lambda found: (found.kind, found.vendor))


def _on_bus(bus: Path) -> Iterator[Accelerator]:
    for device in bus.iterdir() if bus.is_dir() else []:
        with suppress(OSError, ValueError):
            device_class, vendor = (int((device / name).read_text(), 16) for name in ("class", "vendor"))
            kind = {_DISPLAY: "gpu", _ACCELERATOR: "npu"}.get(device_class >> 16)
            if kind and vendor in _VENDORS:
                yield Accelerator(kind, _VENDORS[vendor])


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def nvidia() -> Nvidia | None:
    """What NVIDIA's management library says; None where it is not installed or finds no driver."""
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL("nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1")
        if library.nvmlInit_v2() == 0:
            try:
                return _told(library)
            finally:
                library.nvmlShutdown()
    return None


def _told(library: ctypes.CDLL) -> Nvidia:
    text, number = ctypes.create_string_buffer(_NAME_BYTES), ctypes.c_int()
    library.nvmlSystemGetDriverVersion(text, _NAME_BYTES)
    driver = text.value.decode(errors="replace")
    library.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(number))
    cuda = (number.value // 1000, number.value % 1000 // 10)
    library.nvmlDeviceGetCount_v2(ctypes.byref(number))
    return Nvidia(driver, cuda, tuple(_gpu(library, index) for index in range(number.value)))


def _gpu(library: ctypes.CDLL, index: int) -> NvidiaGpu:
    handle, text, memory = ctypes.c_void_p(), ctypes.create_string_buffer(_NAME_BYTES), _Memory()
    library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle))
    library.nvmlDeviceGetName(handle, text, _NAME_BYTES)
    library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
    return NvidiaGpu(text.value.decode(errors="replace"), memory.total, memory.free)
