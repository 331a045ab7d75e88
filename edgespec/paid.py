"""A model as a source of drafts: what they take, what they are worth, and when to run it at all.

It drafts before a pass of the target, or ahead, while the target works, if it can and that yields more.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from statistics import fmean

import numpy as np

from edgespec.cache import reusable_prefix
from edgespec.chances import Chances, expected, position_class
from edgespec.clock import Clock
from edgespec.costs import DraftCosts, PassCosts, correction
from edgespec.pipeline import Policy, ahead_of, best_pipelined, best_serial, pass_beside
from edgespec.types import NOTHING, AheadDrafter, Ask, Draft, Drafter, Sampler, TokenIds, append

# A draft made to learn whether its source has come to pay may in the long run take this share of the time.
TRIAL_SHARE = 0.01
# A trial is never taken to cost less than this share of a step, or a source at break-even were tried always.
_LEAST_LOSS = 0.05
# How a model drafts while the target works is thought over every 8 to 32 rounds, more rarely where that would take
# more than a share of the time (it is 0.3 to 6 ms), and 64 rounds later if nothing was learned in them.
_PLANNED_ROUNDS, _QUIET_ROUNDS = (8, 32), 64
_THINKING_SHARE = 0.005
# As so many steps count those of a round: where one is late, the next is often early.
_STEPS_A_ROUND = 2
# Where a step is found to take so many times what was planned with, or that part of it, that is done at once.
_NEW_PACE = 1.5
# A model that drafts ahead goes on while that promises so much over plain decoding: its gain is no luck by then.
_LEAST_STAY = 1.01
# The target does not wait for a drafter that still has so much to read.
_LONGEST_WAIT_UNREAD = 32
# The share of a step by which the end of a pass and that of a step may miss each other.
_NEARLY = 0.15
# Of a model that somebody has chosen to draft, until it is known: tokens kept, of so many.
HOPE = (4.0, 6.0)
_MOST_FLOOR = 0.9
MOST_PREPARED = 8  # tokens for an outcome, at most


def outcomes(drafter: str) -> str:
    """The name under which its outcomes that were prepared are counted."""
    return f"{drafter}, prepared"


@dataclass(slots=True)
class PaidSource:
    """What is known of a source whose drafts take time, from answer to answer.

    read: What its cache holds.
    slowed: What a pass and a draft take more while both work at once.
    branched: What a step takes more that goes on with all outcomes that are prepared.
    spare: Steps of the target that are set aside for trials.
    """

    costs: DraftCosts
    slowed: tuple[float, float] = (1.0, 1.0)
    branched: float = 1.0
    read: TokenIds = field(default_factory=lambda: np.zeros(0, np.int32))
    spare: float = 0.0
    _least_branched: float = field(init=False)

    def __post_init__(self) -> None:
        self._least_branched = self.branched

    def step_of(self, policy: Policy) -> float:
        """What a step of it takes, the target at rest."""
        return self.costs.step * (self.branched if policy.is_hedged else 1.0)

    def see_steps(self, taken: Sequence[float], going: float, *, is_branched: bool) -> None:
        """Correct what steps cost by some beside a pass, and how long one is going on, in steps of the target.

        Which of the two has changed is known once both were seen: what slows all steps slows those with outcomes.
        """
        foreseen = self.costs.step * self.slowed[1] * (self.branched if is_branched else 1.0)
        # One that is going on is known to take at least that long.
        seen = [*taken, going] if going > foreseen else taken
        if not seen:
            return
        factor = correction(fmean(seen) / foreseen, _STEPS_A_ROUND)
        if is_branched:
            ratio = self.branched * factor
            self.branched = max(ratio, self._least_branched)
            self.costs.step *= ratio / self.branched
        else:
            self.costs.step *= factor
            self.branched = max(self.branched / max(factor, 1.0), self._least_branched)

    def num_unread(self, tokens: TokenIds) -> int:
        return len(tokens) - reusable_prefix(self.read, tokens, 1)


@dataclass(slots=True)
class Paid:
    """The same in one answer.

    policy: How it drafts ahead; None while it drafts before each pass, or not at all.
    offer: What it had drafted by this round, ahead.
    """

    drafter: Drafter
    known: PaidSource
    costs: PassCosts
    chances: Chances
    longest: int
    clock: Clock
    policy: Policy | None = None
    offer: Draft = NOTHING
    draft_s: float = 0.0  # of its last draft
    slowed: float = 1.0  # what the pass of this round is foreseen to take more beside it
    _num_rounds: int = 0
    _next_plan: int = 0  # in that round
    _has_news: bool = True  # since the last plan
    _planned_step: float = 0.0  # what that took a step to cost
    _trial: int = 0  # tokens of the trial that is going on
    _has_missed: bool = False  # in the last round
    _patience_s: float | None = None  # for the tokens that are waited for in this one

    @property
    def _outcomes(self) -> str:
        return outcomes(self.drafter.name)

    _ahead_drafter: AheadDrafter | None = None  # the drafter, if it is one: to ask takes 35 µs

    def __post_init__(self) -> None:
        self._ahead_drafter = self.drafter if isinstance(self.drafter, AheadDrafter) else None
        self.chances.expect(self.drafter.name, HOPE)
        self.chances.expect(self._outcomes, HOPE)

    def weighed(self, tokens: TokenIds, ask: Ask, sampler: Sampler, least_gain: float) -> tuple[float, int]:
        """Tokens a second that it promises in this round, and with how many drafted."""
        if self._ahead_drafter and self._ahead_drafter.can_run_ahead:
            if self._is_plan_due():
                self._plan(self._ahead_drafter, ask, least_gain)
            if self.policy:
                self._patience_s = self._patience(self._ahead_drafter) if self.policy.is_hedged else None
                self.offer = self._ahead_drafter.follow(tokens, self._ahead(ask, self.policy.length), sampler)
                taken_s, going_s = self._ahead_drafter.taken_s()
                steps = [taken / self.costs.of(1) for taken in (*taken_s, going_s)]
                self.known.see_steps(steps[:-1], steps[-1], is_branched=self.policy.is_hedged)
                if self._has_missed and self.policy.is_hedged:
                    self.chances.judge(self._outcomes, 0, len(self.offer.tokens) > 0)
                    self._has_news = True
                return self._weighed_ahead(self.policy, tokens, ask.num_tokens)
        if self.costs.step_s is None:
            return 0.0, 0
        # What it must read first is shared out over as many rounds as the answer has had.
        debt = self.known.costs.of(0, self.known.num_unread(tokens)) / max(
            1, min(self._num_rounds, ask.num_tokens)
        )
        return best_length(expected(self._chances(ask.num_tokens)), self.costs, self.known.costs.step, debt)

    def draft(self, rate: float, num_tokens: int, tokens: TokenIds, ask: Ask, sampler: Sampler) -> Draft:
        """num_tokens where each promises, at the present rate, more than it takes."""
        costs, step_s = self.known.costs, self.costs.of(1)
        marginal_s = costs.step * step_s + self.costs.of(3) - self.costs.of(2)
        floor = 0.0 if self.policy else min(_MOST_FLOOR, rate * marginal_s)
        ask = Ask(num_tokens, floor, ask.with_distributions, ask.cancel)
        started = self.clock()
        draft = self.drafter.draft(tokens, self._ahead(ask, num_tokens) if self.policy else ask, sampler)
        self.draft_s = self.clock() - started
        if len(draft.tokens):
            if not self.policy:  # a lane that is ahead may have begun before it was asked
                costs.observe(len(draft.tokens), self.known.num_unread(tokens), self.draft_s / step_s)
            self.known.read = append(tokens, draft.tokens[:-1])
        return draft

    def trial(self, rate: float, tokens: TokenIds) -> int:
        """How many tokens to draft for the sake of learning, though another choice has the better rate."""
        if self.policy or self.costs.step_s is None or (self._ahead_drafter and self._ahead_drafter.can_run_ahead):
            return 0
        if self._trial:
            return self._trial if self._could_pay(rate, self._trial) else 0
        taken = self.known.costs.of(1, self.known.num_unread(tokens)) + self.costs.ratio(2)
        lost = taken - (1 + self.chances.of(self.drafter.name, 0)) / rate / self.costs.step_s
        if self.known.spare < max(lost, _LEAST_LOSS) or not self._could_pay(rate, self.longest):
            return 0
        self.known.spare, self._trial = 0.0, 1
        return 1

    def observe(self, draft: Draft, num_accepted: int) -> Draft:
        """What the target has given a verdict on: of what was run, or of what was offered."""
        self._num_rounds += 1
        self.known.spare += TRIAL_SHARE
        is_run = len(draft.tokens) > 0 and draft.source == self.drafter.name
        # A pass for which nothing was ready in time is a miss too: what it prepared may have been.
        self._has_missed = num_accepted < len(draft.tokens) if is_run else self.policy is not None
        self._has_news |= is_run or (self.policy is not None and len(self.offer.tokens) > 0)
        # A trial goes on, and further, as long as it gains.
        self._trial = self._trial + 1 if is_run and self._trial and num_accepted >= self._trial else 0
        if is_run:
            return draft
        return self.offer if self.policy else NOTHING

    def _could_pay(self, rate: float, num_tokens: int) -> bool:
        """Were every token kept."""
        return any(
            (k + 1) / ((self.costs.ratio(k + 1) + k * self.known.costs.step) * self.costs.of(1)) > rate
            for k in range(1, num_tokens + 1)
        )

    def _is_plan_due(self) -> bool:
        if self.policy and not 1 / _NEW_PACE < self.known.step_of(self.policy) / self._planned_step < _NEW_PACE:
            return True
        return self._num_rounds >= self._next_plan + (0 if self._has_news else _QUIET_ROUNDS)

    def _plan(self, drafter: AheadDrafter, ask: Ask, least_gain: float) -> None:
        """Whether it drafts ahead, how far, and how long the target waits for it."""
        started = self.clock()
        setting = (
            self._chances(self.longest),
            lambda num_draft: self.costs.ratio(num_draft + 1),
            self.known.costs.step,
            self.longest,
        )
        both = best_pipelined(*setting, self.known.slowed)
        if drafter.num_outcomes and not ask.with_distributions:
            verify, beside = self.known.slowed
            prepared = (self.chances.of(self._outcomes, 0), MOST_PREPARED)
            hedged = best_pipelined(*setting, (verify, beside * self.known.branched), prepared)
            both = max(both, hedged._replace(is_hedged=True))
        least = min(least_gain, _LEAST_STAY) if self.policy else least_gain
        is_best = both.rate > max(least, best_serial(*setting).rate)
        if self.policy and not is_best:
            drafter.rest()
        self.policy = both if is_best else self._tried_ahead(least_gain)
        self._planned_step = self.known.step_of(self.policy) if self.policy else 0.0
        rest = (self.clock() - started) / _THINKING_SHARE / self.costs.of(1)
        least, most = _PLANNED_ROUNDS
        self._next_plan, self._has_news = self._num_rounds + int(min(max(rest, least), most)), False

    def _tried_ahead(self, least_gain: float) -> Policy | None:
        """To draft ahead for a while, without being waited for, where nothing was heard of it for long."""
        verify, beside = self.known.slowed
        lost = _PLANNED_ROUNDS[0] * max(verify - 1, _LEAST_LOSS)
        if self._has_news or self.known.spare < lost or least_gain * self.known.costs.step * beside > 1:
            return None
        self.known.spare = 0.0
        return Policy(1.0, 0, self.longest)

    def _weighed_ahead(self, policy: Policy, tokens: TokenIds, longest: int) -> tuple[float, int]:
        """As many of those that are ready as pay, or as are to be waited for; none while the drafter reads."""
        num_ready = len(self.offer.tokens)
        if num_ready:
            self.known.read = append(tokens, self.offer.tokens[:-1])
        wait = policy.wait if self.known.num_unread(tokens) <= _LONGEST_WAIT_UNREAD else 0
        length = min(max(num_ready, wait), policy.length, longest)
        if num_ready >= wait:
            length = self._paying(policy.rate, length)
        step_s = self.known.costs.step * self.costs.of(1)
        waited_s, self._patience_s = max(0, length - num_ready) * step_s, None
        if length == num_ready < min(policy.length, longest) and self._ahead_drafter:
            self._patience_s = self._patience(self._ahead_drafter)
            if self._patience_s:
                length, waited_s = length + 1, self._patience_s
        pass_s = self._pass_beside_s(policy, max(length, num_ready), length + 1)
        return expected(self._chances(length))[-1] / (pass_s + waited_s), length

    def _paying(self, rate: float, most: int) -> int:
        """How many to verify of so many that are there, where a step of the time is worth rate tokens."""
        totals = expected(self._chances(most))
        return max(range(most + 1), key=lambda k: totals[k] - rate * self.costs.ratio(k + 1))

    def _patience(self, drafter: AheadDrafter) -> float | None:
        """How long to wait for a token that is all but there: a pass that just misses it is a pass without it."""
        step_s = self.known.costs.step * self.costs.of(1)
        due_s = drafter.due_s(step_s)
        return due_s + _NEARLY * step_s if due_s <= _NEARLY * step_s else None

    def _pass_beside_s(self, policy: Policy, num_ready: int, width: int) -> float:
        """What a pass takes while the drafter goes on from num_ready tokens, as far as it goes."""
        alone_s, (verify, draft) = self.costs.of(width), self.known.slowed
        room = inf if policy.is_hedged else max(0, ahead_of(policy.length) - num_ready)
        taken_s = pass_beside(alone_s, verify, room * self.known.costs.step * draft * self.costs.of(1))
        self.slowed = taken_s / alone_s
        return taken_s

    def _ahead(self, ask: Ask, num_tokens: int) -> Ask:
        is_hedged = self.policy is not None and self.policy.is_hedged
        return Ask(
            num_tokens,
            0.0,
            ask.with_distributions,
            ask.cancel,
            ahead=True,
            least=num_tokens,
            patience_s=self._patience_s,
            hedged=is_hedged,
        )

    def _chances(self, num_tokens: int) -> list[float]:
        return [self.chances.of(self.drafter.name, position_class(i)) for i in range(num_tokens)]


def best_length(
    totals: Sequence[float], costs: PassCosts, step: float = 0.0, debt: float = 0.0
) -> tuple[float, int]:
    """Tokens a second, and the length that yields them; step and debt are what a draft takes, in steps.

    Args:
        totals: Tokens that a pass yields by the number that is drafted.
    """
    step_s = costs.of(1)
    rates = [
        total / (costs.of(k + 1) + (k * step + (debt if k else 0.0)) * step_s) for k, total in enumerate(totals)
    ]
    length = max(range(len(rates)), key=rates.__getitem__)
    return rates[length], length
