"""A lane: one worker, with its own decoder, that runs a job step by step while others work.

A job is an iterator of steps. A new one takes the place of the old, which is cancelled between two steps, and
within one where the job says how. Knows nothing of drafts.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from threading import Condition, RLock, Thread
from time import monotonic, perf_counter, sleep
from typing import Any, NamedTuple, Protocol

from edgespec.cancel import Flag
from edgespec.clock import Clock, VirtualClock
from edgespec.errors import DrafterFault
from edgespec.timeline import Interval

_KEPT_INTERVALS = 100_000
_JOIN_S = 1.0
_POLL_S = 0.0005


class Job(NamedTuple):
    """steps: given a flag that is set when the job is cancelled. interrupt: ends a step that is running."""

    steps: Callable[[Flag], Iterator[Any]]
    what: str = "draft"
    interrupt: Callable[[], None] = lambda: None


class Lane(Protocol):
    @property
    def intervals(self) -> deque[Interval]:
        """When it worked, and on what; whoever wants them takes them out."""
        ...

    def start(self, job: Job) -> None:
        """Cancel what runs, and run this."""
        ...

    def ready(self) -> list[Any]:
        """The steps of the job that are done.

        Raises:
            DrafterFault: One of them failed.
        """
        ...

    def wait(self, num_steps: int, timeout_s: float | None = None) -> list[Any]:
        """The same once so many are done, the job is over, or the time is.

        Raises:
            DrafterFault: One of them failed.
        """
        ...

    def taken_s(self) -> list[float]:
        """Seconds that each of the steps took that are done."""
        ...

    @property
    def step_s(self) -> float:
        """How long the step has been going on that is being done."""
        ...

    @property
    def is_over(self) -> bool:
        """No job runs."""
        ...

    def cancel(self) -> None:
        """End what runs at once: whoever waits for it has what is done."""
        ...

    def stop(self) -> None:
        """Cancel what runs and let the worker go; the next job has a new one."""
        ...


@dataclass(slots=True, eq=False)
class _Run:
    job: Job
    done: list[Any] = field(default_factory=list)
    taken_s: list[float] = field(default_factory=list)
    cancel: Flag = field(default_factory=Flag)
    begun_s: float = 0.0  # the step that is being done
    is_over: bool = False
    error: BaseException | None = None

    def steps_done(self) -> list[Any]:
        if self.error is not None:
            raise DrafterFault(f"its lane failed: {self.error!r}") from self.error
        return list(self.done)


class ThreadLane:
    """A lane in a thread of its own, which lives from the first job to stop()."""

    def __init__(self, name: str, clock: Clock = perf_counter) -> None:
        self._name = name
        self._clock = clock
        # Entered itself, and not by its condition, in whose code Ctrl-C could strike with the lock taken.
        self._lock = RLock()
        self._changed = Condition(self._lock)
        self._run: _Run | None = None
        self._worker: Thread | None = None
        self.intervals: deque[Interval] = deque(maxlen=_KEPT_INTERVALS)

    def start(self, job: Job) -> None:
        with self._lock:
            self._cancel()
            self._run = _Run(job, begun_s=self._clock())
            if self._worker is None:
                self._worker = Thread(target=self._work, name=f"edgespec {self._name}", daemon=True)
                self._worker.start()
            self._changed.notify_all()

    def ready(self) -> list[Any]:
        with self._lock:
            return self._run.steps_done() if self._run else []

    def wait(self, num_steps: int, timeout_s: float | None = None) -> list[Any]:
        with self._lock:
            run = self._run
            if run is None:
                return []
            self._changed.wait_for(lambda: run.is_over or len(run.done) >= num_steps, timeout_s)
            return run.steps_done()

    def taken_s(self) -> list[float]:
        with self._changed:
            return list(self._run.taken_s) if self._run else []

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
            self._cancel()

    def stop(self) -> None:
        with self._lock:
            self._cancel()
            worker, self._worker = self._worker, None
            self._run = None
            self._changed.notify_all()
        if worker is not None:
            _await_end(worker)  # one that hangs is left behind: it holds nothing that others wait for

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
                self._do(run)

    def _do(self, run: _Run) -> None:
        started = self._clock()
        try:
            for step in run.job.steps(run.cancel):
                with self._lock:
                    if run.cancel.is_set():
                        break
                    now = self._clock()
                    run.done.append(step)
                    run.taken_s.append(now - run.begun_s)
                    run.begun_s = now
                    self._changed.notify_all()
        except BaseException as error:  # it goes to whoever asks for the steps
            run.error = None if run.cancel.is_set() else error
        with self._lock:
            run.is_over = True
            self.intervals.append(Interval(self._name, run.job.what, started, self._clock(), len(run.done)))
            self._changed.notify_all()


def _await_end(worker: Thread) -> None:
    """As join does, which keeps a "Dummy" thread for good of a caller that threading has not started."""
    ends = monotonic() + _JOIN_S
    while worker.is_alive() and monotonic() < ends:
        sleep(_POLL_S)


class VirtualLane:
    """A lane in virtual time. Its decoders sleep on its own clock, which says when each step was done.

    Steps are run when they are asked after, so that a run is the same each time.
    """

    def __init__(self, name: str, clock: VirtualClock, own: VirtualClock) -> None:
        self._name = name
        self._clock, self._own = clock, own
        self._steps: Iterator[Any] = iter(())
        self._what = "draft"
        self._cancel = Flag()
        self._done: list[tuple[float, Any]] = []  # with when it was done
        self._started = 0.0
        self._is_over = True
        self.intervals: deque[Interval] = deque(maxlen=_KEPT_INTERVALS)

    def start(self, job: Job) -> None:
        self._end()
        self._cancel = Flag()
        self._steps, self._what = job.steps(self._cancel), job.what
        self._done, self._is_over = [], False
        self._started = self._own.now = self._clock.now

    def ready(self) -> list[Any]:
        while not self._is_over and self._own.now <= self._clock.now:
            self._step()
        return [step for at, step in self._done if at <= self._clock.now]

    def wait(self, num_steps: int, timeout_s: float | None = None) -> list[Any]:
        end = inf if timeout_s is None else self._clock.now + timeout_s
        while not self._is_over and len(self._done) < num_steps and self._own.now <= end:
            self._step()
        if num_steps > 0 and self._done:
            self._clock.now = max(self._clock.now, min(end, self._done[:num_steps][-1][0]))
        return self.ready()

    def taken_s(self) -> list[float]:
        ended = [self._started, *(at for at, _ in self._done if at <= self._clock.now)]
        return [after - before for before, after in pairwise(ended)]

    @property
    def step_s(self) -> float:
        done = [at for at, _ in self._done if at <= self._clock.now]
        return self._clock.now - (done[-1] if done else self._started)

    @property
    def is_over(self) -> bool:
        self.ready()
        return self._is_over and (not self._done or self._done[-1][0] <= self._clock.now)

    def cancel(self) -> None:
        self.ready()
        self._end()
        self._done, self._is_over = [step for step in self._done if step[0] <= self._clock.now], True

    def stop(self) -> None:
        self._end()
        self._done, self._is_over = [], True

    def _step(self) -> None:
        step = next(self._steps, None)
        if step is None:
            self._is_over = True
        else:
            self._done.append((self._own.now, step))

    def _end(self) -> None:
        """What is done by now was worked on; the rest is undone with its job."""
        if not self._done and self._is_over:
            return
        self._cancel.set()
        ended = min(self._clock.now, self._own.now)
        num_steps = sum(at <= self._clock.now for at, _ in self._done)
        self.intervals.append(Interval(self._name, self._what, self._started, ended, num_steps))
