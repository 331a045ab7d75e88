"""Which devices run a target and its drafters: those that a user named, what auto means, and the CPU instead."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from edgespec.errors import DeviceUnavailable
from edgespec.loading.placement import Placement
from edgespec.manifest import Manifest
from edgespec.runtimes.device_names import Kind, format_device_name, parse_device_name
from edgespec.runtimes.devices import Device, find_accelerator, find_device

_AUTO = "auto"


def require_together(device: Device, drafter_device: Device, *, has_drafter_model: bool = True) -> None:
    """Raises DeviceUnavailable: A process cannot use both devices, or not for two models.

    WebGPU keeps to the GPU that it used first. Two models that run on it at the same time disturb each other: its
    plugin 0.4.0 then fails ("Command encoding already finished") or gives wrong logits (docs/log/devices.md).
    """
    if device.memory == drafter_device.memory == "webgpu":
        _require_one_webgpu(device.name, drafter_device.name, has_drafter_model)


def require_names_together(device: str, drafter_device: str) -> None:
    """Check before an export that two named devices can run a model each; they need not be in this machine.

    Raises DeviceUnavailable: One process cannot use both, or not for two models.
    """
    names = [parse_device_name(name) for name in (device, drafter_device)]
    if all(name.provider == "webgpu" for name in names):
        first, second = (format_device_name("webgpu", "gpu", name.index) for name in names)
        _require_one_webgpu(first, second, True)


def _require_one_webgpu(device: str, drafter_device: str, has_drafter_model: bool) -> None:
    if device != drafter_device:
        raise DeviceUnavailable(
            f"'{device}' and '{drafter_device}' cannot be used together: WebGPU uses one GPU in a process; use "
            "--drafter-device cpu"
        )
    if has_drafter_model:
        raise DeviceUnavailable(
            f"'{device}' cannot run a target and a drafter model at the same time: WebGPU's plugin computes "
            "wrongly where two models use it; use --drafter-device cpu, or --drafter none"
        )


class DeviceChoice:
    """The devices that a user has named for a target and its drafters.

    downgrades: Lines that say which device the CPU replaces, and why; they are not reported.
    """

    def __init__(
        self, device: str, drafter_device: str, report: Callable[[str], None], *, allow_fallback: bool = False
    ) -> None:
        self._names = (device.lower(), drafter_device.lower())
        self._report = report
        self._allow_fallback = allow_fallback
        self.downgrades: list[str] = []

    def initial_placement(
        self, num_threads: int | None, drafter_threads: int | None, *, deterministic: bool
    ) -> Placement:
        """Find the devices by their names; auto is the CPU until the models are known.

        Raises DeviceUnavailable: One of them cannot be used here, or not beside the other.
        """
        options = ("--device", "--drafter-device")
        device, drafter_device = (self._find(*each) for each in zip(self._names, options, strict=True))
        require_together(device, drafter_device, has_drafter_model=False)
        return Placement(
            device=device,
            drafter_device=drafter_device,
            num_threads=num_threads,
            drafter_threads=drafter_threads,
            deterministic=deterministic,
        )

    def forms(self, placement: Placement) -> tuple[Kind | None, Kind | None]:
        """The forms in which to prepare target and drafters for their devices; None where none was named."""
        devices = placement.device, placement.drafter_device
        target, drafter = (
            None if name == _AUTO else device.form for name, device in zip(self._names, devices, strict=True)
        )
        return target, drafter

    def resolve_auto(self, placement: Placement, target: Manifest, drafters: Sequence[Manifest]) -> Placement:
        """Replace auto by a device of the kind that a folder was exported for, if there is one."""
        if self._names[0] == _AUTO:
            placement = replace(placement, device=self._suit(target, placement.device))
        if self._names[1] == _AUTO and len({drafter.form for drafter in drafters}) == 1:
            placement = replace(placement, drafter_device=self._suit(drafters[0], placement.drafter_device))
        return placement

    def fall_back(self, error: DeviceUnavailable, placement: Placement) -> Placement:
        """Replace a device that does not run a model by the CPU.

        Raises DeviceUnavailable: The error that is given, where the device may not be replaced.
        """
        devices = [
            find_device("cpu") if self._may_replace(device, name, error) else device
            for name, device in zip(self._names, (placement.device, placement.drafter_device), strict=True)
        ]
        fallen = replace(placement, device=devices[0], drafter_device=devices[1])
        if fallen == placement:
            raise error
        self._note_fallback(error)
        return fallen

    def _may_replace(self, device: Device, name: str, error: DeviceUnavailable) -> bool:
        return device.name == error.device != "cpu" and (self._allow_fallback or name == _AUTO)

    def _find(self, name: str, option: str) -> Device:
        try:
            return find_device(name, option)
        except DeviceUnavailable as error:
            if error.device is None or not self._allow_fallback:
                raise
            self._note_fallback(error)
            return find_device("cpu")

    def _suit(self, manifest: Manifest, otherwise: Device) -> Device:
        if manifest.form == "cpu":
            return otherwise
        made_for = f"{manifest.name} was exported for a{'n' * (manifest.form == 'npu')} {manifest.form}"
        if found := find_accelerator(manifest.form):
            self._report(f"{made_for} and runs on '{found.name}'")
            return found
        self.note(f"{made_for} and no real one can be used here: it runs on the CPU")
        return otherwise

    def _note_fallback(self, error: DeviceUnavailable) -> None:
        self.note(f"the CPU is used instead of '{error.device}': {error}")

    def note(self, line: str) -> None:
        """Have a line among the downgrades, once."""
        if line not in self.downgrades:
            self.downgrades.append(line)
