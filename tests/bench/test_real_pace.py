from threading import Timer
from time import perf_counter

import numpy as np
import pytest
from double import Double
from real_pace import RealPacedDecoder
from table_decoder import TableDecoder

from edgespec.errors import EdgeSpecError
from edgespec.types import Logits, TokenIds

TEXT = np.array([1, 2, 3, 4, 5], np.int32)


class Time:
    """A clock whose sleepers sleep too long."""

    def __init__(self, late_s: float = 0.0) -> None:
        self.now, self.late_s = 0.0, late_s

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds + self.late_s


class Chain(Double):
    """A decoder that takes a while."""

    vocab_size, context_length, num_fed = 4, 100, 0

    def __init__(self, time: Time, taken_s: float) -> None:
        self.time, self.taken_s = time, taken_s

    def logits(self, tokens: TokenIds, num_last: int) -> Logits:
        self.time.now += self.taken_s
        return np.zeros((num_last, self.vocab_size), np.float32)


@pytest.mark.parametrize("taken_s", [0.0, 0.25, 3.0])
def test_what_the_decoder_takes_is_part_of_the_pass(taken_s: float) -> None:
    time = Time()
    RealPacedDecoder(Chain(time, taken_s), lambda num_fed, num_rows: 1.0, time.sleep, time).logits(TEXT, 1)
    assert time.now == max(1.0, taken_s)


def test_late_sleepers_do_not_add_up() -> None:
    time = Time(late_s=0.25)
    decoder = RealPacedDecoder(Chain(time, 0.0), lambda num_fed, num_rows: 1.0, time.sleep, time)
    for _ in range(20):
        decoder.logits(TEXT, 1)
    assert time.now == 20.25


def test_a_long_pause_is_made_up_for_once() -> None:
    time = Time()
    decoder = RealPacedDecoder(Chain(time, 0.0), lambda num_fed, num_rows: 1.0, time.sleep, time)
    time.late_s = 2.5
    decoder.logits(TEXT, 1)
    time.late_s = 0.0
    ends = []
    for _ in range(4):
        decoder.logits(TEXT, 1)
        ends.append(time.now)
    assert ends == [3.5, 3.5, 4.0, 5.0]


def test_a_pass_that_runs_can_be_interrupted() -> None:
    decoder = RealPacedDecoder(TableDecoder(9, seed=1), lambda num_fed, num_rows: 120.0)
    decoder.interrupt()  # none runs
    Timer(0.05, decoder.interrupt).start()
    started = perf_counter()
    with pytest.raises(EdgeSpecError, match="interrupted"):
        decoder.logits(TEXT, 1)
    assert perf_counter() - started < 60


def test_real_passes_take_their_time() -> None:
    decoder = RealPacedDecoder(TableDecoder(9, seed=1), lambda num_fed, num_rows: 0.01)
    started = perf_counter()
    for _ in range(10):
        decoder.logits(TEXT, 1)
    assert perf_counter() - started >= 0.1
