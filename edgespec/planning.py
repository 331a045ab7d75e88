"""From model folders to a plan: what was measured of them on this machine, and the memory that there is."""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import NamedTuple

from edgespec.budget import FORESEEN_TOKENS, RESERVE_BYTES, expect_rooms, need_of, placed, total
from edgespec.device_memory import Places
from edgespec.drafting import translation
from edgespec.experience import Experience, read_experience
from edgespec.headroom import Headroom, headroom
from edgespec.ladder import Bytes
from edgespec.lookahead import fitting
from edgespec.manifest import Manifest
from edgespec.opening import ModelFolder, weights_bytes
from edgespec.placements import Placements
from edgespec.planner import SHORTEST_CONTEXT, Layout, Memory, Plan, make_plan, shortage
from edgespec.profile import Took
from edgespec.profiling import LONGEST
from edgespec.runtimes.tree import can_run_trees, tree_manifest
from edgespec.setting import Setting

Report = Callable[[str], None]


class Planned(NamedTuple):
    """A plan and what it rests on."""

    plan: Plan
    layouts: Sequence[Layout]
    experience: Experience
    took: Took


def plan_for(
    target: ModelFolder,
    drafters: Sequence[ModelFolder],
    texts: Collection[str],
    setting: Setting,
    *,
    measures_anew: bool,
    memory_limit: int | None = None,
    report: Report = lambda line: None,
) -> Planned:
    """Plan with what is known of this machine. What has to be known and is not is measured, or all of it anew.

    Args:
        texts: What drafts from the text, and auto for what of these pays.
        memory_limit: Bytes that a process may hold in all.

    Raises:
        VocabularyMismatch: A drafter has too few of the target's tokens.
        ManifestError: Lookahead is asked for and the target cannot run trees.
        MemoryExhausted: The target does not fit.
    """
    memory = _memory([target, *drafters], setting, partial(headroom, memory_limit), report)
    if "lookahead" in texts:
        tree_manifest(target.manifest, setting.device)
    for drafter in drafters:
        translation(target, drafter, report)
    placements = Placements(
        target=target,
        drafters=drafters,
        setting=setting,
        longest=_longest(memory, target, drafters, setting),
        report=report,
        unopened=_unopened(target, drafters, setting, report),
    )
    layouts, took = placements.layouts(measures_anew=measures_anew)
    past = read_experience(target.folder, report) if target.manifest.files else Experience()
    plan = make_plan(
        target.manifest,
        {drafter.manifest.name: drafter.manifest for drafter in drafters},
        layouts,
        past.chances,
        memory,
        _heard(texts, target, setting, layouts[0]),
    )
    return Planned(plan, layouts, past, took)


def _memory(models: Sequence[ModelFolder], setting: Setting, free: Headroom, report: Report) -> Memory:
    """Of the places where models of a setting lie, less a reserve.

    Raises:
        MemoryExhausted: The first of the models, the target, does not fit its place at the shortest context.
    """
    devices = {each.name: each.memory for each in (setting.device, setting.drafter_device)}
    places = Places(devices.values(), free, report)
    rooms, sizes = places(), {model.manifest.name: weights_bytes(model) for model in models}

    def needed(manifest: Manifest, context: int, device: str) -> Bytes:
        need = need_of(manifest, sizes[manifest.name], context)
        return placed(need, places.of(devices[device]), rooms)

    manifest = models[0].manifest
    least = need_of(manifest, sizes[manifest.name], SHORTEST_CONTEXT)
    expect_rooms(manifest.name, least, places.of(setting.device.memory), rooms)
    return Memory(needed, {at: room.free_bytes - RESERVE_BYTES for at, room in rooms.items()})


def _lacking(memory: Memory, target: Manifest, drafter: Manifest | None, setting: Setting, context: int) -> str:
    """What there is too little of for a target at a context and a drafter as foreseen; nothing if all fits."""
    parts = [memory.needed(target, context, setting.device.name)]
    if drafter is not None:
        parts.append(memory.needed(drafter, FORESEEN_TOKENS, setting.drafter_device.name))
    return shortage(total(parts), memory.free_bytes, context)


def _longest(memory: Memory, target: ModelFolder, drafters: Sequence[ModelFolder], setting: Setting) -> int:
    """Of the texts behind which passes are measured: what there is room for beside each drafter."""
    beside: Sequence[Manifest | None] = [drafter.manifest for drafter in drafters] or [None]
    for length in (LONGEST >> i for i in range(4)):
        if not any(_lacking(memory, target.manifest, drafter, setting, length) for drafter in beside):
            return length
    return SHORTEST_CONTEXT


def _unopened(
    target: ModelFolder, drafters: Sequence[ModelFolder], setting: Setting, report: Report
) -> list[ModelFolder]:
    """Drafters for which there is no room beside the target now, whatever the limit that is planned for."""
    memory = _memory([target, *drafters], setting, headroom, lambda line: None)
    found = []
    for drafter in drafters:
        if lacking := _lacking(memory, target.manifest, drafter.manifest, setting, FORESEEN_TOKENS):
            report(f"{drafter.manifest.name} is not measured beside {target.manifest.name}: {lacking}")
            found.append(drafter)
    return found


def _heard(texts: Collection[str], target: ModelFolder, setting: Setting, layout: Layout) -> list[str]:
    """What drafts from the text, in the order in which load() has it heard."""
    heard = set(texts)
    if "auto" in texts:
        pays = can_run_trees(target.manifest, setting.device) and fitting(layout.profile.costs()) is not None
        heard |= {"suffix", "lookahead"} if pays else {"suffix"}
    return [name for name in ("ngram", "suffix", "lookahead") if name in heard]
