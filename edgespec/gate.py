"""Who drafts next and how much: what yields the most expected tokens a second, nothing included."""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple

import numpy as np

from edgespec import trees
from edgespec.cache import reusable_prefix
from edgespec.chances import Chances, expected, position_class
from edgespec.clock import Clock
from edgespec.costs import DraftCosts, PassCosts
from edgespec.types import NOTHING, Ask, Draft, Drafter, Logits, Sampler, TokenIds, append

_rounds = logging.getLogger("edgespec.rounds")  # at DEBUG, a JSON document a round

LONGEST_DRAFT = 24
# The best of many estimates is mostly lucky where it promises less than this over plain decoding. On recorded
# answers the mean over categories stays (+0.001 and -0.002) and the worst gains 0.01 (docs/log.md).
_LEAST_GAIN = 1.06
# A draft made to learn whether its source has come to pay may in the long run take this share of the time.
_TRIAL_SHARE = 0.01
# A trial is never taken to cost less than this share of a step, or a source at break-even were tried always.
_LEAST_LOSS = 0.05
# What a draft takes, in steps for each token drafted and for each read, until it is measured.
_UNKNOWN = (0.25, 0.02)
# Of a model that somebody has chosen to draft, until it is known: tokens kept, of so many.
_HOPE = (4.0, 6.0)
# A trial of a source that must be run to learn: so many rounds to find its feet, and as many to be judged by.
_WARM_UP = 8


class FixedGate:
    """The same number of tokens of the first source that has a guess, for reproducible runs and comparisons."""

    def __init__(self, drafters: Sequence[Drafter], num_tokens: int, *, with_distributions: bool = False) -> None:
        self._drafters = drafters
        self._num_tokens = num_tokens
        self._with_distributions = with_distributions

    def draft(self, tokens: TokenIds, room: int, sampler: Sampler) -> Draft:
        ask = Ask(min(self._num_tokens, room), with_distributions=self._with_distributions)
        if self._with_distributions:
            sampler = sampler.apart(len(tokens))
        for drafter in self._drafters if ask.num_tokens > 0 else ():
            draft = drafter.draft(tokens, ask, sampler)
            if len(draft.tokens):
                return draft
        return NOTHING

    def observe(self, tokens: TokenIds, draft: Draft, logits: Logits, emitted: TokenIds, verify_s: float) -> None:
        for drafter in self._drafters:
            drafter.learn(tokens, draft, logits)


class _Choice(NamedTuple):
    rate: float  # expected tokens a second
    num_tokens: int
    drafter: Drafter | None  # of a draft that is still to be made
    draft: Draft


@dataclass(slots=True)
class PaidSource:
    """What is known of a source whose drafts take time, from answer to answer."""

    costs: DraftCosts
    read: TokenIds = field(default_factory=lambda: np.zeros(0, np.int32))  # what its cache holds
    spare: float = 0.0  # steps of the target set aside for trials
    trial: int = 0  # tokens of the trial that is going on
    draft_s: float = 0.0  # of its last draft

    def num_unread(self, tokens: TokenIds) -> int:
        return len(tokens) - reusable_prefix(self.read, tokens, 1)


@dataclass(slots=True)
class _Whole:
    """What is known of a source of trees: run whole or not at all, and only what is run teaches it."""

    num_run: int = 0
    trial_left: int = 0
    spare_s: float = 0.0  # for trials


