import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.noise import able_to_win, gumbel_noise


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
    """Of 40,000 tokens those that are looked at, and the winner."""
    logits = np.random.default_rng(seed % 1000).normal(0, spread, 40_000).astype(np.float32)
    noisy = logits.astype(np.float64) / temperature + gumbel_noise(seed, 5, np.arange(40_000))
    return able_to_win(logits, temperature, seed, 5), int(noisy.argmax())


@given(seed=st.integers(0, 2**64 - 1), spread=st.floats(0.01, 30), temperature=st.sampled_from([0.05, 0.8, 5.0]))
def test_the_winner_is_among_those_that_are_looked_at(seed: int, spread: float, temperature: float) -> None:
    ids, winner = able(seed, spread, temperature)
    assert winner in ids


@pytest.mark.parametrize("spread", [0.1, 1.0, 10.0])
def test_few_tokens_are_looked_at(spread: float) -> None:
    assert np.mean([len(able(seed, spread, 0.8)[0]) for seed in range(10)]) < 1000
