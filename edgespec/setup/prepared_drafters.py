"""Drafters that are prepared on this machine: models, pairs of a target, and what is known of them here.

With them the commands by which a user gets a drafter for a target, and uses it.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from edgespec.draft.limits import MAX_PLANNED_TOKENS
from edgespec.errors import EdgeSpecError
from edgespec.manifest import read_manifest
from edgespec.setup.catalog import KnownDrafter, plain_name
from edgespec.setup.drafter_ranking import PossibleDrafter
from edgespec.setup.drafting_target import (
    DraftingCosts,
    DraftingTarget,
    Evidence,
    ExportSource,
    evidence_of_check,
    evidence_of_use,
    no_evidence,
)
from edgespec.setup.foresee import ModelSize
from edgespec.setup.measured_placements import known_layout
from edgespec.setup.open_model import ModelFolder, known_stats, weights_bytes, weights_size
from edgespec.setup.pair import DRAFTER, TARGET, Pair, read_pair
from edgespec.setup.row_proof import settle_placement
from edgespec.system.command_line import join_words


def chat_with(target: DraftingTarget, drafter: str) -> str:
    """Use a drafter beside what drafts from the text; drafter: a word of --drafter."""
    return _command("chat", [target.model, "--drafter", drafter], target.devices)


def chat_in(folder: str, target: DraftingTarget) -> str:
    """Use a pair, or a model that has its drafter within."""
    return _command("chat", [folder], target.devices)


def pull_command(target: DraftingTarget, name: str) -> str:
    """Download and prepare a model of the catalogue as a drafter."""
    on = {"device": device} if (device := target.devices.get("drafter-device")) else {}
    return _command("models pull", [name, "--no-drafter"], on)


def export_pair_command(
    target: DraftingTarget, source: ExportSource, drafter: str, output: str, *, is_model: bool
) -> str:
    """Export a target with a drafter into one folder; is_model: the drafter runs by itself."""
    # The usual precision of a model is that of its files, which are floats; of a head it is 8 bits.
    precision = ["--drafter-precision", "int8"] if is_model else []
    words = [*source.words, "--drafter", drafter, *precision, "--output", output]
    return _command("export", words, target.devices)


def export_layers_command(target: DraftingTarget, source: ExportSource, num_layers: int, output: str) -> str:
    """Export a target with a graph of its first layers."""
    on = {"device": device} if (device := target.devices.get("device")) else {}
    return _command("export", [*source.words, "--keep-layers", f"0-{num_layers - 1}", "--output", output], on)


def train_command(target: DraftingTarget, output: str) -> str:
    """Train a drafting head for a target."""
    return _command("train", [target.model, "--output", output], {})


def folder_for(target: DraftingTarget, known: KnownDrafter) -> str:
    """A name for the folder of what an export makes of a known drafter."""
    made = {"self": "layers", "train": "own-head", "mtp": "mtp"}.get(known.way)
    return f"{target.short_name}-{made}" if made else f"pair-{plain_name(known.name)}"


def _command(name: str, words: Sequence[str], devices: Mapping[str, str]) -> str:
    flags = [word for option, device in devices.items() for word in (f"--{option}", device)]
    return join_words(["edgespec", *name.split(), *words, *flags])


_LARGEST_SHARE = 0.5  # of the target's weights, that a drafter model may have


@dataclass(frozen=True, kw_only=True)
class OwnPair:
    """A pair of the target that is looked at, in the forms of its devices.

    target: The target as the pair has it, and the pair's name in commands.
    """

    pair: Pair
    target: DraftingTarget
    own: ModelFolder
    drafter: ModelFolder


def read_own_pair(folder: Path, target: DraftingTarget) -> OwnPair | None:
    """The pair in a folder; None where it is none of this target, lacks forms for the devices, or is damaged."""
    placement = target.placement
    with suppress(EdgeSpecError, OSError):
        if (pair := read_pair(folder)) is None:
            return None
        paths = pair.part(TARGET, placement.device.form), pair.part(DRAFTER, placement.drafter_device.form)
        if paths[0] is None or paths[1] is None:
            return None
        own, drafter = (ModelFolder(path, read_manifest(path)) for path in paths if path)
        source = own.manifest.source
        if target.names.isdisjoint(plain_name(name) for name in (source.name, source.repository) if name):
            return None
        size = ModelSize(manifest=own.manifest, file_bytes=weights_bytes(own))
        placement = settle_placement(own, placement)
        within = replace(target, model=str(folder), folder=own, size=size, placement=placement)
        return OwnPair(pair=pair, target=within, own=own, drafter=drafter)
    return None


def describe_pair(found: OwnPair) -> PossibleDrafter:
    """The drafter of a pair, with its check."""
    check = evidence_of_check(found.pair, (found.own, found.drafter), found.target.placement)
    described = describe_prepared(found.target, found.drafter, check)
    return replace(described, use=chat_in(str(found.pair.folder), found.target))


def describe_model(target: DraftingTarget, drafter: ModelFolder, word: str) -> PossibleDrafter:
    """A drafter model by its word of --drafter."""
    return replace(describe_prepared(target, drafter), use=chat_with(target, f"auto+{word}"))


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
        basis=known.basis,
        gain=known.gain,
        num_draft=known.num_draft,
        evidence=known.evidence,
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


def find_models(
    target: DraftingTarget, folders: Mapping[Path, str], named: Mapping[str, ModelFolder]
) -> dict[Path, tuple[str, ModelFolder]]:
    """Models that may draft for a target, by their folders, each with its word of --drafter.

    Args:
        folders: All model folders of the home, by which word each is to be called.
        named: Those that the user or the catalogue names, whatever they are.
    """
    found = {folder.folder: (word, folder) for word, folder in named.items()}
    for path, word in folders.items():
        if path not in found and (drafter := read_model(path)) is not None and _suits(target, drafter):
            found[path] = (word, drafter)
    if target.folder is not None:
        found.pop(target.folder.folder, None)
    return found


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
