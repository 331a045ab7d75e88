"""A machine with a fast GPU, imitated: its decoders run on the CPU, each at the pace of its device."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from edgespec.engine import auto_devices
from edgespec.errors import DeviceUnavailable
from edgespec.loading import device_choice, open_model
from edgespec.profiling.device_probe import DeviceProbe
from edgespec.runtimes.devices import Device, find_device
from edgespec.runtimes.paced import PacedDecoder

CPU = find_device("cpu")
GPU = Device("webgpu", "WebGpuExecutionProvider", kind="gpu", hardware="an imitation")
_PROCESSOR = SimpleNamespace(device=SimpleNamespace(type="OrtHardwareDeviceType.CPU"))
EMULATOR = replace(GPU, handles=(_PROCESSOR,))


@dataclass
class Machine:
    """pace_s: Seconds of a pass, by the precision of the model and the name of its device.

    probes: What a probe of a device finds, by its name.
    opened: Precision and device of each model that was opened.
    broken: Names of devices that open no model.
    """

    pace_s: Mapping[tuple[str, str], float]
    probes: Mapping[str, DeviceProbe]
    devices: list[Device] = field(default_factory=lambda: [CPU, GPU])
    opened: list[tuple[str, str]] = field(default_factory=list)
    probed: list[str] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)

    @contextmanager
    def in_use(self) -> Iterator["Machine"]:
        with pytest.MonkeyPatch.context() as patch:
            self.use(patch)
            yield self

    def use(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(auto_devices, "may_have_accelerator", lambda: True)
        patch.setattr(auto_devices, "usable_devices", lambda: self.devices)
        patch.setattr(auto_devices, "probe_device", self._probe)
        for module in (auto_devices, device_choice):
            patch.setattr(module, "find_device", self._find)
        really = open_model.open_model

        def open_paced(model: Any, device: Device, *rest: Any, **how: Any) -> Any:
            if device.name in self.broken:
                raise DeviceUnavailable(f"'{device.name}' is broken", device=device.name)
            self.opened.append((model.manifest.precision, device.name))
            pace_s = self.pace_s[model.manifest.precision, device.name]
            return PacedDecoder(really(model, CPU, *rest, **how), lambda num_tokens, num_rows: pace_s)

        for module in ("engine.load", "loading.open_model", "planning.measured_placements"):
            patch.setattr(f"edgespec.{module}.open_model", open_paced)

    def _find(self, name: str) -> Device:
        known = {device.name: device for device in self.devices} | {"auto": CPU}
        if name not in known:
            raise DeviceUnavailable(f"there is no device '{name}' here", device=name)
        return known[name]

    def _probe(self, device: Device, form: str, num_threads: int | None) -> DeviceProbe:
        self.probed.append(device.name)
        return self.probes[device.name]
