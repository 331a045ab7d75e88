import importlib
import importlib.metadata
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edgespec.errors import DeviceUnavailable, UsageError
from edgespec.memory.device_memory import Nvidia, NvidiaGpu
from edgespec.runtimes import devices, plugins
from edgespec.runtimes.device_names import form_of
from edgespec.runtimes.plugins import Missing, Plugin
from edgespec.setup.device_choice import Placement


def install(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    def distribution(name: str) -> object:
        if name not in names:
            raise importlib.metadata.PackageNotFoundError(name)
        return object()

    monkeypatch.setattr(importlib.metadata, "distribution", distribution)
    monkeypatch.setattr(devices, "import_onnxruntime", devices.import_onnxruntime.__wrapped__)


def test_missing_onnxruntime_names_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    with pytest.raises(DeviceUnavailable, match=r'pip install "edgespec\[cpu\]"'):
        devices.import_onnxruntime()


def test_two_builds_name_the_command_that_leaves_one(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "onnxruntime", "onnxruntime-gpu")
    with pytest.raises(
        DeviceUnavailable,
        match=r"pip uninstall -y onnxruntime onnxruntime-gpu, then: pip install .edgespec\[cuda\]",
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
    with pytest.raises(UsageError, match="auto, cpu, cuda"):
        devices.find_device("tpu")
    with pytest.raises(UsageError, match=r"'cdua'; did you mean cuda\? the devices are auto"):
        devices.find_device("cdua")
    with pytest.raises(UsageError, match=r"unknown device 'cuda:\u0661'; wanted a name such as cuda or cuda:1"):
        devices.find_device("cuda:\u0661")  # a digit of another script
    assert devices.find_device("CPU") == devices.find_device("cpu")


class Providers:
    __version__ = "1.0"

    def __init__(self, *names: str) -> None:
        self.names = list(names)

    def get_available_providers(self) -> list[str]:
        return self.names


def test_absent_provider_names_what_is_there_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "import_onnxruntime", lambda: Providers("CPUExecutionProvider"))
    monkeypatch.setattr(devices.sys, "platform", "linux")
    with pytest.raises(DeviceUnavailable, match="'coreml': it works on macOS only; use device='cpu'"):
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
    directml = devices.Device("directml", "DmlExecutionProvider", "dml", kind="gpu")
    assert devices.find_device("gpu") == devices.find_device("directml") == directml


def test_kind_that_is_not_there_says_why_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "import_onnxruntime", lambda: Providers("CPUExecutionProvider"))
    monkeypatch.setattr(plugins.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DeviceUnavailable, match=r"no npu.*\n.*pip install onnxruntime-qnn\n.*-ep-openvino"):
        devices.find_device("npu")


def handle(kind: str, named: str = "") -> Any:
    device = SimpleNamespace(type=f"OrtHardwareDeviceType.{kind}", vendor="Maker", metadata={})
    return SimpleNamespace(device=device, ep_metadata={"ov_device": named})


