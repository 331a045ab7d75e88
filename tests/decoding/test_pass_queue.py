"""Passes take turns by fairness and priority, and those that come at once run as one."""

from collections.abc import Callable, Sequence
from threading import Event, Thread
from time import sleep

import pytest
from until import SOON_S, until

from edgespec.decoding.pass_queue import ALONE, MAX_JOINED_ROWS, Beside, Caller, PassQueue
from edgespec.errors import Cancelled


class Joining:
    """Joins passes, which are words, and remembers which came together; those of `bad` fail as a whole."""

    max_parts = 4

    def __init__(self, *, is_ready: bool = True, bad: str = "", pass_s: float = 0.0) -> None:
        self.ready, self.bad, self.pass_s = is_ready, bad, pass_s
        self.batches: list[list[str]] = []

    def is_ready(self, num_texts: int) -> bool:
        return self.ready

    def run(self, parts: Sequence[str]) -> Sequence[str | Exception]:
        self.batches.append(sorted(parts))
        sleep(self.pass_s)
        if self.bad in parts and self.bad:
            raise RuntimeError("together they fail")
        return [ValueError(part) if part.startswith("refused") else part.upper() for part in parts]


class Blocked:
    """A queue whose first pass runs until it is let go, so that others gather behind it."""

    def __init__(self, joiner: Joining | None = None) -> None:
        self.queue: PassQueue[str, str] = PassQueue(joiner)
        self.order: list[str] = []
        self.results: dict[str, str | BaseException] = {}
        self._threads: list[Thread] = []
        self._go = Event()
        begun = Event()

        def first() -> str:
            begun.set()
            self._go.wait(SOON_S)
            return "first"

        self._start(lambda: self.queue.run(Caller(), 1, first))
        assert begun.wait(SOON_S)

    def ask(self, name: str, caller: Caller | None = None, num_rows: int = 1, *, alone: bool = False) -> Caller:
        """Have a thread ask for a pass."""
        caller = caller or Caller()
        num_waiting = len(self.queue._waiting)

        def run() -> None:
            try:
                self.results[name] = self.queue.run(
                    caller, num_rows, lambda: self._note(name), None if alone else name
                )
            except Exception as error:
                self.results[name] = error

        self._start(run)
        until(lambda: len(self.queue._waiting) > num_waiting)
        return caller

    def finish(self) -> None:
        self._go.set()
        for thread in self._threads:
            thread.join(SOON_S)
            assert not thread.is_alive()

    def _note(self, name: str) -> str:
        self.order.append(name)
        return name.upper()

    def _start(self, work: Callable[[], object]) -> None:
        self._threads.append(Thread(target=work, daemon=True))
        self._threads[-1].start()


def test_without_a_joiner_passes_take_turns_by_the_rows_that_were_run_for_each() -> None:
    blocked = Blocked()
    for name, num_rows in (("many", 500), ("few", 5), ("none", 0), ("some", 50)):
        blocked.ask(name, Caller(num_rows=num_rows))
    blocked.finish()
    assert blocked.order == ["none", "few", "some", "many"]
    assert blocked.queue.num_passes == 5


def test_a_higher_priority_goes_first_however_much_was_run_for_it() -> None:
    blocked = Blocked(joiner := Joining())
    blocked.ask("title", Caller(priority=-1))
    blocked.ask("person", Caller(num_rows=900))
    blocked.finish()
    assert [*joiner.batches, blocked.order] == [["person"], ["title"]], "nor do they run as one"


def test_a_single_pass_is_the_joiners_while_there_are_others() -> None:
    queue, other = PassQueue[str, str](joiner := Joining()), Caller()
    other.work()
    queue.run(other, 1, lambda: "pass", "other")
    assert queue.run(Caller(), 1, lambda: "alone", "single") == "SINGLE"
    other.rest()
    assert queue.run(Caller(), 1, lambda: "alone", "single") == "alone"
    assert joiner.batches == [["single"]]


