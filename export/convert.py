"""From a source, a GGUF file or a local Hugging Face folder, to a model folder, whole or not at all."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
from tokenizers import Tokenizer

from edgespec.errors import DiskFull, MemoryExhausted, PrecisionLoss, SourceError, UsageError
from edgespec.export.folder_check import OpenDecoder as OpenDecoder
from edgespec.export.folder_check import check_folder
from edgespec.export.graph import DRAFT_HEAD, build_graphs
from edgespec.export.layout import VOCAB_SUBSET, lay_out
from edgespec.export.options import ExportOptions, Trimming, frequent_tokens
from edgespec.export.output import (
    ExportProgress,
    atomic_folder,
    finish,
    hash_files,
    partial_folder,
    require_absent,
    write_text,
)
from edgespec.export.plan import PlannedModel, can_be_checked, plan_model, require_memory
from edgespec.export.precision import BLOCK_SIZES
from edgespec.export.sources import LoadedSource
from edgespec.export.static_graph import StaticGraph
from edgespec.export.template_check import report_template
from edgespec.export.tensors import StoredTensor
from edgespec.export.weights import WeightsFile
from edgespec.manifest import Manifest, Origin
from edgespec.system.console import show_progress
from edgespec.system.progress import ReportProgress
from edgespec.system.split_files import utf8_name
from edgespec.text.tokenizer import vocabulary_sha256
from edgespec.types import Range, Report

MeasureRanges = Callable[[Path, Path, Manifest], dict[str, Range]]
"""Runs a static graph over a text and finds the range of each NAME by its outputs NAME.low and NAME.high.

Takes the graph, a folder with a tokenizer and a chat template but no manifest file yet, and the manifest.
"""


# From the precision that loses most to the one that loses least.
_MORE_EXACT = ("w8a16", "int4", "int8", "source", "fp16", "fp32")
_OBSERVED = "observed.onnx"  # in the folder while its ranges are measured


def export_model(
    source: Path,
    output: Path,
    *,
    name: str | None = None,
    precision: str = "source",
    block_size: int = BLOCK_SIZES[0],
    form: str = "cpu",
    trimming: Trimming = Trimming(),  # noqa: B008  frozen
    hidden_layers: tuple[int, ...] = (),
    context_length: int | None = None,
    adapter: Path | None = None,
    origin: Origin = Origin(),  # noqa: B008  frozen
    open_decoder: OpenDecoder | None = None,
    is_quick: bool = False,
    measure_ranges: MeasureRanges | None = None,
    most_bytes: int | None = None,
    report: Report = lambda line: None,
    progress: ReportProgress = lambda progress: None,
) -> Manifest:
    """Convert source into a model folder at output.

    The folder is written beside its place under a temporary name and moved there complete. One process at a time
    exports to an output; others wait for it. The arguments that are not named here are those of ExportOptions.

    Args:
        source: A .gguf file, or a folder with config.json, tokenizer.json and safetensors weights.
        name: The name of the model in the manifest; that of the folder unless given.
        origin: Where the source was fetched from, for the manifest.
        open_decoder: Loads a finished folder; given, the export is compared with its source.
        is_quick: Compare fewer tokens, for a first use.
        measure_ranges: Finds the ranges of activations, which w8a16 needs.
        most_bytes: The memory of the machine that is to run the model.
        progress: Takes each step of the writing, in bytes.

    Raises:
        UsageError: The precision is unknown, or output exists already.
        SourceError: The source is missing, damaged or unsupported.
        ExportMismatch: The check failed; PrecisionLoss where another precision passes, which it names.
        DiskFull: There is no room for the folder.
        MemoryExhausted: The weights take more than most_bytes.
    """
    require_absent(output)
    options = ExportOptions(
        precision=precision,
        block_size=block_size,
        form=form,
        trimming=trimming,
        hidden_layers=hidden_layers,
        context_length=context_length,
        adapter=adapter,
    )
    export = _Export(source, name, origin, open_decoder, measure_ranges, most_bytes, progress)
    try:
        return export.run(options, output, report, is_quick)
    except PrecisionLoss as loss:
        passing = _find_passing(export, replace(options, precision=loss.precision), output, report)
        raise PrecisionLoss(f"{loss}. {passing}") from None


@dataclass(frozen=True, slots=True)
class _Export:
    """A source that is exported in one precision or another; fields are arguments of export_model."""

    source: Path
    name: str | None
    origin: Origin
    open_decoder: OpenDecoder | None
    measure_ranges: MeasureRanges | None
    most_bytes: int | None
    progress: ReportProgress

    def run(self, options: ExportOptions, output: Path, report: Report, is_quick: bool) -> Manifest:
        report(f"reading {self.source}")
        show_progress("reading the file's tokenizer and its list of weights")
        planned = plan_model(self.source, options, is_checked=self.open_decoder is not None)
        if self.most_bytes is not None:
            named = replace(planned.cost, source=self.origin.name or planned.cost.source)
            require_memory(named, self.most_bytes)
        self._require_steps(planned)
        if planned.cost.reason:
            report(f"chose {planned.cost.precision} precision: {planned.cost.reason}")
        with atomic_folder(output, planned.cost.write_bytes, report) as folder:
            _report_source(planned, report)
            tokenizer = Tokenizer.from_str(planned.loaded.vocabulary.tokenizer_json)  # a second for a large one
            manifest = self._write(folder, planned, tokenizer, self.name or utf8_name(output.name), report)
            if self.open_decoder is not None and (not is_quick or can_be_checked(planned.cost, report)):
                if not planned.loaded.pooling:
                    report_template(planned.loaded.vocabulary, tokenizer, report)
                report("checking against the source")
                check = check_folder(
                    planned.loaded, tokenizer, manifest, folder, self.open_decoder, is_quick=is_quick
                )
                show_progress("")
                manifest = replace(manifest, check=check)
            return finish(folder, manifest)

    def _require_steps(self, planned: PlannedModel) -> None:
        """Raises UsageError: The ranges of activations are needed and not measured, or no check is possible."""
        trimming, num_layers = planned.options.trimming, planned.loaded.config.num_layers
        if planned.rule.precision == "w8a16" and self.measure_ranges is None:
            raise UsageError("w8a16 needs the ranges of activations; give measure_ranges")
        if self.open_decoder is not None and trimming.num_tokens and not trimming.layers(num_layers):
            raise UsageError("a model with a trimmed head cannot be compared with its source; add --no-check")

    def _write(
        self, folder: Path, planned: PlannedModel, tokenizer: Tokenizer, name: str, report: Report
    ) -> Manifest:
        """Write all files but the manifest's own."""
        loaded, rule, num_bytes = planned.loaded, planned.rule, planned.cost.write_bytes
        manifest = lay_out(name, loaded, rule, planned.options, vocabulary_sha256(tokenizer))
        manifest = replace(manifest, source=loaded.source.fetched_from(self.origin))
        written = ExportProgress(num_bytes, report, manifest.name, self.progress)
        write_text(folder, loaded.vocabulary, manifest)
        tensors = {**loaded.tensors, **_write_draft_head(folder, loaded, planned.options.trimming)}
        with WeightsFile(folder / manifest.weights, written) as weights:
            ranges = None
            if rule.precision == "w8a16":
                assert self.measure_ranges is not None
                width, capacity = manifest.prefill_tokens, manifest.context_length
                graph = StaticGraph(loaded.config, tensors, weights, rule, width, capacity).build()
                ir.save(graph, folder / _OBSERVED)
                weights.flush()
                report("measuring the ranges of activations")
                ranges = self.measure_ranges(folder / _OBSERVED, folder, manifest)
                (folder / _OBSERVED).unlink()
            graphs = build_graphs(manifest, loaded.config, tensors, weights, rule, ranges)
        for file, graph in graphs.items():
            ir.save(graph, folder / file)
        written(num_bytes)
        return hash_files(folder, manifest, report)


