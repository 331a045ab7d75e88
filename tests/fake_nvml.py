"""NVIDIA's driver as its library shows it, with devices whose figures a test sets."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from edgespec.nvml import Nvml

NO_DRIVER, NOT_FOUND, LOST = 9, 6, 15
_FIRST = 100  # what the handle of the first device is


@dataclass
class Gpu:
    name: str
    free: int
    total: int = 24 << 30
    uuid: str = ""
    is_lost: bool = False


@dataclass
class FakeNvml:
    """Calls that fill what they are given and return an error's number; a test compares their names."""

    gpus: list[Gpu]
    has_driver: bool = True
    num_open: int = 0
    num_inits: int = 0

    def nvmlInit_v2(self) -> int:
        self.num_open += self.has_driver
        self.num_inits += self.has_driver
        return 0 if self.has_driver else NO_DRIVER

    def nvmlShutdown(self) -> int:
        self.num_open -= 1
        return 0

    def nvmlSystemGetDriverVersion(self, text: Any, size: int) -> int:
        text.value = b"580.65.06"
        return 0

    def nvmlSystemGetCudaDriverVersion_v2(self, number: Any) -> int:
        number._obj.value = 13010
        return 0

    def nvmlDeviceGetCount_v2(self, number: Any) -> int:
        number._obj.value = len(self.gpus)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> int:
        if index.value >= len(self.gpus):
            return NOT_FOUND
        handle._obj.value = _FIRST + index.value
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
        for index, gpu in enumerate(self.gpus):
            if gpu.uuid.encode() == uuid:
                handle._obj.value = _FIRST + index
                return 0
        return NOT_FOUND

    def nvmlDeviceGetName(self, handle: Any, text: Any, size: int) -> int:
        text.value = self.gpus[handle.value - _FIRST].name.encode()
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:
        gpu = self.gpus[handle.value - _FIRST]
        if gpu.is_lost:
            return LOST
        memory._obj.total, memory._obj.free = gpu.total, gpu.free
        return 0


def opened(*gpus: Gpu, has_driver: bool = True) -> Callable[[], Nvml]:
    """A driver with these devices, as Drivers takes one."""
    return lambda: Nvml(lambda: FakeNvml(list(gpus), has_driver))
