"""Speculation with what was learned of a model on this machine; what is not known yet is measured."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, replace

from edgespec.decoders import Decoder
from edgespec.engine.setup import Setup
from edgespec.memory.estimate import FORESEEN_TOKENS
from edgespec.planning.case import branching_cost
from edgespec.planning.measured_placements import known_stats
from edgespec.policy.draft_costs import DraftCosts, RowCosts
from edgespec.policy.draft_model import DraftModelStats
from edgespec.policy.speculation import Speculation
from edgespec.profiling.learned_stats import LearnedStats, write_learned_stats
from edgespec.profiling.measure import complete_profile
from edgespec.types import Drafter, Report


def learned_speculation(
    setup: Setup, drafters: Callable[[], Sequence[Drafter]], decoder: Decoder, models: Mapping[str, Decoder]
) -> Speculation:
    """Speculation of a fixed length, or one that starts from earlier answers and saves what it learns.

    models: Decoders of the open drafter models, by name.
    """
    if setup.wish.length is not None or not drafters():
        return Speculation(drafters, setup.wish.length)
    target, placement, known, report = setup.memory.target, setup.placement, setup.known, setup.wish.report
    for line in setup.damage:
        report(line)
    machine = placement.machine
    lanes = {name: placement.drafter_key(name) for name in models}
    named = {lanes[name]: drafter for name, drafter in models.items()}
    # No more than what room was kept for.
    profile = complete_profile(
        known.profiles.get(machine), decoder, named, report, target.manifest.name, longest=FORESEEN_TOKENS
    )
    ratios = known.ratios.get(machine) or profile.costs().ratios
    drafts = {lane: astuple(profile.draft_costs(lane)) for lane in lanes.values()}
    drafts |= known.drafts.get(machine, {})
    contention = known.contention.get(machine, {})

    def write(learned: Speculation, known: LearnedStats, report: Report = lambda line: None) -> None:
        if target.manifest.is_ours:
            models = {placement.drafter_key(name): stats for name, stats in learned.models.items()}
            drafts = {lane: astuple(stats.costs) for lane, stats in models.items()}
            contention = {lane: stats.contention for lane, stats in models.items()}
            known = known.with_profile(machine, profile, drafts, learned.ratios, contention, learned.spreads)
            known = replace(known, chances={**known.chances, **learned.rates})
            write_learned_stats(target.folder, known, report)

    def save(learned: Speculation) -> None:
        write(learned, known_stats(target))  # another engine may have learned meanwhile

    stats = {}
    for name, lane in lanes.items():
        known_beside = profile.drafters[lane]
        costs, slowed = DraftCosts(*drafts[lane]), contention.get(lane, known_beside.slowed)
        stats[name] = DraftModelStats(
            costs,
            contention=slowed,
            rows=RowCosts(known_beside.branches),
            branched=branching_cost(known_beside).step,
        )
    speculation = Speculation(drafters, None, ratios, profile.context_costs(), stats, known.chances, save)
    speculation.is_padded = profile.is_padded
    speculation.spreads = known.spreads.get(machine) or profile.spreads()
    speculation.warm = None if placement.device.name == "cpu" else set()
    write(speculation, known, report)
    return speculation
