"""A lane runs one job at a time, step by step, in a thread or in virtual time."""

import threading
from _thread import start_new_thread
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from threading import Event

import pytest
from threads_left import wait_for_threads_since

from edgespec.draft.lanes import CallerLane, Job, Lane, ThreadLane
from edgespec.errors import DrafterFault
from edgespec.simulation.schedules import VirtualLane
from edgespec.system.cancel import Flag
from edgespec.system.clock import VirtualClock


def counting(num_steps: int, pause: Callable[[], object] = lambda: None) -> Callable[[Flag], Iterator[int]]:
    def steps(cancel: Flag) -> Iterator[int]:
        for i in range(num_steps):
            pause()
            yield i

    return steps


def lanes() -> list[Lane]:
    return [ThreadLane("drafter"), CallerLane("drafter"), VirtualLane("drafter", VirtualClock(), VirtualClock())]


def done(lane: Lane) -> list[int]:
    return [step for step, _ in lane.steps()]


def waited(lane: Lane, num_steps: int, timeout_s: float | None = None) -> list[int]:
    num_done = lane.wait(num_steps, timeout_s)
    assert len(done(lane)) >= num_done
    return done(lane)


@pytest.mark.parametrize("lane", lanes(), ids=["thread", "caller", "virtual"])
def test_steps_come_in_order_and_the_last_job_counts(lane: Lane) -> None:
    assert done(lane) == waited(lane, 3) == []
    for num_steps in (5, 9):
        lane.start(Job(counting(num_steps)))
        assert waited(lane, 3)[:3] == [0, 1, 2]
        assert waited(lane, 100) == list(range(num_steps))
        assert lane.is_over
    lane.stop()
    assert done(lane) == []
    assert sum(interval.num_tokens for interval in lane.intervals) >= 9


def test_threads_that_threading_has_not_started_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgespec.draft.lanes._JOIN_S", 60.0)  # stop() waits for a thread that is slow to end
    lane, over = ThreadLane("drafter"), SimpleQueue[list[int]]()
    before = threading.enumerate()

    def work() -> None:
        lane.start(Job(counting(3)))
        steps = waited(lane, 3)
        lane.stop()
        over.put(steps)

    start_new_thread(work, ())
    assert over.get(timeout=120) == [0, 1, 2]
    assert set(threading.enumerate()) <= set(before)


def test_a_job_is_cancelled_within_a_step_and_its_worker_goes() -> None:
    before = set(threading.enumerate())
    lane, held, interrupted = ThreadLane("drafter"), Event(), Event()

    def steps(cancel: Flag) -> Iterator[int]:
        yield 0
        held.set()
        interrupted.wait(60)
        yield 1

    lane.start(Job(steps, interrupt=interrupted.set))
    held.wait(60)
    lane.start(Job(counting(2)))
    assert waited(lane, 2) == [0, 1], "nothing of the cancelled job is seen"
    lane.stop()
    wait_for_threads_since(before)


def test_a_thread_that_begins_once_its_lane_is_stopped_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgespec.draft.lanes._JOIN_S", 0.0)  # otherwise stop() waits for the thread
    is_stopped = Event()

    class Late(ThreadLane):
        def _work(self) -> None:
            is_stopped.wait()
            super()._work()

    lane, before = Late("drafter"), set(threading.enumerate())
    lane.start(Job(counting(1)))
    lane.stop()
    is_stopped.set()
    wait_for_threads_since(before)
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_an_error_is_raised_unless_its_job_is_cancelled(is_cancelled: bool) -> None:
    lane, go = ThreadLane("drafter"), Event()

    def steps(cancel: Flag) -> Iterator[int]:
        yield 0
        go.wait(60)
        raise ValueError("broken")

    lane.start(Job(steps, interrupt=go.set))
    assert waited(lane, 1) == [0]
    if is_cancelled:
        lane.start(Job(counting(1)))
        assert waited(lane, 1) == [0]
    else:
        go.set()
        with pytest.raises(DrafterFault, match="broken"):
            lane.wait(2)
    lane.stop()
    lane.start(Job(counting(1)))
    assert waited(lane, 1) == [0], "it can be used again"
    lane.stop()


