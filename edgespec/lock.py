"""One process at a time: a lock that ends with its holder, however that ends."""

import errno
import os
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from math import inf
from pathlib import Path
from time import monotonic, sleep

from edgespec.interrupts import held_back

if sys.platform == "win32":
    import msvcrt

    _FAR_BYTE = 1 << 30  # Windows forbids reading what is locked, so the lock lies past what is written

    def _lock(file: FileIO, *, wait: bool) -> bool:
        file.seek(_FAR_BYTE)
        try:
            msvcrt.locking(file.fileno(), msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)
        except OSError:  # held by another, or still so after ten seconds
            return False
        return True

else:
    import fcntl

    def _lock(file: FileIO, *, wait: bool) -> bool:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            return False
        return True


# O_NONBLOCK: a pipe of that name is opened at once, and refused.
_FLAGS = (
    os.O_RDWR
    | os.O_CREAT
    | os.O_APPEND
    | getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_NONBLOCK", 0)
    | getattr(os, "O_BINARY", 0)
    | getattr(os, "O_CLOEXEC", 0)
)
_MOST_DIGITS = 20
_POLL_S = 0.01  # no system waits for a lock for a time that is given


@contextmanager
def locked(
    path: Path, waiting: Callable[[str], None] = lambda holder: None, patience_s: float = inf
) -> Iterator[None]:
    """Hold the lock named by path, a file that is removed at the end.

    The operating system keeps the lock, the file only says who has it: one that a killed process left is free.

    Args:
        path: In a folder that exists.
        waiting: Told who holds the lock, as in "process 123", before waiting for it.
        patience_s: How long to wait.

    Raises:
        OSError: The file cannot be made, or its file system knows no locks; TimeoutError, which is one, where the
            lock is held for longer than patience_s.
    """
    file = _acquire(path, waiting, monotonic() + patience_s)
    try:
        yield
    finally:
        # While it is still held: who waits for it finds that it has no name any more, and makes another.
        with held_back():
            with suppress(OSError):
                path.unlink()
            file.close()


def _acquire(path: Path, waiting: Callable[[str], None], until_s: float) -> FileIO:
    while True:
        file = _open(path)
        try:
            if not _lock(file, wait=False):
                waiting(_holder(file))
                _await(file, until_s)
            if _is_named(file, path):
                with suppress(OSError):  # a full disk; the lock holds all the same
                    file.truncate(0)
                    file.write(b"%d" % os.getpid())
                return file
        except BaseException:
            file.close()
            raise
        file.close()


def _await(file: FileIO, until_s: float) -> None:
    while not _lock(file, wait=until_s == inf):
        if monotonic() >= until_s:
            raise TimeoutError(f"held by {_holder(file)}")
        if until_s < inf:
            sleep(_POLL_S)


def _open(path: Path) -> FileIO:
    """The file at path, which is none but a lock: it holds digits, or nothing."""
    try:
        handle = os.open(path, _FLAGS, 0o666)
    except OSError as error:
        if not path.is_symlink():
            raise
        raise OSError(error.errno, f"{path.name} is a link and no lock; remove it") from None
    file = FileIO(handle, "a+b")
    status = os.fstat(handle)
    if stat.S_ISREG(status.st_mode) and status.st_size <= _MOST_DIGITS:
        held = _text(file)
        if not held or held.isdigit():
            return file
    file.close()
    raise OSError(errno.EEXIST, f"{path.name} is no lock; remove it")


def _text(file: FileIO) -> bytes:
    file.seek(0)
    return file.read(_MOST_DIGITS) or b""


def _holder(file: FileIO) -> str:
    pid = _text(file)
    return f"process {pid.decode()}" if pid.isdigit() else "another process"


def _is_named(file: FileIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
