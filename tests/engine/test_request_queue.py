"""Answers take the target in turns, and nobody waits for himself."""

from threading import Barrier, Event, Thread
from time import monotonic, sleep

import pytest

from edgespec.decoding.pass_queue import Caller
from edgespec.engine import run_ahead
from edgespec.engine.run_ahead import RequestQueue, Ticket


def taking(queue: RequestQueue, ticket: Ticket, asker: str, taken: list[str]) -> Thread:
    """A thread that makes all of an answer."""

    def make() -> None:
        for _ in range(3):
            queue.take(ticket, asker)
            taken.append(asker)
            queue.release(ticket)
        queue.leave(ticket)

    thread = Thread(target=make)
    thread.start()
    while thread.is_alive() and ticket not in queue._waiting:
        sleep(0.001)
    return thread


def test_answers_are_made_whole_in_the_order_of_asking() -> None:
    queue, taken = RequestQueue(), list[str]()
    first = Ticket()
    queue.take(first, "first")
    threads = [taking(queue, Ticket(), name, taken) for name in "bcd"]
    assert taken == []
    queue.release(first)
    queue.leave(first)
    for thread in threads:
        thread.join(120)
    assert taken == [*"bbbcccddd"]


def test_nobody_waits_for_an_answer_of_his_own() -> None:
    queue, mine, too = RequestQueue(idle_s=1e9), Ticket(), Ticket()
    for ticket in (mine, too, mine, too):
        queue.take(ticket, "me")
        queue.release(ticket)
    assert queue._holders == [too]


def test_readers_of_several_answers_do_not_wait_for_each_others_patience() -> None:
    """Who asks for another answer asks not for the one that he holds, wherever he stands in the queue."""
    queue, taken, together = RequestQueue(idle_s=1e9), list[str](), Barrier(3)

    def read_in_turns(name: str) -> None:
        mine = [Ticket(), Ticket()]
        together.wait()
        for ticket in 10 * mine:
            queue.take(ticket, name)
            taken.append(name)
            sleep(0.001)  # for the others to ask meanwhile
            queue.release(ticket)
        for ticket in mine:
            queue.leave(ticket)

    threads = [Thread(target=read_in_turns, args=[name], daemon=True) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert sorted(taken) == [*20 * "a", *20 * "b", *20 * "c"]


def test_an_answer_that_is_left_lying_lets_others_go_first_and_is_made_on_afterwards() -> None:
    queue, lying, other = RequestQueue(idle_s=0.05), Ticket(), Ticket()
    queue.take(lying, "a")
    started = monotonic()
    queue.release(lying)
    queue.take(other, "b")
    assert monotonic() - started >= 0.05
    queue.release(other)
    queue.leave(other)
    queue.take(lying, "a")
    assert queue._holders == [lying]


def test_a_step_that_is_being_made_is_waited_for_however_long_it_takes() -> None:
    queue, slow, taken = RequestQueue(idle_s=0.0), Ticket(), list[str]()
    queue.take(slow, "a")
    thread = taking(queue, Ticket(), "b", taken)
    sleep(0.05)
    assert taken == []
    queue.release(slow)
    thread.join(120)
    assert taken == ["b"] * 3


@pytest.mark.parametrize("works", [False, True])
def test_cancelling_interrupts_the_step_of_that_answer_alone(works: bool) -> None:
    queue, interrupted = RequestQueue(), Event()
    ticket, other = Ticket(interrupted.set), Ticket()
    queue.take(ticket if works else other, "a")
    queue.cancel(ticket)
    assert interrupted.is_set() == works
    assert ticket.is_cancelled
    assert not other.is_cancelled


def test_a_cancelled_answer_waits_for_nobody() -> None:
    queue, ticket, taken = RequestQueue(), Ticket(), list[str]()
    other = Ticket()
    queue.take(other, "a")
    thread = taking(queue, ticket, "b", taken)
    queue.cancel(ticket)
    thread.join(120)
    assert taken == ["b"] * 3, "it is to be ended, and finds that it is cancelled"
    assert queue._holders == [other]


def test_a_cache_is_taken_from_the_answer_that_was_not_waited_for() -> None:
    queue, persons = RequestQueue(idle_s=1e9, num_caches=2), Ticket()
    background = Ticket(caller=Caller(priority=-1))
    for ticket, asker in ((persons, "a"), (background, "b")):
        queue.take(ticket, asker)
        queue.release(ticket)
    queue.take(other := Ticket(), "c")
    assert queue._holders == [persons, other]
    assert (persons.num_given, background.num_given, other.num_given) == (1, 1, 1)


def test_a_step_goes_ahead_of_its_request_until_others_may_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(run_ahead, "monotonic", lambda: now_s)
    queue, ticket, taken = RequestQueue(idle_s=0.05), Ticket(), list[str]()
    assert not queue.take_ahead(ticket), "the first step is asked for"
    queue.take(ticket, "a")
    queue.release(ticket)
    thread = taking(queue, Ticket(), "b", taken)
    for now_s in (0.0, 0.02, 0.049):  # noqa: B007  the clock reads it
        assert queue.take_ahead(ticket)
        assert taken == []
        queue.release(ticket, is_ahead=True)
    now_s = 0.051
    assert not queue.take_ahead(ticket)
    thread.join(120)
    assert taken == ["b"] * 3


def test_a_step_does_not_go_ahead_of_a_request_where_its_asker_waits_for_another_answer() -> None:
    queue, ticket, taken = RequestQueue(idle_s=1e9), Ticket(), list[str]()
    queue.take(ticket, "a")
    thread = taking(queue, Ticket(), "a", taken)
    queue.release(ticket)
    assert not queue.take_ahead(ticket)
    thread.join(120)
    assert taken == ["a"] * 3


def test_taking_a_step_that_was_made_counts_as_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(run_ahead, "monotonic", lambda: now_s)
    queue, ticket = RequestQueue(idle_s=0.2), Ticket()
    queue.take(ticket, "a")
    queue.release(ticket)
    now_s = 0.3
    assert not queue.take_ahead(ticket)
    queue.note(ticket, "a")
    assert queue.take_ahead(ticket)
