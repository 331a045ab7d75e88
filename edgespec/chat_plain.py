"""Answers on stdout as they are: for pipes, dumb terminals and those who want no colour."""

import os
from collections.abc import Mapping
from typing import Protocol, TextIO

from edgespec.answers import Chunk
from edgespec.printable import printable


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
    """A mark where an answer will begin, until it does; only on a terminal that can take it away again."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_shown = False

    def begin(self) -> None:
        if self._stream.isatty() and not is_plain(self._stream):
            self._is_shown = True
            self._write("…")

    def end(self) -> None:
        if self._is_shown:
            self._is_shown = False
            self._write("\r \r")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
