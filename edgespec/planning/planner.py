"""Where target and drafter run and in which schedule: from models, measured placements and memory to a plan.

Pure. Every decision compares expected tokens a second, by the closed forms of policy.overlap with measured
costs. No device is known by its name, and no schedule is chosen or refused for its kind.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Literal, NamedTuple

from edgespec.drafters.branches import typical_branching
from edgespec.errors import MemoryExhausted
from edgespec.manifest import Manifest
from edgespec.memory.estimate import context_lengths, sum_bytes
from edgespec.memory.ladder import Bytes
from edgespec.policy.acceptance_rates import AcceptanceRates, Key, position_bucket
from edgespec.policy.costs import RowCosts
from edgespec.policy.draft_model import HOPE, alternatives_key
from edgespec.policy.limits import MAX_BRANCHES, MAX_PLANNED_TOKENS, MIN_GAIN_OF_SCHEDULE
from edgespec.policy.overlap import AheadPlan, Ratio, best_pipelined, best_serial, serial_rate
from edgespec.profiling.profile import DrafterProfile, Place, Profile, drafter_key

Schedule = Literal["serial", "pipelined", "hedged"]
AnySchedule = Schedule | Literal["plain"]
SCHEDULES: tuple[AnySchedule, ...] = ("plain", "serial", "pipelined", "hedged")  # simple ones first
# A drafter is not worth a context shorter than this, if the model has a longer one.
_MIN_CONTEXT = 4096
_TYPICAL_CONTEXT = 256  # tokens before a pass while an answer is written


class Layout(NamedTuple):
    """A placement that was measured. drafter: the name of its manifest."""

    target: Place
    profile: Profile
    drafter: str | None = None
    drafter_place: Place | None = None


class MemoryNeeds(NamedTuple):
    """What models need, and what is free.

    needed: Bytes by place that a model takes at a context length on a device.
    free_bytes: Bytes by place; a place that is missing is not bounded.
    """

    needed: Callable[[Manifest, int, str], Bytes]
    free_bytes: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A schedule on a placement, and its expected speed.

    draft_length: The most tokens that are verified at a time. wait: Drafted tokens that the target waits for
    after a miss. context_length: The longest context that fits the memory; 0 if none does, or the models cannot
    run the schedule. memory_bytes: What all its models take at that context, or at the shortest one if none
    fits. reason: Why it was chosen or refused.
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
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The chosen option, and the others."""

    chosen: Option
    refused: tuple[Option, ...]
    drafters: tuple[str, ...]  # names in order of use; those that draft from the text cost nothing and come last
    downgrades: tuple[str, ...]  # what does not fit the memory
    plain_tokens_per_second: float


class _Fit(NamedTuple):
    """The longest context that fits the memory, 0 if none; what it takes; what a longer one lacks."""

    context_length: int
    memory_bytes: int
    shortage: str


class _Case(NamedTuple):
    """A layout, with a step of its target as the unit of time."""

    layout: Layout
    step_s: float
    ratio: Ratio
    fit: _Fit
    no_branches: str  # why the drafter cannot draft several branches in a pass, if it cannot

    @property
    def drafter(self) -> DrafterProfile:
        _, profile, drafter, place = self.layout
        assert drafter is not None
        assert place is not None
        known = profile.drafters[drafter_key(drafter, place)]
        return replace(known, branches={1: 1.0, 2: 2.0}) if self.no_branches else known

    @property
    def step(self) -> float:
        return self.drafter.step_s / self.step_s


