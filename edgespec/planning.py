"""From model folders to a plan: what was measured of them on this machine, and the memory that there is."""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import NamedTuple

from edgespec.budget import FORESEEN_TOKENS, RESERVE_BYTES, filled_need, need_of, placed, total
from edgespec.drafting import translation
from edgespec.experience import Experience, read_experience
from edgespec.headroom import headroom
from edgespec.ladder import Bytes
from edgespec.lookahead import fitting
from edgespec.manifest import Manifest
from edgespec.opening import ModelFolder, weights_bytes
from edgespec.placements import Placements
from edgespec.planner import Layout, Memory, Plan, make_plan, shortage
from edgespec.profile import Took
from edgespec.profiling import LONGEST
from edgespec.runtimes.tree import can_run_trees, tree_manifest
from edgespec.setting import Setting
from edgespec.space import Space, space_for

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
    _known(target, report)  # damage is told here, before what was measured is read in several places
    space = space_for(target, setting, partial(headroom, memory_limit), report)
    if "lookahead" in texts:
        tree_manifest(target.manifest, setting.device)
    for drafter in drafters:
        translation(target, drafter, report)
    placements = Placements(
        target=target,
        drafters=drafters,
        setting=setting,
        longest=_longest(target, drafters, space),
        report=report,
        unopened=_unopened(target, drafters, setting, report),
    )
    layouts, took = placements.layouts(measures_anew=measures_anew)
    past = _known(target)
    plan = make_plan(
        target.manifest,
        {drafter.manifest.name: drafter.manifest for drafter in drafters},
        layouts,
        past.chances,
        _memory([target, *drafters], setting, space),
        _heard(texts, target, setting, layouts[0]),
    )
    return Planned(plan, layouts, past, took)


def _known(target: ModelFolder, report: Report = lambda line: None) -> Experience:
    return read_experience(target.folder, report) if target.manifest.files else Experience()


def _memory(models: Sequence[ModelFolder], setting: Setting, space: Space) -> Memory:
    """What models take with a context that is full, and what there is, less a reserve."""
    sizes = {model.manifest.name: weights_bytes(model) for model in models}
    places = {setting.drafter_device.name: space.drafter_place, setting.device.name: space.target_place}

    def needed(manifest: Manifest, context: int, device: str) -> Bytes:
        return placed(filled_need(manifest, sizes[manifest.name], context), places[device], space.rooms)

    return Memory(needed, _free(space))


def _free(space: Space) -> Bytes:
    return {place: room.free_bytes - RESERVE_BYTES for place, room in space.rooms.items()}


def _lacking(target: ModelFolder, drafter: ModelFolder | None, space: Space, num_tokens: int) -> str:
    """What there is too little of to open both, with num_tokens in the target's cache; nothing if all fits."""
    parts = [placed(need_of(target.manifest, weights_bytes(target), num_tokens), space.target_place, space.rooms)]
    if drafter is not None:
        need = need_of(drafter.manifest, weights_bytes(drafter))
        parts.append(placed(need, space.drafter_place, space.rooms))
    return shortage(total(parts), _free(space), num_tokens)


def _longest(target: ModelFolder, drafters: Sequence[ModelFolder], space: Space) -> int:
    """Of the texts behind which passes are measured: what there is room for beside each drafter."""
    lengths = [LONGEST >> i for i in range(4)]
    beside: Sequence[ModelFolder | None] = drafters or [None]
    fitting = (n for n in lengths if not any(_lacking(target, drafter, space, n) for drafter in beside))
    return next(fitting, lengths[-1])


def _unopened(
    target: ModelFolder, drafters: Sequence[ModelFolder], setting: Setting, report: Report
) -> list[ModelFolder]:
    """Drafters for which there is no room beside the target now, whatever the limit that is planned for."""
    space = space_for(target, setting, headroom, lambda line: None)
    found = []
    for drafter in drafters:
        if lacking := _lacking(target, drafter, space, FORESEEN_TOKENS):
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
