"""Finds the model folders, devices and threads for what a user names. Opens no model."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import time
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from edgespec.config.config_file import default_home
from edgespec.config.drafter_names import SELF, Cascade, DrafterNames, parse
from edgespec.errors import DeviceUnavailable, EdgeSpecError, UsageError
from edgespec.manifest import FILE_NAME
from edgespec.runtimes.device_names import Kind
from edgespec.runtimes.devices import Device, device_key, find_device, may_have_accelerator
from edgespec.setup.device_choice import (
    DeviceChoice,
    Placement,
    describe,
    device_facts,
    explain_form,
    require_part,
    require_together,
    usable_form,
)
from edgespec.setup.home import ModelHome
from edgespec.setup.open_model import ModelFolder, open_decoder, read_folder, require_whole_model, self_drafter
from edgespec.setup.pair import DRAFTER, TARGET, Pair, forms_of, read_pair
from edgespec.setup.row_proof import settle_mode
from edgespec.setup.source_names import split_precision
from edgespec.setup.wish import Wish
from edgespec.system.command_line import quote
from edgespec.system.context_managers import contextmanager
from edgespec.types import Report, Schedule

if TYPE_CHECKING:
    from edgespec.setup.auto_devices import AutoDevices, Compared


@dataclass(frozen=True, slots=True)
class Chain:
    """Models of which each drafts for the one before it, the first for the target.

    text: The text drafter of the last model, if any.
    schedule: When the first works; like the fields after it, as the setup decides it.
    is_reproducible: What the models draw must not depend on the passes that they have run before.
    has_trees: The target's rows are so cheap that trees of drafts may pay.
    """

    models: tuple[ModelFolder, ...]  # at least one
    text: str | None = None
    schedule: Schedule = "serial"
    is_reproducible: bool = False
    has_trees: bool = False

    @property
    def name(self) -> str:
        return self.models[0].manifest.name

    def shortened(self, num_models: int) -> "Chain":
        """The chain without its first num_models."""
        return replace(self, models=self.models[num_models:])


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A wish as found on this machine: folders and devices.

    names: Of drafters, with those of a pair and of the catalogue.
    auto: What auto was decided to be, by device and drafter_device.
    unused: The drafter of a pair, whose check says that it does not pay.
    """

    home: ModelHome
    target: ModelFolder
    names: DrafterNames
    drafters: Sequence[Chain]
    devices: DeviceChoice
    placement: Placement
    auto: Mapping[str, str]
    unused: Chain | None = None

    def without(self, error: EdgeSpecError) -> str:
        """The device that does not run its model, where auto may take another one instead.

        Raises EdgeSpecError: The error that is given, where it may not.
        """
        device = error.device if isinstance(error, DeviceUnavailable) else self.auto.get("device")
        if device is None or device == "cpu" or device not in self.auto.values():
            raise error
        return device

    def on_cpu(self, error: DeviceUnavailable, wish: Wish) -> "Resolved":
        """This value once a device that was named does not run its model, where the CPU may do so.

        Raises DeviceUnavailable: The error, with advice on the first model that is in the form for another device.
        """
        drafters = [(model, self.placement.drafter_device) for each in self.drafters for model in each.models]
        for model, device in [(self.target, self.placement.device), *drafters]:
            if (explained := explain_form(error, model, device)) is not error:
                error = explained
                break
        fallen = self.devices.fall_back(error, self.placement)
        own = self.target.within(wish.context)
        return replace(self, placement=settle_mode(own, fallen, wish.deterministic))


def resolve(wish: Wish, refused: Mapping[str, EdgeSpecError] = MappingProxyType({})) -> Resolved:
    """Find the models, preparing them first if need be, and the devices and threads that they run with.

    What can be known before fetching and exporting is checked before.

    refused: Devices that auto has taken before and that did not run their model.

    Raises:
        DeviceUnavailable: A device cannot be used, or a model folder is not in a form for it.
        ModelError: A model is missing or invalid.
    """
    with _open_home(wish) as models:
        auto = auto_devices(wish, models)
        decided = _decide(auto, refused) if auto else {}
        device = decided.get("device", wish.device)
        drafter_device = decided.get("drafter_device", wish.drafter_device)
        devices = DeviceChoice(device, drafter_device, wish.report, allow_fallback=wish.allow_fallback)
        placement = devices.initial_placement(
            wish.num_threads, wish.drafter_threads, deterministic=wish.deterministic is not False
        )
        require_together(placement.device, placement.drafter_device, has_drafter_model=bool(wish.names.cascades))
        for name, error in refused.items():
            devices.note(f"{describe(placement.device)} is used instead of '{name}': {error}")
        target, names, drafters, of_pair = _find_models(wish, models, devices, placement)
    placement = devices.resolve_auto(placement, target.manifest, [each.models[0].manifest for each in drafters])
    if not wish.cuda_graph:
        placement = placement.without_recording()
    unused = None
    if of_pair and not _pays(*of_pair, placement, wish.report, is_weighed=bool(decided)):
        unused, drafters = drafters[-1], drafters[:-1]
        names = names._replace(cascades=names.cascades[:-1])
    require_together(placement.device, placement.drafter_device, has_drafter_model=bool(drafters))
    if drafters:
        _require_different(target, drafters, wish.report)
    own = target.within(wish.context)
    placement = settle_mode(own, replace(placement, exact=wish.exact), wish.deterministic)
    return Resolved(
        home=models,
        target=target,
        names=names,
        drafters=drafters,
        devices=devices,
        placement=placement,
        auto=decided,
        unused=unused,
    )


