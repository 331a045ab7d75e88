"""From a source to a model folder, whole or not at all.

`export_model` is the one entry; a source is a GGUF file or a local Hugging Face folder.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np
import onnx_ir as ir
from tokenizers import Tokenizer

from edgespec.errors import SourceError, UsageError
from edgespec.export.card import NAME, model_card
from edgespec.export.check import NUM_STEPS, TEXT, compare, judge, one_row_difference
from edgespec.export.drafting import Drafting, expect_few, frequent_tokens
from edgespec.export.families import DecoderConfig
from edgespec.export.graphs import DRAFT_HEAD, build_graphs
from edgespec.export.output import Report, expect_nothing, folder_in_the_making
from edgespec.export.plan import Plan, num_weights, plan_export
from edgespec.export.precision import BLOCK_SIZES, FORMS, PRECISIONS, Rule
from edgespec.export.progress import Progress
from edgespec.export.reference import reference_logits
from edgespec.export.sources import LoadedSource, read_source
from edgespec.export.static_graph import build_static_graph
from edgespec.export.tensors import StoredTensor
from edgespec.export.vocabulary import Vocabulary
from edgespec.export.weights import WeightsFile
from edgespec.manifest import Check, KVCache, Manifest, SelfDrafter, Signature, file_record, write_manifest
from edgespec.parts import as_text
from edgespec.tokenizer import in_words, vocabulary_sha256
from edgespec.types import Decoder, Logits, Range, TokenIds


class OpenDecoder(Protocol):
    """Loads the model of a folder that has no manifest file yet."""

    def __call__(self, folder: Path, manifest: Manifest, *, deterministic: bool = True) -> Decoder: ...


class MeasureRanges(Protocol):
    """Runs a static graph over a text; ranges of each NAME whose NAME.low and NAME.high it gives.

    The folder has a tokenizer and a chat template, and no manifest file yet.
    """

    def __call__(self, graph: Path, folder: Path, manifest: Manifest) -> dict[str, Range]: ...


# Their residual streams go beyond 65504, where half floats end.
_LARGE_ACTIVATIONS = ("gemma2", "gemma3")
VOCAB_SUBSET = "vocab_subset.npy"
# Every position costs a static form its share of each pass.
_STATIC_CONTEXT, _STATIC_PREFILL = 1024, 64
_CACHE_DTYPES = {"w8a16": "uint16"}
_OBSERVED = "observed.onnx"  # in the folder while its ranges are measured


def export_model(
    source: Path,
    output: Path,
    *,
    name: str | None = None,
    precision: str = "source",
    block_size: int = 32,
    form: str = "cpu",
    drafting: Drafting = Drafting(),  # noqa: B008  frozen
    hidden_layers: tuple[int, ...] = (),
    repository: str | None = None,
    revision: str | None = None,
    license: str | None = None,
    open_decoder: OpenDecoder | None = None,
    measure_ranges: MeasureRanges | None = None,
    report: Report = lambda line: None,
) -> Manifest:
    """Convert source into a model folder at output.

    The folder is written beside its place under a temporary name and moved there complete. One process at a time
    exports to an output; others wait for it.

    Args:
        source: A .gguf file, or a folder with config.json, tokenizer.json and safetensors weights.
        output: Must not exist.
        name: What the manifest calls the model; as the folder unless given.
        precision: One of PRECISIONS; auto picks one and reports why.
        block_size: How many weights share a scale where they are rounded anew, one of BLOCK_SIZES.
        form: What kind of device it is laid out for, one of FORMS.
        drafting: What to make for drafting beside the model, or of it.
        hidden_layers: Layers whose hidden states the graph gives too.
        repository: Where the source was fetched from, for the manifest.
        revision: The commit or release of that repository.
        license: Of that repository, where the source itself states none.
        open_decoder: Loads a finished folder; given, the export is checked against its source with it.
        measure_ranges: Finds the ranges of activations; w8a16 cannot do without.
        report: Takes one line a stage.

    Raises:
        UsageError: The precision is unknown, or output is in the way.
        SourceError: The source is missing, broken, foreign or unsupported.
        ExportMismatch: The check failed.
        DiskFull: No room for the folder.
    """
    if block_size not in BLOCK_SIZES:
        raise UsageError(f"block size is {block_size}; choose one of {', '.join(map(str, BLOCK_SIZES))}")
    expect_nothing(output)
    report(f"reading {source}")
    is_checked = open_decoder is not None
    loaded, plan = plan_source(source, precision, form, drafting, hidden_layers, is_checked=is_checked)
    if precision == "w8a16" and measure_ranges is None:
        raise UsageError("w8a16 needs what measures the ranges of activations; give measure_ranges")
    if open_decoder is not None and drafting.num_tokens and not drafting.layers(loaded.config.num_layers):
        raise UsageError("a model with a trimmed head cannot be checked against its source; leave the check out")
    origin = replace(
        loaded.source, repository=repository, revision=revision, license=loaded.source.license or license
    )
    loaded = replace(loaded, source=origin)
    if plan.reason:
        report(f"chose {plan.precision} precision: {plan.reason}")
    is_half = (form == "gpu" and plan.precision != "fp32") or (form == "npu" and plan.precision == "fp16")
    rule = Rule(plan.precision, block_size, is_half, num_weights(loaded), has_fused_products=form == "cpu")
    with folder_in_the_making(output, plan.write_bytes, report) as folder:
        if loaded.num_left_out:
            report(f"leaving out {loaded.num_left_out} tensors that see images; the export reads text")
        report(f"writing {loaded.config.num_layers} layers in {plan.precision} precision")
        manifest = _describe(name or as_text(output.name), loaded, rule, form, drafting, hidden_layers)
        progress = Progress(plan.write_bytes, report)
        if measure_ranges is None or rule.precision != "w8a16":
            _write(folder, loaded, rule, manifest, drafting, progress)
        else:
            _write_quantised(folder, loaded, rule, manifest, measure_ranges, progress, report)
        report("hashing")
        manifest = replace(manifest, files={path.name: file_record(path) for path in sorted(folder.iterdir())})
        if open_decoder is not None:
            report("checking against the source")
            manifest = replace(manifest, check=_checked(loaded, manifest, folder, open_decoder))
        return finish(folder, manifest)


def plan_source(
    source: Path,
    precision: str,
    form: str = "cpu",
    drafting: Drafting = Drafting(),  # noqa: B008  frozen
    hidden_layers: tuple[int, ...] = (),
    *,
    is_checked: bool = False,
) -> tuple[LoadedSource, Plan]:
    """Read a source, and what its export would take; arguments and errors as in export_model."""
    if precision not in PRECISIONS:
        raise UsageError(f"unknown precision '{precision}'; choose one of {', '.join(PRECISIONS)}")
    drafting.expect_sound()
    precision = _form_precision(form, precision, drafting, hidden_layers)
    loaded = read_source(source)
    _expect_possible(loaded, form, precision, drafting, hidden_layers)
    return loaded, plan_export(loaded, precision, form=form, is_checked=is_checked)


def _form_precision(form: str, precision: str, drafting: Drafting, hidden_layers: tuple[int, ...]) -> str:
    """What a form makes of a precision.

    Raises:
        UsageError: The form is unknown, or cannot be had like this.
    """
    if form not in FORMS:
        raise UsageError(f"unknown form '{form}'; choose one of {', '.join(FORMS)}")
    if form != "npu":
        if precision == "w8a16":
            raise UsageError("w8a16 is a precision of the npu form; add --form npu, or choose --precision int8")
        return precision
    if drafting != Drafting() or hidden_layers:
        raise UsageError("the npu form has no drafters and no hidden states; leave these options out")
    if precision not in ("auto", "source", "fp16", "fp32", "w8a16"):
        raise UsageError(f"the npu form holds fp16, fp32 or w8a16, not {precision}; choose one of these")
    return precision if precision in ("fp32", "w8a16") else "fp16"


def _expect_possible(
    loaded: LoadedSource,
    form: str,
    precision: str,
    drafting: Drafting,
    hidden_layers: tuple[int, ...],
) -> None:
    """Raises UsageError: this model cannot be exported like this."""
    config = loaded.config
    drafting.layers(config.num_layers)
    if drafting.num_tokens:
        expect_few(drafting.num_tokens, loaded.vocabulary.eos_token_ids, _head(loaded).rows)
    if hidden_layers and max(hidden_layers) >= config.num_layers:
        raise UsageError(
            f"hidden states of layer {max(hidden_layers)} of a model that has 0 to {config.num_layers - 1}"
        )
    is_half = form != "cpu" and precision != "fp32"  # in w8a16 within norms
    if is_half and config.architecture in _LARGE_ACTIVATIONS:
        raise UsageError(
            f"activations of {config.architecture} exceed what fp16 holds; use --form cpu, or --precision fp32"
        )


def finish(folder: Path, manifest: Manifest) -> Manifest:
    """Write what tells of the rest: the card, and the manifest with its hash."""
    card = folder / NAME
    card.write_text(model_card(manifest), encoding="utf-8")
    manifest = replace(manifest, files={**manifest.files, NAME: file_record(card)})
    write_manifest(folder, manifest)
    return manifest


def _checked(loaded: LoadedSource, manifest: Manifest, folder: Path, open_decoder: OpenDecoder) -> Check:
    tokenizer = Tokenizer.from_str(loaded.vocabulary.tokenizer_json)
    with in_words(loaded.source.name, SourceError, "it cannot be used"):
        ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
    tokens = np.array(ids, np.int32)[: manifest.context_length]
    reference = reference_logits(loaded.config, loaded.tensors, tokens)
    check = checked(lambda steady: open_decoder(folder, manifest, deterministic=steady), tokens, reference)
    judge(check, manifest.precision, is_half=manifest.kv_cache.dtype == "float16")
    return check


def checked(open_decoder: Callable[[bool], Decoder], tokens: TokenIds, reference: Logits) -> Check:
    """The exported model against logits of its source.

    Args:
        open_decoder: Loads it, told whether every row is to be the same to the bit whatever the pass.
        tokens: [num_tokens].
        reference: Logits of the source for these, [num_tokens, vocab_size].
    """
    decoder = open_decoder(True)
    check = compare(decoder, tokens, reference)
    some = tokens[: len(tokens) // 2]
    if len(some) < 2:  # a context of three tokens
        return check
    rows = decoder.logits(some, min(NUM_STEPS, len(some) - 1)).copy()
    del decoder  # one at a time is in memory
    return replace(check, one_row_difference=one_row_difference(open_decoder(False), some, rows))


def check_ids(name: str, vocabulary: Vocabulary, size: int, tokenizer: Tokenizer) -> None:
    """Raises SourceError: ids past the embedding's size, which would read whatever lies behind it."""
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
    ends = [("eos", token) for token in vocabulary.eos_token_ids]
    for what, token in [("largest", largest), ("bos", vocabulary.bos_token_id), *ends]:
        if token is not None and not 0 <= token < size:
            raise SourceError(
                f"{name}: the {what} token id of its tokenizer is {token}, "
                f"but its embedding has {size} rows; tokenizer and weights do not belong together"
            )


