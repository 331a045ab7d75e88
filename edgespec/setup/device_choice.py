"""Which devices run a target and its drafters, with how many threads and in which forms of the models.

The devices are those that a user named, what auto means, and the CPU instead.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

from edgespec.errors import DeviceUnavailable
from edgespec.manifest import Manifest, read_manifest
from edgespec.runtimes.device_names import Kind, format_device_name, parse_device_name
from edgespec.runtimes.devices import (
    Device,
    find_accelerator,
    find_device,
    hardware_and_drivers,
    machine_key,
    nvidia_bytes,
)
from edgespec.runtimes.driver_check import lacks_half_floats
from edgespec.setup.home import DeviceFacts
from edgespec.setup.open_model import ModelFolder
from edgespec.setup.pair import DRAFTER, TARGET, Pair, forms_of
from edgespec.setup.profile import Place, drafter_key
from edgespec.system.command_line import quote
from edgespec.system.system_info import physical_cores


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The devices and threads that costs depend on.

    num_threads: Threads of the host; None for all physical cores it may use.
    drafter_threads: Threads of a drafter; None for the target's number, less one where that is all cores and the
        target is on another device.
    deterministic: Rows of the target do not depend on how a text is cut into passes.
    exact: Where they do, near-ties of greedy decoding are decided as plain decoding decides them.
    """

    device: Device
    drafter_device: Device
    num_threads: int | None = None
    drafter_threads: int | None = None
    deterministic: bool = False
    exact: bool = False

    @property
    def machine(self) -> str:
        """The key of the costs of the target's passes: all that they depend on, apart from the model."""
        key = machine_key(self.device, self.num_threads, self.deterministic)
        return f"{key}, near-ties decided again" if self.decides_near_ties else key

    def without_recording(self) -> "Placement":
        """This placement with every pass run kernel by kernel: no CUDA graphs on either device."""
        devices = [replace(device, records_passes=False) for device in (self.device, self.drafter_device)]
        return replace(self, device=devices[0], drafter_device=devices[1])

    @property
    def decides_near_ties(self) -> bool:
        return self.exact and not self.deterministic

    @property
    def target_place(self) -> Place:
        return Place(self.device.name, self.num_threads or physical_cores())

    @property
    def drafter_place(self) -> Place:
        # A core starts the target's work on another device, and waits for it without rest.
        is_launching = self.device.name != "cpu" and self.device != self.drafter_device
        num_threads = self.drafter_threads or self.num_threads or max(1, physical_cores() - is_launching)
        return Place(self.drafter_device.name, num_threads, hardware_and_drivers(self.drafter_device))

    @property
    def shares_processor(self) -> bool:
        """True if each of the two models works at the other's expense: on one device, without cores of its own."""
        target, drafter = self.target_place, self.drafter_place
        if self.device.name != "cpu" or self.drafter_device.name != "cpu":
            return self.device == self.drafter_device
        return target.num_threads + drafter.num_threads > physical_cores()

    def drafter_key(self, drafter: str) -> str:
        """The name in a profile of a drafter that runs here, by the name in its manifest."""
        return drafter_key(drafter, self.drafter_place)


_AUTO = "auto"


def device_facts(device: Device) -> DeviceFacts:
    """The facts that decide in which precision a model is prepared for a device, each found out once."""
    return {
        "lacks_half_floats": cache(partial(lacks_half_floats, device)),
        "nvidia_bytes": cache(partial(nvidia_bytes, device.name)),
    }


