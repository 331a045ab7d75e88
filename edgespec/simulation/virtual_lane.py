"""A lane in virtual time, in which nobody waits."""

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from math import inf
from typing import Any

from edgespec.draft.lanes import Job, StepTime
from edgespec.draft.timeline import Interval
from edgespec.system.cancel import Flag
from edgespec.system.clock import VirtualClock

_MAX_INTERVALS = 100_000


class VirtualLane:
    """A lane in virtual time, without a thread. Its decoders sleep on its own clock, which times each step.

    Steps are run when they are asked for, so that every run is alike.
    """

    def __init__(self, name: str, clock: VirtualClock, own: VirtualClock) -> None:
        self._name = name
        self._clock, self._own = clock, own
        self._steps: Iterator[Any] = iter(())
        self._work = "draft"
        self._cancel = Flag()
        self._done: list[Any] = []
        self._ends: list[float] = []  # when each of them ended
        self._started = 0.0
        self._is_over = True
        self.intervals: deque[Interval] = deque(maxlen=_MAX_INTERVALS)

    def start(self, job: Job) -> None:
        self._end()
        self._cancel = Flag()
        self._steps, self._work = job.steps(self._cancel), job.work
        self._done, self._ends, self._is_over = [], [], False
        self._started = self._own.now = self._clock.now

    def wait(self, num_steps: int, timeout_s: float | None = None) -> int:
        end = inf if timeout_s is None else self._clock.now + timeout_s
        while not self._is_over and len(self._done) < num_steps and self._own.now <= end:
            self._step()
        if num_steps > 0 and self._done:
            self._clock.now = max(self._clock.now, min(end, self._ends[:num_steps][-1]))
        self._run()
        return self._num_by_now()

    def steps(self, first: int = 0) -> list[tuple[Any, StepTime]]:
        self._run()
        begun_s, ends = self._ends[first - 1] if first else self._started, self._ends[first : self._num_by_now()]
        return list(zip(self._done[first:], map(StepTime, [begun_s, *ends], ends), strict=False))

    def now(self) -> float:
        return self._clock.now

    @property
    def step_s(self) -> float:
        num_ended = self._num_by_now()
        return self._clock.now - (self._ends[num_ended - 1] if num_ended else self._started)

    @property
    def is_over(self) -> bool:
        self._run()
        return self._is_over and (not self._done or self._ends[-1] <= self._clock.now)

    def cancel(self) -> None:
        self._run()
        self._end()
        num_ended = self._num_by_now()
        self._done, self._ends, self._is_over = self._done[:num_ended], self._ends[:num_ended], True

    def stop(self) -> None:
        self._end()
        self._done, self._ends, self._is_over = [], [], True

    def _run(self) -> None:
        """Do all steps that begin by now."""
        while not self._is_over and self._own.now <= self._clock.now:
            self._step()

    def _step(self) -> None:
        step = next(self._steps, None)
        if step is None:
            self._is_over = True
        else:
            self._done.append(step)
            self._ends.append(self._own.now)

    def _num_by_now(self) -> int:
        return bisect_right(self._ends, self._clock.now)

    def _end(self) -> None:
        if self._done or not self._is_over:
            self._cancel.set()
            end = min(self._clock.now, self._own.now)
            self.intervals.append(Interval(self._name, self._work, self._started, end, self._num_by_now()))
