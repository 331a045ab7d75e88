"""A lane: a worker that runs a job step by step while others work.

A job is an iterator of steps. A new job replaces the old one, which is cancelled between two steps, or within one
if it can be interrupted. Knows nothing of drafts.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from threading import Condition, RLock, Thread, current_thread
from time import monotonic, perf_counter, sleep
from typing import Any, NamedTuple, Protocol

from edgespec.draft.timeline import Interval
from edgespec.errors import DrafterFault
from edgespec.system.cancel import Flag
from edgespec.system.clock import Clock
from edgespec.system.threads import end_at_exit, has_ended

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


class Lane(Protocol):
    """A worker that runs one job at a time, step by step. Where a step failed, wait and steps raise DrafterFault.

    intervals: When the lane worked, and on what; a caller may remove them.
    """

    intervals: deque[Interval]

    def start(self, job: Job) -> None:
        """Cancel the running job and run another one."""

    def wait(self, num_steps: int, timeout_s: float | None = None) -> int:
        """The number of finished steps, once there are num_steps of them, the job is over, or the time is up."""

    def steps(self, first: int = 0) -> list[tuple[Any, StepTime]]:
        """The finished steps from a number on, and when each was done."""

    def now(self) -> float:
        """The time by the clock of all lanes."""

    @property
    def step_s(self) -> float:
        """Seconds since the running step began."""

    @property
    def is_over(self) -> bool:
        """True if no job is running."""

    def cancel(self) -> None:
        """End the job at once; its finished steps stay."""

    def stop(self) -> None:
        """Cancel the job and end the worker; the next job starts a new one."""


@dataclass(slots=True, eq=False)
class _RunningJob:
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

    def add(self, step: Any, ended_s: float) -> None:
        """Count a step that has ended; the next one begins."""
        self.done.append(step)
        self.times.append(StepTime(self.begun_s, ended_s))
        self.begun_s = ended_s

    def steps(self, first: int) -> list[tuple[Any, StepTime]]:
        self.require_sound()
        return list(zip(self.done[first:], self.times[first:], strict=True))

    def end(self) -> None:
        """End the job, unless it is over."""
        if not self.is_over:
            self.cancel.set()
            self.job.interrupt()


class _JobLane:
    """The job of a lane in real time, with the steps that it has done."""

    def __init__(self, name: str, clock: Clock = perf_counter) -> None:
        self._name = name
        self._clock = clock
        # Entered directly and not through its condition, in whose code Ctrl-C could strike with the lock taken.
        # A signal handler may cancel within another cancel.
        self._lock = RLock()
        self._changed = Condition(self._lock)
        self._run: _RunningJob | None = None
        self.intervals: deque[Interval] = deque(maxlen=_MAX_INTERVALS)

    def wait(self, num_steps: int, timeout_s: float | None = None) -> int:
        with self._lock:
            run = self._run
            if run is None:
                return 0
            run.num_wanted = num_steps
            self._changed.wait_for(lambda: run.is_over or len(run.done) >= num_steps, timeout_s)
            run.require_sound()
            return len(run.done)

    def steps(self, first: int = 0) -> list[tuple[Any, StepTime]]:
        with self._lock:
            return self._run.steps(first) if self._run else []

    def now(self) -> float:
        return self._clock()

    @property
    def step_s(self) -> float:
        with self._lock:
            return self._clock() - self._run.begun_s if self._run else 0.0

    @property
    def is_over(self) -> bool:
        with self._lock:
            return self._run is None or self._run.is_over

    def cancel(self) -> None:
        with self._lock:
            if self._run:
                self._run.end()


class CallerLane(_JobLane):
    """A lane in the thread that starts a job, which has ended when start() returns.

    No thread has to be woken, which takes 0.2 ms of a draft of 1.5. Nothing bounds how long a job takes.
    """

    def start(self, job: Job) -> None:
        run = self._run = _RunningJob(job, self._clock())
        started = run.begun_s
        try:
            for step in job.steps(run.cancel):
                if run.cancel.is_set():
                    break
                run.add(step, self._clock())
        except Exception as error:  # raised again where the steps are asked for
            run.error = None if run.cancel.is_set() else error
        with self._lock:  # nothing is interrupted once the job is over
            run.is_over = True
        self.intervals.append(Interval(self._name, job.work, started, max(started, run.begun_s), len(run.done)))
        del run  # whose error refers to this frame, and so to all that the callers hold

    def stop(self) -> None:
        self.cancel()
        self._run = None


class ThreadLane(_JobLane):
    """A lane in a thread of its own, which lives from the first job to stop()."""

    _worker: Thread | None = None

    def start(self, job: Job) -> None:
        with self._lock:
            self.cancel()
            self._run = _RunningJob(job, self._clock())
            if self._worker is None:
                self._worker = Thread(target=self._work, name=f"edgespec {self._name}", daemon=True)
                self._worker.start()
                end_at_exit(self.stop)
            self._changed.notify_all()

    def stop(self) -> None:
        has_ended(self.stop)
        with self._lock:
            self.cancel()
            worker, self._worker = self._worker, None
            self._run = None
            self._changed.notify_all()
        if worker is not None:
            _join(worker)  # a thread that hangs is left running: it holds nothing that others wait for

    def _work(self) -> None:
        worker, last = current_thread(), None  # stop() may have come before this line
        while True:
            with self._lock:
                while self._worker is worker and self._run is last:
                    self._changed.wait()
                if self._worker is not worker:
                    return
                run = last = self._run
            if run is not None:
                self._run_job(run)

    def _run_job(self, run: _RunningJob) -> None:
        started, ended = self._clock(), None
        try:
            for step in run.job.steps(run.cancel):
                with self._lock:
                    if run.cancel.is_set():
                        break
                    run.add(step, self._clock())
                    # Waking a thread takes time from both: once for all steps that it waits for.
                    if len(run.done) >= run.num_wanted:
                        self._changed.notify_all()
            else:
                ended = max(started, run.begun_s)  # with its last step, not when the system lets this thread go on
        except BaseException as error:  # raised again where the steps are asked for
            run.error = None if run.cancel.is_set() else error
        with self._lock:
            run.is_over = True
            ended = self._clock() if ended is None else ended
            self.intervals.append(Interval(self._name, run.job.work, started, ended, len(run.done)))
            self._changed.notify_all()


def _join(worker: Thread) -> None:
    # Thread.join would register a caller that threading has not started as a "Dummy" thread for good.
    ends = monotonic() + _JOIN_S
    while worker.is_alive() and monotonic() < ends:
        sleep(_POLL_S)
