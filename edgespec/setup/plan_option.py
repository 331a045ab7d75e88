"""What a plan compares: placements with what is known of their costs, and schedules on them. Pure.

A case is a layout with what its models cost and need, from which options are made.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from edgespec.draft.draft_model import RowCosts
from edgespec.draft.hedging import typical_branching
from edgespec.draft.limits import MAX_BRANCHES, MAX_PLANNED_TOKENS
from edgespec.draft.overlap import Ratio
from edgespec.manifest import Manifest
from edgespec.memory.estimate import context_lengths, sum_bytes
from edgespec.memory.ladder import Bytes
from edgespec.setup.profile import DrafterProfile, Place, Profile, drafter_key
from edgespec.system.units import format_bytes

Schedule = Literal["serial", "pipelined", "hedged"]
ScheduleChoice = Literal["auto", "serial", "pipelined", "hedged"]
AnySchedule = Schedule | Literal["plain"]
SCHEDULES: tuple[AnySchedule, ...] = ("plain", "serial", "pipelined", "hedged")  # simple ones first


class Layout(NamedTuple):
    """A placement and its costs.

    drafter: The name of its manifest.
    is_measured: False where the costs are estimated from a model's size and a probe of its device.
    """

    target: Place
    profile: Profile
    drafter: str | None = None
    drafter_place: Place | None = None
    is_measured: bool = True


class MemoryNeeds(NamedTuple):
    """The memory that models need, and that is free.

    needed: Bytes by place that a model takes at a context length on a device.
    free_bytes: Bytes by place; a place that is missing is not bounded.
    """

    needed: Callable[[Manifest, int, str], Bytes]
    free_bytes: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedOption:
    """A schedule on a placement, and its expected speed.

    draft_length: The most tokens that are verified at a time. wait: Drafted tokens that the target waits for
    after a miss. context_length: The longest context that fits the memory; 0 if none does, or the models cannot
    run the schedule. memory_bytes: What all its models take at that context, or at the shortest one if none
    fits. is_measured: Whether its speed rests on measurements of the models there. obstacle: Why it may not be
    chosen, though it could run. reason: Why it was chosen or refused.
    """

    schedule: AnySchedule
    target: Place
    drafter: str | None = None
    drafter_place: Place | None = None
    draft_length: int = 0
    wait: int = 0
    tokens_per_second: float
    context_length: int
    memory_bytes: int = 0
    is_measured: bool = True
    obstacle: str = ""
    reason: str = ""

    @property
    def can_be_chosen(self) -> bool:
        return self.context_length > 0 and not self.obstacle


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The chosen option, and the others."""

    chosen: PlannedOption
    refused: tuple[PlannedOption, ...]
    drafters: tuple[str, ...]  # names in order of use; those that draft from the text cost nothing and come last
    downgrades: tuple[str, ...]  # what does not fit the memory
    plain_tokens_per_second: float

    @property
    def options(self) -> tuple[PlannedOption, ...]:
        return (self.chosen, *self.refused)


# A drafter is not worth a context shorter than this, if the model has a longer one.
_MIN_CONTEXT = 4096
_TYPICAL_CONTEXT = 256  # tokens before a pass while an answer is written


class _Fit(NamedTuple):
    """The longest context that fits the memory, 0 if none; what it takes; what a longer one lacks."""

    context_length: int
    memory_bytes: int
    shortage: str


class Case(NamedTuple):
    """A layout of a target and perhaps a drafter, with a step of the target as the unit of time."""

    layout: Layout
    target: Manifest
    step_s: float
    ratio: Ratio
    fit: _Fit
    no_branches: str  # why the drafter cannot draft several branches in a pass, if it cannot
    tokens_per_pass: int = 1  # that the drafter drafts
    longest: int = MAX_PLANNED_TOKENS  # tokens of a draft that the drafter can give

    @property
    def drafter(self) -> DrafterProfile:
        layout = self.layout
        assert layout.drafter is not None
        assert layout.drafter_place is not None
        known = layout.profile.drafters[drafter_key(layout.drafter, layout.drafter_place)]
        return replace(known, branches={1: 1.0, 2: 2.0}) if self.no_branches else known

    @property
    def step(self) -> float:
        """A drafted token, in steps of the target; where a pass drafts several, its share of the pass."""
        return self.drafter.step_s / self.step_s / self.tokens_per_pass


