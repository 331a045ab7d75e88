"""From a source, a GGUF file or a local Hugging Face folder, to a model folder, whole or not at all."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
from tokenizers import Tokenizer

from edgespec.errors import PrecisionLoss, SourceError, UsageError
from edgespec.export.card import NAME, model_card
from edgespec.export.drafting import Drafting, frequent_tokens
from edgespec.export.folder_check import OpenDecoder as OpenDecoder
from edgespec.export.folder_check import check_folder
from edgespec.export.graphs import DRAFT_HEAD, build_graphs
from edgespec.export.heads.dialects import is_head
from edgespec.export.layout import VOCAB_SUBSET, describe_model, rule_of
from edgespec.export.output import atomic_folder, require_absent
from edgespec.export.passing_precision import find_passing
from edgespec.export.plan import Plan, can_be_checked, plan_export
from edgespec.export.precision import BLOCK_SIZES, PRECISIONS, Rule
from edgespec.export.progress import Progress
from edgespec.export.sources import LoadedSource, read_source
from edgespec.export.static_graph import build_static_graph
from edgespec.export.supported import require_supported, resolve_precision
from edgespec.export.tensors import StoredTensor
from edgespec.export.vocabulary import Vocabulary
from edgespec.export.weights import WeightsFile
from edgespec.manifest import Manifest, file_record, write_manifest
from edgespec.system.command_line import quote
from edgespec.system.console import show_progress
from edgespec.system.progress import ReportProgress
from edgespec.system.split_files import utf8_name
from edgespec.types import Range, Report

MeasureRanges = Callable[[Path, Path, Manifest], dict[str, Range]]
"""Runs a static graph over a text and finds the range of each NAME by its outputs NAME.low and NAME.high.

