"""Finds the model folders, devices and threads for what a user names. Opens no model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from edgespec.config.config_file import default_home
from edgespec.config.drafter_names import SELF, Cascade, DrafterNames, parse
from edgespec.errors import DeviceUnavailable, EdgeSpecError, UsageError
from edgespec.manifest import Manifest
from edgespec.memory.free_memory import ReadFreeMemory, free_memory
from edgespec.runtimes.device_names import Kind
from edgespec.runtimes.devices import Device, device_key, find_device
from edgespec.runtimes.driver_check import lacks_half_floats
from edgespec.runtimes.row_proofs import RowProof
from edgespec.setup.auto_devices import AutoDevices, Compared, find_candidates
from edgespec.setup.device_choice import (
    DeviceChoice,
    Placement,
    explain_form,
    require_part,
    require_together,
    usable_form,
)
from edgespec.setup.device_search import describe
from edgespec.setup.head_target import require_own_target, require_whole_model
from edgespec.setup.home import ModelHome
from edgespec.setup.open_model import ModelFolder, open_decoder, read_any_manifest, self_drafter
from edgespec.setup.pair import DRAFTER, TARGET, Pair, forms_of, read_pair
from edgespec.setup.row_proof import expects_rows, known_proof
from edgespec.setup.wish import Wish
from edgespec.system.command_line import quote
from edgespec.types import Report


@dataclass(frozen=True, slots=True)
class NamedDrafter:
    """A drafter as a user names it: models of which each drafts for the one before it, and a text drafter."""

    models: tuple[ModelFolder, ...]
    text: str | None  # the text drafter of the last model, if any

    @property
    def name(self) -> str:
        return self.models[0].manifest.name


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A wish as found on this machine: folders, devices, memory.

    names: Of drafters, with those of a pair and of the catalogue.
    proof: What is known of deterministic mode for the target in this placement.
    free: Reads the free memory, within the user's limit.
    auto: What auto was decided to be, by device and drafter_device.
    unused: The drafter of a pair, whose check says that it does not pay.
    """

    home: ModelHome
    target: ModelFolder
    names: DrafterNames
    drafters: Sequence[NamedDrafter]
    devices: DeviceChoice
    placement: Placement
    proof: RowProof | None
    free: ReadFreeMemory
    auto: Mapping[str, str]
    unused: NamedDrafter | None = None

    @property
    def downgrades(self) -> Sequence[str]:
        """Lines that say which device another one replaces, and why."""
        return self.devices.downgrades

    def without(self, error: EdgeSpecError) -> str:
        """The device that does not run its model, where auto may take another one instead.

        Raises EdgeSpecError: The error that is given, where it may not.
        """
        device = error.device if isinstance(error, DeviceUnavailable) else self.auto.get("device")
        if device is None or device == "cpu" or device not in self.auto.values():
            raise error
        return device

    def with_differing_rows(self) -> "Resolved":
        """This value once deterministic mode does not hold on the device of the target."""
        placement = replace(self.placement, deterministic=False)
        return replace(self, placement=placement, proof=known_proof(self.target, placement))

    def on_cpu(self, error: DeviceUnavailable, wish: Wish) -> "Resolved":
        """This value once a device that was named does not run its model, where the CPU may do so.

        Raises DeviceUnavailable: The error, with advice on the first model that is in the form for another device.
        """
        if error.device in self.auto.values():
            raise error
        drafters = [(model, self.placement.drafter_device) for each in self.drafters for model in each.models]
        for model, device in [(self.target, self.placement.device), *drafters]:
            if (explained := explain_form(error, model, device)) is not error:
                error = explained
                break
        placement = self.devices.fall_back(error, self.placement)
        proof = known_proof(self.target, placement)
        has_rows = expects_rows(wish.deterministic, self.target, placement.device, proof)
        return replace(self, placement=replace(placement, deterministic=has_rows), proof=proof)


