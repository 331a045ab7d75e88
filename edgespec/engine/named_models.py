"""Models as a user names them, by the device that is to run them: folders, pairs, models of the home."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

from edgespec.loading.open_model import ModelFolder, read_any_manifest, self_drafter
from edgespec.models.foreseen import foresee_model
from edgespec.models.home import ModelHome
from edgespec.models.pair import Pair, read_pair
from edgespec.planning.foresee import ModelSize
from edgespec.planning.model_forms import ModelForms
from edgespec.runtimes.device_names import Kind
from edgespec.runtimes.devices import Device
from edgespec.runtimes.half_floats import lacks_half_floats


def forms_of(models: ModelHome, name: str, part: str) -> ModelForms:
    """The forms of a model, or of a part of a pair.

    Raises ModelError: There is no such model.
    """
    fixed = models.fixed_folder(name)
    if fixed is None:
        return _forms_in_home(models, name)
    pair = read_pair(fixed)
    return _fixed_forms(name, lambda device: _folder_for(fixed, pair, part, device))


def forms_of_self(target: ModelForms) -> ModelForms:
    """The graphs of fewer layers in the folders of a target; raises UsageError: it has none."""

    def find(device: Device) -> ModelFolder | None:
        found = target.find(device)
        return found and ModelFolder(found.folder, self_drafter(found.manifest))

    return ModelForms(name=target.name, find=find, prepare=None, foresee=_never)


def _forms_in_home(models: ModelHome, name: str) -> ModelForms:
    lacks = cache(lacks_half_floats)

    def find(device: Device) -> ModelFolder | None:
        folder = models.find(name, device.form, lacks_half_floats=lambda: lacks(device))
        return ModelFolder(folder, read_any_manifest(folder, models.report)) if folder else None

    def prepare(device: Device) -> ModelFolder:
        models.report(f"preparing {name} for {device.name}")
        folder = models.resolve(name, device.form, lacks_half_floats=lambda: lacks(device))
        return ModelFolder(folder, read_any_manifest(folder, models.report))

    def foresee(form: Kind) -> ModelSize:
        manifest, num_bytes = foresee_model(models, name, form)
        return ModelSize(manifest=manifest, file_bytes=num_bytes)

    return ModelForms(name=name, find=_remember(find), prepare=prepare, foresee=foresee)


def _fixed_forms(name: str, folder_for: Callable[[Device], Path | None]) -> ModelForms:
    """The forms of folders that somebody else has made: there are no others."""

    def find(device: Device) -> ModelFolder | None:
        folder = folder_for(device)
        if folder is None:
            return None
        found = ModelFolder(folder, read_any_manifest(folder, lambda line: None))
        return found if device.kind == "cpu" or found.manifest.form == device.form else None

    return ModelForms(name=name, find=_remember(find), prepare=None, foresee=_never)


def _folder_for(folder: Path, pair: Pair | None, part: str, device: Device) -> Path | None:
    return folder if pair is None else pair.part(part, device.form)


def _remember(find: Callable[[Device], ModelFolder | None]) -> Callable[[Device], ModelFolder | None]:
    """Look for a folder until it is found."""
    known: dict[str, ModelFolder] = {}

    def look(device: Device) -> ModelFolder | None:
        if device.name not in known and (found := find(device)):
            known[device.name] = found
        return known.get(device.name)

    return look


def _never(form: Kind) -> ModelSize:
    raise AssertionError(f"a folder that is there needs not be foreseen in the {form} form")
