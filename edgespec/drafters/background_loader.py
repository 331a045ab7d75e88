"""Loads drafter models while answers are made: one at a time, in a thread of its own, and cancelled when unwanted.

Knows neither how much memory is free nor who drafts.
"""

from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from edgespec.drafters.drafter_sets import Candidate, OpenModel
from edgespec.memory.free_memory import return_freed
from edgespec.system.cancel import Cancel


class LoadResult(NamedTuple):
    """A loaded candidate, or the error that loading it raised."""

    candidate: Candidate
    model: OpenModel | None
    error: Exception | None
    lines: list[str]  # messages that loading reported


class _Load(NamedTuple):
    candidate: Candidate
    cancel: Cancel
    lines: list[str]
    future: Future[OpenModel]


@dataclass(slots=True)
class BackgroundLoader:
    """Loads one candidate after another in a thread of its own. Only one thread at a time may use it.

    executor: A thread that starts with the first candidate and ends with close.
    """

    executor: Executor = field(default_factory=partial(ThreadPoolExecutor, 1, "edgespec loading"))
    _load: _Load | None = field(init=False, default=None)

    @property
    def candidate(self) -> Candidate | None:
        """The candidate that is being loaded, or is loaded and not taken yet."""
        return self._load.candidate if self._load else None

    def begin(self, candidate: Candidate) -> None:
        assert self._load is None
        cancel, lines = Cancel(), list[str]()
        future = self.executor.submit(candidate.open, cancel, lines.append)
        self._load = _Load(candidate, cancel, lines, future)

    def take(self) -> LoadResult | None:
        """The result, once; None while the candidate is being loaded, or if it was given up."""
        if self._load is None or not self._load.future.done():
            return None
        if self._load.cancel.is_set:
            self.end()
            return None
        (candidate, _, lines, future), self._load = self._load, None
        try:
            return LoadResult(candidate, future.result(), None, lines)
        except Exception as error:  # the caller decides which errors matter
            return LoadResult(candidate, None, error, lines)

    def wait(self) -> None:
        """Wait until the candidate is loaded."""
        if self._load:
            wait([self._load.future])

    def give_up(self) -> None:
        """Cancel the load without waiting; the next can begin once take has noticed its end."""
        if self._load:
            self._load.cancel.set()

    def end(self) -> bool:
        """Cancel the load and wait until its memory is free. Returns whether anything was loading."""
        if self._load is None:
            return False
        self._load.cancel.set()
        if self._load.future.exception() is None:
            self._load.future.result().lane.stop()
        self._load = None
        return_freed()
        return True

    def close(self) -> None:
        """Cancel the load and end the thread."""
        self.end()
        self.executor.shutdown()
