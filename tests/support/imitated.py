"""A machine with a fast GPU, imitated: its decoders run on the CPU, each at the pace of its device."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
from real_pace import RealPacedDecoder

from edgespec.decoding.decoder import Decoder, Pass, Rows
from edgespec.errors import DeviceUnavailable
from edgespec.runtimes.devices import Device, find_device
from edgespec.runtimes.plugins import Missing
from edgespec.runtimes.probe import DeviceProbe
from edgespec.setup import auto_devices, device_choice, open_model
from edgespec.setup.profile import DrafterProfile, Profile

CPU = find_device("cpu")
GPU = Device("webgpu", "WebGpuExecutionProvider", kind="gpu", hardware="an imitation")
_PROCESSOR = SimpleNamespace(device=SimpleNamespace(type="OrtHardwareDeviceType.CPU"))
EMULATOR = replace(GPU, handles=(_PROCESSOR,))


class SteadyDecoder(RealPacedDecoder):
    """A pass that ends late, as on a busy machine, shortens none that follow: what is measured is the fastest.

    Where nothing is measured, passes end as soon as their rows are there.
    """

    def __init__(self, decoder: Decoder, pace_s: float, *, is_measured: bool) -> None:
        super().__init__(decoder, lambda num_tokens, num_rows: pace_s if is_measured else 0.0)
        self.pace_s = pace_s

    def run(self, given: Pass) -> Rows:
        self._late_s = 0.0
        return super().run(given)


@dataclass
class Machine:
    """pace_s: Seconds of a pass, by the precision of the model and the name of its device.

    probes: What a probe of a device finds, by its name.
    opened: Precision and device of each model that was opened.
    broken: Names of devices that open no model. crashing: Those whose driver ends the process that uses it.
    is_measured: Whether passes are timed, which takes seconds; otherwise they count as long as their pace.
    """

    pace_s: Mapping[tuple[str, str], float]
    probes: Mapping[str, DeviceProbe]
    devices: list[Device] = field(default_factory=lambda: [CPU, GPU])
    opened: list[tuple[str, str]] = field(default_factory=list)
    probed: list[str] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)
    crashing: set[str] = field(default_factory=set)
    is_measured: bool = False

    @contextmanager
    def in_use(self) -> Iterator["Machine"]:
        with pytest.MonkeyPatch.context() as patch:
            self.use(patch)
            yield self

    def use(self, patch: pytest.MonkeyPatch) -> None:
        if not self.is_measured:
            for module in ("setup.measured_placements", "engine.load"):
                patch.setattr(f"edgespec.{module}.complete_profile", _as_paced)
        patch.setattr("edgespec.setup.resolve.may_have_accelerator", lambda: True)
        patch.setattr(auto_devices, "usable_devices", lambda: self.devices)
        patch.setattr(auto_devices, "probe_device", self._probe)
        patch.setattr(auto_devices, "check_driver", self._check)
        for module in (auto_devices, device_choice):
            patch.setattr(module, "find_device", self._find)
        patch.setattr(device_choice, "lacks_half_floats", lambda device: False)
        really = open_model.open_model

        def open_paced(model: Any, device: Device, *rest: Any, **how: Any) -> Any:
            if device.name in self.broken:
                raise DeviceUnavailable(f"'{device.name}' is broken", device=device.name)
            self.opened.append((model.manifest.precision, device.name))
            pace_s = self.pace_s[model.manifest.precision, device.name]
            return SteadyDecoder(really(model, CPU, *rest, **how), pace_s, is_measured=self.is_measured)

        for module in ("engine.load", "setup.open_model", "setup.measured_placements"):
            patch.setattr(f"edgespec.{module}.open_model", open_paced)

    def _find(self, name: str, option: str = "--device") -> Device:
        known = {device.name: device for device in self.devices} | {"auto": CPU}
        if name not in known:
            raise DeviceUnavailable(f"there is no device '{name}' here", device=name)
        return known[name]

    def _check(self, name: str) -> Missing | None:
        return Missing("its driver crashed (SIGSEGV)") if name in self.crashing else None

    def _probe(self, device: Device, form: str, num_threads: int | None) -> DeviceProbe:
        self.probed.append(device.name)
        return self.probes[device.name]


def _as_paced(known: Profile | None, target: Any, drafters: Mapping[str, Any], *more: Any, **how: Any) -> Profile:
    """A profile as measuring decoders that keep to their paces would give."""
    passes_s = {128: dict.fromkeys((1, 2, 4, 8, 16, 32), target.pace_s)}
    known = known or Profile(passes_s=passes_s, prefill_s=target.pace_s)
    found = {name: DrafterProfile(step_s=each.pace_s, row_s=0.0) for name, each in drafters.items()}
    return replace(known, drafters={**known.drafters, **found})