def describe(device: Device) -> str:
    """A device for people. Example: webgpu (Radeon 780M)."""
    if device.name == "cpu":
        return "the CPU"
    return f"{device.name} ({device.hardware})" if device.hardware else device.name


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
        device = self._find(self._names[0], "--device")
        drafter_device = self._find(self._names[1], "--drafter-device")
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
        target, drafter = self._names
        return (
            None if target == _AUTO else placement.device.form,
            None if drafter == _AUTO else placement.drafter_device.form,
        )

    def resolve_auto(self, placement: Placement, target: Manifest, drafters: Sequence[Manifest]) -> Placement:
        """Replace auto by a device of the kind that a folder was exported for, if there is one."""
        if self._names[0] == _AUTO and target.form != "cpu":
            placement = replace(placement, device=self._suit(target, placement.device))
        forms = {drafter.form for drafter in drafters}
        if self._names[1] == _AUTO and len(forms) == 1 and "cpu" not in forms:
            placement = replace(placement, drafter_device=self._suit(drafters[0], placement.drafter_device))
        return placement

    def fall_back(self, error: DeviceUnavailable, placement: Placement) -> Placement:
        """Replace a device that does not run a model by the CPU.

        Raises DeviceUnavailable: The error that is given, where the device may not be replaced.
        """
        devices = [
            find_device("cpu")
            if device.name == error.device != "cpu" and (self._allow_fallback or name == _AUTO)
            else device
            for name, device in zip(self._names, (placement.device, placement.drafter_device), strict=True)
        ]
        fallen = replace(placement, device=devices[0], drafter_device=devices[1])
        if fallen == placement:
            raise error
        self._note_fallback(error)
        return fallen

    def _find(self, name: str, option: str) -> Device:
        try:
            return find_device(name, option)
        except DeviceUnavailable as error:
            if error.device is None or not self._allow_fallback:
                raise
            self._note_fallback(error)
            return find_device("cpu")

    def _suit(self, manifest: Manifest, otherwise: Device) -> Device:
        made_for = f"{manifest.name} was exported for a{'n' * (manifest.form == 'npu')} {manifest.form}"
        if found := find_accelerator(manifest.form):
            self._report(f"{made_for} and runs on '{found.name}'")
            return found
        self.note(f"{made_for} and none can be used here: it runs on the CPU")
        return otherwise

    def _note_fallback(self, error: DeviceUnavailable) -> None:
        self.note(f"the CPU is used instead of '{error.device}': {error}")

    def note(self, line: str) -> None:
        """Have a line among the downgrades, once."""
        if line not in self.downgrades:
            self.downgrades.append(line)


_RUNS_ON = {"cpu": "the CPU", "gpu": "a GPU or the CPU", "npu": "an NPU or the CPU"}


def require_form(model: ModelFolder, device: Device) -> None:
    """Raises DeviceUnavailable: An NPU runs only graphs of fixed shapes, which only the npu form has."""
    if device.kind == "npu" and model.manifest.kv_cache.form != "static":
        raise DeviceUnavailable(
            f"'{device.name}' runs only graphs of fixed shapes: {advise_form(model.manifest, device)}",
            device=device.name,
        )


def explain_form(error: DeviceUnavailable, model: ModelFolder, device: Device) -> DeviceUnavailable:
    """The error of a device that does not run a model, with advice where the model is in the form for another."""
    if error.device != device.name or model.manifest.form == device.form:
        return error
    return DeviceUnavailable(f"{error}; {advise_form(model.manifest, device)}", device=error.device)


def advise_form(manifest: Manifest, device: Device) -> str:
    """How to get a model in the form that a device runs, as a sentence."""
    return (
        f"{manifest.name} is in the {manifest.form} form, which runs on {_RUNS_ON.get(manifest.form, 'the CPU')}; "
        f"for the {device.form} form run: edgespec export {quote(source_of(manifest))} --device {device.name} "
        "--output DIR"
    )


def source_of(manifest: Manifest) -> str:
    """The source of a model, as a command names it: a hub id, or the name of a file."""
    return manifest.source.hub_id or manifest.source.name


def usable_form(pair: Pair, part: str) -> str | None:
    """The first form of a part of a pair whose device this machine has; None where it has none of them.

    The CPU counts for the cpu form alone, though it runs the other forms too.
    """
    forms = forms_of(pair.folder, part)
    return next((form for form in forms if form == "cpu" or find_accelerator(form) is not None), None)


def require_part(pair: Pair, part: str, form: str | None) -> Path:
    """The target or the drafter of a pair in a form.

    Raises DeviceUnavailable: The pair has it in other forms alone, with the command that adds this one.
    """
    if (folder := pair.part(part, form)) is not None:
        return folder
    forms = forms_of(pair.folder, part)
    if not forms:  # its manifest is missing, which reading it says
        return pair.folder / part
    sources = [
        source_of(read_manifest(next(iter(found.values()))))
        for each in (TARGET, DRAFTER)
        if (found := forms_of(pair.folder, each))
    ]
    option = "--device" if part == TARGET else "--drafter-device"
    raise DeviceUnavailable(
        f"{pair.folder} has its {part} in the {' and the '.join(forms)} form, and a device of this kind needs the "
        f"{form} form; to add it: edgespec export {' --drafter '.join(map(quote, sources))} {option} {form} "
        f"--add-to {quote(pair.folder)}"
    )
