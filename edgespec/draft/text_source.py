"""Drafters that draft from the text of an answer: by the names that users give them, and as a policy weighs them.

Where an answer has to match a grammar: the tokens that must follow, and drafts cut to what may.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from math import exp, hypot
from pkgutil import resolve_name

from edgespec.config.drafter_names import MAX_DRAFT_TOKENS, TEXT
from edgespec.decoding.scheduler import Proposal
from edgespec.decoding.tree import NO_DRAFT, Tree
from edgespec.draft.acceptance_rates import AcceptanceRates, runs_of
from edgespec.draft.costs import PassCosts
from edgespec.draft.drafter import Drafter, DraftRequest
from edgespec.draft.limits import CAUTION
from edgespec.draft.lookahead import Lookahead, Window
from edgespec.draft.option import (
    Drafted,
    Promise,
    TrialBudget,
    best_chain,
    expected_of_tree,
    expected_tokens,
    most_hopeful,
)
from edgespec.types import Logits, Sampler, TokenConstraint, TokenIds

# Rounds in which a source of trees fills its tables, and as many by which it is judged.
_WARM_UP = 8


@dataclass(slots=True)
class TextSource:
    """A free drafter in one answer.

    Its chains are judged whether they were verified or not, so they need no trial. A tree is verified whole or not
    at all, and only what is verified teaches its drafter; so a tree counts as what its guesses promise, or as what
    a round of its source has yielded lately if that is more, and its trial is a burst of rounds.
    """

    drafter: Drafter
    costs: PassCosts
    rates: AcceptanceRates
    _budget: TrialBudget = field(init=False, default_factory=TrialBudget)
    _num_run: int = field(init=False, default=0)  # rounds of trees that were verified
    _trial_left: int = field(init=False, default=0)  # rounds of the burst

    def weigh(self, tokens: TokenIds, request: DraftRequest, sampler: Sampler) -> Promise | None:
        offer = self.drafter.draft(tokens, request, sampler)
        if not len(offer.tokens):
            return None
        if offer.parents is None:
            rates = self._rates(offer)
            pass_times_s = self.costs.pass_times_s(len(rates) + 1)
            rate, length = best_chain(rates, pass_times_s)
            min_gain = self._min_gain(offer, rate * pass_times_s[length], length) if length else 1.0
            return Promise(rate, length, self, offer, min_gain=min_gain)
        rates = self._rates(offer)
        total = max(expected_of_tree(offer.parents, rates), self._recent_yield(offer))
        return Promise(total / self.costs.pass_s(len(rates) + 1), len(rates), self, offer)

    def _min_gain(self, offer: Tree, expected: float, length: int) -> float:
        """The gain that a draft with so many expected tokens has to promise; the less sure it is, the larger.

        What is unsure is what its pass takes, and the chance of its first token, on which all others rest.
        """
        first = self.rates.rate(offer.source, offer.buckets[0])
        unsure = (1 - 1 / expected) * self.rates.spread(offer.source, offer.buckets[0]) / first
        return exp(CAUTION * hypot(unsure, self.costs.spread(length + 1)))

    def _rates(self, offer: Tree) -> list[float]:
        return self.rates.rates(offer.source, offer.buckets)

    def hopeful(self, option: Promise) -> Promise | None:
        """The draft that would be best if each ratio were as low as is still likely."""
        if option.offer.parents is not None:
            return None
        totals = expected_tokens(self._rates(option.offer))
        pass_times_s = self.costs.pass_times_s(len(totals))
        hope, length = most_hopeful(totals, pass_times_s, self.costs.spread)
        return option._replace(rate=totals[length] / pass_times_s[length], num_tokens=length, hope=hope)

    def trial(self, option: Promise, best: Promise, tokens: TokenIds) -> Promise | None:
        """The option of a tree while its source is on trial."""
        if option.offer.parents is None:
            return None
        lost_s = self.costs.pass_s(option.num_tokens + 1) - self._recent_yield(option.offer) / best.rate
        if option is not best and not self._trial_left and self._budget.spend(2 * _WARM_UP * lost_s):
            self._trial_left = 2 * _WARM_UP
        if not self._trial_left:
            return None
        self._trial_left -= 1
        return option

    def draft(self, option: Promise, tokens: TokenIds, request: DraftRequest, sampler: Sampler) -> Drafted:
        return Drafted(option.offer.cut(option.num_tokens), (option.offer,))

    def observe(self, round: Proposal, emitted: TokenIds, verify_s: float) -> bool:
        name = self.drafter.name
        if not [offer for offer in round.offers if offer.parents is not None and offer.source == name]:
            return False
        if round.draft.source != name:
            self._budget.save(verify_s)
            return False
        self._num_run += 1
        if self._num_run > _WARM_UP:
            for is_more in [True] * (len(emitted) - 1) + [False]:
                self.rates.observe(runs_of(name), max(round.draft.buckets), is_more)
        return False

    def _recent_yield(self, tree: Tree) -> float:
        """Tokens that a pass over such a tree has given lately, from the chance of one more."""
        rate = self.rates.rate(runs_of(self.drafter.name), max(tree.buckets))
        return 1 / max(1 - rate, 1 / MAX_DRAFT_TOKENS)


def make_text_drafters(
    names: Collection[str], window: Window | None = None, cached: Collection[Drafter] = ()
) -> list[Drafter]:
    """New drafters for one answer, whose text they hold; and those with these names that all answers share.

    window: Of lookahead, where it is among the names.
    """
    wanted = {*names, "suffix"} if "auto" in names else names
    drafters: list[Drafter] = [resolve_name(made_by)() for name, made_by in TEXT.items() if name in wanted]
    if window is not None and "lookahead" in names:
        drafters.append(Lookahead(window))
    return [*drafters, *(each for each in cached if each.name in names)]


class ForcedDrafter(Drafter):
    """Drafts the tokens that follow whatever the model says, such as the keys of a JSON object."""

    name = "grammar"

    def __init__(self, constraint: TokenConstraint, num_prompt: int) -> None:
        """num_prompt: Tokens of every text that are the prompt."""
        self._constraint, self._num_prompt = constraint, num_prompt

    def draft(self, tokens: TokenIds, request: DraftRequest, sampler: Sampler) -> Tree:
        forced = self._constraint.forced(tokens[self._num_prompt :], request.num_tokens)
        return Tree(forced, (0,) * len(forced), source=self.name) if len(forced) else NO_DRAFT


class ConstrainedDrafter(Drafter):
    """A drafter from the text whose chains are cut before the first token that may not follow.

    Trees stay whole, as their drafter learns from all of their rows. Drafter models need no cut: they draft by the
    rule that the target chooses by.
    """

    def __init__(self, drafter: Drafter, constraint: TokenConstraint, num_prompt: int) -> None:
        self._drafter, self._constraint, self._num_prompt = drafter, constraint, num_prompt

    @property
    def name(self) -> str:
        return self._drafter.name

    def draft(self, tokens: TokenIds, request: DraftRequest, sampler: Sampler) -> Tree:
        draft = self._drafter.draft(tokens, request, sampler)
        if draft.parents is not None or not len(draft.tokens):
            return draft
        num_allowed = self._constraint.num_allowed(tokens[self._num_prompt :], draft.tokens)
        return draft.cut(num_allowed) if num_allowed else NO_DRAFT

    def learn(self, tokens: TokenIds, draft: Tree, logits: Logits) -> None:
        self._drafter.learn(tokens, draft, logits)


def constrained(drafters: Sequence[Drafter], constraint: TokenConstraint, num_prompt: int) -> list[Drafter]:
    """The drafters of one answer under a constraint; none where none are given, so that decoding stays plain."""
    if not drafters:
        return []
    cut = [ConstrainedDrafter(each, constraint, num_prompt) if each.can.is_free else each for each in drafters]
    return [ForcedDrafter(constraint, num_prompt), *cut]
