"""Where target and drafter run and in which schedule: from models, measured placements and memory to a plan.

Pure. Every decision compares expected tokens a second, by the closed forms of policy.overlap with costs that were
measured, or foreseen where nothing was, and says why as a sentence. No device is known by its name, and no
schedule is chosen or refused for its kind.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from edgespec.draft.acceptance_rates import AcceptanceRates, Key, position_bucket
from edgespec.draft.draft_model import HOPE
from edgespec.draft.limits import MAX_PLANNED_TOKENS, MIN_GAIN_OF_SCHEDULE
from edgespec.draft.model_rates import alternatives_key
from edgespec.draft.overlap import AheadPlan, best_pipelined, best_serial, serial_rate
from edgespec.errors import MemoryExhausted
from edgespec.manifest import Manifest
from edgespec.setup.plan_option import (
    SCHEDULES,
    AnySchedule,
    Case,
    Layout,
    MemoryNeeds,
    Plan,
    PlannedOption,
    Schedule,
    branching_cost,
    make_case,
)
from edgespec.setup.profile import Place
from edgespec.system.units import format_speed


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
    return decide(weigh(target, drafters, layouts, past, memory), text_drafters)


def weigh(
    target: Manifest,
    drafters: Mapping[str, Manifest],
    layouts: Sequence[Layout],
    past: Mapping[Key, tuple[float, float]],
    memory: MemoryNeeds,
) -> list[Weighed]:
    """Every schedule on every layout with its expected speed; arguments as for make_plan."""
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
    """The best of the options that were weighed, perhaps for several forms of one target.

    Raises MemoryExhausted: None of them can run.
    """
    possible = [option for _, option in weighed if option.can_be_chosen]
    if not possible:
        first = weighed[0][0]
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
    return make_plan(target, {drafter.name: drafter}, layouts, past, unbounded)


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
