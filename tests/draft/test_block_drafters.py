"""A drafter model that drafts a block for the price of one token: how long its drafts are, in virtual time."""

from collections.abc import Mapping

import numpy as np
import pytest
from costed_machine import GREEDY, STEP_S, TABLES

from edgespec.decoding.tree import Tree
from edgespec.draft.acceptance_rates import AcceptanceRates, position_bucket
from edgespec.draft.costs import PassCosts
from edgespec.draft.draft_model import DraftCosts, DraftModelStats
from edgespec.draft.drafter import Drafter, DrafterCan, DraftRequest
from edgespec.draft.measured import MeasuredPolicy
from edgespec.system.clock import VirtualClock
from edgespec.types import Logits, Sampler, TokenIds

_TRUTH = np.arange(60_000, dtype=np.int32) % 997
_NO_LOGITS: Logits = np.zeros((0, 0), np.float32)
_BLOCK = 8


class BlockDrafter(Drafter):
    """Guesses each token with a chance, after a step for each block."""

    name = "head"

    def __init__(self, clock: VirtualClock, chance: float, step: float, tokens_per_step: int) -> None:
        self._clock, self._chance, self._step = clock, chance, step
        self._can = DrafterCan(is_free=False, tokens_per_step=tokens_per_step)
        self._rng = np.random.default_rng(3)

    @property
    def can(self) -> DrafterCan:
        return self._can

    def draft(self, tokens: TokenIds, request: DraftRequest, sampler: Sampler) -> Tree:
        right = _TRUTH[len(tokens) :][: min(request.num_tokens, _BLOCK)]
        if len(right):
            self._clock.now += self._step * STEP_S
        keeps = self._rng.random(len(right)) < self._chance
        tokens = np.where(keeps, right, right + 1).astype(np.int32)
        return Tree(tokens, tuple(map(position_bucket, range(len(right)))), source=self.name)


def run(
    table: Mapping[int, float], chance: float, step: float, tokens_per_step: int = _BLOCK
) -> tuple[float, float]:
    """Tokens a step over 400 rounds, the first 100 left out, and the mean length of drafts in these."""
    clock, end, costs = VirtualClock(), 64, PassCosts(dict(table))
    believed = PassCosts({width: costs.ratio(width) for width in range(1, 26)})
    drafter = BlockDrafter(clock, chance, step, tokens_per_step)
    stats = {drafter.name: DraftModelStats(DraftCosts(step, 0.0))}
    policy = MeasuredPolicy([drafter], believed, AcceptanceRates({}), stats, clock=clock)
    began, num_tokens, lengths = 0.0, 0, []
    for i in range(400):
        if i == 100:
            began, num_tokens = clock.now, 0
        round = policy.propose(_TRUTH[:end], 1000, GREEDY)
        guesses = round.draft.tokens
        wrong = np.flatnonzero(guesses != _TRUTH[end : end + len(guesses)])
        emitted = _TRUTH[end : end + 1 + (int(wrong[0]) if len(wrong) else len(guesses))]
        taken_s = STEP_S * costs.ratio(len(guesses) + 1)
        clock.now += taken_s
        policy.observe(round, _NO_LOGITS, emitted, taken_s)
        end, num_tokens = end + len(emitted), num_tokens + len(emitted)
        lengths.append(len(guesses))
    policy.close()
    return num_tokens * STEP_S / (clock.now - began), float(np.mean(lengths[100:]))


def best(table: Mapping[int, float], chance: float, step: float) -> float:
    """The rate of the best fixed length, in tokens a step."""
    costs = PassCosts(dict(table))
    rates = [
        sum(chance**i for i in range(length + 1)) / (costs.ratio(length + 1) + (step if length else 0.0))
        for length in range(_BLOCK + 1)
    ]
    return max(rates)


@pytest.mark.parametrize(
    ("table", "chance", "step"), [("rows of 3 %", 0.8, 0.3), ("qwen", 0.8, 0.3), ("a100", 0.7, 0.5)]
)
def test_a_block_is_drafted_as_far_as_its_passes_pay(table: str, chance: float, step: float) -> None:
    rate, _ = run(TABLES[table], chance, step)
    assert rate > 0.95 * best(TABLES[table], chance, step)


def test_a_block_is_longer_than_if_each_token_had_its_price() -> None:
    table = TABLES["rows of 3 %"]
    (rate, length), (_, short) = (run(table, 0.8, 0.5, tokens) for tokens in (_BLOCK, 1))
    assert length > short + 1
    assert rate > 1.5


def test_a_block_that_does_not_pay_is_not_drafted() -> None:
    rate, length = run(TABLES["qwen"], 0.2, 1.0)
    assert length < 0.5
    assert rate > 0.9
