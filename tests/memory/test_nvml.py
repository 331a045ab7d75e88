"""NVIDIA's driver through an imitation of pynvml, and through pynvml itself over an imitation of its library."""

import inspect
from types import SimpleNamespace

import pynvml
import pytest
from fake_nvml import FakeNvml, Gpu, install_driver

from edgespec.memory.device_memory import Nvidia, NvidiaGpu, open_nvml, read_nvidia_driver


def test_the_imitation_has_functions_of_the_real_package_with_their_arguments() -> None:
    calls = [name for name in vars(FakeNvml) if name.startswith("nvml")]
    assert len(calls) == 9
    for call in calls:
        real = inspect.signature(getattr(pynvml, call)).parameters.values()
        needed = [each.name for each in real if each.default is inspect.Parameter.empty]
        # Wrapped functions state (*args, **kwargs) in some versions.
        assert needed in ([*inspect.signature(getattr(FakeNvml, call)).parameters][1:], ["args", "kwargs"])


def test_a_driver_tells_its_version_its_cuda_and_its_gpus_and_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    library = install_driver(monkeypatch, Gpu("first", 20, 24), Gpu("second", 1, is_lost=True))
    gpus = (NvidiaGpu("first", 24, 20), NvidiaGpu("second", None, None))
    assert read_nvidia_driver() == Nvidia("580.65.06", (13, 1), gpus)
    assert (library.num_inits, library.num_open) == (1, 0)


def test_without_a_driver_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        install_driver(patch, has_driver=False)
        assert read_nvidia_driver() is None

    def absent(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(pynvml, "CDLL", absent)
    monkeypatch.setattr(pynvml, "nvmlLib", None)
    assert read_nvidia_driver() is None
    with pytest.raises(pynvml.NVMLError, match="Shared Library Not Found"):
        open_nvml()


@pytest.mark.parametrize(
    ("library", "message"),
    [
        (SimpleNamespace(nvmlInitWithFlags=lambda flags: 9), "Driver Not Loaded"),
        (SimpleNamespace(), "Function Not Found"),
    ],
    ids=["a driver that does not answer", "a library that is older than pynvml"],
)
def test_errors_of_the_library_are_named(
    library: SimpleNamespace, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pynvml, "nvmlLib", library)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    with pytest.raises(pynvml.NVMLError, match=message):
        open_nvml()
    assert read_nvidia_driver() is None