def test_texts_are_told_when_a_pass_begins_and_not_while_others_are_waited_for() -> None:
    queue, told = PassQueue[str, str](joiner := Joining()), list[str]()
    one, two = (Caller(on_begin=lambda name=name: told.append(name)) for name in ("one", "two"))  # type: ignore[misc]
    one.work()
    two.work()
    queue.run(two, 1, str, "two")
    queue._pass_s = SOON_S  # so long it pays to wait for the other
    thread = Thread(target=lambda: queue.run(one, 1, str, "one"))
    thread.start()
    until(lambda: queue._is_taken)
    assert not told, "a pass that runs alone tells its text itself"
    queue.run(two, 1, str, "two")
    thread.join(SOON_S)
    assert joiner.batches == [["one", "two"]]
    assert sorted(told) == ["one", "two"]


def test_a_text_whose_pass_waits_for_one_that_runs_is_told_at_once() -> None:
    blocked, told = Blocked(), list[str]()
    blocked.ask("one", Caller(on_begin=lambda: told.append("one")))
    until(lambda: bool(told))
    assert told == ["one"]
    blocked.finish()


def test_a_lower_priority_waits_until_the_higher_one_rests() -> None:
    queue: PassQueue[str, str] = PassQueue()
    person, title, done = Caller(priority=1), Caller(), list[str]()
    person.work()
    queue.run(person, 1, lambda: "pass")
    thread = Thread(target=lambda: done.append(queue.run(title, 1, lambda: "title")), daemon=True)
    thread.start()
    until(lambda: len(queue._waiting) == 1)
    queue.run(person, 1, lambda: "pass")
    assert done == []
    person.rest()
    thread.join(SOON_S)
    assert done == ["title"]


def test_passes_that_wait_run_as_one_and_each_gets_its_own_result() -> None:
    blocked = Blocked(joiner := Joining())
    callers = [blocked.ask(name) for name in "abc"]
    blocked.ask("tree", alone=True)
    blocked.ask("exact", Caller(may_join=False))
    blocked.finish()
    assert joiner.batches == [["a", "b", "c"]]
    assert sorted(blocked.order) == ["exact", "tree"]
    assert blocked.results == {name: name.upper() for name in ("a", "b", "c", "tree", "exact")}
    assert [caller.num_joined for caller in callers] == [1, 1, 1]
    assert callers[0].beside == Beside(2, 0.0)


def test_what_shares_a_pass_is_counted_by_rows_and_by_what_they_yield() -> None:
    blocked = Blocked(Joining())
    first, second = Caller(tokens_per_pass=1.5), Caller(tokens_per_pass=2.0)
    blocked.ask("first", first, 3)
    blocked.ask("second", second, 5)
    blocked.finish()
    assert (first.beside, second.beside) == (Beside(5, 2.0), Beside(3, 1.5))
    blocked.queue.run(first, 3, lambda: "alone")
    assert first.beside == ALONE


