"""The models that clients may name: those that are prepared in the model home, and the one of the command line."""

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from edgespec import (
    CATALOG,
    FILE_NAME,
    EdgeSpecError,
    IntegrityError,
    Manifest,
    ManifestError,
    ModelHome,
    Preset,
    check_preset,
    find_thinking_switch,
    in_flags,
    read_template,
    read_whole_model,
    split_precision,
)
from edgespec.server.errors import ApiError
from edgespec.system.context_managers import contextmanager
from edgespec.system.split_files import utf8_name

LATEST = ":latest"  # behind names that clients of ollama send
_NAME_LENGTH = 200  # characters of a name that is repeated in a message


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model by the name that clients use, and what they may know of it before it is loaded.

    context_length: The most tokens of a prompt and its answer; memory may have room for fewer.
    """

    name: str
    folder: Path
    manifest: Manifest
    context_length: int
    created: int  # seconds of the epoch
    preset: Preset | None = None  # whose name it is, with the model as the folder is called

    def chat_template(self) -> str:
        """The text of its chat template; empty where it has none."""
        path = self.folder / (self.manifest.chat_template or "")
        return read_template(path) if path.is_file() else ""

    def capabilities(self, template: str) -> list[str]:
        """What it can do, as ollama's API has it, by its chat template."""
        if self.manifest.pooling:
            return ["embedding"]
        found = {"completion": True, "tools": "tools" in template, "thinking": "think" in template}
        return [name for name, can in found.items() if can]

    def document(self) -> dict[str, Any]:
        template = self.chat_template()
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "edgespec",
            "context_length": self.context_length,
            "architecture": self.manifest.architecture,
            "precision": self.manifest.precision,
            "capabilities": self.capabilities(template),
            "can_switch_thinking": find_thinking_switch(template) is not None,
            **({"preset_of": self.preset.model} if self.preset else {}),
        }


