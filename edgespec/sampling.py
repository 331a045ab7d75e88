"""From one row of logits to one token: a pure function of seed, prefix and logits.

The noise is keyed by (seed, position, token id), so drafter and target share it and the token at a
position depends neither on who drafts nor on how tokens are cut into blocks (drafter-invariant
speculative decoding, Daliri et al., arXiv:2408.07978).
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from edgespec.errors import EdgeSpecError, UsageError
from edgespec.types import Distribution, Row, TokenIds

Ids = npt.NDArray[np.intp]
Scores = npt.NDArray[np.float64]

# Uniforms have 32 bits, so Gumbel noise never exceeds −log(−log(1 − 2⁻³³)).
_LARGEST_NOISE = 22.88
_ROUNDING = 1e-5  # more than what single precision loses of a logit
_FOLD = 64
_LIKELY = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen. The defaults are greedy decoding.

    Applied in this order: penalties, temperature, top_k, top_p, min_p.

        temperature=0.8, seed=7      sampled, the same text for the same seed
        temperature=0.8, top_k=40    from the 40 likeliest tokens (ties with the 40th count)

    The repetition penalty (Keskar et al., arXiv:1909.05858) covers prompt and answer; presence and
    frequency penalties, as in the OpenAI API, the answer alone.

    Raises:
        UsageError: A value outside its range.
    """

    temperature: float = 0.0
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        ranges = {
            "temperature": (0.0, 100.0),
            "top_k": (0, math.inf),
            "top_p": (0.0, 1.0),
            "min_p": (0.0, 1.0),
            "repetition_penalty": (0.01, 100.0),
            "presence_penalty": (-100.0, 100.0),
            "frequency_penalty": (-100.0, 100.0),
            "seed": (0, 2**64 - 1),
        }
        for name, (low, high) in ranges.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float, np.number)):
                raise UsageError(f"{name} is {value!r}; wanted a number from {low} to {high}")
            if not low <= value <= high:
                raise UsageError(f"{name} is {value}; wanted a number from {low} to {high}")
        for name in ("top_k", "seed"):
            if not isinstance(getattr(self, name), (int, np.integer)):
                raise UsageError(f"{name} is {getattr(self, name)}; wanted a whole number")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def keeps_all(self) -> bool:
        """No token is cut off."""
        return self.top_k == 0 and self.top_p >= 1.0 and self.min_p <= 0.0

    @property
    def has_penalties(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class GumbelSampler:
    """Sampling with shared noise; num_prompt tokens of every prefix are the prompt.

    seed: of the noise; that of params unless given.
    """

    params: SamplingParams
    num_prompt: int = 0
    seed: int | None = None

    def __call__(self, logits: Row, tokens: TokenIds) -> int:
        """The token that follows tokens, [num_tokens], given its logits, [vocab_size].

        Raises:
            EdgeSpecError: The logits hold no finite maximum, so no token can be chosen.
        """
        logits, best = self._processed(logits, tokens)
        if self.params.is_greedy:
            return best
        if self.params.keeps_all:
            logits, ids = self._able_to_win(logits, best, len(tokens))
            return _noisy_argmax(self._scores(logits, logits.max()), ids, self._seed, len(tokens))
        scores, ids = self._kept(logits, best)
        return _noisy_argmax(scores, ids, self._seed, len(tokens))

    def distribution(self, logits: Row, tokens: TokenIds) -> Distribution:
        """What a call draws from, after all processors.

        Raises:
            EdgeSpecError: The logits hold no finite maximum.
        """
        logits, best = self._processed(logits, tokens)
        if self.params.is_greedy:
            return Distribution(np.array([best]), np.ones(1))
        scores, ids = self._kept(logits, best)
        weights = np.exp(scores)
        return Distribution(ids, weights / weights.sum())

    def pick(self, distribution: Distribution, position: int) -> int:
        """A token of a distribution, with the noise of a position; a pure function of seed and both."""
        with np.errstate(divide="ignore"):
            scores = np.log(distribution.probs)
        return _noisy_argmax(scores, distribution.ids, self._seed, position)

    def ranked(self, logits: Row, tokens: TokenIds, num_tokens: int) -> list[int]:
        """The token that a call gives, and those that it would give were all before them not there.

        Beyond the likeliest tokens before noise they may be others.
        """
        logits, best = self._processed(logits, tokens)
        if self.params.is_greedy:
            scores, ids = logits, np.arange(len(logits))
        else:
            scores, ids = self._kept(logits, best)
        leaders = _top_k(scores, min(len(scores), max(num_tokens, _FOLD)))
        ids, scores = ids[leaders], scores[leaders]
        if not self.params.is_greedy:
            scores = scores + gumbel_noise(self.params.seed, len(tokens), ids)
        return [int(ids[i]) for i in np.argsort(-scores, kind="stable")[:num_tokens]]

    def apart(self, domain: int) -> "GumbelSampler":
        """The same rule with noise of its own for each domain, a number from 0."""
        return GumbelSampler(self.params, self.num_prompt, _derived(self._seed, domain))

    @property
    def _seed(self) -> int:
        return self.params.seed if self.seed is None else self.seed

    def _processed(self, logits: Row, tokens: TokenIds) -> tuple[Row, int]:
        """Logits after penalties, and the likeliest token."""
        if self.params.has_penalties:
            logits = _penalized(logits, tokens, self.num_prompt, self.params)
        best = int(np.argmax(logits))
        if not math.isfinite(logits[best]):
            raise EdgeSpecError(
                f"the model gave {logits[best]} as its best logit; its weights or the run are damaged"
            )
        return logits, best

    def _able_to_win(self, logits: Row, best: int, position: int) -> tuple[Row, Ids]:
        """The logits that noise can lift above the best of the likeliest, and their ids: mostly a few."""
        if len(logits) <= _FOLD:
            return logits, np.arange(len(logits))
        leaders = _top_k(logits, _FOLD)
        noise = gumbel_noise(self._seed, position, leaders)
        reached = float((self._scores(logits[leaders], logits[best]) + noise).max())
        least = float(logits[best]) + self.params.temperature * (reached - _LARGEST_NOISE)
        ids = np.flatnonzero(logits >= least - _ROUNDING * (abs(least) + 1))
        return logits[ids], ids

    def _scores(self, logits: Row, best: np.floating[Any]) -> Scores:
        # From the best downwards and in doubles: a tiny temperature sends the rest to −∞, not the best to +∞.
        with np.errstate(over="ignore"):
            return (logits - best).astype(np.float64) / self.params.temperature

    def _kept(self, logits: Row, best: int) -> tuple[Scores, Ids]:
        """Log-probabilities relative to the best, of the tokens that stay, and their ids."""
        ids = _top_k(logits, self.params.top_k)
        scores = self._scores(logits[ids] if self.params.top_k else logits, logits[best])
        kept = _nucleus(scores, self.params.top_p, self.params.min_p)
        return scores[kept], ids[kept]


def _penalized(logits: Row, tokens: TokenIds, num_prompt: int, params: SamplingParams) -> Row:
    logits = logits.copy()
    seen = logits[tokens]  # one that comes twice is assigned the same twice
    logits[tokens] = np.where(seen > 0, seen / params.repetition_penalty, seen * params.repetition_penalty)
    if len(tokens) > num_prompt:
        answered, counts = np.unique(tokens[num_prompt:], return_counts=True)
        logits[answered] -= params.presence_penalty + params.frequency_penalty * counts.astype(np.float32)
    return logits


def _top_k(logits: Row, k: int) -> Ids:
    """Ids of the k largest logits and their ties; of all when k is 0.

    0.06 ms for 152,000 entries: maxima of slices bound the k-th largest from below, and few entries
    reach that bound. A full argpartition takes 1.4 ms.
    """
    if k == 0 or k >= len(logits):
        return np.arange(len(logits))
    columns = len(logits) // _FOLD
    maxima = logits[: columns * _FOLD].reshape(_FOLD, columns).max(axis=0) if columns else logits[:0]
    pool = np.append(maxima, logits[columns * _FOLD :])
    bound = _kth_largest(pool, k) if k <= len(pool) else -np.inf
    ids = np.flatnonzero(logits >= bound)
    return ids[logits[ids] >= _kth_largest(logits[ids], k)]


def _kth_largest(values: Row, k: int) -> np.floating[Any]:
    return np.partition(values, len(values) - k)[len(values) - k]  # type: ignore[no-any-return]


def _nucleus(scores: Row, top_p: float, min_p: float) -> Ids:
    """Indices that stay: the smallest set of the likeliest whose mass reaches top_p, and p ≥ min_p · max p.

    scores are log-probabilities relative to the best, which has 0.
    """
    if top_p >= 1.0 and min_p <= 0.0:
        return np.arange(len(scores))
    weights = np.exp(scores)
    mass = top_p * weights.sum()
    # Sorting all of 152,000 takes 12 ms; mostly a few hundred hold the mass.
    ids = _top_k(weights, _LIKELY)
    if weights[ids].sum() < mass:
        ids = np.arange(len(weights))
    order = ids[np.argsort(-weights[ids], kind="stable")]
    before = np.cumsum(weights[order]) - weights[order]
    kept = order[: max(1, int(np.searchsorted(before, mass, side="left")))]
    likely: Ids = kept[weights[kept] >= min_p]
    return likely


def _noisy_argmax(scores: Row, ids: Ids, seed: int, position: int) -> int:
    """argmax of score + Gumbel noise, without drawing noise for tokens that cannot win."""
    if len(scores) <= _FOLD:
        return int(ids[np.argmax(scores + gumbel_noise(seed, position, ids))])
    leaders = _top_k(scores, _FOLD)
    reached = (scores[leaders] + gumbel_noise(seed, position, ids[leaders])).max()
    alive = np.flatnonzero(scores >= reached - _LARGEST_NOISE)
    noisy = scores[alive] + gumbel_noise(seed, position, ids[alive])
    return int(ids[alive[np.argmax(noisy)]])


def gumbel_noise(seed: int, position: int, ids: Ids) -> npt.NDArray[np.float64]:
    """Standard Gumbel noise for token ids at a position, [num_ids]; a pure function of its arguments."""
    bits = _mix(_key(seed, position) ^ ids.astype(np.uint64)) >> np.uint64(32)
    uniform = (bits.astype(np.float64) + 0.5) * 2.0**-32
    return -np.log(-np.log(uniform))


def _derived(seed: int, domain: int) -> int:
    return int(_key(int(_key(domain, seed)), 0))


def _key(seed: int, position: int) -> np.uint64:
    """Of a position's noise. In Python's own numbers: an array of one takes a microsecond an operation."""
    return np.uint64(_mixed(_mixed(int(seed)) ^ position))


def _mixed(x: int) -> int:
    """_mix for one number."""
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The SplitMix64 generator's step (Steele et al., 2014); arithmetic wraps at 64 bits."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