def _require_different(target: ModelFolder, drafters: Sequence[Chain], report: Report) -> None:
    """Raises UsageError: Two drafters have one name. A target that is its own drafter is reported."""
    known_names: set[str] = set()
    for drafter in drafters:
        if drafter.name in known_names:  # under which what is learned of it is saved
            raise UsageError(
                f"two drafters are called '{drafter.name}'; name it once, or export one under another name"
            )
        known_names.add(drafter.name)
    if any(each == target for drafter in drafters for each in drafter.models):
        report("the drafter is the target itself, which saves no time; name a smaller model")


class _FoundModels(NamedTuple):
    """A target and its drafters as folders.

    of_pair: Where the last drafter comes from a pair: the pair, and the folders of its target and its drafter.
    """

    target: ModelFolder
    names: DrafterNames
    drafters: Sequence[Chain]
    of_pair: tuple[Pair, tuple[Path, Path]] | None


def _find_models(wish: Wish, models: ModelHome, devices: DeviceChoice, placement: Placement) -> _FoundModels:
    """Find the target and its drafters in the forms for their devices, preparing them first if need be."""
    model, asked, began_s = str(wish.model), wish.names, time()
    target_form, drafter_form = devices.forms(placement)
    if asked.cascades:
        models.find(model, target_form or "cpu")  # an unknown name is refused before any model is fetched
    for cascade in asked.cascades:
        for name in cascade.models:
            if name != SELF:
                models.find(name, drafter_form or "cpu")
    target, pair = _find_folder(models, model, TARGET, placement.device, target_form, wish.allow_fallback)
    require_whole_model(target.manifest, model)
    is_own = target.folder.parent == models.models and Path(split_precision(model)[0]).exists()
    if is_own and (target.folder / FILE_NAME).stat().st_mtime >= began_s:  # it was prepared now
        name = quote(target.folder.name)
        wish.report(f"its name is {name} from now on; to change it: edgespec models rename {name} NAME")
    if target.manifest.pooling:
        if asked.cascades or asked.simple - {"auto"}:
            models.report(
                f"{target.manifest.name} is an embedding model, for which nothing drafts: --drafter has no effect"
            )
        return _FoundModels(target, parse("none"), (), None)
    names, has_drafter_of_pair = _name_drafters(models, model, asked, pair, drafter_form)
    drafters: list[Chain] = []
    for cascade in names.cascades:
        found = [
            ModelFolder(target.folder, self_drafter(target.manifest))
            if name == SELF
            else _find_folder(models, name, DRAFTER, placement.drafter_device, drafter_form, wish.allow_fallback)[
                0
            ]
            for name in cascade.models
        ]
        drafters.append(Chain(tuple(found), cascade.text))
    if drafters:
        from edgespec.setup.head_target import require_own_target  # 20 ms, with heads
    for drafter in drafters:
        require_own_target(target.manifest, [each.manifest for each in drafter.models], drafter.text)
    of_pair = (pair, (target.folder, drafters[-1].models[0].folder)) if pair and has_drafter_of_pair else None
    return _FoundModels(target, names, drafters, of_pair)


def compare_devices(wish: Wish, *, remeasure: bool) -> "Compared | None":
    """Compare the devices of this machine, emulators included, for a model.

    Returns None where auto has no choice, or no placement runs the models: opening them says why. Prepared
    forms are measured; forms that may be fastest are prepared first. Raises as resolve() does.
    """
    with _open_home(wish) as models:
        auto = auto_devices(wish, models, has_emulators=True)
        return auto.compare(remeasure=remeasure, measures_prepared=True) if auto else None


@contextmanager
def _open_home(wish: Wish) -> Iterator[ModelHome]:
    """The home of a wish; downloads of exports that end within the block are deleted or kept however it ends."""
    folder = Path(wish.home or default_home())
    models = ModelHome(folder, wish.offline, wish.report, open_decoder, is_quick=True, progress=wish.progress)
    try:
        yield models
    finally:
        if models.spent:
            models.settle_downloads(keep=wish.keep_download)


