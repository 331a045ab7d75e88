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
from edgespec.loading.open_model import ModelFolder, read_any_manifest, self_drafter
from edgespec.loading.placement import Placement
from edgespec.memory.free_memory import ReadFreeMemory, free_memory
from edgespec.models.home import ModelHome
from edgespec.models.pair import DRAFTER, TARGET, part_of_pair, read_pair
from edgespec.runtimes.devices import THREADS_PER_CORE, max_threads


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
        DeviceUnavailable: A device cannot be used.
        ModelError: A model is missing or invalid.
        UsageError: A name, a number of threads or a memory limit makes no sense.
    """
    require_threads(num_threads)
    require_threads(drafter_threads)
    devices = DeviceChoice(device, drafter_device, report, allow_fallback=allow_fallback)
    placement = devices.initial_placement(num_threads, drafter_threads, deterministic=deterministic)
    free = partial(free_memory, None if memory_limit is None else parse_bytes(memory_limit))
    models = ModelHome(Path(home or default_home()), offline, report)
    target, names = _find_models(models, model, parse(drafter))
    drafters = [
        NamedDrafter(tuple(_drafter_folder(models, target, name) for name in each.models), each.text)
        for each in names.cascades
    ]
    _require_distinct([each.name for each in drafters])
    return Resolved(
        home=models,
        target=target,
        names=names,
        drafters=drafters,
        devices=devices,
        placement=devices.resolve_auto(placement, target.manifest, [each.models[0].manifest for each in drafters]),
        free=free,
    )


def _find_models(models: ModelHome, model: str, names: DrafterNames) -> tuple[ModelFolder, DrafterNames]:
    """The target, and the names of its drafters.

    auto also takes the drafter of a pair, if it pays, and the one that the catalogue has, if it is prepared.

    Raises ModelError: The target is missing or invalid, or cannot serve as one.
    """
    folder = models.resolve(model)
    named = {drafter for cascade in names.cascades for drafter in cascade.models}
    if (pair := read_pair(folder)) is not None and "auto" in names.simple:
        if pair.pays:
            names = names._replace(cascades=(*names.cascades, Cascade((str(folder / DRAFTER),), None)))
        else:
            models.report(f"drafting without the pair's drafter: {pair.verdict} ({pair.reason})")
    elif "auto" in names.simple and (drafter := models.drafter_of(model)) and drafter not in named:
        names = names._replace(cascades=(*names.cascades, Cascade((drafter,), None)))
    folder = part_of_pair(folder, TARGET)
    target = ModelFolder(folder, read_any_manifest(folder, models.report))
    if target.manifest.vocab_subset:
        raise ModelError(
            f"{target.manifest.name} is a drafter whose head was trimmed; use it with --drafter {model}"
        )
    return target, names


def _drafter_folder(models: ModelHome, target: ModelFolder, name: str) -> ModelFolder:
    if name == SELF:
        return ModelFolder(target.folder, self_drafter(target.manifest))
    folder = part_of_pair(models.resolve(name), DRAFTER)
    return ModelFolder(folder, read_any_manifest(folder, models.report))


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
