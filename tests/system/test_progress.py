"""What a terminal shows of a loading that a program began, and that nothing else does."""

import io
import logging
import re
import sys

import pytest

from edgespec.system.progress import LoadProgress, TerminalLines


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(logging.getLogger("edgespec"), "disabled", True)  # a test before may have it listen
    lines = TerminalLines()
    lines.report("fetching a.bin")
    for done in (0, 1, 50, 51, 100):
        lines.progress(LoadProgress("download", "a.bin", done, 100))
    lines.progress(LoadProgress("open", "a", 1, 2))
    lines.report("ready")
    return stream.getvalue()


def test_a_terminal_has_one_line_of_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """By blanks: an older console of Windows prints the codes of terminals as characters."""
    assert re.split(r"\r +\r", shown(Terminal(), monkeypatch)) == [
        "fetching a.bin\ndownload a.bin: 0 %",
        "download a.bin: 1 %",
        "download a.bin: 50 %",
        "download a.bin: 51 %",
        "ready\n",
    ]


def test_a_line_of_wide_characters_is_erased_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream := Terminal())
    lines = TerminalLines()
    for done in (1, 2):
        lines.progress(LoadProgress("export", "通义", done, 2))
    assert stream.getvalue() == f"export 通义: 50 %\r{' ' * 17}\r"


def test_a_program_without_a_console_loads_in_silence(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    closed = io.StringIO()
    closed.close()
    for stream in (None, closed):
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setattr(logging.getLogger("edgespec"), "disabled", True)
        lines = TerminalLines()
        lines.report("fetching a.bin")
        lines.progress(LoadProgress("download", "a.bin", 1, 2))
    assert capfd.readouterr() == ("", "")


def test_a_file_or_pipe_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(io.StringIO(), monkeypatch) == ""
