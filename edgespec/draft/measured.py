"""Who drafts next and how much: whatever yields the most expected tokens a second, plain decoding included.

Or a fixed number of tokens, for reproducible runs and comparisons. Each round says why it drafts nothing, and is a
JSON document at level DEBUG of the logger edgespec.rounds.
"""

import json
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from threading import Lock
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

from edgespec.config.drafter_names import MAX_DRAFT_TOKENS
from edgespec.decoding.decoder import reusable_prefix
from edgespec.decoding.pass_queue import Caller
from edgespec.decoding.scheduler import Proposal
from edgespec.decoding.tree import NO_DRAFT
from edgespec.draft.acceptance_rates import AcceptanceChange, AcceptanceRates
from edgespec.draft.costs import PassCosts
from edgespec.draft.draft_model import DraftCosts, DraftModelStats
from edgespec.draft.drafter import Drafter, DraftRequest
from edgespec.draft.limits import MIN_GAIN_OVER_TEXT
from edgespec.draft.option import NOTHING, DraftSource, Probes, Promise, TrialBudget, probe_budget
from edgespec.draft.overlap import max_ahead
from edgespec.draft.text_source import TextSource
from edgespec.system.clock import Clock
from edgespec.types import Logits, Sampler, TokenIds

if TYPE_CHECKING:
    from edgespec.draft.ahead_schedule import AheadSchedule
    from edgespec.draft.model_source import ModelSource

NO_DRAFTER = "no drafter is in use"
NO_LENGTH = "drafts have no tokens (draft-length 0)"
NO_GUESS = "no drafter had a guess"
NO_GAIN = "no guess was likely to save time"
ENDING = "the answer or the context ends here"
_LOG = logging.getLogger("edgespec.rounds")
# Steps of the target for each token that a model drafts and for each that it reads, until they are measured.
_UNKNOWN_COSTS = (0.25, 0.02)
_PAUSE_SHARE = 0.1  # of the newest pause in the running average
_rate = attrgetter("rate")


class _Unlearned(NamedTuple):
    """A round that rates and costs do not know yet."""

    round: Proposal
    emitted: TokenIds
    pass_s: float | None  # None where a source has learned what its pass took, or where it read the prompt
    num_beside: int = 0  # rows of other texts in the pass


