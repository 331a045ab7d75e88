import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.decoding.acceptance import rejection
from edgespec.decoding.noise import gumbel_noise, uniform
from edgespec.decoding.sampling import GumbelSampler, SamplingParams
from edgespec.decoding.tree import Tree
from edgespec.errors import EdgeSpecError, UsageError
from edgespec.types import TokenConstraint, TokenIds

seeds = st.integers(0, 2**32)
TOKENS = np.array([3, 1, 4, 1, 5], np.int32)


def row(seed: int, size: int = 500, spread: float = 3.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, spread, size).astype(np.float32)


def sample(logits: np.ndarray, tokens: np.ndarray = TOKENS, num_prompt: int = 0, **params: float) -> int:
    return GumbelSampler(SamplingParams(**params), num_prompt)(logits, tokens)  # type: ignore[arg-type]


@given(seed=seeds)
def test_greedy_takes_the_largest_logit(seed: int) -> None:
    logits = row(seed)
    assert sample(logits) == logits.argmax()


def plainly(
    logits: np.ndarray, tokens: np.ndarray, num_prompt: int, params: SamplingParams, least: float = 0.0
) -> tuple[int, dict]:
    """What the sampler is to give, and what from, word for word: everything sorted, noise for every token."""
    logits = logits.copy()
    for token in set(tokens.tolist()):
        penalty = np.float32(params.repetition_penalty)
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    for token in set(tokens[num_prompt:].tolist()) if params.has_penalties else ():
        count = np.float32((tokens[num_prompt:] == token).sum())
        logits[token] -= np.float32(params.presence_penalty) + np.float32(params.frequency_penalty) * count
    for token, bias in params.logit_bias.items():
        logits[token : token + 1] += np.float32(bias)
    if params.is_greedy:
        return int(logits.argmax()), {int(logits.argmax()): 1.0}
    with np.errstate(over="ignore"):
        scores = (logits - logits.max()).astype(np.float64) / params.temperature
    weights = np.exp(scores)
    stays = weights >= least
    if params.top_k:
        stays &= logits >= np.sort(logits)[-min(params.top_k, len(logits))]
    if params.top_p < 1.0:
        ids = np.flatnonzero(stays)
        order = ids[np.argsort(-weights[ids], kind="stable")]
        before = np.cumsum(weights[order]) - weights[order]
        stays[order[max(1, np.sum(before < params.top_p * weights[ids].sum())) :]] = False
    stays &= weights >= params.min_p
    ids = np.flatnonzero(stays)
    noisy = scores[ids] + gumbel_noise(params.seed, len(tokens), ids)
    return int(ids[noisy.argmax()]), dict(zip(ids.tolist(), weights[ids] / weights[ids].sum(), strict=True))


@st.composite
def rows(draw: st.DrawFn) -> np.ndarray:
    """Peaky and flat ones, with ties, far-off values and tokens that cannot come."""
    rng = np.random.default_rng(draw(seeds))
    size = draw(st.sampled_from([1, 5, 64, 65, 400, 513, 3000, 20_000, 151_936]))
    logits = rng.normal(0, draw(st.sampled_from([0.0, 0.01, 1.0, 3.0, 30.0, 1e30])), size)
    logits[rng.integers(0, size, draw(st.sampled_from([0, 1, 50])))] += draw(st.sampled_from([-1.0, 8.0, 30.0]))
    step = draw(st.sampled_from([0.0, 0.125, 2.0]))
    logits = np.round(logits / step) * step if step else logits
    logits[rng.random(size) < draw(st.sampled_from([0.0, 0.3, 1.0]))] = -np.inf
    logits[rng.integers(size)] = 1.0
    return logits.astype(np.float32)


SAMPLINGS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-300, 1e-31, 1e-9, 0.05, 0.8, 1.0, 3.0, 100.0]),
    top_k=st.sampled_from([0, 0, 1, 40, 2000]),
    top_p=st.sampled_from([0.0, 0.25, 0.5, 0.95, 0.9999, 1 - 2**-53, 1.0, 1.0]),
    min_p=st.sampled_from([0.0, 0.0, 1e-9, 0.1, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.1]),
    logit_bias=st.sampled_from([{}, {3: 1.5, 60: -2, 10**6: 100}]),
    seed=st.integers(0, 2**64 - 1),
)


