"""Which target a drafting head drafts for: the one whose vocabulary and hidden states it was made for."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from edgespec.errors import ModelError, UnsuitedModel, UsageError, VocabularyMismatch
from edgespec.manifest import Manifest
from edgespec.setup.device_choice import source_of
from edgespec.setup.open_model import ModelFolder, read_any_manifest
from edgespec.setup.pair import TARGET, read_pair
from edgespec.system.command_line import quote


def read_whole_model(folder: Path, name: str) -> ModelFolder:
    """The model of a folder that answers by itself; of a pair its target.

    Raises ModelError: There is none, or it cannot serve as a target.
    """
    pair = read_pair(folder)
    found = folder if pair is None else pair.part(TARGET) or folder
    manifest = read_any_manifest(found, lambda line: None)
    require_whole_model(manifest, name)
    return ModelFolder(found, manifest)


def require_whole_model(manifest: Manifest, name: str) -> None:
    """Raises ModelError: The model cannot serve as a target: it is a drafting head, or its head was trimmed."""
    if manifest.head is not None:
        raise ModelError(
            f"{manifest.name} is a drafting head ({manifest.head.method}), which drafts for its target and "
            f"gives no text by itself; name the target, and this with --drafter {quote(name)}"
        )
    if manifest.vocab_subset:
        raise ModelError(f"{manifest.name} is a drafter whose head was trimmed; use it with --drafter {name}")


def require_own_target(target: Manifest, drafters: Sequence[Manifest], text: str | None = None) -> None:
    """Check a drafter model that may be a head.

    Args:
        drafters: The drafter model of the target, and those that draft for it in turn.
        text: The text drafter after these, if any.

    Raises:
        ModelError: It is a head, and the target does not give the hidden states that it reads.
        UnsuitedModel: It gives vectors of texts, and writes none.
        UsageError: A head is part of a cascade.
        VocabularyMismatch: It is a head for another vocabulary.
    """
    if pooled := [drafter.name for drafter in drafters if drafter.pooling]:
        raise UnsuitedModel(
            f"{pooled[0]} was trained to give vectors of texts, and drafts none; choose a drafter that writes"
        )
    if any(drafter.head for drafter in drafters) and (len(drafters) > 1 or text):
        named = next(drafter.name for drafter in drafters if drafter.head)
        raise UsageError(
            f"{named} is a drafting head, for which nothing else drafts, and which drafts for its target alone; "
            "name it by itself, or with a plus, as in HEAD+suffix"
        )
    head = drafters[0].head if drafters else None
    if head is None:
        return
    name = drafters[0].name
    remake = f"make the pair with: edgespec export {quote(source_of(target))} --drafter HEAD --output DIR"
    if drafters[0].vocab_sha256 != target.vocab_sha256:
        raise VocabularyMismatch(
            f"{name} was made for another vocabulary than that of {target.name}, and a drafting head needs its "
            f"own target's; use it with that target, or {remake}, with a head that was made for {target.name}"
        )
    lacking = [layer for layer in head.target_layers if layer not in target.hidden_layers]
    if lacking:
        given = f"those of {_list(target.hidden_layers)}" if target.hidden_layers else "none"
        raise ModelError(
            f"{name} reads the hidden states of layers {_list(head.target_layers)} of its target, and "
            f"{target.name} gives {given}; {remake}, which exports a target that gives them"
        )


def layers_read(drafters: Iterable[Manifest]) -> tuple[int, ...]:
    """Layers of the target whose hidden states some of the drafters read, ascending."""
    return tuple(sorted({layer for drafter in drafters if drafter.head for layer in drafter.head.target_layers}))


def _list(layers: Sequence[int]) -> str:
    return ", ".join(map(str, layers))
