"""The composition root: from what a user names to an engine with its decoders and drafter."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import NoneType
from typing import NamedTuple

from edgespec import genai
from edgespec.acceptance import equality
from edgespec.chances import Key
from edgespec.chat_template import read_template
from edgespec.costs import PassCosts, measure
from edgespec.cross_vocabulary import (
    RespelledDrafter,
    TranslatedDecoder,
    Translation,
    expect_shared_tokens,
    shared_share,
    translation,
)
from edgespec.drafters import ModelDrafter, NgramDrafter
from edgespec.engine import Engine
from edgespec.errors import ModelError, UsageError
from edgespec.experience import Experience, read_experience, write_experience
from edgespec.home import ModelHome, default_home
from edgespec.lookahead import SMALLEST, Lookahead, Window, fitting
from edgespec.manifest import FILE_NAME, Manifest, read_manifest, verify_files
from edgespec.memory import Memory, MemoryDrafter
from edgespec.pair import DRAFTER, TARGET, PairCheck, have_same_tokens, part_of_pair, read_pair
from edgespec.rejection import rejection
from edgespec.runtimes import foreign
from edgespec.runtimes.devices import Device, find_device, import_onnxruntime, machine_key
from edgespec.runtimes.onnx import OnnxDecoder
from edgespec.runtimes.static import StaticDecoder
from edgespec.runtimes.tree import OnnxTreeDecoder, can_run_trees, tree_manifest
from edgespec.speculation import Speculation
from edgespec.suffix import SuffixDrafter
from edgespec.template_process import TemplateProcess
from edgespec.tokenizer import Tokenizer
from edgespec.types import Decoder, Drafter
from edgespec.vocab_subset import SubsetDecoder, read_subset

_NAMED = ("auto", "none", "ngram", "suffix", "lookahead", "self")
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
            self is the graph of fewer layers in the model's own folder.
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
    _expect_kinds(
        {"acceptance": acceptance, "drafter": drafter, "device": device, "drafter_device": drafter_device},
        str,
        "a text",
    )
    if acceptance not in _ACCEPTANCES:
        raise UsageError(f"acceptance is {acceptance!r}; wanted {' or '.join(_ACCEPTANCES)}")
    _expect_kinds({"deterministic": deterministic, "memory": memory}, bool, "True or False")
    _expect_kinds({"home": home}, (str, Path, NoneType), "a folder")
    _expect_threads(num_threads)
    # What can be known before fetching and exporting is checked before.
    places = (find_device(device), find_device(drafter_device))
    asked = drafter
    models = ModelHome(Path(home or default_home()), offline, report)
    target, draft = _find(models, str(model), drafter)
    translate = _translation(target, draft, report) if draft is not None else None
    renderer = TemplateProcess()
    if target.manifest.chat_template:
        renderer.start()
    takes_turns = draft is not None
    setting = (places[0], num_threads, deterministic)
    window = _window(asked, length, target, setting, report)
    decoders: list[Decoder] = [_load_decoder(target, *setting, takes_turns, has_trees=window is not None)]
    lasting: list[Drafter] = []
    kept = _memory(models, target.manifest) if memory and asked in ("auto", "suffix") else None
    if kept is not None:
        lasting.append(MemoryDrafter(kept))
    if draft is not None:
        decoders.append(_load_drafter(draft, places[1], num_threads, translate))
        model_drafter = ModelDrafter(decoders[-1], target.manifest.vocab_size, draft.manifest.name)
        lasting.append(
            RespelledDrafter(model_drafter, tokenizer_of(*target), translate.target)
            if translate
            else model_drafter
        )
    return Engine(
        manifest=target.manifest,
        tokenizer=tokenizer_of(*target),
        template=_chat_template(target),
        renderer=renderer,
        decoders=decoders,
        speculation=replace(
            _speculation(
                lambda: [*_from_text(asked, window), *lasting],
                length and window.depth if window else length,
                decoders[0],
                target,
                setting,
                report,
            ),
            accept=_ACCEPTANCES[acceptance],
        ),
        memory=kept,
        device_names=(places[0].name, places[1].name),
    )


class _Found(NamedTuple):
    """A model folder and what it states."""

    folder: Path
    manifest: Manifest


def _expect_kinds(settings: dict[str, object], kind: type | tuple[type, ...], wanted: str) -> None:
    for name, value in settings.items():
        if not isinstance(value, kind):
            raise UsageError(f"{name} is {value!r}; wanted {wanted}")


def _expect_threads(num_threads: int | None) -> None:
    if num_threads is not None and not (type(num_threads) is int and 1 <= num_threads <= _MAX_THREADS):
        raise UsageError(f"the number of threads is {num_threads!r}; wanted 1 to {_MAX_THREADS}")


def _find(models: ModelHome, model: str, drafter: str) -> tuple[_Found, _Found | None]:
    """The target, and the model that drafts for it if one does.

    Raises:
        ModelError: One of them is missing or invalid, or cannot serve in its part.
    """
    folder = models.resolve(model)
    if (pair := read_pair(folder)) is not None:
        drafter = _drafter_of(folder, pair, drafter, models.report)
    folder = part_of_pair(folder, TARGET)
    target = _Found(folder, read_any_manifest(folder, models.report))
    if target.manifest.vocab_subset:
        raise ModelError(
            f"{target.manifest.name} is a drafter whose head was trimmed; use it with --drafter {model}"
        )
    if drafter == "self":
        return target, _Found(folder, _self_drafter(target.manifest))
    if drafter in _NAMED:
        return target, None
    folder = part_of_pair(models.resolve(drafter), DRAFTER)
    return target, _Found(folder, read_any_manifest(folder, models.report))


def _translation(target: _Found, draft: _Found, report: Callable[[str], None]) -> Translation | None:
    """What makes the drafter one of the target's tokens; None where its tokens are those.

    Raises:
        VocabularyMismatch: It has too few of them.
    """
    if draft.manifest.vocab_sha256 == target.manifest.vocab_sha256:
        return None
    found = translation_between(
        (tokenizer_of(*target), tokenizer_of(*draft)),
        target.manifest.vocab_size,
        (target.manifest.eos_token_ids, draft.manifest.eos_token_ids),
        (target.manifest.name, draft.manifest.name),
    )
    if found is None:
        return None
    translate, share = found
    report(
        f"{draft.manifest.name} has another vocabulary than {target.manifest.name} and drafts the {share:.0%} of "
        "the tokens of ordinary text that it has too"
    )
    return translate


def translation_between(
    tokenizers: tuple[Tokenizer, Tokenizer],
    vocab_size: int,
    ends: tuple[Sequence[int], Sequence[int]],
    names: tuple[str, str],
) -> tuple[Translation, float] | None:
    """What makes a drafter one of the target's tokens, and the share of these that it has; None if all.

    Args:
        tokenizers: Of target and drafter, as are ends and names.
        vocab_size: Of the target.

    Raises:
        VocabularyMismatch: It has too few of them.
    """
    if have_same_tokens(*tokenizers):
        return None
    translate = translation(*tokenizers, vocab_size, ends)
    share = shared_share(translate, tokenizers[0])
    expect_shared_tokens(share, names)
    return translate, share


def _drafter_of(folder: Path, pair: PairCheck, asked: str, report: Callable[[str], None]) -> str:
    """auto is the drafter of the pair where it pays."""
    if asked != "auto":
        return asked
    if pair.pays:
        return str(folder / DRAFTER)
    report(f"drafting without the pair's drafter: {pair.verdict} ({pair.reason})")
    return "auto"


def read_any_manifest(folder: Path, report: Callable[[str], None]) -> Manifest:
    """What a folder states, of edgespec's own or of ONNX Runtime GenAI."""
    if (folder / FILE_NAME).is_file() or not (folder / genai.FILE_NAME).is_file():
        return read_manifest(folder)
    report(f"{folder} was built by ONNX Runtime GenAI and records no hashes: its files are not verified")
    return foreign.inspect(folder, genai.read_genai(folder))


