"""Reads and opens what a model folder holds: manifest, decoder, tokenizer, chat template."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar, Unpack

import numpy as np

from edgespec.decoding.decoder import Cache, Can, Decoder, ForwardingDecoder, Pass, Rows
from edgespec.decoding.head_rows import WholeRows
from edgespec.decoding.hidden_states import HiddenStates
from edgespec.errors import ManifestError, ModelError, UsageError
from edgespec.manifest import FILE_NAME, Manifest, read_manifest
from edgespec.memory.estimate import WeightsSize
from edgespec.runtimes import foreign
from edgespec.runtimes.device_size import read_device_size
from edgespec.runtimes.devices import Device, find_device
from edgespec.runtimes.onnx import OnnxDecoder
from edgespec.runtimes.session import SessionOptions
from edgespec.runtimes.tree import OnnxBranchDecoder, OnnxTreeDecoder
from edgespec.setup import genai
from edgespec.setup.profile import LearnedStats, read_learned_stats
from edgespec.system.cancel import Cancel
from edgespec.system.command_line import quote
from edgespec.system.file_hashes import verify_files
from edgespec.system.progress import ReportProgress
from edgespec.text.chat_template import read_template
from edgespec.text.prompt_encoder import PromptEncoder
from edgespec.text.tokenizer import Tokenizer
from edgespec.types import Range, Report, TokenIds

if TYPE_CHECKING:
    from edgespec.draft.cross_vocabulary import Translation


def find_subset(folder: Path, manifest: Manifest) -> TokenIds | None:
    """The token of each row of a model's logits; None where each token has a row. Raises as read_subset does."""
    return (
        None if manifest.vocab_subset is None else read_subset(folder / manifest.vocab_subset, manifest.vocab_size)
    )


def read_subset(path: Path, vocab_size: int) -> TokenIds:
    """Read the token of each row of the head, [num_rows], ascending.

    Raises ManifestError: The file is not such a list.
    """
    try:
        tokens: TokenIds = np.load(path, allow_pickle=False)
    except OSError as error:
        raise ManifestError(f"{path} cannot be read ({error.strerror}); export the model again") from None
    except (ValueError, EOFError):  # numpy's advice is to allow pickles
        raise ManifestError(f"{path} is not a list of tokens; export the model again") from None
    is_list = tokens.ndim == 1 and tokens.dtype == np.int32 and len(tokens) > 0
    if not (is_list and (np.diff(tokens) > 0).all() and tokens[0] >= 0 and tokens[-1] < vocab_size):
        raise ManifestError(f"{path} is not a list of tokens below {vocab_size}; export the model again")
    return tokens


class SubsetDecoder(ForwardingDecoder):
    """A decoder with logits for some tokens; the others get a logit that is never chosen."""

    def __init__(self, decoder: Decoder, tokens: TokenIds, vocab_size: int) -> None:
        super().__init__(decoder)
        self.vocab_size, self._whole = vocab_size, WholeRows(tokens, vocab_size)

    @property
    def can(self) -> Can:
        return self._decoder.can._replace(best=False)

    @property
    def cache(self) -> Cache | None:
        return self._decoder.cache

    def run(self, given: Pass) -> Rows:
        rows = self._decoder.run(given)
        return rows._replace(logits=self._whole(rows.logits))


# Values do not come to more with a longer past; the first position of a text has the largest of all.
_LENGTH = 256
_MOST_TOKENS = 4096


def calibration_texts(prompts: Iterable[str], encoder: PromptEncoder) -> list[TokenIds]:
    """Encode prompts in the chat template, one after the other, cut into texts of up to 256 tokens.

    Raises ConversationError or ModelError: The chat template refuses them, or cannot be rendered.
    """
    encoded: list[TokenIds] = []
    for prompt in prompts:
        encoded.append(encoder.encode(prompt))
        if sum(map(len, encoded)) >= _MOST_TOKENS:
            break
    tokens = np.concatenate(encoded)[:_MOST_TOKENS]
    length = min(_LENGTH, encoder.context_length)
    return [tokens[start : start + length] for start in range(0, len(tokens), length)]


Opened = TypeVar("Opened")
_SIGNAL_S = 0.2


class ModelFolder(NamedTuple):
    folder: Path
    manifest: Manifest

    def within(self, context: int | None) -> "ModelFolder":
        """The model with the context that the user wants, if any. Raises UsageError: It has a shorter one."""
        if context is None:
            return self
        if context > (own := self.manifest.context_length):
            raise UsageError(
                f"context is {context}, but {self.manifest.name} has a context of {own} tokens; give at most that"
            )
        return self._replace(manifest=replace(self.manifest, context_length=context))


def read_folder(folder: Path, report: Report = lambda line: None) -> ModelFolder:
    """Read the manifest of a folder that edgespec or ONNX Runtime GenAI has built."""
    if (folder / FILE_NAME).is_file() or not (folder / genai.FILE_NAME).is_file():
        return ModelFolder(folder, read_manifest(folder))
    report(f"{folder} was built by ONNX Runtime GenAI and records no hashes: its files are not verified")
    return ModelFolder(folder, foreign.inspect(folder, genai.read_genai(folder)))


