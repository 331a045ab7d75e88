"""Speculation with what was learned of a model on this machine; what is not known yet is measured."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, replace

from edgespec.decoders import Decoder
from edgespec.loading.open_model import ModelFolder
from edgespec.loading.placement import Placement
from edgespec.memory.estimate import FORESEEN_TOKENS
from edgespec.planning.case import branching_cost
from edgespec.planning.measured_placements import known_stats
from edgespec.policy.draft_costs import DraftCosts, RowCosts
from edgespec.policy.draft_model import DraftModelStats
from edgespec.policy.speculation import Speculation
from edgespec.profiling.learned_stats import write_learned_stats
from edgespec.profiling.measure import complete_profile
from edgespec.types import Drafter, Report


def learned_speculation(
    drafters: Callable[[], Sequence[Drafter]],
    length: int | None,
    decoder: Decoder,
    models: Mapping[str, Decoder],
    target: ModelFolder,
    placement: Placement,
    report: Report,
) -> Speculation:
    """Speculation of a fixed length, or one that starts from earlier answers and saves what it learns.

    models: Decoders of the open drafter models, by name.
    """
    if length is not None or not drafters():
        return Speculation(drafters, length)
    machine, known = placement.machine, known_stats(target, report)
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

    def save(learned: Speculation, report: Report = lambda line: None) -> None:
        if target.manifest.is_ours:
            models = {placement.drafter_key(name): stats for name, stats in learned.models.items()}
            drafts = {lane: astuple(stats.costs) for lane, stats in models.items()}
            contention = {lane: stats.contention for lane, stats in models.items()}
            known = known_stats(target).with_profile(
                machine, profile, drafts, learned.ratios, contention, learned.spreads
            )
            known = replace(known, chances={**known.chances, **learned.rates})
            write_learned_stats(target.folder, known, report)

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
    save(speculation, report)
    return speculation
