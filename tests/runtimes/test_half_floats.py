"""Whether a device has half floats, on imitations of what sessions raise."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edgespec.errors import DeviceUnavailable
from edgespec.runtimes import driver_check
from edgespec.runtimes.devices import Device, find_device
from edgespec.runtimes.driver_check import is_known_to_lack_half_floats, lacks_half_floats

WEBGPU = Device("webgpu", "WebGpuExecutionProvider", "webgpu", kind="gpu")


class Session:
    """A session whose runs end as a test wants."""

    error: Exception | None = None

    def __init__(self, graph: bytes, options: object, **how: Any) -> None:
        assert how["enable_fallback"] == 0, "the CPU has half floats"

    def get_providers(self) -> list[str]:
        return [WEBGPU.provider]

    def run(self, outputs: None, inputs: dict[str, Any]) -> list[np.ndarray]:
        if self.error:
            raise self.error
        return [inputs["x"] @ inputs["y"]]


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> type[Session]:
    options = SimpleNamespace(add_session_config_entry=lambda key, value: None)
    ort = SimpleNamespace(SessionOptions=lambda: options, InferenceSession=Session)
    monkeypatch.setattr(driver_check, "import_onnxruntime", lambda: ort)
    monkeypatch.setattr(Session, "error", None)
    return Session


def test_a_device_is_believed_by_what_its_provider_says(
    session: type[Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not lacks_half_floats(WEBGPU)
    monkeypatch.setattr(
        session, "error", RuntimeError("Program MatMul requires f16 but the device does not support it")
    )
    assert lacks_half_floats(WEBGPU)
    problems = {
        "Failed to get a WebGPU adapter.": "'webgpu': it finds no GPU with a driver that it can use. To fix",
        "Device lost": r"'webgpu' does not compute: Device lost; update its driver",
    }
    for error, problem in problems.items():
        monkeypatch.setattr(session, "error", RuntimeError(error))
        with pytest.raises(DeviceUnavailable, match=problem) as refused:
            lacks_half_floats(WEBGPU)
        assert refused.value.device == "webgpu"


def test_other_devices_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_check, "import_onnxruntime", lambda: pytest.fail("asked"))
    assert not lacks_half_floats(find_device("cpu"))
    assert not is_known_to_lack_half_floats("cpu")


def test_of_a_device_that_is_not_here_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str) -> Device:
        raise DeviceUnavailable("none here", device=name)

    monkeypatch.setattr(driver_check, "find_device", find)
    assert not is_known_to_lack_half_floats("webgpu")