@given(logits=rows(), params=SAMPLINGS, num_tokens=st.integers(0, 60), num_prompt=st.integers(0, 60))
def test_what_is_skipped_changes_no_token(
    logits: np.ndarray, params: SamplingParams, num_tokens: int, num_prompt: int
) -> None:
    tokens = np.random.default_rng(num_tokens).integers(0, len(logits), num_tokens).astype(np.int32)
    sampler = GumbelSampler(params, num_prompt)
    token, chances = plainly(logits, tokens, num_prompt, params)
    assert sampler(logits, tokens) == token
    found = sampler.distribution(logits, tokens)
    assert found.ids.tolist() == list(chances)
    rtol = 1e-9 if found.weights.dtype == np.float64 else 2e-5
    assert np.allclose(found.probs, list(chances.values()), rtol=rtol, atol=1e-9 * (rtol > 1e-9))


def dense(chances: dict, size: int) -> np.ndarray:
    probs = np.zeros(size)
    probs[list(chances)] = list(chances.values())
    return probs


def picked(probs: np.ndarray, num_ids: int, seed: int, position: int) -> int:
    """The token with the most noise; where more than 1024 can come, by all running sums."""
    if num_ids > 1024:
        reached = np.cumsum(probs)
        return int(np.searchsorted(reached, uniform(seed, position) * reached[-1], side="right"))
    with np.errstate(divide="ignore"):
        return int((np.log(probs) + gumbel_noise(seed, position, np.arange(len(probs)))).argmax())


@given(logits=rows(), params=SAMPLINGS, position=st.integers(0, 60), doubt=st.sampled_from([0.0, 0.1, 2.0]))
def test_rejection_is_that_of_probabilities_for_every_token(
    logits: np.ndarray, params: SamplingParams, position: int, doubt: float
) -> None:
    rng = np.random.default_rng(position)
    size, tokens = len(logits), rng.integers(0, len(logits), position).astype(np.int32)
    other = (logits + rng.normal(0, doubt, size)).astype(np.float32)
    sampler, drafting = GumbelSampler(params), GumbelSampler(params).drafting(position)
    draft = drafting.distribution(other, tokens)
    token = drafting.pick(draft, position)
    found = rejection(tokens, Tree(np.array([token]), distributions=(draft,)), np.stack([logits, other]), sampler)

    p_of = plainly(logits, tokens, 0, params)[1]
    q_of = plainly(other, tokens, 0, params, least=np.exp(-11.5))[1]
    p, q = dense(p_of, size), dense(q_of, size)
    assert token == picked(q, len(q_of), drafting.seed, position)
    if uniform(sampler.apart(2**63).seed, position) < p[token] / q[token]:
        after = np.append(tokens, token)
        next_of = plainly(other, after, 0, params)[1]
        wanted = [token, picked(dense(next_of, size), len(next_of), params.seed, position + 1)]
    else:
        wanted = [picked(np.maximum(0, p - q), len(p_of), sampler.apart(2**63 + 1).seed, position)]
    assert found.tolist() == wanted


@given(seed=seeds, position=st.integers(1, 10**6), spread=st.floats(0.01, 30))
def test_skipping_hopeless_tokens_never_changes_the_winner(seed: int, position: int, spread: float) -> None:
    logits = row(seed, 2000, spread)
    tokens = np.zeros(position % 1000 + 1, np.int32)
    ids = np.arange(2000)
    full = logits.astype(np.float64) / 0.9 + gumbel_noise(seed, len(tokens), ids)
    assert sample(logits, tokens, temperature=0.9, seed=seed) == full.argmax()


