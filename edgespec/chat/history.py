"""The lines that a user typed, in a file, for the next chat."""

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from prompt_toolkit.history import History

_MAX_BYTES = 1 << 20


class HistoryFile(History):
    """Typed lines in a file for its owner alone, a JSON text a line. If it fails, they stay in memory."""

    def __init__(self, path: Path, report: Callable[[str], None]) -> None:
        super().__init__()
        self._path, self._report = path, report
        self._has_failed = False

    def load_history_strings(self) -> Iterable[str]:
        """Return the lines of the file's end, the newest first."""
        try:
            with self._path.open("rb") as file:
                file.seek(max(0, self._path.stat().st_size - _MAX_BYTES))
                lines = file.read(_MAX_BYTES).split(b"\n")
        except FileNotFoundError:
            return []
        except OSError as error:
            self._report_once("read", error)
            return []
        return [text for line in reversed(lines) if (text := _parse(line))]

    def store_string(self, string: str) -> None:
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            with os.fdopen(handle, "ab") as file:
                file.write(json.dumps(string).encode() + b"\n")
        except OSError as error:
            self._report_once("write", error)

    def _report_once(self, act: str, error: OSError) -> None:
        if not self._has_failed:
            self._has_failed = True
            self._report(f"what you type is not saved: cannot {act} {self._path} ({error.strerror})")


def _parse(line: bytes) -> str | None:
    try:
        text = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return text if isinstance(text, str) else None
