"""The devices that auto stands for: those of an earlier decision, or of one that is made now by measuring.

It chooses from the devices of this machine, with the forms of the models that are there or can be made.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple

from edgespec.config.drafter_names import SELF, DrafterNames
from edgespec.errors import DeviceUnavailable
from edgespec.memory.free_memory import ReadFreeMemory
from edgespec.runtimes.devices import Device, find_device, machine_key, nvidia_bytes, usable_devices
from edgespec.runtimes.driver_check import check_driver
from edgespec.runtimes.probe import DeviceProbe, probe_device, read_probes, write_probe
from edgespec.setup.device_choice import Placement, device_facts, require_together
from edgespec.setup.device_options import DeviceOptions
from edgespec.setup.device_search import (
    Decision,
    Where,
    decisions_in,
    in_one_line,
    search,
    where_of,
)
from edgespec.setup.foresee import ModelForms, ModelSize, foresee_model
from edgespec.setup.home import ModelHome
from edgespec.setup.open_model import ModelFolder, read_folder, self_drafter
from edgespec.setup.pair import DRAFTER, TARGET, read_pair
from edgespec.setup.planner import Plan
from edgespec.setup.source_names import split_precision


def forms_of(models: ModelHome, name: str, part: str) -> ModelForms:
    """The forms of a model, or of a part of a pair. Raises ModelError: There is no such model."""
    fixed, about = models.fixed_folder(name), cache(device_facts)
    pair = read_pair(fixed) if fixed else None

    def find(device: Device) -> ModelFolder | None:
        if fixed is None:
            folder = models.find(name, device.form, **about(device))
            return read_folder(folder, models.report) if folder else None
        folder = fixed if pair is None else pair.part(part, device.form)
        found = read_folder(folder) if folder else None
        return found if found and (device.kind == "cpu" or found.manifest.form == device.form) else None

    def prepare(device: Device) -> ModelFolder:
        models.report(f"preparing {name} for {device.name}")
        return read_folder(models.resolve(name, device.form, **about(device)), models.report)

    def foresee(device: Device) -> ModelSize:
        return foresee_model(models, name, device.form, nvidia_bytes(device.name))

    # Where somebody else has made the folders, there are no other forms.
    return ModelForms(name, _remember(find), prepare if fixed is None else None, foresee)


def forms_of_self(target: ModelForms) -> ModelForms:
    """The graphs of fewer layers in the folders of a target; raises UsageError: it has none."""

    def find(device: Device) -> ModelFolder | None:
        found = target.find(device)
        return found and ModelFolder(found.folder, self_drafter(found.manifest))

    return ModelForms(target.name, find, None, target.foresee)


def _remember(find: Callable[[Device], ModelFolder | None]) -> Callable[[Device], ModelFolder | None]:
    """Look for a folder until it is found."""
    known: dict[str, ModelFolder] = {}

    def look(device: Device) -> ModelFolder | None:
        if device.name not in known and (found := find(device)):
            known[device.name] = found
        return known.get(device.name)

    return look


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


def find_candidates(device: str, drafter_device: str, *, has_emulators: bool = False) -> Candidates | None:
    """The candidates for two devices as a user has named them; None where auto can only be the CPU.

    has_emulators: Emulators and software adapters are compared too, and never chosen.
    """
    asked = (device.lower(), drafter_device.lower())
    if AUTO not in asked or asked[0] == CPU:
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


_DESCRIPTIONS = ("edgespec.json", "pair.json", "genai_config.json", "config.json")


class Compared(NamedTuple):
    """All options of a target and its drafters, the decision, and what was measured for it."""

    plan: Plan
    decision: Decision
    options: DeviceOptions

    @property
    def target(self) -> ModelFolder:
        """The target in the form of its device."""
        return self.options.target.get(self.options.devices[self.decision.device])

    @property
    def drafters(self) -> list[ModelFolder]:
        """The drafters in the form of their device."""
        device = self.options.devices[self.decision.drafter_device]
        return [drafter.get(device) for drafter in self.options.drafters]


@dataclass(frozen=True, kw_only=True)
class AutoDevices:
    """Chooses the devices of a target and its drafters.

    names: Of the drafters, with those of a pair and of the catalogue.
    placement: Gives the numbers of threads; its devices are not used.
    refused: Devices that were chosen before and did not run their model, with the reasons.
    is_kept: Whether the decision is saved for the next time.
    """

    models: ModelHome
    model: str
    names: DrafterNames
    candidates: Candidates
    placement: Placement
    free: ReadFreeMemory
    refused: Mapping[str, str] = field(default_factory=dict)
    is_kept: bool = True

    def decide(self) -> Decision | None:
        """The saved decision, if this machine and the models are unchanged; otherwise a new one. Reports it.

        None where no placement runs the models, such as with a named device whose driver fails.

        Raises:
            ModelError: A model is missing or invalid.
            MemoryExhausted: No device has room for the target.
        """
        decision = self.saved or ((compared := self.compare()) and compared.decision)
        if decision:
            self.models.report(decision.line)
        return decision

    @property
    def saved(self) -> Decision | None:
        """An earlier decision; None where there is none for this machine and the models as they are."""
        return None if self.refused else decisions_in(self.models.path).read().get(self._made_for)

    def compare(self, *, remeasure: bool = False, measures_prepared: bool = False) -> Compared | None:
        """Compare the devices by foreseeing and measuring, and save the decision; None as in decide().

        Args:
            remeasure: Measure again what was measured before.
            measures_prepared: Measure every placement for which nothing has to be exported.
        """
        self.target.find(self.candidates.devices[CPU])  # a wrong name is reported before anything is probed
        probes, refused = self._probe_all()
        placements = self._placements(refused)
        options = DeviceOptions(
            target=self.target,
            drafters=self.drafters,
            texts=self.names.simple,
            placement=self.placement,
            devices={name: self.candidates.devices[name] for name in probes},
            probes=probes,
            named=self.candidates.named,
            free=self.free,
            report=self.models.report,
            remeasure=remeasure,
        )

        def is_wanted(where: Where) -> bool:
            return options.is_known(where) or (measures_prepared and options.is_prepared(where))

        found = search(placements, options.foresee, options.measure, is_wanted)
        if found is None:
            return None
        plan = options.with_text_drafters(found)
        where = where_of(plan)
        targets = [name for name in self.candidates.targets if name not in refused]
        shown = {name: options.devices[name] for name in dict.fromkeys((*targets, *where))}
        decision = Decision(
            device=where.device,
            drafter_device=where.drafter_device,
            line=in_one_line(_short(self.model), plan, shown),
        )
        if self.is_kept and not _is_short_of_memory(plan):
            self._save(decision)
        return Compared(plan, decision, options)

    @property
    def has_choice(self) -> bool:
        """True if there is more than one placement; raises ModelError: there is no such model."""
        return len(self._placements({})) > 1

    @cached_property
    def target(self) -> ModelForms:
        return forms_of(self.models, self.model, TARGET)

    @cached_property
    def drafters(self) -> list[ModelForms]:
        """The drafter models; none where one drafts for another, whose speed no measurement here predicts."""
        if any(len(cascade.models) > 1 for cascade in self.names.cascades):
            return []
        named = [cascade.models[0] for cascade in self.names.cascades]
        return [
            forms_of_self(self.target) if name == SELF else forms_of(self.models, name, DRAFTER) for name in named
        ]

    def _placements(self, refused: Mapping[str, str]) -> list[Where]:
        """Devices that can have the models, and can run them at the same time; without those that are refused."""
        devices = {name: each for name, each in self.candidates.devices.items() if name not in refused}
        targets = [
            name for name in self.candidates.targets if name in devices and self.target.can_have(devices[name])
        ]
        if not self.drafters:
            return [Where(name, CPU) for name in targets]
        others = [
            name
            for name in self.candidates.drafters
            if name in devices and all(each.can_have(devices[name]) for each in self.drafters)
        ]
        is_named = len(others) == 1
        return [
            Where(name, other)
            for name in targets
            for other in others
            if _can_run_both(devices[name], devices[other])
            and (is_named or _is_worth_comparing(devices[name], devices[other]))
        ]

    def _probe_all(self) -> tuple[dict[str, DeviceProbe], dict[str, str]]:
        """Probes of the devices by name, and those that are refused, with the reasons."""
        known, probes, refused = read_probes(self.models.path), {}, dict(self.refused)
        names = [*dict.fromkeys((CPU, *self.candidates.targets, *self.candidates.drafters))]
        missing = [name for name in names if name not in refused and self._key(name) not in known]
        if missing:
            self.models.report(f"measuring how fast the devices of this machine are: {', '.join(missing)}")
        for name in names:
            if name in refused:
                continue
            key, device = self._key(name), self.candidates.devices[name]
            try:
                probes[name] = known.get(key) or _probe(device, self.placement.num_threads)
            except DeviceUnavailable as error:
                refused[name] = str(error)
                self.models.report(f"'{name}' is left out: {error}")
                continue
            if name in missing:
                with suppress(OSError):  # it is short
                    write_probe(self.models.path, key, probes[name])
        return probes, refused

    @property
    def _made_for(self) -> str:
        """The key of a decision: the request, the models as they are, and the devices of this machine."""
        drafters = [name for cascade in self.names.cascades for name in cascade.models]
        place = self.placement
        how = [place.num_threads, place.drafter_threads, place.deterministic, sorted(self.names.simple)]
        models = [_identity(str(self.models.fixed_folder(name) or name)) for name in (self.model, *drafters)]
        return json.dumps([models, how, self.candidates.asked, sorted(map(self._key, self.candidates.devices))])

    def _key(self, name: str) -> str:
        """A device with the versions of all that its speed depends on."""
        device = self.candidates.devices[name]
        return f"{name}: {machine_key(device, self.placement.num_threads, False)}"

    def _save(self, decision: Decision) -> None:
        try:
            self.models.path.mkdir(parents=True, exist_ok=True)
            decisions_in(self.models.path).write(self._made_for, decision)
        except OSError as error:
            self.models.report(
                f"{self.models.path} cannot be written ({error.strerror}): devices will be compared again next "
                "time"
            )


def _probe(device: Device, num_threads: int | None) -> DeviceProbe:
    """Probe a device; raises DeviceUnavailable: it does not compute, or its driver crashes."""
    if device.kind == "gpu" and (found := check_driver(device.name)):
        raise found.as_error(device.name)
    return probe_device(device, device.form, num_threads)


def _can_run_both(device: Device, drafter_device: Device) -> bool:
    try:
        require_together(device, drafter_device)
    except DeviceUnavailable:
        return False
    return True


def _is_worth_comparing(device: Device, drafter_device: Device) -> bool:
    """True if a drafter's device is the CPU, the target's own, of another kind, or another one of its provider.

    A device of the same kind and another provider may be the same GPU.
    """
    is_other = drafter_device.kind != device.kind or drafter_device.provider == device.provider
    return drafter_device.name == CPU or is_other


def _is_short_of_memory(plan: Plan) -> bool:
    """True if more memory, which may be free the next time, would have led to another decision."""
    lacking = (each for each in plan.refused if not each.context_length and each.schedule != "hedged")
    return any(option.tokens_per_second > plan.chosen.tokens_per_second for option in lacking)


def _identity(name: str) -> str:
    """A model by its name, a file by its state, a folder by that of what describes it."""
    source, precision = split_precision(name)
    if (path := _path(name) or _path(source)) is None:
        return name
    described = [path / each for each in ("", *_DESCRIPTIONS)] + sorted(path.glob(f"*/{_DESCRIPTIONS[0]}"))
    files = [each for each in described if each.is_file()]
    states = [(str(each), each.stat().st_size, each.stat().st_mtime_ns) for each in files]
    return json.dumps([str(path.resolve()), precision, states])


def _short(name: str) -> str:
    """A model's name, or the last part of its path."""
    path = _path(name) or _path(split_precision(name)[0])
    return name.rpartition(path.name)[1] + name.rpartition(path.name)[2] if path else name


def _path(name: str) -> Path | None:
    with suppress(RuntimeError, ValueError, OSError):  # which resolving the model reports
        if (path := Path(name).expanduser()).exists():
            return path
    return None