@pytest.mark.slow
def test_samples_follow_the_softmax() -> None:
    """Chi-square of 200,000 draws at as many positions; 30.1 is the 99.9 % point of 11 degrees of freedom."""
    logits = np.linspace(-2, 2, 12).astype(np.float32)
    ids = np.arange(12)
    noise = np.stack([gumbel_noise(7, position, ids) for position in range(200_000)])
    counts = np.bincount((logits / 0.8 + noise).argmax(axis=1), minlength=12)
    p = np.exp(logits / 0.8)
    expected = 200_000 * p / p.sum()
    assert ((counts - expected) ** 2 / expected).sum() < 30.1


def test_sampler_and_noise_agree_on_the_distribution() -> None:
    logits = np.linspace(-2, 2, 12).astype(np.float32)
    tokens = np.zeros(2000, np.int32)
    drawn = [sample(logits, tokens[:n], temperature=0.8, seed=7) for n in range(1, 2000)]
    noise = np.stack([gumbel_noise(7, n, np.arange(12)) for n in range(1, 2000)])
    assert drawn == (logits.astype(np.float64) / 0.8 + noise).argmax(axis=1).tolist()


def test_truncation_is_never_violated() -> None:
    logits = row(5)
    allowed = set(np.argsort(-logits)[:5])
    tokens = np.zeros(400, np.int32)
    drawn = {sample(logits, tokens[:n], temperature=5.0, top_k=5, seed=n) for n in range(1, 400)}
    assert drawn == allowed


def test_repetition_penalty_covers_prompt_and_answer() -> None:
    logits = np.array([2.0, 1.9, -1.0], np.float32)
    assert sample(logits, np.array([0], np.int32), num_prompt=1, repetition_penalty=1.2) == 1
    negative = np.array([-1.0, -1.1, -9.0], np.float32)
    assert sample(negative, np.array([0], np.int32), num_prompt=1, repetition_penalty=1.2) == 1


def test_repetition_penalty_counts_a_token_once() -> None:
    logits = np.array([2.0, 1.5, -1.0], np.float32)
    assert sample(logits, np.array([0, 0, 0], np.int32), num_prompt=1, repetition_penalty=1.3) == 0
    assert sample(logits, np.array([0, 0, 0], np.int32), num_prompt=1, repetition_penalty=1.4) == 1


def test_noise_apart_is_that_of_another_seed_alone() -> None:
    logits, params = row(9), SamplingParams(temperature=1.0, seed=5)
    apart = GumbelSampler(params).apart(3)
    assert apart != GumbelSampler(params).apart(4)
    again = GumbelSampler(SamplingParams(temperature=1.0, seed=apart.seed or 0))
    drawn = [[sampler(logits, TOKENS[:n]) for n in range(5)] for sampler in (apart, again, GumbelSampler(params))]
    assert drawn[0] == drawn[1] != drawn[2]


def test_presence_and_frequency_penalties_cover_the_answer_alone() -> None:
    logits = np.array([2.0, 1.9, -1.0], np.float32)
    assert sample(logits, np.array([0, 0], np.int32), num_prompt=2, presence_penalty=5.0) == 0
    assert sample(logits, np.array([2, 0], np.int32), num_prompt=1, presence_penalty=0.2) == 1
    assert sample(logits, np.array([2, 0], np.int32), num_prompt=1, frequency_penalty=0.06) == 0
    assert sample(logits, np.array([2, 0, 0], np.int32), num_prompt=1, frequency_penalty=0.06) == 1


def test_a_bias_of_minus_100_bans_a_token_whatever_its_logit() -> None:
    logits = np.array([5000.0, 0.0, -3.0], np.float32)
    assert sample(logits, logit_bias={0: -99.9}) == 0
    assert sample(logits, logit_bias={0: -100}) == 1
    assert sample(logits, logit_bias={0: -100, 2: 100}) == 2
    banned = GumbelSampler(SamplingParams(temperature=1.0, logit_bias={0: -100})).distribution(logits, TOKENS)
    assert banned.probability(0) == 0.0


def test_a_mask_sees_the_answer_alone_and_bans_what_it_does_not_allow() -> None:
    seen = []

    def mask(answer: np.ndarray) -> np.ndarray:
        seen.append(answer.tolist())
        return np.array([False, True, True, True])

    logits = np.array([3.0, 2.0, 1.0], np.float32)  # a drafter's, which lacks the last token
    assert GumbelSampler(SamplingParams(), num_prompt=3, mask=mask)(logits, TOKENS) == 1
    assert seen == [[1, 5]]


