"""One process at a time: a lock that ends with its holder, however that ends."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

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


@contextmanager
def locked(path: Path, waiting: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock named by path, a file that is removed at the end.

    The operating system keeps the lock, the file only says who has it: one that a killed process left is free.

    Args:
        path: In a folder that exists.
        waiting: Told who holds the lock, as in "process 123", before waiting for it.

    Raises:
        OSError: The file cannot be made, or its file system knows no locks.
    """
    file = _acquire(path, waiting)
    try:
        yield
    finally:
        # While it is still held: who waits for it finds that it has no name any more, and makes another.
        with suppress(OSError):
            path.unlink()
        file.close()


def _acquire(path: Path, waiting: Callable[[str], None]) -> FileIO:
    while True:
        file = path.open("a+b", buffering=0)
        try:
            if not _lock(file, wait=False):
                waiting(_holder(file))
                while not _lock(file, wait=True):
                    pass
            if _is_named(file, path):
                with suppress(OSError):  # a full disk; the lock holds all the same
                    file.truncate(0)
                    file.write(b"%d" % os.getpid())
                return file
        except BaseException:
            file.close()
            raise
        file.close()


def _holder(file: FileIO) -> str:
    file.seek(0)
    pid = file.read(20)
    return f"process {pid.decode()}" if pid.isdigit() else "another process"


def _is_named(file: FileIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
