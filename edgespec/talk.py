"""Lines for a person, on stderr. A stderr that cannot be written changes no result and no exit code.

What is told goes through the logger "edgespec", which is silent until a command, or a program that embeds
edgespec, listens to it: INFO for the stages of a command, WARNING for what went wrong on the way, DEBUG for what
is decided and why.
"""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from edgespec.printable import printable

_LOG = logging.getLogger("edgespec.talk")
_ALL = logging.getLogger("edgespec")
_ROUNDS = logging.getLogger("edgespec.rounds")  # a JSON document a round, for a file alone


def say(line: str) -> None:
    try:
        print(printable(line), file=sys.stderr, flush=True)
    except (OSError, ValueError):
        drop(sys.stderr)


def say_stage(line: str) -> None:
    _LOG.info("%s", line)


def say_problem(line: str) -> None:
    """What did not work, while the command goes on."""
    _LOG.warning("%s", line)


class _Stderr(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        where = f"[{record.name.removeprefix('edgespec.')}] " if record.levelno < logging.INFO else ""
        say(f"edgespec: {where}{record.getMessage()}")


@contextmanager
def heard(*, quiet: bool = False, verbose: bool = False) -> Iterator[None]:
    """Show what is told; quiet problems alone, verbose decisions too."""
    level = logging.DEBUG if verbose else logging.WARNING if quiet else logging.INFO
    handler = _Stderr()
    before = [(log, log.level) for log in (_ALL, _ROUNDS)]
    _ALL.addHandler(handler)
    _ALL.setLevel(level)
    _ROUNDS.setLevel(logging.WARNING)
    try:
        yield
    finally:
        _ALL.removeHandler(handler)
        for log, earlier in before:
            log.setLevel(earlier)


def drop(stream: TextIO) -> None:
    """Send what is left to nowhere: Python flushes its streams once more at its end and would fail again."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
