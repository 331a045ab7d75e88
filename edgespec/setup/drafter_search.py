"""Looks for everything that could draft for a target, and ranks it. Opens no model and fetches nothing.

What is not prepared on this machine is found as the catalogue and the table of known drafters list it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from edgespec.draft.limits import MAX_PLANNED_TOKENS
from edgespec.errors import EdgeSpecError
from edgespec.manifest import read_manifest
from edgespec.memory.estimate import BYTES_PER_WEIGHT, texts_bytes
from edgespec.memory.free_memory import HOST
from edgespec.runtimes.devices import nvidia_bytes
from edgespec.setup.catalog import CATALOG, KnownDrafter, known_drafters, plain_name
from edgespec.setup.drafter_ranking import PossibleDrafter, Ranking, rank
from edgespec.setup.drafting_target import (
    DraftingCosts,
    DraftingTarget,
    Evidence,
    evidence_of_check,
    evidence_of_report,
    evidence_of_text,
    evidence_of_use,
    no_evidence,
    published_name,
)
from edgespec.setup.foresee import file_bytes, foresee_model
from edgespec.setup.measured_placements import known_layout
from edgespec.setup.open_model import ModelFolder, known_stats, self_drafter, weights_bytes, weights_size
from edgespec.setup.pair import DRAFTER, TARGET, read_pair
from edgespec.setup.row_proof import settle_mode
from edgespec.system.command_line import join_words


def chat_with(target: DraftingTarget, drafter: str) -> str:
    """Use a drafter beside what drafts from the text; drafter: a word of --drafter."""
    return _command("chat", [target.model, "--drafter", drafter], target.devices)


def chat_in(folder: str, target: DraftingTarget) -> str:
    """Use a pair, or a model that has its drafter within."""
    return _command("chat", [folder], target.devices)


def folder_for(target: DraftingTarget, known: KnownDrafter) -> str:
    """A name for the folder of what an export makes of a known drafter."""
    made = {"self": "layers", "train": "own-head", "mtp": "mtp"}.get(known.way)
    return f"{target.short_name}-{made}" if made else f"pair-{plain_name(known.name)}"


def _command(name: str, words: Sequence[str], devices: Mapping[str, str]) -> str:
    flags = [word for option, device in devices.items() for word in (f"--{option}", device)]
    return join_words(["edgespec", *name.split(), *words, *flags])


_LARGEST_SHARE = 0.5  # of the target's weights, that a drafter model may have


def describe_pair(folder: Path, target: DraftingTarget) -> tuple[PossibleDrafter, ModelFolder] | None:
    """The drafter of the pair in a folder, with its check, and in the form for its device.

    None where there is no pair of this target, where it lacks forms for the devices, or is damaged.
    """
    placement = target.placement
    with suppress(EdgeSpecError, OSError):
        if (pair := read_pair(folder)) is None:
            return None
        paths = pair.part(TARGET, placement.device.form), pair.part(DRAFTER, placement.drafter_device.form)
        if paths[0] is None or paths[1] is None:
            return None
        own, drafter = (ModelFolder(path, read_manifest(path)) for path in paths if path)
        within = replace(target, model=str(folder), folder=own, placement=settle_mode(own, placement))
        if target.names.isdisjoint(within.names):
            return None
        check = evidence_of_check(pair, (own, drafter), within.placement)
        return replace(describe_prepared(within, drafter, check), use=chat_in(str(folder), target)), drafter
    return None


def describe_prepared(
    target: DraftingTarget, drafter: ModelFolder, check: Evidence | None = None
) -> PossibleDrafter:
    """A drafter that is ready to be used, but for the command; check: what the check of its pair says."""
    known = evidence_of_use(target.folder, drafter, target.placement) if target.folder else None
    if known is None or (known.basis != "measured" and check is not None):
        known = check or no_evidence(target, _costs_of(target, drafter))
    memory_bytes, obstacle = target.memory_of(drafter.manifest, weights_size(drafter))
    return PossibleDrafter(
        kind="head" if drafter.manifest.head else "model",
        name=drafter.manifest.name,
        **known._asdict(),
        was_run="here" if known.basis != "unknown" else "",
        memory_bytes=memory_bytes,
        obstacle=obstacle,
    )


def _costs_of(target: DraftingTarget, drafter: ModelFolder) -> DraftingCosts | None:
    """Costs of a prepared drafter as measured, or by the bytes that it reads."""
    manifest, placement = drafter.manifest, target.placement
    longest = min(MAX_PLANNED_TOKENS, manifest.most_draft_tokens or MAX_PLANNED_TOKENS)
    layout = known_layout(manifest, placement, known_stats(target.folder)) if target.folder else None
    if layout is None:
        return target.costs_of(weights_bytes(drafter), manifest.tokens_per_pass, longest)
    step = layout.profile.draft_costs(placement.drafter_key(manifest.name)).step
    return target.costs_by_share(step, manifest.tokens_per_pass, longest)


def read_model(path: Path) -> ModelFolder | None:
    """A model folder that edgespec made, and that is no drafting head; None for anything else."""
    with suppress(EdgeSpecError, OSError):
        manifest = read_manifest(path)
        return ModelFolder(path, manifest) if manifest.head is None else None
    return None


def _suits(target: DraftingTarget, drafter: ModelFolder) -> bool:
    """True if to name a model: it was measured here, or is small, in one vocabulary and for the device."""
    if target.folder is None or target.size is None:
        return False
    if known_layout(drafter.manifest, target.placement, known_stats(target.folder)) is not None:
        return True
    manifest = drafter.manifest
    return (
        manifest.form == target.placement.drafter_device.form
        and manifest.vocab_sha256 == target.folder.manifest.vocab_sha256
        and _LARGEST_SHARE * target.size.file_bytes >= weights_bytes(drafter)
    )


_SHARE_OF_LAYERS = (2, 3)  # that a drafter of the target's own layers keeps
_FEWEST_LAYERS = 3
_DOWNLOADED_BYTES = 2  # a weight of a published drafter, in half floats
_STORED = "int8"  # the usual precision of a drafting head
_UNPINNED = "its main branch is downloaded, as no commit is pinned"
_GATED = "the hub asks you to accept its terms"
_TRAINING = "training needs PyTorch, and takes an hour by default"
_NO_SOURCE = "the target has to be exported again, and its source is not known"
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


def describe_listed(target: DraftingTarget, name: str) -> PossibleDrafter:
    """A model of the catalogue that is not prepared."""
    entry = CATALOG[name]
    where = target.placement.drafter_device
    manifest, num_bytes = foresee_model(target.home, name, where.form, nvidia_bytes(where.name))
    memory_bytes, obstacle = target.memory_of(manifest, num_bytes)
    on = {"device": device} if (device := target.devices.get("drafter-device")) else {}
    return PossibleDrafter(
        kind="model",
        name=name,
        evidence=no_evidence(target, target.costs_of(num_bytes)).evidence,
        was_run=entry.was_run,
        download_bytes=entry.fetch_bytes,
        disk_bytes=file_bytes(entry),
        memory_bytes=memory_bytes,
        note=_GATED if entry.is_gated else "",
        get=_command("models pull", [name, "--no-drafter"], on),
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
    manifest = target.size.manifest.of_layers(range(kept))
    if not manifest.kv_cache.attention_layers:
        return None  # an export refuses such a drafter
    memory_bytes, obstacle = target.memory_of(manifest, kept_bytes)
    output = folder_for(target, known)
    on = {"device": device} if (device := target.devices.get("device")) else {}
    return PossibleDrafter(
        kind=known.kind,
        name=f"{kept} of its {num_layers} layers",
        evidence=no_evidence(target, target.costs_of(kept_bytes)).evidence,
        disk_bytes=target.size.file_bytes,
        memory_bytes=memory_bytes,
        get=_command("export", [*target.source.words, "--keep-layers", f"0-{kept - 1}", "--output", output], on),
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
        like_target = size.manifest.of_layers(range(num_layers))
        manifest = replace(like_target, precision=_STORED, gathered_bytes=0, half_bytes=0)
        memory_bytes, obstacle = target.memory_of(manifest, stored_bytes)
    found = PossibleDrafter(
        kind=known.kind,
        name=known.name,
        **known_gain._asdict(),
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
    train = _command("train", [target.model, "--output", head], {})
    return replace(found, get=f"{train}\n{found.get}") if found.get else found


def _with_export(
    found: PossibleDrafter, target: DraftingTarget, known: KnownDrafter, drafter: str
) -> PossibleDrafter:
    """A drafter that is exported with its target, with the commands, or with what forbids that."""
    if known.kind == "head" and target.size is not None and target.size.manifest.form == "npu":
        return replace(found, obstacle=_NO_STATES)
    if target.source is None:
        return replace(found, obstacle=_NO_SOURCE)
    output = folder_for(target, known)
    # The usual precision of a model is that of its files, which are floats; of a head it is 8 bits.
    precision = ["--drafter-precision", "int8"] if known.kind == "model" else []
    words = [*target.source.words, "--drafter", drafter, *precision, "--output", output]
    get = _command("export", words, target.devices)
    return replace(found, get=get, use=chat_in(output, target))


def rank_drafters(target: DraftingTarget, pairs: Iterable[Path], named: Mapping[str, ModelFolder]) -> Ranking:
    """Rank what drafts from the text, models, heads and the target's own layers.

    Args:
        pairs: Folders that may be pairs of the target.
        named: Drafter models that the user has named, by their words of --drafter.
    """
    placement = target.placement
    found, paired = [], []
    for folder in pairs:
        if (pair := describe_pair(folder, target)) is not None:
            found.append(pair[0])
            paired.append(pair[1])
    found += [*_find_models(target, paired, named), *_find_known(target, paired)]
    return Ranking(
        model=target.model,
        target=target.folder.manifest.name if target.folder else target.model,
        device=placement.device.name,
        drafter_device=placement.drafter_device.name,
        has_costs=target.profile is not None,
        drafters=rank(found),
    )


def _find_models(
    target: DraftingTarget, paired: Iterable[ModelFolder], named: Mapping[str, ModelFolder]
) -> Iterator[PossibleDrafter]:
    """Models of this machine, and smaller ones of the catalogue; paired: Drafters that are in pairs already."""
    form, family = target.placement.drafter_device.form, smaller_of_family(target.names)
    prepared = {name: path for name in sorted(family) if (path := target.home.find(name, form)) is not None}
    chosen = {name: model for name, path in prepared.items() if (model := read_model(path)) is not None}
    found = {model.folder: (word, model) for word, model in {**chosen, **named}.items()}
    for path in sorted(target.home.models.glob("[!.]*")):
        if path not in found and (drafter := read_model(path)) is not None and _suits(target, drafter):
            found[path] = (path.name, drafter)
    left_out = {drafter.folder for drafter in paired} | ({target.folder.folder} if target.folder else set())
    for path, (word, model) in found.items():
        if path not in left_out:
            yield replace(describe_prepared(target, model), use=chat_with(target, f"auto+{word}"))
    for name in sorted(family - chosen.keys()):
        yield describe_listed(target, name)


def _find_known(target: DraftingTarget, paired: Iterable[ModelFolder]) -> Iterator[PossibleDrafter]:
    """Known drafters of a target, but for those that are in a pair already."""
    imported = {drafter.manifest.source.repository for drafter in paired}
    for known in known_drafters():
        if known.name in imported or not known.drafts_for(target.names):
            continue
        if (found := describe_known(target, known)) is not None:
            yield found
