"""Where several texts share passes, a draft is judged by what its rows add to the pass and to all tokens."""

from itertools import pairwise

import numpy as np
import pytest
import table_runs
from hypothesis import given
from hypothesis import strategies as st

from edgespec.decoding.decoder import EVEN_WIDTHS
from edgespec.decoding.pass_queue import ALONE, Beside, Caller
from edgespec.decoding.scheduler import Proposal
from edgespec.decoding.tree import Tree
from edgespec.draft.acceptance_rates import AcceptanceRates
from edgespec.draft.costs import PassCosts, marginal_times
from edgespec.draft.measured import MeasuredPolicy
from edgespec.draft.option import best_chain, expected_tokens
from edgespec.draft.suffix import SuffixDrafter

times = st.lists(st.floats(0.0, 0.6), min_size=40, max_size=40).map(
    lambda steps: (1.0 + np.cumsum([0.0, *steps])).tolist()
)
rates = st.lists(st.floats(0.0, 1.0), min_size=1, max_size=8)


def linear(step: float, row: float, num_widths: int = 60) -> list[float]:
    return [step + row * width for width in range(num_widths)]


@given(times_s=times)
def test_a_pass_that_nobody_shares_costs_what_it_takes(times_s: list[float]) -> None:
    assert marginal_times(times_s, ALONE) == pytest.approx(times_s)


@given(times_s=times, rates=rates, num_rows=st.integers(1, 20), tokens_per_row=st.floats(0.1, 1.0))
def test_a_draft_is_worth_it_exactly_where_it_raises_the_tokens_a_second_of_all(
    times_s: list[float], rates: list[float], num_rows: int, tokens_per_row: float
) -> None:
    beside = Beside(num_rows, tokens_per_row * num_rows)
    own = marginal_times(times_s, beside)
    totals = expected_tokens(rates)
    of_all = [(beside.num_tokens + total) / times_s[num_rows + length] for length, total in enumerate(totals)]
    for length, total in enumerate(totals[1:], 1):
        gains_alone, gains_all = total / own[length] - 1 / own[0], of_all[length] - of_all[0]
        if abs(gains_all) > 1e-9:
            assert (gains_alone > 0) == (gains_all > 0)
    assert 1 / own[0] == pytest.approx(of_all[0])


@pytest.mark.parametrize("rate", [0.5, 0.7, 0.9])
def test_drafts_grow_shorter_with_the_number_of_answers_and_end_where_rows_are_dear(rate: float) -> None:
    lengths = [
        best_chain([rate] * 8, marginal_times(linear(1.0, 0.1), Beside(num, float(num))))[1]
        for num in range(0, 40, 4)
    ]
    assert all(more >= fewer for more, fewer in pairwise(lengths))
    assert lengths[0] > 0
    assert lengths[0] > lengths[-1]
    assert best_chain([0.6] * 8, marginal_times(linear(1.0, 0.25), Beside(16, 16.0)))[1] == 0


@pytest.mark.parametrize("widths", [(), EVEN_WIDTHS])
def test_costs_learn_shared_passes_by_all_their_rows(widths: tuple[int, ...]) -> None:
    known, learned = ({width: 1 + 0.1 * (width - 1) for width in range(1, 26)} for _ in range(2))
    costs = PassCosts(known, 1.0, widths=widths)
    alone = PassCosts(learned, 1.0, widths=widths)
    for _ in range(40):
        for width, num_beside in ((2, 2), (4, 4)):
            costs.observe(width, 0.01 * (width + num_beside + 6), num_beside)
            alone.observe(width + num_beside, 0.01 * (width + num_beside + 6))
    assert costs.pass_times_s(25) == pytest.approx(alone.pass_times_s(25))
    times_s = costs.pass_times_s(25)
    costs.beside = Beside(4, 4.0)
    assert costs.pass_times_s(10) == pytest.approx(marginal_times(times_s[:14], costs.beside))
    assert costs.pass_s(3) == pytest.approx(costs.pass_times_s(3)[-1])
    assert costs.ratio(3) == pytest.approx(costs.pass_s(3) / costs.pass_s(1))


def test_widths_that_are_not_told_apart_teach_nothing_of_shared_passes() -> None:
    costs = PassCosts({width: 1 + 0.1 * (width - 1) for width in range(1, 26)}, 1.0)
    before = costs.pass_times_s(25)
    costs.observe(2, 90.0, 100)
    assert costs.pass_times_s(25) == before


def test_a_policy_drafts_alone_and_not_beside_many() -> None:
    """Passes whose rows cost half a step each beyond eight, and nothing up to there."""
    caller = Caller()
    ratios = {width: 1 + 0.5 * max(0, width - 8) for width in range(1, 26)}
    policy = MeasuredPolicy([SuffixDrafter()], PassCosts(ratios, 1.0), AcceptanceRates(), caller=caller)
    text = np.array([1, 2, 3, 4] * 8, np.int32)
    drafts: dict[int, list[Tree]] = {}
    sampler = table_runs.GumbelSampler(table_runs.SamplingParams(), 0)
    for beside in (ALONE, Beside(8, 8.0)):
        caller.beside = beside
        for _ in range(20):
            round: Proposal = policy.propose(text, 4, sampler)
            num_draft = len(round.draft.tokens)
            emitted = np.append(round.draft.tokens, text[0]).astype(np.int32)
            taken_s = ratios[min(25, num_draft + 1 + beside.num_rows)]
            policy.observe(round, np.zeros((num_draft + 1, 9), np.float32), emitted, taken_s)
            drafts.setdefault(beside.num_rows, []).append(round.draft)
    assert np.mean([len(draft.tokens) for draft in drafts[0][5:]]) >= 3
    assert np.mean([len(draft.tokens) for draft in drafts[8][5:]]) <= 2
