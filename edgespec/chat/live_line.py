"""A line below the text that is being written to a terminal, taken away before more text and at the end.

The text is written as it would be without the line. Nothing above the cursor is touched, so a window may change
its size at any time: all that is below the cursor is erased with the line.
"""

import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from io import TextIOBase
from time import monotonic
from typing import TextIO, cast

import psutil
from rich.cells import cell_len

from edgespec import Chunk, UsageError
from edgespec.chat.plain import is_plain
from edgespec.chat.session import ChatSession
from edgespec.config.drafter_names import TEXT
from edgespec.system.clock import Clock
from edgespec.system.context_managers import contextmanager
from edgespec.system.printable import one_line
from edgespec.system.units import format_bytes, format_speed

_TARGET = "target"
# Drafters that run no model, and so have no device of their own.
_WITHOUT_MODEL = (*TEXT, "answers", "lookahead", _TARGET)
_MIN_COLUMNS, _MIN_ROWS = 20, 4
_RENEW_S = 0.25  # more often than this nobody can read it
_TAB = 8
_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")
# Terminals that know this draw all in between at once; others ignore it.
_BEGIN_UPDATE, _END_UPDATE = "\x1b[?2026h", "\x1b[?2026l"
_ERASE_BELOW = "\x1b[J"
# One row down, in the same column and scrolling if need be, and up again: there is a row below now.
_MAKE_ROOM = "\x1bD\x1b[A"
_SAVE_CURSOR, _RESTORE_CURSOR = "\x1b7", "\x1b8"
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


@dataclass
class LiveFigures:
    """A fold over the chunks of an answer. What drafting gains is not in it: that is known at the end.

    devices: Of the target and of a drafter model.
    memory_bytes: Resident memory of this process, which holds the model.
    """

    devices: tuple[str, str]
    memory_bytes: Callable[[], int] = lambda: int(psutil.Process().memory_info().rss)
    clock: Clock = monotonic
    _counts: Counter[str] = field(default_factory=Counter)
    _began_s: float | None = None  # when the first tokens came, which read the prompt
    _num_first: int = 0
    _last_s: float = 0.0

    def add(self, chunk: Chunk) -> None:
        if not chunk.token_ids:
            return
        self._counts.update(chunk.origins)
        self._last_s = self.clock()
        if self._began_s is None:
            self._began_s, self._num_first = self._last_s, len(chunk.token_ids)

    def format_line(self, columns: int) -> str:
        """The figures in at most so many columns; the parts that matter most come first, and are whole."""
        memory = f"memory {format_bytes(self.memory_bytes())}"
        line = ""
        for forms in ((self._speed(),), self._drafted(), (self._devices(),), (memory,)):
            longer = [f"{line} · {part}" if line else part for part in forms]
            fitting = [each for each in longer if cell_len(each) <= columns]
            if not fitting:
                break
            line = fitting[0]
        return line

    def _speed(self) -> str:
        taken_s = self._last_s - (self._began_s or 0.0)
        num = self._counts.total() - self._num_first
        return f"{format_speed(num / taken_s, 0)} tokens/s" if num and taken_s > 0 else "first tokens"

    def _drafted(self) -> tuple[str, ...]:
        """Who drafted which share of the tokens; a second form is shorter."""
        total = self._counts.total()
        shares = [
            f"{one_line(name, 20)} {count / total:.0%}"
            for name, count in self._counts.most_common()
            if name != _TARGET
        ]
        names = ", ".join(shares)
        return (f"drafted: {names}", names) if shares else ("nothing drafted",)

    def _devices(self) -> str:
        has_lane = any(name not in _WITHOUT_MODEL for name in self._counts)
        return f"{self.devices[0]}, drafter lane {self.devices[1]}" if has_lane else self.devices[0]


