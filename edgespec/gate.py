"""Who drafts next and how much: what yields the most expected tokens a second, nothing included."""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, NamedTuple

from edgespec import trees
from edgespec.chances import Chances, expected
from edgespec.clock import Clock
from edgespec.costs import DraftCosts, PassCosts
from edgespec.paid import TRIAL_SHARE, Paid, PaidSource, best_length
from edgespec.types import NOTHING, AheadDrafter, Ask, Draft, Drafter, Logits, Sampler, TokenIds

_rounds = logging.getLogger("edgespec.rounds")  # at DEBUG, a JSON document a round

LONGEST_DRAFT = 24
# The best of many estimates is mostly lucky where it promises less than this over plain decoding. On recorded
# answers the mean over categories stays (+0.001 and -0.002) and the worst gains 0.01 (docs/log.md).
_LEAST_GAIN = 1.06
# A trial of a source that must be run to learn: so many rounds to find its feet, and as many to be judged by.
_WARM_UP = 8
# Why a draft is empty.
NOBODY, SILENT = "nothing that could draft is left", "no source had a guess"
UNPROMISING = f"no guess promised {_LEAST_GAIN} times plain decoding"
ENDING = "the answer or the context ends here"
# What a draft takes, in steps for each token drafted and for each read, until it is measured.
_UNKNOWN = (0.25, 0.02)


class FixedGate:
    """The same number of tokens of the first source that has a guess, for reproducible runs and comparisons."""

    def __init__(self, drafters: Sequence[Drafter], num_tokens: int, *, with_distributions: bool = False) -> None:
        self._drafters = drafters
        self._num_tokens = num_tokens
        self._with_distributions = with_distributions
        self._num_rounds = 0
        self._started_s = 0.0

    def draft(self, tokens: TokenIds, room: int, sampler: Sampler) -> Draft:
        self._started_s = perf_counter()
        num_tokens = min(self._num_tokens, room)
        ask = Ask(
            num_tokens, with_distributions=self._with_distributions, ahead=True, least=num_tokens, hedged=True
        )
        if self._with_distributions:
            # One noise for all rounds, so that a token is the same whenever it was drafted. A position is judged
            # once, and how far a draft goes is fixed, so that what is drawn says nothing of what is decided.
            sampler = sampler.drafting(0)
        for drafter in self._drafters if ask.num_tokens > 0 else ():
            draft = drafter.draft(tokens, ask, sampler)
            if len(draft.tokens):
                return draft
        return NOTHING

    @property
    def reason(self) -> str:
        """Why the last draft was empty."""
        return SILENT if self._drafters and self._num_tokens else NOBODY

    def observe(self, tokens: TokenIds, draft: Draft, logits: Logits, emitted: TokenIds, verify_s: float) -> None:
        for drafter in self._drafters:
            drafter.learn(tokens, draft, logits)
        self._num_rounds += 1
        if _rounds.isEnabledFor(logging.DEBUG):
            draft_s = perf_counter() - self._started_s - verify_s if len(draft.tokens) else 0.0
            is_ahead = any(isinstance(each, AheadDrafter) and each.can_run_ahead for each in self._drafters)
            _log(self._num_rounds, draft, len(emitted) - 1, (draft_s, verify_s), is_ahead, {})

    def close(self) -> None:
        _rest(self._drafters)


