"""The options of a target and its drafters on devices, foreseen from probes or measured with the models opened."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce

from edgespec.draft.acceptance_rates import Key
from edgespec.draft.model_rates import alternatives_key
from edgespec.errors import Cancelled, DeviceUnavailable, DiskFull, EdgeSpecError, IntegrityError, MemoryExhausted
from edgespec.memory.free_memory import ReadFreeMemory
from edgespec.runtimes.devices import Device
from edgespec.runtimes.probe import DeviceProbe
from edgespec.setup.device_choice import Placement
from edgespec.setup.device_search import Refusal, Where
from edgespec.setup.foresee import ModelForms, foresee_drafter, foresee_target
from edgespec.setup.measured_placements import Measurements, WeighedModels, weigh_models, without_trees
from edgespec.setup.memory_fit import memory_needs, read_memory
from edgespec.setup.open_model import ModelFolder, known_stats
from edgespec.setup.planner import Layout, Plan, Weighed, weigh
from edgespec.setup.profile import MeasuringTime, Profile
from edgespec.setup.row_proof import settle_mode
from edgespec.types import Report

_EMULATOR = "is emulated in software, and auto never chooses an emulator"
_Counts = dict[Key, tuple[float, float]]


@dataclass(kw_only=True)
class DeviceOptions:
    """Weighs a target and its drafters in one placement after another, and remembers what was measured.

    placement: With the numbers of threads; its devices are replaced.
    devices: By name, those of all placements.
    probes: By name of a device.
    named: Devices that a user has named, which may be chosen even if they are emulators.
    free: Reads the free memory of the host, within the user's limit.
    """

    target: ModelForms
    drafters: Sequence[ModelForms]
    texts: Collection[str]
    placement: Placement
    devices: Mapping[str, Device]
    probes: Mapping[str, DeviceProbe]
    named: Collection[str]
    free: ReadFreeMemory
    report: Report
    remeasure: bool = False
    measured: dict[Where, WeighedModels] = field(default_factory=dict)

    def foresee(self, where: Where) -> list[Weighed]:
        """Options of a placement by what was measured of its target, now or earlier, and by probes."""
        placement, (device, other) = self.place(where), self._devices(where)
        size = self.target.size(device, self.devices.values())
        here = (
            each.measured.layouts[0].profile for at, each in self.measured.items() if at.device == where.device
        )
        measured = next(here, None)
        known = measured or self._saved_profile(device, placement)
        profile = known or foresee_target(size, self.probes[where.device], device.form)
        layouts = [Layout(placement.target_place, profile, is_measured=measured is not None)]
        drafters = [drafter.size(other, self.devices.values()) for drafter in self.drafters]
        for each in drafters:
            beside = foresee_drafter(
                profile,
                each,
                self.probes[where.drafter_device],
                other.form,
                placement.drafter_place,
                shares_device=device == other,
            )
            layouts.append(
                Layout(placement.target_place, beside, each.manifest.name, placement.drafter_place, False)
            )
        manifests = {each.manifest.name: without_trees(each.manifest, other) for each in drafters}
        space = read_memory(placement, self.free, lambda line: None)
        memory = memory_needs(placement, space, [size, *drafters], lambda reserve: reserve.opening_bytes)
        return self._mark(where, weigh(size.manifest, manifests, layouts, self.past(), memory))

    def measure(self, where: Where) -> list[Weighed] | Refusal:
        """Options of a placement as measured, once its models are prepared for it; what is known is not repeated.

        Raises EdgeSpecError: The model itself is at fault.
        """
        device, other = self._devices(where)
        try:
            target = self.target.get(device)
        except EdgeSpecError as error:
            return _refuse_form(error, device, where._replace(drafter_device=""))
        try:
            drafters = [drafter.get(other) for drafter in self.drafters]
        except EdgeSpecError as error:
            return _refuse_form(error, other, where._replace(device=""))
        try:
            found = weigh_models(
                target,
                drafters,
                self.texts,
                self.place(where),
                remeasure=self.remeasure,
                free=self.free,
                report=self.report,
            )
        except DeviceUnavailable as error:
            if error.device == where.device:
                return Refusal(where.device, None, str(error))
            if error.device == where.drafter_device:
                return Refusal(None, where.drafter_device, str(error))
            raise
        except MemoryExhausted as error:
            return Refusal(*where, str(error))
        self.measured[where] = found
        return self._mark(where, found.weighed)

    def is_known(self, where: Where) -> bool:
        """True if all of a placement was measured earlier, so that measuring it opens no model."""
        device, other = self._devices(where)
        target, drafters = self.target.find(device), [each.find(other) for each in self.drafters]
        if self.remeasure or target is None or None in drafters:
            return False
        placement = self.place(where)
        profile = known_stats(target).profiles.get(placement.machine)
        keys = {placement.drafter_key(drafter.manifest.name) for drafter in drafters if drafter}
        return profile is not None and keys <= profile.drafters.keys()

    def is_prepared(self, where: Where) -> bool:
        """True if the models are there in the forms that the devices of a placement run."""
        device, other = self._devices(where)
        return None not in [self.target.find(device), *(each.find(other) for each in self.drafters)]

    @property
    def measurements(self) -> Measurements:
        """All of them, those made now and those known before."""
        found = [each.measured for each in self.measured.values()]
        took = reduce(MeasuringTime.plus, (each.took for each in found), MeasuringTime())
        return Measurements([layout for each in found for layout in each.layouts], self.past(), took)

    def with_text_drafters(self, plan: Plan) -> Plan:
        """A plan with the names of what drafts from the text where its target runs."""
        device = plan.chosen.target.device
        names = next((found.text_drafters for where, found in self.measured.items() if where.device == device), ())
        models = [plan.chosen.drafter] if plan.chosen.drafter else []
        return replace(plan, drafters=(*models, *names))

    def place(self, where: Where) -> Placement:
        device, other = self._devices(where)
        placement = replace(self.placement, device=device, drafter_device=other)
        target = self.target.find(device)
        if target is None or not placement.deterministic:
            return placement
        return settle_mode(target, placement)

    def _devices(self, where: Where) -> tuple[Device, Device]:
        return self.devices[where.device], self.devices[where.drafter_device]

    def _saved_profile(self, device: Device, placement: Placement) -> Profile | None:
        """The target's profile on a device, as measured in an earlier session."""
        target = self.target.find(device)
        return None if self.remeasure or target is None else known_stats(target).target_profile(placement.machine)

    def _mark(self, where: Where, weighed: Sequence[Weighed]) -> list[Weighed]:
        """Keep emulators that nobody has named from being chosen."""
        emulators = [each for each in self._devices(where) if each.is_software and each.name not in self.named]
        if not emulators:
            return list(weighed)
        marked = []
        for case, option in weighed:
            used = {place.device for place in (option.target, option.drafter_place) if place}
            device = next((each for each in emulators if each.name in used), None)
            marked.append((case, replace(option, obstacle=f"{device.name} {_EMULATOR}") if device else option))
        return marked

    def past(self) -> _Counts:
        """Drafted tokens accepted and tried, of a drafter in all of its forms together."""
        past: _Counts = {}
        for target in self._prepared(self.target):
            for key, counts in known_stats(target).chances.items():
                past[key] = _add(past.get(key, (0.0, 0.0)), counts)
        for drafter in self.drafters:
            names = {folder.manifest.name for folder in self._prepared(drafter)}
            for name_of in (str, alternatives_key):
                sources = {name_of(name) for name in names}
                together: dict[int, tuple[float, float]] = {}
                for (source, bucket), counts in past.items():
                    if source in sources:
                        together[bucket] = _add(together.get(bucket, (0.0, 0.0)), counts)
                past |= {(source, bucket): counts for source in sources for bucket, counts in together.items()}
        return past

    def _prepared(self, model: ModelForms) -> list[ModelFolder]:
        """The folders of a model, once each."""
        found = (model.find(device) for device in self.devices.values())
        return list({folder.folder: folder for folder in found if folder}.values())


def _refuse_form(error: EdgeSpecError, device: Device, where: Where) -> Refusal:
    """A device whose form of a model cannot be made; what keeps every form from being made is raised."""
    if device.form == "cpu" or isinstance(error, (Cancelled, DiskFull, IntegrityError)):
        raise error
    return Refusal(where.device or None, where.drafter_device or None, str(error))


def _add(one: tuple[float, float], other: tuple[float, float]) -> tuple[float, float]:
    return one[0] + other[0], one[1] + other[1]
