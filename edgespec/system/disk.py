"""Free space on a disk, and files and folders that are written whole or not at all, even in a power cut."""

import errno
import os
import secrets
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import BinaryIO

from edgespec.errors import DiskFull, EdgeSpecError


def require_disk_space(folder: Path, needed_bytes: int, reserve_bytes: int = 0) -> None:
    """Raises DiskFull: The disk of `folder` has fewer free bytes than are needed and held in reserve."""
    free = shutil.disk_usage(folder).free
    if free < needed_bytes + reserve_bytes:
        raise DiskFull(folder, needed_bytes, free, reserve_bytes=reserve_bytes)


@contextmanager
def explain_write_errors(folder: Path, needed_bytes: int) -> Iterator[None]:
    """Turn errors of writing to `folder` into messages that say what to do.

    Raises:
        DiskFull: The disk is full, or a quota is reached.
        EdgeSpecError: Writing is not allowed, or a file would be too large.
    """
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(folder).free
            raise DiskFull(folder, needed_bytes, free, str(error.strerror)) from None
        if error.errno == errno.EFBIG:
            raise EdgeSpecError(
                f"cannot write to {folder} ({error.strerror}): this process or this file system allows "
                "no file of that size; raise the limit (ulimit -f) or choose another place"
            ) from None
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise EdgeSpecError(f"cannot write to {folder} ({error}); choose another place") from None
        raise


def install_folder(folder: Path, place: Path) -> None:
    """Rename a complete folder to its final place; a power cut leaves all of it there or nothing."""
    for path in folder.iterdir():
        sync(path)
    sync(folder)
    os.rename(folder, place)
    sync(place.parent)


def replace_file(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Write a file at once: it has its old content until it has all of the new one. The umask narrows mode.

    A link stays one: the file that it leads to is written. A device or a pipe is written to, never replaced.
    """
    if path.is_symlink():
        path = Path(os.path.realpath(path))
    if not path.name:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if path.exists() and not path.is_file() and not path.is_dir():
        path.write_bytes(data)
        return
    with replacing(path, mode) as file:
        file.write(data)


@contextmanager
def replacing(path: Path, mode: int = 0o600) -> Iterator[BinaryIO]:
    """A new file that takes the place of a path at the end of the block, unless that raises."""
    name = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    handle = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), mode)
    try:
        with open(handle, "wb") as file:
            yield file
        os.replace(name, path)
    except BaseException:
        name.unlink(missing_ok=True)
        raise


def has_content(path: Path) -> bool:
    """True if writing a file would lose its content; false for an empty file, a device and a pipe."""
    return path.is_file() and path.stat().st_size > 0


def sync(path: Path) -> None:
    """Wait until the content of a file, or the names in a folder, have reached the disk."""
    is_folder = path.is_dir()
    with suppress(OSError) if is_folder else nullcontext():  # Windows and some file systems refuse it for folders
        handle = os.open(path, os.O_RDWR if sys.platform == "win32" and not is_folder else os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
