"""The composition root: from what a user names to an engine with its decoders and drafter."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import NoneType

from edgespec import genai
from edgespec.chat_template import read_template
from edgespec.draft_length import DraftLength, FixedLength, MeasuredLength
from edgespec.drafters import ModelDrafter, NgramDrafter, NoDrafter
from edgespec.engine import Engine
from edgespec.errors import ModelError, UsageError
from edgespec.home import ModelHome, default_home
from edgespec.manifest import FILE_NAME, Manifest, read_manifest, verify_files
from edgespec.pair import DRAFTER, TARGET, PairCheck, expect_same_tokens, part_of_pair, read_pair
from edgespec.runtimes import foreign
from edgespec.runtimes.devices import Device, find_device
from edgespec.runtimes.onnx import OnnxDecoder
from edgespec.runtimes.static import StaticDecoder
from edgespec.template_process import TemplateProcess
from edgespec.tokenizer import Tokenizer
from edgespec.types import Decoder, Drafter
from edgespec.vocab_subset import SubsetDecoder, read_subset

_NAMED = ("auto", "none", "ngram", "self")
_NOT_YET = ("suffix", "lookahead")
_MAX_THREADS = 512
_LONGEST_DRAFT = 64


def load(
    model: str | Path,
    *,
    drafter: str = "auto",
    draft_length: int | str = "auto",
    device: str = "auto",
    drafter_device: str = "auto",
    num_threads: int | None = None,
    deterministic: bool = False,
    offline: bool = False,
    home: str | Path | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> Engine:
    """Load a model, preparing it first if need be.

    Args:
        model: A model folder, a pair folder, a name of the catalogue, a .gguf file, a safetensors folder or a hub
            id (org/name).
        drafter: auto, none, ngram, self, or a model like the first argument. auto is the drafter of a pair folder
            where it pays, and else ngram; self is the graph of fewer layers in the model's own folder.
        draft_length: Tokens a draft, or auto to measure what pays.
        device: Where the target runs: auto or cpu.
        drafter_device: Where a model drafter runs.
        num_threads: Of the target; all physical cores unless given.
        deterministic: Never run a pass of one token, so that text is equal to the byte whatever drafts.
        offline: Never connect.
        home: The model home; EDGESPEC_HOME or the platform's data folder unless given.
        report: Takes one line per stage of a preparation.

    Raises:
        ModelError: The model is missing or invalid, or the drafter has other tokens.
        IntegrityError: A file differs from its recorded hash.
        DeviceUnavailable: No execution provider for the device.
    """
    length = _draft_length(draft_length)
    for name, value in (("drafter", drafter), ("device", device), ("drafter_device", drafter_device)):
        if not isinstance(value, str):
            raise UsageError(f"{name} is {value!r}; wanted a text")
    if not isinstance(deterministic, bool):
        raise UsageError(f"deterministic is {deterministic!r}; wanted True or False")
    if num_threads is not None and not (type(num_threads) is int and 1 <= num_threads <= _MAX_THREADS):
        raise UsageError(f"the number of threads is {num_threads!r}; wanted 1 to {_MAX_THREADS}")
    if not isinstance(home, (str, Path, NoneType)):
        raise UsageError(f"home is {home!r}; wanted a folder")
    if drafter in _NOT_YET:
        raise UsageError(
            f"drafter '{drafter}' is not available in this version; use auto, none, ngram, self or a model"
        )
    # What can be known before fetching and exporting is checked before.
    places = (find_device(device), find_device(drafter_device))
    models = ModelHome(Path(home) if home else default_home(), offline, report)
    folder = models.resolve(str(model))
    if (pair := read_pair(folder)) is not None:
        folder, drafter = folder / TARGET, _drafter_of(folder, pair, drafter, report)
    manifest = read_any_manifest(folder, report)
    if manifest.vocab_subset:
        raise ModelError(f"{manifest.name} is a drafter whose head was trimmed; use it with --drafter {model}")
    draft_folder = None if drafter in _NAMED else part_of_pair(models.resolve(drafter), DRAFTER)
    draft_manifest = read_any_manifest(draft_folder, report) if draft_folder else None
    if draft_folder and draft_manifest and draft_manifest.vocab_sha256 != manifest.vocab_sha256:
        tokenizers = _tokenizer(folder, manifest), _tokenizer(draft_folder, draft_manifest)
        expect_same_tokens(*tokenizers, (manifest.name, draft_manifest.name))
    renderer = TemplateProcess()
    if manifest.chat_template:
        renderer.start()
    is_alone = draft_folder is None and drafter != "self"
    target = _load_decoder(folder, manifest, places[0], num_threads, deterministic, not is_alone)
    tokenizer = _tokenizer(folder, manifest)
    template = _chat_template(folder, manifest)
    chosen: Drafter = NoDrafter() if drafter == "none" else NgramDrafter()
    decoders: list[Decoder] = [target]
    if drafter == "self":
        draft_folder, draft_manifest = folder, _self_drafter(manifest)
    if draft_folder and draft_manifest:
        decoders.append(_load_drafter(draft_folder, draft_manifest, places[1], num_threads))
        chosen = ModelDrafter(decoders[-1], manifest.vocab_size, draft_manifest.name)
    return Engine(
        manifest=manifest,
        tokenizer=tokenizer,
        template=template,
        renderer=renderer,
        decoders=decoders,
        drafter=chosen,
        draft_length=length,
        device_names=(places[0].name, places[1].name),
    )


def _drafter_of(folder: Path, pair: PairCheck, asked: str, report: Callable[[str], None]) -> str:
    """auto is the drafter of the pair where it pays."""
    if asked != "auto":
        return asked
    if pair.pays:
        return str(folder / DRAFTER)
    report(f"drafting by n-gram: {pair.verdict} ({pair.reason})")
    return "ngram"


def read_any_manifest(folder: Path, report: Callable[[str], None]) -> Manifest:
    """What a folder states, of edgespec's own or of ONNX Runtime GenAI."""
    if (folder / FILE_NAME).is_file() or not (folder / genai.FILE_NAME).is_file():
        return read_manifest(folder)
    report(f"{folder} was built by ONNX Runtime GenAI and records no hashes: its files are not verified")
    return foreign.inspect(folder, genai.read_genai(folder))