def find_known_devices(
    models: ModelHome, model: str, device: str, drafter_device: str
) -> tuple[DeviceChoice, Placement]:
    """Where a model and a drafter would run by what is known: auto is an earlier decision, or the CPU.

    Nothing is measured, fetched or exported. Raises as resolve() does.
    """
    auto = auto_devices(Wish(model=model, device=device, drafter_device=drafter_device), models)
    where = saved.where if auto and (saved := auto.saved) else None
    choice = DeviceChoice(*(where or (device, drafter_device)), models.report)
    return choice, choice.initial_placement(None, None, deterministic=True)


def auto_devices(wish: Wish, models: ModelHome, *, has_emulators: bool = False) -> "AutoDevices | None":
    """The choices of auto for a model and its drafters; None where it can only be the CPU.

    has_emulators: Emulators and software adapters are compared too, and never chosen.
    """
    if not (has_emulators or may_have_accelerator()):
        return None
    from edgespec.setup.auto_devices import AutoDevices, find_candidates  # 25 ms, and machines with a GPU need it

    candidates = find_candidates(wish.device, wish.drafter_device, has_emulators=has_emulators)
    if candidates is None:
        return None
    model, cpu = models.presets.model_of(str(wish.model)), find_device("cpu")
    fixed = models.fixed_folder(model)
    names, _ = _name_drafters(models, model, wish.names, read_pair(fixed) if fixed else None, None)
    found = AutoDevices(
        models=models,
        model=model,
        names=names,
        candidates=candidates,
        placement=Placement(
            device=cpu,
            drafter_device=cpu,
            num_threads=wish.num_threads,
            drafter_threads=wish.drafter_threads,
            deterministic=wish.deterministic is not False,
        ),
        free=wish.free_memory,
    )
    return found if found.has_choice else None


def _decide(auto: "AutoDevices", refused: Mapping[str, EdgeSpecError]) -> dict[str, str]:
    """The devices that auto stands for, by the names of resolve()'s arguments.

    Nothing where no placement runs the models: opening them where the user has named says why, or takes the CPU.
    """
    reasons = {name: str(error) for name, error in refused.items()}
    # What does not run a model will not run it next time; memory may be free again by then.
    is_kept = all(isinstance(error, DeviceUnavailable) for error in refused.values())
    decision = replace(auto, refused=reasons, is_kept=is_kept).decide()
    if decision is None:
        return {}
    named = zip(("device", "drafter_device"), auto.candidates.asked, decision.where, strict=True)
    return {argument: found for argument, asked, found in named if asked == "auto"}


def _find_folder(
    models: ModelHome, model: str, part: str, device: Device, form: Kind | None, allow_fallback: bool
) -> tuple[ModelFolder, Pair | None]:
    """The folder of a model for a device, or of that part of a pair; and the pair.

    form: The one that the device needs. None where auto was asked for: of a pair with several forms, the one whose
        device this machine has.

    Raises DeviceUnavailable: A pair has that part in other forms alone.
    """
    folder = models.resolve(model, form or "cpu", **device_facts(device))
    pair = None if (folder / FILE_NAME).is_file() else read_pair(folder)
    if pair is not None:
        may_differ = form is None or (allow_fallback and pair.part(part, form) is None)
        folder = require_part(pair, part, usable_form(pair, part) if may_differ else form)
    try:
        return read_folder(folder, models.report), pair
    except EdgeSpecError as error:
        raise models.advice.on_damage(folder, error) from None


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
        models.report(
            f"drafting without the pair's drafter: {missing} is not a model folder; export the pair again"
        )
        return names, False
    drafter = models.drafter_of(model, form or "cpu")
    if drafter is None or any(drafter in cascade.models for cascade in names.cascades):
        return names, False
    return _add_drafter(names, drafter), False


def _add_drafter(names: DrafterNames, drafter: str) -> DrafterNames:
    return names._replace(cascades=(*names.cascades, Cascade((drafter,), None)))


def _pays(pair: Pair, parts: tuple[Path, Path], placement: Placement, report: Report, *, is_weighed: bool) -> bool:
    """True if the drafter of a pair may draft on these devices: yes, unless it was measured there not to pay.

    parts: The folders of the target and the drafter that are to be loaded.
    is_weighed: The devices were chosen with what passes and drafts take on them.
    """
    device, other = placement.device, placement.drafter_device
    check = pair.check_on((device_key(device), device_key(other)), parts)
    if check is None and (pair.problem or not is_weighed):
        problem = f"{pair.problem}: " if pair.problem else ""
        report(
            f"{problem}this pair as it is was not measured on {device.name} with its drafter on {other.name}; to "
            f"measure it: edgespec pair check {quote(pair.folder)} --device {device.name} --drafter-device "
            f"{other.name}"
        )
    elif check is not None and not check.pays:
        report(f"drafting without the pair's drafter: {check.reason}")
    return check is None or check.pays
