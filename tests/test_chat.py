"""A conversation in a real terminal: typed keys in, screen out."""

import os
import select
import signal
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
            signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a background job
            os.environ.update(TERM="dumb", PYTHONWARNINGS="ignore")
            os.execv(sys.executable, [sys.executable, "-m", "edgespec", *map(str, arguments)])

    def type(self, text: str) -> None:
        os.write(self._file, text.encode())

    def wait_for(self, text: str, *, after: int = 0) -> int:
        """Read until text shows up; returns the position behind it."""
        deadline = time.monotonic() + 60
        while (at := self.screen.find(text, after)) < 0:
            assert time.monotonic() < deadline, self.screen
            if not select.select([self._file], [], [], 1)[0]:
                continue
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
    terminal = Terminal("chat", tiny_model, "--max-tokens", 600, "--drafter", "none")
    at = terminal.wait_for("> ")
    terminal.type("the in\n")
    at = terminal.wait_for("the in", after=at)
    at = terminal.wait_for("\n", after=at)
    terminal.type("\x03")
    at = terminal.wait_for("(stopped; Ctrl-D leaves)", after=at)
    at = terminal.wait_for("> ", after=at)
    terminal.type("/clear\n")
    at = terminal.wait_for("> ", after=at)
    terminal.type("an on\n")
    at = terminal.wait_for("tokens/s", after=at)
    at = terminal.wait_for("> ", after=at)
    terminal.type("/wrong\n")
    at = terminal.wait_for("/clear forgets", after=at)
    at = terminal.wait_for("> ", after=at)
    time.sleep(0.3)  # the prompt shows a moment before the line editor takes signals
    terminal.type("\x03")
    at = terminal.wait_for("(stopped; Ctrl-D leaves)", after=at)
    at = terminal.wait_for("> ", after=at)
    terminal.type("\x04")
    assert terminal.exit_code() == 0