def _chat_template(folder: Path, manifest: Manifest) -> str | None:
    if manifest.source.format == genai.FORMAT:
        return genai.chat_template(folder)
    return read_template(folder / manifest.chat_template) if manifest.chat_template else None


def _decoder_of(manifest: Manifest) -> type[OnnxDecoder] | type[StaticDecoder]:
    return StaticDecoder if manifest.kv_cache.form == "static" else OnnxDecoder


def _load_decoder(
    folder: Path,
    manifest: Manifest,
    device: Device,
    num_threads: int | None,
    deterministic: bool,
    shares_cores: bool,
) -> OnnxDecoder | StaticDecoder:
    """Load the graph while another thread hashes its files; a wrong hash goes before any other error."""
    with ThreadPoolExecutor(1, "hash") as pool:
        verified = pool.submit(verify_files, folder, manifest)
        try:
            decoder = _decoder_of(manifest)(
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
    return replace(manifest, name=name, graph=drafter.graph, kv_cache=cache, vocab_subset=drafter.vocab_subset)


def _load_drafter(folder: Path, manifest: Manifest, device: Device, num_threads: int | None) -> Decoder:
    if manifest.vocab_subset is None:
        return _load_decoder(folder, manifest, device, num_threads, False, True)
    tokens = read_subset(folder / manifest.vocab_subset, manifest.vocab_size)
    trimmed = _load_decoder(folder, replace(manifest, vocab_size=len(tokens)), device, num_threads, False, True)
    return SubsetDecoder(trimmed, tokens, manifest.vocab_size)


def expect_runtime() -> None:
    """Raises DeviceUnavailable: nothing here can run a model."""
    find_device("auto")


def open_decoder(folder: Path, manifest: Manifest) -> OnnxDecoder | StaticDecoder:
    """The model of a folder that has no manifest file yet, for the check of an export."""
    return _decoder_of(manifest)(folder, manifest, find_device("auto"), deterministic=True)


def _draft_length(asked: int | str) -> Callable[[], DraftLength]:
    if asked == "auto":
        return MeasuredLength
    is_number = (isinstance(asked, int) and not isinstance(asked, bool)) or (
        isinstance(asked, str) and asked.isdecimal() and len(asked) < 10
    )
    if not is_number or not 0 <= int(asked) <= _LONGEST_DRAFT:
        raise UsageError(f"draft length is {str(asked)[:40]!r}; wanted auto or 0 to {_LONGEST_DRAFT} tokens")
    num_tokens = int(asked)
    return lambda: FixedLength(num_tokens)


def _tokenizer(folder: Path, manifest: Manifest) -> Tokenizer:
    return Tokenizer(folder / manifest.tokenizer, manifest.bos_token_id, manifest.add_bos)
