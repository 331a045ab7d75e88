"""How much of an accelerator's own memory is free, as its driver reports it.

NVIDIA's driver is asked through NVIDIA's own package for it (pynvml), which needs no CUDA; AMD's through the files
of amdgpu. Reads figures and decides nothing. It has run on the imitations of its tests alone, and on no GPU.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from edgespec.errors import UnknownMemory
from edgespec.memory.free_memory import HOST, FreeByPlace, FreeMemory, ReadFreeMemory, device_reserve
from edgespec.system.context_managers import contextmanager


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


def read_nvidia_driver() -> Nvidia | None:
    """The report of NVIDIA's driver, with the GPUs that CUDA may use; None where there is none that answers."""
    from pynvml import NVMLError

    with suppress(NVMLError):
        nvml = open_nvml()
        try:
            version = nvml.nvmlSystemGetCudaDriverVersion_v2()
            gpus = tuple(_read_gpu(nvml, handle) for handle in visible_gpus(nvml, os.environ))
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


# The share of the host's memory that an APU reserves is smaller by default; it takes more of the host's as needed.
_LEAST_OWN_BYTES = 4 << 30
_SYSFS = Path("/sys/class/drm")


class Places:
    """The memory that the arrays of each device lie in, and how much of it is free.

    kinds: ONNX Runtime's names for the memory of the devices, with an index after the first: cpu, cuda, cuda:1, …
    read_host: Reads the free memory of the host.
    report: Takes a line for each place whose free memory no driver reports, now or any more; it is not checked.
    """

    def __init__(self, kinds: Iterable[str], read_host: ReadFreeMemory, report: Callable[[str], None]) -> None:
        self.report = report
        self._places: dict[str, str] = {}
        self._readers = {HOST: read_host}
        for kind in dict.fromkeys(kinds):
            with self._report_unknown(kind):
                reader = _find_reader(kind)
                self._places[kind] = kind if reader else HOST
                if reader:
                    self._readers[kind] = reader

    def place_of(self, kind: str) -> str:
        return self._places.get(kind, kind)

    def __call__(self) -> FreeByPlace:
        free: dict[str, FreeMemory] = {}
        for place, read in list(self._readers.items()):
            with self._report_unknown(place):
                free[place] = read()
        return free

    @contextmanager
    def _report_unknown(self, place: str) -> Iterator[None]:
        try:
            yield
        except UnknownMemory as error:
            self._readers.pop(place, None)
            self.report(f"the free memory of {place} is not checked: {error}")


def _find_reader(kind: str) -> ReadFreeMemory | None:
    """A reader for a device with memory of its own; None where arrays lie in the host's, as far as drivers report.

    Raises UnknownMemory where no driver reports how much of its own memory is free.
    """
    if kind == "cpu":
        return None
    kind, _, index = kind.partition(":")
    if kind == "cuda":
        return nvidia_reader(os.environ, int(index or 0))
    readers = amd_readers()
    with suppress(UnknownMemory):
        readers.append(nvidia_reader({}))
    # No driver says which of several GPUs is used; a model that does not fit the one with the most room fits none.
    return (lambda: max((read() for read in readers), key=lambda free: free.free_bytes)) if readers else None


def nvidia_reader(environment: Mapping[str, str], index: int = 0) -> ReadFreeMemory:
    """Reads the memory of one of CUDA's devices; raises UnknownMemory: there is no driver, or no such device."""
    with _nvml_errors():
        nvml = open_nvml()  # never closed: it ends with the process
        gpus = visible_gpus(nvml, environment)
        if index >= len(gpus):
            raise UnknownMemory(
                f"NVIDIA's driver does not report it (it lists {len(gpus)} GPUs that CUDA may use)"
            )
        device = gpus[index]
        bound = f"the memory of {nvml.nvmlDeviceGetName(device)}"

    def read() -> FreeMemory:
        with _nvml_errors():
            memory = nvml.nvmlDeviceGetMemoryInfo(device)
            return FreeMemory(int(memory.free), bound, reserve=device_reserve(int(memory.total)))

    read()  # some devices have a name and no figures
    return read


@contextmanager
def _nvml_errors() -> Iterator[None]:
    from pynvml import NVMLError

    try:
        yield
    except NVMLError as error:
        raise UnknownMemory(f"NVIDIA's driver does not report it ({error})") from None


def amd_readers() -> list[ReadFreeMemory]:
    """One reader for each GPU of the driver amdgpu that has memory of its own."""
    readers: list[ReadFreeMemory] = []
    for path in sorted(_SYSFS.glob("card*/device/mem_info_vram_total")):
        with suppress(OSError, ValueError):
            if int(path.read_text()) >= _LEAST_OWN_BYTES:
                readers.append(partial(_read_amd, path.parent))
    return readers


def _read_amd(device: Path) -> FreeMemory:
    try:
        total, used = (int((device / f"mem_info_vram_{each}").read_text()) for each in ("total", "used"))
    except (OSError, ValueError) as error:
        raise UnknownMemory(f"{device} does not report it ({error})") from None
    bound = f"the memory of {device.parent.name}"
    return FreeMemory(max(0, total - used), bound, reserve=device_reserve(total))