def test_a_lane_of_the_caller_is_cancelled_from_another_thread_and_keeps_an_error_for_who_asks() -> None:
    lane, interrupted = CallerLane("drafter"), Event()

    def steps(cancel: Flag) -> Iterator[int]:
        yield 0
        start_new_thread(lane.cancel, ())
        assert interrupted.wait(60)
        assert cancel.is_set()
        raise ValueError("interrupted")

    lane.start(Job(steps, interrupt=interrupted.set))
    assert waited(lane, 2) == [0], "what a cancelled job raises is nobody's"
    assert lane.is_over

    def broken(cancel: Flag) -> Iterator[int]:
        raise ValueError("broken")
        yield 0

    lane.start(Job(broken))
    with pytest.raises(DrafterFault, match="broken"):
        lane.wait(1)
    lane.start(Job(counting(2)))
    assert waited(lane, 1) == [0, 1], "it can be used again"


def test_a_wait_ends_at_its_timeout() -> None:
    lane, go = ThreadLane("drafter"), Event()
    lane.start(Job(counting(1, lambda: go.wait(60)), interrupt=go.set))
    assert waited(lane, 1, 0.05) == []
    assert lane.step_s >= 0.05
    lane.stop()


def test_virtual_steps_are_there_when_their_time_has_come() -> None:
    clock, own = VirtualClock(), VirtualClock()
    lane = VirtualLane("drafter", clock, own)
    clock.sleep(100)
    lane.start(Job(counting(4, lambda: own.sleep(10))))
    assert done(lane) == []
    clock.sleep(25)
    assert done(lane) == [0, 1]
    assert lane.step_s == 5
    assert waited(lane, 3, 1) == [0, 1]
    assert clock.now == 126
    assert waited(lane, 3) == [0, 1, 2]
    assert clock.now == 130, "whoever waits sleeps until then"
    lane.stop()
    assert [(each.start_s, each.end_s, each.num_tokens) for each in lane.intervals] == [(100, 130, 3)]


def test_work_ends_with_its_last_step_however_late_the_thread_goes_on() -> None:
    lane, goes_on = ThreadLane("drafter"), Event()

    def steps(cancel: Flag) -> Iterator[int]:
        yield 0
        goes_on.wait(60)

    lane.start(Job(steps))
    waited(lane, 1)
    asked_at = lane._clock()
    goes_on.set()
    waited(lane, 2)
    (work,) = lane.intervals
    assert work.start_s <= work.end_s <= asked_at
    lane.stop()


@pytest.mark.parametrize("kind", ["thread", "caller", "virtual"])
def test_a_lane_says_what_each_step_took(kind: str) -> None:
    clock, own = VirtualClock(), VirtualClock()
    lanes = {"thread": ThreadLane("drafter", own), "caller": CallerLane("drafter", own)}
    lane: Lane = lanes.get(kind) or VirtualLane("drafter", clock, own)
    lane.start(Job(counting(3, lambda: own.sleep(0.25))))
    assert waited(lane, 3) == [0, 1, 2]
    assert [time.ended_s - time.begun_s for _, time in lane.steps()] == [0.25, 0.25, 0.25]
    assert [step for step, _ in lane.steps(2)] == [2]
    lane.stop()
    assert lane.steps() == []


def test_a_wait_for_a_cancelled_job_gives_its_finished_steps() -> None:
    lane, go = ThreadLane("drafter"), Event()

    def steps(cancel: Flag) -> Iterator[int]:
        yield 0
        go.wait(60)
        yield 1

    lane.start(Job(steps, interrupt=go.set))
    assert waited(lane, 1) == [0]
    lane.cancel()
    assert waited(lane, 2) == [0]
    assert lane.is_over
    lane.stop()


def test_a_cancelled_virtual_job_keeps_its_finished_steps() -> None:
    clock, own = VirtualClock(), VirtualClock()
    lane = VirtualLane("drafter", clock, own)
    lane.start(Job(counting(4, lambda: own.sleep(10))))
    clock.sleep(25)
    lane.cancel()
    clock.sleep(25)
    assert (waited(lane, 4), lane.is_over) == ([0, 1], True)
