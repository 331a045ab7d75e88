"""The devices that auto may choose between for a target and its drafters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from edgespec.errors import DeviceUnavailable
from edgespec.runtimes.devices import Device, find_device, usable_devices
from edgespec.runtimes.hardware import may_have_accelerator

AUTO, CPU = "auto", "cpu"


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """The devices that auto chooses from for a target and for its drafters, by name; the CPU is always known.

    asked: What the user has named for the two, auto or a device.
    """

    asked: tuple[str, str]
    devices: Mapping[str, Device]
    targets: Sequence[str]
    drafters: Sequence[str]

    @property
    def named(self) -> set[str]:
        """The devices that are not left to auto."""
        lists = zip(self.asked, (self.targets, self.drafters), strict=True)
        return {name for asked, names in lists if asked != AUTO for name in names}

    def without(self, names: Mapping[str, str]) -> "Candidates":
        """The candidates without devices that did not run their model."""
        return replace(
            self,
            targets=[name for name in self.targets if name not in names],
            drafters=[name for name in self.drafters if name not in names],
        )


def find_candidates(device: str, drafter_device: str, *, has_emulators: bool = False) -> Candidates | None:
    """The candidates for two devices as a user has named them; None where auto can only be the CPU.

    On a machine without a GPU or an NPU nothing is loaded to find that out.

    Args:
        has_emulators: Emulators and software adapters are compared too, and never chosen.
    """
    asked = (device.lower(), drafter_device.lower())
    if AUTO not in asked or asked[0] == CPU or not (has_emulators or may_have_accelerator()):
        return None
    there = [each for each in usable_devices() if has_emulators or not each.is_software]
    # WebGPU keeps to the GPU that a process used first.
    able = {each.name: each for each in there if each.memory != "webgpu" or each.index == 0}
    chosen: list[Sequence[str]] = []
    for name in asked:
        if name == AUTO:
            chosen.append(list(able))
        else:
            try:
                found = find_device(name)
            except DeviceUnavailable:  # which is reported where the device is to be used
                return None
            able[found.name] = found
            chosen.append([found.name])
    targets, drafters = chosen
    if len(able) == 1:
        return None
    return Candidates(asked=asked, devices=able, targets=targets, drafters=drafters)
