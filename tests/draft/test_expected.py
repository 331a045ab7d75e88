"""Expected tokens by draft length, and the length that yields the most."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.draft.option import TrialBudget, best_chain, best_length, expected_tokens

RATES = st.lists(st.floats(0, 1), max_size=24)


@given(rates=RATES)
def test_each_drafted_token_adds_the_chance_that_it_is_reached_and_accepted(rates: list[float]) -> None:
    totals = expected_tokens(rates)
    product = 1.0
    assert totals[0] == 1.0
    for rate, before, after in zip(rates, totals[:-1], totals[1:], strict=True):
        product *= rate
        assert after == pytest.approx(before + product)


@given(rates=RATES, pass_cost=st.floats(0, 2), step=st.floats(0, 2))
def test_no_length_has_a_better_rate_than_the_best(rates: list[float], pass_cost: float, step: float) -> None:
    totals = expected_tokens(rates)
    costs = [1 + length * (pass_cost + step) for length in range(len(totals))]
    rate, length = best_length(totals, costs.__getitem__)
    assert rate == totals[length] / costs[length]
    assert rate == max(total / cost for total, cost in zip(totals, costs, strict=True))


@given(rates=RATES, times=st.lists(st.floats(0.1, 10), min_size=25, max_size=25))
def test_a_chain_has_the_length_that_is_best_of_all_lengths(rates: list[float], times: list[float]) -> None:
    assert best_chain(rates, times) == best_length(expected_tokens(rates), times.__getitem__)


def test_a_trial_spends_all_that_was_saved_and_none_begins_before_it_is_affordable() -> None:
    budget = TrialBudget()
    budget.save(99.0)
    assert not budget.spend(1.0)
    budget.save(1.0)
    assert budget.spend(1.0)
    assert not budget.spend(0.001)
