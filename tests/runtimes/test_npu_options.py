"""What NPUs and Intel's GPUs are asked for, on imitated hardware."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from edgespec.runtimes.plugins import PLUGINS, QNN_SHARED_MEMORY, Plugin, list_devices


def plugin(name: str) -> Plugin:
    return next(each for each in PLUGINS if each.name == name)


def handle(kind: str, ov_device: str = "") -> Any:
    hardware = SimpleNamespace(type=f"OrtHardwareDeviceType.{kind}", metadata={})
    return SimpleNamespace(device=hardware, ep_metadata={"ov_device": ov_device})


def options(name: str, *handles: Any) -> dict[str, dict[str, str]]:
    """The options of each device of a plugin, by kind."""
    return {each.kind: dict(each.options) for each in list_devices(plugin(name), handles)}


def test_a_real_qualcomm_npu_keeps_its_clocks_up_and_shares_memory() -> None:
    found = options("qnn", handle("NPU"), handle("CPU"))["npu"]
    assert found["htp_performance_mode"] == "burst"
    assert QNN_SHARED_MEMORY in found.items()


def test_the_emulator_is_asked_for_neither() -> None:
    assert options("qnn", handle("CPU")) == {"npu": dict(plugin("qnn").options)}


@pytest.mark.parametrize("kind", ["NPU", "GPU", "CPU"])
def test_each_of_intels_devices_is_asked_for_latency_by_its_own_name(kind: str) -> None:
    found = options("openvino", handle(kind, kind))
    assert json.loads(found[kind.lower()]["load_config"]) == {kind: {"PERFORMANCE_HINT": "LATENCY"}}


def test_intels_npu_and_gpu_are_told_apart() -> None:
    found = options("openvino", handle("GPU", "GPU"), handle("CPU", "CPU"), handle("NPU", "NPU"))
    assert {kind: list(json.loads(each["load_config"])) for kind, each in found.items()} == {
        "npu": ["NPU"],
        "gpu": ["GPU"],
    }
