"""The model home: from what a user calls a model to a folder that is ready to load.

One of the places where export is called; exports and downloads live under EDGESPEC_HOME.
"""

import difflib
import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from edgespec.catalog import CATALOG, CatalogEntry, HubSource
from edgespec.errors import ModelError, UsageError
from edgespec.fetch import fetch
from edgespec.manifest import FILE_NAME
from edgespec.pair import FILE_NAME as PAIR_FILE_NAME
from edgespec.parts import part_paths, whole_name

Report = Callable[[str], None]


def default_home() -> Path:
    return Path(os.environ.get("EDGESPEC_HOME") or platformdirs.user_data_dir("edgespec", appauthor=False))


@dataclass(frozen=True)
class ModelHome:
    """Prepared models and fetched files below one folder.

    With offline nothing is fetched. report takes one line per stage of a preparation.
    """

    path: Path
    offline: bool = False
    report: Report = lambda line: None

    def resolve(self, model: str) -> Path:
        """The model or pair folder for a folder, a name of the catalogue, a .gguf file or a safetensors folder.

        A name or a file may be followed by :PRECISION; sources are exported on first use.

        Raises:
            ModelError: Nothing of that name, with the nearest known ones.
        """
        name, _, precision = model.rpartition(":") if _has_precision(model) else (model, "", "source")
        try:
            path, plain = Path(name).expanduser(), Path(model).expanduser()
            if (plain / FILE_NAME).is_file() or (plain / PAIR_FILE_NAME).is_file():
                return plain
            if name in CATALOG:
                return self._from_catalog(name, CATALOG[name], precision)
            if path.is_file() or ((path / "config.json").is_file() and not (path / FILE_NAME).exists()):
                return self._from_path(path.resolve(), precision)
            raise ModelError(_unknown(model, path))
        except (RuntimeError, ValueError, OSError) as error:  # no such user, a NUL, a name too long
            raise ModelError(
                f"'{model[:200]}' cannot be opened ({error}); give a name, a folder or a file"
            ) from None

    def _from_catalog(self, name: str, entry: CatalogEntry, precision: str) -> Path:
        folder = self._folder(name, precision)
        downloads = self.path / "downloads"
        if (folder / FILE_NAME).is_file():
            return folder
        source = fetch(entry, downloads, self.report, offline=self.offline)
        hub = next((place for place in entry.sources if isinstance(place, HubSource)), None)
        return self._export(
            source, folder, precision, hub.repository if hub else None, hub.revision if hub else None
        )

    def _from_path(self, source: Path, precision: str) -> Path:
        files = sorted(source.iterdir()) if source.is_dir() else filter(Path.exists, part_paths(source))
        states = [f"{os.fsencode(file)!r} {(stat := file.stat()).st_size} {stat.st_mtime_ns}" for file in files]
        key = hashlib.sha256("\n".join(states).encode()).hexdigest()[:8]
        folder = self._folder(f"{Path(whole_name(source.name)).stem}-{key}", precision)
        return folder if (folder / FILE_NAME).is_file() else self._export(source, folder, precision)

    def _folder(self, name: str, precision: str) -> Path:
        return self.path / "models" / (name if precision == "source" else f"{name}-{precision}")

    def _export(
        self,
        source: Path,
        folder: Path,
        precision: str,
        repository: str | None = None,
        revision: str | None = None,
    ) -> Path:
        from edgespec.export.convert import export_model  # 0.3 s, and only a first use needs it

        try:
            export_model(
                source,
                folder,
                precision=precision,
                repository=repository,
                revision=revision,
                report=self.report,
            )
        except UsageError:
            if not (folder / FILE_NAME).is_file():
                raise
            self.report("another process has prepared it in the meantime")
        return folder


def _has_precision(model: str) -> bool:
    return model.rpartition(":")[2] in ("source", "fp32", "fp16", "int8", "int4")


def _unknown(model: str, path: Path) -> str:
    if (path / FILE_NAME).is_file():
        return f"{path} is prepared already; a precision is chosen for sources and names of the catalogue"
    if path.is_dir():
        return f"{path} is a folder without {FILE_NAME} and without config.json; export a model into it first"
    near = difflib.get_close_matches(model, CATALOG, n=3, cutoff=0.4)
    meant = f"did you mean {' or '.join(near)}? " if near else ""
    return (
        f"no model '{model}': {meant}known names are {', '.join(CATALOG)}; or give a model folder or a .gguf file"
    )