Takes the graph, a folder with a tokenizer and a chat template but no manifest file yet, and the manifest.
"""


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
    context_length: int | None = None,
    repository: str | None = None,
    revision: str | None = None,
    license: str | None = None,
    open_decoder: OpenDecoder | None = None,
    is_quick: bool = False,
    measure_ranges: MeasureRanges | None = None,
    report: Report = lambda line: None,
    progress: ReportProgress = lambda progress: None,
) -> Manifest:
    """Convert source into a model folder at output.

    The folder is written beside its place under a temporary name and moved there complete. One process at a time
    exports to an output; others wait for it.

    Args:
        source: A .gguf file, or a folder with config.json, tokenizer.json and safetensors weights.
        name: The name of the model in the manifest; that of the folder unless given.
        precision: One of PRECISIONS; auto picks one and reports why.
        block_size: The number of rounded weights that share a scale, one of BLOCK_SIZES.
        form: The kind of device to lay the graph out for, one of FORMS.
        hidden_layers: Layers whose hidden states the graph outputs too.
        context_length: The longest text in tokens; the model's own length unless given, and with longrope that of
            its first training.
        repository, revision: Where the source was fetched from, and its commit or release, for the manifest.
        license: The licence of that repository, for a source that states none.
        open_decoder: Loads a finished folder; given, the export is compared with its source.
        is_quick: Compare fewer tokens, for a first use.
        measure_ranges: Finds the ranges of activations, which w8a16 needs.
        progress: Takes each step of the writing, in bytes.

    Raises:
        UsageError: The precision is unknown, or output exists already.
        SourceError: The source is missing, damaged or unsupported.
        ExportMismatch: The check failed; PrecisionLoss where another precision passes, which it names.
        DiskFull: There is no room for the folder.
    """

    def export(precision: str, output: Path, report: Report, *, is_quick: bool) -> Manifest:
        report(f"reading {source}")
        show_progress("reading the file's tokenizer and its list of weights")
        loaded, plan = plan_source(
            source,
            precision,
            form,
            drafting,
            hidden_layers,
            block_size=block_size,
            context_length=context_length,
            is_checked=open_decoder is not None,
        )
        if precision == "w8a16" and measure_ranges is None:
            raise UsageError("w8a16 needs the ranges of activations; give measure_ranges")
        if open_decoder is not None and drafting.num_tokens and not drafting.layers(loaded.config.num_layers):
            raise UsageError("a model with a trimmed head cannot be compared with its source; add --no-check")
        known_license = loaded.source.license or license
        origin = replace(loaded.source, repository=repository, revision=revision, license=known_license)
        loaded = replace(loaded, source=origin)
        if plan.reason:
            report(f"chose {plan.precision} precision: {plan.reason}")
        rule = rule_of(loaded, plan.precision, block_size, form)
        with atomic_folder(output, plan.write_bytes, report) as folder:
            if loaded.num_left_out:
                report(f"leaving out {loaded.num_left_out} tensors {loaded.use_of_left_out}")
            report(f"writing {loaded.config.num_layers} layers in {plan.precision} precision")
            tokenizer = Tokenizer.from_str(loaded.vocabulary.tokenizer_json)  # a second for a large vocabulary
            model_name = name or utf8_name(output.name)
            manifest = describe_model(model_name, loaded, tokenizer, rule, form, drafting, hidden_layers)
            written = Progress(plan.write_bytes, report, model_name, progress)
            _write_files(folder, loaded, rule, manifest, drafting, measure_ranges, report, written)
            written(plan.write_bytes)
            report("hashing")
            show_progress("computing the hashes of its files")
            manifest = replace(manifest, files={path.name: file_record(path) for path in sorted(folder.iterdir())})
            if open_decoder is not None and (not is_quick or can_be_checked(plan, report)):
                report("checking against the source")
                check = check_folder(loaded, tokenizer, manifest, folder, open_decoder, is_quick=is_quick)
                show_progress("")
                manifest = replace(manifest, check=check)
            return finish(folder, manifest)

    if block_size not in BLOCK_SIZES:
        raise UsageError(f"block size is {block_size}; choose one of {', '.join(map(str, BLOCK_SIZES))}")
    require_absent(output)
    try:
        return export(precision, output, report, is_quick=is_quick)
    except PrecisionLoss as loss:
        raise PrecisionLoss(f"{loss}. {find_passing(export, loss.precision, form, output, report)}") from None


def plan_source(
    source: Path,
    precision: str,
    form: str = "cpu",
    drafting: Drafting = Drafting(),  # noqa: B008  frozen
    hidden_layers: tuple[int, ...] = (),
    *,
    block_size: int = BLOCK_SIZES[0],
    context_length: int | None = None,
    is_checked: bool = False,
) -> tuple[LoadedSource, Plan]:
    """Read a source and plan its export; arguments and errors as in export_model."""
    if precision not in PRECISIONS:
        raise UsageError(f"unknown precision '{precision}'; choose one of {', '.join(PRECISIONS)}")
    drafting.require_valid()
    precision = resolve_precision(form, precision, drafting, hidden_layers)
    loaded = _read_model(source, context_length)
    hidden_layers = tuple(sorted({*hidden_layers, *loaded.pooled_layers}))
    require_supported(loaded, form, precision, drafting, hidden_layers)
    plan = plan_export(
        loaded,
        precision,
        form=form,
        block_size=block_size,
        drafting=drafting,
        hidden_layers=hidden_layers,
        is_checked=is_checked,
    )
    return loaded, plan


def _read_model(source: Path, context_length: int | None) -> LoadedSource:
    """Raises as read_source does, in other words where the source is a drafting head."""
    try:
        return read_source(source, context_length)
    except SourceError:
        if source.is_dir() and is_head(source):
            raise SourceError(
                f"{source} is a drafting head, which runs beside its target alone; export both, and use the pair: "
                f"edgespec export TARGET --drafter {quote(source)} --output PAIR"
            ) from None
        raise


def finish(folder: Path, manifest: Manifest) -> Manifest:
    """Write the card, and the manifest with all hashes."""
    card = folder / NAME
    card.write_text(model_card(manifest), encoding="utf-8")
    manifest = replace(manifest, files={**manifest.files, NAME: file_record(card)})
    write_manifest(folder, manifest)
    return manifest


def _write_files(
    folder: Path,
    loaded: LoadedSource,
    rule: Rule,
    manifest: Manifest,
    drafting: Drafting,
    measure_ranges: MeasureRanges | None,
    report: Report,
    progress: Progress,
) -> None:
    write_text(folder, loaded.vocabulary, manifest)
    tensors = {**loaded.tensors, **_write_draft_head(folder, loaded, drafting)}
    with WeightsFile(folder / manifest.weights, progress) as weights:
        ranges = None
        if measure_ranges is not None and rule.precision == "w8a16":
            width, capacity = manifest.prefill_tokens, manifest.context_length
            graph = build_static_graph(loaded.config, tensors, weights, rule, num_tokens=width, capacity=capacity)
            ir.save(graph, folder / _OBSERVED)
            weights.flush()
            report("measuring the ranges of activations")
            ranges = measure_ranges(folder / _OBSERVED, folder, manifest)
            (folder / _OBSERVED).unlink()
        graphs = build_graphs(manifest, loaded.config, tensors, weights, rule, ranges)
    for file, graph in graphs.items():
        ir.save(graph, folder / file)


def write_text(folder: Path, vocabulary: Vocabulary, manifest: Manifest) -> None:
    """Write tokenizer and chat template."""
    (folder / manifest.tokenizer).write_text(vocabulary.tokenizer_json, encoding="utf-8")
    if manifest.chat_template:
        (folder / manifest.chat_template).write_text(vocabulary.chat_template or "", encoding="utf-8")


def _write_draft_head(folder: Path, loaded: LoadedSource, drafting: Drafting) -> dict[str, StoredTensor]:
    """Select the head's rows of frequent tokens, and write the file that lists these tokens."""
    if drafting.num_tokens is None:
        return {}
    assert drafting.corpus is not None
    text = drafting.corpus.read_text(encoding="utf-8", errors="replace")
    tokenizer = Tokenizer.from_str(loaded.vocabulary.tokenizer_json)
    head = loaded.head
    tokens = frequent_tokens(tokenizer, text, drafting.num_tokens, loaded.vocabulary.eos_token_ids, head.rows)
    np.save(folder / VOCAB_SUBSET, tokens)
    return {DRAFT_HEAD: replace(head, rows=len(tokens), row_order=tokens.astype(np.intp))}
