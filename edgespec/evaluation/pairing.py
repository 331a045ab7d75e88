"""Exports and checks pairs of a target and a drafter that a user names."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from edgespec.drafters.cross_vocabulary import find_translation
from edgespec.engine.load import load
from edgespec.engine.resolve import Resolved, resolve
from edgespec.errors import DeviceUnavailable, MemoryExhausted, ModelError, UsageError
from edgespec.evaluation.pair_check import measure_pair
from edgespec.export.convert import MeasureRanges, OpenDecoder, export_model, plan_source
from edgespec.export.output import atomic_folder
from edgespec.export.sources import LoadedSource, read_source
from edgespec.export.vocabulary import Vocabulary
from edgespec.loading.device_forms import source_of
from edgespec.loading.open_model import read_tokenizer
from edgespec.manifest import Manifest, read_manifest
from edgespec.models.hub import LocalSource
from edgespec.models.pair import (
    DRAFTER,
    TARGET,
    PairCheck,
    forms_of,
    have_same_tokens,
    is_pair,
    record_check,
    require_pair_file,
    restore_pair,
    write_pair,
)
from edgespec.runtimes.devices import device_key, find_device
from edgespec.system.command_line import quote
from edgespec.system.split_files import utf8_name, whole_name
from edgespec.tokenization.chat_template import read_template
from edgespec.tokenization.tokenizer import Tokenizer
from edgespec.types import Report


@dataclass(frozen=True, kw_only=True)
class PairHalf:
    """The target or the drafter of a pair to export, and its device, which need not be in this machine.

    device: A name or a kind, as --device takes them.
    """

    part: str
    source: LocalSource
    form: str = "cpu"
    device: str = "cpu"
    precision: str = "source"


def check_pair(
    target: str,
    drafter: str,
    *,
    device: str = "auto",
    drafter_device: str = "auto",
    offline: bool = False,
    report: Report = lambda line: None,
) -> PairCheck:
    """Load both models and measure what drafting gains on the devices.

    Raises:
        DeviceUnavailable: A device cannot be used, or a model is not in the form for it.
        VocabularyMismatch: The drafter has too few of the target's tokens.
        ModelError: One of them is missing or invalid.
    """
    return _check(_resolve(target, drafter, (device, drafter_device), offline, report), report)


def check_folder(
    folder: Path,
    *,
    device: str = "auto",
    drafter_device: str = "auto",
    offline: bool = False,
    report: Report = lambda line: None,
) -> PairCheck:
    """Measure a pair folder on the devices, and record it in the folder; a pair.json that is damaged is replaced.

    Raises:
        DeviceUnavailable: A device cannot be used, or the pair has no form for it.
        ModelError: The folder holds no pair.
    """
    if (pair := restore_pair(folder, report)) is None:
        raise ModelError(
            f"{folder} is no pair folder; name a drafter too, or export a pair with edgespec export --drafter"
        )
    resolved = _resolve(str(folder), str(folder), (device, drafter_device), offline, report)
    check = _check(resolved, report)
    placement = resolved.placement
    devices = device_key(placement.device), device_key(placement.drafter_device)
    record_check(pair, check, devices, (resolved.target.folder, resolved.drafters[0].models[0].folder))
    return check


def _resolve(target: str, drafter: str, devices: tuple[str, str], offline: bool, report: Report) -> Resolved:
    resolved = resolve(
        target, drafter=drafter, device=devices[0], drafter_device=devices[1], offline=offline, report=report
    )
    if not resolved.drafters:
        raise ModelError(f"'{drafter}' is not a model; a pair is a target and a smaller model")
    return resolved


def _check(resolved: Resolved, report: Report) -> PairCheck:
    models = resolved.target, resolved.drafters[0].models[0]
    folders, manifests = [model.folder for model in models], [model.manifest for model in models]
    with load(
        folders[0],
        drafter=str(folders[1]),
        device=resolved.placement.device.name,
        drafter_device=resolved.placement.drafter_device.name,
        report=report,
    ) as engine:
        templates = list(map(_template, folders, manifests))
        special = [(manifest.bos_token_id, manifest.eos_token_ids) for manifest in manifests]
        return measure_pair(
            engine,
            names=_distinct_names(*manifests),
            same_special_tokens=special[0] == special[1],
            same_chat_template=templates[0] == templates[1],
            same_tokens=have_same_tokens(*map(read_tokenizer, folders, manifests)),
            report=report,
        )


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

    With open_decoder each export is compared with its source.

    Returns:
        What drafting gains; None where the devices are not in this machine or are emulators, or memory is short.

    Raises:
        UsageError: output exists already.
        SourceError: A source is missing, broken, foreign or unsupported.
        VocabularyMismatch: The drafter has too few of the target's tokens.
        DiskFull: No room for both.
    """
    plans = [
        plan_source(half.source.path, half.precision, half.form, is_checked=open_decoder is not None)
        for half in (target, drafter)
    ]
    require_shared_tokens(plans[0][0], plans[1][0])
    needed_bytes = sum(plan.write_bytes for _, plan in plans)
    with atomic_folder(output, needed_bytes, report) as folder:
        for half in (target, drafter):
            _export_half(half, folder / half.part, _name(half.source), open_decoder, measure_ranges, report)
        write_pair(folder)
        return _check_if_here(folder, output, (target.device, drafter.device), report)


