"""What a trained head is expected to gain."""

import pytest

from edgespec.setup.profile import Profile
from edgespec.training.objective import INT8_BYTES, estimate_draft_cost, expected_gain


def profile(step_s: float, two_rows: float) -> Profile:
    widths = {1: step_s, 2: step_s * two_rows, 4: 2 * step_s, 8: 4 * step_s}
    return Profile(passes_s={64: widths}, prefill_s=step_s, transfer_s=0.0)


def test_a_drafted_token_costs_what_is_read_and_what_is_around_it() -> None:
    assert estimate_draft_cost(8, 80 * INT8_BYTES, profile(1e6, 1)) == pytest.approx(0.1)
    assert estimate_draft_cost(8, 80 * INT8_BYTES, profile(0.01, 1)) == pytest.approx(0.2)


def test_a_second_row_that_is_free_pays_where_a_dear_one_does_not() -> None:
    rates = [0.36, 0.34, 0.34]
    free = expected_gain(rates, 0.2, profile(0.01, 1.0))
    assert free.draft_length == 1
    assert free.times == pytest.approx(1.36 / 1.2)
    dear = expected_gain(rates, 0.2, profile(0.01, 1.3))
    assert (dear.draft_length, dear.times, dear.tokens_per_pass) == (0, 1.0, 1.0)
