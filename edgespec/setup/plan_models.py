"""From model folders to a plan, by measurements on this machine and the free memory."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

from edgespec.config.drafter_names import TEXT
from edgespec.draft.lookahead import best_window
from edgespec.manifest import Manifest
from edgespec.memory.estimate import (
    FORESEEN_TOKENS,
    bytes_by_place,
    estimate_full_context,
    estimate_memory,
    sum_bytes,
)
from edgespec.memory.free_memory import ReadFreeMemory, free_memory
from edgespec.memory.ladder import Bytes
from edgespec.runtimes.devices import Device
from edgespec.runtimes.tree import can_run_trees, tree_manifest
from edgespec.setup.device_choice import Placement
from edgespec.setup.head_target import require_own_target
from edgespec.setup.measure import LONGEST
from edgespec.setup.measured_placements import MeasuredPlacements
from edgespec.setup.memory_fit import MemoryReading, fit_memory, read_memory
from edgespec.setup.open_model import ModelFolder, known_stats, load_translation, weights_size
from edgespec.setup.plan_option import Layout, MemoryNeeds, Plan, shortage
from edgespec.setup.planner import Weighed, weigh
from edgespec.setup.profile import LearnedStats, MeasuringTime
from edgespec.types import Report


class Planned(NamedTuple):
    """A plan, and the measurements that it rests on."""

    plan: Plan
    layouts: Sequence[Layout]
    learned_stats: LearnedStats
    took: MeasuringTime


class WeighedModels(NamedTuple):
    """The options of models on given devices, and the measurements that they rest on."""

    weighed: Sequence[Weighed]
    layouts: Sequence[Layout]
    learned_stats: LearnedStats
    took: MeasuringTime
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
    past = known_stats(target)
    weighed = weigh(
        target.manifest,
        {each.manifest.name: without_trees(each.manifest, placement.drafter_device) for each in drafters},
        layouts,
        past.chances,
        _memory([target, *drafters], placement, space),
    )
    return WeighedModels(weighed, layouts, past, took, _text_drafters(texts, target, placement, layouts[0]))


def without_trees(drafter: Manifest, device: Device) -> Manifest:
    """A drafter as its device can run it: with its graph for several branches, or without."""
    return drafter if can_run_trees(drafter, device) else replace(drafter, tree_graph=None)


def _memory(models: Sequence[ModelFolder], placement: Placement, space: MemoryReading) -> MemoryNeeds:
    sizes = {model.manifest.name: weights_size(model) for model in models}
    places = {placement.drafter_device.name: space.drafter_place, placement.device.name: space.target_place}

    def needed(manifest: Manifest, context: int, device: str) -> Bytes:
        estimate = estimate_full_context(manifest, sizes[manifest.name], context)
        return bytes_by_place(estimate, places[device], space.free)

    return MemoryNeeds(needed, _free(space))


def _free(space: MemoryReading) -> Bytes:
    return {place: room.free_bytes - room.reserve.context_bytes for place, room in space.free.items()}


def _lacking(target: ModelFolder, drafter: ModelFolder | None, space: MemoryReading, num_tokens: int) -> str:
    """Which memory is too small to open both models, with num_tokens in the target's cache; empty if all fits."""
    estimate = estimate_memory(target.manifest, weights_size(target), num_tokens)
    parts = [bytes_by_place(estimate, space.target_place, space.free)]
    if drafter is not None:
        estimate = estimate_memory(drafter.manifest, weights_size(drafter))
        parts.append(bytes_by_place(estimate, space.drafter_place, space.free))
    return shortage(sum_bytes(parts), _free(space), num_tokens)


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
