import numpy as np
import pytest

from edgespec.draft.learned_head import ShadowTrial


def counted(num_new: int, num_old: int, num_both: int = 0) -> ShadowTrial:
    new = np.array([True] * num_new + [False] * num_old + [True] * num_both)
    old = np.array([False] * num_new + [True] * num_old + [True] * num_both)
    return ShadowTrial().after(new, old)


@pytest.mark.parametrize(
    ("trial", "verdict"),
    [
        (counted(0, 0, 500), "open"),
        (counted(0, 0, 600), "worse"),  # nothing comes of it
        (counted(60, 50, 600), "open"),
        (counted(19, 0), "open"),  # too few to say
        (counted(20, 0), "better"),
        (counted(0, 20), "worse"),
        (counted(60, 40), "open"),  # a coin gives that
        (counted(80, 40), "better"),
        (counted(40, 80), "worse"),
        (counted(110, 100, 4000), "worse"),  # has had its chance
    ],
)
def test_verdicts_need_more_than_a_coin_gives(trial: ShadowTrial, verdict: str) -> None:
    assert trial.verdict == verdict


def test_equal_ways_seldom_pass_at_any_look() -> None:
    rng, num_passed = np.random.default_rng(0), 0
    for _ in range(200):
        trial = ShadowTrial()
        while trial.verdict == "open":
            trial = trial.after(rng.random(100) < 0.3, rng.random(100) < 0.3)
        num_passed += trial.verdict == "better"
    assert num_passed <= 16
