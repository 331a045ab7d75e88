"""NVIDIA's provider as values: what is missing, and the options of its sessions. No GPU is used."""

import os
from types import SimpleNamespace
from typing import Any

import onnxruntime
import pytest

from edgespec.errors import DeviceUnavailable
from edgespec.memory.device_memory import Nvidia, NvidiaGpu
from edgespec.runtimes import cuda, devices
from edgespec.runtimes.devices import request_device

GPU = NvidiaGpu("NVIDIA Test", 24 << 30, 20 << 30)
NEW = Nvidia("580.65.06", (13, 0), (GPU,))
BUILD = ["CUDAExecutionProvider", "CPUExecutionProvider"]


def fails() -> str | None:
    return "libcudnn is missing"


def opens() -> str | None:
    return None


@pytest.mark.parametrize(
    ("driver", "available", "problem", "fix"),
    [
        (None, BUILD, "no NVIDIA driver was found", "install its driver, version 580"),
        (Nvidia("580.65.06", (13, 0), ()), BUILD, "NVIDIA driver 580.65.06 finds no GPU", "install its driver"),
        (
            Nvidia("550.54", (12, 4), (GPU,)),
            BUILD,
            "NVIDIA driver 550.54 supports CUDA 12.4, and onnxruntime-gpu needs 13.0",
            "update the NVIDIA driver",
        ),
        (NEW, BUILD[1:], "built without CUDA", 'pip install "edgespec[cuda]"'),
        (NEW, BUILD, "libcudnn is missing", "--force-reinstall"),
    ],
)
def test_what_is_missing_comes_with_a_fix(
    driver: Nvidia | None, available: list[str], problem: str, fix: str
) -> None:
    found = cuda.find_missing(driver, available, fails)
    assert found is not None
    assert problem in found.problem
    assert found.fix is not None
    assert fix in found.fix


@pytest.mark.parametrize("driver", [NEW, None])
def test_nothing_is_missing_where_a_graph_opens_whatever_the_driver_reports(driver: Nvidia | None) -> None:
    assert cuda.find_missing(driver, BUILD, opens) is None
    assert cuda.find_missing(driver, BUILD[1:], opens) is not None


class Ort(SimpleNamespace):
    """An onnxruntime whose sessions open on given providers; each is one of its own, as a module is."""

    __hash__ = object.__hash__  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return self is other

    def __init__(self, opened_on: list[str], lines: str = "") -> None:
        super().__init__(order=[])
        self.opened_on, self.lines = opened_on, lines

    def preload_dlls(self, **which: bool) -> None:
        self.order.append(("preload", which))
        print(self.lines, end="")

    def set_default_logger_severity(self, severity: int) -> None: ...

    def get_available_providers(self) -> list[str]:
        return BUILD

    def InferenceSession(self, graph: bytes, providers: list[str], enable_fallback: int) -> Any:
        self.order.append(("session", providers, enable_fallback))
        return SimpleNamespace(get_providers=lambda: self.opened_on)


def test_libraries_are_loaded_before_the_first_session_and_what_they_say_is_the_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ort = Ort(BUILD[1:], "Failed to load libcublasLt.so.13: no such file\nFailed to load libcurand\n")
    problem = cuda.opening_problem(ort)
    assert problem == "its libraries (CUDA, cuDNN) do not load: Failed to load libcublasLt.so.13: no such file"
    assert ort.order == [("preload", {"cuda": True, "cudnn": True}), ("session", [cuda.PROVIDER], 0)]
    assert capsys.readouterr().out == ""
    assert cuda.opening_problem(Ort(BUILD)) is None


def test_devices_are_looked_up_again_without_another_session(monkeypatch: pytest.MonkeyPatch) -> None:
    ort = Ort(BUILD)
    monkeypatch.setattr(devices, "import_onnxruntime", lambda: ort)
    assert devices.find_devices("cuda") == devices.find_devices("cuda")
    assert [name for name, *_ in ort.order].count("session") == 1


def test_a_gpu_that_is_full_is_there_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """What loading a model then says is the lack of memory, with exit code 5."""

    def refuse(*arguments: Any, **named: Any) -> Any:
        raise RuntimeError("CUDA failure 2: out of memory ; GPU=0 ; hostname=box")

    ort = Ort(BUILD)
    monkeypatch.setattr(ort, "InferenceSession", refuse)
    assert cuda.opening_problem(ort) is None


def test_a_build_without_the_provider_opens_no_graph_on_it() -> None:
    assert "CUDAExecutionProvider" in onnxruntime.get_available_providers() or cuda.opening_problem(onnxruntime)
    assert cuda.preload_libraries(SimpleNamespace()) == ""


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> devices.Device:
    monkeypatch.setattr(devices, "import_onnxruntime", lambda: Ort(BUILD))
    return devices.find_device("cuda")


def test_sessions_of_the_device_are_set_up_for_it(device: devices.Device) -> None:
    assert device == devices.Device(
        "cuda",
        "CUDAExecutionProvider",
        "cuda",
        options=(("arena_extend_strategy", "kSameAsRequested"), ("use_ep_level_unified_stream", "1")),
        entries=(("session.use_device_allocator_for_initializers", "1"),),
        host_threads=1,
        kind="gpu",
        records_passes=True,
    )
    bounded = devices.limit_arena(device, 1 << 30)
    options = onnxruntime.SessionOptions()
    expected = dict((*device.options, ("gpu_mem_limit", "1073741824")))

    assert request_device(options, bounded) == {"providers": [(cuda.PROVIDER, expected)], "enable_fallback": 0}
    assert options.get_session_config_entry("session.use_device_allocator_for_initializers") == "1"
    cpu = devices.Device("cpu", "CPUExecutionProvider")
    assert devices.limit_arena(cpu, 1 << 30) == cpu


def test_missing_libraries_are_refused_with_exit_code_4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "import_onnxruntime", lambda: Ort(BUILD[1:]))
    monkeypatch.setattr(devices, "read_nvidia_driver", lambda: NEW)
    with pytest.raises(DeviceUnavailable, match=r"do not load\. To fix that: pip install --force") as refused:
        devices.find_device("cuda")
    assert (refused.value.exit_code, refused.value.device) == (4, "cuda")


def test_cuda_counts_gpus_as_the_driver_does_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    cuda.preload_libraries(SimpleNamespace())
    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    cuda.preload_libraries(SimpleNamespace())
    assert os.environ["CUDA_DEVICE_ORDER"] == "FASTEST_FIRST"
