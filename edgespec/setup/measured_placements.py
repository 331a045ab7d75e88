"""From model folders to a plan: opens and measures a target and its drafters in each placement, and saves that.

Schedule and threads of a target and its drafter are chosen by the measurements, and by the free memory.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from time import perf_counter
from typing import NamedTuple

from edgespec.config.drafter_names import TEXT
from edgespec.draft.acceptance_rates import Key
from edgespec.draft.limits import MIN_GAIN_OF_SPLIT
from edgespec.draft.lookahead import best_window
from edgespec.manifest import Manifest
from edgespec.memory.estimate import FORESEEN_TOKENS, bytes_by_place, estimate_memory, sum_bytes
from edgespec.memory.free_memory import ReadFreeMemory, free_memory
from edgespec.runtimes.devices import Device
from edgespec.runtimes.tree import can_run_trees, tree_manifest
from edgespec.setup.device_choice import Placement
from edgespec.setup.head_target import require_own_target
from edgespec.setup.measure import LONGEST, complete_profile
from edgespec.setup.memory_fit import MemoryReading, fit_memory, memory_needs, read_memory
from edgespec.setup.open_model import (
    ModelFolder,
    known_stats,
    layers_read,
    load_translation,
    open_drafter,
    open_model,
    weights_size,
)
from edgespec.setup.planner import (
    Layout,
    Weighed,
    is_counted,
    plan_on,
    schedule_of,
    shortage,
    weigh,
)
from edgespec.setup.profile import LearnedStats, MeasuringTime, Profile, write_learned_stats
from edgespec.types import Report, Schedule, ScheduleChoice


def splits_of(placement: Placement, has_drafters: bool) -> list[Placement]:
    """The threads that load() gives both models; on one device, where they alternate, also separate cores."""
    most = placement.target_place.num_threads
    threads = [(most, placement.drafter_place.num_threads)]
    if has_drafters and placement.device == placement.drafter_device and most > 1:
        threads += [(most - 1, 1), (most - most // 2, most // 2)]
    return [replace(placement, num_threads=one, drafter_threads=two) for one, two in dict.fromkeys(threads)]


def refined_layout(profile: Profile, drafter: Manifest, placement: Placement, known: LearnedStats) -> Layout:
    """A placement as it was measured, refined by what use has shown since."""
    name = drafter.name
    refined = known.refine(profile, placement.machine, placement.drafter_key(name))
    return Layout(placement.target_place, refined, name, placement.drafter_place)


@dataclass(frozen=True, kw_only=True)
class MeasuredPlacements:
    """Measurements of a target and its drafters on the devices of a placement."""

    target: ModelFolder
    drafters: Sequence[ModelFolder]
    placement: Placement
    longest: int  # tokens of the longest text after which passes are measured
    report: Report
    unopened: Sequence[ModelFolder] = ()  # drafters that do not fit beside the target and are not measured

    def layouts(self, *, remeasure: bool) -> tuple[list[Layout], MeasuringTime]:
        """Each placement with its measurements, and the time that measuring took.

        Unless all is measured again, the placements other than the given one are those that were measured before.
        """
        found: list[Layout] = []
        took = MeasuringTime()
        for i, placement in enumerate(splits_of(self.placement, bool(self.drafters))):
            profile = None if remeasure else known_stats(self.target).profiles.get(placement.machine)
            lacking = [each for each in self._lacking(profile, placement) if each not in self.unopened]
            if remeasure or (i == 0 and (profile is None or lacking)):
                measured, more = self._measure(profile, lacking, placement, is_verified=i > 0)
                # What keeps one measurement from being saved keeps all; it is reported once.
                report = self.report if i == 0 else lambda line: None
                self._save(measured, profile is None, lacking, placement, report)
                profile, took = measured, took.plus(more)
            if profile is not None:
                found += self._layouts(profile, placement)
        return found, took

    def _lacking(self, profile: Profile | None, placement: Placement) -> list[ModelFolder]:
        known = profile.drafters if profile else {}
        return [drafter for drafter in self.drafters if placement.drafter_key(drafter.manifest.name) not in known]

    def _measure(
        self, profile: Profile | None, lacking: Sequence[ModelFolder], placement: Placement, *, is_verified: bool
    ) -> tuple[Profile, MeasuringTime]:
        name = f"{self.target.manifest.name} on {placement.target_place}"
        started = perf_counter()
        decoder = open_model(
            self.target,
            placement.device,
            num_threads=placement.num_threads,
            deterministic=placement.deterministic,
            shares_cores=bool(self.drafters),
            hidden_layers=layers_read(drafter.manifest for drafter in lacking),
            is_verified=is_verified,
        )
        opening_s = perf_counter() - started
        profile = complete_profile(profile, decoder, {}, self.report, name, self.longest)
        for drafter in lacking:
            begun = perf_counter()
            where, num_threads = placement.drafter_device, placement.drafter_threads
            opened = open_drafter(drafter, where, decoder.hidden_states, num_threads=num_threads)
            opening_s += perf_counter() - begun
            named = {placement.drafter_key(drafter.manifest.name): opened}
            profile = complete_profile(profile, decoder, named, self.report)
        return profile, MeasuringTime(opening_s, perf_counter() - started - opening_s)

    def _layouts(self, profile: Profile, placement: Placement) -> list[Layout]:
        known, lacking = known_stats(self.target), self._lacking(profile, placement)
        measured = [drafter for drafter in self.drafters if drafter not in lacking]
        if not measured:
            return [Layout(placement.target_place, known.refine(profile, placement.machine, None))]
        return [refined_layout(profile, drafter.manifest, placement, known) for drafter in measured]

    def _save(
        self, profile: Profile, is_new: bool, measured: Sequence[ModelFolder], placement: Placement, report: Report
    ) -> None:
        if not self.target.manifest.is_ours:
            return
        known, machine = known_stats(self.target), placement.machine
        lanes = [placement.drafter_key(drafter.manifest.name) for drafter in measured]
        drafts = {lane: astuple(profile.draft_costs(lane)) for lane in lanes}
        ratios = profile.costs().ratios if is_new else None
        write_learned_stats(self.target.folder, known.with_profile(machine, profile, drafts, ratios), report)


def choose_schedule(
    asked: ScheduleChoice, target: Manifest, drafter: Manifest, placement: Placement, known: LearnedStats
) -> Schedule:
    """The schedule that a user names; for auto the best by plan.

    As long as nothing was measured the drafter may work ahead where it has a device or cores of its own, and the
    policy of each answer weighs it.
    """
    if asked != "auto":
        return asked
    layout = known_layout(drafter, placement, known)
    if layout is None:
        return "serial" if placement.shares_processor else "pipelined"
    best = schedule_of(plan_on([layout], target, drafter, known.chances))
    if best == "hedged" and not can_run_trees(drafter, placement.drafter_device):
        return "pipelined"
    return best


def choose_threads(target: Manifest, drafter: Manifest, placement: Placement, known: LearnedStats) -> Placement:
    """The placement, with separate cores for the two models where these were measured to promise more.

    Plain decoding, to which an answer falls back, is slower on fewer threads, so acceptance rates must have been
    counted. A deterministic target has the same threads for every drafter.
    """
    if placement.deterministic:
        return placement
    usual, *others = [known_layout(drafter, each, known) for each in splits_of(placement, True)]
    split = [layout for layout in others if layout is not None]
    if usual is None or not split or not is_counted(known.chances, drafter.name):
        return placement
    shared, best = (
        plan_on(layouts, target, drafter, known.chances).chosen for layouts in ([usual], [usual, *split])
    )
    if best.drafter_place is None or best.tokens_per_second < MIN_GAIN_OF_SPLIT * shared.tokens_per_second:
        return placement
    threads = best.target.num_threads, best.drafter_place.num_threads
    return replace(placement, num_threads=threads[0], drafter_threads=threads[1])


def known_layout(drafter: Manifest, placement: Placement, known: LearnedStats) -> Layout | None:
    """The known costs of a drafter in a placement; None where nothing was measured."""
    profile = known.profiles.get(placement.machine)
    if profile is None or placement.drafter_key(drafter.name) not in profile.drafters:
        return None
    return refined_layout(profile, drafter, placement, known)


class Measurements(NamedTuple):
    """What options of models rest on: costs in each placement, acceptance counts, the time that measuring took."""

    layouts: Sequence[Layout]
    past: Mapping[Key, tuple[float, float]]
    took: MeasuringTime


class WeighedModels(NamedTuple):
    """The options of models on given devices, and the measurements that they rest on."""

    weighed: Sequence[Weighed]
    measured: Measurements
    text_drafters: Sequence[str]


def weigh_models(
    target: ModelFolder,
    drafters: Sequence[ModelFolder],
    texts: Collection[str],
    placement: Placement,
    *,
    remeasure: bool,
    free: ReadFreeMemory,
    report: Report = lambda line: None,
) -> WeighedModels:
    """Weigh schedules on the devices of a placement by what is known of this machine; what is missing is measured.

    Args:
        texts: Names of text drafters; auto for those that pay.
        remeasure: Measure all of it again.
        free: Reads the free memory of the host, within the user's limit.

    Raises:
        VocabularyMismatch: A drafter has too few of the target's tokens.
        ManifestError: Lookahead is named and the target cannot run trees.
        MemoryExhausted: The target does not fit.
    """
    known_stats(target, report)  # damage is reported here, once
    space = read_memory(placement, free, report)
    for line in space.unknown:
        report(line)
    fit_memory(target, weights_size(target), space)
    if "lookahead" in texts:
        tree_manifest(target.manifest, placement.device)
    for drafter in drafters:
        require_own_target(target.manifest, [drafter.manifest])
        load_translation(target, drafter, report)
    placements = MeasuredPlacements(
        target=target,
        drafters=drafters,
        placement=placement,
        longest=_longest(target, drafters, space),
        report=report,
        unopened=_unopened(target, drafters, placement, report),
    )
    layouts, took = placements.layouts(remeasure=remeasure)
    past = known_stats(target).chances
    sizes = [(each.manifest, weights_size(each)) for each in (target, *drafters)]
    weighed = weigh(
        target.manifest,
        {each.manifest.name: without_trees(each.manifest, placement.drafter_device) for each in drafters},
        layouts,
        past,
        memory_needs(placement, space, sizes, lambda reserve: reserve.context_bytes),
    )
    text_drafters = _text_drafters(texts, target, placement, layouts[0])
    return WeighedModels(weighed, Measurements(layouts, past, took), text_drafters)


def without_trees(drafter: Manifest, device: Device) -> Manifest:
    """A drafter as its device can run it: with its graph for several branches, or without."""
    return drafter if can_run_trees(drafter, device) else replace(drafter, tree_graph=None)


def _lacking(target: ModelFolder, drafter: ModelFolder | None, space: MemoryReading, num_tokens: int) -> str:
    """Which memory is too small to open both models, with num_tokens in the target's cache; empty if all fits."""
    estimate = estimate_memory(target.manifest, weights_size(target), num_tokens)
    parts = [bytes_by_place(estimate, space.target_place, space.free)]
    if drafter is not None:
        estimate = estimate_memory(drafter.manifest, weights_size(drafter))
        parts.append(bytes_by_place(estimate, space.drafter_place, space.free))
    return shortage(sum_bytes(parts), space.rooms(lambda reserve: reserve.context_bytes), num_tokens)


