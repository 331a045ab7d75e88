"""Opens and measures a target and its drafters in each placement, and saves the measurements.

Schedule and threads of a target and its drafter are chosen by them.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from time import perf_counter

from edgespec.draft.limits import MIN_GAIN_OF_SPLIT
from edgespec.manifest import Manifest
from edgespec.runtimes.tree import can_run_trees
from edgespec.setup.device_choice import Placement
from edgespec.setup.head_target import layers_read
from edgespec.setup.measure import complete_profile
from edgespec.setup.open_model import ModelFolder, known_stats, open_drafter, open_model
from edgespec.setup.plan_option import Layout, Schedule, ScheduleChoice
from edgespec.setup.planner import is_counted, plan_on, schedule_of
from edgespec.setup.profile import LearnedStats, MeasuringTime, Profile, write_learned_stats
from edgespec.types import Report


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
        has_drafters = bool(self.drafters)
        decoder = open_model(
            self.target,
            placement.device,
            placement.num_threads,
            placement.deterministic,
            has_drafters,
            hidden_layers=layers_read(drafter.manifest for drafter in lacking),
            is_verified=is_verified,
        )
        opening_s = perf_counter() - started
        profile = complete_profile(profile, decoder, {}, self.report, name, self.longest)
        for drafter in lacking:
            begun = perf_counter()
            opened = open_drafter(
                drafter,
                placement.drafter_device,
                placement.drafter_threads,
                hidden_states=decoder.hidden_states,
            )
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
        earlier = known.profiles.get(machine)
        merged = replace(profile, drafters={**(earlier.drafters if earlier else {}), **profile.drafters})
        lanes = [placement.drafter_key(drafter.manifest.name) for drafter in measured]
        drafts = {lane: astuple(profile.draft_costs(lane)) for lane in lanes}
        ratios = profile.costs().ratios if is_new else None
        write_learned_stats(self.target.folder, known.with_profile(machine, merged, drafts, ratios), report)


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
