"""From one row of logits to one token: a pure function of seed, prefix and logits.

The noise is keyed by (seed, position, token id), so drafter and target share it and the token at a
position depends neither on who drafts nor on how tokens are cut into blocks (drafter-invariant
speculative decoding, Daliri et al., arXiv:2408.07978).
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

from edgespec.decoding.noise import able_to_win, derive_seed, gumbel_noise, noisy_argmax, sample_index, uniform
from edgespec.decoding.truncation import Ids, above, least_share, likely, nucleus, scores_of, top_k, weights_of
from edgespec.errors import EdgeSpecError, UsageError
from edgespec.system.arguments import explains_arguments
from edgespec.types import Distribution, Row, TokenConstraint, TokenIds, TokenMask

_NUM_RANKED = 64  # of the likeliest before noise, at least
# Drafting takes 0.10 ms a token instead of 0.18, and about as much is accepted: 0.875 instead of 0.876 at
# temperature 0.8, 0.881 instead of 0.888 at 1, 0.870 instead of 0.889 at 1.5 (docs/log/start-up-and-overhead.md).
_LOWEST_DRAFTED = -11.5
_BANNING_BIAS, _LARGEST_BIAS = -100.0, 100.0
# Choices that would leave a constrained answer no way to its end, after which the shortest way is taken.
_MAX_REFUSED = 4


# Which other libraries put beside these.
_OF_ANSWERS = ("max_tokens", "stop", "logprobs", "prompt_logprobs", "banned", "schema", "response_format")
_ADVICE = {name: f"{name} is an option of an answer; give it to Engine.generate" for name in _OF_ANSWERS}


@partial(explains_arguments, elsewhere=lambda function: _ADVICE)
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen. The defaults are greedy decoding.

    Applied in this order: penalties, logit_bias, temperature, top_k, top_p, min_p.

        SamplingParams(temperature=0.8, seed=7)  # sampled, the same text for the same seed
        SamplingParams(temperature=0.8, top_k=40)  # from the 40 likeliest tokens (ties with the 40th count)
        SamplingParams(logit_bias={198: -100, 11: 2.5})  # token 198 never, token 11 more often

    The repetition penalty (Keskar et al., arXiv:1909.05858) covers prompt and answer; presence and
    frequency penalties, as in the OpenAI API, the answer alone. logit_bias adds a number from -100 to 100 to the
    logits of some token ids; -100 bans a token.

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
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        ranges: dict[str, tuple[float, float]] = {
            "temperature": (0.0, 100.0),
            "top_k": (0, 2**63 - 1),
            "top_p": (0.0, 1.0),
            "min_p": (0.0, 1.0),
            "repetition_penalty": (0.01, 100.0),
            "presence_penalty": (-100.0, 100.0),
            "frequency_penalty": (-100.0, 100.0),
            "seed": (0, 2**64 - 1),
        }
        for name, (low, high) in ranges.items():
            value = getattr(self, name)
            is_whole = isinstance(high, int)
            kinds = (int, np.integer) if is_whole else (int, float, np.number)
            if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:
                kind = "a whole number" if is_whole else "a number"
                raise UsageError(f"{name} is {value!r}; wanted {kind} from {low} to {high}")
        object.__setattr__(self, "logit_bias", _check_bias(self.logit_bias))

    @property
    def is_greedy(self) -> bool:
        """True if the likeliest token is always taken, with any seed."""
        return self.temperature == 0.0

    @property
    def is_of_best(self) -> bool:
        """True if the likeliest token of each row is all that is needed of it."""
        return self.is_greedy and not self.has_penalties and not self.logit_bias

    @property
    def has_penalties(self) -> bool:
        """True if earlier tokens change the logits of later ones."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def suppressing(params: SamplingParams, tokens: Collection[int]) -> SamplingParams:
    """Parameters with tokens banned, whatever they say of these."""
    bias = {**params.logit_bias, **dict.fromkeys(tokens, _BANNING_BIAS)}
    return replace(params, logit_bias=bias) if tokens else params


def _check_bias(given: Any) -> dict[int, float]:
    """A copy, which stays as it is; raises UsageError: it is no bias by token id."""
    if not isinstance(given, Mapping):
        raise UsageError(f"logit_bias is {given!r}; wanted numbers by token id, such as {{198: -100}}")
    for token, bias in given.items():
        if not isinstance(token, (int, np.integer)) or isinstance(token, bool) or token < 0:
            raise UsageError(f"logit_bias has the key {token!r}; wanted a token id, a whole number from 0")
        is_number = isinstance(bias, (int, float, np.number)) and not isinstance(bias, bool)
        if not is_number or not _BANNING_BIAS <= bias <= _LARGEST_BIAS:
            raise UsageError(
                f"logit_bias of token {token} is {bias!r}; wanted a number from {_BANNING_BIAS:.0f}, which bans "
                f"the token, to {_LARGEST_BIAS:.0f}"
            )
    return {int(token): float(bias) for token, bias in given.items()}