def resolve(wish: Wish, refused: Mapping[str, EdgeSpecError] = MappingProxyType({})) -> Resolved:
    """Find the models, preparing them first if need be, and the devices and threads that they run with.

    What can be known before fetching and exporting is checked before.

    Args:
        refused: Devices that auto has taken before and that did not run their model.

    Raises:
        DeviceUnavailable: A device cannot be used, or a model folder is not in a form for it.
        ModelError: A model is missing or invalid.
    """
    model, report, asked = str(wish.model), wish.report, wish.names
    device, drafter_device = wish.device, wish.drafter_device
    free = partial(free_memory, wish.limit_bytes)
    models = _home_of(wish)
    place = _threads_of(wish)
    auto = auto_devices(models, model, asked, device, drafter_device, place, free)
    decided = _decide(auto, refused) if auto else {}
    device, drafter_device = decided.get("device", device), decided.get("drafter_device", drafter_device)
    devices = DeviceChoice(device, drafter_device, report, allow_fallback=wish.allow_fallback)
    placement = devices.initial_placement(
        wish.num_threads, wish.drafter_threads, deterministic=wish.deterministic is not False
    )
    require_together(placement.device, placement.drafter_device, has_drafter_model=bool(asked.cascades))
    for name, error in refused.items():
        devices.note(f"{describe(placement.device)} is used instead of '{name}': {error}")
    found = _find_models(models, model, asked, devices, placement, allow_fallback=wish.allow_fallback)
    placement = devices.resolve_auto(
        placement, found.target.manifest, [each.models[0].manifest for each in found.drafters]
    )
    unused = None
    if found.of_pair and not _pays(*found.of_pair, placement, report, is_weighed=bool(decided)):
        unused, found = found.drafters[-1], found.without_last_drafter()
    target, names, drafters = found.target, found.names, found.drafters
    require_together(placement.device, placement.drafter_device, has_drafter_model=bool(drafters))
    _require_distinct([each.name for each in drafters])
    proof = known_proof(target, placement)
    has_rows = expects_rows(wish.deterministic, target, placement.device, proof)
    placement = replace(placement, deterministic=has_rows, exact=wish.exact)
    return Resolved(
        home=models,
        target=target,
        names=names,
        drafters=drafters,
        devices=devices,
        placement=placement,
        proof=proof,
        free=free,
        auto=decided,
        unused=unused,
    )


class _FoundModels(NamedTuple):
    """A target and its drafters as folders.

    of_pair: Where the last drafter comes from a pair: the pair, and the folders of its target and its drafter.
    """

    target: ModelFolder
    names: DrafterNames
    drafters: Sequence[NamedDrafter]
    of_pair: tuple[Pair, tuple[Path, Path]] | None

    def without_last_drafter(self) -> "_FoundModels":
        names = self.names._replace(cascades=self.names.cascades[:-1])
        return self._replace(names=names, drafters=self.drafters[:-1], of_pair=None)


def _find_models(
    models: ModelHome,
    model: str,
    asked: DrafterNames,
    devices: DeviceChoice,
    placement: Placement,
    *,
    allow_fallback: bool,
) -> _FoundModels:
    """Find the target and its drafters in the forms for their devices, preparing them first if need be."""
    target_form, drafter_form = devices.forms(placement)
    finder = _Finder(models, placement.device, target_form, allow_fallback)
    drafter_finder = _Finder(models, placement.drafter_device, drafter_form, allow_fallback)
    for name, form in (
        (model, target_form),
        *((name, drafter_form) for each in asked.cascades for name in each.models if name != SELF),
    ):
        models.find(name, form or "cpu")  # an unknown name is refused before any model is fetched
    target, pair = finder.find(model, TARGET)
    require_whole_model(target.manifest, model)
    if target.manifest.pooling:
        return _FoundModels(target, _without_drafters(target.manifest, asked, models.report), (), None)
    names, has_drafter_of_pair = _name_drafters(models, model, asked, pair, drafter_form)
    drafters = [
        NamedDrafter(tuple(drafter_finder.find_drafter(name, target) for name in each.models), each.text)
        for each in names.cascades
    ]
    for drafter in drafters:
        require_own_target(target.manifest, [each.manifest for each in drafter.models], drafter.text)
    of_pair = (pair, (target.folder, drafters[-1].models[0].folder)) if pair and has_drafter_of_pair else None
    return _FoundModels(target, names, drafters, of_pair)


