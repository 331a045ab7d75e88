"""Prints answers as plain text: for pipes, dumb terminals and users who want no colour."""

import os
import shutil
from collections.abc import Callable, Mapping
from threading import Event, Thread
from typing import IO, Protocol, TextIO

from edgespec import Chunk
from edgespec.system.printable import printable

_PROGRESS_S = 0.5


class Printer(Protocol):
    """Shows one answer."""

    def push(self, chunk: Chunk) -> None: ...

    def end(self) -> None:
        """Leave the cursor at the beginning of a line."""


def is_plain(stream: TextIO, environment: Mapping[str, str] = os.environ) -> bool:
    """True if a stream gets text alone: it is no terminal, or a dumb one, or the user wants no colour."""
    is_dumb = environment.get("TERM", "") in ("dumb", "unknown")
    is_terminal = stream.isatty() or bool(environment.get("FORCE_COLOR"))
    return not is_terminal or is_dumb or bool(environment.get("NO_COLOR"))


class PlainPrinter:
    """Prints text as it is; on a terminal, control characters are escaped."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._ends_line = True

    def push(self, chunk: Chunk) -> None:
        if text := chunk.text:
            self._stream.write(printable(text) if self._stream.isatty() else text)
            self._ends_line = text.endswith("\n")
        self._stream.flush()

    def end(self) -> None:
        if not self._ends_line:
            self._stream.write("\n")
        self._stream.flush()


class LastLine:
    """A text on the last line of a terminal, in place of what is not shown yet; another one replaces it."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream, self.text = stream, ""

    def show(self, text: str) -> None:
        if text != self.text:
            erase = f"\r{' ' * len(self.text)}\r" if self.text else ""
            self.text = text
            self._stream.write(erase + text)
            self._stream.flush()


class Waiting:
    """A mark where an answer will begin, and behind it the text of progress, on a terminal that can erase them."""

    def __init__(self, stream: TextIO, progress: Callable[[], str]) -> None:
        self._stream, self._progress = stream, progress
        self._line = LastLine(stream)
        self._is_over = Event()
        self._thread = Thread(target=self._show_progress, name="progress", daemon=True)

    def __enter__(self) -> "Waiting":
        if self._stream.isatty() and not is_plain(self._stream):
            self._line.show("…")
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()

    def end(self) -> None:
        if self._line.text:
            self._is_over.set()
            self._thread.join()
            self._line.show("")

    def _show_progress(self) -> None:
        while not self._is_over.wait(_PROGRESS_S):
            if (text := self._progress()) and len(text) + 2 < shutil.get_terminal_size().columns:
                self._line.show(f"… {text}")
