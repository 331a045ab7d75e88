"""Answers take the target in turns, and nobody waits for himself."""

from threading import Barrier, Event, Thread
from time import monotonic, sleep

import pytest

from edgespec.errors import Cancelled
from edgespec.turns import Turn, Turns


def taking(turns: Turns, turn: Turn, asker: str, taken: list[str]) -> Thread:
    """A thread that makes all of an answer."""

    def make() -> None:
        for _ in range(3):
            turns.take(turn, asker)
            taken.append(asker)
            turns.rest(turn)
        turns.leave(turn)

    thread = Thread(target=make)
    thread.start()
    while thread.is_alive() and turn not in turns._waiting:
        sleep(0.001)
    return thread


def test_answers_are_made_whole_in_the_order_of_asking() -> None:
    turns, taken = Turns(), list[str]()
    first = Turn()
    turns.take(first, "first")
    threads = [taking(turns, Turn(), name, taken) for name in "bcd"]
    assert taken == []
    turns.rest(first)
    turns.leave(first)
    for thread in threads:
        thread.join(10)
    assert taken == [*"bbbcccddd"]


def test_nobody_waits_for_an_answer_of_his_own() -> None:
    turns, mine, too = Turns(patience_s=1e9), Turn(), Turn()
    for turn in (mine, too, mine, too):
        turns.take(turn, "me")
        turns.rest(turn)
    assert turns._holder is too


def test_readers_of_several_answers_do_not_wait_for_each_others_patience() -> None:
    """Who asks for another answer asks not for the one that he holds, wherever he stands in the queue."""
    turns, taken, together = Turns(patience_s=1e9), list[str](), Barrier(3)

    def read_in_turns(name: str) -> None:
        mine = [Turn(), Turn()]
        together.wait()
        for turn in 10 * mine:
            turns.take(turn, name)
            taken.append(name)
            sleep(0.001)  # for the others to ask meanwhile
            turns.rest(turn)
        for turn in mine:
            turns.leave(turn)

    threads = [Thread(target=read_in_turns, args=[name], daemon=True) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
    assert sorted(taken) == [*20 * "a", *20 * "b", *20 * "c"]


def test_an_answer_that_is_left_lying_lets_others_go_first_and_is_made_on_afterwards() -> None:
    turns, lying, other = Turns(patience_s=0.05), Turn(), Turn()
    turns.take(lying, "a")
    turns.rest(lying)
    started = monotonic()
    turns.take(other, "b")
    assert monotonic() - started >= 0.04
    turns.rest(other)
    turns.leave(other)
    turns.take(lying, "a")
    assert turns._holder is lying


def test_a_step_that_is_being_made_is_waited_for_however_long_it_takes() -> None:
    turns, slow, taken = Turns(patience_s=0.0), Turn(), list[str]()
    turns.take(slow, "a")
    thread = taking(turns, Turn(), "b", taken)
    sleep(0.05)
    assert taken == []
    turns.rest(slow)
    thread.join(10)
    assert taken == ["b"] * 3


@pytest.mark.parametrize("works", [False, True])
def test_cancelling_interrupts_the_step_of_that_answer_alone(works: bool) -> None:
    turns, interrupted = Turns(), Event()
    turn, other = Turn(interrupted.set), Turn()
    turns.take(turn if works else other, "a")
    turns.cancel(turn)
    assert interrupted.is_set() == works
    with pytest.raises(Cancelled):
        turn.expect_wanted()
    other.expect_wanted()


def test_a_cancelled_answer_waits_for_nobody() -> None:
    turns, turn, taken = Turns(), Turn(), list[str]()
    other = Turn()
    turns.take(other, "a")
    thread = taking(turns, turn, "b", taken)
    turns.cancel(turn)
    thread.join(10)
    assert taken == ["b"] * 3, "it is to be ended, and finds that it is cancelled"
    assert turns._holder is other
