"""Room on a disk, and folders that are there whole or not at all, even after a power cut."""

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from edgespec.errors import DiskFull, EdgeSpecError

_FULL = (errno.ENOSPC, errno.EDQUOT)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)


def expect_room(folder: Path, needed_bytes: int, reserve_bytes: int = 0) -> None:
    """Raises DiskFull: folder has less room than needed and reserve."""
    free = shutil.disk_usage(folder).free
    if free < needed_bytes + reserve_bytes:
        raise DiskFull(folder, needed_bytes, free, reserve_bytes=reserve_bytes)


@contextmanager
def writing(folder: Path, needed_bytes: int) -> Iterator[None]:
    """Say in words why folder cannot be written.

    Raises:
        DiskFull: The disk is full, or a quota is reached.
        EdgeSpecError: Writing is not allowed, or a file would be too large.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            free = shutil.disk_usage(folder).free
            raise DiskFull(folder, needed_bytes, free, str(error.strerror)) from None
        if error.errno == errno.EFBIG:
            raise EdgeSpecError(
                f"cannot write to {folder} ({error.strerror}): this process or this file system allows "
                "no file of that size; raise the limit (ulimit -f) or choose another place"
            ) from None
        if error.errno in _FORBIDDEN:
            raise EdgeSpecError(f"cannot write to {folder} ({error}); choose another place") from None
        raise


def install(folder: Path, place: Path) -> None:
    """Give a folder that is complete its final name; a power cut leaves all of it there or nothing."""
    for path in folder.iterdir():
        sync(path)
    sync(folder)
    os.rename(folder, place)
    sync(place.parent)


def replace_file(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Write a file that is there as it was or as it is to be, never in between.

    Args:
        mode: Who may read it, less what the user's mask takes: its owner alone.
    """
    if not path.name:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    name = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    handle = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), mode)
    try:
        with open(handle, "wb") as file:
            file.write(data)
        os.replace(name, path)
    except BaseException:
        name.unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """Wait until a file, or which names a folder holds, has reached the disk."""
    if path.is_dir():
        with suppress(OSError):  # Windows opens no folders, and some file systems cannot do it
            _sync(path, os.O_RDONLY)
    else:
        _sync(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)


def _sync(path: Path, flags: int) -> None:
    handle = os.open(path, flags)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