def _write(
    folder: Path,
    loaded: LoadedSource,
    rule: Rule,
    manifest: Manifest,
    drafting: Drafting,
    progress: Callable[[int], None],
) -> None:
    """All files but those that tell of the rest."""
    tensors = {**loaded.tensors, **_drafting_head(folder, loaded, drafting)}
    with WeightsFile(folder / manifest.weights, progress) as weights:
        graphs = build_graphs(manifest, loaded.config, tensors, weights, rule)
    for file, graph in graphs.items():
        ir.save(graph, folder / file)
    _write_text(folder, loaded, manifest)


def _write_quantised(
    folder: Path,
    loaded: LoadedSource,
    rule: Rule,
    manifest: Manifest,
    measure_ranges: MeasureRanges,
    progress: Callable[[int], None],
    report: Report,
) -> None:
    """The same in w8a16: a graph over the finished weights tells the ranges that those of the folder have."""
    _write_text(folder, loaded, manifest)
    observed = folder / _OBSERVED
    with WeightsFile(folder / manifest.weights, progress) as weights:
        graph = build_static_graph(
            loaded.config,
            loaded.tensors,
            weights,
            rule,
            num_tokens=manifest.prefill_tokens,
            capacity=manifest.context_length,
        )
        ir.save(graph, observed)
        weights.flush()
        report("measuring the ranges of activations")
        ranges = measure_ranges(observed, folder, manifest)
        graphs = build_graphs(manifest, loaded.config, loaded.tensors, weights, rule, ranges)
    observed.unlink()
    for file, model in graphs.items():
        ir.save(model, folder / file)