class _Settled(NamedTuple):
    """A choice, the ones before it that were refused, and the one token that may follow, if that is decided."""

    token: int
    refused: Sequence[int] = ()
    only: int | None = None


@dataclass(frozen=True, slots=True)
class GumbelSampler:
    """A Sampler with shared noise, whose results are a pure function of seed and arguments.

    num_prompt: tokens of every prefix that are the prompt.
    seed: of the noise; params.seed unless given.
    lowest: tokens whose log-probability less that of the best is below this are left out before all cuts.
    mask: which tokens may follow the rest of the prefix; all unless given.
    constraint: what the rest of the prefix has to match, and where it has to end.
    """

    params: SamplingParams
    num_prompt: int = 0
    seed: int | None = None
    lowest: float = -math.inf
    mask: TokenMask | None = None
    constraint: TokenConstraint | None = None

    def __call__(self, logits: Row, tokens: TokenIds) -> int:
        """The token that follows tokens, [num_tokens], given its logits, [vocab_size].

        Raises:
            EdgeSpecError: The logits hold no finite maximum, so no token can be chosen.
            UsageError: Biases, mask and constraint ban all tokens.
        """
        return self._choose(logits, tokens) if self.constraint is None else self._settle(logits, tokens).token

    def _settle(self, logits: Row, tokens: TokenIds) -> "_Settled":
        """The first choice after which a constrained answer can end.

        One choice after another is tried, as it takes long to know of all tokens where they lead.
        """
        constraint, answer, refused = self.constraint, tokens[self.num_prompt :], list[int]()
        assert constraint is not None
        token = self._choose(logits, tokens)
        while not constraint.leaves_room(answer, token):
            refused.append(token)
            if len(refused) == _MAX_REFUSED:
                only = constraint.way_out(answer)
                return _Settled(self._choose(logits, tokens, refused, only), refused, only)
            token = self._choose(logits, tokens, refused)
        return _Settled(token, refused)

    def _choose(self, logits: Row, tokens: TokenIds, refused: Sequence[int] = (), only: int | None = None) -> int:
        logits, best = self._process(logits, tokens, refused, only)
        if self.params.is_greedy:
            return best
        if self._has_cuts:
            ids = self._cut(logits, best)
        else:
            ids = able_to_win(logits, logits[best], self.params.temperature, self._seed, len(tokens))
        scores = scores_of(logits[ids], logits[best], self.params.temperature)
        return noisy_argmax(scores, ids, self._seed, len(tokens))

    def distribution(self, logits: Row, tokens: TokenIds) -> Distribution:
        if self.constraint is not None and not self.constraint.has_ample_room(tokens[self.num_prompt :]):
            # Where the tokens that are left matter, the choice is that of a call: of all tokens it is not known.
            return Distribution(np.array([self._settle(logits, tokens).token]), np.ones(1))
        logits, best = self._process(logits, tokens)
        if self.params.is_greedy:
            return Distribution(np.array([best]), np.ones(1))
        peak, temperature = logits[best], self.params.temperature
        if not self._has_cuts:
            return Distribution(_all_ids(len(logits)), weights_of(logits, peak, temperature))
        ids = self._cut(logits, best)
        return Distribution(ids, weights_of(logits[ids], peak, temperature))

    def least(self, logits: Row, tokens: TokenIds, token: int) -> float:
        params = self.params
        has_other_cuts = params.top_k > 0 or params.min_p > 0.0 or self.lowest > -math.inf
        if params.is_greedy or has_other_cuts or self.constraint is not None:
            return 0.0
        logits, best = self._process(logits, tokens)
        return least_share(logits, logits[best], params.temperature, params.top_p, token)

    def pick(self, distribution: Distribution, position: int) -> int:
        return int(distribution.ids[sample_index(distribution.weights, distribution.ids, self._seed, position)])

    def uniform(self, position: int) -> float:
        return uniform(self._seed, position)

    def ranked(self, logits: Row, tokens: TokenIds, num_tokens: int) -> list[int]:
        # Exact as long as they are among the likeliest tokens before noise.
        logits, best = self._process(logits, tokens)
        if self.params.is_greedy or not self._has_cuts:
            ids = top_k(logits, max(num_tokens, _NUM_RANKED))
        else:
            ids = self._cut(logits, best)
            ids = ids[top_k(logits[ids], max(num_tokens, _NUM_RANKED))]
        scores = scores_of(logits[ids], logits[best], self.params.temperature or 1.0)
        if not self.params.is_greedy:
            scores = scores + gumbel_noise(self._seed, len(tokens), ids)
        return [int(ids[i]) for i in np.argsort(-scores, kind="stable")[:num_tokens]]

    def lead(self, logits: Row, tokens: TokenIds) -> tuple[int, float]:
        """The likeliest token after penalties, and by how much its logit is above the next one's."""
        settled = self._settle(logits, tokens) if self.constraint is not None else _Settled(-1)
        logits, best = self._process(logits, tokens, settled.refused, settled.only)
        others = logits[:best], logits[best + 1 :]
        return best, float(logits[best]) - max(float(each.max(initial=-math.inf)) for each in others)

    def apart(self, domain: int) -> "GumbelSampler":
        return replace(self, seed=derive_seed(self._seed, domain))

    def drafting(self, domain: int) -> "GumbelSampler":
        # Any distribution serves there, so very unlikely tokens are left out before all other cuts.
        return replace(self, seed=derive_seed(self._seed, domain), lowest=_LOWEST_DRAFTED)

    @property
    def _seed(self) -> int:
        return self.params.seed if self.seed is None else self.seed

    @property
    def _has_cuts(self) -> bool:
        """True if unlikely tokens are cut off."""
        params = self.params
        return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0 or self.lowest > -math.inf

    def _process(
        self, logits: Row, tokens: TokenIds, refused: Sequence[int] = (), only: int | None = None
    ) -> tuple[Row, int]:
        """Logits after penalties, biases, mask and constraint, and the likeliest token.

        Args:
            refused: Further tokens that may not follow.
            only: The one token that may follow.
        """
        own = logits
        if self.params.has_penalties:
            logits = _penalize(logits, tokens, self.num_prompt, self.params)
        if self.params.logit_bias:
            logits = _add_bias(logits, self.params.logit_bias)
        if self.mask is not None and (allowed := self.mask(tokens[self.num_prompt :])) is not None:
            # A drafter's row may be shorter than the vocabulary.
            logits = np.where(allowed[: len(logits)], logits, logits.dtype.type(-np.inf))
        if self.constraint is not None and (bias := self.constraint.bias(tokens[self.num_prompt :])) is not None:
            # A sum takes 8 µs for 49,000 logits, a choice between two 50.
            logits = logits + bias[: len(logits)]
        if refused:
            logits = logits.copy()
            logits[list(refused)] = -np.inf
        if only is not None:
            value, logits = logits[only], np.full_like(logits, -np.inf)
            logits[only] = value
        best = int(logits.argmax())
        if not math.isfinite(logits[best]):
            if math.isfinite(own.max()):
                matching = " that its format allows" if self.constraint is not None else ""
                raise UsageError(
                    f"no token may follow here: logit_bias and what is banned leave none{matching}; ban less"
                )
            raise EdgeSpecError(
                f"the model gave {logits[best]} as its best logit; its weights or the run are damaged: "
                "export the model again, and if that does not help use another source"
            )
        return logits, best

    def _cut(self, logits: Row, best: int) -> Ids:
        """The tokens that remain after all cuts; there must be one."""
        params, temperature, peak = self.params, self.params.temperature, logits[best]
        cuts: list[Callable[[Row], Ids]] = []
        if self.lowest > -math.inf:
            cuts.append(lambda row: above(row, peak, temperature, self.lowest))
        if params.top_k > 0:
            cuts.append(lambda row: top_k(row, params.top_k))
        if params.top_p < 1.0:
            cuts.append(lambda row: nucleus(row, peak, temperature, params.top_p))
        if params.min_p > 0.0:
            cuts.append(lambda row: likely(row, peak, temperature, params.min_p))
        ids = cuts[0](logits)
        for cut in cuts[1:]:
            ids = ids[cut(logits[ids])]
        return ids


@cache
def _all_ids(vocab_size: int) -> Ids:
    # Cached, as it takes half as long as the weights.
    ids = np.arange(vocab_size)
    ids.flags.writeable = False
    return ids


def _add_bias(logits: Row, bias: Mapping[int, float]) -> Row:
    logits = logits.copy()
    for token, value in bias.items():
        if token < len(logits):  # a drafter's row may be shorter than the vocabulary
            logits[token] = logits[token] + value if value > _BANNING_BIAS else -math.inf
    return logits


def _penalize(logits: Row, tokens: TokenIds, num_prompt: int, params: SamplingParams) -> Row:
    logits = logits.copy()
    if params.repetition_penalty != 1.0:
        used = logits[tokens]  # a token that comes twice is assigned one value twice
        logits[tokens] = np.where(used > 0, used / params.repetition_penalty, used * params.repetition_penalty)
    if params.presence_penalty or params.frequency_penalty:
        answered, counts = np.unique(tokens[num_prompt:], return_counts=True)
        logits[answered] -= params.presence_penalty + params.frequency_penalty * counts.astype(np.float32)
    return logits
