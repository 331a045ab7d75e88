"""A conversation in a real terminal: typed keys in, screen out."""

import os
import sys
import time
from pathlib import Path

import pytest

pty = pytest.importorskip("pty", reason="pseudo-terminals are POSIX")


class Terminal:
    """edgespec in a pseudo-terminal."""

    def __init__(self, *arguments: object) -> None:
        self.screen = ""
        self.pid, self._file = pty.fork()
        if self.pid == 0:
            os.environ.update(TERM="dumb", PYTHONWARNINGS="ignore")
            os.execv(sys.executable, [sys.executable, "-m", "edgespec", *map(str, arguments)])

    def type(self, text: str) -> None:
        os.write(self._file, text.encode())

    def wait_for(self, text: str, *, after: int = 0) -> int:
        """Read until text shows up; returns the position behind it."""
        deadline = time.monotonic() + 60
        while (at := self.screen.find(text, after)) < 0:
            assert time.monotonic() < deadline, self.screen
            try:
                self.screen += os.read(self._file, 4096).decode(errors="replace")
            except OSError:
                pytest.fail(f"it ended without {text!r}: {self.screen}")
        return at + len(text)

    def exit_code(self) -> int:
        while True:
            try:
                if not os.read(self._file, 4096):
                    break
            except OSError:
                break
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.mark.filterwarnings("ignore:.*forkpty.*")
def test_conversation_survives_ctrl_c_and_ends_at_ctrl_d(tiny_model: Path) -> None:
    terminal = Terminal("chat", tiny_model, "--max-tokens", 400)
    at = terminal.wait_for("> ")
    terminal.type("the in\n")
    at = terminal.wait_for("tokens/s", after=at)
    at = terminal.wait_for("> ", after=at)
    terminal.type("/wrong\n")
    at = terminal.wait_for("/clear forgets", after=at)
    at = terminal.wait_for("> ", after=at)
    terminal.type("\x03")
    at = terminal.wait_for("Ctrl-D leaves", after=at)
    at = terminal.wait_for("> ", after=at)
    terminal.type("/clear\n")
    at = terminal.wait_for("> ", after=at)
    terminal.type("\x04")
    assert terminal.exit_code() == 0