def require_whole_model(manifest: Manifest, name: str) -> None:
    """Raises ModelError: The model cannot serve as a target: it is a drafting head, or its head was trimmed."""
    if manifest.head is not None:
        raise ModelError(
            f"{manifest.name} is a drafting head ({manifest.head.method}), which writes no text by itself; name "
            f"its target, and the head with --drafter {quote(name)}"
        )
    if manifest.vocab_subset:
        raise ModelError(
            f"{manifest.name} is a drafter whose head was trimmed; use it with --drafter {quote(name)}"
        )


def layers_read(drafters: Iterable[Manifest]) -> tuple[int, ...]:
    """Layers of the target whose hidden states some of the drafters read, ascending."""
    return tuple(sorted({layer for drafter in drafters if drafter.head for layer in drafter.head.target_layers}))


def weights_bytes(model: ModelFolder) -> int:
    """Size of the weights file, or of a graph that holds them; of a graph of fewer layers their share."""
    folder, manifest = model
    weights = folder / manifest.weights
    size = (weights if weights.is_file() else folder / manifest.graph).stat().st_size
    if manifest.head is not None:
        return size
    own = manifest.self_drafter
    if own is None or manifest.graph != own.graph:
        return size
    return size * manifest.kv_cache.num_layers // read_manifest(folder).kv_cache.num_layers


def weights_size(model: ModelFolder) -> WeightsSize:
    """Size of the weights in the file, and on a device if the folder was exported for one with its own memory."""
    file_bytes = weights_bytes(model)
    if model.manifest.form != "gpu":
        return WeightsSize(file_bytes, file_bytes)
    return WeightsSize(file_bytes, *read_device_size(model.folder / model.manifest.graph))


def known_stats(target: ModelFolder, report: Report = lambda line: None) -> LearnedStats:
    """Read costs and rates of a target; nothing in a folder of another program, which is never written."""
    return read_learned_stats(target.folder, report) if target.manifest.is_ours else LearnedStats()


def read_tokenizer(folder: Path, manifest: Manifest) -> Tokenizer:
    """The tokenizer of a model folder; raises ManifestError as Tokenizer does."""
    return Tokenizer(folder / manifest.tokenizer, manifest.bos_token_id, manifest.add_bos)


def read_chat_template(model: ModelFolder) -> str | None:
    """The chat template of a model folder; None where it has none."""
    folder, manifest = model
    if manifest.source.format == genai.FORMAT:
        return genai.chat_template(folder)
    return read_template(folder / manifest.chat_template) if manifest.chat_template else None


def open_model(
    model: ModelFolder,
    device: Device,
    *,
    has_trees: bool = False,
    is_verified: bool = False,
    progress: ReportProgress = lambda progress: None,
    **options: Unpack[SessionOptions],
) -> Decoder:
    """Load the graph while another thread hashes its files; a wrong hash is raised before any other error.

    Ctrl-C ends both at once.

    Args:
        is_verified: Its files were hashed a moment ago, and are not hashed again.
        progress: Takes how much of its files is hashed, from another thread.

    Raises Cancelled: The loading was cancelled.
    """
    manifest = model.manifest
    kind = _decoder_class(manifest, options.get("deterministic", False), has_trees=has_trees)
    open_graph = partial(kind, *model, device)
    decoder = _open_verified(model, open_graph, options, progress, is_verified=is_verified)
    if not manifest.files:  # no hash vouches for the graph
        foreign.probe(decoder)
    elif not manifest.signature.is_plain:  # names that no export gives, which may be swapped
        foreign.probe(decoder, foreign.OWN)
    return decoder


def _open_verified(
    model: ModelFolder,
    open_graph: Callable[..., Opened],
    options: SessionOptions,
    progress: ReportProgress = lambda progress: None,
    *,
    is_verified: bool = False,
) -> Opened:
    """Open by open_graph while another thread hashes the files of a folder."""
    folder, manifest = model
    hashed, cancel = {} if is_verified else manifest.files, options.get("cancel") or Cancel()
    with ThreadPoolExecutor(2, "edgespec opening") as pool:
        try:
            verifying = pool.submit(verify_files, folder, hashed, manifest.name, cancel, progress)
            opening = pool.submit(partial(open_graph, **{**options, "cancel": cancel}))
            # Python handles a signal that comes just as a wait begins only when that wait ends.
            while not (verifying.done() and opening.done()):
                wait([opening], _SIGNAL_S)
                wait([verifying], _SIGNAL_S)
        except BaseException:  # Ctrl-C, which only this thread receives
            cancel.set()
            raise
    verifying.result()
    return opening.result()


