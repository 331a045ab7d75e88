"""Down at once, up after a cooldown."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.draft.memory_watch import COOLDOWN_S, LONGEST_COOLDOWN_S, Ladder, Margin, Tier
from edgespec.memory.free_memory import Bytes


def tiers(**needed: int) -> list[Tier]:
    return [Tier({"host": num_bytes}) for num_bytes in needed.values()]


TIERS = tiers(two=900, one=300, suffix=20, ngram=5, plain=0)


def margin(wanted: Bytes, times: float = 1.0) -> Margin:
    """What must stay free: times the wanted bytes, whether or not a drafter model is open."""
    both = {place: int(times * num_bytes) for place, num_bytes in wanted.items()}
    return lambda tier: both


WANTED = margin({"host": 100})


def look_at(ladder: Ladder, free: Bytes, wanted: Bytes, now_s: float) -> int:
    """A climb leaves half as much again as must be free."""
    return ladder.look(free, margin(wanted), margin(wanted, 1.5), now_s)


def look(ladder: Ladder, free: int, wanted: int, now_s: float) -> int:
    return look_at(ladder, {"host": free}, {"host": wanted}, now_s)


@pytest.mark.parametrize(
    ("free", "position"), [(1000, 0), (999, 1), (400, 1), (399, 2), (105, 3), (100, 4), (0, 4)]
)
def test_it_starts_on_the_highest_tier_that_fits(free: int, position: int) -> None:
    assert Ladder(TIERS).start({"host": free}, WANTED) == position


@pytest.mark.parametrize(("free", "position"), [(100, 0), (99, 1), (0, 1)])
def test_it_falls_at_once_and_no_further_than_it_must(free: int, position: int) -> None:
    assert look(Ladder(TIERS), free, 100, 0.0) == position


def test_it_falls_several_tiers_where_one_does_not_free_enough() -> None:
    assert look(Ladder(TIERS, position=1), 0, 290, 0.0) == 3
    assert look(Ladder(TIERS, position=1), 0, 10_000, 0.0) == 4


def test_it_does_not_climb_to_where_it_would_fall_again() -> None:
    ladder = Ladder(TIERS, position=1)
    for second in range(1000):
        assert look(ladder, 600 + 149, 100, float(second)) == 1
    assert look(ladder, 600 + 150, 100, 1000.0) == 1
    assert look(ladder, 600 + 150, 100, 1000.0 + COOLDOWN_S) == 0


def test_it_climbs_a_tier_at_a_time_each_after_its_cooldown() -> None:
    ladder = Ladder(TIERS, position=4)
    found = [look(ladder, 10_000, 100, 0.5 * tick) for tick in range(20)]
    assert found == [4] * 4 + [3] * 5 + [2] * 5 + [1] * 5 + [0]


def test_memory_that_is_short_for_a_moment_restarts_the_cooldown() -> None:
    ladder = Ladder(TIERS, position=1)
    for tick in range(100):
        free = 10_000 if tick % 3 else 500
        assert look(ladder, free, 100, 0.5 * tick) == 1


def test_memory_that_comes_and_goes_opens_a_model_ever_more_seldom() -> None:
    """The other program takes its memory back as soon as the model is there."""
    ladder = Ladder(TIERS, position=1)
    climbs = []
    for tick in range(36_000):
        now_s = 0.1 * tick
        if look(ladder, 50 if ladder.position == 0 else 10_000, 100, now_s) == 0:
            climbs.append(now_s)
    gaps = [after - before for before, after in pairwise(climbs)]
    assert gaps[:3] == pytest.approx([4.2, 8.2, 16.2], abs=0.3)
    assert gaps[-1] == pytest.approx(LONGEST_COOLDOWN_S, abs=1.0)
    assert len(climbs) < 22


def test_a_long_stay_restores_the_cooldown() -> None:
    ladder = Ladder(TIERS, position=1)
    look(ladder, 10_000, 100, 0.0)
    assert look(ladder, 10_000, 100, 2.0) == 0
    assert look(ladder, 0, 100, 2.1) == 1  # too soon: 4 s from now on
    look(ladder, 10_000, 100, 3.0)
    assert look(ladder, 10_000, 100, 6.9) == 1
    assert look(ladder, 10_000, 100, 7.0) == 0
    assert look(ladder, 0, 100, 100.0) == 1
    look(ladder, 10_000, 100, 101.0)
    assert look(ladder, 10_000, 100, 103.0) == 0


def test_a_refused_allocation_goes_to_a_tier_that_frees_something() -> None:
    ladder = Ladder(tiers(model=50, suffix=0, plain=0))
    assert ladder.fall(0.0) == 1
    assert ladder.fall(0.0) == 2
    assert ladder.is_at_bottom
    assert ladder.fall(0.0) == 2


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 2000), st.floats(0.01, 3.0)), max_size=60))
def test_what_is_free_is_never_less_than_wanted_but_at_the_bottom(looks: list[tuple[int, float]]) -> None:
    """With figures that are true, one look is enough."""
    ladder, now_s = Ladder(TIERS), 0.0
    for others, passed_s in looks:
        now_s += passed_s
        before = ladder.position
        free = 2000 - others - TIERS[before].needed["host"]
        after = look(ladder, free, 100, now_s)
        left = 2000 - others - TIERS[after].needed["host"]
        assert left >= 100 or ladder.is_at_bottom
        assert after >= before - 1


ON_TWO = [
    Tier({"host": 40, "cuda": 300}),  # a model on the device
    Tier({"host": 200}),  # one on the host
    Tier({"host": 20}),
    Tier({}),
]
EACH = {"host": 100, "cuda": 100}


@pytest.mark.parametrize(
    ("host", "cuda", "position"), [(140, 400, 0), (139, 400, 2), (300, 399, 1), (120, 0, 2), (0, 1000, 3)]
)
def test_what_starts_fits_in_each_place(host: int, cuda: int, position: int) -> None:
    wanted = {"host": 100, "cuda": 0}
    wanted["cuda"] = 100 if cuda else 0
    assert Ladder(ON_TWO).start({"host": host, "cuda": cuda}, margin(wanted)) == position


def test_it_falls_for_the_place_that_is_short_and_not_where_that_frees_nothing_there() -> None:
    ladder = Ladder(ON_TWO)
    assert look_at(ladder, {"host": 1000, "cuda": 99}, EACH, 0.0) == 1
    assert look_at(ladder, {"host": 1000, "cuda": 0}, EACH, 1.0) == 1, "nothing on the device can be freed"
    assert look_at(ladder, {"host": 99, "cuda": 0}, EACH, 2.0) == 2


def test_it_climbs_where_there_is_room_in_each_place_that_the_tier_takes_of() -> None:
    for cuda, wanted in ((449, 1), (450, 0)):
        ladder = Ladder(ON_TWO, position=1)
        for second in (0.0, 5.0):
            position = look_at(ladder, {"host": 110, "cuda": cuda}, EACH, second)
        assert position == wanted


def test_a_place_of_which_nothing_is_known_has_room() -> None:
    ladder = Ladder(ON_TWO, position=1)
    assert ladder.start({"host": 140}, WANTED) == 0
    assert look_at(ladder, {"host": 100}, {"host": 100}, 0.0) == 0