@dataclass(slots=True)
class MeasuredPolicy:
    """E(k) / (seconds of a pass of k + 1 tokens and of the draft), over all sources and lengths k.

    E(k) = 1 + a₁ + a₁a₂ + … with the chance aᵢ that a token is accepted, given its source and bucket (Leviathan et
    al., 2023, section 3.3, with measured costs and rates).

    max_unlearned: rounds that rates and costs may be behind, so that another thread can call learn while the next
        pass runs. That saves 0.03 ms between two passes.
    """

    drafters: Sequence[Drafter]
    costs: PassCosts
    rates: AcceptanceRates
    models: dict[str, DraftModelStats] = field(default_factory=dict)  # what is known of drafter models, by name
    with_distributions: bool = False
    clock: Clock = perf_counter
    probe_budget: TrialBudget = field(default_factory=probe_budget)  # of all answers of a session
    max_unlearned: int = 0
    has_trees: bool = False  # the target verifies trees in one pass
    caller: Caller = field(default_factory=Caller)  # the answer, as the queue of passes sees it
    _unlearned: deque[_Unlearned] = field(init=False, default_factory=deque)
    _lock: Lock = field(init=False, default_factory=Lock)  # of rates and costs
    _sources: list[DraftSource] = field(init=False)
    _probes: Probes = field(init=False)
    _num_rounds: int = field(init=False, default=0)
    _request: DraftRequest = field(init=False, default=DraftRequest(0))  # of the last round
    _ended_s: float | None = field(init=False, default=None)  # when the last pass did
    _pause_s: float = field(init=False, default=0.0)  # between a pass and the next, but for a model's draft

    def __post_init__(self) -> None:
        self._probes = Probes(self.costs, self.probe_budget)
        if any(each.can.run_ahead for each in self.drafters):
            self.max_unlearned = 0  # a pass that a lane has slowed down is judged by the newest costs
        texts: list[DraftSource] = [
            TextSource(each, self.costs, self.rates) for each in self.drafters if each.can.is_free
        ]
        self._sources = texts + [self._model(each) for each in self.drafters if not each.can.is_free]

    def _model(self, drafter: Drafter) -> "ModelSource":
        from edgespec.draft.model_source import ModelSource  # 10 ms, and only a drafter model needs it

        return ModelSource(
            drafter,
            _stats_of(drafter, self.models),
            self.costs,
            self.rates,
            self.clock,
            has_trees=self.has_trees,
        )

    def propose(self, tokens: TokenIds, max_tokens: int, sampler: Sampler) -> Proposal:
        with self._lock:
            return self._propose(tokens, max_tokens, sampler)

    def _propose(self, tokens: TokenIds, max_tokens: int, sampler: Sampler) -> Proposal:
        if self._ended_s is not None:
            self._observe_pause(self.clock() - self._ended_s)
        if (num_tokens := min(MAX_DRAFT_TOKENS, max_tokens)) != self._request.num_tokens:
            self._request = DraftRequest(num_tokens, with_distributions=self.with_distributions)
        request = self._request
        self.costs.context_length = len(tokens)
        self.costs.beside = self.caller.beside
        if request.num_tokens < 1:
            return Proposal(tokens, reason=ENDING)
        if self.with_distributions:
            # What is drawn must say nothing of what is decided, in this round or, left over, in a later one.
            sampler = sampler.drafting(len(tokens))
        weighed = (source.weigh(tokens, request, sampler) for source in self._sources)
        options = [option for option in weighed if option]
        plain = Promise(1.0 / self.costs.pass_s(1))
        chosen = self._choose(plain, options, tokens)
        started = self.clock()
        draft, guessed = chosen.source.draft(chosen, tokens, request, sampler) if chosen.source else NOTHING
        no_draft = NO_GAIN if options else NO_GUESS if self.drafters else NO_DRAFTER
        others = [option.offer for option in options if option.source is not chosen.source]
        return Proposal(
            tokens,
            draft,
            "" if len(draft.tokens) else no_draft,
            tuple(offer for offer in (*others, *guessed) if len(offer.tokens)),
            _expected(plain, options) if _LOG.isEnabledFor(logging.DEBUG) else {},
            self.clock() - started,
            max([option.contention for option in options], default=1.0),
            chosen.is_ahead,
        )

    def observe(self, round: Proposal, logits: Logits, emitted: TokenIds, verify_s: float) -> None:
        self._ended_s = self.clock()
        self._num_rounds += 1
        self._probes.observe_round()
        with self._lock:
            has_learned = [source.observe(round, emitted, verify_s) for source in self._sources]
            is_new = self._num_rounds > 1 and not any(has_learned)  # the prompt is read in the first pass
            pass_s = verify_s / round.contention + self._pause_s if is_new else None
            self._unlearned.append(_Unlearned(round, emitted, pass_s, self.caller.beside.num_rows))
            if len(self._unlearned) > self.max_unlearned:
                self._learn()
        for drafter in self.drafters:
            drafter.learn(round.tokens, round.draft, logits)
        _log_round(self._num_rounds, round, len(emitted) - 1, verify_s)

    def learn(self) -> None:
        """Learn from rounds that were only noted so far, unless this policy is at work; any thread may call it."""
        if not self._lock.locked():
            with self._lock:  # and not acquire, behind which Ctrl-C could strike with the lock taken
                self._learn()

    def _learn(self) -> None:
        while self._unlearned:
            round, emitted, pass_s, num_beside = self._unlearned.popleft()
            if pass_s is not None:
                self.costs.observe(len(round.draft.tokens) + 1, pass_s, num_beside)
            for offer in round.offers:
                self.rates.judge(offer, emitted)

    def _observe_pause(self, taken_s: float) -> None:
        """Learn what the caller and this policy take between two passes, which both kinds of rounds have to pay.

        A reader that rests for a while is no part of it.
        """
        unit_s = self.costs.step_s or 0.0
        bounded = min(taken_s, 2 * self._pause_s + unit_s / 64, unit_s)
        self._pause_s += _PAUSE_SHARE * (bounded - self._pause_s)

    def acceptance_changes(self) -> dict[str, AcceptanceChange]:
        """By drafter, how much of what it guessed was accepted in this answer and before."""
        names = {drafter.name for drafter in self.drafters}  # other sources count parts of what these guessed
        return {name: change for name, change in self.rates.changes().items() if name in names}

    def close(self) -> None:
        with self._lock:
            self._learn()
        for drafter in self.drafters:
            drafter.pause()
            drafter.expect_drafts(True)  # by the next answer

    def _choose(self, plain: Promise, options: Sequence[Promise], tokens: TokenIds) -> Promise:
        """The best option that beats plain decoding, or one whose source is on trial.

        A model's draft has to beat one from the text, which costs nothing, by a margin: of two estimates that are
        nearly equal the one chosen is mostly the luckier, and a model's rests on its costs too. One that drafts
        while the target verifies has been compared by its schedule.
        """
        free, best = (max(each, key=_rate, default=plain) for each in (filter(_is_free, options), options))
        if free.rate <= free.min_gain * plain.rate:
            free = plain
        wanted = best.min_gain * plain.rate if free is plain else MIN_GAIN_OVER_TEXT * free.rate
        if best is not free and best.rate <= wanted and not best.is_ahead:
            best = free
        for option in sorted(options, key=_is_free):  # models first: they are tried for one token
            if option.source and (trial := option.source.trial(option, best, tokens)):
                return trial
        return self._probes.choose(plain, best, options) or best


def _is_free(option: Promise) -> bool:
    return option.source is not None and option.source.drafter.can.is_free


