"""Looks for everything that could draft for a target, and ranks it. Opens no model and fetches nothing.

What is not prepared on this machine is found as the catalogue and the table of known drafters list it.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from edgespec.draft.limits import MAX_PLANNED_TOKENS
from edgespec.manifest import Manifest
from edgespec.memory.estimate import BYTES_PER_WEIGHT, texts_bytes
from edgespec.memory.free_memory import HOST
from edgespec.setup.catalog import CATALOG, KNOWN_DRAFTERS, KnownDrafter, plain_name
from edgespec.setup.drafter_ranking import PossibleDrafter, Ranking, rank
from edgespec.setup.drafting_target import (
    DraftingTarget,
    evidence_of_report,
    evidence_of_text,
    no_evidence,
    published_name,
)
from edgespec.setup.foresee import file_bytes, foresee_model
from edgespec.setup.home import ModelHome
from edgespec.setup.open_model import ModelFolder, self_drafter
from edgespec.setup.prepared_drafters import (
    OwnPair,
    chat_in,
    chat_with,
    describe_model,
    describe_pair,
    describe_prepared,
    export_layers_command,
    export_pair_command,
    find_models,
    folder_for,
    pull_command,
    read_model,
    read_own_pair,
    train_command,
)

_SHARE_OF_LAYERS = (2, 3)  # that a drafter of the target's own layers keeps
_FEWEST_LAYERS = 3
_DOWNLOADED_BYTES = 2  # a weight of a published drafter, in half floats
_STORED = "int8"  # the usual precision of a drafting head
_UNPINNED = "its main branch is downloaded, since no commit of it is pinned"
_GATED = "the hub asks you to accept its terms"
_TRAINING = "training takes PyTorch, and an hour unless you say otherwise"
_NO_SOURCE = "nothing says what the target was made from, and it has to be exported again"
_NO_STATES = "the npu form of a target gives no hidden states"
_NOT_IN_GGUF = "these layers are in the target's safetensors, and its source here is a GGUF file"


def smaller_of_family(names: frozenset[str]) -> set[str]:
    """Models of the catalogue that may draft for one with these names: its drafter, and others that have it."""
    entry = next((each for each in CATALOG.values() if plain_name(published_name(each)) in names), None)
    if entry is None or entry.drafter is None:
        return set()
    return {entry.drafter} | {
        name
        for name, each in CATALOG.items()
        if each.drafter == entry.drafter and 2 * each.num_parameters <= entry.num_parameters
    }


def describe_listed(target: DraftingTarget, home: ModelHome, name: str) -> PossibleDrafter:
    """A model of the catalogue that is not prepared."""
    entry = CATALOG[name]
    manifest, num_bytes = foresee_model(home, name, target.placement.drafter_device.form)
    memory_bytes, obstacle = target.memory_of(manifest, num_bytes)
    return PossibleDrafter(
        kind="model",
        name=name,
        evidence=no_evidence(target, target.costs_of(num_bytes)).evidence,
        was_run=entry.was_run,
        download_bytes=entry.fetch_bytes,
        disk_bytes=file_bytes(entry),
        memory_bytes=memory_bytes,
        note=_GATED if entry.is_gated else "",
        get=pull_command(target, name),
        use=chat_with(target, f"auto+{name}"),
        obstacle=obstacle,
    )


def describe_known(target: DraftingTarget, known: KnownDrafter) -> PossibleDrafter | None:
    """A known drafter for a target that it was made for; None where it would be of no use."""
    describe = {"text": _describe_text, "self": _describe_layers, "import": _describe_import}
    found = describe.get(known.way, _describe_made)(target, known)
    reported = "; ".join(each.statement for each in known.reported)
    return found and replace(found, kind=known.kind, reported=reported, was_run=known.was_run)


def _describe_text(target: DraftingTarget, known: KnownDrafter) -> PossibleDrafter:
    memory_bytes = texts_bytes(target.size.manifest, frozenset({known.name})) if target.size else None
    return PossibleDrafter(
        kind=known.kind,
        name=known.name,
        evidence=evidence_of_text(target, known.name),
        memory_bytes=memory_bytes,
        use=chat_with(target, known.name),
        obstacle=target.find_shortage({HOST: memory_bytes}) if memory_bytes else "",
    )


def _describe_layers(target: DraftingTarget, known: KnownDrafter) -> PossibleDrafter | None:
    """Fewer layers of the target: those that it was exported with, or what an export could keep."""
    if target.folder is not None and target.folder.manifest.self_drafter is not None:
        drafter = ModelFolder(target.folder.folder, self_drafter(target.folder.manifest))
        return replace(describe_prepared(target, drafter), use=chat_with(target, "auto+self"))
    num_layers = target.size.manifest.kv_cache.num_layers if target.size else 0
    if target.size is None or target.source is None or num_layers < _FEWEST_LAYERS:
        return None
    kept = num_layers * _SHARE_OF_LAYERS[0] // _SHARE_OF_LAYERS[1]
    kept_bytes = target.size.file_bytes * kept // num_layers
    memory_bytes, obstacle = target.memory_of(_with_layers(target.size.manifest, kept), kept_bytes)
    output = folder_for(target, known)
    return PossibleDrafter(
        kind=known.kind,
        name=f"{kept} of its {num_layers} layers",
        evidence=no_evidence(target, target.costs_of(kept_bytes)).evidence,
        disk_bytes=target.size.file_bytes,
        memory_bytes=memory_bytes,
        get=export_layers_command(target, target.source, kept, output),
        use=chat_with(replace(target, model=output), "auto+self"),
        obstacle=obstacle,
    )


def _describe_import(target: DraftingTarget, known: KnownDrafter) -> PossibleDrafter | None:
    """A drafter of the hub, which is exported with its target."""
    size, per_weight = target.size, BYTES_PER_WEIGHT[_STORED]
    read_bytes = None if known.num_read is None else per_weight * known.num_read
    if known.kind == "model" and size and read_bytes and read_bytes >= size.file_bytes:
        return None  # it is no smaller than the target
    longest = known.tokens_at_once if known.tokens_at_once > 1 else MAX_PLANNED_TOKENS
    costs = None if read_bytes is None else target.costs_of(read_bytes, known.tokens_at_once, longest)
    known_gain = evidence_of_report(known.report_of(target.names), costs) or no_evidence(target, costs)
    stored_bytes = None if known.num_weights is None else int(per_weight * known.num_weights)
    memory_bytes, obstacle = None, ""
    if size is not None and stored_bytes is not None:
        num_layers = size.manifest.kv_cache.num_layers if known.kind == "model" else 1
        manifest = replace(_with_layers(size.manifest, num_layers), precision=_STORED)
        memory_bytes, obstacle = target.memory_of(manifest, stored_bytes)
    found = PossibleDrafter(
        kind=known.kind,
        name=known.name,
        basis=known_gain.basis,
        gain=known_gain.gain,
        num_draft=known_gain.num_draft,
        evidence=known_gain.evidence,
        download_bytes=None if known.num_weights is None else _DOWNLOADED_BYTES * known.num_weights,
        disk_bytes=size.file_bytes + stored_bytes if size and stored_bytes else None,
        memory_bytes=memory_bytes,
        note=_UNPINNED,
        obstacle=obstacle,
    )
    return _with_export(found, target, known, known.name)


def _describe_made(target: DraftingTarget, known: KnownDrafter) -> PossibleDrafter:
    """A head that is trained here, or that lies in the target's checkpoint."""
    found = PossibleDrafter(
        kind=known.kind, name=known.name, evidence=no_evidence(target, None).evidence, disk_bytes=None
    )
    if known.way != "train":
        is_gguf = target.source is not None and ".gguf" in target.source.source.lower()
        return _with_export(replace(found, obstacle=_NOT_IN_GGUF if is_gguf else ""), target, known, known.way)
    head = f"{target.short_name}-head"
    found = _with_export(replace(found, note=_TRAINING), target, known, head)
    return replace(found, get=f"{train_command(target, head)} && {found.get}") if found.get else found


