"""The models that are prepared on this machine: list, fetch, remove, verify."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from edgespec.catalog import CATALOG
from edgespec.errors import EdgeSpecError, ModelError
from edgespec.home import ModelHome
from edgespec.manifest import Manifest, read_manifest, strangers, verify_files
from edgespec.pair import DRAFTER, TARGET
from edgespec.pair import FILE_NAME as PAIR_FILE


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
    if home.path.exists() and not home.path.is_dir():
        raise EdgeSpecError(f"{home.path} is no folder; set EDGESPEC_HOME to one")
    for folder in sorted(home.models.iterdir()) if home.models.is_dir() else []:
        if folder.name.startswith(".") or not folder.is_dir():
            continue
        size = 0
        try:
            size = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
            manifest = read_manifest(folder)
        except (EdgeSpecError, OSError) as error:
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
    if (folder / PAIR_FILE).is_file():
        parts = [_verified(folder / part) for part in (TARGET, DRAFTER)]
        return sum(num_files for num_files, _ in parts), [name for _, names in parts for name in names]
    return _verified(folder)


def _verified(folder: Path) -> tuple[int, list[str]]:
    try:
        manifest = read_manifest(folder)
        verify_files(folder, manifest)
        return len(manifest.files), strangers(folder, manifest)
    except PermissionError as error:
        raise ModelError(f"{error.filename or folder} may not be read; mend its permissions") from None


def remove(home: ModelHome, model: str) -> Path:
    """Delete a prepared model of the home; what it was made from stays.

    Raises:
        ModelError: The home has no such model.
    """
    if model not in {own.name for own in prepared(home)}:
        raise ModelError(f"'{model}' is no prepared model; see edgespec models list")
    folder = home.models / model
    try:
        if folder.is_symlink():
            folder.unlink()
        else:
            shutil.rmtree(folder)
    except OSError as error:
        raise EdgeSpecError(f"cannot remove {folder} ({error.strerror}); mend its permissions") from None
    return folder


def _folder(home: ModelHome, model: str) -> Path:
    if model in {own.name for own in prepared(home)}:
        return home.models / model
    if not Path(model).is_dir():
        raise ModelError(f"'{model}' is no prepared model and no folder; see edgespec models list")
    return Path(model)
