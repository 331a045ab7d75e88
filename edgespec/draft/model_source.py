"""A drafter model, as a policy weighs it before a pass, and on trial."""

from dataclasses import dataclass, field, replace
from functools import partial

from edgespec.config.drafter_names import MAX_DRAFT_TOKENS
from edgespec.decoding.decoder import reusable_prefix
from edgespec.decoding.scheduler import Proposal
from edgespec.decoding.tree import Tree, Worth
from edgespec.draft.acceptance_rates import AcceptanceRates, position_bucket
from edgespec.draft.ahead_schedule import AheadSchedule
from edgespec.draft.costs import PassCosts
from edgespec.draft.draft_model import DraftModelStats
from edgespec.draft.drafter import Drafter, DraftRequest
from edgespec.draft.limits import MAX_BRANCHES, MIN_GAIN, MIN_GAIN_TO_STAY, MIN_LOSS_OF_TRIAL
from edgespec.draft.model_rates import ModelRates, nodes_key
from edgespec.draft.option import Drafted, Promise, best_chain, expected_tokens, most_hopeful
from edgespec.draft.read_text import Reading
from edgespec.system.clock import Clock
from edgespec.types import Sampler, TokenIds, append

_MAX_MIN_PROBABILITY = 0.9
# A rate that rests on this many judged tokens may be as lucky as MIN_GAIN supposes; luck falls with their root.
_NUM_LUCKY = 30.0
# A source that does not pay is weighed again after a quarter of the rounds since it did, and this many at most: to
# weigh it takes 0.03 to 0.1 ms between two passes.
_LONGEST_REST = 32
# From such a rest on a head that can begin anywhere in a text has its target leave out the states that it reads.
_DEEP_REST = 4
# Trials that led nowhere make the next ones rarer from so many on, up to this many times.
_PATIENCE, _RAREST = 8, 16