def _with_export(
    found: PossibleDrafter, target: DraftingTarget, known: KnownDrafter, drafter: str
) -> PossibleDrafter:
    """A drafter that is exported with its target, with the commands, or with what forbids that."""
    if known.kind == "head" and target.size is not None and target.size.manifest.form == "npu":
        return replace(found, obstacle=_NO_STATES)
    if target.source is None:
        return replace(found, obstacle=_NO_SOURCE)
    output = folder_for(target, known)
    get = export_pair_command(target, target.source, drafter, output, is_model=known.kind == "model")
    return replace(found, get=get, use=chat_in(output, target))


def _with_layers(manifest: Manifest, num_layers: int) -> Manifest:
    """A manifest that stands for a drafter of so many layers like those of the target."""
    kv_cache = replace(manifest.kv_cache, num_layers=num_layers)
    return replace(manifest, kv_cache=kv_cache, tree_graph=None, hidden_layers=())


def rank_drafters(
    target: DraftingTarget, home: ModelHome, pairs: Iterable[Path], named: Mapping[str, ModelFolder]
) -> Ranking:
    """Rank what drafts from the text, models, heads and the target's own layers.

    Args:
        pairs: Folders that may be pairs of the target.
        named: Drafter models that the user has named, by their words of --drafter.
    """
    placement = target.placement
    own = [pair for folder in pairs if (pair := read_own_pair(folder, target)) is not None]
    found = [*map(describe_pair, own), *_find_models(target, home, own, named), *_find_known(target, own)]
    return Ranking(
        model=target.model,
        target=target.folder.manifest.name if target.folder else target.model,
        device=placement.device.name,
        drafter_device=placement.drafter_device.name,
        has_costs=target.profile is not None,
        drafters=rank(found),
    )


def _find_models(
    target: DraftingTarget, home: ModelHome, pairs: Iterable[OwnPair], named: Mapping[str, ModelFolder]
) -> Iterator[PossibleDrafter]:
    """Models of this machine, and smaller ones of the catalogue."""
    form, family = target.placement.drafter_device.form, smaller_of_family(target.names)
    prepared = {name: path for name in sorted(family) if (path := home.find(name, form)) is not None}
    chosen = {name: model for name, path in prepared.items() if (model := read_model(path)) is not None}
    folders = {path: path.name for path in sorted(home.models.glob("[!.]*"))}
    in_pairs = {pair.drafter.folder for pair in pairs}
    for path, (word, drafter) in find_models(target, folders, {**chosen, **named}).items():
        if path not in in_pairs:
            yield describe_model(target, drafter, word)
    for name in sorted(family - chosen.keys()):
        yield describe_listed(target, home, name)


def _find_known(target: DraftingTarget, pairs: Iterable[OwnPair]) -> Iterator[PossibleDrafter]:
    """Known drafters of a target, but for those that are in a pair already."""
    imported = {pair.drafter.manifest.source.repository for pair in pairs}
    for known in KNOWN_DRAFTERS:
        if known.name in imported or not known.drafts_for(target.names):
            continue
        if (found := describe_known(target, known)) is not None:
            yield found