def make_plan(
    target: Manifest,
    drafters: Mapping[str, Manifest],
    layouts: Sequence[Layout],
    past: Mapping[Key, tuple[float, float]],
    memory: MemoryNeeds,
    text_drafters: Sequence[str] = ("suffix",),
) -> Plan:
    """The best schedule on the best placement, and the others with the reasons against them.

    Args:
        drafters: Draft models by name.
        layouts: At least one.
        past: Acceptance counts, as acceptance_rates.AcceptanceRates holds them.
        text_drafters: Names of drafters that draft from the text under every schedule.

    Raises MemoryExhausted: The target does not fit, with or without a drafter.
    """
    found: list[tuple[_Case, Option]] = []
    for layout in layouts:
        alone = _case(layout, target, None, memory)
        found.append((alone, _option(alone, "plain", AheadPlan(1.0, 0, 0))))
        if layout.drafter is not None:
            case = _case(layout, target, drafters[layout.drafter], memory)
            found += [(case, option) for option in _draft_options(case, draft_rates(past, layout.drafter))]
    possible = [option for _, option in found if option.context_length]
    if not possible:
        raise MemoryExhausted(f"{target.name} does not fit: {found[0][0].fit.shortage}; use a smaller model")
    chosen = _best(possible)
    plain = max(option.tokens_per_second for option in possible if option.schedule == "plain")
    # Plain decoding in one place is an option of several layouts, of which the first counts.
    others = {
        _identity(option): replace(option, reason=_argument_against(case, option, chosen))
        for case, option in reversed(found)
        if _identity(option) != _identity(chosen)
    }
    models = [chosen.drafter] if chosen.drafter else []
    return Plan(
        chosen=replace(chosen, reason=_argument_for(chosen, plain, bool(drafters))),
        refused=tuple(sorted(others.values(), key=lambda option: -option.tokens_per_second)),
        drafters=(*models, *text_drafters),
        downgrades=tuple(dict.fromkeys(_downgrades(target, chosen, found))),
        plain_tokens_per_second=plain,
    )


class DraftRates(NamedTuple):
    """Acceptance rates of a drafter."""

    accepted: Sequence[float]  # that a drafted token is accepted if all before it were, by position
    prefetched: float  # that the outcome of a pass was prefetched, where not all was accepted


def draft_rates(past: Mapping[Key, tuple[float, float]], drafter: str) -> DraftRates:
    """Rates as they were counted, or assumed where nothing was."""
    rates = AcceptanceRates(dict(past))
    rates.assume(drafter, HOPE)
    rates.assume(alternatives_key(drafter), HOPE)
    accepted = [rates.rate(drafter, position_bucket(i)) for i in range(MAX_PLANNED_TOKENS)]
    return DraftRates(accepted, rates.rate(alternatives_key(drafter), 0))


def is_counted(past: Mapping[Key, tuple[float, float]], drafter: str) -> bool:
    """Whether rates of a drafter rest on drafts, and not on assumptions alone."""
    return any(source == drafter for source, _ in past)


def schedule_of(plan: Plan) -> Schedule:
    """The schedule that carries out a plan; without a drafter model, text drafters work in the serial one."""
    return "serial" if plan.chosen.schedule == "plain" else plan.chosen.schedule


def plan_on(
    layouts: Sequence[Layout], target: Manifest, drafter: Manifest, past: Mapping[Key, tuple[float, float]]
) -> Plan:
    """The plan of two models whose placements are given and whose memory is no question."""
    unbounded = MemoryNeeds(lambda manifest, context, device: {}, {})
    return make_plan(target, {drafter.name: drafter}, layouts, past, unbounded)


class BranchingCost(NamedTuple):
    """What drafting on from other outcomes costs a drafter, and is good for.

    step: How much longer a step takes that has all branches that are worth it; earlier tokens lie in its cache.
    coverage: The share of misses whose outcome is among them.
    """

    step: float
    coverage: float


def branching_cost(drafter: DrafterProfile) -> BranchingCost:
    costs = RowCosts(drafter.branches)
    num_rows, coverage = typical_branching([costs.ratio(num_rows) for num_rows in range(1, MAX_BRANCHES + 1)])
    return BranchingCost(costs.ratio(num_rows), coverage)


def _case(layout: Layout, target: Manifest, drafter: Manifest | None, memory: MemoryNeeds) -> _Case:
    step_s = layout.profile.pass_s(1, _TYPICAL_CONTEXT)
    models = [(target, layout.target.device)]
    if drafter is not None and layout.drafter_place is not None:
        models.append((drafter, layout.drafter_place.device))
    return _Case(
        layout,
        step_s,
        lambda num_draft: layout.profile.pass_s(num_draft + 1, _TYPICAL_CONTEXT) / step_s,
        _fitting(models, memory),
        _no_branches(target, drafter) if drafter else "",
    )


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
            return (
                f"a context of {context} tokens needs {ceil(wanted / 2**20)} MiB of {place} memory, and "
                f"{max(0, int(free)) >> 20} MiB are free"
            )
    return ""


