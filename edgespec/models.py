"""The models of this machine: listed, pulled, exported, renamed and removed, as `edgespec models` does it.

    from edgespec import models

    print([model.name for model in models.list()], [model.name for model in models.catalog()])

home is in each function the model home; by default EDGESPEC_HOME or the platform's data folder.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any

from edgespec import (
    CATALOG,
    TERMINAL,
    CatalogModel,
    EdgeSpecError,
    Inventory,
    LoadProgress,
    ModelHome,
    Precision,
    PreparedModel,
    UsageError,
    default_home,
    explains_arguments,
    file_bytes,
    form_of,
    in_python,
    is_known_to_lack_half_floats,
    measure_ranges,
    memory_bytes,
    nvidia_bytes,
    open_decoder,
    require_function,
    require_kind,
    require_path,
    require_runtime,
    silent,
)

__all__ = ["catalog", "export", "list", "prune", "pull", "remove", "rename", "show", "verify"]

Place = str | Path


def catalog() -> tuple[CatalogModel, ...]:
    """The models that have a name, whether or not they are prepared here."""
    plain = ("title", "license", "is_gated", "num_parameters", "precision", "drafter", "fetch_bytes")
    advice = ("head", "machine_gb", "reason")
    return tuple(
        CatalogModel(
            name=name,
            **{each: getattr(entry, each) for each in plain + advice},
            repository=getattr(entry.source, "repository", None),
            revision=getattr(entry.source, "revision", None),
            disk_bytes=file_bytes(entry),
            memory_bytes=memory_bytes(entry),
            was_run=entry.was_run or None,
        )
        for name, entry in CATALOG.items()
    )


def list(home: Place | None = None) -> tuple[PreparedModel, ...]:
    """The models that are prepared, sorted by name; a damaged one has a problem."""
    return tuple(_inventory(home).models())


def show(model: Place, home: Place | None = None) -> PreparedModel:
    """A prepared model, by its name or folder. Raises ModelError: It is not prepared."""
    return _inventory(home).describe(_text("model", model))


@explains_arguments
def pull(
    model: Place,
    *,
    name: str | None = None,
    device: str = "auto",
    check: bool = False,
    calibration: Sequence[str] | None = None,
    offline: bool = False,
    keep_download: bool = False,
    home: Place | None = None,
    report: Callable[[str], None] | None = TERMINAL.report,
    progress: Callable[[LoadProgress], None] | None = TERMINAL.progress,
) -> PreparedModel:
    """Download and prepare a model as load() would, or repair a damaged one; what is there already stays.

    Args:
        model: As load() takes it: a name of the catalogue, a hub id, a .gguf file or a safetensors folder.
        name: The name to list and load it by. A model that is prepared already is renamed; its old name still
            finds it.
        device: The device to prepare it for; auto is the CPU.
        check: Compare all that the export computes with its source, rather than some of it.
        calibration: Prompts that show what values occur, which the precision w8a16 needs.
        report, progress, offline, keep_download: As load() takes them.

    Raises:
        ModelError: There is no such model, it cannot be fetched, or is damaged.
        UsageError: The name is taken, or is none.
    """
    report, progress = _function("report", report), _function("progress", progress)
    _require_switches(check=check, offline=offline, keep_download=keep_download)
    require_kind("name", name, (str, NoneType), "a text")
    place = ModelHome(
        _folder(home),
        offline,
        _in_words(report),
        open_decoder,
        _ranges(calibration),
        is_quick=not check,
        progress=progress,
    )
    inventory, wanted, form = Inventory(place), _text("model", model), form_of(_text("device", device))
    if name is not None and not ((here := place.place_of(wanted, form)) and here.name == name):
        inventory.require_free(name)
    lacks, has = partial(is_known_to_lack_half_floats, device), partial(nvidia_bytes, device)
    folder = inventory.repaired(wanted, form, lacks_half_floats=lacks, nvidia_bytes=has)
    place.settle_downloads(keep=keep_download)
    if name is not None and folder.name != name:
        if folder.parent != place.models:
            raise UsageError(f"{folder} is a model folder of your own; rename it yourself, or leave out the name")
        had = place.current_name(folder.name)  # another process may have named it meanwhile
        folder = inventory.rename(had, name)
        report(in_python(f"{had} has the name {name} now; {had} still finds it"))
    return inventory.describe(str(folder))


@explains_arguments
def export(
    source: Place,
    *,
    name: str | None = None,
    output: Place | None = None,
    precision: Precision | None = None,
    device: str = "auto",
    revision: str | None = None,
    context_length: int | None = None,
    adapter: Place | None = None,
    check: bool | None = None,
    calibration: Sequence[str] | None = None,
    offline: bool = False,
    keep_download: bool = False,
    home: Place | None = None,
    report: Callable[[str], None] | None = TERMINAL.report,
    progress: Callable[[LoadProgress], None] | None = TERMINAL.progress,
) -> PreparedModel:
    """Export a model as wished, into the model home under a name, or to a folder.

    Args:
        source: A .gguf file, a safetensors folder, a name of the catalogue, or a hub id.
        name: Its name in the model home.
        output: The folder to create; one of name and output is given.
        precision: source, fp32, fp16, int8, int4, w8a16, or auto, which chooses one; by default that of the
            source, or what the device needs.
        device: The device to lay the model out for; auto is the CPU.
        revision: A branch, tag or commit of a hub id.
        context_length: The longest text in tokens; by default the model's own.
        adapter: A LoRA adapter to merge: a folder of PEFT, or a GGUF file.
        check: Compare the export with its source; by default if ONNX Runtime is installed.
        calibration, report, progress, offline, keep_download: As pull() takes them.

    Raises:
        ExportMismatch: The export does not compute what its source does; nothing is installed.
        SourceError: The source is missing, damaged or unsupported.
        UsageError: An argument makes no sense, or the name or folder is taken.
    """
    report, progress = _function("report", report), _function("progress", progress)
    _require_switches(offline=offline, keep_download=keep_download)
    require_kind("check", check, (bool, NoneType), "True, False or None")
    if (name is None) == (output is None):
        raise UsageError(f"name is {name!r} and output {output!r}; give one of them")
    form = form_of(_text("device", device))
    if precision is None:
        precision = "fp32" if form == "gpu" and is_known_to_lack_half_floats(device) else "source"
    opens = open_decoder if check or (check is None and _has_runtime(report)) else None
    ranges = _ranges(calibration)
    inventory = Inventory(ModelHome(_folder(home), offline, _in_words(report), opens, ranges, progress=progress))
    if name is not None:
        inventory.require_free(_text("name", name))
    folder = inventory.home.models / name if name is not None else require_path("output", output, "a folder")
    inventory.export(
        _text("source", source),
        folder,
        revision,
        precision=precision,
        form=form,
        context_length=context_length,
        adapter=None if adapter is None else require_path("adapter", adapter),
    )
    inventory.home.settle_downloads(keep=keep_download)
    return inventory.describe(str(folder))


def rename(model: str, name: str, home: Place | None = None) -> PreparedModel:
    """Give a prepared model another name.

    Raises:
        EdgeSpecError: A program has it open.
        ModelError: It is not prepared.
        UsageError: The name is taken, or is none.
    """
    inventory = _inventory(home)
    return inventory.describe(str(inventory.rename(_text("model", model), _text("name", name))))


def verify(model: Place, home: Place | None = None) -> None:
    """Compare the files of a prepared model with their recorded hashes.

    Raises:
        IntegrityError: A file differs.
        ModelError: The model is not prepared, or lacks a file.
    """
    _inventory(home).verify(_text("model", model))


def remove(model: str, home: Place | None = None) -> int:
    """Delete a prepared model, and what was downloaded for it alone; returns the bytes that this frees.

    Raises:
        EdgeSpecError: A program has it open.
        ModelError: It is not prepared.
    """
    inventory = _inventory(home)
    freed = sum(each.bytes for each in inventory.models() if each.name == model)
    return freed + inventory.remove(_text("model", model))[1]


def prune(home: Place | None = None, *, dry_run: bool = False) -> int:
    """Delete all downloads, also interrupted ones; prepared models stay. Returns the bytes that this frees.

    dry_run: Delete nothing.
    """
    _require_switches(dry_run=dry_run)
    downloads, num_bytes = _inventory(home).prune(is_dry=dry_run)
    return sum(each.bytes for each in downloads) + num_bytes


def __dir__() -> tuple[str, ...]:
    return (*__all__, *(name for name in globals() if name.startswith("__")))


def _inventory(home: Place | None) -> Inventory:
    return Inventory(ModelHome(_folder(home), offline=True, report=TERMINAL.report))


def _folder(home: Place | None) -> Path:
    return default_home() if home is None else require_path("home", home, "a folder")


def _in_words(report: Callable[[str], None]) -> Callable[[str], None]:
    """Takes lines for report, which gets them with options as arguments."""
    return lambda line: report(in_python(line))


def _text(name: str, given: object) -> str:
    """Raises UsageError: It is no text and no path."""
    require_kind(name, given, (str, Path), "a text or a path")
    return str(given)


def _require_switches(**given: object) -> None:
    for name, value in given.items():
        require_kind(name, value, bool, "True or False")


def _function(name: str, given: Callable[[Any], None] | None) -> Callable[[Any], None]:
    """What takes lines or progress; None shows nothing. Raises UsageError: It is no function."""
    if given is not None:
        require_function(name, given, "a function, or None")
    return given or silent


def _ranges(calibration: Sequence[str] | None) -> partial[Any] | None:
    """The function that runs a graph over prompts.

    Raises:
        DeviceUnavailable: ONNX Runtime is missing.
        UsageError: They are no texts.
    """
    if calibration is None:
        return None
    are_texts = isinstance(calibration, Sequence) and all(isinstance(each, str) for each in calibration)
    if isinstance(calibration, str) or not are_texts:
        raise UsageError(f"calibration is {calibration!r:.60}; wanted a list of texts")
    require_runtime()
    return partial(measure_ranges, prompts=calibration)


def _has_runtime(report: Callable[[str], None]) -> bool:
    try:
        require_runtime()
    except EdgeSpecError as error:
        report(f"the export will not be checked: {error}")
        return False
    return True
