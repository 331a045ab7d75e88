"""Exports pairs of a target and a drafter that a user names: a smaller model, or a drafting head."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from edgespec.draft.cross_vocabulary import find_translation
from edgespec.engine.pair_check import check_if_here
from edgespec.errors import ModelError, UsageError
from edgespec.export.adapters import merge_adapter
from edgespec.export.convert import MeasureRanges, OpenDecoder, export_model
from edgespec.export.heads.convert import PlannedHead, export_head, plan_head
from edgespec.export.heads.dialects import is_head
from edgespec.export.heads.head_source import HeadSource, read_head
from edgespec.export.heads.mtp import read_mtp
from edgespec.export.options import ExportOptions, Trimming
from edgespec.export.output import atomic_folder
from edgespec.export.plan import ExportCost, PlannedModel, plan_model
from edgespec.export.sources import LoadedSource, read_source
from edgespec.export.vocabulary import Vocabulary
from edgespec.manifest import Manifest, read_manifest
from edgespec.setup.device_choice import source_of
from edgespec.setup.head_target import require_agreement
from edgespec.setup.pair import DRAFTER, TARGET, PairCheck, forms_of, is_pair, write_pair
from edgespec.setup.snapshot import LocalSource
from edgespec.system.split_files import source_name, whole_name
from edgespec.text.tokenizer import Tokenizer, remember_harmless
from edgespec.types import Report


@dataclass(frozen=True, kw_only=True)
class PairHalf:
    """The target or the drafter of a pair to export, and its device, which need not be in this machine.

    device: A name or a kind, as --device takes them.
    precision: None for the usual one, which is source for a model and auto for a drafting head.
    is_mtp: It is the layers for multi-token prediction within source, which is the target's.
    trimming: The number of tokens to trim a drafting head's logits to, and the text in which they are counted.
    adapter: A LoRA adapter to merge.
    """

    part: str
    source: LocalSource
    form: str = "cpu"
    device: str = "cpu"
    precision: str | None = None
    is_mtp: bool = False
    trimming: Trimming = field(default_factory=Trimming)
    adapter: Path | None = None

    @property
    def is_head(self) -> bool:
        return self.is_mtp or (self.part == DRAFTER and is_head(self.source.path))

    def read(self) -> LoadedSource:
        """The model, with its adapter."""
        loaded = read_source(self.source.path)
        return loaded if self.adapter is None else merge_adapter(loaded, self.adapter)

    def read_head(self) -> HeadSource:
        return read_mtp(self.source.path) if self.is_mtp else read_head(self.source.path)

    def plan_head(self, target: LoadedSource) -> PlannedHead:
        """Plan the export of the drafting head for its target; raises as export/heads/convert.py does."""
        return plan_head(
            target, self.read_head(), self.precision or "auto", form=self.form, trimming=self.trimming
        )

    def plan_model(self, *, is_checked: bool) -> PlannedModel:
        """Read the model and plan its export; raises as export_model does.

        Raises UsageError: A model is to be trimmed as only heads are.
        """
        if self.trimming != Trimming():
            raise UsageError(
                f"--vocab-subset trims the logits of a drafting head in a pair, and {self.source.path} is a model "
                "that runs by itself; leave it out, or export the drafter alone first"
            )
        options = ExportOptions(precision=self.precision or "source", form=self.form, adapter=self.adapter)
        return plan_model(self.source.path, options, is_checked=is_checked)


@dataclass(frozen=True, kw_only=True)
class PairPlan:
    """The plans of both halves, and the drafting head if the drafter is one."""

    plans: tuple[ExportCost, ExportCost]
    head: PlannedHead | None

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """Layers whose hidden states the target has to give."""
        return tuple(sorted({*self.head.plan.head.target_layers})) if self.head else ()


def plan_pair(target: PairHalf, drafter: PairHalf, *, is_checked: bool) -> PairPlan:
    """Read both sources, and plan their exports; raises as export_pair does."""
    planned = target.plan_model(is_checked=is_checked)
    if not drafter.is_head:
        other = drafter.plan_model(is_checked=is_checked)
        for loaded in (planned.loaded, other.loaded):
            if loaded.pooling:
                raise UsageError(
                    f"{loaded.source.name} is an embedding model, which neither drafts nor is drafted for; "
                    "choose models that write text"
                )
        require_shared_tokens(planned.loaded, other.loaded)
        return PairPlan(plans=(planned.cost, other.cost), head=None)
    if target.form == "npu":
        raise UsageError(
            "a drafting head reads hidden states of its target, which the npu form does not give; choose another "
            "--device for the target"
        )
    head = drafter.plan_head(planned.loaded)
    return PairPlan(plans=(planned.cost, head.cost), head=head)


def export_pair(
    target: PairHalf,
    drafter: PairHalf,
    output: Path,
    *,
    open_decoder: OpenDecoder | None = None,
    measure_ranges: MeasureRanges | None = None,
    report: Report = lambda line: None,
) -> PairCheck | None:
    """Export both into one folder that loads as a pair, and check it; the folder appears complete or not at all.

    With open_decoder each export is compared with its source, and a drafting head with its target's own text.

    Returns:
        What drafting gains; None where the devices are not in this machine or are emulators, or memory is short.

    Raises:
        UsageError: output exists already.
        SourceError: A source is missing, broken, foreign or unsupported, or a drafting head is not this target's.
        VocabularyMismatch: The drafter has too few of the target's tokens.
        DiskFull: No room for both.
    """
    plan = plan_pair(target, drafter, is_checked=open_decoder is not None)
    export = partial(_export_model, open_decoder=open_decoder, measure_ranges=measure_ranges, report=report)
    with atomic_folder(output, sum(each.write_bytes for each in plan.plans), report) as folder:
        export(target, folder / TARGET, _name(target), plan.hidden_layers)
        if plan.head is None:
            export(drafter, folder / DRAFTER, _name(drafter))
        else:
            origin = drafter.source.origin
            export_head(plan.head, folder / DRAFTER, _name(drafter), origin=origin, report=report)
            if open_decoder is not None:
                devices = (target.device, drafter.device)
                require_agreement(folder / TARGET, folder / DRAFTER, devices, report)
        write_pair(folder)
        return check_if_here(folder, output, (target.device, drafter.device), report)


def add_forms(
    folder: Path,
    target: PairHalf | None,
    halves: Sequence[PairHalf],
    *,
    open_decoder: OpenDecoder | None = None,
    measure_ranges: MeasureRanges | None = None,
    report: Report = lambda line: None,
) -> list[Path]:
    """Export halves of a pair in forms that its folder does not have yet, from the sources that it was made of.

    target: The pair's target, whose embedding a drafting head may use; None where no half is a head.

    Returns:
        The new folders; without those that another process has added in the meantime.

    Raises:
        ModelError: The folder holds no pair, or not a part that is to be added to.
        UsageError: A source is not that of the pair.
    """
    for half in halves:
        first = _first_form(folder, half.part)
        if half.is_head:
            assert target is not None
            require_source(half, first, half.read_head().source().sha256)
            require_source(target, _first_form(folder, TARGET), target.read().source.sha256)
        else:
            require_source(half, first, half.read().source.sha256)
    export = partial(_export_model, open_decoder=open_decoder, measure_ranges=measure_ranges, report=report)
    added = []
    for half in halves:
        output, first = folder / f"{half.part}-{half.form}", _first_form(folder, half.part)
        try:
            if half.is_head and target is not None:
                planned = half.plan_head(target.read())
                export_head(planned, output, first.name, origin=half.source.origin, report=report)
            else:
                export(half, output, first.name, first.hidden_layers)
            added.append(output)
        except UsageError:
            if half.form not in forms_of(folder, half.part):
                raise
            report(f"another process has added {output} in the meantime")
    return added


def require_source(half: PairHalf, first: Manifest, sha256: str) -> None:
    """Raises UsageError: The source of a half has other bytes than that of the pair's."""
    if sha256 != first.source.sha256:
        raise UsageError(
            f"{half.source.path} is not the source of the pair's {half.part}, which was exported from "
            f"{source_of(first)}; name that one"
        )


