"""The order of drafters, and the arithmetic of what they are expected to gain, from figures alone."""

from collections.abc import Sequence
from itertools import pairwise, repeat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.draft.costs import PassCosts
from edgespec.draft.limits import MIN_GAIN_OF_PAIR
from edgespec.draft.option import expected_tokens
from edgespec.draft.overlap import best_serial
from edgespec.setup.drafter_ranking import Basis, PossibleDrafter, rank
from edgespec.setup.drafting_target import DraftingCosts, break_even_rate, expected_gain, rate_of

BASES: Sequence[Basis] = ("measured", "estimated", "unknown")


@st.composite
def drafters(draw: st.DrawFn) -> PossibleDrafter:
    basis = draw(st.sampled_from(BASES))
    return PossibleDrafter(
        kind="model",
        name=draw(st.sampled_from("abcdef")),
        basis=basis,
        gain=None if basis == "unknown" else draw(st.floats(0.1, 5.0)),
        download_bytes=draw(st.none() | st.integers(0, 10**10)),
        obstacle=draw(st.sampled_from(["", "", "no room"])),
    )


@given(st.lists(drafters(), max_size=12))
def test_usable_ones_come_first_and_of_these_the_measured_ones_by_gain(found: list[PossibleDrafter]) -> None:
    ranked = rank(found)
    assert sorted(map(repr, ranked)) == sorted(map(repr, found))
    for before, after in pairwise(ranked):
        assert not (before.obstacle and not after.obstacle)
        if bool(before.obstacle) == bool(after.obstacle):
            bases = BASES.index(before.basis), BASES.index(after.basis)
            assert bases[0] <= bases[1]
            if before.gain is not None and bases[0] == bases[1]:
                assert after.gain is not None
                assert before.gain >= after.gain


@given(st.lists(drafters(), max_size=8), st.randoms(use_true_random=False))
def test_the_order_does_not_depend_on_that_of_the_search(found: list[PossibleDrafter], random: object) -> None:
    shuffled = found.copy()
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    keys = [[(each.basis, each.gain, each.name) for each in rank(some)] for some in (found, shuffled)]
    assert keys[0] == keys[1]


def test_of_unknown_gain_the_smallest_download_comes_first_and_an_unknown_one_last() -> None:
    sizes = {"large": 10**9, "none": 0, "unknown": None, "small": 10**6}
    found = rank(PossibleDrafter(kind="head", name=name, download_bytes=size) for name, size in sizes.items())
    assert [each.name for each in found] == ["none", "small", "large", "unknown"]
    assert {each.pays for each in found} == {None}


@given(st.floats(0.01, 0.98), st.integers(1, 16))
def test_the_rate_of_a_report_gives_its_tokens_a_pass(rate: float, num_draft: int) -> None:
    tokens = expected_tokens(repeat(rate, num_draft))[-1]
    assert rate_of(tokens, num_draft) == pytest.approx(rate, abs=1e-6)


def test_a_report_that_no_rate_explains_counts_as_the_highest() -> None:
    assert rate_of(9.0, 2) == pytest.approx(0.999)
    assert rate_of(0.5, 2) == pytest.approx(0.0, abs=1e-6)


@st.composite
def costs(draw: st.DrawFn) -> DraftingCosts:
    row, draft = draw(st.floats(0.0, 0.6)), draw(st.floats(0.0, 1.5))
    ratio = PassCosts({1: 1.0, 2: 1.0 + row, 32: 1.0 + 31 * row}).ratio
    return DraftingCosts(
        ratio=lambda num_draft: ratio(num_draft + 1),
        draft=draft,
        tokens_at_once=draw(st.integers(1, 8)),
        longest=draw(st.integers(1, 16)),
    )


@given(costs(), st.floats(0.0, 0.99), st.floats(0.0, 0.99))
def test_a_gain_grows_with_acceptance_and_is_never_below_plain_decoding(
    costs: DraftingCosts, one: float, other: float
) -> None:
    low, high = (expected_gain(rate, costs)[0] for rate in sorted((one, other)))
    assert 1.0 <= low <= high


@given(costs(), st.floats(0.0, 0.99))
def test_it_is_the_gain_of_the_serial_schedule(costs: DraftingCosts, rate: float) -> None:
    if costs.tokens_at_once == 1:
        plan = best_serial([rate] * costs.longest, costs.ratio, costs.draft, costs.longest)
        assert expected_gain(rate, costs) == (pytest.approx(plan.rate), plan.length)


@given(costs())
def test_a_drafter_pays_from_its_break_even_rate_on(costs: DraftingCosts) -> None:
    rate = break_even_rate(costs)
    if rate is None:
        assert expected_gain(0.999, costs)[0] < MIN_GAIN_OF_PAIR
    else:
        assert expected_gain(rate, costs)[0] >= MIN_GAIN_OF_PAIR > expected_gain(max(0.0, rate - 1e-6), costs)[0]