def _write_text(folder: Path, loaded: LoadedSource, manifest: Manifest) -> None:
    """Tokenizer and chat template."""
    (folder / manifest.tokenizer).write_text(loaded.vocabulary.tokenizer_json, encoding="utf-8")
    if manifest.chat_template:
        template = loaded.vocabulary.chat_template or ""
        (folder / manifest.chat_template).write_text(template, encoding="utf-8")


def _describe(
    name: str, loaded: LoadedSource, rule: Rule, form: str, drafting: Drafting, hidden_layers: tuple[int, ...]
) -> Manifest:
    """The manifest of a folder that is to be made, without what its files come to."""
    config, vocabulary = loaded.config, loaded.vocabulary
    tokenizer = Tokenizer.from_str(vocabulary.tokenizer_json)
    check_ids(loaded.source.name, vocabulary, config.vocab_size, tokenizer)
    kept_layers = drafting.layers(config.num_layers)
    subset = VOCAB_SUBSET if drafting.num_tokens else None
    is_drafter = subset is not None and kept_layers is None
    windows = {layer.sliding_window for layer in config.layers if layer.sliding_window}
    manifest = Manifest(
        name=name,
        architecture=config.architecture,
        precision=rule.precision,
        form=form,
        context_length=config.context_length,
        kv_cache=KVCache(
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=_CACHE_DTYPES.get(rule.precision, "float16" if rule.is_half else "float32"),
        ),
        vocab_size=config.vocab_size,
        vocab_sha256=vocabulary_sha256(tokenizer),
        bos_token_id=vocabulary.bos_token_id,
        eos_token_ids=vocabulary.eos_token_ids,
        add_bos=vocabulary.add_bos,
        source=loaded.source,
        # A drafter's rows are read whole: how sure it is says how far it goes.
        signature=Signature(best="best" if form == "gpu" and not is_drafter else None),
        chat_template="chat_template.jinja" if vocabulary.chat_template else None,
        tree_graph=None if is_drafter else "model_tree.onnx",
        sliding_window=min(windows, default=None),
        hidden_layers=hidden_layers,
        self_drafter=SelfDrafter(graph="model_draft.onnx", layers=kept_layers, vocab_subset=subset)
        if kept_layers
        else None,
        vocab_subset=subset if is_drafter else None,
    )
    return _static(manifest, config) if form == "npu" else manifest


