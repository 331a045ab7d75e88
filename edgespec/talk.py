"""Lines for a person, on stderr. A stderr that cannot be written changes no result and no exit code."""

import os
import sys
from contextlib import suppress
from typing import TextIO


def say(line: str) -> None:
    try:
        print(line, file=sys.stderr, flush=True)
    except (OSError, ValueError):
        drop(sys.stderr)


def say_stage(line: str) -> None:
    say(f"edgespec: {line}")


def drop(stream: TextIO) -> None:
    """Send what is left to nowhere: Python flushes its streams once more at its end and would fail again."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
