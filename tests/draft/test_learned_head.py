from dataclasses import replace

import numpy as np
from made_rows import NUM_COLUMNS, made_rows

from edgespec.decoding.head_rows import Correction
from edgespec.draft.learned_head import MOST_ROWS, LearnedHead, ShadowTrial


def saying(column: int) -> Correction:
    """A correction that has the head draft one column behind token 0."""
    places, biases = np.array([column], np.int64), np.array([99], np.float32)
    return Correction(places=places, biases=biases, num_columns=NUM_COLUMNS)


def judged(learned: LearnedHead, column: int, num_rows: int = 40) -> LearnedHead:
    """After rows where the target says one column and the head guesses column 0."""
    logits = np.zeros((num_rows, NUM_COLUMNS), np.float32)
    logits[:, 0] = 1
    wanted = np.full(num_rows, column, np.int32)
    return learned.judge(logits, np.zeros((num_rows, 2), np.int64), wanted).decide()


def test_a_candidate_is_used_only_once_it_was_better_on_later_rows() -> None:
    start = LearnedHead().try_out(saying(3))
    assert start.active is None
    early = judged(start, 3, 15)
    assert (early.active, early.candidate) == (None, start.candidate)
    late = judged(early, 3, 25)
    assert (late.active, late.candidate, late.previous) == (start.candidate, None, None)
    assert (late.tally.num_rows, late.tally.num_plain, late.tally.num_used) == (40, 0, 0)
    again = judged(late, 3, 10)
    assert (again.tally.num_plain, again.tally.num_used) == (0, 10)


def test_a_candidate_that_is_worse_or_no_better_goes() -> None:
    start = LearnedHead().try_out(saying(3))
    worse = judged(start, 0)
    assert (worse.active, worse.candidate, worse.trial) == (None, None, ShadowTrial())
    equal = judged(start, 7, 5000)
    assert (equal.active, equal.candidate) == (None, None)


def test_what_was_used_before_is_used_again_where_it_turns_out_better() -> None:
    first = judged(LearnedHead().try_out(saying(3)), 3)
    second = judged(first.try_out(saying(4)), 4)
    assert (second.active and second.active.places[0], second.previous and second.previous.places[0]) == (4, 3)
    back = judged(second, 3)
    assert (back.active, back.previous, back.num_swaps) == (first.active, None, 3)
    assert judged(back, 0).active is None
    assert judged(second, 0).active is None  # the head as it is beats both


def test_rows_are_bounded_and_new_ones_counted() -> None:
    _, rows = made_rows(500, 0)
    learned = LearnedHead()
    for _ in range(10):
        learned = learned.with_rows(rows)
    assert (len(learned.rows), learned.num_new) == (MOST_ROWS, 5000)
    assert learned.try_out(saying(1)).num_new == 0
    assert replace(learned, num_new=0).rows is learned.rows