@dataclass(frozen=True, slots=True)
class ModelNames:
    """Which names there are, and what load() is to be given for each.

    A client's name is only ever compared with names that are known: it is no path, no address and no hub id.

    own: The model of the command line, as the user wrote it.
    context: The most tokens of a prompt and its answer, as the user limits them.
    """

    home: ModelHome
    own: str | None = None
    context: int | None = None

    @property
    def own_name(self) -> str | None:
        """The name by which clients know the model of the command line."""
        return None if self.own is None else self.own if self.own in CATALOG else utf8_name(Path(self.own).name)

    def names(self) -> list[str]:
        """All names, that of the command line first, those whose model has yet to be prepared last."""
        known = [*(model.name for model in self.models()), *(preset.name for preset in self.unprepared())]
        others = [name for name in known if name != self.own_name]
        return [*([self.own_name] if self.own_name else []), *others]

    def unprepared(self) -> Iterator[Preset]:
        """The presets of a file or folder on this machine that is prepared at the first request."""
        for preset in self.home.presets:
            source = Path(split_precision(preset.model)[0])
            with suppress(EdgeSpecError):
                if source.is_absolute() and os.path.exists(source) and self.home.find(preset.model) is None:
                    yield replace(preset, model=source.name)

    def models(self) -> Iterator[ServedModel]:
        """The models that can answer: that of the command line, then those of the home and its presets, sorted.

        Folders that cannot be read are left out, and so is the model of the command line until it is prepared.
        """
        own = self._folder(self.own)
        presets = self.home.presets.names()
        if own is not None and self.own_name not in (None, *presets):
            yield from self._read(str(self.own_name), own)
        if self.own_name is not None and self.own_name in presets:
            yield from self._preset(self.own_name)
            own = None
        folders = sorted(self.home.models.iterdir()) if self.home.models.is_dir() else []
        for folder in folders:
            name = utf8_name(folder.name)
            if folder != own and name != self.own_name and name[0] != "." and folder.is_dir():
                yield from self._read(name, folder)
        for name in presets:
            if name != self.own_name:
                yield from self._preset(name)

    def _preset(self, name: str) -> Iterator[ServedModel]:
        if (folder := self._folder(name)) is not None and (preset := self.home.presets.find(name)):
            yield from self._read(name, folder, replace(preset, model=folder.name))  # a path is nobody's business

    def _read(self, name: str, folder: Path, preset: Preset | None = None) -> Iterator[ServedModel]:
        """The model of a folder, if it can answer."""
        try:
            model = read_whole_model(folder, name)
            created = int((model.folder / FILE_NAME).stat().st_mtime)
        except (EdgeSpecError, OSError):
            return
        longest = [model.manifest.context_length, self.context, preset and preset.load_arguments.get("context")]
        yield ServedModel(
            name=name,
            folder=model.folder,
            manifest=model.manifest,
            context_length=min(filter(None, longest)),
            created=created,
            preset=preset,
        )

    def require(self, asked: str | None) -> str:
        """The name of a model that is served; without one, that of the command line or the only one.

        Raises ApiError: 404, there is no such model, with similar names; 503, its files are damaged; 400, none is
        named among several.
        """
        names = self.names()
        plain = (asked or "").removesuffix(LATEST)
        for name in (asked or "", plain, self.home.current_name(plain)):
            if name in names:
                return name
        if not asked:
            if self.own_name or len(names) == 1:
                return names[0]
            raise ApiError(400, f"no model is named; there are: {', '.join(names) or 'none'}", param="model")
        self._require_whole(asked, plain, self.home.current_name(plain))
        if self.home.presets.has(asked):
            with _explained(self.home):
                model = self.home.presets.read(asked).model
            self._require_whole(Path(model).name.replace(":", "-"))  # as the folder of a precision is called
            raise ApiError(
                404,
                f"the preset '{asked}' is of the model '{Path(model).name[:_NAME_LENGTH]}', which is not prepared "
                "here; on the server's machine edgespec preset ls says how to prepare it",
                param="model",
                code="model_not_found",
            )
        # Whatever their case; of an id or a path its last part counts.
        by_form = {name.casefold(): name for name in names}
        wanted = asked.rstrip("/").rpartition("/")[2][:_NAME_LENGTH].casefold()
        near = [by_form[form] for form in get_close_matches(wanted, by_form, n=3, cutoff=0.6)]
        meant = f"did you mean {' or '.join(near)}? " if near else ""
        raise ApiError(
            404,
            f"no model '{asked[:_NAME_LENGTH]}' is prepared here; {meant}GET /v1/models lists the names, and "
            "edgespec models pull prepares others",
            param="model",
            code="model_not_found",
        )

    def damages(self) -> dict[str, str]:
        """The models of the home whose files are damaged, and what is wrong."""
        found = {}
        for name in sorted(self.home.names()):
            folder = self.home.models / name
            try:
                read_whole_model(folder, name)
            except (IntegrityError, ManifestError) as error:  # and no others: a drafting head is whole
                problem = in_flags(str(self.home.advice.on_damage(folder, error)))
                found[name] = problem.replace(f"{self.home.models}{os.sep}", "")
            except (EdgeSpecError, OSError):
                continue
        return found

    def _require_whole(self, *names: str) -> None:
        """Raises ApiError: 503, the files of the model that has one of these names are damaged."""
        damages = self.damages()
        for name in names:
            if name in damages:
                said = f"the model '{name}' cannot be used: {damages[name]}"
                raise ApiError(503, said, param="model", code="model_damaged")

    def manifest(self, name: str) -> Manifest | None:
        """The manifest of a model before it is loaded; None where it has yet to be prepared."""
        return next((model.manifest for model in self.models() if model.name == name), None)

    def loaded_as(self, name: str) -> tuple[str, Preset | None]:
        """The name under which a model is loaded, and the preset that its answers are then made by.

        A preset that changes nothing of the loading shares the model that it is of.

        Raises EdgeSpecError: The file of the preset cannot be used.
        """
        preset = self.home.presets.find(name)
        if preset is None or preset.load_arguments or (folder := self._folder(name)) is None:
            return name, None
        others = (model.name for model in self.models() if model.preset is None)
        found = next((other for other in others if self._folder(self.source(other)) == folder), None)
        if found is None:
            return name, None
        check_preset(preset)
        return found, preset

    def served_as(self, name: str) -> tuple[str, Preset | None]:
        """What loaded_as returns. Raises ApiError: 503, the file of the preset cannot be used."""
        with _explained(self.home):
            return self.loaded_as(name)

    def source(self, name: str) -> str:
        """The name or the folder that load() is to be given for a name."""
        if name == self.own_name and self.own is not None:
            return self.own
        # The catalogue also knows a drafter. Otherwise the folder itself, whatever lies in the working directory.
        is_known = name in CATALOG or self.home.presets.has(name)
        return name if is_known else str(self.home.models / os.fsdecode(name.encode()))

    def _folder(self, model: str | None) -> Path | None:
        """The folder of a model or a preset that a user named; None until it is prepared for the CPU."""
        try:
            return None if model is None else self.home.find(model)
        except EdgeSpecError:
            return None


@contextmanager
def _explained(home: ModelHome) -> Iterator[None]:
    """Tell clients what is wrong with a preset, and not where the home is."""
    try:
        yield
    except EdgeSpecError as error:
        said = str(error).replace(str(home.presets.path), "presets")
        raise ApiError(503, said, param="model", code="preset_damaged") from None
