"""Rounds that a measured policy learns from later, in another thread, while the next pass runs."""

from collections.abc import Mapping
from threading import Thread

import numpy as np
import pytest

from edgespec.decoding.sampling import GumbelSampler, SamplingParams
from edgespec.decoding.tree import Tree
from edgespec.draft.acceptance_rates import AcceptanceRates, Key
from edgespec.draft.costs import PassCosts
from edgespec.draft.drafter import Drafter, DrafterCan, DraftRequest
from edgespec.draft.measured import MeasuredPolicy
from edgespec.types import Sampler, TokenIds

GREEDY = GumbelSampler(SamplingParams())
TRUTH = np.arange(2_000, dtype=np.int32) % 97


FREE = DrafterCan()


class Knower(Drafter):
    """Guesses eight tokens, of which the first few are right."""

    def __init__(self, can: DrafterCan = FREE) -> None:
        self._can = can

    @property
    def name(self) -> str:
        return "knower"

    @property
    def can(self) -> DrafterCan:
        return self._can

    def draft(self, tokens: TokenIds, request: DraftRequest, sampler: Sampler) -> Tree:
        right = TRUTH[len(tokens) :][: min(8, request.num_tokens)]
        num_right = len(tokens) % 7
        guess = np.where(np.arange(len(right)) < num_right, right, right + 1).astype(np.int32)
        return Tree(guess, tuple(range(len(guess))), source=self.name)


def policy_of(max_unlearned: int, can: DrafterCan = FREE) -> MeasuredPolicy:
    ratios = {1: 1.0, 9: 1.2}
    return MeasuredPolicy([Knower(can)], PassCosts(ratios), AcceptanceRates(), max_unlearned=max_unlearned)


def run_round(policy: MeasuredPolicy, num_tokens: int) -> None:
    """A round of a draft of eight, whatever the policy would rather have."""
    round = policy.propose(TRUTH[:num_tokens], 30, GREEDY)
    draft = policy.drafters[0].draft(TRUTH[:num_tokens], DraftRequest(8), GREEDY)
    round = round._replace(draft=draft, offers=(draft,))
    emitted = TRUTH[num_tokens:][: 1 + num_tokens % 7]
    verify_s = 0.003 + 1e-4 * (num_tokens % 5)
    policy.observe(round, np.zeros((0, 0), np.float32), emitted, verify_s)


def what_it_knows(policy: MeasuredPolicy) -> Mapping[Key, tuple[float, float]]:
    return policy.rates.snapshot()


@pytest.mark.parametrize("num_rounds", [1, 3, 50])
def test_what_is_learned_beside_a_pass_is_what_is_learned_at_once(num_rounds: int) -> None:
    at_once, beside = policy_of(0), policy_of(3)
    for i in range(num_rounds):
        run_round(at_once, 100 + i)
        run_round(beside, 100 + i)
        if i % 3:  # at times the other thread does not come to it
            learner = Thread(target=beside.learn)
            learner.start()
            learner.join()
    beside.learn()
    assert what_it_knows(beside) == what_it_knows(at_once)


def test_rates_are_behind_by_no_more_rounds_than_allowed() -> None:
    policy = policy_of(3)
    for _ in range(3):
        run_round(policy, 104)
    assert what_it_knows(policy) == {}
    run_round(policy, 104)
    counted = policy.rates.snapshot()["knower", 0]
    assert counted[0] > 3
    assert policy.costs.is_measured


def test_nothing_is_left_to_learn_when_an_answer_ends() -> None:
    policy = policy_of(3)
    run_round(policy, 104)
    policy.close()
    assert what_it_knows(policy)


def test_a_policy_whose_drafter_runs_ahead_learns_at_once() -> None:
    policy = policy_of(3, DrafterCan(is_free=False, run_ahead=True))
    run_round(policy, 104)
    assert what_it_knows(policy)


def test_learning_does_not_wait_for_a_policy_that_is_at_work() -> None:
    policy = policy_of(3)
    run_round(policy, 104)
    with policy._lock:
        policy.learn()
    assert what_it_knows(policy) == {}
    policy.learn()
    assert what_it_knows(policy)


def test_many_threads_learn_from_each_round_once() -> None:
    at_once, beside = policy_of(0), policy_of(3)
    is_over = False

    def learn() -> None:
        while not is_over:
            beside.learn()

    learners = [Thread(target=learn) for _ in range(3)]
    for each in learners:
        each.start()
    try:
        for i in range(300):
            run_round(at_once, 100 + i)
            run_round(beside, 100 + i)
    finally:
        is_over = True
        for each in learners:
            each.join()
    beside.learn()
    assert what_it_knows(beside) == what_it_knows(at_once)