def _chat_template(model: _Found) -> str | None:
    folder, manifest = model
    if manifest.source.format == genai.FORMAT:
        return genai.chat_template(folder)
    return read_template(folder / manifest.chat_template) if manifest.chat_template else None


def _decoder_of(manifest: Manifest) -> type[OnnxDecoder] | type[StaticDecoder]:
    return StaticDecoder if manifest.kv_cache.form == "static" else OnnxDecoder


def _load_decoder(
    model: _Found,
    device: Device,
    num_threads: int | None,
    deterministic: bool,
    shares_cores: bool,
    *,
    has_trees: bool = False,
) -> OnnxDecoder | StaticDecoder | OnnxTreeDecoder:
    """Load the graph while another thread hashes its files; a wrong hash goes before any other error."""
    folder, manifest = model
    kind = OnnxTreeDecoder if has_trees else _decoder_of(manifest)
    with ThreadPoolExecutor(1, "hash") as pool:
        verified = pool.submit(verify_files, folder, manifest)
        try:
            decoder = kind(
                folder,
                manifest,
                device,
                num_threads=num_threads,
                deterministic=deterministic,
                shares_cores=shares_cores,
            )
        finally:
            verified.result()
    if not manifest.files:  # nobody has vouched for the graph
        foreign.probe(decoder, manifest.context_length)
    return decoder


