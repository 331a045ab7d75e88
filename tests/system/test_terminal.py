"""The terminal of a process, and what waits on its streams."""

import os
import sys

import pytest

from edgespec.system import terminal
from edgespec.system.terminal import has_unread_data, terminal_modes, unseen_keys


def test_only_what_waits_in_a_pipe_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    with open(reading) as pipe, open(writing, "w") as writer, open(os.devnull) as null:
        assert not has_unread_data(pipe)
        writer.write("x")
        writer.flush()
        assert has_unread_data(pipe) == (sys.platform != "win32")
        assert not has_unread_data(null)
        monkeypatch.setattr(sys, "platform", "win32")  # which does not say
        assert not has_unread_data(pipe)


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal, which Windows lacks")
def test_keys_are_unseen_and_the_terminal_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    import termios

    controller, shown = os.openpty()
    with open(controller, "w"), open(shown) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        before = terminal_modes()
        assert before is not None
        with unseen_keys():
            assert not termios.tcgetattr(shown)[3] & termios.ECHO
        assert terminal_modes() == before
        monkeypatch.setattr(terminal, "is_in_foreground", lambda: True)
        with unseen_keys():
            terminal.restore_terminal(before)
            assert terminal_modes() == before
        monkeypatch.setattr(sys, "platform", "win32")
        assert terminal_modes() is None
        with unseen_keys():
            pass


@pytest.mark.skipif(not hasattr(os, "setsid"), reason="needs setsid, which Windows lacks")
def test_a_process_without_a_terminal_is_not_in_its_foreground() -> None:
    import subprocess

    program = "from edgespec.system.terminal import is_in_foreground; print(is_in_foreground())"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, start_new_session=True, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
