"""The lanes' work as a file that trace viewers open, and its end as a picture on stderr."""

import json
from collections.abc import Sequence
from pathlib import Path

from edgespec.disk import replace_file
from edgespec.errors import UsageError
from edgespec.talk import say, say_problem
from edgespec.timeline import Interval, chrome_trace, latest, picture

_NUM_SHOWN = 12


class TraceFile:
    """All answers so far, written anew after each: the file is a whole document at any time.

    Raises:
        UsageError: The file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._intervals: list[Interval] = []
        try:
            self._write()
        except OSError as error:
            raise UsageError(f"cannot write {path}: {error.strerror}") from None

    def add(self, timeline: Sequence[Interval]) -> None:
        """An answer's; a file that cannot be written any more is told of, and ends nothing."""
        self._intervals += timeline
        try:
            self._write()
        except OSError as error:
            say_problem(f"cannot write {self._path}: {error.strerror}")
        if timeline:
            say(picture(latest(timeline, "target", _NUM_SHOWN)))

    def _write(self) -> None:
        document = json.dumps(chrome_trace(self._intervals)).encode()
        place = self._path.resolve()  # a link stays one
        if place.exists() and not place.is_file():  # a pipe or a terminal
            place.write_bytes(document)
        else:
            replace_file(place, document, 0o666)
