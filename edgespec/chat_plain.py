"""Answers on stdout as they are: for pipes, dumb terminals and those who want no colour."""

import os
import shutil
from collections.abc import Callable, Mapping
from threading import Event, Thread
from typing import Protocol, TextIO

from edgespec.answers import Chunk
from edgespec.printable import printable

_TELL_S = 0.5  # so often what is waited for is told anew


class Printer(Protocol):
    """Shows one answer."""

    def push(self, chunk: Chunk) -> None: ...

    def end(self) -> None:
        """The cursor is at the beginning of a line then."""
        ...


def is_plain(stream: TextIO, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a stream gets text alone: it is no terminal, or a dumb one, or the user wants no colour."""
    is_dumb = environment.get("TERM", "") in ("dumb", "unknown")
    is_terminal = stream.isatty() or bool(environment.get("FORCE_COLOR"))
    return not is_terminal or is_dumb or bool(environment.get("NO_COLOR"))


class PlainPrinter:
    """Text as it is; on a terminal what would steer it is escaped."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._ends_line = True

    def push(self, chunk: Chunk) -> None:
        if text := chunk.text:
            self._stream.write(printable(text) if self._is_terminal else text)
            self._ends_line = text.endswith("\n")
        self._stream.flush()

    def end(self) -> None:
        if not self._ends_line:
            self._stream.write("\n")
        self._stream.flush()


class Waiting:
    """A mark where an answer will begin, until it does; only on a terminal that can take it away again.

    progress: What to say behind the mark, asked for twice a second in a thread of its own; "" for nothing.
    """

    def __init__(self, stream: TextIO, progress: Callable[[], str] = str) -> None:
        self._stream, self._progress = stream, progress
        self._shown = ""
        self._is_over = Event()
        self._teller = Thread(target=self._tell, name="progress", daemon=True)

    def begin(self) -> None:
        if self._stream.isatty() and not is_plain(self._stream):
            self._show("…")
            self._teller.start()

    def end(self) -> None:
        if self._shown:
            self._is_over.set()
            self._teller.join()
            self._show("")

    def _tell(self) -> None:
        while not self._is_over.wait(_TELL_S):
            if (words := self._progress()) and len(words) + 2 < shutil.get_terminal_size().columns:
                self._show(f"… {words}")

    def _show(self, text: str) -> None:
        if text == self._shown:
            return
        erased = f"\r{' ' * len(self._shown)}\r" if self._shown else ""
        self._shown = text
        self._stream.write(erased + text)
        self._stream.flush()