def self_drafter(manifest: Manifest) -> Manifest:
    """The manifest of the graph of fewer layers that lies in the model's own folder."""
    drafter = manifest.self_drafter
    if drafter is None:
        raise UsageError(
            f"{manifest.name} has no drafter of its own layers; to make one: edgespec export SOURCE "
            "--keep-layers 0-5 --output DIR"
        )
    return replace(
        manifest.of_layers(drafter.layers),
        name=f"{len(drafter.layers)} layers of {manifest.name}",
        graph=drafter.graph,
        signature=replace(manifest.signature, best=None),
        vocab_subset=drafter.vocab_subset,
    )


def open_drafter(
    model: ModelFolder,
    device: Device,
    hidden_states: HiddenStates | None = None,
    *,
    has_trees: bool = False,
    **options: Unpack[SessionOptions],
) -> Decoder:
    """Open a drafter over its own vocabulary.

    hidden_states: Those that the target's decoder keeps, for a drafting head.

    Raises:
        Cancelled: The loading was cancelled.
        ModelError: A drafting head is for hidden states of another size.
        UsageError: Trees are wanted of a drafter that runs none.
    """
    folder, manifest = model
    options["shares_cores"] = True
    tokens = find_subset(folder, manifest)
    if manifest.head is not None:
        from edgespec.runtimes.heads import open_head  # 20 ms, and few models need it

        assert hidden_states is not None
        open_graph = partial(open_head, *model, device, hidden_states, tokens, has_trees=has_trees)
        return _open_verified(model, open_graph, options)
    if tokens is not None:
        if has_trees:
            raise UsageError(
                f"{manifest.name} has a trimmed head and runs no trees; choose another drafter, "
                "or --schedule pipelined"
            )
        model = ModelFolder(folder, replace(manifest, vocab_size=len(tokens)))
    decoder = open_model(model, device, has_trees=has_trees, **options)
    if tokens is not None:
        decoder = SubsetDecoder(decoder, tokens, manifest.vocab_size)
    if manifest.parallel is None:
        return decoder
    from edgespec.runtimes.parallel import ParallelDecoder

    return ParallelDecoder(decoder, manifest.parallel)


def require_runtime() -> None:
    """Raises DeviceUnavailable: ONNX Runtime is missing or does not load."""
    find_device("auto")


def open_with_states(
    folder: Path, layers: Sequence[int], device: Device | None = None, *, deterministic: bool = False
) -> OnnxDecoder:
    """Open a target that keeps the hidden states after some of its layers; on the CPU where no device is given."""
    return OnnxDecoder(
        folder,
        read_manifest(folder),
        device or find_device("cpu"),
        hidden_layers=tuple(layers),
        deterministic=deterministic,
    )


def open_decoder(folder: Path, manifest: Manifest, *, deterministic: bool = True) -> Decoder:
    """Open a folder that has no manifest file yet, for the check of an export."""
    return _decoder_class(manifest, deterministic)(
        folder, manifest, find_device("auto"), deterministic=deterministic
    )


def measure_ranges(graph: Path, folder: Path, manifest: Manifest, *, prompts: Sequence[str]) -> dict[str, Range]:
    """Measure the ranges of a static graph's values over prompts, for its export in w8a16.

    Raises UsageError: The prompts are too short for one pass.
    """
    from edgespec.runtimes.static import observe_ranges

    template = read_chat_template(ModelFolder(folder, manifest))
    with closing(PromptEncoder(manifest, read_tokenizer(folder, manifest), template)) as encoder:
        texts = calibration_texts(prompts, encoder)
    if not any(len(text) >= manifest.prefill_tokens for text in texts):
        raise UsageError(
            f"the prompts of --calibration have {sum(map(len, texts))} tokens together, and at least "
            f"{manifest.prefill_tokens} are needed; give longer ones"
        )
    return observe_ranges(graph, manifest, texts)


def _decoder_class(manifest: Manifest, deterministic: bool, *, has_trees: bool = False) -> Callable[..., Decoder]:
    if has_trees:
        return OnnxBranchDecoder if deterministic else OnnxTreeDecoder
    if manifest.kv_cache.form != "static":
        return OnnxDecoder
    from edgespec.runtimes.static import StaticDecoder  # 10 ms, and NPUs alone need it

    return StaticDecoder


def load_translation(target: ModelFolder, draft: ModelFolder, report: Report) -> "Translation | None":
    """The translation that a drafter needs; None where its vocabulary is the target's.

    Raises VocabularyMismatch: The drafter has too few of the target's tokens.
    """
    if draft.manifest.vocab_sha256 == target.manifest.vocab_sha256:
        return None
    from edgespec.draft.cross_vocabulary import find_translation

    found = find_translation(
        (read_tokenizer(*target), read_tokenizer(*draft)),
        target.manifest.vocab_size,
        (target.manifest.eos_token_ids, draft.manifest.eos_token_ids),
        (target.manifest.name, draft.manifest.name),
    )
    if found is None:
        return None
    translate, share = found
    report(
        f"{draft.manifest.name} has another vocabulary than {target.manifest.name}: it has {share:.0%} of the "
        "tokens of ordinary text, and drafts only these"
    )
    return translate