class Tight(TokenConstraint):
    """Leaves room behind all tokens but one, and knows a way to the end by another."""

    def bias(self, answer: TokenIds) -> None:
        return None

    def has_ample_room(self, answer: TokenIds) -> bool:
        return False

    def leaves_room(self, answer: TokenIds, token: int) -> bool:
        return token != 0

    def way_out(self, answer: TokenIds) -> int:
        return 3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_near_the_end_of_a_constrained_answer_the_distribution_is_the_choice_of_a_call(temperature: float) -> None:
    """Or else a greedy text would depend on drafts, and a banned token could come."""
    logits = np.array([9.0, 8.0, -9.0, -9.0], np.float32)
    for bias in ({}, {3: -100}):
        params = SamplingParams(temperature=temperature, logit_bias=bias)
        sampler = GumbelSampler(params, constraint=Tight())
        assert sampler.distribution(logits, TOKENS).ids.tolist() == [sampler(logits, TOKENS)] == [1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_nothing_may_follow_the_error_says_so(temperature: float) -> None:
    with pytest.raises(UsageError, match="ban less"):
        sample(np.ones(2, np.float32), temperature=temperature, logit_bias={0: -100, 1: -100})


@pytest.mark.parametrize("bias", [{-1: 1.0}, {"a": 1.0}, {1: 101.0}, {1: float("nan")}, {1: None}, 5, {True: 1.0}])
def test_biases_that_make_no_sense_are_refused(bias: object) -> None:
    with pytest.raises(UsageError, match="logit_bias"):
        SamplingParams(logit_bias=bias)  # type: ignore[arg-type]


def test_params_keep_their_own_biases() -> None:
    bias = {1: 2.0}
    params = SamplingParams(logit_bias=bias)
    bias[1] = 3.0
    assert params.logit_bias == {1: 2.0}
    assert hash(params) == hash(SamplingParams(logit_bias={1: 2.0}))


def test_logits_are_left_as_they_were() -> None:
    logits = row(1)
    kept = logits.copy()
    sample(logits, temperature=0.7, top_k=9, top_p=0.8, repetition_penalty=1.3, presence_penalty=0.5)
    sample(logits, logit_bias={1: -100, 2: 3.0})
    assert np.array_equal(logits, kept)


@pytest.mark.parametrize("broken", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_are_an_error_and_not_a_token(broken: float, temperature: float) -> None:
    logits = row(1)
    logits[77] = broken
    with pytest.raises(EdgeSpecError, match="damaged"):
        sample(logits, temperature=temperature)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_k", -1),
        ("top_p", 1.1),
        ("min_p", -0.5),
        ("repetition_penalty", 0.0),
        ("seed", -1),
        ("seed", 1.5),
        ("top_k", 2.5),
        ("presence_penalty", float("inf")),
    ],
)
def test_values_out_of_range_are_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(UsageError, match=name):
        SamplingParams(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [1e-300, 1e-44, 1e-9, 1e-3])
def test_tiny_temperature_is_nearly_greedy(temperature: float) -> None:
    logits = row(3)
    assert sample(logits, temperature=temperature, top_p=0.9) == logits.argmax()


@pytest.mark.parametrize("temperature", [0.05, 0.8, 5.0])
@pytest.mark.parametrize("spread", [0.1, 2.0])
def test_only_tokens_that_cannot_win_are_left_out(temperature: float, spread: float) -> None:
    """The choice is that over all tokens with noise for each."""
    rng = np.random.default_rng(4)
    for position in range(20):
        row = rng.normal(0, spread, 5000).astype(np.float32)
        row[rng.integers(0, 5000, 40)] = -np.inf
        sampler = GumbelSampler(SamplingParams(temperature=temperature, seed=9))
        noise = gumbel_noise(9, position, np.arange(5000))
        scores = (row - row.max()).astype(np.float64) / temperature + noise
        assert sampler(row, np.zeros(position, np.int32)) == int(np.argmax(scores))
