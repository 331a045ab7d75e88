"""pynvml with devices whose figures a test sets."""

from dataclasses import dataclass
from types import SimpleNamespace

import pynvml
import pytest


@dataclass
class Gpu:
    name: str
    free: int
    total: int = 24 << 30
    uuid: str = ""
    is_lost: bool = False


@dataclass
class FakeNvml:
    """The functions of pynvml that are in use, with its errors; a test compares their signatures."""

    gpus: list[Gpu]
    has_driver: bool = True
    num_open: int = 0
    num_inits: int = 0

    def nvmlInit(self) -> None:
        if not self.has_driver:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
        self.num_open += 1
        self.num_inits += 1

    def nvmlShutdown(self) -> None:
        self.num_open -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.65.06"

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return 13010

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Gpu:
        if index >= len(self.gpus):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return self.gpus[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Gpu:
        return self.nvmlDeviceGetHandleByIndex([*(gpu.uuid for gpu in self.gpus), uuid].index(uuid))

    def nvmlDeviceGetName(self, handle: Gpu) -> str:
        return handle.name

    def nvmlDeviceGetMemoryInfo(self, handle: Gpu) -> SimpleNamespace:
        if handle.is_lost:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return SimpleNamespace(total=handle.total, free=handle.free)

    def open(self) -> "FakeNvml":
        """Open the fake driver in place of pynvml."""
        self.nvmlInit()
        return self


def install_driver(patch: pytest.MonkeyPatch, *gpus: Gpu, has_driver: bool = True) -> FakeNvml:
    """Have a driver with these devices in the place of the machine's."""
    library = FakeNvml(list(gpus), has_driver)
    patch.setattr("edgespec.memory.device_memory.open_nvml", library.open)
    return library
