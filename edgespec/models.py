"""The models that are prepared on this machine: list, fetch, remove, verify."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from edgespec.catalog import CATALOG
from edgespec.errors import EdgeSpecError, ModelError
from edgespec.forecast import needed_bytes
from edgespec.home import ModelHome
from edgespec.manifest import FILE_NAME, Check, Manifest, read_manifest, strangers, verify_files
from edgespec.pair import DRAFTER, TARGET, read_pair


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A model or pair folder of the home; what target and drafter state is joined by " + ".

    memory_bytes is what plain decoding takes, of a pair with its drafter open. last_used is a time in UTC, None
    before the first use. check says how the export compared with its source, None where nobody compared them.
    problem says why it cannot be read, and then nothing else is known.
    """

    name: str
    path: str
    bytes: int
    kind: str = "model"  # or pair
    precision: str | None = None
    architecture: str | None = None
    source: str | None = None
    license: str | None = None
    memory_bytes: int | None = None
    last_used: str | None = None
    check: str | None = None
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
            size = sum(path.stat().st_size for path in _files(folder))
            is_pair = read_pair(folder) is not None
            manifests = [read_manifest(folder / part) for part in ((TARGET, DRAFTER) if is_pair else ("",))]
        except (EdgeSpecError, OSError) as error:
            yield Prepared(name=folder.name, path=str(folder), bytes=size, problem=str(error))
            continue
        licenses = {manifest.source.license for manifest in manifests} - {None}
        yield Prepared(
            name=folder.name,
            path=str(folder),
            bytes=size,
            kind="pair" if is_pair else "model",
            precision=" + ".join(manifest.precision for manifest in manifests),
            architecture=" + ".join(manifest.architecture for manifest in manifests),
            source=" + ".join(map(_origin, manifests)),
            license=" + ".join(sorted(map(str, licenses))) or None,
            memory_bytes=sum(needed_bytes(manifest, manifest.weights_bytes) for manifest in manifests),
            last_used=_as_time(home.last_used(folder.name)),
            check=" + ".join(_in_words(manifest.check) for manifest in manifests if manifest.check) or None,
        )


def _as_time(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def _in_words(check: Check) -> str:
    return f"{check.agreement:.0%} same tokens, {check.divergence:.4f} nats apart"


def _files(folder: Path) -> Iterator[Path]:
    """Of a model folder, or of the parts of a pair too."""
    for place in (folder, folder / TARGET, folder / DRAFTER):
        if place.is_dir():
            yield from (path for path in place.iterdir() if path.is_file())


def _origin(manifest: Manifest) -> str:
    source = manifest.source
    where = f"{source.repository} at {(source.revision or '?')[:12]}" if source.repository else None
    return f"{source.name} of {where}" if where else source.name


def not_prepared(home: ModelHome) -> list[str]:
    """Names of the catalogue that have not been used yet."""
    return [name for name in CATALOG if not (home.models / name).is_dir()]


def located(home: ModelHome, model: str) -> Path:
    """The folder of a prepared model, or of one that is named by its folder; prepares and fetches nothing.

    Raises:
        ModelError: It is not prepared.
    """
    return _folder(home, model)


def verify(home: ModelHome, model: str) -> tuple[int, list[str]]:
    """Compare every file of a prepared model with its hash; offline.

    Returns:
        How many files there are, and which others lie beside them.

    Raises:
        ModelError: It is not prepared, or a file is missing, or the check of a pair is damaged.
        IntegrityError: A file differs.
    """
    folder = _folder(home, model)
    if read_pair(folder) is not None:
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
    home.forget_use(model)
    return folder


def _folder(home: ModelHome, model: str) -> Path:
    if model in {own.name for own in prepared(home)}:
        return home.models / model
    if not model or not Path(model).is_dir():
        raise ModelError(f"'{model}' is no prepared model and no folder; see edgespec models list")
    folder = Path(model)
    if not any((place / FILE_NAME).is_file() for place in (folder, folder / TARGET)):
        raise ModelError(
            f"{folder} is a folder without {FILE_NAME}, so no prepared model; see edgespec models list"
        )
    return folder