def _static(manifest: Manifest, config: DecoderConfig) -> Manifest:
    context_length = min(config.context_length, _STATIC_CONTEXT)
    return replace(
        manifest,
        context_length=context_length,
        kv_cache=replace(manifest.kv_cache, form="static"),
        tree_graph=None,
        prefill_graph="model_prefill.onnx",
        prefill_tokens=min(_STATIC_PREFILL, context_length),
    )


def _head(loaded: LoadedSource) -> StoredTensor:
    return loaded.tensors.get("head", loaded.tensors["embedding"])


def _drafting_head(folder: Path, loaded: LoadedSource, drafting: Drafting) -> dict[str, StoredTensor]:
    """Rows of the head for frequent tokens, and the file that lists these."""
    if drafting.num_tokens is None:
        return {}
    assert drafting.corpus is not None
    text = drafting.corpus.read_text(encoding="utf-8", errors="replace")
    tokenizer = Tokenizer.from_str(loaded.vocabulary.tokenizer_json)
    head = _head(loaded)
    tokens = frequent_tokens(tokenizer, text, drafting.num_tokens, loaded.vocabulary.eos_token_ids, head.rows)
    np.save(folder / VOCAB_SUBSET, tokens)
    return {DRAFT_HEAD: replace(head, rows=len(tokens), row_order=tokens.astype(np.intp))}
