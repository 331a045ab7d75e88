"""A target whose passes take known times, whatever is believed of them, and guesses of known quality."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from edgespec.decoding.sampling import GumbelSampler, SamplingParams
from edgespec.decoding.tree import Tree
from edgespec.draft.costs import PassCosts
from edgespec.draft.drafter import Drafter, DraftRequest
from edgespec.draft.speculation import Speculation
from edgespec.system.clock import VirtualClock
from edgespec.types import Sampler, TokenIds

STEP_S = 0.02
GREEDY = GumbelSampler(SamplingParams())
_TRUTH = np.arange(60_000, dtype=np.int32) % 997
_NO_LOGITS = np.zeros((0, 0), np.float32)

# A pass by its tokens: measured on two cores in quiet minutes, rows of 3 %, and ONNX Runtime's A100 table.
TABLES: Mapping[str, Mapping[int, float]] = {
    "qwen": {1: 1.0, 2: 1.06, 3: 1.25, 4: 1.38, 8: 2.2},
    "smollm2": {1: 1.0, 2: 1.13, 3: 1.28, 4: 1.42, 8: 2.01},
    "rows of 3 %": {1: 1.0, 2: 1.03, 32: 1.93},
    "a100": {1: 1.0, 2: 1.19, 4: 1.39, 8: 2.0, 16: 3.3},
}


class Ran(NamedTuple):
    """A round: tokens that the pass ran, those that it yielded, and its seconds."""

    width: int
    num_tokens: int
    taken_s: float


class Guesser(Drafter):
    """Guesses each token with a chance; only where a second chance allows it has a guess at all."""

    name = "text"

    def __init__(self, chance: float, has_guess: float, rng: np.random.Generator) -> None:
        self.chance, self._has_guess, self._rng = chance, has_guess, rng

    def draft(self, tokens: TokenIds, request: DraftRequest, sampler: Sampler) -> Tree:
        right = _TRUTH[len(tokens) :][: request.num_tokens]
        if self._rng.random() > self._has_guess:
            right = right[:0]
        keeps = self._rng.random(len(right)) < self.chance
        return Tree(np.where(keeps, right, right + 1).astype(np.int32), (0,) * len(right), source=self.name)


@dataclass
class CostedMachine:
    """Rounds of one speculation on a machine of which the times are set, in virtual time.

    true: Steps of a pass by its width.
    speed: Factor on a pass, by the number of the round and the width.
    noise: Standard deviation of the log of a pass's time.
    """

    true: Mapping[int, float]
    believed: Mapping[int, float]
    chance: float
    has_guess: float = 1.0
    speed: Callable[[int, int], float] = lambda number, width: 1.0
    noise: float = 0.0
    seed: int = 0
    known: Mapping[tuple[str, int], tuple[float, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng(self.seed)
        self.guesser = Guesser(self.chance, self.has_guess, np.random.default_rng(self.seed + 1))
        self.speculation = Speculation(lambda: [self.guesser], ratios=dict(self.believed), rates=self.known)
        self._costs = PassCosts(dict(self.true))
        self.num_rounds = 0

    def answer(self, num_rounds: int, start: int = 64) -> list[Ran]:
        """The rounds of one answer, without the one that reads the prompt."""
        clock, end, ran = VirtualClock(), start, []
        policy = self.speculation.policy()
        policy.clock = clock
        for i in range(num_rounds + 1):
            round = policy.propose(_TRUTH[:end], 1000, GREEDY)
            guesses = round.draft.tokens
            wrong = np.flatnonzero(guesses != _TRUTH[end : end + len(guesses)])
            emitted = _TRUTH[end : end + 1 + (int(wrong[0]) if len(wrong) else len(guesses))]
            width = len(guesses) + 1
            taken_s = self.pass_s(width)
            clock.now += taken_s
            policy.observe(round, _NO_LOGITS, emitted, taken_s)
            end += len(emitted)
            if i:
                ran.append(Ran(width, len(emitted), taken_s))
                self.num_rounds += 1
        policy.close()
        self.speculation.learn_from(policy)
        return ran

    def pass_s(self, width: int) -> float:
        noise = float(np.exp(self._rng.normal(0.0, self.noise))) if self.noise else 1.0
        return STEP_S * self._costs.ratio(width) * self.speed(self.num_rounds, width) * noise


def gain(ran: Sequence[Ran], step_s: float = STEP_S, chance: float | None = None) -> float:
    """The speed of rounds over plain decoding at step_s a token.

    Args:
        chance: That a guess is right: count the tokens that are to be expected, whatever came of it by luck.
    """
    tokens = [each.num_tokens if chance is None else _expected(each.width, chance) for each in ran]
    return sum(tokens) * step_s / sum(each.taken_s for each in ran)


def _expected(width: int, chance: float) -> float:
    return sum(chance**i for i in range(width))