def compare_devices(wish: Wish, *, remeasure: bool) -> Compared | None:
    """Compare the devices of this machine, emulators included, for a model. Returns None where auto has no choice.

    Prepared forms are measured; forms that may be fastest are prepared first. Raises as resolve() does.
    """
    free = partial(free_memory, wish.limit_bytes)
    auto = auto_devices(
        _home_of(wish),
        str(wish.model),
        wish.names,
        wish.device,
        wish.drafter_device,
        _threads_of(wish),
        free,
        has_emulators=True,
    )
    return auto.compare(remeasure=remeasure, measures_prepared=True) if auto else None


def _home_of(wish: Wish) -> ModelHome:
    folder = Path(wish.home or default_home())
    return ModelHome(folder, wish.offline, wish.report, open_decoder, is_quick=True, progress=wish.progress)


def _threads_of(wish: Wish) -> Placement:
    """The threads that are asked for, on devices that stand for none in particular."""
    cpu = find_device("cpu")
    return Placement(
        device=cpu,
        drafter_device=cpu,
        num_threads=wish.num_threads,
        drafter_threads=wish.drafter_threads,
        deterministic=wish.deterministic is not False,
    )


def find_known_devices(
    models: ModelHome, model: str, device: str, drafter_device: str
) -> tuple[DeviceChoice, Placement]:
    """Where a model and a drafter would run by what is known: auto is an earlier decision, or the CPU.

    Nothing is measured, fetched or exported. Raises as resolve() does.
    """
    place = _threads_of(Wish(model=model))
    auto = auto_devices(models, model, parse("auto"), device, drafter_device, place, free_memory)
    where = saved.where if auto and (saved := auto.saved) else None
    choice = DeviceChoice(*(where or (device, drafter_device)), models.report)
    return choice, choice.initial_placement(None, None, deterministic=True)


def auto_devices(
    models: ModelHome,
    model: str,
    asked: DrafterNames,
    device: str,
    drafter_device: str,
    placement: Placement,
    free: ReadFreeMemory,
    *,
    has_emulators: bool = False,
) -> AutoDevices | None:
    """The choices of auto for a model and its drafters; None where it can only be the CPU.

    Args:
        asked: The drafters that the user has named.
        placement: With the numbers of threads.
        has_emulators: Emulators and software adapters are compared too, and never chosen.
    """
    candidates = find_candidates(device, drafter_device, has_emulators=has_emulators)
    if candidates is None:
        return None
    fixed = models.fixed_folder(model)
    names, _ = _name_drafters(models, model, asked, read_pair(fixed) if fixed else None, None)
    found = AutoDevices(
        models=models, model=model, names=names, candidates=candidates, placement=placement, free=free
    )
    return found if found.has_choice else None


def _decide(auto: AutoDevices, refused: Mapping[str, EdgeSpecError]) -> dict[str, str]:
    """The devices that auto stands for, by the names of resolve()'s arguments."""
    reasons = {name: str(error) for name, error in refused.items()}
    # What does not run a model will not run it next time; memory may be free again by then.
    is_kept = all(isinstance(error, DeviceUnavailable) for error in refused.values())
    decision = replace(auto, refused=reasons, is_kept=is_kept).decide()
    named = zip(("device", "drafter_device"), auto.candidates.asked, decision.where, strict=True)
    return {argument: found for argument, asked, found in named if asked == "auto"}


