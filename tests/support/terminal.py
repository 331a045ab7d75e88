"""edgespec in a pseudo-terminal: typed keys in, a screen as a person sees it out."""

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pexpect
import psutil
import pyte

COLUMNS, ROWS = 80, 30
_WAIT_S, _MOST_BUSY = 120, 10.0
_BRACKETED = 2004 << 5  # as pyte counts the modes that are private
UP, ALT_ENTER, CTRL_C, CTRL_D, CTRL_J, CTRL_U = "\x1b[A", "\x1b\r", "\x03", "\x04", "\n", "\x15"


class Terminal:
    """A program in a terminal of its own, and the text that it wrote."""

    def __init__(
        self,
        *arguments: object,
        home: Path,
        environment: Mapping[str, str] | None = None,
        program: Sequence[str] = (sys.executable, "-m", "edgespec"),
    ) -> None:
        inherited = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
        settings = {"TERM": "xterm-256color", "EDGESPEC_HOME": str(home), "PYTHONWARNINGS": "ignore"}
        self.process: Any = pexpect.spawn(
            program[0],
            [*program[1:], *map(str, arguments)],
            env={**inherited, **settings, **(environment or {})},
            dimensions=(ROWS, COLUMNS),
            encoding="utf-8",
            codec_errors="replace",
            timeout=_WAIT_S,
        )
        self.process.delaybeforesend = None
        self._display = pyte.Screen(COLUMNS, ROWS)
        self._stream = pyte.Stream(self._display)
        self.written = ""
        self.tells_cursor = True  # where it is, when asked for it
        self.position = 0  # in what was written, behind the last text that was waited for

    def type(self, text: str) -> None:
        self.process.send(text)

    def enter(self, text: str) -> None:
        self.process.send(text + "\r")

    def paste(self, text: str) -> None:
        """Paste like a terminal: in brackets where the program has asked for them, else as typed lines."""
        is_bracketed = _BRACKETED in self._display.mode
        self.process.send(f"\x1b[200~{text}\x1b[201~" if is_bracketed else text.replace("\n", "\r"))

    def resize(self, columns: int, rows: int) -> None:
        self.process.setwinsize(rows, columns)
        self._display.resize(rows, columns)

    def wait_for(self, text: str, *, after: int | None = None) -> int:
        """Read until text is written behind a position, by default the last one; return its end."""
        deadline = time.monotonic() + _WAIT_S
        start = self.position if after is None else after
        while (at := self.written.find(text, start)) < 0:
            assert time.monotonic() < deadline, f"no {text!r} on\n{self.screen()}"
            assert self._read(1.0), f"it ended without {text!r}:\n{self.screen()}"
        self.position = at + len(text)
        return self.position

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        """Read until something holds that is no text of it."""
        deadline = time.monotonic() + _WAIT_S
        while not is_so():
            assert time.monotonic() < deadline, f"it did not happen:\n{self.screen()}"
            assert self._read(0.05), f"it ended before:\n{self.screen()}"

    def ready(self, *, after: int | None = None) -> int:
        """Read until it asks for input: where the cursor is, and that pasted text be bracketed."""
        return self.wait_for("\x1b[6n\x1b[?2004h", after=after)

    def ask(self, text: str, expected: str = "") -> None:
        """Enter a line, wait for its answer, and for the next prompt."""
        self.enter(text)
        self.wait_for(expected)
        self.ready()

    def leave(self) -> None:
        self.type(CTRL_D)
        assert self.exit_code() == 0

    def see(self, text: str) -> str:
        """Read until a text stands on the screen; return the screen."""
        self.wait_until(lambda: text in self.screen())
        return self.screen()

    def settle(self, quiet_s: float = 0.3) -> str:
        """Read until nothing more is written, for longer where the machine is busy; return the screen."""
        quiet_s *= min(max(1.0, psutil.getloadavg()[0] / (os.cpu_count() or 1)), _MOST_BUSY)
        before = -1
        while before != len(self.written):
            before = len(self.written)
            if not self._read(quiet_s):
                break
        return self.screen()

    def screen(self) -> str:
        return "\n".join(line.rstrip() for line in self._display.display).strip()

    def exit_code(self) -> int:
        """Wait until it ends, but no longer than for a text."""
        deadline = time.monotonic() + _WAIT_S
        while self._read(1.0):
            if time.monotonic() > deadline:
                self.process.close(force=True)
                raise AssertionError(f"it does not end:\n{self.screen()}")
        self.process.close()
        return self.process.exitstatus if self.process.exitstatus is not None else -self.process.signalstatus

    def _read(self, wait_s: float) -> bool:
        """Read a piece, if one comes in time; return whether it still runs."""
        try:
            piece = self.process.read_nonblocking(65536, timeout=wait_s)
        except pexpect.TIMEOUT:
            return True
        except pexpect.EOF:
            return False
        self.written += piece
        self._stream.feed(piece)
        if "\x1b[6n" in piece and self.tells_cursor:
            self.type(f"\x1b[{self._display.cursor.y + 1};{self._display.cursor.x + 1}R")
        return True


def latest_chat(folder: Path) -> Path | None:
    """The conversation in a folder that was written last, also by a chat that still runs."""
    return max(folder.glob("*.jsonl"), key=lambda path: path.stat().st_mtime_ns, default=None)
