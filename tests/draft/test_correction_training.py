from collections.abc import Generator

import numpy as np
from made_rows import NUM_COLUMNS, made_rows

from edgespec.decoding.head_rows import Correction
from edgespec.draft import verified_rows
from edgespec.draft.verified_rows import train_correction


def result_of(steps: Generator[None, None, Correction]) -> Correction:
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found: Correction = end.value
            return found


def test_what_a_head_lacks_is_learned_and_holds_on_later_rows() -> None:
    _, rows = made_rows(1200, 1)
    correction = result_of(train_correction(rows, NUM_COLUMNS))
    found, later = made_rows(300, 2)
    before = (found.argmax(axis=1) == later.wanted).mean()
    after = (correction(found, later.contexts).argmax(axis=1) == later.wanted).mean()
    assert before < 0.1
    assert after > 0.8


def test_the_same_rows_give_the_same_correction() -> None:
    _, rows = made_rows(200, 3)
    one, other = (result_of(train_correction(rows, NUM_COLUMNS)) for _ in range(2))
    for name in ("places", "biases"):
        assert np.array_equal(getattr(one, name), getattr(other, name))


def test_training_goes_step_by_step() -> None:
    _, rows = made_rows(200, 5)
    steps = train_correction(rows, NUM_COLUMNS)
    assert sum(1 for _ in steps) == verified_rows._NUM_EPOCHS * -(-200 // verified_rows._BATCH_ROWS)
