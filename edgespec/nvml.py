"""NVIDIA's driver, asked through the library that comes with it (NVML): no CUDA and no package is needed.

Reads figures and decides nothing; was run on the imitation of its tests alone, and on no GPU.
"""

import ctypes
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

_NAME_BYTES = 96


class NvmlError(Exception):
    """No such library, no driver, or no answer."""


@dataclass(frozen=True, slots=True)
class NvidiaGpu:
    """memory_bytes and free_bytes are None where it has no memory of its own."""

    name: str
    memory_bytes: int | None
    free_bytes: int | None


@dataclass(frozen=True, slots=True)
class Nvidia:
    """An NVIDIA driver that answers: its version, the newest CUDA that it knows, its GPUs."""

    driver: str
    cuda: tuple[int, int]
    gpus: tuple[NvidiaGpu, ...]


class Memory(ctypes.Structure):
    """Bytes of a device."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def library() -> Any:
    """Raises NvmlError: The driver is not installed."""
    try:
        return ctypes.CDLL("nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1")
    except OSError as error:
        raise NvmlError(str(error)) from None


class Nvml:
    """The library at work, until it is closed or the process ends."""

    def __init__(self, load: Callable[[], Any] = library) -> None:
        """Raises NvmlError: There is none, or no driver answers it."""
        self._library = load()
        self._ask("nvmlInit_v2")

    def close(self) -> None:
        self._ask("nvmlShutdown")

    def device(self, which: int | str) -> ctypes.c_void_p:
        """A GPU by its place on the bus or by its UUID; raises NvmlError where there is none."""
        handle = ctypes.c_void_p()
        if isinstance(which, int):
            self._ask("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(which), ctypes.byref(handle))
        else:
            self._ask("nvmlDeviceGetHandleByUUID", which.encode(), ctypes.byref(handle))
        return handle

    def name(self, device: ctypes.c_void_p) -> str:
        return self._text("nvmlDeviceGetName", device)

    def memory(self, device: ctypes.c_void_p) -> Memory:
        memory = Memory()
        self._ask("nvmlDeviceGetMemoryInfo", device, ctypes.byref(memory))
        return memory

    def told(self) -> Nvidia:
        """What the driver says of itself and of its GPUs."""
        version = self._number("nvmlSystemGetCudaDriverVersion_v2")
        gpus = tuple(self._gpu(index) for index in range(self._number("nvmlDeviceGetCount_v2")))
        return Nvidia(self._text("nvmlSystemGetDriverVersion"), (version // 1000, version % 1000 // 10), gpus)

    def _gpu(self, index: int) -> NvidiaGpu:
        device = self.device(index)
        total = free = None
        with suppress(NvmlError):  # of one whose memory is the host's
            memory = self.memory(device)
            total, free = int(memory.total), int(memory.free)
        return NvidiaGpu(self.name(device), total, free)

    def _text(self, call: str, *arguments: Any) -> str:
        text = ctypes.create_string_buffer(_NAME_BYTES)
        self._ask(call, *arguments, text, _NAME_BYTES)
        return text.value.decode(errors="replace")

    def _number(self, call: str) -> int:
        number = ctypes.c_int()
        self._ask(call, ctypes.byref(number))
        return number.value

    def _ask(self, call: str, *arguments: Any) -> None:
        """Raises NvmlError: It failed, or the library is older than the call."""
        function = getattr(self._library, call, None)
        if function is None:
            raise NvmlError(f"it has no {call}")
        if code := function(*arguments):
            raise NvmlError(f"{call} gave the error {code}")


def nvidia(load: Callable[[], Any] = library) -> Nvidia | None:
    """What NVIDIA's driver says; None where there is none that answers."""
    with suppress(NvmlError):
        nvml = Nvml(load)
        try:
            return nvml.told()
        finally:
            nvml.close()
    return None
