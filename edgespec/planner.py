"""Who runs where and in which schedule: from models, measured placements and memory to a plan, in words too.

Pure. Every decision is a comparison of expected tokens a second, by the closed forms of pipeline with what was
measured. No device is known by its name, and no schedule is taken or refused for what it is.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Literal, NamedTuple

from edgespec.budget import context_lengths, total
from edgespec.chances import Chances, Key, position_class
from edgespec.costs import PassCosts
from edgespec.errors import MemoryExhausted
from edgespec.hedges import Hedges
from edgespec.ladder import Bytes
from edgespec.manifest import Manifest
from edgespec.paid import HOPE, MOST_PREPARED, outcomes
from edgespec.pipeline import Policy, Ratio, best_pipelined, best_serial, serial_rate
from edgespec.profile import DrafterProfile, Place, Profile, beside

Schedule = Literal["serial", "pipelined", "hedged"]
AnySchedule = Schedule | Literal["plain"]
SCHEDULES: tuple[AnySchedule, ...] = ("plain", "serial", "pipelined", "hedged")  # from simple to involved
LONGEST = 16
# A more involved schedule has to promise so much more than a simpler one: the figures are not better than that.
_LEAST_GAIN = 1.03
# A drafter is not worth a context shorter than this, where the model has a longer one.
_LEAST_CONTEXT = 4096
_TYPICAL_PAST = 256  # tokens held while an answer is written


class Layout(NamedTuple):
    """A placement that was measured. drafter: the name of its manifest."""

    target: Place
    profile: Profile
    drafter: str | None = None
    drafter_place: Place | None = None


class Memory(NamedTuple):
    """What a model takes, and what there is.

    needed: bytes by place, of a model at a context length on a device.
    free_bytes: by place; nothing is known of those that it lacks.
    """

    needed: Callable[[Manifest, int, str], Bytes]
    free_bytes: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A schedule on a placement, and what is to be expected of it.

    draft_length: the most tokens that are verified at a time.
    wait: drafted tokens that the target waits for after a miss.
    context_length: what fits the memory; 0 where not even a short one does, or the models cannot do it at all.
    memory_bytes: of all its models at that context; at the shortest that was weighed where none fits.
    reason: in words, why it was chosen or refused.
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
    """What is to be done.

    drafters: in the order in which they are heard; what drafts from the text costs nothing and comes last.
    downgrades: what is given up for want of memory, in words.
    """

    chosen: Option
    refused: tuple[Option, ...]
    drafters: tuple[str, ...]
    downgrades: tuple[str, ...]
    plain_tokens_per_second: float


class _Fit(NamedTuple):
    """The longest context for which there is memory, 0 if none; what that takes; what a longer one lacks."""

    context_length: int
    memory_bytes: int
    shortage: str


class _Case(NamedTuple):
    """A layout, and what it says with a step of its target as the unit of time."""

    layout: Layout
    step_s: float
    ratio: Ratio
    fit: _Fit
    no_branches: str  # why the drafter cannot run several in a pass, if it cannot

    @property
    def drafter(self) -> DrafterProfile:
        _, profile, drafter, place = self.layout
        assert drafter is not None
        assert place is not None
        known = profile.drafters[beside(drafter, place)]
        return replace(known, branches={1: 1.0, 2: 2.0}) if self.no_branches else known

    @property
    def step(self) -> float:
        return self.drafter.step_s / self.step_s


def make_plan(
    target: Manifest,
    drafters: Mapping[str, Manifest],
    layouts: Sequence[Layout],
    past: Mapping[Key, tuple[float, float]],
    memory: Memory,
    text_drafters: Sequence[str] = ("suffix",),
) -> Plan:
    """The best schedule on the best placement, and the others with what is against them.

    Args:
        drafters: The models that may draft, by their names.
        layouts: At least one.
        past: How often drafts were kept, as chances.Chances holds it.
        text_drafters: What may draft from the text under every schedule.

    Raises:
        MemoryExhausted: The target does not fit, drafter or no drafter.
    """
    found: list[tuple[_Case, Option]] = []
    for layout in layouts:
        alone = _case(layout, target, None, memory)
        found.append((alone, _option(alone, "plain", Policy(1.0, 0, 0))))
        if layout.drafter is not None:
            case = _case(layout, target, drafters[layout.drafter], memory)
            found += [(case, option) for option in _drafted(case, chances_of(past, layout.drafter))]
    possible = [option for _, option in found if option.context_length]
    if not possible:
        raise MemoryExhausted(f"{target.name} does not fit: {found[0][0].fit.shortage}; use a smaller model")
    chosen = _best(possible)
    plain = max(option.tokens_per_second for option in possible if option.schedule == "plain")
    others = [
        replace(option, reason=_against(case, option, chosen))
        for case, option in found
        if _doing(option) != _doing(chosen)
    ]
    models = [chosen.drafter] if chosen.drafter else []
    return Plan(
        chosen=replace(chosen, reason=_for(chosen, plain, bool(drafters))),
        refused=tuple(sorted(_distinct(others), key=lambda option: -option.tokens_per_second)),
        drafters=(*models, *text_drafters),
        downgrades=tuple(dict.fromkeys(_downgrades(target, chosen, found))),
        plain_tokens_per_second=plain,
    )


class DraftChances(NamedTuple):
    """kept: a drafted token, if all before it were, by its place. prepared: what comes, where not all is kept."""

    kept: Sequence[float]
    prepared: float


def chances_of(past: Mapping[Key, tuple[float, float]], drafter: str) -> DraftChances:
    """As they were counted, and assumed where nothing was."""
    chances = Chances(dict(past))
    chances.expect(drafter, HOPE)
    chances.expect(outcomes(drafter), HOPE)
    kept = [chances.of(drafter, position_class(i)) for i in range(LONGEST)]
    return DraftChances(kept, chances.of(outcomes(drafter), 0))


def is_counted(past: Mapping[Key, tuple[float, float]], drafter: str) -> bool:
    """Whether chances rest on drafts and not on the prior alone."""
    return any(source == drafter for source, _ in past)


def schedule_of(plan: Plan) -> Schedule:
    """The loop that carries it out: without a model, what drafts from the text is heard in the serial one."""
    chosen = plan.chosen.schedule
    return "serial" if chosen == "plain" else chosen


def plan_on(
    layouts: Sequence[Layout], target: Manifest, drafter: Manifest, past: Mapping[Key, tuple[float, float]]
) -> Plan:
    """For two models that are bound to some places, and have the memory that they need."""
    unbounded = Memory(lambda manifest, context, device: {}, {})
    return make_plan(target, {drafter.name: drafter}, layouts, past, unbounded)


def branched(drafter: DrafterProfile) -> float:
    """What a step takes more that goes on with all outcomes: what it made before lies in its cache."""
    return PassCosts(dict(drafter.branches)).ratio(Hedges().budget + 1)


def _case(layout: Layout, target: Manifest, drafter: Manifest | None, memory: Memory) -> _Case:
    step_s = layout.profile.pass_s(1, _TYPICAL_PAST)
    models = [(target, layout.target.device)]
    if drafter is not None and layout.drafter_place is not None:
        models.append((drafter, layout.drafter_place.device))
    return _Case(
        layout,
        step_s,
        lambda num_draft: layout.profile.pass_s(num_draft + 1, _TYPICAL_PAST) / step_s,
        _fitting(models, memory),
        _no_branches(target, drafter) if drafter else "",
    )


def _no_branches(target: Manifest, drafter: Manifest) -> str:
    if drafter.tree_graph is None:
        return f"{drafter.name} has no graph for several branches in a pass"
    if drafter.vocab_sha256 != target.vocab_sha256:
        return f"{drafter.name} has another vocabulary, and what is translated drafts one branch alone"
    return ""


def _fitting(models: Sequence[tuple[Manifest, str]], memory: Memory) -> _Fit:
    """The longest context of the first model for which there is memory, as load() would have it."""

    def needed(context: int) -> Bytes:
        return total(memory.needed(model, min(context, model.context_length), device) for model, device in models)

    def lacks(context: int) -> str:
        return shortage(needed(context), memory.free_bytes, context)

    whole = models[0][0].context_length
    least = min(whole, _LEAST_CONTEXT if len(models) > 1 else 0)
    lengths = [length for length in context_lengths(models[0][0]) if length >= least]
    num_fitting = bisect_left(lengths, True, key=lambda context: bool(lacks(context)))
    told = lacks(lengths[num_fitting]) if num_fitting < len(lengths) else ""
    longest = lengths[max(0, num_fitting - 1)]
    return _Fit(longest if num_fitting else 0, sum(needed(longest).values()), told)


def shortage(needed: Bytes, free_bytes: Mapping[str, int], context: int) -> str:
    """Which memory a context needs more of than there is; nothing where it fits."""
    for place, wanted in needed.items():
        free = free_bytes.get(place, wanted)
        if wanted > free:
            return (
                f"a context of {context} tokens needs {ceil(wanted / 2**20)} MiB of {place} memory, and "
                f"{max(0, int(free)) >> 20} MiB are free"
            )
    return ""


def _downgrades(target: Manifest, chosen: Option, found: Sequence[tuple[_Case, Option]]) -> Iterator[str]:
    """What there would be with more memory."""
    for case, option in found:
        length, _, lacked = case.fit
        if not length and option.drafter:
            yield f"no {option.drafter} beside {target.name}: {lacked}"
        elif _doing(option) == _doing(chosen) and length < target.context_length:
            yield f"a context of {length} tokens, not {target.context_length}: {lacked}"


def _drafted(case: _Case, chances: DraftChances) -> Iterator[Option]:
    setting = (chances.kept, case.ratio, case.step, LONGEST)
    serial = best_serial(*setting)
    if serial.length == 0:  # that would be plain decoding
        rates = [Policy(serial_rate(*setting[:3], length), length, length) for length in range(1, LONGEST + 1)]
        serial = max(rates)
    yield _option(case, "serial", serial)
    verify, draft = case.drafter.slowed
    yield _option(case, "pipelined", best_pipelined(*setting, (verify, draft)))
    slowed, prepared = (verify, draft * branched(case.drafter)), (chances.prepared, MOST_PREPARED)
    hedged = _option(case, "hedged", best_pipelined(*setting, slowed, prepared))
    yield replace(hedged, context_length=0) if case.no_branches else hedged


def _option(case: _Case, schedule: AnySchedule, policy: Policy) -> Option:
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
    """The fastest; a simpler one that is nearly as fast goes first."""
    highest = max(option.tokens_per_second for option in options)
    nearly = (option for option in options if option.tokens_per_second * _LEAST_GAIN >= highest)
    return min(nearly, key=lambda option: (SCHEDULES.index(option.schedule), -option.tokens_per_second))


def _doing(option: Option) -> tuple[object, ...]:
    return option.schedule, option.target, option.drafter, option.drafter_place


def _distinct(options: Sequence[Option]) -> list[Option]:
    """Plain decoding is an option of each layout; of those on the same place the first stays."""
    return list({_doing(option): option for option in reversed(options)}.values())


def _for(chosen: Option, plain: float, has_models: bool) -> str:
    if chosen.schedule != "plain":
        return f"{chosen.tokens_per_second / plain:.2f} times plain decoding"
    return "no drafter promises more" if has_models else "no model is to draft"


def _against(case: _Case, option: Option, chosen: Option) -> str:
    """What speaks against an option, the weightiest first."""
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
        reasons.append(f"a step with all outcomes takes the drafter {branched(case.drafter):.1f} times as long")
    if option.schedule in ("pipelined", "hedged"):
        verify, draft = case.drafter.slowed
        reasons.append(f"beside each other passes take {verify:.2f} and draft steps {draft:.2f} times as long")
    return "; ".join(reasons)
