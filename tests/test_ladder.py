"""Down at once, up with patience."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.ladder import LONGEST_PATIENCE_S, PATIENCE_S, Ladder, Rung

RUNGS = [Rung("two models", 900), Rung("one model", 300), Rung("suffix", 20), Rung("ngram", 5), Rung("plain", 0)]
WANTED = 100


@pytest.mark.parametrize(
    ("free", "position"), [(1000, 0), (999, 1), (400, 1), (399, 2), (105, 3), (100, 4), (0, 4)]
)
def test_it_starts_on_the_highest_rung_that_fits(free: int, position: int) -> None:
    assert Ladder(RUNGS).start(free, WANTED) == position


@pytest.mark.parametrize(("free", "position"), [(100, 0), (99, 1), (0, 1)])
def test_it_falls_at_once_and_no_further_than_it_must(free: int, position: int) -> None:
    assert Ladder(RUNGS).look(free, WANTED, 0.0) == position


def test_it_falls_several_rungs_where_one_does_not_free_enough() -> None:
    assert Ladder(RUNGS, position=1).look(0, 290, 0.0) == 3
    assert Ladder(RUNGS, position=1).look(0, 10_000, 0.0) == 4


def test_it_does_not_climb_to_where_it_would_fall_again() -> None:
    ladder = Ladder(RUNGS, position=1)
    for second in range(1000):
        assert ladder.look(600 + 149, WANTED, float(second)) == 1
    assert ladder.look(600 + 150, WANTED, 1000.0) == 1
    assert ladder.look(600 + 150, WANTED, 1000.0 + PATIENCE_S) == 0


def test_it_climbs_a_rung_at_a_time_each_after_its_patience() -> None:
    ladder = Ladder(RUNGS, position=4)
    found = [ladder.look(10_000, WANTED, 0.5 * tick) for tick in range(20)]
    assert found == [4] * 4 + [3] * 5 + [2] * 5 + [1] * 5 + [0]


def test_memory_that_is_short_for_a_moment_starts_the_patience_anew() -> None:
    ladder = Ladder(RUNGS, position=1)
    for tick in range(100):
        free = 10_000 if tick % 3 else 500
        assert ladder.look(free, WANTED, 0.5 * tick) == 1


def test_memory_that_comes_and_goes_opens_a_model_ever_more_seldom() -> None:
    """The other program takes its memory back as soon as the model is there."""
    ladder = Ladder(RUNGS, position=1)
    climbs = []
    for tick in range(36_000):
        now_s = 0.1 * tick
        if ladder.look(50 if ladder.position == 0 else 10_000, WANTED, now_s) == 0:
            climbs.append(now_s)
    gaps = [after - before for before, after in pairwise(climbs)]
    assert gaps[:3] == pytest.approx([4.2, 8.2, 16.2], abs=0.3)
    assert gaps[-1] == pytest.approx(LONGEST_PATIENCE_S, abs=1.0)
    assert len(climbs) < 22


def test_a_long_stay_restores_the_patience() -> None:
    ladder = Ladder(RUNGS, position=1)
    ladder.look(10_000, WANTED, 0.0)
    assert ladder.look(10_000, WANTED, 2.0) == 0
    assert ladder.look(0, WANTED, 2.1) == 1  # too soon: 4 s from now on
    ladder.look(10_000, WANTED, 3.0)
    assert ladder.look(10_000, WANTED, 6.9) == 1
    assert ladder.look(10_000, WANTED, 7.0) == 0
    assert ladder.look(0, WANTED, 100.0) == 1
    ladder.look(10_000, WANTED, 101.0)
    assert ladder.look(10_000, WANTED, 103.0) == 0


def test_a_refused_allocation_goes_to_a_rung_that_frees_something() -> None:
    rungs = [Rung("model", 50), Rung("suffix", 0), Rung("plain", 0)]
    ladder = Ladder(rungs)
    assert ladder.fall(0.0) == 1
    assert ladder.fall(0.0) == 2
    assert ladder.is_at_bottom
    assert ladder.fall(0.0) == 2


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 2000), st.floats(0.01, 3.0)), max_size=60))
def test_what_is_free_is_never_less_than_wanted_but_at_the_bottom(looks: list[tuple[int, float]]) -> None:
    """With figures that are true, one look is enough."""
    ladder, now_s = Ladder(RUNGS), 0.0
    for others, passed_s in looks:
        now_s += passed_s
        before = ladder.position
        free = 2000 - others - RUNGS[before].needed_bytes
        after = ladder.look(free, WANTED, now_s)
        left = 2000 - others - RUNGS[after].needed_bytes
        assert left >= WANTED or ladder.is_at_bottom
        assert after >= before - 1
