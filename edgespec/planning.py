"""From model folders to a plan: what was measured of them on this machine, and the memory that there is."""

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from edgespec.budget import FORESEEN_TOKENS, RESERVE_BYTES, expect_room, need_of
from edgespec.drafting import translation
from edgespec.experience import Experience, read_experience
from edgespec.headroom import Room, headroom
from edgespec.lookahead import fitting
from edgespec.opening import ModelFolder, weights_bytes
from edgespec.placements import Placements, Took
from edgespec.planner import Layout, Memory, Plan, make_plan
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
    room = headroom(memory_limit)
    expect_room(target.manifest.name, need_of(target.manifest, weights_bytes(target)), room)
    if "lookahead" in texts:
        tree_manifest(target.manifest, setting.device)
    for drafter in drafters:
        translation(target, drafter, report)
    placements = Placements(
        target=target,
        drafters=drafters,
        setting=setting,
        longest=_longest(target, drafters, room),
        report=report,
    )
    layouts, took = placements.layouts(measures_anew=measures_anew)
    past = read_experience(target.folder, report) if target.manifest.files else Experience()
    sizes = {model.manifest.name: weights_bytes(model) for model in (target, *drafters)}
    memory = Memory(
        lambda manifest, context: need_of(manifest, sizes[manifest.name], context).within(room),
        dict.fromkeys((setting.device.name, setting.drafter_device.name), room.free_bytes - RESERVE_BYTES),
    )
    plan = make_plan(
        target.manifest,
        {drafter.manifest.name: drafter.manifest for drafter in drafters},
        layouts,
        past.chances,
        memory,
        _heard(texts, target, setting, layouts[0]),
    )
    return Planned(plan, layouts, past, took)


def _longest(target: ModelFolder, drafters: Sequence[ModelFolder], room: Room) -> int:
    """Of the texts behind which passes are measured: what there is room for beside a drafter."""
    needed = [need_of(model.manifest, weights_bytes(model)).within(room) for model in drafters]
    whole = need_of(target.manifest, weights_bytes(target), LONGEST).within(room) + max(needed, default=0)
    return LONGEST if whole + RESERVE_BYTES <= room.free_bytes else FORESEEN_TOKENS


def _heard(texts: Collection[str], target: ModelFolder, setting: Setting, layout: Layout) -> list[str]:
    """What drafts from the text, in the order in which load() has it heard."""
    heard = set(texts)
    if "auto" in texts:
        pays = can_run_trees(target.manifest, setting.device) and fitting(layout.profile.costs()) is not None
        heard |= {"suffix", "lookahead"} if pays else {"suffix"}
    return [name for name in ("ngram", "suffix", "lookahead") if name in heard]
