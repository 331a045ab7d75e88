"""Free space on a disk, files and folders that are written whole or not at all, and locks between processes."""

import errno
import os
import secrets
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from itertools import count
from math import inf
from pathlib import Path
from time import sleep
from typing import BinaryIO

from edgespec.errors import DiskFull, EdgeSpecError
from edgespec.system.context_managers import contextmanager
from edgespec.system.signals import defer_signals
from edgespec.system.units import format_bytes

_FULL = (errno.ENOSPC, errno.EDQUOT)  # a disk, or a quota
_ADVICE = dict.fromkeys(_FULL, "free some space") | {
    errno.EROFS: "nothing can be changed on that disk: mount it for writing, or choose another place"
}
_MOST_BYTES = 20  # of the file of a lock
_POLL_S = 0.01  # between two tries for a lock


def require_disk_space(folder: Path, needed_bytes: int, reserve_bytes: int = 0) -> None:
    """Check the room for files that are to be written.

    Raises:
        DiskFull: The disk of `folder` has fewer free bytes than are needed and held in reserve.
        EdgeSpecError: It lies on no disk, such as /proc.
    """
    usage = shutil.disk_usage(folder)
    if not usage.total:
        raise EdgeSpecError(f"no file can be written in {folder}, which lies on no disk; choose another folder")
    free = usage.free
    if free < needed_bytes + reserve_bytes:
        stays = f", {format_bytes(reserve_bytes)} more must stay free," if reserve_bytes else ""
        raise _disk_full(folder, needed_bytes, free, stays=stays)


def _disk_full(folder: Path, needed_bytes: int, free_bytes: int, reason: str = "", stays: str = "") -> DiskFull:
    needed, free = format_bytes(needed_bytes), format_bytes(free_bytes)
    return DiskFull(
        f"no room in {folder}: about {needed} are needed{stays} and {free} are free{reason}; free some space or "
        "choose another place",
        needed_bytes,
        free_bytes,
    )


@contextmanager
def explain_change(what: str, otherwise: str = "change its permissions") -> Iterator[None]:
    """Raises EdgeSpecError: A small file or a folder cannot be changed, such as "delete FILE", with what to do."""
    try:
        yield
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0, otherwise)
        raise EdgeSpecError(f"cannot {what} ({error.strerror}); {advice}") from None


@contextmanager
def explain_full_disk(folder: Path, needed_bytes: int) -> Iterator[None]:
    """Raises DiskFull: Nothing more can be written to `folder`, since its disk is full or a quota is reached."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        free = shutil.disk_usage(next(filter(Path.exists, (folder, *folder.absolute().parents)))).free
        raise _disk_full(folder, needed_bytes, free, reason=f" ({error.strerror})") from None


@contextmanager
def explain_write_errors(folder: Path, needed_bytes: int) -> Iterator[None]:
    """Turn errors of writing to `folder` into messages that say what to do.

    Raises:
        DiskFull: The disk is full, or a quota is reached.
        EdgeSpecError: Writing is not allowed, or a file would be too large.
    """
    try:
        with explain_full_disk(folder, needed_bytes):
            yield
    except OSError as error:
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
    take_place(folder, place)
    sync(place.parent)


def replace_file(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Write a file at once: it has its old content until it has all of the new one.

    The umask narrows mode, and so does the mode of the old file: nobody else may read it who might not before.
    A link stays one: the file that it leads to is written. A device or a pipe is written to, never replaced.
    Raises OSError, also for a pipe that nobody reads.
    """
    if path.is_symlink():
        path = Path(os.path.realpath(path))
    if not path.name:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if path.exists() and not path.is_file() and not path.is_dir():
        with open(path, "wb", opener=open_read) as device:
            device.write(data)
        return
    with suppress(OSError):  # there is none
        mode &= path.stat().st_mode | 0o600
    with replacing(path, mode) as file:
        file.write(data)


def open_read(path: str, flags: int) -> int:
    """Open a file to write, or a pipe that somebody reads; others would be waited for.

    Raises OSError: It cannot be opened, or nobody reads the pipe.
    """
    if sys.platform == "win32" or not (os.path.exists(path) and stat.S_ISFIFO(os.stat(path).st_mode)):
        return os.open(path, flags, 0o666)
    try:
        pipe = os.open(path, flags | os.O_NONBLOCK)
    except OSError as error:
        words = "it is a pipe that nobody reads" if error.errno == errno.ENXIO else error.strerror
        raise OSError(error.errno, words) from None
    os.set_blocking(pipe, True)
    return pipe


