"""Exports and checks pairs of a target and a drafter that a user names."""

from pathlib import Path
from tempfile import TemporaryDirectory

from edgespec.drafters.cross_vocabulary import find_translation
from edgespec.engine.load import load
from edgespec.evaluation.pair_check import measure_pair
from edgespec.export.convert import OpenDecoder, export_model, plan_source
from edgespec.export.output import atomic_folder
from edgespec.export.sources import LoadedSource
from edgespec.export.vocabulary import Vocabulary
from edgespec.loading.open_model import read_any_manifest, read_tokenizer
from edgespec.manifest import Manifest
from edgespec.models.home import ModelHome, default_home
from edgespec.models.hub import LocalSource
from edgespec.models.pair import DRAFTER, TARGET, PairCheck, have_same_tokens, part_of_pair, write_pair
from edgespec.system.split_files import utf8_name, whole_name
from edgespec.tokenization.chat_template import read_template
from edgespec.tokenization.tokenizer import Tokenizer
from edgespec.types import Report


def check_pair(
    target: str, drafter: str, *, offline: bool = False, report: Report = lambda line: None
) -> PairCheck:
    """Load both models and measure what drafting gains.

    Raises:
        VocabularyMismatch: The drafter has too few of the target's tokens.
        ModelError: One of them is missing or invalid.
    """
    home = ModelHome(default_home(), offline, report)
    folders = [part_of_pair(home.resolve(model), part) for model, part in ((target, TARGET), (drafter, DRAFTER))]
    manifests = [read_any_manifest(folder, report) for folder in folders]
    with load(folders[0], drafter=str(folders[1]), offline=offline, report=report) as engine:
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
    target: LocalSource,
    drafter: LocalSource,
    output: Path,
    *,
    precision: str = "source",
    drafter_precision: str = "source",
    open_decoder: OpenDecoder | None = None,
    report: Report = lambda line: None,
) -> PairCheck:
    """Export both into one folder that loads as a pair, and check it; the folder appears complete or not at all.

    With open_decoder each export is compared with its source.

    Raises:
        UsageError: output exists already.
        SourceError: A source is missing, broken, foreign or unsupported.
        VocabularyMismatch: The drafter has too few of the target's tokens.
        DiskFull: No room for both.
    """
    parts = ((TARGET, target, precision), (DRAFTER, drafter, drafter_precision))
    planned = [plan_source(part.path, wanted, is_checked=open_decoder is not None) for _, part, wanted in parts]
    require_shared_tokens(planned[0][0], planned[1][0])
    needed_bytes = sum(plan.write_bytes for _, plan in planned)
    with atomic_folder(output, needed_bytes, report) as folder:
        for name, source, wanted in parts:
            export_model(
                source.path,
                folder / name,
                name=_name(source),
                precision=wanted,
                repository=source.repository,
                revision=source.revision,
                license=source.license,
                open_decoder=open_decoder,
                report=report,
            )
        report("measuring the pair")
        check = check_pair(str(folder / TARGET), str(folder / DRAFTER), report=report)
        write_pair(folder, check)
    return check


def require_shared_tokens(target: LoadedSource, drafter: LoadedSource) -> None:
    """Raises VocabularyMismatch: Two sources share too few tokens, which is better known before an export."""
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
