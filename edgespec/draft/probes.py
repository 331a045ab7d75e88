"""Probes: passes that are run to learn how long passes take, where the other passes of an answer do not show it.

While every pass has a draft of much the same length, nothing says what plain decoding would take; while none has
one, nothing says whether drafts have become cheap. A probe is a pass of the other kind, and what it loses is paid
from a share of the time. So are trials: drafts made to learn whether drafting from their source pays by now.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from edgespec.draft.costs import PassCosts
from edgespec.draft.limits import TRIAL_SHARE
from edgespec.draft.option import Promise


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


def probe_budget() -> TrialBudget:
    """The budget for the probes of all answers of a session, in steps of the target."""
    return TrialBudget(_FIRST_BUDGET)


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
