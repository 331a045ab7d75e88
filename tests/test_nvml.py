"""NVIDIA's driver asked through its library, on an imitation of it: no GPU, but the names of pynvml."""

import ctypes
import inspect

import pynvml
import pytest
from fake_nvml import LOST, NOT_FOUND, FakeNvml, Gpu

from edgespec import nvml
from edgespec.nvml import Memory, Nvidia, NvidiaGpu, Nvml, NvmlError, nvidia


def test_the_imitation_and_the_memory_are_what_the_makers_own_package_expects() -> None:
    calls = [name for name in vars(FakeNvml) if name.startswith("nvml")]
    assert len(calls) == 9
    source = inspect.getsource(pynvml)
    # It begins with flags, by a call that older drivers lack.
    assert [name for name in calls if f'"{name}"' not in source] == ["nvmlInit_v2"]
    assert Memory._fields_ == tuple(pynvml.c_nvmlMemory_t._fields_)
    assert ctypes.sizeof(Memory) == ctypes.sizeof(pynvml.c_nvmlMemory_t)


def test_a_driver_tells_its_version_its_cuda_and_its_gpus_and_is_closed() -> None:
    library = FakeNvml([Gpu("first", 20, 24), Gpu("second", 1, is_lost=True)])
    gpus = (NvidiaGpu("first", 24, 20), NvidiaGpu("second", None, None))
    assert nvidia(lambda: library) == Nvidia("580.65.06", (13, 1), gpus)
    assert (library.num_inits, library.num_open) == (1, 0)


def test_without_a_driver_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert nvidia(lambda: FakeNvml([], has_driver=False)) is None

    def absent(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(nvml.ctypes, "CDLL", absent)
    assert nvidia() is None
    with pytest.raises(NvmlError, match="cannot open shared object file"):
        Nvml()


def test_errors_and_calls_that_a_library_lacks_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Nvml(lambda: FakeNvml([Gpu("it", 1, uuid="GPU-a", is_lost=True)]))
    assert asked.name(asked.device("GPU-a")) == asked.name(asked.device(0)) == "it"
    for which in (1, "GPU-none"):
        with pytest.raises(NvmlError, match=f"gave the error {NOT_FOUND}"):
            asked.device(which)
    with pytest.raises(NvmlError, match=f"nvmlDeviceGetMemoryInfo gave the error {LOST}"):
        asked.memory(asked.device(0))
    monkeypatch.delattr(FakeNvml, "nvmlDeviceGetName")
    with pytest.raises(NvmlError, match="has no nvmlDeviceGetName"):
        asked.name(asked.device(0))
