"""The measured length against a machine with known costs: seconds are made up, decisions are not."""

import numpy as np
import pytest

from edgespec.draft_length import FixedLength, MeasuredLength

CPU = {width: 22 + 6 * (width - 1) for width in range(1, 20)}  # ms, rows are dear
GPU = {width: 22 + 0.5 * (width - 1) for width in range(1, 20)}  # ms, rows are nearly free


def speed(
    length: MeasuredLength | FixedLength,
    acceptance: float,
    verify_ms: dict[int, float],
    draft_ms: float = 0.0,
    rounds: int = 1500,
    seed: int = 0,
) -> float:
    """Tokens per second of a simulated run, relative to plain decoding."""
    rng = np.random.default_rng(seed)
    tokens, spent = 0, 0.0
    for _ in range(rounds):
        k = length.choose()
        accepted = 0
        while accepted < k and rng.random() < acceptance:
            accepted += 1
        draft_s, verify_s = k * draft_ms / 1e3, verify_ms[k + 1] / 1e3
        length.observe(k, accepted, draft_s, verify_s)
        tokens += accepted + 1
        spent += draft_s + verify_s
    return tokens / spent * verify_ms[1] / 1e3


@pytest.mark.parametrize("verify_ms", [CPU, GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize("draft_ms", [0.0, 5.0, 20.0])
def test_useless_drafts_cost_less_than_three_percent(verify_ms: dict[int, float], draft_ms: float) -> None:
    assert speed(MeasuredLength(), 0.0, verify_ms, draft_ms) > 0.97


@pytest.mark.parametrize("verify_ms", [CPU, GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize("draft_ms", [0.0, 4.0])
@pytest.mark.parametrize("acceptance", [0.3, 0.6, 0.8, 0.95])
def test_measured_length_is_near_the_best_fixed_one(
    verify_ms: dict[int, float], draft_ms: float, acceptance: float
) -> None:
    best = max(speed(FixedLength(k), acceptance, verify_ms, draft_ms, rounds=4000) for k in range(9))
    assert speed(MeasuredLength(), acceptance, verify_ms, draft_ms, rounds=4000) > 0.93 * best


def test_it_recovers_when_the_text_becomes_predictable() -> None:
    length = MeasuredLength()
    speed(length, 0.0, CPU, rounds=400)
    assert speed(length, 0.95, CPU, rounds=600) > 1.5