@dataclass(slots=True)
class ModelSource:
    """A drafter model in one answer.

    It is tried for one token as often as its budget for trials allows, and for one token more as long as all are
    accepted; the more trials led nowhere, the more rarely. While it does not pay it rests, and takes no time. What
    it must read of the text before it can draft is shared out over as many rounds as the answer has had, as one
    rents until renting has cost what buying costs. Of a long text a head reads the end alone until its
    drafts have paid for the rest.
    """

    drafter: Drafter
    stats: DraftModelStats
    costs: PassCosts
    rates: AcceptanceRates
    clock: Clock
    has_trees: bool = False  # the target verifies trees in one pass
    _num_rounds: int = 0
    _num_runs: int = 0  # rounds that verified a draft of it
    _trial: int = 0  # tokens of the trial that is going on
    _is_run: bool = False  # in the last round
    _num_idle: int = 0  # rounds since it paid
    _rests_until: int = 0  # in that round, of those, it is weighed again
    _is_expected: bool = True  # as the drafter was told
    _reading: Reading = field(default=Reading(0, 0))  # of the last draft
    _trial_cost: float = 0.0  # that the budget is to have before a trial is thought of
    _own: ModelRates = field(init=False)
    _ahead: AheadSchedule = field(init=False)

    def __post_init__(self) -> None:
        can = self.drafter.can
        self.stats.tokens_per_step, self.stats.text.max_unread = can.tokens_per_step, can.max_unread
        self._own = ModelRates(self.rates, self.drafter.name)
        self._own.assume_hope()
        self._ahead = AheadSchedule(self.drafter, self.stats, self.costs, self._own, MAX_DRAFT_TOKENS, self.clock)
        # One that did not pay in the last answers rests from the first pass of this one, the prompt's.
        self._num_idle = min(self.stats.num_idle, 4 * _DEEP_REST)
        self._rest()

    @property
    def _min_gain(self) -> float:
        """The gain that a draft has to promise; the more tokens of its source were judged, the smaller."""
        if self._is_run:
            return MIN_GAIN_TO_STAY
        judged = max(self._own.num_judged, _NUM_LUCKY)
        return float(1 + (MIN_GAIN - 1) * (_NUM_LUCKY / judged) ** 0.5)

    def weigh(self, tokens: TokenIds, request: DraftRequest, sampler: Sampler) -> Promise:
        can = self.drafter.can
        if can.run_ahead and (option := self._ahead.weigh(tokens, request, sampler, self._min_gain)):
            return option._replace(source=self)
        if self.costs.step_s is None or self._num_idle < self._rests_until:
            return Promise(0.0, 0, self)
        started = self.clock()
        option = self._weigh(tokens, request)
        self.stats.observe_weighing((self.clock() - started) / self.costs.pass_s(1))
        if option.rate * self.costs.pass_s(1) <= option.min_gain:
            self._rest()
        elif not self._wake(tokens):
            return Promise(0.0, 0, self)
        return option

    def _rest(self) -> None:
        self._rests_until = self._num_idle + min(self._num_idle // 4, _LONGEST_REST)
        self._sleep()

    def _sleep(self) -> None:
        """Let passes of a long rest leave out the states that it reads."""
        can, is_long = self.drafter.can, self._num_idle >= 4 * _DEEP_REST
        if self._is_expected and is_long and can.max_unread is not None and not can.run_ahead:
            self._is_expected = False
            self.stats.text.leave_gap()
            self.drafter.expect_drafts(False)

    def _wake(self, tokens: TokenIds) -> bool:
        """True if it can draft; after a rest a head needs the states of a pass, and reads from there on."""
        can_draft = self._is_expected or self.drafter.expect_drafts(True)
        if not can_draft:
            self.stats.text.begin_behind(tokens)
        self._is_expected = True
        return can_draft

    def _next_reading(self, tokens: TokenIds, acceptance: float) -> Reading:
        """What it reads before its next draft, the chance of whose first token is given."""
        if not self._is_expected:  # of tokens whose states passes leave out it reads none
            return Reading(1, 1)
        if self.drafter.can.run_ahead:
            num_unread = self.stats.text.num_unread(tokens)
            return Reading(num_unread, num_unread)
        cost = partial(self.stats.costs.steps, 0)
        return self.stats.text.next(tokens, cost, acceptance, self._num_runs)

    def _weigh(self, tokens: TokenIds, request: DraftRequest) -> Promise:
        """The draft that would be best before this pass."""
        step_s, step = self.costs.pass_s(1), self.stats.costs.step
        num_rounds = max(1, self._num_rounds)
        if request.num_tokens < MAX_DRAFT_TOKENS:  # all that are left of the answer
            num_rounds = min(num_rounds, request.num_tokens)
        chain = self._own.chain(request.num_tokens)
        num_due = self._next_reading(tokens, chain[0]).num_due
        reading = self.stats.costs.steps(0, num_due) / num_rounds + self.stats.weighing
        times_s = self.costs.pass_times_s(request.num_tokens + 1)
        for length in range(1, len(times_s)):
            times_s[length] += (self.stats.num_steps(length) * step + reading) * step_s
        rate, length = best_chain(chain, times_s)
        is_tree = length > 0 and self.has_trees and self.drafter.can.trees and not request.with_distributions
        if is_tree:
            rate *= self.stats.tree_gain.ratio
        return Promise(rate, length, self, min_gain=self._min_gain, is_tree=is_tree)

    def trial(self, option: Promise, best: Promise, tokens: TokenIds) -> Promise | None:
        """A draft of one token, and of one more as long as all are accepted, though best has a better rate."""
        if option is best or self.costs.step_s is None or self.drafter.can.run_ahead:
            return None
        if self._trial:
            return Promise(best.rate, self._trial, self) if self._could_pay(best.rate, self._trial) else None
        if self.stats.budget.saved < self._trial_cost:
            return None
        (acceptance,) = self._own.chain(1)
        num_read = self._next_reading(tokens, acceptance).num_tokens
        taken = self.stats.costs.steps(1, num_read) + self.costs.ratio(2)
        lost = taken - (1 + acceptance) / best.rate / self.costs.step_s
        rarity = min(max(1.0, self.stats.num_vain / _PATIENCE), _RAREST)
        self._trial_cost = max(lost, MIN_LOSS_OF_TRIAL) * rarity
        if not self._could_pay(best.rate, MAX_DRAFT_TOKENS):
            self._trial_cost = self.stats.budget.saved + MIN_LOSS_OF_TRIAL
        if self.stats.budget.saved < self._trial_cost or not self._wake(tokens):
            return None
        self.stats.budget.spend(self._trial_cost)
        self._trial = 1
        self.stats.num_vain += 1
        return Promise(best.rate, self._trial, self)

    def hopeful(self, option: Promise) -> Promise | None:
        """A longer draft than the best one, if a model drafts; whether a single token pays is found by trials."""
        if not option.num_tokens or self.drafter.can.run_ahead:
            return None
        totals = expected_tokens(self._own.chain(MAX_DRAFT_TOKENS))
        pass_times_s = self.costs.pass_times_s(MAX_DRAFT_TOKENS + 1)
        token_s = self.stats.token * self.costs.pass_s(1)
        hope, length = most_hopeful(totals, pass_times_s, self.costs.spread, token_s)
        if length <= option.num_tokens:
            return None
        draft_s = self.stats.num_steps(length) * self.stats.costs.step * self.costs.pass_s(1)
        rate = totals[length] / (pass_times_s[length] + draft_s)
        return option._replace(rate=rate, num_tokens=length, draft_s=draft_s, hope=hope, is_tree=False)

    def draft(self, option: Promise, tokens: TokenIds, request: DraftRequest, sampler: Sampler) -> Drafted:
        """Drafts option.num_tokens, as long as each promises more, at the option's rate, than it takes.

        Of a tree it drafts whatever does, as far ahead as the request goes.
        """
        if option.is_ahead:
            draft = self.drafter.draft(
                tokens, self._ahead.request(request, option.num_tokens, option.timeout_s), sampler
            )
            return Drafted(draft, (draft if len(draft.tokens) else option.offer,))
        self._reading = self._next_reading(tokens, self._own.chain(1)[0])
        row_s = (self.costs.pass_s(4) - self.costs.pass_s(2)) / 2  # where 3 and 4 are one pass, half of it
        # What a step drafts costs no more for being longer.
        step = self.stats.costs.step if self.stats.tokens_per_step == 1 else 0.0
        token_s = step * self.costs.pass_s(1) + row_s
        # A draft that is made to learn what its pass takes has to have its length.
        min_probability = 0.0 if option.hope else min(_MAX_MIN_PROBABILITY, option.rate * token_s)
        chain = replace(
            request,
            num_tokens=min(option.num_tokens, request.num_tokens),
            min_probability=min_probability,
            max_unread=self._reading.limit,
        )
        if not option.is_tree:
            whole = self.drafter.draft(tokens, chain, sampler)
            return Drafted(self._paying(whole, option), (whole._replace(chances=()),))
        # A drafter of blocks drafts chains, as long as its blocks pay in the mean.
        max_depth = request.num_tokens if self.stats.tokens_per_step == 1 else chain.num_tokens
        worth = self._tree_worth(option, max_depth, step * self.costs.pass_s(1))
        whole = self.drafter.draft(tokens, replace(chain, num_tokens=max_depth, worth=worth), sampler)
        if not whole.steps:
            return Drafted(whole, (whole,))
        best = whole.best(worth)
        draft = best._replace(buckets=tuple(position_bucket(depth - 1) for depth in best.depths))
        drafting_s = self.stats.steps_of(draft) * self.stats.costs.step * self.costs.pass_s(1)
        taken_s, gain = drafting_s + self.costs.pass_s(len(draft.tokens) + 1), self.stats.tree_gain
        gain.observe(1 + sum(draft.chances), taken_s * option.rate / gain.ratio)
        # How often guesses come true by how sure the drafter was of them is judged of all, verified or not.
        return Drafted(draft, (draft.trunk(), whole._replace(source=nodes_key(self.drafter.name))))

    def _paying(self, whole: Tree, option: Promise) -> Tree:
        """The first tokens of a chain that pay for their rows.

        A chain ends behind the token of which the drafter is not sure, which may need a much longer pass.
        """
        num_tokens = len(whole.tokens)
        pass_times = [option.rate * each for each in self.costs.pass_times_s(num_tokens + 1)]
        worth = Worth(accepted=(), step_times=(), pass_times=pass_times)
        num_paying = worth.num_rows(whole.chances) if whole.chances else num_tokens
        return whole.cut(num_paying)._replace(chances=(), steps=(1,) * num_tokens)

    def _tree_worth(self, option: Promise, max_depth: int, step_s: float) -> Worth:
        rows = range(1, MAX_BRANCHES + 1)
        return Worth(
            accepted=self._own.chain(max_depth),
            step_times=[option.rate * step_s * self.stats.rows.ratio(num_rows) for num_rows in rows],
            pass_times=[option.rate * each for each in self.costs.pass_times_s(MAX_DRAFT_TOKENS + 1)],
            chances=self._own.nodes(),
        )

    def observe(self, round: Proposal, emitted: TokenIds, verify_s: float) -> bool:
        self._num_rounds += 1
        self.stats.budget.save(1.0)
        draft = round.draft.trunk()
        num_draft = len(draft.tokens)
        num_accepted = min(reusable_prefix(draft.tokens, emitted, 0), len(emitted) - 1)
        is_run = num_draft > 0 and round.draft.source == self.drafter.name
        if is_run:
            self._num_runs += 1
            if not round.is_ahead:  # a lane that is ahead may have begun before it was asked
                num_steps, num_read = self.stats.steps_of(round.draft), self._reading.num_tokens
                self.stats.costs.observe(num_steps, num_read, round.draft_s / self.costs.pass_s(1))
                self.stats.text.observe(round.tokens, self._reading)
            # It has read all that it drafted, verified or not.
            whole = next((offer for offer in round.offers if offer.source == self.drafter.name), draft)
            self.stats.text.hold(append(round.tokens, whole.tokens[:-1]))
            if num_accepted:
                self._rests_until = 0
            if not self._trial:  # it pays
                self._num_idle = self.stats.num_vain = 0
        self._num_idle = self.stats.num_idle = self._num_idle + 1
        self._is_run = is_run
        # A trial goes on, a token further, as long as all of it is accepted.
        goes_on = is_run and num_accepted >= self._trial
        if self._trial and not num_accepted:
            self._sleep()
        self._trial = self._trial + 1 if self._trial and goes_on else 0
        return self._ahead.observe(round, num_accepted, emitted, verify_s, is_run=is_run)

    def _could_pay(self, rate: float, num_tokens: int) -> bool:
        """True if a draft of up to num_tokens would beat a rate if every token were accepted."""
        step, step_s = self.stats.costs.step, self.costs.pass_s(1)
        return any(
            (k + 1) / ((self.costs.ratio(k + 1) + self.stats.num_steps(k) * step) * step_s) > rate
            for k in range(1, num_tokens + 1)
        )
