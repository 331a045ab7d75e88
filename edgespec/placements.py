"""A target and what may draft for it, opened and measured in each placement; what was measured is remembered.

Knows nothing of what is best.
"""

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from time import perf_counter

from edgespec.experience import Experience, read_experience, write_experience
from edgespec.opening import ModelFolder, open_drafter, open_model
from edgespec.planner import Layout
from edgespec.profile import Profile, Took
from edgespec.profiling import profiled
from edgespec.setting import Setting

Report = Callable[[str], None]


def splits_of(setting: Setting, has_drafters: bool) -> list[Setting]:
    """All threads for both models, as they run by turns, and then, on one device, cores of their own."""
    most = setting.target_place.num_threads
    threads = [(most, most)]
    if has_drafters and setting.device == setting.drafter_device and most > 1:
        threads += [(most - 1, 1), (most - most // 2, most // 2)]
    return [replace(setting, num_threads=one, drafter_threads=two) for one, two in dict.fromkeys(threads)]


@dataclass(frozen=True, kw_only=True)
class Placements:
    """Of a target and its drafters on the devices of a setting.

    longest: Tokens of the longest text that passes are measured behind.
    unopened: Drafters for which there is no room beside the target: what is not known of them stays so.
    """

    target: ModelFolder
    drafters: Sequence[ModelFolder]
    setting: Setting
    longest: int
    report: Report
    unopened: Sequence[ModelFolder] = ()

    def layouts(self, *, measures_anew: bool) -> tuple[list[Layout], Took]:
        """What is known of each, and what it took to learn it.

        Where nothing is measured anew, the placements beside the usual one are those that were measured before.
        """
        found: list[Layout] = []
        took = Took()
        for i, setting in enumerate(splits_of(self.setting, bool(self.drafters))):
            profile = None if measures_anew else self._known().profiles.get(setting.machine)
            lacking = [each for each in self._lacking(profile, setting) if each not in self.unopened]
            if measures_anew or (i == 0 and (profile is None or lacking)):
                measured, more = self._measured(profile, lacking, setting, is_verified=i > 0)
                # What keeps one from being written keeps all: it is told once.
                told = self.report if i == 0 else lambda line: None
                self._remember(measured, profile is None, lacking, setting, told)
                profile, took = measured, took.plus(more)
            if profile is not None:
                found += self._laid_out(profile, setting)
        return found, took

    def _lacking(self, profile: Profile | None, setting: Setting) -> list[ModelFolder]:
        """Drafters of which a profile says nothing."""
        known = profile.drafters if profile else {}
        return [drafter for drafter in self.drafters if setting.lane(drafter.manifest.name) not in known]

    def _measured(
        self, profile: Profile | None, lacking: Sequence[ModelFolder], setting: Setting, *, is_verified: bool
    ) -> tuple[Profile, Took]:
        """Open the models as this placement has them, one drafter after the other, and measure them."""
        name = f"{self.target.manifest.name} on {setting.target_place}"
        started = perf_counter()
        decoder = open_model(
            self.target,
            setting.device,
            setting.num_threads,
            False,
            bool(self.drafters),
            is_verified=is_verified,
        )
        opening_s = perf_counter() - started
        profile = profiled(profile, decoder, {}, self.report, name, self.longest)
        for drafter in lacking:
            begun = perf_counter()
            opened = open_drafter(drafter, setting.drafter_device, setting.drafter_threads)
            opening_s += perf_counter() - begun
            profile = profiled(profile, decoder, {setting.lane(drafter.manifest.name): opened}, self.report)
        return profile, Took(opening_s, perf_counter() - started - opening_s)

    def _laid_out(self, profile: Profile, setting: Setting) -> list[Layout]:
        """With what use has shown since."""
        known, machine = self._known(), setting.machine
        lacking, found = self._lacking(profile, setting), []
        for drafter in self.drafters:
            if drafter not in lacking:
                lane = setting.lane(drafter.manifest.name)
                drafts = known.drafts.get(machine, {}).get(lane)
                refined = profile.refined(known.ratios.get(machine), lane, drafts)
                found.append(Layout(setting.target_place, refined, drafter.manifest.name, setting.drafter_place))
        return found or [Layout(setting.target_place, profile.refined(known.ratios.get(machine), None, None))]

    def _remember(
        self, profile: Profile, is_new: bool, measured: Sequence[ModelFolder], setting: Setting, report: Report
    ) -> None:
        if not self.target.manifest.files:  # nothing is written into a folder that others made
            return
        known, machine = self._known(), setting.machine
        earlier = known.profiles.get(machine)
        drafts = {
            lane: astuple(profile.draft_costs(lane))
            for lane in (setting.lane(drafter.manifest.name) for drafter in measured)
        }
        merged = replace(profile, drafters={**(earlier.drafters if earlier else {}), **profile.drafters})
        write_experience(
            self.target.folder,
            replace(
                known,
                ratios={**known.ratios, **({machine: profile.costs().ratios} if is_new else {})},
                drafts={**known.drafts, machine: {**known.drafts.get(machine, {}), **drafts}},
                profiles={**known.profiles, machine: merged},
            ),
            report,
        )

    def _known(self) -> Experience:
        return read_experience(self.target.folder) if self.target.manifest.files else Experience()
