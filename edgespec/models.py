"""The models that are prepared on this machine: list, fetch, remove, verify."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from edgespec.catalog import CATALOG
from edgespec.errors import EdgeSpecError, ModelError
from edgespec.home import ModelHome
from edgespec.manifest import Manifest, read_manifest, strangers, verify_files


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A model folder of the home; problem says why it cannot be read, and then nothing else is known."""

    name: str
    path: str
    bytes: int
    precision: str | None = None
    architecture: str | None = None
    source: str | None = None
    license: str | None = None
    problem: str | None = None


def prepared(home: ModelHome) -> Iterator[Prepared]:
    """Those of the home, by name."""
    for folder in sorted(home.models.iterdir()) if home.models.is_dir() else []:
        if folder.name.startswith(".") or not folder.is_dir():
            continue
        size = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
        try:
            manifest = read_manifest(folder)
        except EdgeSpecError as error:
            yield Prepared(name=folder.name, path=str(folder), bytes=size, problem=str(error))
            continue
        yield Prepared(
            name=folder.name,
            path=str(folder),
            bytes=size,
            precision=manifest.precision,
            architecture=manifest.architecture,
            source=_origin(manifest),
            license=manifest.source.license,
        )


def _origin(manifest: Manifest) -> str:
    source = manifest.source
    where = f"{source.repository} at {(source.revision or '?')[:12]}" if source.repository else None
    return f"{source.name} of {where}" if where else source.name


def not_prepared(home: ModelHome) -> list[str]:
    """Names of the catalogue that have not been used yet."""
    return [name for name in CATALOG if not (home.models / name).is_dir()]


def verify(home: ModelHome, model: str) -> tuple[int, list[str]]:
    """Compare every file of a prepared model with its hash; offline.

    Returns:
        How many files there are, and which others lie beside them.

    Raises:
        ModelError: It is not prepared, or a file is missing.
        IntegrityError: A file differs.
    """
    folder = _folder(home, model)
    manifest = read_manifest(folder)
    verify_files(folder, manifest)
    return len(manifest.files), strangers(folder, manifest)


def remove(home: ModelHome, model: str) -> Path:
    """Delete a prepared model of the home; what it was made from stays.

    Raises:
        ModelError: The home has no such model.
    """
    if model not in {own.name for own in prepared(home)}:
        raise ModelError(f"'{model}' is no prepared model; see edgespec models list")
    shutil.rmtree(home.models / model)
    return home.models / model


def _folder(home: ModelHome, model: str) -> Path:
    if model in {own.name for own in prepared(home)}:
        return home.models / model
    if not Path(model).is_dir():
        raise ModelError(f"'{model}' is no prepared model and no folder; see edgespec models list")
    return Path(model)