def make_case(layout: Layout, target: Manifest, drafter: Manifest | None, memory: MemoryNeeds) -> Case:
    """The case of a layout, from measurements and the memory that is free."""
    step_s = layout.profile.pass_s(1, _TYPICAL_CONTEXT)
    models = [(target, layout.target.device)]
    if drafter is not None and layout.drafter_place is not None:
        models.append((drafter, layout.drafter_place.device))
    return Case(
        layout,
        target,
        step_s,
        lambda num_draft: layout.profile.pass_s(num_draft + 1, _TYPICAL_CONTEXT) / step_s,
        _fitting(models, memory),
        _no_branches(target, drafter) if drafter else "",
        drafter.tokens_per_pass if drafter else 1,
        _longest(drafter),
    )


def _longest(drafter: Manifest | None) -> int:
    most = drafter.most_draft_tokens if drafter else None
    return min(MAX_PLANNED_TOKENS, most or MAX_PLANNED_TOKENS)


def _no_branches(target: Manifest, drafter: Manifest) -> str:
    if drafter.tree_graph is None:
        return f"{drafter.name} has no graph for several branches in a pass"
    if drafter.vocab_sha256 != target.vocab_sha256:
        return f"{drafter.name} has another vocabulary, and a translated drafter drafts one branch only"
    return ""


def _fitting(models: Sequence[tuple[Manifest, str]], memory: MemoryNeeds) -> _Fit:
    """The longest context of the first model that fits the memory, as load() would choose it."""

    def needed(context: int) -> Bytes:
        return sum_bytes(memory.needed(each, min(context, each.context_length), device) for each, device in models)

    def lacks(context: int) -> str:
        return shortage(needed(context), memory.free_bytes, context)

    whole = models[0][0].context_length
    least = min(whole, _MIN_CONTEXT if len(models) > 1 else 0)
    lengths = [length for length in context_lengths(models[0][0]) if length >= least]
    num_fitting = bisect_left(lengths, True, key=lambda context: bool(lacks(context)))
    shortage_of_next = lacks(lengths[num_fitting]) if num_fitting < len(lengths) else ""
    longest = lengths[max(0, num_fitting - 1)]
    return _Fit(longest if num_fitting else 0, sum(needed(longest).values()), shortage_of_next)


def shortage(needed: Bytes, free_bytes: Mapping[str, int], context: int) -> str:
    """Which memory a context needs more of than is free; empty if it fits."""
    for place, wanted in needed.items():
        free = free_bytes.get(place, wanted)
        if wanted > free:
            step = 10**7 if wanted >= 10**9 else 10**6  # of the figures, which have to differ
            needs = format_bytes(-(-wanted // step) * step, 2)
            left = format_bytes(max(0, int(free)) // step * step, 2)
            return f"a context of {context} tokens needs {needs} of {place} memory, and {left} are free"
    return ""


class BranchingCost(NamedTuple):
    """The cost of drafting on from other outcomes, and the share of misses that it covers.

    step: How much longer a step takes that has all branches that are worth it; earlier tokens lie in its cache.
    coverage: The share of misses whose outcome is among them.
    """

    step: float
    coverage: float


def branching_cost(drafter: DrafterProfile) -> BranchingCost:
    """The measured cost of drafting on from several branches."""
    costs = RowCosts(drafter.branches)
    num_rows, coverage = typical_branching([costs.ratio(num_rows) for num_rows in range(1, MAX_BRANCHES + 1)])
    return BranchingCost(costs.ratio(num_rows), coverage)
