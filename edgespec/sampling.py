"""From one row of logits to one token: a pure function of seed, prefix and logits.

The noise is keyed by (seed, position, token id), so drafter and target share it and the token at a
position depends neither on who drafts nor on how tokens are cut into blocks (drafter-invariant
speculative decoding, Daliri et al., arXiv:2408.07978).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from edgespec.errors import EdgeSpecError, UsageError
from edgespec.noise import able_to_win, derived, gumbel_noise, noisy_argmax
from edgespec.truncation import Ids, Scores, likely, nucleus, scores_of, top_k
from edgespec.types import Distribution, Row, TokenIds

_NUM_RANKED = 64  # of the likeliest before noise, at least


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen. The defaults are greedy decoding.

    Applied in this order: penalties, temperature, top_k, top_p, min_p.

        SamplingParams(temperature=0.8, seed=7)  # sampled, the same text for the same seed
        SamplingParams(temperature=0.8, top_k=40)  # from the 40 likeliest tokens (ties with the 40th count)

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
        """The likeliest token is always taken, whatever the seed."""
        return self.temperature == 0.0

    @property
    def keeps_all(self) -> bool:
        """No token is cut off."""
        return self.top_k == 0 and self.top_p >= 1.0 and self.min_p <= 0.0

    @property
    def has_penalties(self) -> bool:
        """What was said changes what is said next."""
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
            ids = able_to_win(logits, self.params.temperature, self._seed, len(tokens))
            scores = scores_of(logits[ids], logits[best], self.params.temperature)
        else:
            scores, ids = self._kept(logits, best)
        return noisy_argmax(scores, ids, self._seed, len(tokens))

    def distribution(self, logits: Row, tokens: TokenIds) -> Distribution:
        """What a call draws from, after all processors.

        Raises:
            EdgeSpecError: The logits hold no finite maximum.
        """
        logits, best = self._processed(logits, tokens)
        if self.params.is_greedy:
            return Distribution(np.array([best]), np.ones(1))
        scores, ids = self._kept(logits, best)
        weights = np.exp(scores, out=scores)
        weights /= weights.sum()
        return Distribution(ids, weights)

    def pick(self, distribution: Distribution, position: int) -> int:
        """A token of a distribution, with the noise of a position; a pure function of seed and both."""
        with np.errstate(divide="ignore"):
            scores = np.log(distribution.probs)
        return noisy_argmax(scores, distribution.ids, self._seed, position)

    def ranked(self, logits: Row, tokens: TokenIds, num_tokens: int) -> list[int]:
        """The token that a call gives, and those that it would give were all before them not there.

        Beyond the likeliest tokens before noise they may be others.
        """
        logits, best = self._processed(logits, tokens)
        if self.params.is_greedy or self.params.keeps_all:
            ids = top_k(logits, max(num_tokens, _NUM_RANKED))
            scores = scores_of(logits[ids], logits[best], self.params.temperature or 1.0)
        else:
            scores, ids = self._kept(logits, best)
            leaders = top_k(scores, max(num_tokens, _NUM_RANKED))
            scores, ids = scores[leaders], ids[leaders]
        if not self.params.is_greedy:
            scores = scores + gumbel_noise(self._seed, len(tokens), ids)
        return [int(ids[i]) for i in np.argsort(-scores, kind="stable")[:num_tokens]]

    def apart(self, domain: int) -> "GumbelSampler":
        """The same rule with noise of its own for each domain, a number from 0."""
        return GumbelSampler(self.params, self.num_prompt, derived(self._seed, domain))

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

    def _kept(self, logits: Row, best: int) -> tuple[Scores, Ids]:
        """Log-probabilities beside the best, of the tokens that stay, and their ids."""
        params, temperature, peak = self.params, self.params.temperature, logits[best]
        cuts: list[Callable[[Row], Ids]] = []
        if params.top_k > 0:
            cuts.append(lambda row: top_k(row, params.top_k))
        if params.top_p < 1.0:
            cuts.append(lambda row: nucleus(row, peak, temperature, params.top_p))
        if params.min_p > 0.0:
            cuts.append(lambda row: likely(row, peak, temperature, params.min_p))
        kept, ids = logits, None
        for cut in cuts:
            stays = cut(kept)
            kept, ids = kept[stays], stays if ids is None else ids[stays]
        return scores_of(kept, peak, temperature), np.arange(len(logits)) if ids is None else ids


def _penalized(logits: Row, tokens: TokenIds, num_prompt: int, params: SamplingParams) -> Row:
    logits = logits.copy()
    seen = logits[tokens]  # one that comes twice is assigned the same twice
    logits[tokens] = np.where(seen > 0, seen / params.repetition_penalty, seen * params.repetition_penalty)
    if len(tokens) > num_prompt:
        answered, counts = np.unique(tokens[num_prompt:], return_counts=True)
        logits[answered] -= params.presence_penalty + params.frequency_penalty * counts.astype(np.float32)
    return logits