@dataclass(slots=True)
class MeasuredGate:
    """E(k) / (seconds of a pass of k + 1 tokens and of the draft), over all sources and lengths k.

    E(k) = 1 + a₁ + a₁a₂ + … with the chance aᵢ that a token is kept, given its source and evidence (Leviathan et
    al., 2023, section 3.3, with measured costs and chances).

    Free sources guess in every round and are judged in every round, whether their guess was run or not, by what
    the target said, so they need no trial. A model is tried for a token as often as the time set aside for trials
    allows, and for one more as long as all are kept. What it must read of the text before it can draft is shared
    out over as many rounds as the answer has had, as one rents until renting has cost what buying costs. A tree
    counts as what its guesses promise, or as what a round of its source has yielded of late if that is more, for
    running it is what later guesses come from; its trial is a burst of rounds.

    paid: by name of the drafter.
    """

    drafters: Sequence[Drafter]
    costs: PassCosts
    chances: Chances
    paid: dict[str, PaidSource] = field(default_factory=dict)
    with_distributions: bool = False
    longest: int = LONGEST_DRAFT
    clock: Clock = perf_counter
    _models: list[tuple[Drafter, PaidSource]] = field(init=False, default_factory=list)
    _offers: list[Draft] = field(init=False, default_factory=list)
    _seen: list[_Choice] = field(init=False, default_factory=list)
    _num_rounds: int = field(init=False, default=0)
    _wholes: dict[str, _Whole] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        for model in (drafter for drafter in self.drafters if not drafter.is_free):
            known = self.paid.setdefault(model.name, PaidSource(DraftCosts(*_UNKNOWN)))
            self._models.append((model, known))
            self.chances.expect(model.name, _HOPE)

    def draft(self, tokens: TokenIds, room: int, sampler: Sampler) -> Draft:
        ask = Ask(min(self.longest, room), with_distributions=self.with_distributions)
        self._seen = []
        if ask.num_tokens < 1:
            self._offers = []
            return NOTHING
        if self.with_distributions:
            # What is drawn must say nothing of what is decided, in this round or, left over, in a later one.
            sampler = sampler.apart(len(tokens))
        offers = (drafter.draft(tokens, ask, sampler) for drafter in self.drafters if drafter.is_free)
        self._offers = [offer for offer in offers if len(offer.tokens)]
        choices = [self._best_of(offer) for offer in self._offers]
        choices += [self._best_paid(*model, tokens, ask.num_tokens) for model in self._models]
        plain = _Choice(1.0 / self.costs.of(1), 0, None, NOTHING)
        best = max(choices, key=lambda choice: choice.rate, default=plain)
        if best.rate <= _LEAST_GAIN * plain.rate:
            best = plain
        best = self._or_burst(self._or_trial(best, tokens, ask.num_tokens), choices)
        self._seen = [plain, *choices]
        if best.drafter is None:
            return best.draft.cut(best.num_tokens)
        return self._drafted(best, tokens, ask, sampler)

    def _drafted(self, choice: _Choice, tokens: TokenIds, ask: Ask, sampler: Sampler) -> Draft:
        assert choice.drafter is not None
        paid = self.paid[choice.drafter.name]
        # One more row and one more drafted token must be worth what they take at the present rate.
        step_s = self.costs.of(1)
        marginal_s = paid.costs.step * step_s + self.costs.of(3) - self.costs.of(2)
        started = self.clock()
        draft = choice.drafter.draft(
            tokens,
            Ask(choice.num_tokens, min(0.9, choice.rate * marginal_s), ask.with_distributions, ask.cancel),
            sampler,
        )
        paid.draft_s = self.clock() - started
        if len(draft.tokens):
            paid.costs.observe(len(draft.tokens), paid.num_unread(tokens), paid.draft_s / step_s)
            paid.read = append(tokens, draft.tokens[:-1])
        return draft

    def observe(self, tokens: TokenIds, draft: Draft, logits: Logits, emitted: TokenIds, verify_s: float) -> None:
        self._num_rounds += 1
        if self._num_rounds > 1:  # the prompt is read in the first pass
            self.costs.observe(len(draft.tokens) + 1, verify_s)
        for offer in self._offers:
            self._judge(offer, emitted)
            if offer.parents is not None:
                self._see_whole(offer, draft, emitted, verify_s)
        for model, paid in self._models:
            paid.spare += _TRIAL_SHARE
            if len(draft.tokens) and draft.source == model.name:
                self._judge(draft, emitted)
                # A trial goes on, and further, as long as it gains.
                paid.trial = paid.trial + 1 if paid.trial and len(emitted) > paid.trial else 0
        for drafter in self.drafters:
            drafter.learn(tokens, draft, logits)
        if _rounds.isEnabledFor(logging.DEBUG):
            self._log(draft, len(emitted) - 1, verify_s)

    def _judge(self, draft: Draft, emitted: TokenIds) -> None:
        """Count what is known of a draft, run or not: its tokens up to the first that the target did not say."""
        if draft.parents is not None:
            for node, is_kept in trees.judged(draft.tokens, draft.parents, emitted):
                self.chances.judge(draft.source, draft.evidence[node], is_kept)
            return
        for guess, evidence, said in zip(draft.tokens, draft.evidence, emitted, strict=False):
            self.chances.judge(draft.source, evidence, bool(guess == said))
            if guess != said:
                return

    def _best_of(self, offer: Draft) -> _Choice:
        chances = [self.chances.of(offer.source, evidence) for evidence in offer.evidence]
        if offer.parents is not None:
            total = max(trees.expected(offer.parents, chances), self._yield(offer.source))
            return _Choice(total / self.costs.of(len(chances) + 1), len(chances), None, offer)
        rate, length = self._best_length(expected(chances))
        return _Choice(rate, length, None, offer)

    def _best_paid(self, model: Drafter, paid: PaidSource, tokens: TokenIds, longest: int) -> _Choice:
        if self.costs.step_s is None:
            return _Choice(0.0, 0, model, NOTHING)
        chances = (self.chances.of(model.name, position_class(i)) for i in range(longest))
        debt = paid.costs.of(0, paid.num_unread(tokens)) / max(1, min(self._num_rounds, longest))
        rate, length = self._best_length(expected(chances), paid.costs.step, debt)
        return _Choice(rate, length, model, NOTHING)

    def _best_length(self, totals: Sequence[float], step: float = 0.0, debt: float = 0.0) -> tuple[float, int]:
        """Tokens a second, and the length that yields them; step and debt are what a draft takes, in steps."""
        step_s = self.costs.of(1)
        rates = [
            total / (self.costs.of(k + 1) + (k * step + (debt if k else 0.0)) * step_s)
            for k, total in enumerate(totals)
        ]
        length = max(range(len(rates)), key=rates.__getitem__)
        return rates[length], length

    def _yield(self, source: str) -> float:
        """Tokens that a pass over the source's trees gives of late, from the chance of one more."""
        return 1 / max(1 - self.chances.of(_runs(source), 0), 1 / self.longest)

    def _see_whole(self, offer: Draft, run: Draft, emitted: TokenIds, verify_s: float) -> None:
        whole = self._wholes.setdefault(offer.source, _Whole())
        if run.source != offer.source:
            whole.spare_s += _TRIAL_SHARE * verify_s
            return
        whole.num_run += 1
        if whole.num_run > _WARM_UP:
            for is_more in [True] * (len(emitted) - 1) + [False]:
                self.chances.judge(_runs(offer.source), 0, is_more)

    def _or_burst(self, best: _Choice, choices: Sequence[_Choice]) -> _Choice:
        """The best choice, or a tree whose source is on trial."""
        for choice in choices:
            if choice.draft.parents is None:
                continue
            whole = self._wholes.setdefault(choice.draft.source, _Whole())
            lost_s = self.costs.of(choice.num_tokens + 1) - self._yield(choice.draft.source) / best.rate
            if choice is not best and not whole.trial_left and whole.spare_s >= 2 * _WARM_UP * lost_s:
                whole.trial_left, whole.spare_s = 2 * _WARM_UP, 0.0
            if whole.trial_left:
                whole.trial_left -= 1
                return choice
        return best

    def _or_trial(self, best: _Choice, tokens: TokenIds, room: int) -> _Choice:
        """The best choice, or a token of a model for whose trial enough time has been set aside."""
        for model, paid in self._models:
            if best.drafter is model or self.costs.step_s is None:
                paid.trial = 0
                continue
            if not paid.trial:
                step_s = self.costs.of(1)
                total = 1 + self.chances.of(model.name, 0)
                lost = paid.costs.of(1, paid.num_unread(tokens)) + self.costs.ratio(2) - total / best.rate / step_s
                if paid.spare < max(lost, _LEAST_LOSS):
                    continue
                paid.spare, paid.trial = 0.0, 1
            return _Choice(best.rate, min(paid.trial, room), model, NOTHING)
        return best

    def _log(self, draft: Draft, num_accepted: int, verify_s: float) -> None:
        """One JSON document a round: what was expected of whom, what was run, and what came of it."""
        seen = {
            choice.drafter.name if choice.drafter else choice.draft.source: {
                "num_draft": choice.num_tokens,
                "tokens_per_second": round(choice.rate, 3),
            }
            for choice in self._seen
        }
        document = {
            "round": self._num_rounds,
            "source": draft.source,
            "num_draft": len(draft.tokens),
            "num_accepted": num_accepted,
            "draft_ms": round(1e3 * self.paid[draft.source].draft_s, 3) if draft.source in self.paid else 0.0,
            "verify_ms": round(1e3 * verify_s, 3),
            "expected": seen,
        }
        _rounds.debug("%s", json.dumps(document))


def _runs(source: str) -> str:
    """The name under which whole rounds of a source are counted."""
    return f"{source}, run"
