"""The use of the models of a home: when each was loaded last, and which programs have it or a download open."""

import os
import secrets
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from edgespec.system.command_line import join_words
from edgespec.system.context_managers import contextmanager
from edgespec.system.disk import hold_lock, is_locked
from edgespec.system.printable import one_line

_BEFORE_PROCESS, _ENDING = "@", ".lock"  # in the name of a mark; names of models and downloads have no @
_MOST = 80  # characters of a command


@dataclass(frozen=True, slots=True)
class ModelUses:
    """A mark for each model that was loaded, and one more for each time that it is open, held by a lock."""

    models: Path

    @property
    def _marks(self) -> Path:
        return self.models.with_name("used")

    @contextmanager
    def hold(self, folder: Path) -> Iterator[None]:
        """Mark a model of the home as open within the block, if the home can be written to."""
        with ExitStack() as held:
            with suppress(OSError, ValueError):
                self.mark(name := folder.absolute().relative_to(self.models.absolute()).parts[0])
                held.enter_context(hold_mark(self._marks / name))
            yield

    def mark(self, name: str) -> None:
        """Record that a model was loaded now, if the home can be written to."""
        with suppress(OSError):
            self._marks.mkdir(exist_ok=True)
            (self._marks / name).touch()

    def last(self, name: str) -> float | None:
        """The time at which a model was last loaded, in seconds of the epoch."""
        with suppress(OSError):
            return (self._marks / name).stat().st_mtime
        return None

    def forget(self, name: str) -> None:
        with suppress(OSError):
            (self._marks / name).unlink()

    def holder(self, name: str) -> str | None:
        """The program that has a model open, as find_holder says it."""
        return find_holder(self._marks / name)


def hold_mark(path: Path) -> AbstractContextManager[None]:
    """Mark a path as used within the block. Raises OSError: The folder that it is in cannot be written."""
    name = f"{path.name}{_BEFORE_PROCESS}{os.getpid()}-{secrets.token_hex(4)}{_ENDING}"
    return hold_lock(path.with_name(name), timeout_s=0.0)


def find_holder(path: Path) -> str | None:
    """A program that has marked a path, as in "process 12 (edgespec serve tiny)"; None where none has."""
    for mark in path.parent.iterdir() if path.parent.is_dir() else ():
        name, _, rest = mark.name.rpartition(_BEFORE_PROCESS)
        if name == path.name and is_locked(mark):
            return _describe(int(rest.partition("-")[0]))
    return None


def _describe(process_id: int) -> str:
    import psutil

    with suppress(psutil.Error):
        words = psutil.Process(process_id).cmdline()
        named = [*(Path(word).name for word in words[:2]), *words[2:]]  # the interpreter and the program
        return f"process {process_id} ({one_line(join_words(named), _MOST)})"
    return f"process {process_id}"
