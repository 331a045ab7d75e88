from threading import Timer
from time import perf_counter

import numpy as np
import pytest
from double import Double, tree_logits
from table_decoder import TableDecoder

from edgespec.decoding.decoder import Decoder
from edgespec.errors import EdgeSpecError
from edgespec.simulation.synthetic import PacedDecoder
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
    """A decoder that runs no trees, and takes a while."""

    vocab_size, context_length, num_fed = 4, 100, 0

    def __init__(self, time: Time, taken_s: float) -> None:
        self.time, self.taken_s = time, taken_s

    def logits(self, tokens: TokenIds, num_last: int) -> Logits:
        self.time.now += self.taken_s
        return np.zeros((num_last, self.vocab_size), np.float32)


def paced(decoder: Decoder, time: Time) -> PacedDecoder:
    return PacedDecoder(decoder, lambda num_fed, num_rows: num_fed + 0.01 * num_rows, time.sleep, time)


def test_passes_take_what_they_run_and_give_the_same_rows() -> None:
    time, table = Time(), TableDecoder(9, seed=1)
    decoder = paced(TableDecoder(9, seed=1), time)
    assert np.array_equal(decoder.logits(TEXT, 1), table.logits(TEXT, 1))
    assert time.now == 5.01
    assert np.array_equal(decoder.logits(TEXT, 3), table.logits(TEXT, 3))
    assert time.now == pytest.approx(5.01 + 3.03)  # two of five are held, for three rows are wanted


def test_a_tree_takes_what_it_runs() -> None:
    time, table = Time(), TableDecoder(9, seed=1)
    decoder = paced(TableDecoder(9, seed=1), time)
    assert decoder.can.trees
    nodes, parents = np.array([6, 7, 8], np.int32), (-1, 0, -1)
    assert np.array_equal(tree_logits(decoder, TEXT, nodes, parents), tree_logits(table, TEXT, nodes, parents))
    assert time.now == pytest.approx(8.04)


def test_it_runs_trees_only_if_its_decoder_does() -> None:
    assert not paced(Chain(Time(), 0.0), Time()).can.trees


@pytest.mark.parametrize("taken_s", [0.0, 0.25, 3.0])
def test_what_the_decoder_takes_is_part_of_the_pass(taken_s: float) -> None:
    time = Time()
    PacedDecoder(Chain(time, taken_s), lambda num_fed, num_rows: 1.0, time.sleep, time).logits(TEXT, 1)
    assert time.now == max(1.0, taken_s)


def test_late_sleepers_do_not_add_up() -> None:
    time = Time(late_s=0.25)
    decoder = PacedDecoder(Chain(time, 0.0), lambda num_fed, num_rows: 1.0, time.sleep, time)
    for _ in range(20):
        decoder.logits(TEXT, 1)
    assert time.now == 20.25


def test_a_long_pause_is_made_up_for_once() -> None:
    time = Time()
    decoder = PacedDecoder(Chain(time, 0.0), lambda num_fed, num_rows: 1.0, time.sleep, time)
    time.late_s = 2.5
    decoder.logits(TEXT, 1)
    time.late_s = 0.0
    ends = []
    for _ in range(4):
        decoder.logits(TEXT, 1)
        ends.append(time.now)
    assert ends == [3.5, 3.5, 4.0, 5.0]


def test_a_pass_that_runs_can_be_interrupted() -> None:
    decoder = PacedDecoder(TableDecoder(9, seed=1), lambda num_fed, num_rows: 120.0)
    decoder.interrupt()  # none runs
    Timer(0.05, decoder.interrupt).start()
    started = perf_counter()
    with pytest.raises(EdgeSpecError, match="interrupted"):
        decoder.logits(TEXT, 1)
    assert perf_counter() - started < 60


def test_real_passes_take_their_time() -> None:
    decoder = PacedDecoder(TableDecoder(9, seed=1), lambda num_fed, num_rows: 0.01)
    started = perf_counter()
    for _ in range(10):
        decoder.logits(TEXT, 1)
    assert perf_counter() - started >= 0.1