def _expected(plain: Promise, options: Sequence[Promise]) -> dict[str, dict[str, float]]:
    """The speed that each source promises for the pass, for the log; 1 is that of plain decoding."""
    return {
        option.source.drafter.name if option.source else "none": {
            "num_draft": option.num_tokens,
            "speed_over_plain": _rounded(option.rate / plain.rate),
        }
        for option in (plain, *options)
    }


class FixedLength:
    """Drafts the same number of tokens in each round, from the first drafter that has a guess.

    What is known of costs and rates decides only whether a drafter that can hedge does so.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter],
        num_tokens: int,
        *,
        with_distributions: bool = False,
        costs: PassCosts | None = None,
        rates: AcceptanceRates | None = None,
        models: dict[str, DraftModelStats] | None = None,
    ) -> None:
        self._drafters = drafters
        self._num_tokens = num_tokens
        self._with_distributions = with_distributions
        self._num_rounds = 0
        self._rates = rates or AcceptanceRates()
        costs, models = costs or PassCosts(), {} if models is None else models
        hedging = [
            each for each in drafters if each.can.num_alternatives and num_tokens and not with_distributions
        ]
        self._hedging = {each.name: self._schedule(each, costs, models) for each in hedging}

    def _schedule(self, drafter: Drafter, costs: PassCosts, models: dict[str, DraftModelStats]) -> "AheadSchedule":
        from edgespec.draft.ahead_schedule import AheadSchedule
        from edgespec.draft.model_rates import ModelRates

        own, length = ModelRates(self._rates, drafter.name), self._num_tokens
        own.assume_hope()
        stats = _stats_of(drafter, models)
        return AheadSchedule(drafter, stats, costs, own, max_ahead(length), perf_counter, fixed_length=length)

    def propose(self, tokens: TokenIds, max_tokens: int, sampler: Sampler) -> Proposal:
        started = perf_counter()
        num_tokens = min(self._num_tokens, max_tokens)
        request = DraftRequest(
            num_tokens, with_distributions=self._with_distributions, is_ahead=True, min_tokens=num_tokens
        )
        if self._with_distributions:
            # One noise for all rounds, so that a token is the same whenever it was drafted. A position is judged
            # once, and how far a draft goes is fixed, so that what is drawn says nothing of what is decided.
            sampler = sampler.drafting(0)
        for drafter in self._drafters if num_tokens > 0 else ():
            asked = request
            if schedule := self._hedging.get(drafter.name):
                schedule.weigh(tokens, request, sampler, 0.0)
                asked = schedule.request(request, num_tokens)
            draft = drafter.draft(tokens, asked, sampler)
            if len(draft.tokens):
                is_ahead = any(each.can.run_ahead for each in self._drafters)
                return Proposal(tokens, draft, draft_s=perf_counter() - started, is_ahead=is_ahead)
        reason = NO_DRAFTER if not self._drafters else NO_GUESS if self._num_tokens else NO_LENGTH
        return Proposal(tokens, NO_DRAFT, reason)

    def observe(self, round: Proposal, logits: Logits, emitted: TokenIds, verify_s: float) -> None:
        for drafter in self._drafters:
            drafter.learn(round.tokens, round.draft, logits)
        self._rates.judge(round.draft, emitted)
        num_accepted = min(reusable_prefix(round.draft.tokens, emitted, 0), len(emitted) - 1)
        for name, schedule in self._hedging.items():
            schedule.observe(round, num_accepted, emitted, verify_s, is_run=round.draft.source == name)
        self._num_rounds += 1
        _log_round(self._num_rounds, round, len(emitted) - 1, verify_s)

    def close(self) -> None:
        for drafter in self._drafters:
            drafter.pause()


def main_reason(counts: Mapping[str, int]) -> str | None:
    """Why most passes had no draft; that an answer ended counts only where there is no other reason."""
    others = {reason: count for reason, count in counts.items() if reason != ENDING} or counts
    return max(others, key=lambda reason: others[reason], default=None)


def _log_round(number: int, round: Proposal, num_accepted: int, verify_s: float) -> None:
    """Log what was run, what came of it, and what was expected of each source."""
    if not _LOG.isEnabledFor(logging.DEBUG):
        return
    document = {
        "round": number,
        "source": round.draft.source,
        "num_draft": len(round.draft.tokens),
        "num_accepted": num_accepted,
        "draft_ms": _rounded(1e3 * round.draft_s),
        "verify_ms": _rounded(1e3 * verify_s),
        "ahead": round.is_ahead,
        "expected": round.expected,
    }
    _LOG.debug("%s", json.dumps(document))


def _rounded(value: float) -> float:
    return round(value, 3)


def _stats_of(drafter: Drafter, models: dict[str, DraftModelStats]) -> DraftModelStats:
    return models.setdefault(drafter.name, DraftModelStats(DraftCosts(*_UNKNOWN_COSTS)))
