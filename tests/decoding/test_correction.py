import numpy as np

from edgespec.decoding.head_rows import Correction, contexts_in, contexts_in_tree, contexts_of, correct

NUM_COLUMNS = 11


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def test_rows_are_those_of_the_sum_written_out() -> None:
    behind_5_2 = int(contexts_of(ids(5), ids(2))[0, 1])
    places = [0 * NUM_COLUMNS + 3, 2 * NUM_COLUMNS + 0, 2 * NUM_COLUMNS + 10, behind_5_2 * NUM_COLUMNS + 10]
    biases = np.array([1, 2, -3, 8], np.float32)
    correction = Correction(places=np.array(places, np.int64), biases=biases, num_columns=NUM_COLUMNS)
    rows = np.random.default_rng(1).normal(size=(4, NUM_COLUMNS)).astype(np.float32)
    before = rows.copy()
    wanted = rows.copy()
    wanted[[0, 3], 0] += 2
    wanted[[0, 3], 10] -= 3
    wanted[1, 3] += 1
    wanted[3, 10] += 8
    contexts = contexts_of(ids(9, 2, 0, 5), ids(2, 0, 7, 2))
    assert np.array_equal(correction(rows, contexts), wanted)
    assert np.array_equal(rows, before)
    assert correct(None, rows, contexts) is rows


def test_no_two_contexts_are_one_and_none_is_too_large() -> None:
    last = (1 << 20) - 1
    tokens = [0, 1, 2, last - 1, last]
    pairs = [(before, token) for before in tokens for token in tokens]
    found = contexts_of(ids(*(before for before, _ in pairs)), ids(*(token for _, token in pairs)))
    assert len({*found[:, 0].tolist()}) == len(tokens)
    assert len({*found.ravel().tolist()}) == len(tokens) + len(pairs)
    assert (found * (1 << 20)).min() >= 0


def test_contexts_of_a_chain_and_of_its_tree_are_those_of_the_text() -> None:
    text, nodes = ids(4, 8, 6), ids(3, 9, 5)
    whole = contexts_in(ids(4, 8, 6, 3, 9, 5), 4)
    assert np.array_equal(contexts_in_tree(text, nodes, (-1, 0, 1)), whole)
    forked = contexts_in_tree(text, nodes, (-1, -1, 0))
    assert np.array_equal(forked, contexts_of(ids(8, 6, 6, 3), ids(6, 3, 9, 5)))
    assert contexts_in(ids(4), 1).shape == contexts_in_tree(ids(4), ids(), ()).shape == (1, 2)
