"""Advice on models that a home lacks or that are damaged: what a name may mean, and the command that helps."""

import difflib
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, Unpack

from edgespec.config.drafter_names import WORDS as DRAFTER_WORDS
from edgespec.errors import EdgeSpecError, ModelError, in_flags
from edgespec.export.settings import ADAPTER_SETTINGS, advise_gguf, describe_unfinished
from edgespec.manifest import EXPORT_AGAIN, FILE_NAME, NO_MANIFEST, read_manifest
from edgespec.setup import ollama_models
from edgespec.setup.catalog import CATALOG
from edgespec.setup.given_names import source_of
from edgespec.setup.source_names import is_named, near_names, split_precision
from edgespec.system.command_line import quote

if TYPE_CHECKING:
    from edgespec.setup.home import DeviceFacts, ModelHome


Failure = TypeVar("Failure", bound=Exception)


@dataclass(frozen=True, slots=True)
class HomeAdvice:
    home: "ModelHome"

    def on_damage(self, folder: Path, error: Failure) -> Failure:
        """An error of a folder, with the command that repairs it in place of the advice to export it again."""
        problem, _, advice = in_flags(str(error)).rpartition("; ")
        if advice in (EXPORT_AGAIN, NO_MANIFEST) and (way := self.repair_of(folder)):
            return type(error)(f"{problem}; repair it: {way}")
        return error

    def repair_of(self, folder: Path) -> str:
        """The command that prepares a damaged model of this home again; empty where none is known."""
        name = self.find_pulled(folder)
        return f"edgespec models pull {quote(name)}" if name else ""

    def find_pulled(self, folder: Path, form: str = "cpu", **about: Unpack["DeviceFacts"]) -> str | None:
        """The name to pull, for a device, to have a model of this home again; None where that is not known."""
        if folder.parent != self.home.models or folder.is_symlink():
            return None
        name, _, precision = folder.name.rpartition("-")
        known = [folder.name, f"{name}:{precision}"] if name in CATALOG else [folder.name]
        wanted = [each for each in known if split_precision(each)[0] in CATALOG]
        wanted += filter(None, [self.noted_source(folder), *_repositories(folder)])
        for each in wanted:
            with suppress(EdgeSpecError):
                if self.home.place_of(each, form, **about) == folder:
                    return each
        return None

    def on_unknown(self, model: str, path: Path, own: Path | None) -> str:
        """Why a name stands for no model; path is the name read as a path, own a folder of the home."""
        if own is not None or (path / FILE_NAME).is_file():
            return (
                f"{own or path} is prepared already, so its precision is fixed; leave the precision out, or name "
                "the source"
            )
        if path.is_dir():
            if (path / ADAPTER_SETTINGS).is_file():
                way = f"edgespec export BASE --adapter {quote(path)} --output MODEL"
                return f"{path} is a LoRA adapter, which runs with its base alone: {way}"
            advice = advise_gguf(path) or "give another folder"
            return f"{path} is a folder without {FILE_NAME} and config.json, so not a model; {advice}"
        if way := self.way_to(model):
            return f"there is no model '{model}' any more; prepare it again: {way}"
        if os.path.exists(path):  # the callers have looked for files and folders
            return f"{path} is a pipe or a device, not a file; give a model as a file or folder"
        if path.suffix == ".gguf" and (part := describe_unfinished(path)):
            return f"{path} does not exist; {part}"
        if path.suffix in (".gguf", ".safetensors") or os.path.dirname(model):
            return f"there is no file or folder {path} (seen from {Path.cwd()}); check its name"
        near = near_names(model, (*CATALOG, *filter(self.home.own_folder, self.home.names())))
        meant = f"did you mean {' or '.join(near)}? " if near else ""
        if {model, f"{model}:latest"} & {*ollama_models.pulled_names()}:
            meant = f"ollama has this model: use {ollama_models.PREFIX}{model}; {meant}"
        elif ":" in split_precision(model)[0]:
            meant += "names here have no tags, unlike in ollama; "
        if drafter := difflib.get_close_matches(model, DRAFTER_WORDS, n=1, cutoff=0.8):
            meant = f"did you mean the drafter {drafter[0]}? {meant}"
        return (
            f"no model '{model}': {meant}edgespec models list has the names; or give a model folder, a .gguf "
            "file, a safetensors folder or a hub id (org/name)"
        )

    def way_to(self, model: str) -> str:
        """The command that prepares a model that is not here; empty where none is known to."""
        name = split_precision(model)[0].removeprefix(f"{self.home.models}{os.sep}")
        if name == os.path.basename(name) and (source := self.noted_source(self.home.models / name)):
            return f"edgespec export {quote(source)} --name {quote(name)}"
        is_source = os.path.isfile(name) or is_named(name)
        return f"edgespec models pull {quote(model)}" if is_source else ""

    def noted_source(self, folder: Path) -> str | None:
        """The source of a model of this home, which may be gone; None where that is unknown or gone itself."""
        source = source_of(self.home.path, folder.name) if folder.parent == self.home.models else None
        return source if source and (os.path.exists(source) or is_named(source)) else None

    def require_known(self, source: str) -> None:
        """Raises ModelError: A source that is not there is the name of a model, or nearly one of the catalogue."""
        if folder := self.home.own_folder(self.home.presets.model_of(source)):
            again = self.noted_source(folder) or "what it was exported from"
            raise ModelError(
                f"'{source}' is the prepared model {folder}, and can be used as it is; to export again, give "
                f"{again}"
            )
        if near := near_names(source, CATALOG):
            raise ModelError(f"there is no file or folder {source}; did you mean the model {' or '.join(near)}?")


def _repositories(folder: Path) -> list[str]:
    """Hub ids that a damaged model folder may be exported from, by what is left of its manifest."""
    with suppress(EdgeSpecError, OSError, ValueError):
        source = read_manifest(folder, has_files=False).source
        return [each for each in (source.repository, source.hub_id) if each]
    return []
