"""Lines for a person, on stderr. A stderr that cannot be written changes no result and no exit code.

info() and warn() go through the logger "edgespec", which is silent until a command, or a program that embeds
edgespec, adds a handler: INFO for the stages of a command, WARNING for what went wrong while it goes on, DEBUG for
decisions and their reasons.
"""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from edgespec.system.printable import printable

_LOG = logging.getLogger("edgespec.system.console")
_ALL = logging.getLogger("edgespec")
_ROUNDS = logging.getLogger("edgespec.rounds")  # a JSON document a round, for a file alone


def print_stderr(line: str) -> None:
    try:
        print(printable(line), file=sys.stderr, flush=True)
    except (OSError, ValueError):
        discard_output(sys.stderr)


def info(line: str) -> None:
    _LOG.info("%s", line)


def warn(line: str) -> None:
    _LOG.warning("%s", line)


class _Stderr(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        where = f"[{record.name.removeprefix('edgespec.')}] " if record.levelno < logging.INFO else ""
        print_stderr(f"edgespec: {where}{record.getMessage()}")


@contextmanager
def log_to_stderr(*, quiet: bool = False, verbose: bool = False) -> Iterator[None]:
    """Print what is logged: INFO and above, warnings alone if quiet, DEBUG too if verbose."""
    handler, before = _Stderr(), [(log, log.level) for log in (_ALL, _ROUNDS)]
    _ALL.addHandler(handler)
    _ALL.setLevel(logging.DEBUG if verbose else logging.WARNING if quiet else logging.INFO)
    _ROUNDS.setLevel(logging.WARNING)
    try:
        yield
    finally:
        _ALL.removeHandler(handler)
        for log, level in before:
            log.setLevel(level)


def discard_output(stream: TextIO) -> None:
    """Let the stream write to nowhere: Python flushes it once more at its end, and would fail again."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
