import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.decoding.noise import able_to_win, gumbel_noise, sample_by_cdf, uniform


def test_noise_depends_on_seed_position_and_token_alone() -> None:
    ids = np.arange(50)
    noise = gumbel_noise(1, 2, ids)
    assert np.array_equal(noise[10:20], gumbel_noise(1, 2, ids[10:20]))
    assert not np.isin(noise, gumbel_noise(1, 3, ids)).any()
    assert not np.isin(noise, gumbel_noise(2, 2, ids)).any()


def test_noise_keeps_its_values() -> None:
    """Seeds keep their texts: these values are of the first release."""
    noise = gumbel_noise(7, 3, np.array([0, 1, 151_935]))
    assert np.allclose(noise, [0.703916009, -1.013388514, 0.288999605], rtol=0, atol=1e-9)


def able(seed: int, spread: float, temperature: float) -> tuple[np.ndarray, int]:
    """Which of 40,000 tokens are looked at, and which one wins."""
    logits = np.random.default_rng(seed % 1000).normal(0, spread, 40_000).astype(np.float32)
    noisy = logits.astype(np.float64) / temperature + gumbel_noise(seed, 5, np.arange(40_000))
    return able_to_win(logits, logits.max(), temperature, seed, 5), int(noisy.argmax())


@given(seed=st.integers(0, 2**64 - 1), spread=st.floats(0.01, 30), temperature=st.sampled_from([0.05, 0.8, 5.0]))
def test_the_winner_is_among_those_that_are_looked_at(seed: int, spread: float, temperature: float) -> None:
    ids, winner = able(seed, spread, temperature)
    assert winner in ids


@pytest.mark.parametrize("spread", [0.1, 1.0, 10.0])
def test_few_tokens_are_looked_at(spread: float) -> None:
    assert np.mean([len(able(seed, spread, 0.8)[0]) for seed in range(10)]) < 1000


@given(
    seed=st.integers(0, 2**32),
    size=st.sampled_from([1, 2, 255, 256, 257, 1000, 20_000]),
    share=st.sampled_from([0.0, 0.01, 1.0]),
    spread=st.sampled_from([0.0, 1.0, 12.0]),
    place=st.one_of(st.floats(0, 1, exclude_max=True), st.sampled_from([0.0, 1 - 2.0**-53])),
    kind=st.sampled_from([np.float32, np.float64]),
)
def test_a_draw_is_where_the_running_sum_passes_a_share(
    seed: int, size: int, share: float, spread: float, place: float, kind: type
) -> None:
    rng = np.random.default_rng(seed)
    weights = np.exp(-spread * rng.random(size)).astype(kind) * (rng.random(size) < share)
    weights[rng.integers(size)] = 1.0
    index, reached = sample_by_cdf(weights, place), np.cumsum(weights, dtype=np.float64)
    before = reached[index] - weights[index]
    assert weights[index] > 0
    assert before - 1e-6 * reached[-1] <= place * reached[-1] <= reached[index] + 1e-6 * reached[-1]


def test_uniform_numbers_are_spread_evenly_and_keep_their_values() -> None:
    """Chi-square over 64 stretches; 103.4 is the 99.9 % point of 63 degrees of freedom."""
    numbers = np.array([uniform(5, position) for position in range(20_000)])
    counts = np.bincount((64 * numbers).astype(int), minlength=64)
    assert ((counts - 312.5) ** 2 / 312.5).sum() < 103.4
    assert np.isclose(uniform(7, 3), 0.801238365264, rtol=0, atol=1e-12)
