"""The composition root: from what a user names to an engine with its decoders and drafters."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import NoneType

from edgespec.acceptance import equality
from edgespec.drafter_names import SELF, Cascade, DrafterNames, parse
from edgespec.drafting import cascade, from_text, speculation_of, window_of
from edgespec.engine import Engine
from edgespec.errors import ModelError, UsageError
from edgespec.home import ModelHome, default_home
from edgespec.memory import Memory, MemoryDrafter
from edgespec.opening import (
    ModelFolder,
    chat_template_of,
    open_model,
    read_any_manifest,
    self_drafter,
    tokenizer_of,
)
from edgespec.pair import DRAFTER, TARGET, part_of_pair, read_pair
from edgespec.rejection import rejection
from edgespec.runtimes.devices import find_device
from edgespec.template_process import TemplateProcess
from edgespec.types import Decoder, Drafter

_ACCEPTANCES = {"equality": equality, "rejection": rejection}
_MAX_THREADS = 512
_LONGEST_DRAFT = 64


def load(
    model: str | Path,
    *,
    drafter: str = "auto",
    draft_length: int | str = "auto",
    acceptance: str = "equality",
    device: str = "auto",
    drafter_device: str = "auto",
    num_threads: int | None = None,
    deterministic: bool = False,
    offline: bool = False,
    memory: bool = False,
    home: str | Path | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> Engine:
    """Load a model, preparing it first if need be.

    Args:
        model: A model folder, a pair folder, a name of the catalogue, a .gguf file, a safetensors folder or a hub
            id (org/name).
        drafter: auto, none, ngram, suffix, lookahead, self, or a model like the first argument. auto is what
            pays of the text, the drafter of a pair folder, and lookahead where the costs of passes, once known,
            let it pay. lookahead is the target itself, in passes wide enough for guesses at several places;
            self is the graph of fewer layers in the model's own folder. "suffix+model" hears both each round; in
            "medium,tiny,suffix" each drafts for the one before it.
        draft_length: Tokens a draft, or of a guess of lookahead; auto to measure what pays.
        acceptance: Which drafted tokens stay: equality, with one text for a seed whatever drafts, or rejection,
            which keeps more of what a model drafts at a temperature. The distribution is the target's either way.
        device: Where the target runs: auto or cpu.
        drafter_device: Where a model drafter runs.
        num_threads: Of the target; all physical cores unless given.
        deterministic: Never run a pass of one token, so that text is equal to the byte whatever drafts.
        offline: Never connect.
        memory: Keep the tokens of answers in the model home, and draft from those of earlier sessions, where
            drafter is auto or suffix.
        home: The model home; EDGESPEC_HOME or the platform's data folder unless given.
        report: Takes one line per stage of a preparation.

    Raises:
        ModelError: The model is missing or invalid, or the drafter has too few of its tokens.
        IntegrityError: A file differs from its recorded hash.
        DeviceUnavailable: No execution provider for the device.
    """
    length = _draft_length(draft_length)
    texts: dict[str, object] = {
        "acceptance": acceptance,
        "drafter": drafter,
        "device": device,
        "drafter_device": drafter_device,
    }
    _expect_kinds(texts, str, "a text")
    _expect_kinds({"deterministic": deterministic, "memory": memory}, bool, "True or False")
    _expect_kinds({"home": home}, (str, Path, NoneType), "a folder")
    _expect_threads(num_threads)
    if acceptance not in _ACCEPTANCES:
        raise UsageError(f"acceptance is {acceptance!r}; wanted {' or '.join(_ACCEPTANCES)}")
    # What can be known before fetching and exporting is checked before.
    places = (find_device(device), find_device(drafter_device))
    models = ModelHome(Path(home or default_home()), offline, report)
    target, names = find_models(models, str(model), parse(drafter))
    chains = [
        ([model_drafting(models, target, name) for name in each.models], each.text) for each in names.cascades
    ]
    _expect_distinct([chain[0].manifest.name for chain, _ in chains])
    setting = (places[0], num_threads, deterministic)
    window = window_of(names.simple, length, target, setting, report)
    renderer = TemplateProcess()
    if target.manifest.chat_template:
        renderer.start()
    decoders: list[Decoder] = [open_model(target, *setting, bool(chains), has_trees=window is not None)]
    kept = _memory(models, target, names) if memory else None
    lasting: list[Drafter] = [MemoryDrafter(kept)] if kept else []
    models_drafting: dict[str, Decoder] = {}
    # Equality gives one text whatever is drafted; what rejection keeps hangs on each bit of what was drawn from.
    is_drawn_alike = deterministic and acceptance == "rejection"
    for chain, text in chains:
        model_drafter, opened = cascade(target, chain, text, places[1], num_threads, is_drawn_alike, report)
        decoders += opened
        lasting.append(model_drafter)
        models_drafting[model_drafter.name] = opened[-1]
    speculation = speculation_of(
        lambda: [*from_text(names.simple, window), *lasting],
        length,
        decoders[0],
        models_drafting,
        target,
        setting,
        places[1],
        report,
    )
    return Engine(
        manifest=target.manifest,
        tokenizer=tokenizer_of(*target),
        template=chat_template_of(target),
        renderer=renderer,
        decoders=decoders,
        speculation=replace(speculation, accept=_ACCEPTANCES[acceptance]),
        memory=kept,
        device_names=(places[0].name, places[1].name),
    )


def _memory(models: ModelHome, target: ModelFolder, names: DrafterNames) -> Memory | None:
    """Of earlier answers, where what drafts from the text is heard."""
    if {"auto", "suffix"}.isdisjoint(names.simple):
        return None
    manifest = target.manifest
    return Memory(models.path / "memory", manifest.name, manifest.vocab_sha256, manifest.vocab_size, models.report)


def _expect_kinds(settings: dict[str, object], kind: type | tuple[type, ...], wanted: str) -> None:
    for name, value in settings.items():
        if not isinstance(value, kind):
            raise UsageError(f"{name} is {value!r}; wanted {wanted}")


def _expect_distinct(names: Sequence[str]) -> None:
    """What is learned of a drafter is kept under its name."""
    if twice := [name for name in names if names.count(name) > 1]:
        raise UsageError(f"two of the drafters are called '{twice[0]}'; name it once, or export one as another")


def _expect_threads(num_threads: int | None) -> None:
    if num_threads is not None and not (type(num_threads) is int and 1 <= num_threads <= _MAX_THREADS):
        raise UsageError(f"the number of threads is {num_threads!r}; wanted 1 to {_MAX_THREADS}")


def _draft_length(asked: int | str) -> int | None:
    """Tokens a draft; None to measure what pays."""
    if asked == "auto":
        return None
    is_number = (isinstance(asked, int) and not isinstance(asked, bool)) or (
        isinstance(asked, str) and asked.isdecimal() and len(asked) < 10
    )
    if not is_number or not 0 <= int(asked) <= _LONGEST_DRAFT:
        raise UsageError(f"draft length is {str(asked)[:40]!r}; wanted auto or 0 to {_LONGEST_DRAFT} tokens")
    return int(asked)


def find_models(models: ModelHome, model: str, names: DrafterNames) -> tuple[ModelFolder, DrafterNames]:
    """The target, and what drafts for it: auto hears the drafter of a pair too, where that pays.

    Raises:
        ModelError: It is missing or invalid, or cannot serve as a target.
    """
    folder = models.resolve(model)
    if (pair := read_pair(folder)) is not None and "auto" in names.simple:
        if pair.pays:
            names = names._replace(cascades=(*names.cascades, Cascade((str(folder / DRAFTER),), None)))
        else:
            models.report(f"drafting without the pair's drafter: {pair.verdict} ({pair.reason})")
    folder = part_of_pair(folder, TARGET)
    target = ModelFolder(folder, read_any_manifest(folder, models.report))
    if target.manifest.vocab_subset:
        raise ModelError(
            f"{target.manifest.name} is a drafter whose head was trimmed; use it with --drafter {model}"
        )
    return target, names


def model_drafting(models: ModelHome, target: ModelFolder, name: str) -> ModelFolder:
    if name == SELF:
        return ModelFolder(target.folder, self_drafter(target.manifest))
    folder = part_of_pair(models.resolve(name), DRAFTER)
    return ModelFolder(folder, read_any_manifest(folder, models.report))
