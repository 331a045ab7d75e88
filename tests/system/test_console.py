"""Lines for a person on stderr: progress is one line of a terminal, and nothing elsewhere."""

import io
import itertools
import logging
import re
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from edgespec.errors import EdgeSpecError
from edgespec.system import console
from edgespec.system.console import info, lines_wait, log_to_stderr, print_result, show_progress, warn
from edgespec.system.progress import TERMINAL


class _Screen(io.StringIO):
    """A stream that may be a terminal, and the lines that somebody sees on it."""

    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal

    @property
    def lines(self) -> list[str]:
        shown = []
        for line in self.getvalue().split("\n"):
            cells: list[str] = []
            for text in line.split("\r"):
                cells[: len(text)] = text
            shown.append("".join(cells).rstrip())
        return shown


def test_a_long_result_for_a_full_device_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full, a device of Linux that is always full")
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(EdgeSpecError, match=r"cannot write to stdout \(No space left"):
            print_result("more than is held back: " + "x" * 100_000)


def _work() -> None:
    show_progress("reading")
    show_progress("reading more")
    info("a stage")
    show_progress("")
    show_progress("checking")


def _screen(monkeypatch: pytest.MonkeyPatch, *, is_terminal: bool = True) -> _Screen:
    screen = _Screen(is_terminal=is_terminal)
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(console, "monotonic", itertools.count().__next__)
    return screen


def test_progress_is_replaced_and_leaves_only_lines_of_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = _screen(monkeypatch)
    with log_to_stderr():
        show_progress("reading")
        assert screen.lines == ["edgespec: reading …"]
        show_progress("now")
        assert screen.lines == ["edgespec: now …"]
        info("a stage")
        show_progress("x" * 100)
        assert screen.lines == ["edgespec: a stage", "edgespec: " + "x" * 29]
    assert screen.lines == ["edgespec: a stage", ""]
    assert logging.getLogger("edgespec.progress").level == logging.WARNING


def test_a_bar_shows_how_much_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = _screen(monkeypatch)
    with log_to_stderr():
        show_progress("a", 0.5)
        assert screen.lines == ["edgespec: a [##########          ] 50%"]
        show_progress("a", 1.0)
        assert screen.lines == ["edgespec: a [####################] 100%"]


def test_a_program_that_logs_gets_each_line_once_and_no_progress(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    screen = _screen(monkeypatch)
    with caplog.at_level(logging.DEBUG, logger="edgespec"):
        TERMINAL.report("reading a model")
        _work()
    assert caplog.messages == ["reading a model", "a stage"]
    assert screen.getvalue() == ""
    with caplog.at_level(logging.WARNING, logger="edgespec"):
        TERMINAL.report("reading a model")
    assert screen.getvalue().endswith("reading a model\n"), "a program that does not log shows it"


def test_lines_of_a_server_have_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = _screen(monkeypatch, is_terminal=False)
    with log_to_stderr(has_times=True):
        info("ready")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d edgespec: ready\n", screen.getvalue())


def test_a_line_of_progress_stays_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = _screen(monkeypatch)
    monkeypatch.setattr(console, "monotonic", lambda: 5.0)
    with log_to_stderr():
        show_progress("reading")
        show_progress("too soon")
        assert screen.lines == ["edgespec: reading …"]
        show_progress("")
        assert screen.lines == [""]


def test_a_pipe_gets_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = _screen(monkeypatch, is_terminal=False)
    for settings in ({}, {"verbose": True}):
        with log_to_stderr(**settings):
            _work()
    assert screen.getvalue() == "edgespec: a stage\n" * 2


def test_quiet_and_dumb_terminals_get_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = _screen(monkeypatch)
    with log_to_stderr(quiet=True):
        _work()
    assert screen.getvalue() == ""
    monkeypatch.setenv("TERM", "dumb")
    with log_to_stderr():
        _work()
    assert screen.getvalue() == "edgespec: a stage\n"


def test_lines_wait_while_a_text_is_written_to_the_same_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = _screen(monkeypatch)
    monkeypatch.setattr("sys.stdout", screen)
    with log_to_stderr():
        with suppress(KeyboardInterrupt), lines_wait():
            screen.write("one ")
            warn("the disk is full")
            screen.write("two\n")
            raise KeyboardInterrupt
        warn("later")
    assert screen.lines == ["one two", "edgespec: the disk is full", "edgespec: later", ""]


def test_lines_do_not_wait_for_a_text_that_goes_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = _screen(monkeypatch)
    monkeypatch.setattr("sys.stdout", _Screen(is_terminal=False))
    with log_to_stderr(), lines_wait():
        warn("the disk is full")
        assert screen.lines == ["edgespec: the disk is full", ""]