def add_forms(
    folder: Path,
    halves: Sequence[PairHalf],
    *,
    open_decoder: OpenDecoder | None = None,
    measure_ranges: MeasureRanges | None = None,
    report: Report = lambda line: None,
) -> list[Path]:
    """Export halves of a pair in forms that its folder does not have yet, from the sources that it was made of.

    Returns:
        The new folders; without those that another process has added in the meantime.

    Raises:
        ModelError: The folder holds no pair, or not a part that is to be added to.
        UsageError: A source is not that of the pair.
    """
    for half in halves:
        first, loaded = _first_form(folder, half.part), read_source(half.source.path)
        if loaded.source.sha256 != first.source.sha256:
            raise UsageError(
                f"{half.source.path} is not the source of the pair's {half.part}, which was exported from "
                f"{source_of(first)}; name that one"
            )
    added = []
    for half in halves:
        output = folder / f"{half.part}-{half.form}"
        name = _first_form(folder, half.part).name
        try:
            added.append(_export_half(half, output, name, open_decoder, measure_ranges, report))
        except UsageError:
            if half.form not in forms_of(folder, half.part):
                raise
            report(f"another process has added {output} in the meantime")
    return added


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
    require_pair_file(folder)
    if not is_pair(folder):
        raise ModelError(f"{folder} is no pair folder; export a pair with edgespec export --drafter --output")
    if not (forms := forms_of(folder, part)):
        raise ModelError(f"{folder / part} is no model folder; export the pair again")
    return read_manifest(next(iter(forms.values())))


def _export_half(
    half: PairHalf,
    output: Path,
    name: str,
    open_decoder: OpenDecoder | None,
    measure_ranges: MeasureRanges | None,
    report: Report,
) -> Path:
    export_model(
        half.source.path,
        output,
        name=name,
        precision=half.precision,
        form=half.form,
        repository=half.source.repository,
        revision=half.source.revision,
        license=half.source.license,
        open_decoder=open_decoder,
        measure_ranges=measure_ranges if half.precision == "w8a16" else None,
        report=report,
    )
    return output


def _check_if_here(folder: Path, output: Path, devices: tuple[str, str], report: Report) -> PairCheck | None:
    """Measure a pair on the devices that it was exported for, or report why that is not possible."""
    try:
        for name in devices:
            if (device := find_device(name)).is_software:
                raise DeviceUnavailable(f"'{device.name}' is an emulator, whose speed says nothing of a device")
        report("measuring the pair")
        return check_folder(folder, device=devices[0], drafter_device=devices[1], report=report)
    except (DeviceUnavailable, MemoryExhausted) as error:
        when = "where the devices are" if isinstance(error, DeviceUnavailable) else "once more memory is free"
        report(
            f"the speed of this pair was not measured: {error}. To measure it {when}: "
            f"edgespec pair check {quote(output)} --device {devices[0]} --drafter-device {devices[1]}"
        )
        return None


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
    path.write_text(vocabulary.tokenizer_json, encoding="utf-8")
    return Tokenizer(path, vocabulary.bos_token_id, vocabulary.add_bos)


def _name(source: LocalSource) -> str:
    """The name of a source's file without its ending, of its folder, or of its repository."""
    place = source.repository or source.path.resolve().name
    return utf8_name(whole_name(place.rpartition("/")[2]).removesuffix(".gguf"))


def _distinct_names(target: Manifest, drafter: Manifest) -> tuple[str, str]:
    """Both names, with their precisions where the names are equal."""
    if target.name != drafter.name:
        return target.name, drafter.name
    return f"{target.name} ({target.precision})", f"{drafter.name} ({drafter.precision})"


def _template(folder: Path, manifest: Manifest) -> str | None:
    return read_template(folder / manifest.chat_template) if manifest.chat_template else None
