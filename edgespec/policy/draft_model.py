"""What is known of a drafter model from answer to answer: what its steps cost, and what its cache holds."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

import numpy as np

from edgespec.decoding.cached_prefix import reusable_prefix
from edgespec.policy.costs import DraftCosts, correction
from edgespec.policy.overlap import AheadPlan
from edgespec.policy.trial_budget import TrialBudget
from edgespec.types import TokenIds

# Tokens accepted and judged that a model which a user has chosen starts with.
HOPE = (4.0, 6.0)
MAX_PREFETCHED = 8  # tokens behind each alternative
# The steps of a round count as this many in the running average: where one is late, the next is often early.
_STEPS_A_ROUND = 2


def alternatives_key(drafter: str) -> str:
    """The source under which prefetched alternatives are counted; part of the file format of learned stats."""
    return f"{drafter}, prepared"


@dataclass(slots=True)
class DraftModelStats:
    """Costs are in steps of the target, a step being a pass of one token."""

    costs: DraftCosts
    contention: tuple[float, float] = (1.0, 1.0)  # how much longer a pass and a draft step take while both run
    branched: float = 1.0  # how much longer a step takes that drafts on from all alternatives
    read: TokenIds = field(default_factory=lambda: np.zeros(0, np.int32))  # tokens that its cache holds
    budget: TrialBudget = field(default_factory=TrialBudget)  # time for trials, in steps of the target
    _min_branched: float = field(init=False)

    def __post_init__(self) -> None:
        self._min_branched = self.branched

    def step(self, plan: AheadPlan) -> float:
        """Cost of a draft step under a plan, while the target rests."""
        return self.costs.step * (self.branched if plan.is_hedged else 1.0)

    def observe_steps(self, ended: Sequence[float], unfinished: float, *, is_branched: bool) -> None:
        """Correct the costs by steps that were done while the target verified.

        Whether the step or its branches became dearer is known once both were seen: what slows every step slows
        those with branches too.

        Args:
            ended: Costs of steps that have ended.
            unfinished: Cost so far of the step that is being done.
        """
        expected = self.costs.step * self.contention[1] * (self.branched if is_branched else 1.0)
        # An unfinished step takes at least what it has taken.
        seen = [*ended, unfinished] if unfinished > expected else ended
        if not seen:
            return
        factor = correction(fmean(seen) / expected, _STEPS_A_ROUND)
        if is_branched:
            ratio = self.branched * factor
            self.branched = max(ratio, self._min_branched)
            self.costs.step *= ratio / self.branched
        else:
            self.costs.step *= factor
            self.branched = max(self.branched / max(factor, 1.0), self._min_branched)

    def num_unread(self, tokens: TokenIds) -> int:
        return len(tokens) - reusable_prefix(self.read, tokens, 1)
