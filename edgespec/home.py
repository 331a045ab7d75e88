"""The model home: from what a user calls a model to a folder that is ready to load.

One of the places where export is called; exports and downloads live under EDGESPEC_HOME.
"""

import difflib
import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from edgespec import genai
from edgespec.catalog import CATALOG, CatalogEntry, HubRepository, HubSource
from edgespec.config import default_home as default_home
from edgespec.errors import ModelError, UsageError
from edgespec.fetch import fetch
from edgespec.hub import Snapshot, fetch_snapshot, sizes
from edgespec.manifest import FILE_NAME
from edgespec.pair import FILE_NAME as PAIR_FILE_NAME
from edgespec.parts import part_paths, whole_name
from edgespec.repository import HubId, parse_hub_id

if TYPE_CHECKING:
    from edgespec.export.convert import OpenDecoder

Report = Callable[[str], None]


@dataclass(frozen=True)
class ModelHome:
    """Prepared models and fetched files below one folder.

    With offline nothing is fetched. report takes one line per stage of a preparation. With open_decoder what is
    prepared is compared with its source.
    """

    path: Path
    offline: bool = False
    report: Report = lambda line: None
    open_decoder: "OpenDecoder | None" = None

    def resolve(self, model: str) -> Path:
        """The model or pair folder for a folder, a name of the catalogue, a .gguf file, safetensors or a hub id.

        All but a model folder may be followed by :PRECISION; sources are exported on first use. What lies here
        comes before the hub. A folder made by ONNX Runtime GenAI is taken as it is. A name of the catalogue has a
        precision and a commit of its own.

        Raises:
            ModelError: Nothing of that name, with the nearest known ones; or the hub does not give it.
        """
        if not model.strip():
            raise ModelError("the name of the model is empty; edgespec models list has the names")
        name, asked = split_precision(model)
        precision = asked or "source"
        try:
            path, plain = Path(name).expanduser(), Path(model).expanduser()
            if any((plain / file).is_file() for file in (FILE_NAME, PAIR_FILE_NAME, genai.FILE_NAME)):
                return plain
            if name in CATALOG:
                return self._from_catalog(name, CATALOG[name], asked)
            if path.is_file() or ((path / "config.json").is_file() and not (path / FILE_NAME).exists()):
                return self._from_path(path.resolve(), precision)
            if hub_id := _hub_id(name):
                return self._from_hub(hub_id, precision)
            raise ModelError(_unknown(model, path))
        except PermissionError as error:
            raise ModelError(
                f"{error.filename or model} may not be read; mend its permissions or set EDGESPEC_HOME elsewhere"
            ) from None
        except (RuntimeError, ValueError, OSError) as error:  # no such user, a NUL, a name too long
            why = (isinstance(error, OSError) and error.strerror) or error  # without the path once more
            raise ModelError(
                f"'{model[:200]}' cannot be opened ({why}); give a name, a folder or a file"
            ) from None

    def locate(self, source: str, revision: str | None = None) -> Snapshot:
        """What to export: a file or folder here, or a hub id, fetched at revision.

        Raises:
            UsageError: A revision of something that is here.
            ModelError: The hub does not give it.
        """
        hub_id = _hub_id(source)
        if hub_id:
            return fetch_snapshot(
                hub_id, self._hub_folder, self.report, revision=revision or "main", offline=self.offline
            )
        if revision is not None:
            raise UsageError(f"--revision is for repositories of the hub, and {source} is a file or folder")
        return Snapshot(path=Path(source))

    def sizes(self, source: str, revision: str | None = None) -> tuple[int, int] | None:
        """Of a hub id the bytes of its weights and of what is not here; None for a file or folder here."""
        hub_id = _hub_id(source)
        if hub_id is None:
            return None
        return sizes(hub_id, self._hub_folder, revision=revision or "main", offline=self.offline)

    @property
    def models(self) -> Path:
        return self.path / "models"

    @property
    def _hub_folder(self) -> Path:
        return self.path / "downloads" / "hub"

    def _from_hub(self, hub_id: HubId, precision: str) -> Path:
        folder = self._folder(hub_id.name, precision)
        if (folder / FILE_NAME).is_file():
            return folder
        return self._export(
            fetch_snapshot(hub_id, self._hub_folder, self.report, offline=self.offline), folder, precision
        )

    def _from_catalog(self, name: str, entry: CatalogEntry, asked: str | None) -> Path:
        folder = self._catalog_folder(name, entry, asked)
        if (folder / FILE_NAME).is_file():
            return folder
        return self._export(self._fetched(entry), folder, asked or entry.precision)

    def _catalog_folder(self, name: str, entry: CatalogEntry, asked: str | None) -> Path:
        return self.models / (name if asked in (None, entry.precision) else f"{name}-{asked}")

    def _fetched(self, entry: CatalogEntry) -> Snapshot:
        source = entry.source
        if isinstance(source, HubRepository):
            hub_id = HubId(source.repository)
            found = fetch_snapshot(
                hub_id, self._hub_folder, self.report, revision=source.revision, offline=self.offline
            )
            return replace(found, license=found.license or entry.license)
        path = fetch(source, self.path / "downloads", self.report, offline=self.offline)
        hub = next((place for place in source.sources if isinstance(place, HubSource)), None)
        origin = {"repository": hub.repository, "revision": hub.revision} if hub else {}
        return Snapshot(path=path, license=entry.license, **origin)

    def drafter_of(self, model: str) -> str | None:
        """What the catalogue has draft for a model of it, once that is prepared here."""
        entry = CATALOG.get(split_precision(model)[0])
        if entry is None or entry.drafter is None:
            return None
        folder = self._catalog_folder(entry.drafter, CATALOG[entry.drafter], None)
        return entry.drafter if (folder / FILE_NAME).is_file() else None

    def mark_used(self, folder: Path) -> None:
        """Remember that a model of this home was loaded now; where that cannot be written, let it be."""
        with suppress(OSError, ValueError):
            name = folder.absolute().relative_to(self.models.absolute()).parts[0]
            self._used.mkdir(exist_ok=True)
            (self._used / name).touch()

    def last_used(self, name: str) -> float | None:
        """When a model was last loaded, in seconds of the epoch."""
        with suppress(OSError):
            return (self._used / name).stat().st_mtime
        return None

    def forget_use(self, name: str) -> None:
        with suppress(OSError):
            (self._used / name).unlink()

    @property
    def _used(self) -> Path:
        return self.path / "used"

    def _from_path(self, source: Path, precision: str) -> Path:
        files = sorted(source.iterdir()) if source.is_dir() else filter(Path.exists, part_paths(source))
        states = [f"{os.fsencode(file)!r} {(stat := file.stat()).st_size} {stat.st_mtime_ns}" for file in files]
        key = hashlib.sha256("\n".join(states).encode()).hexdigest()[:8]
        folder = self._folder(f"{Path(whole_name(source.name)).stem}-{key}", precision)
        if (folder / FILE_NAME).is_file():
            return folder
        return self._export(Snapshot(path=source), folder, precision)

    def _folder(self, name: str, precision: str) -> Path:
        return self.models / (name if precision == "source" else f"{name}-{precision}")

    def _export(self, source: Snapshot, folder: Path, precision: str) -> Path:
        from edgespec.export.convert import export_model  # 0.3 s, and only a first use needs it

        try:
            export_model(
                source.path,
                folder,
                precision=precision,
                repository=source.repository,
                revision=source.revision,
                license=source.license,
                open_decoder=self.open_decoder,
                report=self.report,
            )
        except UsageError:
            if not (folder / FILE_NAME).is_file():
                raise
            self.report("another process has prepared it in the meantime")
        return folder


def _hub_id(name: str) -> HubId | None:
    """The id that name is, unless it is something here."""
    hub_id = parse_hub_id(name)
    return None if hub_id is None or Path(name).exists() or Path(hub_id.repository).exists() else hub_id


def split_precision(model: str) -> tuple[str, str | None]:
    """What a user names, and the precision after it if there is one."""
    name, _, precision = model.rpartition(":")
    return (name, precision) if precision in ("source", "fp32", "fp16", "int8", "int4") else (model, None)


def _unknown(model: str, path: Path) -> str:
    if (path / FILE_NAME).is_file():
        return f"{path} is prepared already; a precision is chosen for sources and names of the catalogue"
    if path.is_dir():
        return f"{path} is a folder without {FILE_NAME} and without config.json; export a model into it first"
    near = difflib.get_close_matches(model, CATALOG, n=3, cutoff=0.4)
    meant = f"did you mean {' or '.join(near)}? " if near else ""
    return (
        f"no model '{model}': {meant}edgespec models list has the names; or give a model folder, a .gguf file, "
        "a safetensors folder or a hub id (org/name)"
    )
