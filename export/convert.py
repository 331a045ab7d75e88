"""From a source, a GGUF file or a local Hugging Face folder, to a model folder, whole or not at all."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
from tokenizers import Tokenizer

from edgespec.errors import PrecisionLoss, UsageError
from edgespec.export.drafting import Drafting, frequent_tokens
from edgespec.export.folder_check import OpenDecoder as OpenDecoder
from edgespec.export.folder_check import check_folder
from edgespec.export.graph import DRAFT_HEAD, build_graphs
from edgespec.export.layout import VOCAB_SUBSET, describe_model
from edgespec.export.output import Progress, atomic_folder, finish, hash_files, require_absent, write_text
from edgespec.export.passing_precision import find_passing
from edgespec.export.plan import can_be_checked
from edgespec.export.planned_model import PlannedModel, plan_model
from edgespec.export.precision import BLOCK_SIZES
from edgespec.export.sources import LoadedSource
from edgespec.export.static_graph import build_static_graph
from edgespec.export.tensors import StoredTensor
from edgespec.export.weights import WeightsFile
from edgespec.manifest import Manifest
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

    if block_size not in BLOCK_SIZES:
        raise UsageError(f"block size is {block_size}; choose one of {', '.join(map(str, BLOCK_SIZES))}")
    require_absent(output)

    def export_as(precision: str, output: Path, report: Report, *, is_quick: bool) -> Manifest:
        report(f"reading {source}")
        show_progress("reading the file's tokenizer and its list of weights")
        planned = plan_model(
            source,
            precision,
            form,
            drafting,
            hidden_layers,
            block_size=block_size,
            context_length=context_length,
            is_checked=open_decoder is not None,
        ).with_origin(repository, revision, license)
        _require_steps(planned, measure_ranges, open_decoder)
        if planned.cost.reason:
            report(f"chose {planned.cost.precision} precision: {planned.cost.reason}")
        with atomic_folder(output, planned.cost.write_bytes, report) as folder:
            _report_contents(planned, report)
            tokenizer = Tokenizer.from_str(planned.loaded.vocabulary.tokenizer_json)  # a second for a large one
            model_name = name or utf8_name(output.name)
            manifest = _write_model(folder, model_name, planned, tokenizer, measure_ranges, report, progress)
            if open_decoder is not None and (not is_quick or can_be_checked(planned.cost, report)):
                report("checking against the source")
                check = check_folder(planned.loaded, tokenizer, manifest, folder, open_decoder, is_quick=is_quick)
                show_progress("")
                manifest = replace(manifest, check=check)
            return finish(folder, manifest)

    try:
        return export_as(precision, output, report, is_quick=is_quick)
    except PrecisionLoss as loss:
        raise PrecisionLoss(f"{loss}. {find_passing(export_as, loss.precision, form, output, report)}") from None


def _require_steps(
    planned: PlannedModel, measure_ranges: MeasureRanges | None, open_decoder: OpenDecoder | None
) -> None:
    """Raises UsageError: the ranges of activations are needed and not measured, or no check is possible."""
    drafting, num_layers = planned.drafting, planned.loaded.config.num_layers
    if planned.rule.precision == "w8a16" and measure_ranges is None:
        raise UsageError("w8a16 needs the ranges of activations; give measure_ranges")
    if open_decoder is not None and drafting.num_tokens and not drafting.layers(num_layers):
        raise UsageError("a model with a trimmed head cannot be compared with its source; add --no-check")


def _report_contents(planned: PlannedModel, report: Report) -> None:
    loaded = planned.loaded
    if loaded.num_left_out:
        report(f"leaving out {loaded.num_left_out} tensors {loaded.use_of_left_out}")
    report(f"writing {loaded.config.num_layers} layers in {planned.rule.precision} precision")


def _write_model(
    folder: Path,
    name: str,
    planned: PlannedModel,
    tokenizer: Tokenizer,
    measure_ranges: MeasureRanges | None,
    report: Report,
    progress: ReportProgress,
) -> Manifest:
    """Write all files but the card and the manifest, which is returned with their hashes."""
    manifest = describe_model(
        name,
        planned.loaded,
        tokenizer,
        planned.rule,
        planned.form,
        planned.drafting,
        planned.hidden_layers,
    )
    num_bytes = planned.cost.write_bytes
    written = Progress(num_bytes, report, name, progress)
    _write_files(folder, planned, manifest, measure_ranges, report, written)
    written(num_bytes)
    return hash_files(folder, manifest, report)


def _write_files(
    folder: Path,
    planned: PlannedModel,
    manifest: Manifest,
    measure_ranges: MeasureRanges | None,
    report: Report,
    progress: Progress,
) -> None:
    loaded, rule = planned.loaded, planned.rule
    write_text(folder, loaded.vocabulary, manifest)
    tensors = {**loaded.tensors, **_write_draft_head(folder, loaded, planned.drafting)}
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
