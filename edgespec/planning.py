"""From model folders to a plan: what was measured of them on this machine, and the memory that there is."""

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from edgespec.budget import FORESEEN_TOKENS, RESERVE_BYTES, expect_room, need_of
from edgespec.drafting import translation
from edgespec.experience import Experience, read_experience
from edgespec.headroom import headroom
from edgespec.lookahead import fitting
from edgespec.manifest import Manifest
from edgespec.opening import ModelFolder, weights_bytes
from edgespec.placements import Placements
from edgespec.planner import SHORTEST_CONTEXT, Layout, Memory, Plan, make_plan
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
    room = headroom(memory_limit)
    sizes = {model.manifest.name: weights_bytes(model) for model in (target, *drafters)}

    def needed(manifest: Manifest, context: int) -> int:
        return need_of(manifest, sizes[manifest.name], context).within(room)

    expect_room(target.manifest.name, need_of(target.manifest, weights_bytes(target), SHORTEST_CONTEXT), room)
    if "lookahead" in texts:
        tree_manifest(target.manifest, setting.device)
    for drafter in drafters:
        translation(target, drafter, report)
    placements = Placements(
        target=target,
        drafters=drafters,
        setting=setting,
        longest=_longest(needed, [target, *drafters], room.free_bytes - RESERVE_BYTES),
        report=report,
        unopened=[drafter for drafter in drafters if not _fits_beside(target, drafter, report)],
    )
    layouts, took = placements.layouts(measures_anew=measures_anew)
    past = read_experience(target.folder, report) if target.manifest.files else Experience()
    memory = Memory(
        needed, dict.fromkeys((setting.device.name, setting.drafter_device.name), room.free_bytes - RESERVE_BYTES)
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


def _longest(needed: Callable[[Manifest, int], int], models: Sequence[ModelFolder], free_bytes: int) -> int:
    """Of the texts behind which passes are measured: what there is room for beside the largest drafter."""
    target, *drafters = (model.manifest for model in models)
    beside = max((needed(drafter, FORESEEN_TOKENS) for drafter in drafters), default=0)
    lengths = (LONGEST >> i for i in range(4))
    return next((length for length in lengths if needed(target, length) + beside <= free_bytes), SHORTEST_CONTEXT)


def _fits_beside(target: ModelFolder, drafter: ModelFolder, report: Report) -> bool:
    """Both can be opened now, whatever the limit that is planned for."""
    room = headroom()
    needed_bytes = sum(need_of(each.manifest, weights_bytes(each)).within(room) for each in (target, drafter))
    if needed_bytes + RESERVE_BYTES <= room.free_bytes:
        return True
    report(
        f"{drafter.manifest.name} is not measured beside {target.manifest.name}: they need {needed_bytes >> 20} "
        f"MiB, and {room.free_bytes >> 20} are free within {room.bound}"
    )
    return False


def _heard(texts: Collection[str], target: ModelFolder, setting: Setting, layout: Layout) -> list[str]:
    """What drafts from the text, in the order in which load() has it heard."""
    heard = set(texts)
    if "auto" in texts:
        pays = can_run_trees(target.manifest, setting.device) and fitting(layout.profile.costs()) is not None
        heard |= {"suffix", "lookahead"} if pays else {"suffix"}
    return [name for name in ("ngram", "suffix", "lookahead") if name in heard]
