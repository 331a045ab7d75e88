"""A drafter model, as a policy weighs it: before a pass or while the target verifies, and on trial."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from edgespec.decoding.cached_prefix import reusable_prefix
from edgespec.decoding.scheduler import Round
from edgespec.policy.acceptance_rates import AcceptanceRates
from edgespec.policy.costs import PassCosts
from edgespec.policy.draft_model import UNKNOWN_BRANCHING, DraftModelStats
from edgespec.policy.expected import best_length, expected_tokens, most_hopeful
from edgespec.policy.limits import (
    MAX_BRANCHES,
    MAX_DRAFT_TOKENS,
    MIN_GAIN,
    MIN_GAIN_TO_STAY,
    MIN_USED_TOKENS,
)
from edgespec.policy.model_rates import ModelRates
from edgespec.policy.option import Option
from edgespec.policy.overlap import (
    AheadPlan,
    Ratio,
    best_pipelined,
    best_serial,
    max_ahead,
    pass_beside,
    pipelined_rate,
    wait_for_step_s,
)
from edgespec.policy.side_nodes import SideNode, choose_side_nodes
from edgespec.system.clock import Clock
from edgespec.types import Branching, Draft, DraftAhead, Drafter, DraftRequest, Sampler, TokenIds, append

# A trial never counts as cheaper than this share of a step, or a source at break-even were tried always.
_MIN_LOSS = 0.05
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
_MAX_MIN_PROBABILITY = 0.9
# Contention below this decides nothing, so nothing is spent on telling it from the machine's speed.
_NOTABLE = 1.05
# A rate that rests on this many judged tokens may be as lucky as MIN_GAIN supposes; luck falls with their root.
_NUM_LUCKY = 30.0


_Pair = tuple[Sequence[float], Ratio, float, int]  # rates, ratio, step and longest draft, as plans take them


@dataclass(slots=True)
class ModelSource:
    """A drafter model in one answer.

    It is tried for one token as often as its budget for trials allows, and for one token more as long as all are
    accepted. What it must read of the text before it can draft is shared out over as many rounds as the answer has
    had, as one rents until renting has cost what buying costs.
    """

    drafter: Drafter
    stats: DraftModelStats
    costs: PassCosts
    rates: AcceptanceRates
    max_tokens: int
    clock: Clock
    has_trees: bool = False  # the target verifies trees in one pass
    _ahead: AheadPlan | None = None  # how it drafts ahead; None while it drafts before a pass or not at all
    _num_rounds: int = 0
    _next_plan: int = 0  # in that round
    _has_news: bool = True  # since the last plan
    _planned_step: float = 0.0  # cost of a step that the plan was made with
    _trial: int = 0  # tokens of the trial that is going on
    _is_run: bool = False  # in the last round
    _has_missed: bool = False  # in the last round
    _branching: Branching = UNKNOWN_BRANCHING  # as of the last plan
    _num_beside: int = 0  # passes since one for most of which the lane was at rest
    _pass: tuple[int, float] | None = None  # width and seconds of the last pass beside the lane
    _own: ModelRates = field(init=False)

    def __post_init__(self) -> None:
        self.stats.tokens_per_step = self.drafter.tokens_per_step
        self._own = ModelRates(self.rates, self.drafter.name)
        self._own.assume_hope()

    @property
    def _min_gain(self) -> float:
        """The gain that a draft has to promise: the less, the more of its source was judged."""
        if self._is_run:
            return MIN_GAIN_TO_STAY
        judged = max(self._own.num_judged, _NUM_LUCKY)
        return float(1 + (MIN_GAIN - 1) * (_NUM_LUCKY / judged) ** 0.5)

    def weigh(self, tokens: TokenIds, request: DraftRequest, sampler: Sampler) -> Option:
        if self.drafter.can_run_ahead:
            if self._is_plan_due():
                self._plan(request)
            if self._ahead and not self._rests_for_once(self._ahead):
                return self._weigh_ahead(self._ahead, tokens, request, sampler)
        if self.costs.step_s is None:
            return Option(0.0, 0, self)
        step_s, step = self.costs.pass_s(1), self.stats.costs.step
        num_rounds = max(1, min(self._num_rounds, request.num_tokens))
        reading = self.stats.costs.steps(0, self.stats.num_unread(tokens)) / num_rounds

        pass_times_s = self.costs.pass_times_s(request.num_tokens + 1)

        def cost(length: int) -> float:
            return (
                pass_times_s[length]
                + (self.stats.num_steps(length) * step + (reading if length else 0.0)) * step_s
            )

        rates = self._own.chain(request.num_tokens)
        rate, length = best_length(expected_tokens(rates), cost)
        nodes: tuple[SideNode, ...] = ()
        if length and self.has_trees and not request.with_distributions:
            draft_s = cost(length) - pass_times_s[length]
            times_s = self.costs.pass_times_s(MAX_DRAFT_TOKENS + 1)
            rate, nodes = choose_side_nodes(rates[:length], self._own.others(), times_s, draft_s)
        return Option(rate, length, self, min_gain=self._min_gain, side_nodes=nodes)

    def trial(self, option: Option, best: Option, tokens: TokenIds) -> Option | None:
        is_wanted = option is not best and self.costs.step_s is not None and not self.drafter.can_run_ahead
        if not is_wanted or not self._can_afford_trial(best.rate, tokens):
            return None
        return Option(best.rate, self._trial, self)

    def hopeful(self, option: Option) -> Option | None:
        """A longer draft than the best one, if a model drafts; whether a single token pays is found by trials."""
        if not option.num_tokens or self.drafter.can_run_ahead:
            return None
        totals = expected_tokens(self._own.chain(self.max_tokens))
        pass_times_s = self.costs.pass_times_s(self.max_tokens + 1)
        token_s = self.stats.token * self.costs.pass_s(1)
        hope, length = most_hopeful(totals, pass_times_s, self.costs.spread, token_s)
        if length <= option.num_tokens:
            return None
        draft_s = self.stats.num_steps(length) * self.stats.costs.step * self.costs.pass_s(1)
        rate = totals[length] / (pass_times_s[length] + draft_s)
        return option._replace(rate=rate, num_tokens=length, draft_s=draft_s, hope=hope, side_nodes=())

    def draft(self, option: Option, tokens: TokenIds, request: DraftRequest, sampler: Sampler) -> Draft:
        """Drafts option.num_tokens, as long as each promises more, at the option's rate, than it takes."""
        if option.is_ahead:
            request = self._ahead_request(request, option.num_tokens, timeout_s=option.timeout_s)
        else:
            row_s = (self.costs.pass_s(4) - self.costs.pass_s(2)) / 2  # where 3 and 4 are one pass, half of it
            # What a step drafts costs no more for being longer.
            step = self.stats.costs.step if self.stats.tokens_per_step == 1 else 0.0
            token_s = step * self.costs.pass_s(1) + row_s
            # A draft that is made to learn what its pass takes has to have its length.
            min_probability = 0.0 if option.hope else min(_MAX_MIN_PROBABILITY, option.rate * token_s)
            num_tokens, has_distributions = min(option.num_tokens, request.num_tokens), request.with_distributions
            request = DraftRequest(
                num_tokens,
                min_probability,
                has_distributions,
                request.cancel,
                num_others=max([rank + 1 for _, rank in option.side_nodes], default=0),
                side_nodes=option.side_nodes,
            )
        return self.drafter.draft(tokens, request, sampler)

    def observe(self, round: Round, emitted: TokenIds, verify_s: float) -> bool:
        self._num_rounds += 1
        self.stats.budget.save(1.0)
        is_beside = round.is_ahead and self._ahead is not None
        if is_beside and self._num_rounds > 1:  # the prompt is read in the first pass
            self._pass = (
                len(round.draft.tokens) + 1,
                verify_s,
            )  # the lane's share of it is known later
        draft = round.draft.trunk()
        num_draft = len(draft.tokens)
        num_accepted = min(reusable_prefix(draft.tokens, emitted, 0), len(emitted) - 1)
        is_run = num_draft > 0 and round.draft.source == self.drafter.name
        if is_run:
            if not round.is_ahead:  # a lane that is ahead may have begun before it was asked
                unread = self.stats.num_unread(round.tokens)
                num_steps = self.stats.num_steps(num_draft)
                self.stats.costs.observe(num_steps, unread, round.draft_s / self.costs.pass_s(1))
            self.stats.read = append(round.tokens, draft.tokens[:-1])
            if num_accepted < num_draft and len(round.draft.tokens) > num_draft:
                self._own.observe_side_nodes(round.draft, num_accepted, int(emitted[num_accepted]))
        self._is_run = is_run
        # A pass for which nothing was ready in time is a miss too: its outcome may have been prefetched.
        self._has_missed = num_accepted < num_draft if is_run else self._ahead is not None
        has_offer = any(offer.source == self.drafter.name for offer in round.offers)
        self._has_news |= is_run or (self._ahead is not None and has_offer)
        # A trial goes on, a token further, as long as all of it is accepted.
        self._trial = self._trial + 1 if is_run and self._trial and num_accepted >= self._trial else 0
        return is_beside

    def _can_afford_trial(self, rate: float, tokens: TokenIds) -> bool:
        """Whether to try a draft of self._trial tokens, 1 at first, though another option has the better rate."""
        if self._trial:
            return self._could_pay(rate, self._trial)
        assert self.costs.step_s is not None
        taken = self.stats.costs.steps(1, self.stats.num_unread(tokens)) + self.costs.ratio(2)
        lost = taken - (1 + self._own.chain(1)[0]) / rate / self.costs.step_s
        if not self._could_pay(rate, self.max_tokens) or not self.stats.budget.spend(max(lost, _MIN_LOSS)):
            return False
        self._trial = 1
        return True

    def _could_pay(self, rate: float, num_tokens: int) -> bool:
        """Whether a draft of up to num_tokens would beat a rate if every token were accepted."""
        step, step_s = self.stats.costs.step, self.costs.pass_s(1)
        return any(
            (k + 1) / ((self.costs.ratio(k + 1) + self.stats.num_steps(k) * step) * step_s) > rate
            for k in range(1, num_tokens + 1)
        )

    def _is_plan_due(self) -> bool:
        if self._ahead and not 1 / _NEW_PACE < self.stats.step(self._ahead) / self._planned_step < _NEW_PACE:
            return True
        return self._num_rounds >= self._next_plan + (0 if self._has_news else _QUIET_ROUNDS)

    def _plan(self, request: DraftRequest) -> None:
        """Decide whether to draft ahead, how far, and how long the target waits."""
        started = self.clock()
        pair = (
            self._own.chain(self.max_tokens),
            lambda num_draft: self.costs.ratio(num_draft + 1),
            self.stats.token,
            self.max_tokens,
        )
        self._branching = self._odds(pair[0])
        best = best_pipelined(*pair, self.stats.contention)
        if self.drafter.num_alternatives and not request.with_distributions:
            verify, draft = self.stats.contention
            prefetched = (self._own.prefetched, MAX_DRAFT_TOKENS)
            hedged = best_pipelined(*pair, (verify, draft * self.stats.branched), prefetched)
            best = max(best, hedged._replace(is_hedged=True))
        min_gain = _MIN_GAIN_AHEAD if self._ahead else self._min_gain
        serial = best_serial(*pair).rate
        is_best = best.rate > max(min_gain, serial)
        if self._ahead and not is_best:
            self.drafter.pause()
        self._ahead = best if is_best else self._trial_of_less_contention(pair, serial) or self._trial_ahead()
        self._planned_step = self.stats.step(self._ahead) if self._ahead else 0.0
        wanted_rounds = (self.clock() - started) / _PLANNING_SHARE / self.costs.pass_s(1)
        least, most = _PLANNED_ROUNDS
        self._next_plan, self._has_news = self._num_rounds + int(min(max(wanted_rounds, least), most)), False

    def _rests_for_once(self, plan: AheadPlan) -> bool:
        """Let the lane rest in this round: what a pass takes alone is not seen where the lane always works."""
        if self._num_beside < _PLANNED_ROUNDS[0] or max(self.stats.contention) < _NOTABLE:
            return False
        if not self.stats.budget.spend(max(plan.rate - 1, _MIN_LOSS) + plan.wait * self.stats.token):
            return False
        self._num_beside, self._pass = 0, None
        self.drafter.pause()
        return True

    def _trial_of_less_contention(self, pair: _Pair, serial: float) -> AheadPlan | None:
        """Draft ahead for a while where it would pay if the two slowed each other down less than they did."""
        verify, draft = self.stats.contention
        plan = best_pipelined(*pair, (verify**0.5, draft**0.5))
        rate = pipelined_rate(*pair[:3], plan.wait, plan.length, (verify, draft))
        lost = _PLANNED_ROUNDS[0] * verify * self.costs.ratio(plan.length + 1) * max(1 - rate / serial, _MIN_LOSS)
        is_hopeful = max(verify, draft) > _NOTABLE and plan.rate > max(MIN_GAIN, serial)
        return plan if is_hopeful and self.stats.budget.spend(lost) else None

    def _trial_ahead(self) -> AheadPlan | None:
        """Draft ahead for a while without being waited for, where nothing was learned for long."""
        verify, draft = self.stats.contention
        lost = _PLANNED_ROUNDS[0] * max(verify - 1, _MIN_LOSS)
        if self._has_news or MIN_GAIN * self.stats.token * draft > 1 or not self.stats.budget.spend(lost):
            return None
        return AheadPlan(1.0, 0, self.max_tokens)

    def _weigh_ahead(self, plan: AheadPlan, tokens: TokenIds, request: DraftRequest, sampler: Sampler) -> Option:
        """Verify as many of the tokens that are ready as pay, or as are to be waited for."""
        ahead = self.drafter.draft_ahead(tokens, self._ahead_request(request, plan.length), sampler)
        num_ready = len(ahead.draft.tokens)
        self._learn_costs(ahead)
        self._own.observe_miss(ahead.missed)
        if ahead.foreseen and not request.with_distributions:
            self._own.observe_foreseen(ahead.foreseen)
            self._has_news = True
        if self._has_missed and plan.is_hedged:
            self._own.observe_prefetched(num_ready > 0)
            self._has_news = True
        if num_ready:
            self.stats.read = append(tokens, ahead.draft.tokens[:-1])
        wait = plan.wait if self.stats.num_unread(tokens) <= _MAX_UNREAD_TO_WAIT else 0
        max_length = min(plan.length, request.num_tokens)
        length = min(max(num_ready, wait), max_length)
        if num_ready >= wait:
            length = self._paying_length(plan.rate, length)
        step_s = self.stats.token * self.costs.pass_s(1)
        waited_s, timeout_s = max(0, length - num_ready) * step_s, None
        if length == num_ready < max_length:
            timeout_s = wait_for_step_s(step_s, ahead.running_s)
            if timeout_s:
                length, waited_s = length + 1, timeout_s
        alone_s = self.costs.pass_s(length + 1)
        beside_s = self._pass_beside_s(plan, max(length, num_ready), alone_s)
        rate = expected_tokens(self._own.chain(length))[-1] / (beside_s + waited_s)
        return Option(rate, length, self, ahead.draft, timeout_s, beside_s / alone_s, is_ahead=True)

    def _learn_costs(self, ahead: DraftAhead) -> None:
        """Learn from the steps of the lane, and from the last pass, how far the two slow each other down."""
        unit_s = self.costs.pass_s(1)
        steps = [step._replace(taken_s=step.taken_s / unit_s) for step in ahead.steps]
        running = ahead.unfinished and ahead.unfinished._replace(taken_s=ahead.unfinished.taken_s / unit_s)
        self.stats.observe_steps(steps, running)
        seen, self._pass = self._pass, None
        if seen is None or ahead.beside is None:
            return
        self._num_beside = self._num_beside + 1 if ahead.beside > 1 / 2 else 0
        width, taken_s = seen
        alone_s = self.costs.pass_s(width)
        self.costs.observe(width, alone_s * self.stats.observe_pass(taken_s / alone_s, ahead.beside))

    def _paying_length(self, rate: float, num_ready: int) -> int:
        """How many of the tokens that are ready to verify, where a step of time is worth rate tokens."""
        totals = expected_tokens(self._own.chain(num_ready))
        return max(range(num_ready + 1), key=lambda k: totals[k] - rate * self.costs.ratio(k + 1))

    def _pass_beside_s(self, plan: AheadPlan, num_ready: int, alone_s: float) -> float:
        """Seconds of a pass while the drafter goes on from num_ready tokens, as far as it goes."""
        verify, draft = self.stats.contention
        num_ahead = inf if plan.is_hedged else max(0, max_ahead(plan.length) - num_ready)
        return pass_beside(alone_s, verify, num_ahead * self.stats.token * draft * self.costs.pass_s(1))

    def _ahead_request(
        self, request: DraftRequest, num_tokens: int, *, timeout_s: float | None = None
    ) -> DraftRequest:
        return DraftRequest(
            num_tokens,
            with_distributions=request.with_distributions,
            cancel=request.cancel,
            is_ahead=True,
            min_tokens=num_tokens,
            timeout_s=timeout_s,
            branching=self._branching if self._ahead is not None and self._ahead.is_hedged else None,
        )

    def _odds(self, accepted: Sequence[float]) -> Branching:
        """What branches are worth, and their cost.

        A step beside the target takes from its pass what the two slow each other down, and gives at best the time
        of a step for each of its tokens that comes to be used.
        """
        verify, draft = self.stats.contention
        return Branching(
            accepted,
            self._own.others(),
            [self.stats.rows.ratio(num_rows) for num_rows in range(1, MAX_BRANCHES + 1)],
            max(MIN_USED_TOKENS, draft * (1 - 1 / verify)),
        )
