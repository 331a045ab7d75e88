"""Downloads in the model home: listed, and deleted unless a process is fetching them."""

import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import time

from edgespec.errors import EdgeSpecError
from edgespec.manifest import Source
from edgespec.system.disk import hold_lock

_PART, _TEMPORARY, _LOCK = ".part", ".fetch-", ".lock"
_SAFE_S = 3600.0  # since the last byte of a fetch that has no lock


@dataclass(frozen=True, kw_only=True)
class Download:
    """A download; is_whole: it is complete, and no part of one that was interrupted.

    source: A repository and its commit, or a file. path: A folder or a file.
    """

    source: str
    path: str
    bytes: int
    is_whole: bool


@dataclass(frozen=True, slots=True)
class Downloads:
    """The downloads below a folder; those of the hub are in folders by repository and commit."""

    folder: Path

    def __iter__(self) -> Iterator[Download]:
        for path in self._paths():
            files = [each for each in (*path.rglob("*"), path) if each.is_file() and each.name != _LOCK]
            is_whole = not path.name.startswith(_TEMPORARY) and not any(each.suffix == _PART for each in files)
            size = sum(each.stat().st_size for each in files)
            yield Download(source=_name(path), path=str(path), bytes=size, is_whole=is_whole)

    def _paths(self) -> list[Path]:
        files = [path for path in self.folder.glob("*") if path.is_file() or path.name.startswith(_TEMPORARY)]
        commits = (path for path in self.folder.glob("hub/*/*") if path.is_dir() and path.name != "revisions")
        return sorted(path for path in (*files, *commits) if not path.name.endswith(_LOCK))

    def of(self, source: Source) -> Path | None:
        """The download that a model was exported from; None where it is not here."""
        place = self.folder / "hub" / (source.repository or "").replace("/", "--") / (source.revision or "none")
        return next((path for path in (place, self.folder / source.name) if path in self._paths()), None)

    def delete(self, path: Path) -> int:
        """Delete a download; returns its bytes. Raises EdgeSpecError: It is in use, or cannot be deleted."""
        size = sum(each.bytes for each in self if each.path == str(path))
        try:
            if path.is_file():
                path.unlink()
            elif path.name.startswith(_TEMPORARY):
                _delete_abandoned(path)
            else:
                _delete_commit(path)
        except TimeoutError as error:
            raise EdgeSpecError(f"{path} is not deleted: {error}; try again once that process has ended") from None
        except OSError as error:
            raise EdgeSpecError(f"cannot delete {path} ({error.strerror}); fix its permissions") from None
        return size


def _name(path: Path) -> str:
    """The repository and the commit of a folder, or the name of a file."""
    is_commit = path.is_dir() and not path.name.startswith(_TEMPORARY)
    return f"{path.parent.name.replace('--', '/', 1)} at {path.name[:12]}" if is_commit else path.name


def _delete_abandoned(folder: Path) -> None:
    """Raises TimeoutError: A process has written to the folder not long ago."""
    if time() - max(each.stat().st_mtime for each in (folder, *folder.rglob("*"))) < _SAFE_S:
        raise TimeoutError("written to within the last hour")
    shutil.rmtree(folder)


def _delete_commit(folder: Path) -> None:
    """Delete the files of a commit, and with the last commit what is known of the repository."""
    with hold_lock(folder / _LOCK, timeout_s=0.0):
        for path in folder.iterdir():
            if path.name != _LOCK:
                shutil.rmtree(path)
    with suppress(OSError):  # another process has begun to fetch it
        folder.rmdir()
        if [path.name for path in folder.parent.iterdir()] in ([], ["revisions"]):
            shutil.rmtree(folder.parent)


def delete_abandoned_exports(models: Path) -> int:
    """Delete what exports that were killed have left in a folder; returns its bytes."""
    size = 0
    for folder in models.glob(".*.partial"):
        with suppress(TimeoutError), hold_lock(models / folder.name.replace(".partial", _LOCK), timeout_s=0.0):
            size += sum(each.stat().st_size for each in folder.rglob("*") if each.is_file())
            shutil.rmtree(folder, ignore_errors=True)
    return size
