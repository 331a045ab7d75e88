"""What is known of a drafter model from answer to answer: what its steps cost, and what its cache holds."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

import numpy as np

from edgespec.decoding.cached_prefix import reusable_prefix
from edgespec.policy.draft_costs import DraftCosts, RowCosts, correction
from edgespec.policy.draft_trees import TreeGain
from edgespec.policy.limits import MAX_BRANCHES, MAX_CONTENTION, MAX_OTHERS, MIN_USED_TOKENS
from edgespec.policy.overlap import AheadPlan, time_beside
from edgespec.policy.trial_budget import TrialBudget
from edgespec.types import LaneStep, TokenIds, Tree, Worth

# Tokens accepted and judged that a model which a user has chosen starts with.
HOPE = (4.0, 6.0)
# The steps of a round count as this many in the running average: where one is late, the next is often early.
_STEPS_A_ROUND = 2
_BRANCHED_DECAY = 0.9
_COUPLED = 0.25
# A pass beside a drafter for less than this share says what a pass takes alone.
_LEAST_BESIDE = 0.25


# What branches are worth where nothing was measured: as much as one hopes for, and rows that cost nothing.
UNKNOWN_WORTH = Worth(
    (HOPE[0] / HOPE[1],),
    (1.0,) * MAX_BRANCHES,
    others=(HOPE[0] / HOPE[1],) * MAX_OTHERS,
    min_used=MIN_USED_TOKENS,
)


@dataclass(slots=True)
class DraftModelStats:
    """Costs are in steps of the target, a step being a pass of one token.

    contention: How much longer a pass and a draft step take while both run. It follows what is seen: of what a
        pass or a step takes more than expected, the share in which both ran is ascribed to contention, and the
        rest to the machine's speed.
    tokens_per_step: How many tokens a step of the drafter drafts at most, for one price.
    max_unread: The most tokens that it reads before a draft; None for all that it has not read.
    """

    costs: DraftCosts
    contention: tuple[float, float] = (1.0, 1.0)
    rows: RowCosts = field(default_factory=RowCosts)  # of a step that drafts on from several branches
    branched: float = 1.0  # how much longer a step takes that drafts on from all branches that are worth it
    read: TokenIds = field(default_factory=lambda: np.zeros(0, np.int32))  # tokens that its cache holds
    budget: TrialBudget = field(default_factory=TrialBudget)  # time for trials, in steps of the target
    tokens_per_step: int = 1
    max_unread: int | None = None
    tree_gain: TreeGain = field(default_factory=TreeGain)

    @property
    def token(self) -> float:
        """Cost of a token where all that a step drafts is wanted."""
        return self.costs.step / self.tokens_per_step

    def num_steps(self, num_tokens: int) -> int:
        """How many steps a draft of num_tokens tokens takes."""
        return -(-num_tokens // self.tokens_per_step)

    def steps_of(self, draft: Tree) -> float:
        """What the steps of a draft took, in steps of one row."""
        if not draft.steps:
            return self.num_steps(len(draft.tokens))
        if self.tokens_per_step > 1:  # which drafts chains
            return self.num_steps(len(draft.steps))
        return sum(map(self.rows.ratio, draft.steps))

    def step(self, plan: AheadPlan) -> float:
        """Cost of a token under a plan, while the target rests."""
        return self.token * (self.branched if plan.is_hedged else 1.0)

    def observe_steps(self, ended: Sequence[LaneStep], unfinished: LaneStep | None) -> None:
        """Correct the costs by steps of a lane, whose times are in steps of the target.

        Whether the step or its branches became dearer is known once both were seen: what slows every step slows
        those with branches too.

        Args:
            unfinished: The step that is being done; it takes at least what it has taken.
        """
        seen = list(ended)
        if unfinished is not None and unfinished.taken_s > self._expected(unfinished):
            seen.append(unfinished)
        for kind in {_kind(step) for step in seen}:
            self._observe_kind([step for step in seen if _kind(step) == kind])

    def _observe_kind(self, steps: Sequence[LaneStep]) -> None:
        surprise = sum(step.taken_s for step in steps) / sum(map(self._expected, steps))
        factor = correction(surprise, _STEPS_A_ROUND)
        num_rows = round(fmean(step.num_rows for step in steps))
        if num_rows > 1:
            factor = self.rows.observe(num_rows, factor)
            ratio = fmean(self.rows.ratio(step.num_rows) for step in steps)
            self.branched *= (ratio / self.branched) ** (1 - _BRANCHED_DECAY)
        else:
            self.rows.relax(max(factor, 1.0))
        verify, draft = self.contention
        alone, draft = split_surprise(factor, fmean(step.shared for step in steps), draft)
        self.costs.step *= alone
        self.contention = (verify, draft)

    def observe_pass(self, surprise: float, beside: float) -> float:
        """Learn from a pass that took surprise times what it takes alone, beside a drafter for a share of it.

        Returns:
            What of the surprise the machine's speed is to be blamed for.
        """
        verify, draft = self.contention
        if beside < _LEAST_BESIDE:
            return surprise * (1 - beside + beside / verify)
        # The contention that explains the pass; without any, a fast pass shows a fast machine.
        seen = beside / max(1 / surprise - (1 - beside), beside / MAX_CONTENTION)
        self.contention = (min(max(1.0, verify * correction(seen / verify)), MAX_CONTENTION), draft)
        return surprise if verify == 1 and surprise < 1 else 1.0

    def _expected(self, step: LaneStep) -> float:
        """Cost of a step, in part beside the target."""
        return time_beside(self.token * self.rows.ratio(step.num_rows), self.contention[1], step.shared)

    def num_unread(self, tokens: TokenIds) -> int:
        num_unread = len(tokens) - reusable_prefix(self.read, tokens, 1)
        return num_unread if self.max_unread is None else min(num_unread, self.max_unread)


def _kind(step: LaneStep) -> tuple[bool, bool]:
    return step.num_rows > 1, step.shared > 1 / 2


def split_surprise(factor: float, beside: float, contention: float) -> tuple[float, float]:
    """Correct the time of work alone, and that of work beside the other lane, by the shares of it that were seen.

    Each is known from what was seen of it. Of what was seen of the other it takes a share, for some of it is the
    machine's speed.

    Args:
        factor: The correction of what was expected.
        beside: The share of the work that was done beside the other lane.

    Returns:
        The factor on the time alone, and the new contention, at least 1.
    """
    alone = factor ** (1 - beside + _COUPLED * beside)
    together = factor ** (beside + _COUPLED * (1 - beside))
    ratio = contention * together / alone
    return alone * min(1.0, ratio), min(max(1.0, ratio), MAX_CONTENTION)
