"""NVIDIA's driver as pynvml shows it, with devices whose figures a test sets."""

from dataclasses import dataclass, field


class FakeError(Exception):
    pass


@dataclass
class Gpu:
    name: str
    free: int
    total: int = 24 << 30
    uuid: str = ""
    is_lost: bool = False


@dataclass
class FakeNvml:
    """The names and arguments of pynvml, which a test compares."""

    gpus: list[Gpu]
    has_driver: bool = True
    num_inits: int = field(default=0)
    NVMLError: type[Exception] = FakeError

    def nvmlInit(self) -> None:
        if not self.has_driver:
            raise FakeError("NVML Shared Library Not Found")
        self.num_inits += 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Gpu:
        if not 0 <= index < len(self.gpus):
            raise FakeError("Invalid Argument")
        return self.gpus[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Gpu:
        for gpu in self.gpus:
            if gpu.uuid == uuid:
                return gpu
        raise FakeError("Not Found")

    def nvmlDeviceGetName(self, handle: Gpu) -> str:
        return handle.name

    def nvmlDeviceGetMemoryInfo(self, handle: Gpu) -> Gpu:
        if handle.is_lost:
            raise FakeError("GPU is lost")
        return handle
