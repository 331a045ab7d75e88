import numpy as np
import pytest
from double import Double, tree_logits
from table_decoder import TableDecoder

from edgespec.decoding.decoder import Decoder
from edgespec.simulation.synthetic import PacedDecoder
from edgespec.system.clock import VirtualClock
from edgespec.types import Logits, TokenIds

TEXT = np.array([1, 2, 3, 4, 5], np.int32)


class Chain(Double):
    """A decoder that runs no trees."""

    vocab_size, context_length, num_fed = 4, 100, 0

    def logits(self, tokens: TokenIds, num_last: int) -> Logits:
        return np.zeros((num_last, self.vocab_size), np.float32)


def paced(decoder: Decoder, time: VirtualClock) -> PacedDecoder:
    return PacedDecoder(decoder, lambda num_fed, num_rows: num_fed + 0.01 * num_rows, time)


def test_passes_take_what_they_run_and_give_the_same_rows() -> None:
    time, table = VirtualClock(), TableDecoder(9, seed=1)
    decoder = paced(TableDecoder(9, seed=1), time)
    assert np.array_equal(decoder.logits(TEXT, 1), table.logits(TEXT, 1))
    assert time.now == 5.01
    assert np.array_equal(decoder.logits(TEXT, 3), table.logits(TEXT, 3))
    assert time.now == pytest.approx(5.01 + 3.03)  # two of five are held, for three rows are wanted


def test_a_tree_takes_what_it_runs() -> None:
    time, table = VirtualClock(), TableDecoder(9, seed=1)
    decoder = paced(TableDecoder(9, seed=1), time)
    assert decoder.can.trees
    nodes, parents = np.array([6, 7, 8], np.int32), (-1, 0, -1)
    assert np.array_equal(tree_logits(decoder, TEXT, nodes, parents), tree_logits(table, TEXT, nodes, parents))
    assert time.now == pytest.approx(8.04)


def test_it_runs_trees_only_if_its_decoder_does() -> None:
    assert not paced(Chain(), VirtualClock()).can.trees
