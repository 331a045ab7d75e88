"""Providers that come as wheels, without any of them."""

import importlib
import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest

from edgespec.errors import DeviceUnavailable
from edgespec.runtimes import devices
from edgespec.runtimes.plugins import PLUGINS, Missing, list_devices, register_plugin

WEBGPU, OPENVINO = PLUGINS[:2]


class Runtime:
    """onnxruntime, as far as plugins go: a library that is registered brings its devices."""

    def __init__(self, *devices: str, error: str = "") -> None:
        self.libraries: dict[str, str] = {}
        self._devices, self._error = devices, error

    def set_default_logger_severity(self, severity: int) -> None:
        self.severity = severity

    def register_execution_provider_library(self, name: str, path: str) -> None:
        if self._error:
            raise RuntimeError(self._error)
        assert name not in self.libraries
        self.libraries[name] = path

    def get_ep_devices(self) -> list[Any]:
        named = [name.partition(" on ") for name in self._devices]
        return [
            SimpleNamespace(ep_name=name, device=SimpleNamespace(type=f"OrtHardwareDeviceType.{kind or 'GPU'}"))
            for name, _, kind in named
            if name in self.libraries
        ]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(get_library_path=lambda: "/lib/webgpu.so")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == WEBGPU.module or None)
    monkeypatch.setattr("edgespec.runtimes.plugins.importlib.import_module", lambda name: module)


@pytest.mark.usefixtures("installed")
def test_plugin_is_registered_once_and_keeps_its_devices() -> None:
    ort = Runtime(WEBGPU.provider, "another")
    first, again = register_plugin(ort, WEBGPU), register_plugin(ort, WEBGPU)
    assert ort.libraries == {WEBGPU.provider: "/lib/webgpu.so"}
    assert not isinstance(first, Missing)
    assert not isinstance(again, Missing)
    assert [device.ep_name for device in first] == [WEBGPU.provider]
    assert len(again) == 1


def handle(kind: str, named: str = "", **facts: str) -> Any:
    device = SimpleNamespace(type=f"OrtHardwareDeviceType.{kind}", vendor="Maker", metadata=facts)
    return SimpleNamespace(device=device, ep_metadata={"ov_device": named} if named else {})


def named(plugin: str, *handles: Any) -> list[tuple[str, int]]:
    found = list_devices(next(each for each in PLUGINS if each.name == plugin), handles)
    return [(each.kind, each.index) for each in found]


def test_devices_of_one_maker_are_told_apart_by_kind_and_index() -> None:
    gpus = handle("GPU", "GPU.1"), handle("GPU", "GPU.0")
    found = list_devices(OPENVINO, [handle("CPU", "CPU"), *gpus, handle("NPU", "NPU")])
    assert [(each.kind, each.index) for each in found] == [("npu", 0), ("gpu", 0), ("gpu", 1)]
    assert [each.handles[0] for each in found[1:]] == [gpus[1], gpus[0]]
    assert named("openvino", handle("CPU")) == [("cpu", 0)]
    assert named("qnn", handle("CPU"), handle("NPU")) == [("npu", 0)]
    assert named("qnn", handle("CPU")) == [("npu", 0)], "its emulator"
    assert named("tensorrt-rtx", handle("GPU"), handle("GPU")) == [("gpu", 0), ("gpu", 1)]


def test_webgpu_has_a_fast_and_a_frugal_gpu_at_most() -> None:
    fast, frugal = handle("GPU", Discrete="1", Description="RTX"), handle("GPU", Discrete="0")
    found = list_devices(WEBGPU, [handle("CPU"), frugal, fast])
    assert [(each.index, each.handles[0], each.options) for each in found] == [
        (0, fast, ()),
        (1, frugal, (("powerPreference", "low-power"),)),
    ]
    assert [each.hardware for each in found] == ["RTX", "Maker"]
    assert named("webgpu", fast, fast) == [("gpu", 0)], "which of two fast ones runs is the driver's choice"
    assert named("webgpu", handle("CPU")) == [("gpu", 0)], "a software adapter"


@pytest.mark.usefixtures("installed")
def test_plugin_that_finds_nothing_says_whom_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "import_onnxruntime", Runtime)
    with pytest.raises(DeviceUnavailable, match=r"finds no device.*To fix that: install a driver with Vulkan"):
        devices.find_device("webgpu")


def test_plugin_that_is_absent_names_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert register_plugin(Runtime(), WEBGPU) == Missing(
        "onnxruntime-ep-webgpu is not installed", "pip install onnxruntime-ep-webgpu"
    )


@pytest.mark.usefixtures("installed")
def test_plugin_without_a_device_and_one_that_does_not_load_say_so() -> None:
    none = register_plugin(Runtime(), WEBGPU)
    assert isinstance(none, Missing)
    assert none.problem == "onnxruntime-ep-webgpu finds no device that it can use"
    assert "Vulkan, Direct3D 12 or Metal" in (none.fix or "")
    broken = register_plugin(Runtime(error="libvulkan.so.1: cannot open shared object file"), WEBGPU)
    assert isinstance(broken, Missing)
    assert "does not load: libvulkan.so.1" in broken.problem
    assert "libvulkan1" in (broken.fix or "")


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("error", "fix"),
    [
        ("libvulkan.so.1: cannot open shared object file", "libvulkan1"),
        ("/lib/libc.so.6: version `GLIBC_2.38' not found", "C library is too old"),
        ("torn", "pip install --force-reinstall onnxruntime-ep-webgpu"),
    ],
)
def test_library_that_does_not_load_comes_with_a_fix(error: str, fix: str) -> None:
    broken = register_plugin(Runtime(error=error), WEBGPU)
    assert isinstance(broken, Missing)
    assert fix in (broken.fix or "")


@pytest.mark.usefixtures("installed")
def test_device_of_a_plugin_carries_its_handles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "import_onnxruntime", lambda: Runtime(WEBGPU.provider))
    device = devices.find_device("webgpu")
    assert (device.provider, device.memory, len(device.handles)) == (WEBGPU.provider, "webgpu", 1)
    monkeypatch.setattr(devices, "import_onnxruntime", Runtime)
    with pytest.raises(DeviceUnavailable, match=r"'webgpu'.*finds no device"):
        devices.find_device("webgpu")
