"""Opens model drafters while answers are made: one at a time, in a thread of its own, and ended when unwanted.

Knows neither what there is memory for nor who drafts.
"""

from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from edgespec.cancel import Cancel
from edgespec.footing import Candidate, OpenModel
from edgespec.headroom import return_freed


class Opened(NamedTuple):
    """What came of a candidate: its model, or the error in the place of one.

    lines: what it reported.
    """

    candidate: Candidate
    model: OpenModel | None
    error: Exception | None
    lines: list[str]


class _Opening(NamedTuple):
    candidate: Candidate
    cancel: Cancel
    lines: list[str]
    future: Future[OpenModel]


@dataclass(slots=True)
class Opener:
    """Used by one thread at a time.

    executor: Runs what it is given; a thread that begins with the first candidate and ends with close.
    """

    executor: Executor = field(default_factory=partial(ThreadPoolExecutor, 1, "edgespec opening"))
    _opening: _Opening | None = field(init=False, default=None)

    @property
    def candidate(self) -> Candidate | None:
        """Which is being opened, or is open and not taken yet."""
        return self._opening.candidate if self._opening else None

    def begin(self, candidate: Candidate) -> None:
        """Open a candidate, where none is being opened."""
        assert self._opening is None
        cancel, lines = Cancel(), list[str]()
        future = self.executor.submit(candidate.open, cancel, lines.append)
        self._opening = _Opening(candidate, cancel, lines, future)

    def take(self) -> Opened | None:
        """What came of the candidate, once; None as long as it is being opened, or if it was given up."""
        if self._opening is None or not self._opening.future.done():
            return None
        if self._opening.cancel.is_set:
            self.end()
            return None
        opening, self._opening = self._opening, None
        try:
            return Opened(opening.candidate, opening.future.result(), None, opening.lines)
        except Exception as error:  # of whatever kind: whoever takes it judges it
            return Opened(opening.candidate, None, error, opening.lines)

    def wait(self) -> None:
        """Until take has an answer."""
        if self._opening:
            wait([self._opening.future])

    def give_up(self) -> None:
        """Let what is being opened end soon; the next can begin when take has seen its end."""
        if self._opening:
            self._opening.cancel.set()

    def end(self) -> bool:
        """Give up what is being opened and wait until its memory is free; whether there was any."""
        if self._opening is None:
            return False
        self._opening.cancel.set()
        if self._opening.future.exception() is None:
            self._opening.future.result().lane.stop()
        self._opening = None
        return_freed()
        return True

    def close(self) -> None:
        """Give up what is being opened, and let the thread go."""
        self.end()
        self.executor.shutdown()
