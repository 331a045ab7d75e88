"""From what a user names to model folders, devices and threads; opens no model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from edgespec.config.byte_size import parse_bytes
from edgespec.config.config_file import default_home
from edgespec.config.drafter_names import SELF, Cascade, DrafterNames, parse
from edgespec.errors import ModelError, UsageError
from edgespec.loading.device_choice import DeviceChoice
from edgespec.loading.device_forms import require_part
from edgespec.loading.open_model import ModelFolder, read_any_manifest, self_drafter
from edgespec.loading.placement import Placement
from edgespec.memory.free_memory import ReadFreeMemory, free_memory
from edgespec.models.home import ModelHome
from edgespec.models.pair import DRAFTER, TARGET, Pair, forms_of, read_pair
from edgespec.runtimes.device_names import Kind
from edgespec.runtimes.devices import THREADS_PER_CORE, Device, device_key, max_threads
from edgespec.runtimes.half_floats import lacks_half_floats
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
    """Models, devices and memory as a user has named them."""

    home: ModelHome
    target: ModelFolder
    names: DrafterNames  # names of drafters, with those of a pair and of the catalogue
    drafters: Sequence[NamedDrafter]
    devices: DeviceChoice
    placement: Placement
    free: ReadFreeMemory  # reads the free memory, within the user's limit


def resolve(
    model: str,
    *,
    drafter: str,
    device: str,
    drafter_device: str,
    num_threads: int | None = None,
    drafter_threads: int | None = None,
    memory_limit: int | str | None = None,
    allow_fallback: bool = False,
    deterministic: bool = False,
    offline: bool = False,
    home: str | Path | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> Resolved:
    """Find the models, preparing them first if need be, and the devices and threads that they run with.

    What can be known before fetching and exporting is checked before.

    Raises:
        DeviceUnavailable: A device cannot be used, or a model folder is not in a form for it.
        ModelError: A model is missing or invalid.
        UsageError: A name, a number of threads or a memory limit makes no sense.
    """
    require_threads(num_threads)
    require_threads(drafter_threads)
    devices = DeviceChoice(device, drafter_device, report, allow_fallback=allow_fallback)
    placement = devices.initial_placement(num_threads, drafter_threads, deterministic=deterministic)
    free = partial(free_memory, None if memory_limit is None else parse_bytes(memory_limit))
    models = ModelHome(Path(home or default_home()), offline, report)
    target_form, drafter_form = devices.forms(placement)
    finder = _Finder(models, placement.device, target_form, allow_fallback)
    drafter_finder = _Finder(models, placement.drafter_device, drafter_form, allow_fallback)
    target, pair = finder.find(model, TARGET)
    _require_whole_head(target, model)
    names, has_drafter_of_pair = _name_drafters(models, model, parse(drafter), pair, drafter_form)
    drafters = [
        NamedDrafter(tuple(drafter_finder.find_drafter(name, target) for name in each.models), each.text)
        for each in names.cascades
    ]
    placement = devices.resolve_auto(placement, target.manifest, [each.models[0].manifest for each in drafters])
    if pair and has_drafter_of_pair and not _pays(pair, placement, report):
        names, drafters = names._replace(cascades=names.cascades[:-1]), drafters[:-1]
    _require_distinct([each.name for each in drafters])
    return Resolved(
        home=models,
        target=target,
        names=names,
        drafters=drafters,
        devices=devices,
        placement=placement,
        free=free,
    )


@dataclass(frozen=True, slots=True)
class _Finder:
    """Finds models for a device, in the form that it needs if the device was named."""

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
            may_differ = self.allow_fallback and pair.part(part, self.form) is None
            folder = require_part(pair, part, None if may_differ else self.form)
        return ModelFolder(folder, read_any_manifest(folder, self.models.report)), pair

    def find_drafter(self, name: str, target: ModelFolder) -> ModelFolder:
        if name == SELF:
            return ModelFolder(target.folder, self_drafter(target.manifest))
        return self.find(name, DRAFTER)[0]


def _require_whole_head(target: ModelFolder, name: str) -> None:
    """Raises ModelError: The model cannot serve as a target."""
    if target.manifest.vocab_subset:
        raise ModelError(
            f"{target.manifest.name} is a drafter whose head was trimmed; use it with --drafter {name}"
        )


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


def _add_drafter(names: DrafterNames, drafter: str) -> DrafterNames:
    return names._replace(cascades=(*names.cascades, Cascade((drafter,), None)))


def _pays(pair: Pair, placement: Placement, report: Report) -> bool:
    """Whether the drafter of a pair may draft on these devices: yes, unless it was measured there not to pay."""
    devices = placement.device, placement.drafter_device
    check = pair.check_on(*map(device_key, devices))
    if check is None:
        report(
            f"this pair was not measured on {devices[0].name} with its drafter on {devices[1].name}; to measure "
            f"it: edgespec pair check {pair.folder} --device {devices[0].name} --drafter-device {devices[1].name}"
        )
    elif not check.pays:
        report(f"drafting without the pair's drafter: {check.verdict} ({check.reason})")
    return check is None or check.pays


def _require_distinct(names: Sequence[str]) -> None:
    """Raises UsageError: Two drafters have one name, under which what is learned of them is saved."""
    if twice := [name for name in names if names.count(name) > 1]:
        raise UsageError(f"two of the drafters are called '{twice[0]}'; name it once, or export one as another")


def require_threads(num_threads: int | None) -> None:
    """Raises UsageError: The number of threads makes no sense on this machine."""
    most = max_threads()
    if num_threads is not None and not (type(num_threads) is int and 1 <= num_threads <= most):
        raise UsageError(
            f"the number of threads is {num_threads!r}; wanted 1 to {most}, which is {THREADS_PER_CORE} for each "
            "logical core of the processor"
        )