def _downgrades(target: Manifest, chosen: Option, found: Sequence[tuple[_Case, Option]]) -> Iterator[str]:
    for case, option in found:
        length, _, lacked = case.fit
        if not length and option.drafter:
            yield f"no {option.drafter} beside {target.name}: {lacked}"
        elif _identity(option) == _identity(chosen) and length < target.context_length:
            yield f"a context of {length} tokens, not {target.context_length}: {lacked}"


def _draft_options(case: _Case, rates: DraftRates) -> Iterator[Option]:
    placement = (rates.accepted, case.ratio, case.step, MAX_PLANNED_TOKENS)
    serial = best_serial(*placement)
    if serial.length == 0:  # plain decoding, which is an option already
        lengths = range(1, MAX_PLANNED_TOKENS + 1)
        serial = max(AheadPlan(serial_rate(*placement[:3], length), length, length) for length in lengths)
    yield _option(case, "serial", serial)
    verify, draft = case.drafter.slowed
    yield _option(case, "pipelined", best_pipelined(*placement, (verify, draft)))
    branching = branching_cost(case.drafter)
    contention = (verify, draft * branching.step)
    prefetched = (min(rates.prefetched, branching.coverage), MAX_PLANNED_TOKENS)
    hedged = _option(case, "hedged", best_pipelined(*placement, contention, prefetched))
    yield replace(hedged, context_length=0) if case.no_branches else hedged


def _option(case: _Case, schedule: AnySchedule, policy: AheadPlan) -> Option:
    has_drafter = schedule != "plain"
    return Option(
        schedule=schedule,
        target=case.layout.target,
        drafter=case.layout.drafter if has_drafter else None,
        drafter_place=case.layout.drafter_place if has_drafter else None,
        draft_length=policy.length,
        wait=policy.wait,
        tokens_per_second=policy.rate / case.step_s,
        context_length=case.fit.context_length,
        memory_bytes=case.fit.memory_bytes,
    )


def _best(options: Sequence[Option]) -> Option:
    """The fastest option, or a simpler one that is nearly as fast."""
    highest = max(option.tokens_per_second for option in options)
    nearly = (option for option in options if option.tokens_per_second * MIN_GAIN_OF_SCHEDULE >= highest)
    return min(nearly, key=lambda option: (SCHEDULES.index(option.schedule), -option.tokens_per_second))


def _identity(option: Option) -> tuple[object, ...]:
    return option.schedule, option.target, option.drafter, option.drafter_place


def _argument_for(chosen: Option, plain: float, has_models: bool) -> str:
    if chosen.schedule != "plain":
        return f"{chosen.tokens_per_second / plain:.2f} times plain decoding"
    return "no drafter is expected to be faster" if has_models else "no drafter model is named"


def _argument_against(case: _Case, option: Option, chosen: Option) -> str:
    """The reasons against an option, the strongest first."""
    if not option.context_length:
        return case.no_branches if case.fit.context_length else case.fit.shortage
    share = option.tokens_per_second / chosen.tokens_per_second
    if share > 1:
        return f"promises only {share - 1:.0%} more and is more involved"
    reasons = []
    if option.target != chosen.target:
        reasons.append(f"a pass takes the target {1e3 * case.step_s:.1f} ms there")
    if option.schedule == "plain":
        reasons.append("drafts pay" if chosen.schedule != "plain" else "fewer tokens a second")
    if option.schedule == "serial":
        reasons.append(f"a drafted token takes {case.step:.0%} of a pass")
    if option.schedule == "hedged":
        cost = branching_cost(case.drafter)
        reasons.append(
            f"a step with the alternatives that pay takes the drafter {cost.step:.1f} times as long and covers "
            f"{cost.coverage:.0%} of its misses"
        )
    if option.schedule in ("pipelined", "hedged"):
        verify, draft = case.drafter.slowed
        reasons.append(f"beside each other passes take {verify:.2f} and draft steps {draft:.2f} times as long")
    return "; ".join(reasons)