def test_pieces_of_prompts_beyond_the_rows_of_a_pass_wait_for_the_next_and_narrow_ones_do_not() -> None:
    blocked = Blocked(joiner := Joining())
    for i in range(3):
        blocked.ask(f"prompt {i}", Caller(num_rows=i), MAX_JOINED_ROWS // 2)
    blocked.ask("token", Caller(num_rows=100), 1)
    blocked.finish()
    assert joiner.batches == [["prompt 0", "prompt 1"], ["prompt 2", "token"]] or joiner.batches == [
        ["prompt 0", "token"]
    ]
    assert blocked.results["token"] == "TOKEN"


def test_one_part_that_fails_harms_no_other() -> None:
    blocked = Blocked(Joining())
    for name in ("a", "refused", "c"):
        blocked.ask(name)
    blocked.finish()
    assert (blocked.results["a"], blocked.results["c"]) == ("A", "C")
    assert isinstance(blocked.results["refused"], ValueError)


def test_passes_that_fail_together_run_alone() -> None:
    blocked = Blocked(Joining(bad="b"))
    for name in "abc":
        blocked.ask(name)
    blocked.finish()
    assert sorted(blocked.order) == ["a", "b", "c"]
    assert blocked.results == {"a": "A", "b": "B", "c": "C"}


def test_a_dropped_pass_ends_at_once_and_the_others_run() -> None:
    blocked = Blocked(Joining())
    dropped = blocked.ask("dropped")
    blocked.ask("other")
    blocked.queue.drop(dropped)
    until(lambda: "dropped" in blocked.results)
    assert isinstance(blocked.results["dropped"], Cancelled)
    blocked.finish()
    assert blocked.results["other"] == "OTHER"


def test_ctrl_c_in_a_pass_of_several_leaves_the_others_to_themselves() -> None:
    class Interrupted(Joining):
        def run(self, parts: Sequence[str]) -> Sequence[str | Exception]:
            raise KeyboardInterrupt

    queue, other, found = PassQueue[str, str](Interrupted()), Caller(), list[str]()
    other.work()
    queue.run(other, 1, lambda: "pass")  # and another pass of it is expected
    with pytest.raises(KeyboardInterrupt):
        queue.run(Caller(), 1, lambda: "alone", "interrupted")
    other.rest()
    thread = Thread(target=lambda: found.append(queue.run(other, 1, lambda: "alone", "other")), daemon=True)
    thread.start()
    thread.join(SOON_S)
    assert found == ["alone"]
    assert queue._waiting == []


def test_an_error_reaches_its_caller_and_the_queue_goes_on() -> None:
    queue: PassQueue[str, str] = PassQueue()

    def fail() -> str:
        raise MemoryError("none")

    with pytest.raises(MemoryError):
        queue.run(Caller(), 1, fail)
    assert queue.run(Caller(), 1, lambda: "fine") == "fine"


def test_a_newcomer_has_a_pass_within_three_beside_three_that_never_rest() -> None:
    for joiner in (None, Joining(pass_s=0.001)):
        queue: PassQueue[str, str] = PassQueue(joiner)
        is_over = Event()

        def go_on(caller: Caller, queue: PassQueue[str, str] = queue, is_over: Event = is_over) -> None:
            caller.work()
            while not is_over.is_set():
                queue.run(caller, 40, lambda: sleep(0.001) or "pass", "pass")
            caller.rest()

        callers = [Caller() for _ in range(3)]
        threads = [Thread(target=go_on, args=[caller], daemon=True) for caller in callers]
        for thread in threads:
            thread.start()
        until(lambda callers=callers: all(caller.num_rows >= 400 for caller in callers))  # type: ignore[misc]
        short = Caller()
        short.work()
        queue.run(short, 20, lambda: "short", "short")
        short.rest()
        is_over.set()
        for thread in threads:
            thread.join(SOON_S)
        assert 1 <= short.waited_passes <= 3
        assert queue._working == set()
        assert queue._waiting == []


def test_time_waited_for_others_is_told_from_the_time_of_a_pass() -> None:
    now = [0.0]

    def take(seconds: float) -> str:
        now[0] += seconds
        return "done"

    queue: PassQueue[str, str] = PassQueue(clock=lambda: now[0])
    caller = Caller()
    queue.run(caller, 1, lambda: take(3.0))
    assert caller.waited_s == 0.0
    entered = Event()

    def other() -> str:
        entered.set()
        until(lambda: len(queue._waiting) == 1)
        return take(5.0)

    thread = Thread(target=lambda: queue.run(Caller(), 1, other), daemon=True)
    thread.start()
    assert entered.wait(SOON_S)
    queue.run(caller, 1, lambda: take(3.0))
    thread.join(SOON_S)
    assert caller.waited_s == pytest.approx(5.0)
