"""A lane: a worker that runs a job step by step while others work.

A job is an iterator of steps. A new job replaces the old one, which is cancelled between two steps, or within one
if it can be interrupted. Knows nothing of drafts.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import inf
from threading import Condition, RLock, Thread
from time import monotonic, perf_counter, sleep
from typing import Any, NamedTuple

from edgespec.drafters.timeline import Interval
from edgespec.errors import DrafterFault
from edgespec.system.cancel import Flag
from edgespec.system.clock import Clock, VirtualClock

_MAX_INTERVALS = 100_000
_JOIN_S = 1.0
_POLL_S = 0.0005


class Job(NamedTuple):
    """Work in steps. steps takes a flag that is set when the job is cancelled; interrupt ends a running step."""

    steps: Callable[[Flag], Iterator[Any]]
    work: str = "draft"
    interrupt: Callable[[], None] = lambda: None


class StepTime(NamedTuple):
    """When a step was done, by the clock of all lanes."""

    begun_s: float
    ended_s: float


@dataclass(slots=True, eq=False)
class _Run:
    job: Job
    begun_s: float  # when the running step began
    done: list[Any] = field(default_factory=list)
    times: list[StepTime] = field(default_factory=list)
    num_wanted: int = 0  # steps that somebody waits for
    cancel: Flag = field(default_factory=Flag)
    is_over: bool = False
    error: BaseException | None = None

    def require_sound(self) -> None:
        if self.error is not None:
            raise DrafterFault(f"its lane failed: {self.error!r}") from self.error

    def steps_done(self) -> list[Any]:
        self.require_sound()
        return list(self.done)


class ThreadLane:
    """A lane in a thread of its own, which lives from the first job to stop().

    intervals: When the lane worked, and on what; a caller may remove them.
    """

    def __init__(self, name: str, clock: Clock = perf_counter) -> None:
        self._name = name
        self._clock = clock
        # Entered directly and not through its condition, in whose code Ctrl-C could strike with the lock taken.
        self._lock = RLock()
        self._changed = Condition(self._lock)
        self._run: _Run | None = None
        self._worker: Thread | None = None
        self.intervals: deque[Interval] = deque(maxlen=_MAX_INTERVALS)

    def start(self, job: Job) -> None:
        """Cancel the running job and run another one."""
        with self._lock:
            self._cancel()
            self._run = _Run(job, self._clock())
            if self._worker is None:
                self._worker = Thread(target=self._work, name=f"edgespec {self._name}", daemon=True)
                self._worker.start()
            self._changed.notify_all()

    def ready(self) -> list[Any]:
        """The finished steps of the job.

        Raises DrafterFault: A step failed.
        """
        with self._lock:
            return self._run.steps_done() if self._run else []

    def wait(self, num_steps: int, timeout_s: float | None = None) -> list[Any]:
        """The finished steps, once there are num_steps of them, the job is over, or the time is up.

        Raises DrafterFault: A step failed.
        """
        with self._lock:
            run = self._run
            self.wait_for(num_steps, timeout_s)
            return run.steps_done() if run else []

    def wait_for(self, num_steps: int, timeout_s: float | None = None) -> int:
        """Wait as wait does; the number of finished steps.

        Raises DrafterFault: A step failed.
        """
        with self._lock:
            run = self._run
            if run is None:
                return 0
            run.num_wanted = num_steps
            self._changed.wait_for(lambda: run.is_over or len(run.done) >= num_steps, timeout_s)
            run.require_sound()
            return len(run.done)

    def new_steps(self, first: int) -> list[tuple[Any, StepTime]]:
        """The finished steps from a number on, and when each was done.

        Raises DrafterFault: A step failed.
        """
        with self._lock:
            if self._run is None:
                return []
            self._run.require_sound()
            return list(zip(self._run.done[first:], self._run.times[first:], strict=True))

    def now(self) -> float:
        """The time by the clock of all lanes."""
        return self._clock()

    @property
    def step_s(self) -> float:
        """Seconds since the running step began."""
        with self._lock:
            return self._clock() - self._run.begun_s if self._run else 0.0

    @property
    def is_over(self) -> bool:
        """Whether no job is running."""
        with self._lock:
            return self._run is None or self._run.is_over

    def cancel(self) -> None:
        """End the job at once; wait then returns its finished steps."""
        with self._lock:
            self._cancel()

    def stop(self) -> None:
        """Cancel the job and end the worker; the next job starts a new one."""
        with self._lock:
            self._cancel()
            worker, self._worker = self._worker, None
            self._run = None
            self._changed.notify_all()
        if worker is not None:
            _join(worker)  # a thread that hangs is left running: it holds nothing that others wait for

    def _cancel(self) -> None:
        if self._run is not None and not self._run.is_over:
            self._run.cancel.set()
            self._run.job.interrupt()

    def _work(self) -> None:
        worker, last = self._worker, None
        while True:
            with self._lock:
                while self._worker is worker and self._run is last:
                    self._changed.wait()
                if self._worker is not worker:
                    return
                run = last = self._run
            if run is not None:
                self._run_job(run)

    def _run_job(self, run: _Run) -> None:
        started = self._clock()
        try:
            for step in run.job.steps(run.cancel):
                with self._lock:
                    if run.cancel.is_set():
                        break
                    now = self._clock()
                    run.done.append(step)
                    run.times.append(StepTime(run.begun_s, now))
                    run.begun_s = now
                    # Waking a thread takes time from both: once for all steps that it waits for.
                    if len(run.done) >= run.num_wanted:
                        self._changed.notify_all()
        except BaseException as error:  # raised again where the steps are asked for
            run.error = None if run.cancel.is_set() else error
        with self._lock:
            run.is_over = True
            self.intervals.append(Interval(self._name, run.job.work, started, self._clock(), len(run.done)))
            self._changed.notify_all()


def _join(worker: Thread) -> None:
    # Thread.join would register a caller that threading has not started as a "Dummy" thread for good.
    ends = monotonic() + _JOIN_S
    while worker.is_alive() and monotonic() < ends:
        sleep(_POLL_S)


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

    def ready(self) -> list[Any]:
        self._run()
        return self._done[: self._num_by_now()]

    def wait(self, num_steps: int, timeout_s: float | None = None) -> list[Any]:
        self.wait_for(num_steps, timeout_s)
        return self.ready()

    def wait_for(self, num_steps: int, timeout_s: float | None = None) -> int:
        end = inf if timeout_s is None else self._clock.now + timeout_s
        while not self._is_over and len(self._done) < num_steps and self._own.now <= end:
            self._step()
        if num_steps > 0 and self._done:
            self._clock.now = max(self._clock.now, min(end, self._ends[:num_steps][-1]))
        self._run()
        return self._num_by_now()

    def new_steps(self, first: int) -> list[tuple[Any, StepTime]]:
        self._run()
        starts = [self._ends[first - 1] if first else self._started, *self._ends[first:]]
        return [
            (self._done[i], StepTime(starts[i - first], self._ends[i])) for i in range(first, self._num_by_now())
        ]

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


Lane = ThreadLane | VirtualLane
