"""A lock between processes and threads, which ends with its holder, however that ends."""

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from math import inf
from pathlib import Path

from edgespec.system.signals import defer_signals

_MOST_BYTES = 20
_POLL_S = 0.01


@contextmanager
def hold_lock(
    path: Path, on_wait: Callable[[str], None] = lambda holder: None, timeout_s: float = inf
) -> Iterator[None]:
    """Hold the lock named by path, a file that is removed at the end.

    The operating system keeps the lock, the file only says who has it: one that a killed process left is free.

    Args:
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
        _require_file(path)
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


def _require_lock(path: Path) -> None:
    """Raises OSError: Something else than a lock is there, which would be written over."""
    with suppress(FileNotFoundError):
        found = path.lstat()
        if stat.S_ISLNK(found.st_mode):
            raise OSError(errno.ELOOP, f"{path.name} is a link and no lock; remove it")
        is_small = stat.S_ISREG(found.st_mode) and found.st_size <= _MOST_BYTES
        if not is_small or found.st_size == 1 or not (_digits(path) or b"0").isdigit():
            raise OSError(errno.EEXIST, f"{path.name} is no lock; remove it")


def _require_file(path: Path) -> None:
    """Make the file, unless it is there; raises OSError: it cannot be made, for which filelock would wait too."""
    os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o644))


def _write_holder(file: int) -> None:
    with suppress(OSError):  # a full disk; the lock holds anyway
        os.truncate(file, 0)
        os.write(file, b" %d" % os.getpid())


def _holder(path: Path) -> str:
    with suppress(OSError):
        if (digits := _digits(path)).isdigit():
            return f"process {digits.decode()}"
    return "another process"


def _digits(path: Path) -> bytes:
    """The bytes after the first one, which Windows locks: b"" while a new holder writes its process id."""
    with path.open("rb", buffering=0) as file:
        file.seek(1)
        return file.read(_MOST_BYTES) or b""
