"""The timeline of answers as a file that trace viewers open; its end is drawn on stderr."""

import json
from collections.abc import Sequence
from pathlib import Path

from edgespec.drafters.timeline import Interval, chrome_trace, latest, picture
from edgespec.errors import UsageError
from edgespec.system.console import print_stderr, warn
from edgespec.system.disk import replace_file

_NUM_SHOWN = 12


class TraceFile:
    """The timeline of all answers so far, rewritten after each: the file is a whole document at any time."""

    def __init__(self, path: Path) -> None:
        """Raises UsageError: the file cannot be written."""
        self._path = path
        self._intervals: list[Interval] = []
        try:
            self._write()
        except OSError as error:
            raise UsageError(f"cannot write {path}: {error.strerror}") from None

    def add(self, timeline: Sequence[Interval]) -> None:
        """Add an answer; a file that cannot be written any more is reported and ends nothing."""
        self._intervals += timeline
        try:
            self._write()
        except OSError as error:
            warn(f"cannot write {self._path}: {error.strerror}")
        if timeline:
            print_stderr(f"the last {_NUM_SHOWN} passes of the target, and what was drafted meanwhile:")
            print_stderr(picture(latest(timeline, "target", _NUM_SHOWN)))

    def _write(self) -> None:
        document = json.dumps(chrome_trace(self._intervals)).encode()
        replace_file(self._path, document, 0o666)