@dataclass(frozen=True, slots=True)
class _Finder:
    """Finds models for a device, in the form that it needs if the device was named.

    form: None where auto was asked for: of a pair with several forms, the one whose device this machine has.
    """

    models: ModelHome
    device: Device
    form: Kind | None
    allow_fallback: bool

    def find(self, model: str, part: str) -> tuple[ModelFolder, Pair | None]:
        """The folder of a model, or of that part of a pair; and the pair.

        Raises DeviceUnavailable: A pair has that part in other forms alone.
        """
        lacks = partial(lacks_half_floats, self.device)
        folder = self.models.resolve(model, self.form or "cpu", lacks_half_floats=lacks)
        pair = read_pair(folder)
        if pair is not None:
            may_differ = self.form is None or (self.allow_fallback and pair.part(part, self.form) is None)
            folder = require_part(pair, part, usable_form(pair, part) if may_differ else self.form)
        return ModelFolder(folder, read_any_manifest(folder, self.models.report)), pair

    def find_drafter(self, name: str, target: ModelFolder) -> ModelFolder:
        if name == SELF:
            return ModelFolder(target.folder, self_drafter(target.manifest))
        return self.find(name, DRAFTER)[0]


def _name_drafters(
    models: ModelHome, model: str, names: DrafterNames, pair: Pair | None, form: Kind | None
) -> tuple[DrafterNames, bool]:
    """The names of drafters, and whether the last is that of the pair.

    auto also takes the drafter of a pair, and the one that the catalogue has, if it is prepared.
    """
    if "auto" not in names.simple:
        return names, False
    if pair is not None:
        if forms_of(pair.folder, DRAFTER):
            return _add_drafter(names, str(pair.folder)), True
        missing = pair.folder / DRAFTER
        models.report(f"drafting without the pair's drafter: {missing} is no model folder; export the pair again")
        return names, False
    drafter = models.drafter_of(model, form or "cpu")
    is_named = drafter in {drafter for cascade in names.cascades for drafter in cascade.models}
    return names if drafter is None or is_named else _add_drafter(names, drafter), False


def _without_drafters(target: Manifest, asked: DrafterNames, report: Report) -> DrafterNames:
    """The names for a target that writes no text; a line tells that a drafter was named in vain."""
    if asked.cascades or asked.simple - {"auto"}:
        report(f"{target.name} gives vectors of texts, and nothing drafts for it: --drafter has no effect")
    return parse("none")


def _add_drafter(names: DrafterNames, drafter: str) -> DrafterNames:
    return names._replace(cascades=(*names.cascades, Cascade((drafter,), None)))


def _pays(pair: Pair, parts: tuple[Path, Path], placement: Placement, report: Report, *, is_weighed: bool) -> bool:
    """True if the drafter of a pair may draft on these devices: yes, unless it was measured there not to pay.

    parts: The folders of the target and the drafter that are to be loaded.
    is_weighed: The devices were chosen with what passes and drafts take on them.
    """
    devices = placement.device, placement.drafter_device
    check = pair.check_on(device_key(devices[0]), device_key(devices[1]), parts)
    if check is None and not is_weighed:
        report(
            f"this pair was not measured on {devices[0].name} with its drafter on {devices[1].name}; to measure "
            f"it: edgespec pair check {quote(pair.folder)} --device {devices[0].name} "
            f"--drafter-device {devices[1].name}"
        )
    elif check is not None and not check.pays:
        report(f"drafting without the pair's drafter: {check.verdict} ({check.reason})")
    return check is None or check.pays


def _require_distinct(names: Sequence[str]) -> None:
    """Raises UsageError: Two drafters have one name, under which what is learned of them is saved."""
    if twice := [name for name in names if names.count(name) > 1]:
        raise UsageError(f"two of the drafters are called '{twice[0]}'; name it once, or export one as another")