class LiveLine(TextIOBase):
    """A stream to a terminal with a line below its text, drawn again after each flush."""

    def __init__(
        self,
        stream: TextIO,
        format_line: Callable[[int], str],
        size: Callable[[], os.terminal_size],
        clock: Clock = monotonic,
    ) -> None:
        """format_line gets the columns that the line may have."""
        self._stream, self._format, self._size, self._clock = stream, format_line, size, clock
        self._line, self._columns, self._due_s = "", 0, 0.0
        self._is_shown = self._is_updating = self._is_over = False
        self._column = 0  # of the cursor, in a line that no window breaks
        self._is_ascii = True  # that line, so that it is known where a window breaks it

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self._erase()
        self._follow(text)
        return self._stream.write(text)

    def flush(self) -> None:
        if not self._is_over:
            self._draw()
        self._stream.flush()

    def renew(self) -> None:
        """Draw the line again if it is due and no text has done so."""
        if self._is_shown and self._clock() >= self._due_s:
            self._erase()
            self.flush()

    def take_away(self) -> None:
        self._erase()
        self._is_over = True
        self._end_update()
        self._stream.flush()

    def _erase(self) -> None:
        if self._is_shown:
            self._begin_update()
            self._stream.write(_ERASE_BELOW)
            self._is_shown = False

    def _draw(self) -> None:
        columns, rows = self._size()
        has_room = columns >= _MIN_COLUMNS and rows >= _MIN_ROWS
        if has_room and not self._is_at_edge(columns) and not self._is_shown:
            now_s = self._clock()
            if now_s >= self._due_s or columns != self._columns:
                self._line, self._columns, self._due_s = self._format(columns - 1), columns, now_s + _RENEW_S
            self._begin_update()
            self._stream.write(f"{_MAKE_ROOM}{_SAVE_CURSOR}\x1b[B\r{_DIM}{self._line}{_PLAIN}{_RESTORE_CURSOR}")
            self._is_shown = True
        self._end_update()

    def _is_at_edge(self, columns: int) -> bool:
        # In the last column a terminal waits with the break for the next character, and forgets that if moved.
        return self._column >= columns and (not self._is_ascii or self._column % columns == 0)

    def _begin_update(self) -> None:
        if not self._is_updating:
            self._stream.write(_BEGIN_UPDATE)
            self._is_updating = True

    def _end_update(self) -> None:
        if self._is_updating:
            self._stream.write(_END_UPDATE)
            self._is_updating = False

    def _follow(self, text: str) -> None:
        *before, last = _CONTROL.sub("", text).replace("\r", "\n").split("\n")
        column = 0 if before else self._column
        self._is_ascii = (self._is_ascii or bool(before)) and last.isascii() and "\t" not in last
        for i, part in enumerate(last.split("\t")):
            if i:
                column += _TAB - column % _TAB
            column += cell_len(part)
        self._column = column


@contextmanager
def live_line(
    session: ChatSession, stream: TextIO, chunks: Iterable[Chunk]
) -> Iterator[tuple[TextIO, Iterable[Chunk]]]:
    """Show live figures below an answer if the chat is to, and the stream is a terminal that can erase them.

    Yields where the text is to be written, and the chunks of the answer.
    """
    if not session.shows_figures or is_plain(stream) or not stream.isatty() or sys.platform == "win32":
        yield stream, chunks
        return
    figures = LiveFigures(session.engine.device_names)
    line = LiveLine(stream, figures.format_line, lambda: os.get_terminal_size(stream.fileno()))

    def watched() -> Iterator[Chunk]:
        for chunk in chunks:
            figures.add(chunk)
            yield chunk
            line.renew()

    try:
        yield cast(TextIO, line), watched()
    finally:
        line.take_away()


def switch_figures(session: ChatSession, argument: str) -> str:
    """Show live figures from the next answer on, or no longer; return a line that says so."""
    if argument not in ("on", "off"):
        raise UsageError(f"/stats takes on, off or no argument, not '{one_line(argument, 40)}'")
    session.shows_figures = argument == "on"
    return "figures are shown below answers now" if session.shows_figures else "figures are no longer shown"
