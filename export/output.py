"""A folder that appears complete or not at all, written by one process at a time."""

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from edgespec.errors import UsageError
from edgespec.system.disk import explain_write_errors, install_folder, require_disk_space
from edgespec.system.file_lock import hold_lock
from edgespec.system.signals import defer_signals
from edgespec.types import Report

RESERVE_BYTES = 64 << 20


def require_absent(output: Path) -> None:
    """Raises UsageError: output exists already."""
    if os.path.lexists(output):
        raise UsageError(f"{output} already exists; remove it or choose another --output")


def require_writable(output: Path, needed_bytes: int) -> None:
    """Check, without writing, that needed_bytes can be written to output.

    Raises:
        UsageError: Its parent is not a folder, or may not be written.
        DiskFull: There is no room.
    """
    folder = next(parent for parent in output.absolute().parents if os.path.lexists(parent))
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        what = "it may not be written" if folder.is_dir() else "it is not a folder"
        raise UsageError(f"cannot write to {folder}: {what}; choose another --output")
    require_disk_space(folder, needed_bytes, RESERVE_BYTES)


@contextmanager
def atomic_folder(output: Path, needed_bytes: int = 0, report: Report = lambda line: None) -> Iterator[Path]:
    """A temporary sibling of output that takes its place on success and vanishes on failure.

    Raises:
        UsageError: Output exists already, or cannot be written.
        DiskFull: There is no room for needed_bytes.
    """
    with _lock_output(output, report):
        require_absent(output)
        folder = output.with_name(f".{output.name}.partial")
        if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
            raise UsageError(f"{folder} is in the way and not a folder; remove it or choose another --output")
        shutil.rmtree(folder, ignore_errors=True)  # left by an export that was killed: the lock excludes others
        try:
            with explain_write_errors(output.parent, needed_bytes):
                folder.mkdir()
                require_disk_space(folder, needed_bytes, RESERVE_BYTES)
                yield folder
                try:
                    install_folder(folder, output)
                except OSError:
                    require_absent(output)  # made by hand: every export holds the lock
                    raise
        finally:
            with defer_signals():  # else a second Ctrl-C, or one that is passed on, leaves a part of the folder
                shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _remove_new_parents(output: Path) -> Iterator[None]:
    """Remove, after a failure, the empty folders above output that did not exist before."""
    missing = [parent for parent in output.parents if not os.path.lexists(parent)]
    try:
        yield
    except BaseException:
        with defer_signals(), suppress(OSError):  # another process has begun to use them
            for parent in missing:
                parent.rmdir()
        raise


@contextmanager
def _lock_output(output: Path, report: Report) -> Iterator[None]:
    with _remove_new_parents(output), ExitStack() as stack:
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            lock = hold_lock(
                output.with_name(f".{output.name}.lock"),
                lambda holder: report(f"{holder} is exporting to {output}; waiting for it"),
            )
            stack.enter_context(lock)
        except OSError as error:
            raise UsageError(
                f"cannot write to {output.parent}: {error.strerror}; choose another --output"
            ) from None
        yield