def usual_added_precision(folder: Path, part: str, form: str) -> str | None:
    """The precision of a form that is added to a pair, where none is named: for a GPU that of the pair's own.

    None where the form is there already.

    Raises ModelError: The folder holds no pair, or not that part of it.
    """
    if form in forms_of(folder, part):
        return None
    precision = _first_form(folder, part).precision
    return precision if form == "gpu" and precision in ("fp32", "fp16", "int8", "int4") else "source"


def _first_form(folder: Path, part: str) -> Manifest:
    if not is_pair(folder):
        raise ModelError(f"{folder} is not a pair folder; export a pair with edgespec export --drafter --output")
    if not (forms := forms_of(folder, part)):
        raise ModelError(f"{folder / part} is not a model folder; export the pair again")
    return read_manifest(next(iter(forms.values())))


def _export_model(
    half: PairHalf,
    output: Path,
    name: str,
    hidden_layers: tuple[int, ...] = (),
    *,
    open_decoder: OpenDecoder | None,
    measure_ranges: MeasureRanges | None,
    report: Report,
) -> None:
    export_model(
        half.source.path,
        output,
        name=name,
        precision=half.precision or "source",
        form=half.form,
        hidden_layers=hidden_layers,
        adapter=half.adapter,
        origin=half.source.origin,
        open_decoder=open_decoder,
        measure_ranges=measure_ranges if half.precision == "w8a16" else None,
        report=report,
    )


def require_shared_tokens(target: LoadedSource, drafter: LoadedSource) -> None:
    """Raises VocabularyMismatch: Two sources share too few tokens, so that this is known before an export."""
    vocabularies = target.vocabulary, drafter.vocabulary
    if vocabularies[0].tokenizer_json == vocabularies[1].tokenizer_json:
        return
    with TemporaryDirectory() as folder:
        tokenizers = (
            _write_tokenizer(Path(folder) / TARGET, vocabularies[0]),
            _write_tokenizer(Path(folder) / DRAFTER, vocabularies[1]),
        )
    find_translation(
        tokenizers,
        target.config.vocab_size,
        (vocabularies[0].eos_token_ids, vocabularies[1].eos_token_ids),
        (target.source.name, drafter.source.name),
    )


def _write_tokenizer(path: Path, vocabulary: Vocabulary) -> Tokenizer:
    path.write_bytes(vocabulary.tokenizer_json.encode())
    remember_harmless(vocabulary.tokenizer_json.encode())
    return Tokenizer(path, vocabulary.bos_token_id, vocabulary.add_bos)


def _name(half: PairHalf) -> str:
    """The name of a source's file without its ending, of its folder, or of its repository."""
    place = half.source.origin.repository or source_name(half.source.path)
    name = whole_name(place.rpartition("/")[2]).removesuffix(".gguf").removesuffix(".safetensors")
    return f"MTP of {name}" if half.is_mtp else name