@contextmanager
def replacing(path: Path, mode: int = 0o600) -> Iterator[BinaryIO]:
    """A new file that takes the place of a path at the end of the block, unless that raises."""
    name = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    handle = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), mode)
    try:
        with open(handle, "wb") as file:
            yield file
        take_place(name, path)
    except BaseException:
        name.unlink(missing_ok=True)
        raise


def put_aside(path: Path) -> Path:
    """Give a file the first free name of FILE.bak, FILE.bak1 and so on. Raises OSError: It keeps its name."""
    names = (path.with_name(f"{path.name}.bak{number or ''}") for number in count())
    aside = next(name for name in names if not os.path.lexists(name))
    os.rename(path, aside)
    return aside


def take_place(new: Path, path: Path) -> None:
    """Give a new file or folder its name, and replace the file of that name; on Windows nobody may have them open.

    Other programs, such as one that looks for viruses, have new files open for moments there.
    """
    for wait_s in (0.01, 0.05, 0.2, 0.5, 1.0, 2.0):
        try:
            os.replace(new, path)
            return
        except PermissionError:
            if sys.platform != "win32":
                raise
            sleep(wait_s)
    os.replace(new, path)


def has_content(path: Path) -> bool:
    """True if writing a file would lose its content; false for an empty file, a device and a pipe."""
    return os.path.isfile(path) and os.path.getsize(path) > 0  # no error for a name that no file can have


def sync(path: Path) -> None:
    """Wait until the content of a file, or the names in a folder, have reached the disk."""
    is_folder = path.is_dir()
    with suppress(OSError) if is_folder else nullcontext():  # Windows and some file systems refuse it for folders
        handle = os.open(path, os.O_RDWR if sys.platform == "win32" and not is_folder else os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextmanager
def hold_lock(
    path: Path, on_wait: Callable[[str], None] = lambda holder: None, timeout_s: float = inf
) -> Iterator[None]:
    """Hold the lock named by path, a file that is removed at the end.

    The operating system keeps the lock, the file only says who has it: one that a killed process left is free.

    on_wait: Called with the holder, as in "process 123", before waiting for it.

    Raises:
        OSError: The file cannot be made, is no lock, or its file system knows no locks.
        TimeoutError: The lock is held for longer than timeout_s.
    """
    from filelock import FileLock, Timeout  # 20 ms

    _require_lock(path)
    lock = FileLock(path, thread_local=False, fallback_to_soft=False, on_acquired=_write_holder)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        # Raises where the file cannot be made, for which filelock would wait too.
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o644))
        on_wait(_holder(path))
        try:
            lock.acquire(timeout=timeout_s, poll_interval=_POLL_S)
        except Timeout:
            raise TimeoutError(f"held by {_holder(path)}") from None
    try:
        yield
    finally:
        # While it is still held: who waits for it finds that it has no name any more, and makes another.
        with defer_signals():
            with suppress(OSError):
                path.unlink()
            lock.release()


def is_locked(path: Path) -> bool:
    """True if somebody holds the lock named by path; what a killed program left is removed."""
    try:
        with hold_lock(path, timeout_s=0.0):
            return False
    except TimeoutError:
        return True
    except OSError:
        return False


def _require_lock(path: Path) -> None:
    """Raises OSError: Something else than a lock is there, which would be written over."""
    with suppress(FileNotFoundError):
        found = path.lstat()
        if stat.S_ISLNK(found.st_mode):
            raise OSError(errno.ELOOP, f"{path.name} is a link, not a lock; remove it")
        is_small = stat.S_ISREG(found.st_mode) and found.st_size <= _MOST_BYTES
        if not is_small or found.st_size == 1 or not (holder_digits(path) or b"0").isdigit():
            raise OSError(errno.EEXIST, f"{path.name} is not a lock; remove it")


def _write_holder(file: int) -> None:
    with suppress(OSError):  # a full disk; the lock holds anyway
        os.truncate(file, 0)
        os.write(file, b" %d" % os.getpid())


def _holder(path: Path) -> str:
    with suppress(OSError):
        if (digits := holder_digits(path)).isdigit():
            return f"process {digits.decode()}"
    return "another process"


def holder_digits(path: Path) -> bytes:
    """The bytes after the first one, which Windows locks: b"" while a new holder writes its process id."""
    with path.open("rb", buffering=0) as file:
        file.seek(1)
        return file.read(_MOST_BYTES) or b""
