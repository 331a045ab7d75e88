"""Where target and drafter run and in which schedule: from models, measured placements and memory to a plan.

Pure. A case is a layout with what its models cost and need, from which options are made. Every decision compares
their expected tokens a second, by the closed forms of draft/overlap with costs that were measured, or foreseen
where nothing was, and says why as a sentence. No device is known by its name, and no schedule is chosen or refused
for its kind.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from edgespec.draft.acceptance_rates import AcceptanceRates, Key, position_bucket
from edgespec.draft.draft_model import HOPE, RowCosts
from edgespec.draft.hedging import typical_branching
from edgespec.draft.limits import MAX_BRANCHES, MAX_PLANNED_TOKENS, MIN_GAIN_OF_SCHEDULE
from edgespec.draft.model_rates import alternatives_key
from edgespec.draft.overlap import AheadPlan, Ratio, best_pipelined, best_serial, serial_rate
from edgespec.errors import MemoryExhausted
from edgespec.manifest import Manifest
from edgespec.memory.estimate import MemoryNeeds, context_lengths, sum_bytes
from edgespec.memory.free_memory import Bytes
from edgespec.setup.profile import DrafterProfile, Place, Profile, drafter_key
from edgespec.system.units import format_bytes, format_speed
from edgespec.types import Schedule

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


def argument_for(chosen: PlannedOption, plain: float, options: Sequence[PlannedOption]) -> str:
    """An argument for a placement: the promise of other devices, and the worth of the drafter."""
    reasons = list(_other_devices(chosen, options))
    if chosen.schedule != "plain":
        reasons.append(f"{chosen.tokens_per_second / plain:.2f} times plain decoding")
    elif any(option.drafter for option in options):
        reasons.append("no drafter is expected to be faster")
    return "; ".join(reasons) or "the speed without a drafter model, as none is named"


def _other_devices(chosen: PlannedOption, options: Sequence[PlannedOption]) -> Iterator[str]:
    """A reason for each device on which the target would be slower, or may not run."""
    there = dict.fromkeys(option.target.device for option in options)
    for device in (name for name in there if name != chosen.target.device):
        on_it = [option for option in options if option.target.device == device and option.context_length]
        best = max(on_it, key=lambda option: option.tokens_per_second, default=None)
        if best is None:
            yield f"there is no room for the model on {_name(device)}"
            continue
        if best.tokens_per_second < chosen.tokens_per_second:
            basis = "measured" if best.is_measured else "estimated"
            about = "" if best.is_measured else "about "
            rate = f"{about}{format_speed(best.tokens_per_second)} tokens/s, {basis}"
            yield f"{_name(chosen.target.device)} is faster than {_name(device)} ({rate})"
        if best.obstacle:
            yield best.obstacle


def _name(device: str) -> str:
    return "the CPU" if device == "cpu" else device


def argument_against(case: Case, option: PlannedOption, chosen: PlannedOption) -> str:
    """The reasons against an option, the strongest first."""
    if not option.context_length:
        return case.no_branches if case.fit.context_length else case.fit.shortage
    share = option.tokens_per_second / chosen.tokens_per_second
    if share > 1 and not option.obstacle:
        return (
            f"{share - 1:.0%} faster by these figures, too little to be sure of; {chosen.schedule} needs less work"
        )
    reasons = [option.obstacle] if option.obstacle else []
    if option.target != chosen.target:
        reasons.append(f"a pass takes the target {1e3 * case.step_s:.1f} ms there")
    elif option.schedule == "plain" and chosen.schedule != "plain":
        reasons.append(f"drafts make it {1 / share:.2f} times as fast")
    if option.schedule == "serial":
        waits = "for which the target waits" if chosen.schedule != "plain" else "more than it wins"
        reasons.append(f"a drafted token takes {case.step:.0%} of a pass, {waits}")
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


Weighed = tuple[Case, PlannedOption]


def weigh(
    target: Manifest,
    drafters: Mapping[str, Manifest],
    layouts: Sequence[Layout],
    past: Mapping[Key, tuple[float, float]],
    memory: MemoryNeeds,
) -> list[Weighed]:
    """Every schedule on every layout with its expected speed.

    Args:
        drafters: Draft models by name.
        layouts: At least one.
        past: Acceptance counts, as acceptance_rates.AcceptanceRates holds them.
    """
    found: list[Weighed] = []
    places: set[Place] = set()
    for layout in layouts:
        if layout.target not in places:  # plain decoding is an option of the first layout of a place
            places.add(layout.target)
            alone = make_case(layout, target, None, memory)
            found.append((alone, _option(alone, "plain", AheadPlan(1.0, 0, 0))))
        if layout.drafter is not None:
            case = make_case(layout, target, drafters[layout.drafter], memory)
            found += [(case, option) for option in _draft_options(case, draft_rates(past, layout.drafter))]
    return found


def decide(weighed: Sequence[Weighed], text_drafters: Sequence[str] = ("suffix",)) -> Plan:
    """The best of the options that were weighed, perhaps for several forms of one target, and why not the others.

    Raises MemoryExhausted: None of them can run.
    """
    possible = [option for _, option in weighed if option.can_be_chosen]
    if not possible:
        first = next((case for case, _ in weighed if case.fit.shortage), weighed[0][0])
        raise MemoryExhausted(f"{first.target.name} does not fit: {first.fit.shortage}; use a smaller model")
    chosen = _best(possible)
    plain = max(option.tokens_per_second for option in possible if option.schedule == "plain")
    # What is weighed for several devices of a drafter has plain decoding in one place several times.
    others = {
        _identity(option): replace(option, reason=argument_against(case, option, chosen))
        for case, option in reversed(weighed)
        if _identity(option) != _identity(chosen)
    }
    models = [chosen.drafter] if chosen.drafter else []
    return Plan(
        chosen=replace(chosen, reason=argument_for(chosen, plain, [option for _, option in weighed])),
        refused=tuple(sorted(others.values(), key=lambda option: -option.tokens_per_second)),
        drafters=(*models, *text_drafters),
        downgrades=tuple(dict.fromkeys(_downgrades(chosen, weighed))),
        plain_tokens_per_second=plain,
    )


class DraftRates(NamedTuple):
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
    """True if rates of a drafter rest on drafts, and not on assumptions alone."""
    return any(source == drafter for source, _ in past)


def schedule_of(plan: Plan) -> Schedule:
    """The schedule that carries out a plan; without a drafter model, text drafters work in the serial one."""
    return "serial" if plan.chosen.schedule == "plain" else plan.chosen.schedule


def plan_on(
    layouts: Sequence[Layout], target: Manifest, drafter: Manifest, past: Mapping[Key, tuple[float, float]]
) -> Plan:
    """The plan of two models whose placements are given and whose memory is no question."""
    unbounded = MemoryNeeds(lambda manifest, context, device: {}, {})
    return decide(weigh(target, {drafter.name: drafter}, layouts, past, unbounded))


def _downgrades(chosen: PlannedOption, weighed: Sequence[Weighed]) -> Iterator[str]:
    for case, option in weighed:
        target, (length, _, lacked) = case.target, case.fit
        if not length and option.drafter and option.target == chosen.target:
            yield f"no {option.drafter} beside {target.name}: {lacked}"
        elif _identity(option) == _identity(chosen) and length < target.context_length:
            yield f"a context of {length} tokens, not {target.context_length}: {lacked}"


def _draft_options(case: Case, rates: DraftRates) -> Iterator[PlannedOption]:
    placement = (rates.accepted, case.ratio, case.step, case.longest)
    serial = best_serial(*placement)
    if serial.length == 0:  # plain decoding, which is an option already
        lengths = range(1, case.longest + 1)
        serial = max(AheadPlan(serial_rate(*placement[:3], length), length, length) for length in lengths)
    yield _option(case, "serial", serial)
    verify, draft = case.drafter.slowed
    yield _option(case, "pipelined", best_pipelined(*placement, (verify, draft)))
    branching = branching_cost(case.drafter)
    contention = (verify, draft * branching.step)
    prefetched = (min(rates.prefetched, branching.coverage), case.longest)
    hedged = _option(case, "hedged", best_pipelined(*placement, contention, prefetched))
    yield replace(hedged, context_length=0) if case.no_branches else hedged


def _option(case: Case, schedule: AnySchedule, policy: AheadPlan) -> PlannedOption:
    has_drafter = schedule != "plain"
    return PlannedOption(
        schedule=schedule,
        target=case.layout.target,
        drafter=case.layout.drafter if has_drafter else None,
        drafter_place=case.layout.drafter_place if has_drafter else None,
        draft_length=policy.length,
        wait=policy.wait,
        tokens_per_second=policy.rate / case.step_s,
        context_length=case.fit.context_length,
        memory_bytes=case.fit.memory_bytes,
        is_measured=case.layout.is_measured,
    )


def _best(options: Sequence[PlannedOption]) -> PlannedOption:
    """The fastest option, or a simpler one that is nearly as fast."""
    highest = max(option.tokens_per_second for option in options)
    nearly = (option for option in options if option.tokens_per_second * MIN_GAIN_OF_SCHEDULE >= highest)
    return min(nearly, key=lambda option: (SCHEDULES.index(option.schedule), -option.tokens_per_second))


def _identity(option: PlannedOption) -> tuple[object, ...]:
    return option.schedule, option.target, option.drafter, option.drafter_place
