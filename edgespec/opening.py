"""Model folders and what is opened of them: manifests, decoders, tokenizers, templates."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from edgespec import genai
from edgespec.calibration import calibration_texts
from edgespec.cancel import Cancel
from edgespec.chat_template import read_template
from edgespec.errors import UsageError
from edgespec.manifest import FILE_NAME, Manifest, read_manifest, verify_files
from edgespec.prompt_encoder import PromptEncoder
from edgespec.runtimes import foreign
from edgespec.runtimes.devices import Device, find_device, import_onnxruntime
from edgespec.runtimes.onnx import OnnxDecoder
from edgespec.runtimes.ranges import observed_ranges
from edgespec.runtimes.static import StaticDecoder
from edgespec.runtimes.tree import OnnxTreeDecoder
from edgespec.tokenizer import Tokenizer
from edgespec.types import Decoder, Range
from edgespec.vocab_subset import SubsetDecoder, read_subset


class ModelFolder(NamedTuple):
    """A model folder and what it states."""

    folder: Path
    manifest: Manifest


def read_any_manifest(folder: Path, report: Callable[[str], None]) -> Manifest:
    """What a folder states, of edgespec's own or of ONNX Runtime GenAI."""
    if (folder / FILE_NAME).is_file() or not (folder / genai.FILE_NAME).is_file():
        return read_manifest(folder)
    report(f"{folder} was built by ONNX Runtime GenAI and records no hashes: its files are not verified")
    return foreign.inspect(folder, genai.read_genai(folder))


def weights_bytes(model: ModelFolder) -> int:
    """Of its weights file, or of its graph where that holds them; of a graph of fewer layers their share."""
    folder, manifest = model
    weights = folder / manifest.weights
    size = (weights if weights.is_file() else folder / manifest.graph).stat().st_size
    whole = read_manifest(folder).kv_cache.num_layers if manifest.files else manifest.kv_cache.num_layers
    return size * manifest.kv_cache.num_layers // whole


def tokenizer_of(folder: Path, manifest: Manifest) -> Tokenizer:
    """The tokenizer of a model folder."""
    return Tokenizer(folder / manifest.tokenizer, manifest.bos_token_id, manifest.add_bos)


def chat_template_of(model: ModelFolder) -> str | None:
    folder, manifest = model
    if manifest.source.format == genai.FORMAT:
        return genai.chat_template(folder)
    return read_template(folder / manifest.chat_template) if manifest.chat_template else None


def open_model(
    model: ModelFolder,
    device: Device,
    num_threads: int | None,
    deterministic: bool,
    shares_cores: bool,
    *,
    has_trees: bool = False,
    is_verified: bool = False,
    cancel: Cancel | None = None,
) -> OnnxDecoder | StaticDecoder | OnnxTreeDecoder:
    """Load the graph while another thread hashes its files; a wrong hash goes before any other error.

    Ctrl-C ends both at once.

    Args:
        is_verified: Its files were hashed a moment ago, and are not once more.

    Raises:
        Cancelled: It was given up.
    """
    folder, manifest = model
    kind = OnnxTreeDecoder if has_trees else _decoder_of(manifest)
    hashed = replace(manifest, files={}) if is_verified else manifest
    cancel = cancel or Cancel()

    def opened() -> OnnxDecoder | StaticDecoder | OnnxTreeDecoder:
        return kind(
            folder,
            manifest,
            device,
            num_threads=num_threads,
            deterministic=deterministic,
            shares_cores=shares_cores,
            cancel=cancel,
        )

    with ThreadPoolExecutor(2, "edgespec opening") as pool:
        verifying, opening = pool.submit(verify_files, folder, hashed, cancel), pool.submit(opened)
        try:
            verifying.exception()
            opening.exception()
        except BaseException:  # Ctrl-C, which is heard here alone
            cancel.set()
            raise
    verifying.result()
    decoder = opening.result()
    if not manifest.files:  # nobody has vouched for the graph
        foreign.probe(decoder, manifest.context_length)
    elif not manifest.signature.is_plain:  # names that no export gives, which may be at the wrong places
        foreign.probe(decoder, manifest.context_length, foreign.OWN)
    return decoder


def self_drafter(manifest: Manifest) -> Manifest:
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
        tree_graph=None,
        signature=replace(manifest.signature, best=None),
        kv_cache=cache,
        vocab_subset=drafter.vocab_subset,
        hidden_layers=(),
    )


def open_drafter(
    model: ModelFolder,
    device: Device,
    num_threads: int | None,
    deterministic: bool = False,
    *,
    has_trees: bool = False,
    cancel: Cancel | None = None,
) -> Decoder:
    """A drafter over its own vocabulary.

    Raises:
        Cancelled: It was given up.
        UsageError: It is to run trees, and its head was trimmed.
    """
    folder, manifest = model
    if manifest.vocab_subset is None:
        return open_model(model, device, num_threads, deterministic, True, has_trees=has_trees, cancel=cancel)
    if has_trees:
        raise UsageError(
            f"{manifest.name} has a trimmed head and runs no trees; choose another drafter, "
            "or --schedule pipelined"
        )
    tokens = read_subset(folder / manifest.vocab_subset, manifest.vocab_size)
    trimmed = ModelFolder(folder, replace(manifest, vocab_size=len(tokens)))
    decoder = open_model(trimmed, device, num_threads, deterministic, True, cancel=cancel)
    return SubsetDecoder(decoder, tokens, manifest.vocab_size)


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


def measure_ranges(graph: Path, folder: Path, manifest: Manifest, *, prompts: Sequence[str]) -> dict[str, Range]:
    """The ranges of what a static graph tells of, over prompts, for its export in w8a16.

    Raises:
        UsageError: The prompts are too short for one pass.
    """
    template = chat_template_of(ModelFolder(folder, manifest))
    with closing(PromptEncoder(manifest, tokenizer_of(folder, manifest), template)) as encoder:
        texts = calibration_texts(prompts, encoder)
    if not any(len(text) >= manifest.prefill_tokens for text in texts):
        raise UsageError(
            f"the prompts of --calibration have {sum(map(len, texts))} tokens in all, wanted "
            f"{manifest.prefill_tokens} at least; give longer ones"
        )
    return observed_ranges(graph, manifest, texts)


def _decoder_of(manifest: Manifest) -> type[OnnxDecoder] | type[StaticDecoder]:
    return StaticDecoder if manifest.kv_cache.form == "static" else OnnxDecoder