def _longest(target: ModelFolder, drafters: Sequence[ModelFolder], space: MemoryReading) -> int:
    """Length of the longest text after which passes are measured: what fits beside each drafter."""
    lengths = [LONGEST >> i for i in range(4)]
    beside: Sequence[ModelFolder | None] = drafters or [None]
    fitting = (n for n in lengths if not any(_lacking(target, drafter, space, n) for drafter in beside))
    return next(fitting, lengths[-1])


def _unopened(
    target: ModelFolder, drafters: Sequence[ModelFolder], placement: Placement, report: Report
) -> list[ModelFolder]:
    """Drafters that do not fit beside the target now, whatever limit is planned for."""
    space = read_memory(placement, free_memory, lambda line: None)
    fit_memory(target, weights_size(target), space)
    found = []
    for drafter in drafters:
        if lacking := _lacking(target, drafter, space, FORESEEN_TOKENS):
            report(f"{drafter.manifest.name} is not measured beside {target.manifest.name}: {lacking}")
            found.append(drafter)
    return found


def _text_drafters(texts: Collection[str], target: ModelFolder, placement: Placement, layout: Layout) -> list[str]:
    """Text drafters in the order in which load() uses them."""
    names = set(texts)
    if "auto" in texts:
        pays = can_run_trees(target.manifest, placement.device) and best_window(layout.profile.costs()) is not None
        names |= {"suffix", "lookahead"} if pays else {"suffix"}
    return [name for name in (*TEXT, "lookahead") if name in names]
