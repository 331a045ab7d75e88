import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.decoding.truncation import least_share, likely, nucleus, scores_of, top_k

seeds = st.integers(0, 2**32)


def row(seed: int, size: int = 500, spread: float = 3.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, spread, size).astype(np.float32)


@given(seed=seeds, size=st.integers(1, 700), k=st.integers(1, 800))
def test_top_k_keeps_the_k_largest(seed: int, size: int, k: int) -> None:
    logits = row(seed, size)
    assert set(top_k(logits, k)) == set(np.argsort(-logits)[:k])


@given(
    seed=seeds,
    size=st.integers(65, 1000) | st.integers(60_000, 160_000),
    k=st.integers(1, 60),
    step=st.sampled_from([0.0, 0.5, 4.0]),
    share=st.sampled_from([0.0, 0.5, 0.999]),
)
def test_top_k_is_all_that_reaches_the_kth_largest_in_rising_order(
    seed: int, size: int, k: int, step: float, share: float
) -> None:
    """In rows with ties, and with tokens that cannot come."""
    logits = row(seed, size)
    logits = np.round(logits / step).astype(np.float32) * np.float32(step) if step else logits
    logits[np.random.default_rng(seed).random(size) < share] = -np.inf
    assert np.array_equal(top_k(logits, k), np.flatnonzero(logits >= np.sort(logits)[-k]))


def test_top_k_keeps_ties_with_the_last() -> None:
    assert set(top_k(np.array([1, 5, 5, 5, 0], np.float32), 2)) == {1, 2, 3}


@given(seed=seeds, size=st.integers(1, 3000), top_p=st.floats(0.01, 0.999), spread=st.floats(0.01, 8))
def test_top_p_keeps_the_smallest_set_that_holds_the_mass(
    seed: int, size: int, top_p: float, spread: float
) -> None:
    logits = row(seed, size, spread)
    p = np.exp(scores_of(logits, logits.max(), 1.0))
    p /= p.sum()
    ids = nucleus(logits, logits.max(), 1.0, top_p)
    kept = p[ids]
    assert kept.sum() >= top_p - 1e-9
    assert kept.sum() - kept.min() < top_p + 1e-9
    assert kept.min() >= np.delete(p, ids).max(initial=0.0)


@pytest.mark.parametrize(("top_p", "num_kept"), [(0.0, 1), (0.25, 1000), (0.9999, 4000), (1 - 2**-53, 4000)])
def test_of_equal_tokens_a_nucleus_keeps_the_first(top_p: float, num_kept: int) -> None:
    flat = np.full(4000, 7.0, np.float32)
    assert nucleus(flat, flat[0], 0.8, top_p).tolist() == list(range(num_kept))


@given(seed=seeds, min_p=st.floats(0.001, 1))
def test_min_p_keeps_what_is_likely_enough_beside_the_best(seed: int, min_p: float) -> None:
    logits = row(seed)
    weights = np.exp(scores_of(logits, logits.max(), 0.7))
    assert set(likely(logits, logits.max(), 0.7, min_p)) == set(np.flatnonzero(weights >= min_p))


def test_a_nucleus_of_ten_thousands_is_found_without_sorting_all(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = row(3, 60_000, 1.0)
    weights = np.exp(scores_of(logits, logits.max(), 1.0))
    order = np.argsort(-weights, kind="stable")
    wanted = np.sort(order[: np.searchsorted(np.cumsum(weights[order]), 0.95 * weights.sum()) + 1])
    sorted_sizes = []
    sort = np.sort
    monkeypatch.setattr(np, "sort", lambda values: sorted_sizes.append(len(values)) or sort(values))
    assert np.array_equal(nucleus(logits, logits.max(), 1.0, 0.95), wanted)
    assert len(wanted) > 10_000 > 5 * max(sorted_sizes)


@given(
    seed=seeds,
    size=st.sampled_from([1, 15, 16, 500, 5000]),
    spread=st.floats(0.01, 30),
    top_p=st.sampled_from([0.1, 0.5, 0.95, 1.0]),
    step=st.sampled_from([0.0, 0.5]),
)
def test_a_token_has_at_least_the_least_share(
    seed: int, size: int, spread: float, top_p: float, step: float
) -> None:
    logits = row(seed, size, spread)
    logits = np.round(logits / step).astype(np.float32) * np.float32(step) if step else logits
    weights = np.exp(scores_of(logits, logits.max(), 0.8))
    order = np.argsort(-weights, kind="stable")
    before = np.cumsum(weights[order]) - weights[order]
    weights[order[before >= top_p * weights.sum()]] = 0.0
    shares = weights / weights.sum()
    for token in {int(logits.argmax()), int(order[size // 100]), int(order[size // 3]), int(order[-1])}:
        assert least_share(logits, logits.max(), 0.8, top_p, token) <= shares[token]


def test_the_least_share_of_a_likely_token_is_most_of_it() -> None:
    logits = row(1, 100_000)
    logits[7] = logits.max() + 12
    share = 1 / np.exp(scores_of(logits, logits[7], 0.8)).sum()
    assert 0.9 * share < least_share(logits, logits[7], 0.8, 0.95, 7) < share
