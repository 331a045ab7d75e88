"""A folder that is there whole or not at all, made by one process at a time."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from edgespec.disk import expect_room, install, writing
from edgespec.errors import UsageError
from edgespec.interrupts import held_back
from edgespec.lock import locked

RESERVE_BYTES = 64 << 20
Report = Callable[[str], None]


def expect_nothing(output: Path) -> None:
    """Raises UsageError: something is in the way of output."""
    if os.path.lexists(output):
        raise UsageError(f"{output} already exists; remove it or choose another --output")


def expect_possible(output: Path, needed_bytes: int) -> None:
    """Look, without writing, whether needed_bytes can be written to output.

    Raises:
        UsageError: Its folder is none, or may not be written.
        DiskFull: There is no room.
    """
    folder = next(parent for parent in output.absolute().parents if os.path.lexists(parent))
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        what = "it may not be written" if folder.is_dir() else "it is no folder"
        raise UsageError(f"cannot write to {folder}: {what}; choose another --output")
    expect_room(folder, needed_bytes, RESERVE_BYTES)


@contextmanager
def folder_in_the_making(
    output: Path, needed_bytes: int = 0, report: Report = lambda line: None
) -> Iterator[Path]:
    """A temporary sibling of output that takes its place on success and vanishes on failure.

    Raises:
        UsageError: Something is at output already, or it cannot be written.
        DiskFull: There is no room for needed_bytes.
    """
    with _alone(output, report):
        expect_nothing(output)
        folder = output.with_name(f".{output.name}.partial")
        if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
            raise UsageError(f"{folder} is in the way and no folder; remove it or choose another --output")
        shutil.rmtree(folder, ignore_errors=True)  # of an export that was killed: no other can be under way
        try:
            with writing(output.parent, needed_bytes):
                folder.mkdir()
                expect_room(folder, needed_bytes, RESERVE_BYTES)
                yield folder
                _install(folder, output)
        finally:
            with held_back():  # else a second Ctrl-C, or one that is passed on, leaves a part of it
                shutil.rmtree(folder, ignore_errors=True)


def _install(folder: Path, output: Path) -> None:
    try:
        install(folder, output)
    except OSError:
        expect_nothing(output)  # by hand, for every export holds the lock
        raise


@contextmanager
def _parents_taken_back(output: Path) -> Iterator[None]:
    """After a failure, without the empty folders above output that were not there before."""
    missing = [parent for parent in output.parents if not os.path.lexists(parent)]
    try:
        yield
    except BaseException:
        with held_back(), suppress(OSError):  # another process has begun to use them
            for parent in missing:
                parent.rmdir()
        raise


@contextmanager
def _alone(output: Path, report: Report) -> Iterator[None]:
    """Hold the lock of output."""
    with ExitStack() as stack:
        stack.enter_context(_parents_taken_back(output))
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            lock = locked(
                output.with_name(f".{output.name}.lock"),
                lambda holder: report(f"{holder} is exporting to {output}; waiting for it"),
            )
            stack.enter_context(lock)
        except OSError as error:
            raise UsageError(
                f"cannot write to {output.parent}: {error.strerror}; choose another --output, or EDGESPEC_HOME "
                "for models that are prepared on first use"
            ) from None
        yield
