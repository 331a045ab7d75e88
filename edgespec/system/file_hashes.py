"""Sizes and SHA-256 of files of a model folder, recorded once and compared later. Knows no content."""

import hashlib
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from edgespec.errors import IntegrityError, ManifestError
from edgespec.system.cancel import Cancel
from edgespec.system.progress import LoadProgress, ReportProgress
from edgespec.system.text_files import POINTER, is_pointer

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    sha256: str
    bytes: Annotated[int, Meta(ge=0)]


def file_record(
    path: Path, cancel: Cancel | None = None, on_read: Callable[[int], None] = lambda num_bytes: None
) -> FileRecord:
    """Size and hash of a file; on_read is called with the size of each piece that was read."""
    digest = hashlib.sha256()
    size = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            if cancel:
                cancel.require_unset()
            digest.update(chunk)
            size += len(chunk)
            on_read(len(chunk))
    return FileRecord(sha256=digest.hexdigest(), bytes=size)


def require_size(folder: Path, name: str, record: FileRecord) -> None:
    """Check that a folder has a file, and as many bytes of it as were recorded.

    Raises:
        ManifestError: It is missing, or no regular file of the folder that may be read.
        IntegrityError: It has another length.
    """
    if not name or Path(name).name != name or name == ".." or "\0" in name:
        raise ManifestError(f"{folder}: the manifest names {name!r}, which is not a file of its own folder")
    try:
        status = (folder / name).stat()
    except OSError as error:
        raise ManifestError(f"{folder / name}: {error.strerror}; export the model again") from None
    if not stat.S_ISREG(status.st_mode):
        raise ManifestError(f"{folder / name} is not a regular file; export the model again")
    if not os.access(folder / name, os.R_OK):
        raise ManifestError(f"{folder / name} may not be read; change its permissions")
    if status.st_size != record.bytes and is_pointer(folder / name):
        raise IntegrityError(f"{folder / name} {POINTER}")
    if status.st_size != record.bytes:
        raise IntegrityError(
            f"{folder / name} has {status.st_size} bytes, its manifest says {record.bytes}; export the model again"
        )


def verify_files(
    folder: Path,
    files: Mapping[str, FileRecord],
    name: str = "",
    cancel: Cancel | None = None,
    progress: ReportProgress = lambda progress: None,
) -> None:
    """Compare the SHA-256 of files of a model folder, by their names; progress is told of the model's name.

    Raises:
        IntegrityError: A file differs.
        Cancelled: The check was cancelled.
    """
    total, done = sum(record.bytes for record in files.values()), 0

    def advance(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        progress(LoadProgress("open", name, done, total))

    for file, record in files.items():
        found = file_record(folder / file, cancel, advance)
        if found != record:
            raise IntegrityError(
                f"{folder / file} was changed since its export (SHA-256 {found.sha256[:12]}…, the manifest says "
                f"{record.sha256[:12]}…); export the model again"
            )
