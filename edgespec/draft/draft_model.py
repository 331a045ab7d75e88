"""A drafter model from answer to answer: what its steps cost, and what its cache holds.

Costs are in steps of the target, so that a change of the machine's speed cancels, and are corrected by what is
seen of them. Drafts are trees where rows are cheap, by what trees have gained over chains.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from edgespec.decoding.tree import Tree, Worth
from edgespec.draft.costs import PassCosts
from edgespec.draft.drafter import LaneStep
from edgespec.draft.limits import MAX_BRANCHES, MAX_CONTENTION, MAX_OTHERS, MIN_USED_TOKENS
from edgespec.draft.option import TrialBudget
from edgespec.draft.overlap import AheadPlan, time_beside
from edgespec.draft.read_text import ReadText

# Where a row takes more of a step than this, trees gain nothing (docs/log/draft-policy.md).
_MAX_ROW = 0.05
_WIDTHS = (2, 8)
_NEWEST = 0.05  # the share of a draft in the running sums
_MAX_WEIGHING = 0.25  # of a step: a round that took more of it was disturbed


def may_pay(ratios: Mapping[int, float]) -> bool:
    """True if rows are so cheap that trees may pay, by the times of passes over that of one token."""
    costs = PassCosts(dict(ratios))
    low, high = _WIDTHS
    return max(ratios, default=1) >= high and (costs.ratio(high) - costs.ratio(low)) / (high - low) <= _MAX_ROW


@dataclass(slots=True)
class TreeGain:
    """The lately promised gain of trees, over the best chain by mean acceptance rates in equal time.

    It is about 1 at first. A row's time is worth what trees yield in it, not what chains do.
    """

    tokens: float = 2.0
    tokens_of_chains: float = 2.0

    @property
    def ratio(self) -> float:
        return max(1.0, self.tokens / self.tokens_of_chains)

    def observe(self, tokens: float, tokens_of_chains: float) -> None:
        self.tokens += _NEWEST * (tokens - self.tokens)
        self.tokens_of_chains += _NEWEST * (tokens_of_chains - self.tokens_of_chains)


# A draft that took this many times what was expected was disturbed, by another program or a growing cache.
_DISTURBED = 2.0
_DECAY = 0.85


@dataclass(slots=True)
class DraftCosts:
    """Costs of a model's draft in steps of its target, so that a change of the machine's speed cancels."""

    step: float  # of each token that is drafted
    row: float  # of each token of the text that the model has not read yet

    def steps(self, num_tokens: float, num_unread: int) -> float:
        # The last token of the text is read by the step that drafts the first.
        return num_tokens * self.step + max(0, num_unread - 1) * self.row

    def observe(self, num_tokens: float, num_unread: int, taken: float) -> None:
        """Correct the costs by those of one draft, each by its share of what was expected."""
        expected = self.steps(num_tokens, num_unread)
        drafting = num_tokens * self.step / expected
        self.step *= correction(taken / expected) ** drafting
        self.row *= correction(taken / expected) ** (1 - drafting)


@dataclass(slots=True)
class RowCosts:
    """Time of a drafter's step by its rows, relative to a step of one row.

    measured: What was measured at first, by rows, 1 among them; use can only show that rows cost more than that.
    """

    measured: Mapping[int, float] = field(default_factory=lambda: {1: 1.0})
    _excess: dict[int, float] = field(init=False, default_factory=dict)  # by row class, over what was measured
    _costs: PassCosts = field(init=False)  # what was measured, for any number of rows

    def __post_init__(self) -> None:
        self._costs = PassCosts(dict(self.measured))

    def ratio(self, num_rows: int) -> float:
        return self._costs.ratio(num_rows) * self._known_excess(num_rows) if num_rows > 1 else 1.0

    def observe(self, num_rows: int, factor: float) -> float:
        """Correct the cost of a step of num_rows by a factor; returns the part of it that rows do not explain."""
        self._excess.setdefault(_row_class(num_rows), self._known_excess(num_rows))
        raised = self._excess[_row_class(num_rows)] * factor
        self._excess[_row_class(num_rows)] = max(1.0, raised)
        return min(1.0, raised)

    def relax(self, factor: float) -> None:
        """Take back a factor that was ascribed to rows, as steps of one row turned out to cost it too."""
        for rows in self._excess:
            self._excess[rows] = max(1.0, self._excess[rows] / factor)

    def _known_excess(self, num_rows: int) -> float:
        """The cost of a step of num_rows relative to what was measured, by the nearest number of rows observed."""
        if not self._excess:
            return 1.0
        rows = _row_class(num_rows)
        return self._excess[min(self._excess, key=lambda known: abs(known - rows))]


def _row_class(num_rows: int) -> int:
    """The class of a number of rows, by the next power of two: what was learned of one counts for all of it."""
    return int(num_rows - 1).bit_length()


def correction(surprise: float, count: int = 1) -> float:
    """The factor on an expected time after count samples took surprise times as long on average."""
    weight = 1 - _DECAY**count
    factor: float = min(max(surprise, 1 / _DISTURBED), _DISTURBED) ** weight
    return factor


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
    (HOPE[0] / HOPE[1],), (1.0,) * MAX_BRANCHES, others=(HOPE[0] / HOPE[1],) * MAX_OTHERS, min_used=MIN_USED_TOKENS
)


@dataclass(slots=True)
class DraftModelStats:
    """Costs are in steps of the target, a step being a pass of one token.

    contention: How much longer a pass and a draft step take while both run. It follows what is seen: of what a
        pass or a step takes more than expected, the share in which both ran is ascribed to contention, and the
        rest to the machine's speed.
    tokens_per_step: How many tokens a step of the drafter drafts at most, for one price.
    text: What it has read.
    """

    costs: DraftCosts
    contention: tuple[float, float] = (1.0, 1.0)
    rows: RowCosts = field(default_factory=RowCosts)  # of a step that drafts on from several branches
    branched: float = 1.0  # how much longer a step takes that drafts on from all branches that are worth it
    text: ReadText = field(default_factory=ReadText)
    budget: TrialBudget = field(default_factory=TrialBudget)  # time for trials, in steps of the target
    num_vain: int = 0  # trials since a draft of it last paid
    num_idle: int = 0  # rounds since then
    weighing: float = 0.0  # what a round takes in which it is weighed, in steps of the target
    tokens_per_step: int = 1
    tree_gain: TreeGain = field(default_factory=TreeGain)

    @property
    def token(self) -> float:
        """Cost of a token where all that a step drafts is wanted."""
        return self.costs.step / self.tokens_per_step

    def observe_weighing(self, taken: float) -> None:
        self.weighing += _NEWEST * (min(taken, _MAX_WEIGHING) - self.weighing)

    def num_steps(self, num_tokens: int) -> int:
        """How many steps a draft of num_tokens tokens takes."""
        return -(-num_tokens // self.tokens_per_step)

    def steps_of(self, draft: Tree) -> float:
        """The cost of the steps of a draft, in steps of one row."""
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

        Returns what of the surprise is due to the machine's speed.
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