def _report_source(planned: PlannedModel, report: Report) -> None:
    loaded = planned.loaded
    if loaded.num_left_out:
        count = f"{loaded.num_left_out} tensor{'s' * (loaded.num_left_out > 1)}"
        report(f"leaving out {count} {loaded.use_of_left_out}")
    for note in (*loaded.notes, *loaded.vocabulary.notes):
        report(note)
    report(f"writing {loaded.config.num_layers} layers in {planned.rule.precision} precision")


def _write_draft_head(folder: Path, loaded: LoadedSource, trimming: Trimming) -> dict[str, StoredTensor]:
    """Select the head's rows of frequent tokens, and write the file that lists these tokens."""
    if trimming.num_tokens is None:
        return {}
    head, vocabulary = loaded.head, loaded.vocabulary
    tokens = frequent_tokens(vocabulary.tokenizer_json, trimming, vocabulary.eos_token_ids, head.rows)
    np.save(folder / VOCAB_SUBSET, tokens)
    return {DRAFT_HEAD: replace(head, rows=len(tokens), row_order=tokens.astype(np.intp))}


def _find_passing(export: _Export, options: ExportOptions, output: Path, report: Report) -> str:
    """Try more exact precisions than the one of options on a short text, and say which one passes."""
    precision = options.precision
    if options.form == "npu":
        return "Choose --precision fp16 or fp32, or the cpu form"
    for other in _MORE_EXACT[_MORE_EXACT.index(precision) + 1 :]:
        report(f"{precision} loses too much; trying {other}")
        try:
            with partial_folder(output, 0, report) as folder:
                wanted = replace(options, precision=other)
                check = export.run(wanted, folder / other, lambda line: None, True).check
        except (PrecisionLoss, DiskFull, MemoryExhausted, SourceError, UsageError):
            continue
        if check is not None:
            return (
                f"{other} passes, with a divergence of {check.divergence:.3g}: choose --precision {other}, or "
                f"NAME:{other}"
            )
    return "No other precision was found to pass: report this model"
