"""How far a long piece of work is, in numbers for a bar of progress. Knows nothing of the work."""

import logging
import sys
from collections.abc import Callable
from typing import Literal, NamedTuple

from edgespec.errors import in_python
from edgespec.system.terminal import is_terminal

_LOG = logging.getLogger("edgespec")


class LoadProgress(NamedTuple):
    """How far a stage of loading a model is.

    stage: download, export or open; each may come several times, for one file or model after another.
    name: The file that is fetched, or the model.
    total_bytes: Of an export the most that it may write.
    """

    stage: Literal["download", "export", "open"]
    name: str
    done_bytes: int
    total_bytes: int


ReportProgress = Callable[[LoadProgress], None]


def silent(said: object) -> None:
    """Takes lines or progress that nobody wants to see."""


class TerminalLines:
    """Shows a program's user what load() does, on stderr where that is a terminal."""

    def __init__(self) -> None:
        self._shown = ""  # the line of progress that is there

    def report(self, line: str) -> None:
        """Log a line where the program logs, and print it where it does not."""
        if _LOG.isEnabledFor(logging.INFO):
            _LOG.info("%s", in_python(line))
        elif is_terminal(sys.stderr):
            self._write(f"{in_python(line)}\n")
            self._shown = ""

    def progress(self, at: LoadProgress) -> None:
        """Keep one line about a download or an export; what is read to be opened takes a moment."""
        percent = 100 * at.done_bytes // max(1, at.total_bytes)
        line = f"{at.stage} {at.name}: {percent} %" if at.done_bytes < at.total_bytes else ""
        if at.stage != "open" and line != self._shown and is_terminal(sys.stderr):
            self._write(line)
            self._shown = line

    def _write(self, text: str) -> None:
        from rich.cells import cell_len  # a program without a terminal needs none

        erase = f"\r{' ' * cell_len(self._shown)}\r" if self._shown else ""
        sys.stderr.write(erase + text)
        sys.stderr.flush()


TERMINAL = TerminalLines()
