"""The closed forms of schedules against the process that they describe, run with dice."""

from math import ceil
from random import Random

import pytest

from edgespec.draft.overlap import best_pipelined, best_serial, pipelined_rate, serial_rate


def ratio(num_draft: int) -> float:
    return 1 + 0.03 * num_draft


def rolled(chance: float, step: float, wait: int, length: int, slowed: tuple[float, float]) -> float:
    """Tokens a step of a target and a drafter that are simulated, each token kept or not by a die."""
    die = Random(1).random
    ready, now, tokens = 0.0, 0.0, 0
    for _ in range(40_000):
        waited = max(0.0, wait - ready)
        ready += waited
        due = ceil(ready) - ready
        if due <= 0.15 and ready < length:  # a step that is nearly done is waited for
            waited, ready = waited + due, ready + due
        verified = min(int(ready), length)
        # Step by step: both work until the drafter is as far ahead as it goes, then the target alone.
        busy_s = min(slowed[0] * ratio(verified), (2 * length + 1 - ready) * step * slowed[1])
        now += waited * step + busy_s + ratio(verified) - busy_s / slowed[0]
        ready += busy_s / (step * slowed[1]) - verified
        kept = 0
        while kept < verified and die() < chance:
            kept += 1
        tokens += kept + 1
        goes_on = kept == verified and ready >= 1 and die() < chance
        ready = ready - 1 if goes_on else 0.0
    return tokens / now


@pytest.mark.parametrize("slowed", [(1.0, 1.0), (1.2, 1.5)])
@pytest.mark.parametrize(("wait", "length"), [(0, 4), pytest.param(1, 5, marks=pytest.mark.slow), (3, 8), (4, 4)])
@pytest.mark.parametrize("step", [0.05, pytest.param(0.2, marks=pytest.mark.slow), 0.5])
@pytest.mark.parametrize("chance", [0.4, 0.8])
def test_two_at_once(chance: float, step: float, wait: int, length: int, slowed: tuple[float, float]) -> None:
    found = pipelined_rate([chance] * 64, ratio, step, wait, length, slowed)
    assert found == pytest.approx(rolled(chance, step, wait, length, slowed), rel=0.02)


def test_published_bests_are_met() -> None:
    """Generalised PEARL with 3 % for each token verified: rates known for chances and costs of a draft."""
    for chance, step, in_sequence, at_once in (
        (0.7, 0.1, 1.82, 1.96),
        (0.8, 0.2, 1.75, 2.18),
        (0.8, 0.5, 1.18, 1.52),
        (0.9, 0.1, 3.00, 3.79),
    ):
        assert best_serial([chance] * 24, ratio, step, 24).rate == pytest.approx(in_sequence, abs=0.01)
        assert best_pipelined([chance] * 24, ratio, step, 24).rate == pytest.approx(at_once, abs=0.03)


@pytest.mark.parametrize("step", [0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("chance", [0.3, 0.5, 0.7, 0.9, 0.95])
def test_at_once_never_loses_to_in_sequence(chance: float, step: float) -> None:
    one, both = (best([chance] * 24, ratio, step, 24) for best in (best_serial, best_pipelined))
    assert both.rate >= 0.999 * one.rate
    assert serial_rate([chance] * 24, ratio, step, one.length) == one.rate


def test_a_useless_drafter_is_plain_decoding_in_both() -> None:
    assert best_serial([0.0] * 8, ratio, 0.2, 8)[:3] == (1.0, 0, 0)
    assert best_pipelined([0.0] * 8, ratio, 0.2, 8).rate == pytest.approx(1.0, rel=0.2)


@pytest.mark.parametrize("wait", [0, 1, 3, 6])
@pytest.mark.parametrize("step", [0.05, 0.12, 0.3, 0.9])
def test_drafts_that_are_always_kept_are_planned_for_too(step: float, wait: int) -> None:
    """What comes of a certain drafter is the limit of what comes of better and better ones, and found as fast."""
    rates = [
        pipelined_rate([chance] * 24, lambda n: 1 + 0.03 * n, step, wait, 8) for chance in (0.999, 0.999999, 1.0)
    ]
    assert rates[0] <= rates[1] * 1.01
    assert rates[1] == pytest.approx(rates[2], rel=1e-3)
    assert rates[2] <= 9 / 1.24 * 1.001


@pytest.mark.parametrize("chance", [0.3, 0.6])
def test_a_step_that_nearly_fits_into_a_pass_is_planned_for_as_one_that_fits(chance: float) -> None:
    """A real step is a little longer than half a pass, or a little shorter; a plan must not hang on that."""
    rates = [best_pipelined([chance] * 24, lambda n: 1.0, step, 24).rate for step in (0.499, 0.501, 0.51)]
    assert rates[1] == pytest.approx(rates[0], rel=0.005)
    assert rates[2] == pytest.approx(rates[0], rel=0.02)