class Machine:
    """A machine by what its providers list: handles of plugins, and GPUs of NVIDIA's driver."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, cuda: Sequence[str] = (), **plugins: Sequence[Any]
    ) -> None:
        def register(ort: object, plugin: Plugin) -> tuple[Any, ...] | Missing:
            return tuple(plugins.get(plugin.name, ())) or Missing("nothing here")

        gpus = tuple(NvidiaGpu(name, 24 << 30, 20 << 30) for name in cuda)
        monkeypatch.setattr(devices, "import_onnxruntime", lambda: Providers("CPUExecutionProvider"))
        monkeypatch.setattr(devices, "register_plugin", register)
        monkeypatch.setattr(devices, "read_nvidia_driver", lambda: Nvidia("580", (13, 0), gpus) if gpus else None)
        monkeypatch.setattr(devices.cuda, "find_missing", lambda driver, *rest: None if driver else Missing("no"))


def test_several_gpus_have_an_index_each(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch, cuda=["RTX A", "RTX B"])
    first, second = devices.find_device("cuda"), devices.find_device("cuda:1")
    assert devices.find_device("CUDA:0") == first == devices.find_device("gpu")
    assert (first.name, first.hardware, first.place, dict(first.options).get("device_id")) == (
        "cuda", "RTX A", "cuda", None,
    )  # fmt: skip
    assert (second.name, second.hardware, second.place, dict(second.options)["device_id"]) == (
        "cuda:1", "RTX B", "cuda:1", "1",
    )  # fmt: skip
    assert second.memory_index == 1
    assert devices.machine_key(first, 1, False) != devices.machine_key(second, 1, False)
    assert dict(devices.limit_arena(second, 7).options)["gpu_mem_limit"] == "7"
    with pytest.raises(
        DeviceUnavailable, match=r"no device 'cuda:2' here; cuda has: cuda \(RTX A\), cuda:1 \(RTX B\)"
    ) as refused:
        devices.find_device("cuda:2")
    assert refused.value.device == "cuda:2"
    assert refused.value.exit_code == 4


def test_another_card_in_its_place_has_costs_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    places = []
    for card in ("RTX A", "RTX B"):
        Machine(monkeypatch, cuda=[card])
        device = devices.find_device("cuda")
        places.append(Placement(device=device, drafter_device=device))
    first, second = places
    assert first.machine.replace("RTX A", "RTX B") == second.machine != first.machine
    assert first.drafter_key("tiny") != second.drafter_key("tiny")
    assert "None" not in Placement(device=devices.find_device("cpu"), drafter_device=device).machine


def test_a_core_ultra_has_an_npu_and_a_gpu_of_one_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch, openvino=[handle("GPU", "GPU"), handle("CPU", "CPU"), handle("NPU", "NPU")])
    npu, gpu = devices.find_device("openvino:npu"), devices.find_device("openvino:gpu")
    # OpenVINO's plugin has no kernel for the attention of the gpu form, which a GPU in general runs.
    assert (npu.form, gpu.form) == ("npu", "npu")
    assert devices.find_device("npu") == npu
    with pytest.raises(DeviceUnavailable, match="no gpu can be used; use device='cpu'"):
        devices.find_device("gpu")
    with pytest.raises(DeviceUnavailable, match="no gpu can be used; use drafter_device='cpu'") as refused:
        devices.find_device("gpu", "--drafter-device")
    assert " device=" not in str(refused.value)
    assert [each.name for each in devices.usable_devices()] == ["cpu", "openvino:gpu", "openvino:npu"]
    with pytest.raises(DeviceUnavailable, match="more than one device here; name one of: openvino:npu"):
        devices.find_device("openvino")
    with pytest.raises(DeviceUnavailable, match="no device 'openvino:gpu:1' here; openvino has: openvino:npu"):
        devices.find_device("openvino:gpu:1")


def test_an_emulator_is_no_device_for_a_kind_and_has_to_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch, qnn=[handle("CPU")], webgpu=[handle("CPU")])
    with pytest.raises(
        DeviceUnavailable, match=r"only emulates one on the processor; .*: device='qnn';"
    ) as refused:
        devices.find_device("npu")
    assert refused.value.exit_code == 4
    assert devices.find_accelerator("gpu") is None
    emulator = devices.find_device("qnn")
    assert (emulator.kind, emulator.is_software) == ("npu", True)
    assert [(each.name, each.is_software) for each in devices.usable_devices()] == [
        ("cpu", False), ("webgpu", True), ("qnn", True),
    ]  # fmt: skip
    Machine(monkeypatch, qnn=[handle("CPU")], openvino=[handle("NPU", "NPU")])
    assert devices.find_device("npu").name == "openvino:npu"
    assert devices.find_accelerator("npu") == devices.find_device("openvino")


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("auto", "cpu"), ("cpu", "cpu"), ("GPU", "gpu"), ("npu", "npu"), ("cuda", "gpu"), ("cuda:3", "gpu"),
        ("webgpu:1", "gpu"), ("openvino:npu", "npu"), ("openvino:gpu:1", "npu"), ("qnn", "npu"),
    ],
)  # fmt: skip
def test_form_is_known_by_the_name_of_a_device_that_is_not_here(name: str, form: str) -> None:
    assert form_of(name) == form


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("cuda:x", "wanted a name such as cuda or cuda:1"),
        ("cuda:npu", "wanted a name such as cuda or cuda:1"),
        ("openvino:1:gpu", "wanted a name such as openvino:npu"),
        ("gpu:1", "the devices are auto"),
        ("openvino", "name one: openvino:gpu or openvino:npu"),
        ("cuda:", "wanted a name such as"),
    ],
)
def test_names_that_make_no_sense_say_which_do(name: str, problem: str) -> None:
    with pytest.raises(DeviceUnavailable if name == "openvino" else UsageError, match=problem):
        form_of(name)


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
