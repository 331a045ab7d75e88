"""Counts of answers, tokens and saved time by day, model and device, in one file of the model home; no text.

Counts wait in memory; a thread adds them to the file some seconds later, and the end of the engine the rest.
"""

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import astuple, dataclass
from datetime import date, timedelta
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Annotated, NamedTuple

from msgspec import Meta, to_builtins

from edgespec.errors import EdgeSpecError
from edgespec.system.disk import hold_lock, replace_file
from edgespec.system.typed_json import read_as, read_versioned
from edgespec.types import Report

_FILE_NAME = "usage.json"
_LOCK_NAME = "usage.lock"
_VERSION = 1
_LARGEST_BYTES = 1 << 23
_PAUSE_S = 5.0  # at least this long between two writes
_LOCK_S = 5.0
_DAYS = 92  # that stay apart; earlier ones are added up by month

_Count = Annotated[int, Meta(ge=0, le=1 << 60)]


@dataclass(frozen=True, slots=True)
class Usage:
    """Sums over answers.

    answers: How many.
    measured: Of these, those whose gain by drafting is known, and those without a draft.
    tokens: That were written.
    accepted: Of these, those that drafts had right.
    decode_s: Seconds of the measured answers, after the first token of each.
    saved_s: What plain decoding would have taken longer for them; below 0 where drafting lost time.
    """

    answers: _Count = 0
    measured: _Count = 0
    tokens: _Count = 0
    accepted: _Count = 0
    decode_s: float = 0.0
    saved_s: float = 0.0

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


class UsageKey(NamedTuple):
    """Whose counts these are; day is 2026-11-27, or 2026-08 for a whole month."""

    day: str
    model: str
    device: str


UsageTable = Mapping[UsageKey, Usage]


@dataclass(frozen=True)
class UsageFile:
    """The counts of all processes, which take turns to change them, in a model home."""

    home: Path

    @property
    def path(self) -> Path:
        return self.home / _FILE_NAME

    def read(self) -> dict[UsageKey, Usage]:
        """Empty where nothing was counted yet. Raises EdgeSpecError: The file cannot be read or used."""
        try:
            document = read_versioned(self.path, _VERSION, _LARGEST_BYTES)
            return dict(read_as(list[tuple[UsageKey, Usage]], document.get("counts")))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise EdgeSpecError(
                f"{self.path} cannot be used ({why}), so nothing is counted; to delete it: edgespec stats --delete"
            ) from None

    def add(self, counted: UsageTable, today: date) -> None:
        """Add counts to the file. Raises EdgeSpecError: That is impossible, and nothing was added."""
        first_day = str(today - timedelta(_DAYS))
        try:
            self.home.mkdir(parents=True, exist_ok=True)
            with self._locked():
                table: dict[UsageKey, Usage] = {}
                for key, usage in [*self.read().items(), *counted.items()]:
                    kept = key if key.day >= first_day else key._replace(day=key.day[:7])
                    table[kept] = table.get(kept, Usage()) + usage
                rows = [[key, to_builtins(usage)] for key, usage in sorted(table.items())]
                replace_file(self.path, json.dumps({"version": _VERSION, "counts": rows}).encode())
        except OSError as error:
            raise EdgeSpecError(
                f"{self.path} cannot be written ({error.strerror or error}): edgespec stats does not count the "
                "last answers"
            ) from None

    def delete(self) -> bool:
        """Forget all counts; true if there were some. Raises EdgeSpecError: The file cannot be removed."""
        try:
            with self._locked():
                self.path.unlink()
        except FileNotFoundError:
            return False
        except OSError as error:
            raise EdgeSpecError(f"{self.path} cannot be removed ({error.strerror or error})") from None
        return True

    def _locked(self) -> AbstractContextManager[None]:
        return hold_lock(self.home / _LOCK_NAME, timeout_s=_LOCK_S)


class UsageCounter:
    """Counts the answers of one engine. Any thread may use it."""

    def __init__(self, file: UsageFile, model: str, device: str, report: Report) -> None:
        """Count nothing yet; report takes why counts are not stored, once."""
        self._file, self._model, self._device, self._report = file, model, device, report
        self._waiting: dict[UsageKey, Usage] = {}
        self._lock, self._writing = Lock(), Lock()
        self._is_closed, self._has_failed, self._is_due = Event(), False, False

    def count(self, usage: Usage) -> None:
        """Note an answer, without waiting for the disk."""
        key = UsageKey(str(date.today()), self._model, self._device)
        with self._lock:
            self._waiting[key] = self._waiting.get(key, Usage()) + usage
            is_first, self._is_due = not self._is_due, True
        if is_first:
            Thread(target=self._write_later, name="usage", daemon=True).start()

    def close(self) -> None:
        """Store what is counted."""
        self._is_closed.set()
        self._write()

    def _write_later(self) -> None:
        self._is_closed.wait(_PAUSE_S)
        self._write()

    def _write(self) -> None:
        with self._writing:  # also to wait for the thread at the end
            with self._lock:
                counted, self._waiting, self._is_due = self._waiting, {}, False
            if not counted:
                return
            try:
                self._file.add(counted, date.today())
            except EdgeSpecError as error:
                with self._lock:
                    for key, usage in counted.items():
                        self._waiting[key] = self._waiting.get(key, Usage()) + usage
                if not self._has_failed:
                    self._has_failed = True
                    self._report(str(error))
