import importlib
import importlib.metadata
import signal
import sys
from pathlib import Path

import pytest

from edgespec.errors import DeviceUnavailable
from edgespec.runtimes import devices, plugins


def install(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    def distribution(name: str) -> object:
        if name not in names:
            raise importlib.metadata.PackageNotFoundError(name)
        return object()

    monkeypatch.setattr(importlib.metadata, "distribution", distribution)


def test_missing_onnxruntime_names_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    with pytest.raises(DeviceUnavailable, match=r'pip install "edgespec\[cpu\]"'):
        devices.import_onnxruntime()


def test_two_builds_name_the_command_that_leaves_one(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "onnxruntime", "onnxruntime-gpu")
    with pytest.raises(
        DeviceUnavailable, match=r"pip uninstall -y onnxruntime onnxruntime-gpu && pip install .edgespec\[cuda\]"
    ):
        devices.import_onnxruntime()


def test_onnxruntime_that_does_not_load_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> object:
        raise ImportError("libonnxruntime.so.1: cannot open shared object file")

    install(monkeypatch, "onnxruntime")
    monkeypatch.setattr(importlib, "import_module", broken)
    with pytest.raises(DeviceUnavailable, match=r"libonnxruntime\.so\.1.*force-reinstall"):
        devices.import_onnxruntime()


def test_empty_remains_of_onnxruntime_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "onnxruntime")
    monkeypatch.setattr(importlib, "import_module", lambda name: object())
    with pytest.raises(DeviceUnavailable, match="force-reinstall"):
        devices.import_onnxruntime()


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_while_onnxruntime_is_imported_takes_effect_afterwards(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    (tmp_path / "onnxruntime.py").write_text(
        f"""import signal
try:
    signal.raise_signal(signal.{name})
    signal.raise_signal(signal.{name})
except KeyboardInterrupt:  # as NumPy's C interface has it
    raise ImportError("initialization failed") from None
get_available_providers = list
"""
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)  # restored after the test
    monkeypatch.delitem(sys.modules, "onnxruntime")
    install(monkeypatch, "onnxruntime")
    before = signal.signal(getattr(signal, name), interrupt)
    try:
        with pytest.raises(KeyboardInterrupt, match=name):
            devices.import_onnxruntime()
        assert signal.getsignal(getattr(signal, name)) is interrupt
        assert devices.import_onnxruntime().get_available_providers is list
    finally:
        signal.signal(getattr(signal, name), before)


def test_auto_is_the_cpu() -> None:
    assert devices.find_device("auto") == devices.find_device("cpu")
    assert devices.find_device("cpu").provider == "CPUExecutionProvider"


def test_unknown_device_lists_the_known(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DeviceUnavailable, match="auto, cpu, cuda"):
        devices.find_device("tpu")
    with pytest.raises(DeviceUnavailable, match=r"'cdua'; did you mean cuda\? the devices are auto"):
        devices.find_device("cdua")
    assert devices.find_device("CPU") == devices.find_device("cpu")


class Providers:
    def __init__(self, *names: str) -> None:
        self.names = list(names)

    def get_available_providers(self) -> list[str]:
        return self.names


def test_absent_provider_names_what_is_there_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "import_onnxruntime", lambda: Providers("CPUExecutionProvider"))
    monkeypatch.setattr(devices.sys, "platform", "linux")
    with pytest.raises(DeviceUnavailable, match="'coreml': it works on macOS only; use --device cpu"):
        devices.find_device("coreml")
    monkeypatch.setattr(devices.sys, "platform", "darwin")
    with pytest.raises(
        DeviceUnavailable, match=r"'coreml': .* no CoreMLEx.*only CPUEx.*To fix that: pip install"
    ) as refused:
        devices.find_device("coreml")
    assert refused.value.device == "coreml"


def test_kind_is_the_first_device_of_it_that_can_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "import_onnxruntime", lambda: Providers("DmlExecutionProvider"))
    monkeypatch.setattr(devices, "read_nvidia_driver", lambda: None)
    monkeypatch.setattr(plugins.importlib.util, "find_spec", lambda name: None)
    directml = devices.Device("directml", "DmlExecutionProvider", "dml")
    assert devices.find_device("gpu") == devices.find_device("directml") == directml


def test_kind_that_is_not_there_says_why_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "import_onnxruntime", lambda: Providers("CPUExecutionProvider"))
    monkeypatch.setattr(plugins.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DeviceUnavailable, match=r"no npu.*pip install onnxruntime-qnn.*onnxruntime-ep-openvino"):
        devices.find_device("npu")


def test_what_is_measured_on_an_accelerator_is_kept_by_its_driver(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(devices, "_NVIDIA_DRIVER", tmp_path / "version")
    cuda = devices.Device("cuda", "CUDAExecutionProvider")
    without = devices.machine_key(cuda, 2, False)
    (tmp_path / "version").write_text("NVRM version: 570.1\nGCC version: 12\n")
    assert devices.machine_key(cuda, 2, False) == f"{without}, NVRM version: 570.1"
    monkeypatch.setattr(devices.importlib.metadata, "version", lambda package: f"2.7 of {package}")
    qnn = devices.Device("qnn", "QNNExecutionProvider")
    assert devices.driver_versions(qnn) == ("onnxruntime-qnn 2.7 of onnxruntime-qnn", "NVRM version: 570.1")
    assert "NVRM" not in devices.machine_key(devices.find_device("cpu"), 2, False)
