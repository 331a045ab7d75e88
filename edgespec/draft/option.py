"""The speed that drafting from one source promises for the next pass, and passes that are run to learn.

While every pass has a draft of much the same length, nothing says what plain decoding would take; while none has
one, nothing says whether drafts have become cheap. A probe is a pass of the other kind, and what it loses is paid
from a share of the time. So are trials: drafts made to learn whether drafting from their source pays by now.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

from edgespec.decoding.scheduler import Proposal
from edgespec.decoding.tree import NO_DRAFT, Tree
from edgespec.draft.costs import PassCosts
from edgespec.draft.drafter import Drafter, DraftRequest
from edgespec.draft.limits import MIN_GAIN, TRIAL_SHARE
from edgespec.types import Sampler, TokenIds


class Promise(NamedTuple):
    """A source, a draft length, and the speed that they promise."""

    rate: float  # expected tokens a second, or in the time of a plain pass until that is known
    num_tokens: int = 0  # tokens to draft
    source: "DraftSource | None" = None  # None for plain decoding
    offer: Tree = NO_DRAFT  # what the source has drafted already
    timeout_s: float | None = None  # how long to wait for tokens that are nearly ready; None: as long as they take
    contention: float = 1.0  # how much longer the pass takes because the source works beside it
    min_gain: float = MIN_GAIN  # what it has to promise over plain decoding
    draft_s: float = 0.0  # seconds that its draft takes before the pass, where it is a probe
    hope: float = 0.0  # rate, if a pass took less by as much as is unsure of it
    is_ahead: bool = False  # the source drafts while the target verifies
    is_tree: bool = False  # to draft whatever nodes of a tree are worth it


class Drafted(NamedTuple):
    """A draft to verify, and all that its source guessed: of a draft that was cut, the whole."""

    draft: Tree
    guessed: tuple[Tree, ...]


NOTHING = Drafted(NO_DRAFT, ())


class DraftSource(Protocol):
    """A drafter in one answer, as a policy weighs it."""

    @property
    def drafter(self) -> Drafter: ...

    def weigh(self, tokens: TokenIds, request: DraftRequest, sampler: Sampler) -> Promise | None:
        """Weigh a draft in this round; None where the source has no guess."""

    def trial(self, option: Promise, best: Promise, tokens: TokenIds) -> Promise | None:
        """An option to take in place of the best one, to learn whether drafting from the source pays by now."""

    def hopeful(self, option: Promise) -> Promise | None:
        """The draft that may turn out best if passes take less than is believed; None without one."""

    def draft(self, option: Promise, tokens: TokenIds, request: DraftRequest, sampler: Sampler) -> Drafted:
        """The draft of an option that was chosen."""

    def observe(self, round: Proposal, emitted: TokenIds, verify_s: float) -> bool:
        """Learn from a round, whoever drafted in it; returns whether the source learned what the pass took too."""


@dataclass(slots=True)
class TrialBudget:
    """Saves a share of the time that passes, and spends all of it on one trial."""

    saved: float = 0.0

    def save(self, elapsed: float) -> None:
        self.saved += TRIAL_SHARE * elapsed

    def spend(self, cost: float) -> bool:
        """True if the budget allows a trial that is expected to lose so much time; the trial then uses it up."""
        if self.saved < cost:
            return False
        self.saved = 0.0
        return True


# A ratio that is surer than this (as a standard deviation of its log) needs no probe: one that is in use, and so
# in the gain that is reported, and another one.
_SURE_IN_USE, _SURE = 0.015, 0.03
# In steps of the target: what a probe costs at least, and what the first ones may.
_LEAST_LOSS, _FIRST_BUDGET = 0.05, 0.5
# An answer goes on for about as long as it has gone on; in one that ends sooner than this nothing is left to gain.
_LEAST_ROUNDS = 16
_LOOK_ROUNDS = 16  # between two looks for a draft of another length, 0.03 ms each


probe_budget = partial(TrialBudget, _FIRST_BUDGET)
"""Makes the budget for the probes of all answers of a session, in steps of the target."""


@dataclass(slots=True)
class Probes:
    """Chooses the probes of one answer."""

    costs: PassCosts
    budget: TrialBudget = field(default_factory=probe_budget)
    _num_rounds: int = 0

    def choose(self, plain: Promise, best: Promise, options: Sequence[Promise]) -> Promise | None:
        """An option to take in place of the best one; None where enough is known or time is short."""
        if self._num_rounds < _LEAST_ROUNDS or self.budget.saved < _LEAST_LOSS or best.is_ahead:
            return None
        if self.costs.step_s is None:
            return None
        if best.num_tokens and self.costs.spread(best.num_tokens + 1) > _SURE_IN_USE and self._spend(plain, best):
            return plain
        if self._num_rounds % _LOOK_ROUNDS:
            return None
        hopeful = (each.source.hopeful(each) for each in options if each.source)
        for option in hopeful:
            is_new = option is not None and option.num_tokens != best.num_tokens
            if option and is_new and option.hope > best.rate and self.costs.spread(option.num_tokens + 1) > _SURE:
                return option if self._spend(option, best) else None
        return None

    def observe_round(self) -> None:
        self._num_rounds += 1
        self.budget.save(1.0)

    def _spend(self, option: Promise, best: Promise) -> bool:
        taken_s = self.costs.pass_s(option.num_tokens + 1) + option.draft_s
        lost_s = taken_s * (1 - option.rate / best.rate)
        return self.budget.spend(max(lost_s / self.costs.pass_s(1), _LEAST_LOSS))