def _self_drafter(manifest: Manifest) -> Manifest:
    """The graph of fewer layers in the model's own folder, as a manifest of its own."""
    drafter = manifest.self_drafter
    if drafter is None:
        raise UsageError(
            f"{manifest.name} has no drafter of its own layers; export it with --keep-layers or --skip-layers"
        )
    cache = replace(manifest.kv_cache, num_layers=len(drafter.layers))
    name = f"{len(drafter.layers)} layers of {manifest.name}"
    return replace(
        manifest,
        name=name,
        graph=drafter.graph,
        kv_cache=cache,
        vocab_subset=drafter.vocab_subset,
        hidden_layers=(),
    )


def _load_drafter(
    model: _Found, device: Device, num_threads: int | None, translate: Translation | None
) -> Decoder:
    decoder = _load_own(model, device, num_threads)
    return decoder if translate is None else TranslatedDecoder(decoder, translate)


def _load_own(model: _Found, device: Device, num_threads: int | None) -> Decoder:
    """A drafter over its own vocabulary."""
    folder, manifest = model
    if manifest.vocab_subset is None:
        return _load_decoder(model, device, num_threads, False, True)
    tokens = read_subset(folder / manifest.vocab_subset, manifest.vocab_size)
    trimmed = _Found(folder, replace(manifest, vocab_size=len(tokens)))
    return SubsetDecoder(_load_decoder(trimmed, device, num_threads, False, True), tokens, manifest.vocab_size)


def expect_runtime() -> None:
    """Raises DeviceUnavailable: nothing here can run a model."""
    find_device("auto")


def providers() -> list[str]:
    """Execution providers of the ONNX Runtime that is installed.

    Raises:
        DeviceUnavailable: It is not sound.
    """
    return list(import_onnxruntime().get_available_providers())


def open_decoder(folder: Path, manifest: Manifest, *, deterministic: bool = True) -> OnnxDecoder | StaticDecoder:
    """The model of a folder that has no manifest file yet, for the check of an export."""
    return _decoder_of(manifest)(folder, manifest, find_device("auto"), deterministic=deterministic)


def _speculation(
    drafters: Callable[[], Sequence[Drafter]],
    length: int | None,
    decoder: Decoder,
    target: "_Found",
    setting: tuple[Device, int | None, bool],
    report: Callable[[str], None],
) -> Speculation:
    """With what was learned of this model on this machine; costs of passes are measured the first time."""
    if length is not None or not drafters():
        return Speculation(drafters, length)
    folder, machine = target.folder, machine_key(*setting)
    is_ours = bool(target.manifest.files)  # nothing is written into a folder that others made
    known = read_experience(folder, report) if is_ours else Experience()
    ratios = known.ratios.get(machine)
    if ratios is None:
        report("measuring passes of several widths, once for this machine")
        ratios = measure(decoder).ratios

    def save(ratios: Mapping[int, float], past: Mapping[Key, tuple[float, float]]) -> None:
        if is_ours:
            known = read_experience(folder, report)
            write_experience(folder, Experience({**known.ratios, machine: ratios}, {**known.chances, **past}))

    save(ratios, {})
    return Speculation(drafters, None, ratios, known.chances, save)


def _memory(models: ModelHome, manifest: Manifest) -> Memory:
    return Memory(models.path / "memory", manifest.name, manifest.vocab_sha256, models.report)


def _window(
    asked: str,
    length: int | None,
    target: _Found,
    setting: tuple[Device, int | None, bool],
    report: Callable[[str], None],
) -> Window | None:
    """Of lookahead decoding, where it is asked for, or can pay by what is known of passes on this machine.

    Raises:
        ManifestError: It is asked for and the target cannot run trees.
    """
    folder, manifest = target
    if asked == "lookahead":
        tree_manifest(manifest, setting[0])
    elif asked != "auto" or length is not None or not can_run_trees(manifest, setting[0]):
        return None
    ratios = read_experience(folder, report).ratios.get(machine_key(*setting))
    window = fitting(PassCosts(dict(ratios))) if ratios else None
    if asked == "auto":
        return window
    window = window or SMALLEST
    return window._replace(size=length + 1) if length else window


def _from_text(drafter: str, window: Window | None) -> list[Drafter]:
    """The drafters of one answer: they hold its text."""
    drafters: list[Drafter] = []
    if drafter == "ngram":
        drafters.append(NgramDrafter())
    if drafter in ("auto", "suffix"):
        drafters.append(SuffixDrafter())
    if window is not None:
        drafters.append(Lookahead(window))
    return drafters


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


def tokenizer_of(folder: Path, manifest: Manifest) -> Tokenizer:
    """The tokenizer of a model folder."""
    return Tokenizer(folder / manifest.tokenizer, manifest.bos_token_id, manifest.add_bos)