class _Choice(NamedTuple):
    rate: float  # expected tokens a second
    num_tokens: int
    paid: Paid | None  # who is still to make the draft
    draft: Draft


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
    _paid: list[Paid] = field(init=False, default_factory=list)
    _offers: list[Draft] = field(init=False, default_factory=list)
    _seen: list[_Choice] = field(init=False, default_factory=list)
    _num_rounds: int = field(init=False, default=0)
    _wholes: dict[str, _Whole] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        for model in (drafter for drafter in self.drafters if not drafter.is_free):
            known = self.paid.setdefault(model.name, PaidSource(DraftCosts(*_UNKNOWN)))
            self._paid.append(Paid(model, known, self.costs, self.chances, self.longest, self.clock))

    def draft(self, tokens: TokenIds, room: int, sampler: Sampler) -> Draft:
        ask = Ask(min(self.longest, room), with_distributions=self.with_distributions)
        self._seen, self.costs.num_held = [], len(tokens)
        if ask.num_tokens < 1:
            self._offers = []
            return NOTHING
        if self.with_distributions:
            # What is drawn must say nothing of what is decided, in this round or, left over, in a later one.
            sampler = sampler.drafting(len(tokens))
        offers = (drafter.draft(tokens, ask, sampler) for drafter in self.drafters if drafter.is_free)
        self._offers = [offer for offer in offers if len(offer.tokens)]
        choices = [self._best_of(offer) for offer in self._offers]
        choices += [
            _Choice(*paid.weighed(tokens, ask, sampler, _LEAST_GAIN), paid, paid.offer) for paid in self._paid
        ]
        plain = _Choice(1.0 / self.costs.of(1), 0, None, NOTHING)
        best = max(choices, key=lambda choice: choice.rate, default=plain)
        is_ahead = best.paid is not None and best.paid.policy is not None
        if best.rate <= _LEAST_GAIN * plain.rate and not is_ahead:
            best = plain
        trial = self._or_trial(best, tokens, ask.num_tokens)
        best = trial if trial is not best else self._or_burst(best, choices)
        self._seen = [plain, *choices]
        if best.paid is None:
            return best.draft.cut(best.num_tokens)
        return best.paid.draft(best.rate, best.num_tokens, tokens, ask, sampler)

    @property
    def reason(self) -> str:
        """Why the last draft was empty."""
        if not self._seen:
            return ENDING
        if len(self._seen) == 1:
            return SILENT if self.drafters else NOBODY
        return UNPROMISING

    def observe(self, tokens: TokenIds, draft: Draft, logits: Logits, emitted: TokenIds, verify_s: float) -> None:
        self._num_rounds += 1
        if self._num_rounds > 1:  # the prompt is read in the first pass
            slowed = max((paid.slowed for paid in self._paid if paid.policy), default=1.0)
            self.costs.observe(len(draft.tokens) + 1, verify_s / slowed)
        for offer in self._offers:
            self._judge(offer, emitted)
            if offer.parents is not None:
                self._see_whole(offer, draft, emitted, verify_s)
        for paid in self._paid:
            self._judge(paid.observe(draft, len(emitted) - 1), emitted)
        for drafter in self.drafters:
            drafter.learn(tokens, draft, logits)
        if _rounds.isEnabledFor(logging.DEBUG):
            drafting = next((paid for paid in self._paid if paid.drafter.name == draft.source), None)
            is_ahead = drafting is not None and drafting.policy is not None
            taken_s = (drafting.draft_s if drafting else 0.0, verify_s)
            _log(self._num_rounds, draft, len(emitted) - 1, taken_s, is_ahead, self._expected())

    def close(self) -> None:
        _rest(self.drafters)

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
        rate, length = best_length(expected(chances), self.costs)
        return _Choice(rate, length, None, offer)

    def _yield(self, source: str) -> float:
        """Tokens that a pass over the source's trees gives of late, from the chance of one more."""
        return 1 / max(1 - self.chances.of(_runs(source), 0), 1 / self.longest)

    def _see_whole(self, offer: Draft, run: Draft, emitted: TokenIds, verify_s: float) -> None:
        whole = self._wholes.setdefault(offer.source, _Whole())
        if run.source != offer.source:
            whole.spare_s += TRIAL_SHARE * verify_s
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
        for paid in self._paid:
            if best.paid is not paid and (num_tokens := paid.trial(best.rate, tokens)):
                return _Choice(best.rate, min(num_tokens, room), paid, NOTHING)
        return best

    def _expected(self) -> dict[str, Any]:
        """What was expected of whom."""
        return {
            choice.paid.drafter.name if choice.paid else choice.draft.source: {
                "num_draft": choice.num_tokens,
                "tokens_per_second": round(choice.rate, 3),
            }
            for choice in self._seen
        }


def _log(
    number: int,
    draft: Draft,
    num_accepted: int,
    taken_s: tuple[float, float],
    is_ahead: bool,
    expected: Mapping[str, Any],
) -> None:
    """One JSON document a round: what was run, what came of it, and what was expected of whom."""
    document = {
        "round": number,
        "source": draft.source,
        "num_draft": len(draft.tokens),
        "num_accepted": num_accepted,
        "draft_ms": round(1e3 * taken_s[0], 3),
        "verify_ms": round(1e3 * taken_s[1], 3),
        "ahead": is_ahead,
        "expected": expected,
    }
    _rounds.debug("%s", json.dumps(document))


def _rest(drafters: Sequence[Drafter]) -> None:
    for drafter in drafters:
        if isinstance(drafter, AheadDrafter):
            drafter.rest()


def _runs(source: str) -> str:
    """The name under which whole rounds of a source are counted."""
    return f"{source}, run"
