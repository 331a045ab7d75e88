"""NVIDIA's driver, asked through NVIDIA's own package for it (pynvml): no CUDA is needed.

Reads figures and decides nothing. It has run on an imitation of the driver alone, and on no GPU.
"""

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class NvidiaGpu:
    """A GPU; memory_bytes and free_bytes are None where it has no memory of its own."""

    name: str
    memory_bytes: int | None
    free_bytes: int | None


@dataclass(frozen=True, slots=True)
class Nvidia:
    """An NVIDIA driver that answers: its version, the newest CUDA that it knows, its GPUs."""

    driver: str
    cuda: tuple[int, int]
    gpus: tuple[NvidiaGpu, ...]


def open_nvml() -> Any:
    """The module pynvml, once the driver answers it; raises NVMLError where none does."""
    import pynvml  # 40 ms, and only a machine with an NVIDIA driver needs it

    pynvml.nvmlInit()
    return pynvml


def read_nvidia_driver(
    open_nvml: Callable[[], Any] = open_nvml, environment: Mapping[str, str] = os.environ
) -> Nvidia | None:
    """What NVIDIA's driver reports, with the GPUs that CUDA may use; None where there is none that answers."""
    from pynvml import NVMLError

    with suppress(NVMLError):
        nvml = open_nvml()
        try:
            version = nvml.nvmlSystemGetCudaDriverVersion_v2()
            gpus = tuple(_read_gpu(nvml, handle) for handle in visible_gpus(nvml, environment))
            return Nvidia(nvml.nvmlSystemGetDriverVersion(), (version // 1000, version % 1000 // 10), gpus)
        finally:
            nvml.nvmlShutdown()
    return None


def visible_gpus(nvml: Any, environment: Mapping[str, str]) -> list[Any]:
    """NVML's handles of the GPUs that CUDA may use, in the order of CUDA_VISIBLE_DEVICES, up to its first mistake.

    It holds indices and UUIDs. NVML counts by the bus, as CUDA does with CUDA_DEVICE_ORDER=PCI_BUS_ID.
    """
    from pynvml import NVMLError

    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    found: list[Any] = []
    with suppress(NVMLError):
        for name in map(str.strip, visible.split(",")):
            if not name:
                break
            if name.isdecimal():
                found.append(nvml.nvmlDeviceGetHandleByIndex(int(name)))
            else:
                found.append(nvml.nvmlDeviceGetHandleByUUID(name))
    return found


def _read_gpu(nvml: Any, device: Any) -> NvidiaGpu:
    from pynvml import NVMLError

    total = free = None
    with suppress(NVMLError):  # a GPU that shares the host's memory reports no figures
        memory = nvml.nvmlDeviceGetMemoryInfo(device)
        total, free = int(memory.total), int(memory.free)
    return NvidiaGpu(nvml.nvmlDeviceGetName(device), total, free)
