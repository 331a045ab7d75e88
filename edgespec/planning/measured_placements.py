"""Opens and measures a target and its drafters in each placement, and saves the measurements."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from time import perf_counter

from edgespec.loading.head_target import layers_read
from edgespec.loading.open_model import ModelFolder, kept_hidden_states, open_drafter, open_model
from edgespec.loading.placement import Placement
from edgespec.manifest import Manifest
from edgespec.planning.plan_option import Layout
from edgespec.profiling.learned_stats import LearnedStats, read_learned_stats, write_learned_stats
from edgespec.profiling.measure import complete_profile
from edgespec.profiling.profile import MeasuringTime, Profile
from edgespec.types import Report


def splits_of(placement: Placement, has_drafters: bool) -> list[Placement]:
    """The threads that load() gives both models; on one device, where they alternate, also separate cores."""
    most = placement.target_place.num_threads
    threads = [(most, placement.drafter_place.num_threads)]
    if has_drafters and placement.device == placement.drafter_device and most > 1:
        threads += [(most - 1, 1), (most - most // 2, most // 2)]
    return [replace(placement, num_threads=one, drafter_threads=two) for one, two in dict.fromkeys(threads)]


def known_stats(target: ModelFolder, report: Report = lambda line: None) -> LearnedStats:
    """What was learned of a target; nothing in a folder of another program, which is never written."""
    return read_learned_stats(target.folder, report) if target.manifest.is_ours else LearnedStats()


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
                hidden_states=kept_hidden_states(decoder),
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
