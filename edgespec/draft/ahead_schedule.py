"""Drafting of one model while the target verifies: whether, how far ahead, and how long the target waits."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from edgespec.config.drafter_names import MAX_DRAFT_TOKENS
from edgespec.decoding.decoder import reusable_prefix
from edgespec.decoding.scheduler import Proposal
from edgespec.decoding.tree import NO_DRAFT, Tree, Worth
from edgespec.draft.costs import PassCosts
from edgespec.draft.draft_model import UNKNOWN_WORTH, DraftModelStats
from edgespec.draft.drafter import DraftAhead, Drafter, DraftRequest
from edgespec.draft.limits import MAX_BRANCHES, MIN_GAIN, MIN_LOSS_OF_TRIAL, MIN_USED_TOKENS
from edgespec.draft.model_rates import ModelRates
from edgespec.draft.option import Promise, expected_tokens
from edgespec.draft.overlap import (
    AheadPlan,
    Ratio,
    best_pipelined,
    best_serial,
    max_ahead,
    pass_beside,
    pipelined_rate,
    wait_for_step_s,
)
from edgespec.system.clock import Clock
from edgespec.types import Sampler, TokenIds, append

# A plan of drafting ahead is made again after 8 to 32 rounds, more rarely where planning (0.3 to 6 ms) would take
# more than a share of the time, and 32 rounds later if nothing was learned in them.
_PLANNED_ROUNDS, _QUIET_ROUNDS = (8, 32), 32
_PLANNING_SHARE = 0.005
# A plan is made again at once where a step takes this many times what it was planned with, or that part of it.
_NEW_PACE = 1.5
# A lane that drafts ahead goes on while it promises this much: what goes on is judged in each round, and what was
# given up by chance is tried again only now and then (docs/log/pipelined.md).
_MIN_GAIN_AHEAD = 1.005
# The target does not wait for a drafter that still has to read more tokens than this.
_MAX_UNREAD_TO_WAIT = 32
# Contention below this decides nothing, so nothing is spent on telling it from the machine's speed.
_NOTABLE = 1.05

_Pair = tuple[Sequence[float], Ratio, float, int]  # rates, ratio, step and longest draft, as plans take them


@dataclass(slots=True)
class AheadSchedule:
    """The plan by which a drafter model drafts ahead in one answer, made again as costs and rates are learned."""

    drafter: Drafter
    stats: DraftModelStats
    costs: PassCosts
    rates: ModelRates
    max_tokens: int
    clock: Clock
    fixed_length: int | None = None  # of all drafts, which are made whether they pay or not
    plan: AheadPlan | None = None  # None while it drafts before a pass or not at all
    _num_rounds: int = 0
    _next_plan: int = 0  # in that round
    _has_news: bool = True  # since the last plan
    _planned_step: float = 0.0  # cost of a step that the plan was made with
    _has_missed: bool = False  # in the last round
    _emitted: TokenIds = field(default_factory=lambda: NO_DRAFT.tokens)  # of the last round
    _num_verified: int = 0  # tokens of its draft
    _worth: Worth = UNKNOWN_WORTH  # as of the last plan
    _num_beside: int = 0  # passes since one for most of which the lane was at rest
    _pass: tuple[int, float] | None = None  # width and seconds of the last pass beside the lane

    def weigh(self, tokens: TokenIds, request: DraftRequest, sampler: Sampler, min_gain: float) -> Promise | None:
        """Weigh the tokens that are ready; None where the lane is at rest in this round.

        min_gain: What drafting ahead has to promise over plain decoding to begin.
        """
        is_new_pace = self.plan and not 1 / _NEW_PACE < self.stats.step(self.plan) / self._planned_step < _NEW_PACE
        if is_new_pace or self._num_rounds >= self._next_plan + (0 if self._has_news else _QUIET_ROUNDS):
            self._make_plan(request, min_gain)
        if not self.plan or self._rests_for_once(self.plan):
            return None
        return self._weigh(self.plan, tokens, request, sampler)

    def observe(
        self, round: Proposal, num_accepted: int, emitted: TokenIds, verify_s: float, *, is_run: bool
    ) -> bool:
        """Learn from a round, whoever drafted in it; returns whether what the pass took is learned here.

        Args:
            num_accepted: Tokens of the draft's trunk.
            is_run: The draft was this drafter's.
        """
        self._num_rounds += 1
        self._emitted, self._num_verified = emitted, len(round.draft.tokens)
        is_beside = round.is_ahead and self.plan is not None
        if is_beside and self._num_rounds > 1:  # the prompt is read in the first pass
            # The lane's share of it is known later.
            self._pass = (len(round.draft.tokens) + 1, verify_s)
        # A pass for which nothing was ready in time is a miss too: its outcome may have been prefetched.
        self._has_missed = num_accepted < len(round.draft.trunk().tokens) if is_run else self.plan is not None
        has_offer = any(offer.source == self.drafter.name for offer in round.offers)
        self._has_news |= is_run or (self.plan is not None and has_offer)
        return is_beside

    def _make_plan(self, request: DraftRequest, min_gain: float) -> None:
        """Decide whether to draft ahead, how far, and how long the target waits."""
        started = self.clock()
        pair = (
            self.rates.chain(self.max_tokens),
            lambda num_draft: self.costs.ratio(num_draft + 1),
            self.stats.token,
            self.max_tokens,
        )
        self._worth = self._branches_worth(pair[0])
        best = best_pipelined(*pair, self.stats.contention, fixed=self.fixed_length)
        if self.drafter.can.num_alternatives and not request.with_distributions:
            verify, draft = self.stats.contention
            prefetched = (self.rates.prefetched, MAX_DRAFT_TOKENS)
            slowed = (verify, draft * self.stats.branched)
            hedged = best_pipelined(*pair, slowed, prefetched, self.fixed_length)
            best = max(best, hedged._replace(is_hedged=True))
        serial = best_serial(*pair).rate
        is_best = best.rate > max(_MIN_GAIN_AHEAD if self.plan else min_gain, serial)
        is_best |= self.fixed_length is not None
        if self.plan and not is_best:
            self.drafter.pause()
        self.plan = best if is_best else self._trial_of_less_contention(pair, serial) or self._trial()
        self._planned_step = self.stats.step(self.plan) if self.plan else 0.0
        wanted_rounds = (self.clock() - started) / _PLANNING_SHARE / self.costs.pass_s(1)
        least, most = _PLANNED_ROUNDS
        self._next_plan, self._has_news = self._num_rounds + int(min(max(wanted_rounds, least), most)), False

    def _rests_for_once(self, plan: AheadPlan) -> bool:
        """Let the lane rest now and then, so that the time of a pass alone is seen; returns whether it does."""
        if self._num_beside < _PLANNED_ROUNDS[0] or max(self.stats.contention) < _NOTABLE:
            return False
        if not self.stats.budget.spend(max(plan.rate - 1, MIN_LOSS_OF_TRIAL) + plan.wait * self.stats.token):
            return False
        self._num_beside, self._pass = 0, None
        self.drafter.pause()
        return True

    def _trial_of_less_contention(self, pair: _Pair, serial: float) -> AheadPlan | None:
        """Draft ahead for a while where it would pay if the two slowed each other down less than they did."""
        verify, draft = self.stats.contention
        plan = best_pipelined(*pair, (verify**0.5, draft**0.5))
        rate = pipelined_rate(*pair[:3], plan.wait, plan.length, (verify, draft))
        share = max(1 - rate / serial, MIN_LOSS_OF_TRIAL)
        lost = _PLANNED_ROUNDS[0] * verify * self.costs.ratio(plan.length + 1) * share
        is_hopeful = max(verify, draft) > _NOTABLE and plan.rate > max(MIN_GAIN, serial)
        return plan if is_hopeful and self.stats.budget.spend(lost) else None

    def _trial(self) -> AheadPlan | None:
        """Draft ahead for a while without being waited for, where nothing was learned for long."""
        verify, draft = self.stats.contention
        lost = _PLANNED_ROUNDS[0] * max(verify - 1, MIN_LOSS_OF_TRIAL)
        if self._has_news or MIN_GAIN * self.stats.token * draft > 1 or not self.stats.budget.spend(lost):
            return None
        return AheadPlan(1.0, 0, self.max_tokens)

    def _weigh(self, plan: AheadPlan, tokens: TokenIds, request: DraftRequest, sampler: Sampler) -> Promise:
        """Verify as many of the tokens that are ready as pay, or as are to be waited for."""
        ahead = self.drafter.draft_ahead(tokens, self.request(request, plan.length), sampler)
        num_ready = len(ahead.draft.tokens)
        self._learn_costs(ahead)
        self._learn_rates(ahead.past, request)
        if self._has_missed and plan.is_hedged:
            self.rates.observe_prefetched(num_ready > 0)
            self._has_news = True
        if num_ready:
            self.stats.text.hold(append(tokens, ahead.draft.tokens[:-1]))
        wait = plan.wait if self.stats.text.num_unread(tokens) <= _MAX_UNREAD_TO_WAIT else 0
        max_length = min(plan.length, request.num_tokens)
        length = min(max(num_ready, wait), max_length)
        if num_ready >= wait:
            length = self._paying_length(plan.rate, length)
        step_s = self.stats.token * self.costs.pass_s(1)
        waited_s, timeout_s = max(0, length - num_ready) * step_s, None
        if length == num_ready < max_length and (timeout_s := wait_for_step_s(step_s, ahead.running_s)):
            length, waited_s = length + 1, timeout_s
        alone_s = self.costs.pass_s(length + 1)
        beside_s = self._pass_beside_s(plan, max(length, num_ready), alone_s)
        rate = expected_tokens(self.rates.chain(length))[-1] / (beside_s + waited_s)
        return Promise(
            rate, length, offer=ahead.draft, timeout_s=timeout_s, contention=beside_s / alone_s, is_ahead=True
        )

    def _learn_rates(self, past: Tree, request: DraftRequest) -> None:
        """Learn from what the lane had guessed where the target's last pass was."""
        emitted, self._emitted = self._emitted, NO_DRAFT.tokens
        self.rates.observe_miss(past, emitted)
        # A draft is judged by itself; behind one that was accepted whole the lane may have guessed one more token.
        num_verified = self._num_verified
        is_whole = len(emitted) == num_verified + 1
        is_whole &= reusable_prefix(past.tokens, emitted[:-1], 0) == num_verified
        if is_whole and len(past.tokens) > num_verified and not request.with_distributions:
            self.rates.observe_next(past, emitted)
            self._has_news = True

    def _learn_costs(self, ahead: DraftAhead) -> None:
        """Learn from the steps of the lane, and from the last pass, how far the two slow each other down."""
        unit_s = self.costs.pass_s(1)
        steps = [step._replace(taken_s=step.taken_s / unit_s) for step in ahead.steps]
        running = ahead.unfinished and ahead.unfinished._replace(taken_s=ahead.unfinished.taken_s / unit_s)
        self.stats.observe_steps(steps, running)
        seen, self._pass = self._pass, None
        if seen is None or ahead.shared is None:
            return
        self._num_beside = self._num_beside + 1 if ahead.shared > 1 / 2 else 0
        width, taken_s = seen
        alone_s = self.costs.pass_s(width)
        self.costs.observe(width, alone_s * self.stats.observe_pass(taken_s / alone_s, ahead.shared))

    def _paying_length(self, rate: float, num_ready: int) -> int:
        """How many of the tokens that are ready to verify, where a step of time is worth rate tokens."""
        totals = expected_tokens(self.rates.chain(num_ready))
        return max(range(num_ready + 1), key=lambda k: totals[k] - rate * self.costs.ratio(k + 1))

    def _pass_beside_s(self, plan: AheadPlan, num_ready: int, alone_s: float) -> float:
        """Seconds of a pass while the drafter goes on from num_ready tokens, as far as it goes."""
        verify, draft = self.stats.contention
        num_ahead = inf if plan.is_hedged else max(0, max_ahead(plan.length) - num_ready)
        return pass_beside(alone_s, verify, num_ahead * self.stats.token * draft * self.costs.pass_s(1))

    def request(self, request: DraftRequest, num_tokens: int, timeout_s: float | None = None) -> DraftRequest:
        """The request for a draft ahead, such as that of an option that weigh has given."""
        return DraftRequest(
            num_tokens,
            with_distributions=request.with_distributions,
            cancel=request.cancel,
            is_ahead=True,
            min_tokens=num_tokens,
            timeout_s=timeout_s,
            worth=self._worth if self.plan is not None and self.plan.is_hedged else None,
        )

    def _branches_worth(self, accepted: Sequence[float]) -> Worth:
        """The worth of branches, and their cost.

        A step beside the target takes from its pass what the two slow each other down, and gives at best the time
        of a step for each of its tokens that comes to be used.
        """
        verify, draft = self.stats.contention
        return Worth(
            accepted,
            [self.stats.rows.ratio(num_rows) for num_rows in range(1, MAX_BRANCHES + 1)],
            others=self.rates.others(),
            min_used=max(MIN_USED_TOKENS, draft * (1 - 1 / verify)),
        )
