"""Lines for a person, on stderr. A stderr that cannot be written changes no result and no exit code.

info() and warn() go through the logger "edgespec", which is silent until a command, or a program that embeds
edgespec, adds a handler: INFO for the stages of a command, WARNING for what went wrong while it goes on, DEBUG for
decisions and their reasons. show_progress() goes through "edgespec.progress": a terminal alone shows it, in a line
that the next one replaces.
"""

import errno
import logging
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from time import monotonic
from typing import TextIO

from edgespec.errors import EdgeSpecError, in_flags
from edgespec.system.context_managers import contextmanager
from edgespec.system.printable import printable

_LOG = logging.getLogger("edgespec.system.console")
_ALL = logging.getLogger("edgespec")
_ROUNDS = logging.getLogger("edgespec.rounds")  # a JSON document a round, for a file alone
_PROGRESS = logging.getLogger("edgespec.progress")
_PROGRESS.setLevel(logging.WARNING)  # lines that replace each other are for terminals
_BAR = 20  # characters
_PROGRESS_S = 0.1  # between two lines of progress


def print_stderr(line: str) -> None:
    """Print a line on stderr; characters that control a terminal are escaped."""
    try:
        print(printable(line), file=sys.stderr, flush=True)
    except (OSError, ValueError):
        discard_output(sys.stderr)


def info(line: str) -> None:
    """Log a line for the user, which --quiet hides."""
    _LOG.info("%s", line)


def warn(line: str) -> None:
    """Log a warning, which is shown in any case."""
    _LOG.warning("%s", line)


def show_progress(text: str, share: float | None = None) -> None:
    """Say what is being done now, with a bar where the share done is known; an empty text takes it away."""
    bar = "" if share is None else f" [{'#' * round(_BAR * share):{_BAR}}] {share:.0%}"
    _PROGRESS.debug("%s%s", text, bar)


def shows_progress() -> bool:
    """True where somebody sees what show_progress() says."""
    return _PROGRESS.isEnabledFor(logging.DEBUG)


class _Stderr(logging.Handler):
    def __init__(self, *, has_times: bool) -> None:
        super().__init__()
        self._has_times = has_times
        self._shown, self._shown_at = "", 0.0  # the line of progress on the terminal
        self._held: list[str] | None = None  # lines that wait, while some do

    def emit(self, record: logging.LogRecord) -> None:
        if record.name == _PROGRESS.name:
            text = record.getMessage()
            if not (text and self._shown) or monotonic() - self._shown_at > _PROGRESS_S:
                self._show(f"edgespec: {text} …" if text else "")
            return
        self._show("")
        where = f"[{record.name.removeprefix('edgespec.')}] " if record.levelno < logging.INFO else ""
        time = f"{datetime.fromtimestamp(record.created):%Y-%m-%d %H:%M:%S} " if self._has_times else ""
        line = f"{time}edgespec: {where}{in_flags(record.getMessage())}"
        if self._held is None:
            print_stderr(line)
        else:
            self._held.append(line)

    def hold_lines(self) -> None:
        """Keep lines back until print_held."""
        self._held = self._held or []

    def print_held(self) -> None:
        lines, self._held = self._held or [], None
        for line in lines:
            print_stderr(line)

    def close(self) -> None:
        self.print_held()
        self._show("")
        super().close()

    def _show(self, text: str) -> None:
        """Replace the line of progress, which is cut to the terminal's width."""
        text = printable(text)[: shutil.get_terminal_size().columns - 1]
        if text == self._shown:
            return
        erase = f"\r{' ' * len(self._shown)}\r" if self._shown else ""
        self._shown, self._shown_at = text, monotonic()
        with suppress(OSError, ValueError):
            sys.stderr.write(erase + text)
            sys.stderr.flush()


@contextmanager
def log_to_stderr(*, quiet: bool = False, verbose: bool = False, has_times: bool = False) -> Iterator[None]:
    """Print what is logged: INFO and above, warnings alone if quiet, DEBUG too if verbose."""
    handler, before = _Stderr(has_times=has_times), [(log, log.level) for log in (_ALL, _ROUNDS, _PROGRESS)]
    _ALL.addHandler(handler)
    _ALL.setLevel(logging.DEBUG if verbose else logging.WARNING if quiet else logging.INFO)
    _ROUNDS.setLevel(logging.WARNING)
    _PROGRESS.setLevel(logging.WARNING if quiet or not _is_terminal() else logging.DEBUG)
    try:
        yield
    finally:
        handler.close()
        _ALL.removeHandler(handler)
        for log, level in before:
            log.setLevel(level)


@contextmanager
def lines_wait() -> Iterator[None]:
    """Within it, lines wait for its end where stdout and stderr share a terminal, on which a text is written."""
    handlers = [each for each in _ALL.handlers if isinstance(each, _Stderr)]
    if not (sys.stdout.isatty() and sys.stderr.isatty()):
        handlers = []
    for each in handlers:
        each.hold_lines()
    try:
        yield
    finally:
        for each in handlers:
            each.print_held()


def _is_terminal() -> bool:
    """True if stderr is a terminal that can overwrite a line."""
    is_dumb = os.environ.get("TERM", "") in ("dumb", "unknown")
    return sys.stderr.isatty() and not is_dumb


def print_result(*lines: object) -> None:
    """Print what a program asked for, at once. Raises EdgeSpecError: stdout cannot be written."""
    try:
        print(*lines, sep="\n", flush=True)
    except OSError as error:
        if has_no_reader(error):
            raise
        raise EdgeSpecError(give_up_stdout(error)) from None


def has_no_reader(error: OSError) -> bool:
    """True if nobody reads what was written any more. Windows calls that an invalid argument, of no file."""
    is_closing = sys.platform == "win32" and error.errno == errno.EINVAL and error.filename is None
    return isinstance(error, BrokenPipeError) or (is_closing and getattr(error, "winerror", None) is None)


def give_up_stdout(error: OSError) -> str:
    """Write nothing more to it; return what to say of the error."""
    discard_output(sys.stdout)
    reason = "it is closed" if error.errno == errno.EBADF else error.strerror
    return f"cannot write to stdout ({reason})"


def discard_output(stream: TextIO) -> None:
    """Let the stream write to nowhere: Python flushes it once more at its end, and would fail again."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
