"""Schedule and threads of a target and its drafter, chosen by what was measured of them before."""

from dataclasses import replace
from typing import Literal

from edgespec.loading.placement import Placement
from edgespec.manifest import Manifest
from edgespec.planning.measured_placements import refined_layout, splits_of
from edgespec.planning.plan_option import Layout, Schedule
from edgespec.planning.planner import is_counted, plan_on, schedule_of
from edgespec.policy.limits import MIN_GAIN_OF_SPLIT
from edgespec.profiling.learned_stats import LearnedStats
from edgespec.runtimes.tree import can_run_trees

ScheduleChoice = Literal["auto", "serial", "pipelined", "hedged"]


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
    """What is known of a drafter in a placement; None where nothing was measured."""
    profile = known.profiles.get(placement.machine)
    if profile is None or placement.drafter_key(drafter.name) not in profile.drafters:
        return None
    return refined_layout(profile, drafter, placement, known)
