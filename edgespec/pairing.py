"""Making and judging pairs: a target and a drafter from what a user names."""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from edgespec.chat_template import read_template
from edgespec.cross_vocabulary import translation_between
from edgespec.export.convert import OpenDecoder, export_model, plan_source
from edgespec.export.output import folder_in_the_making
from edgespec.export.sources import LoadedSource
from edgespec.export.vocabulary import Vocabulary
from edgespec.home import ModelHome, default_home
from edgespec.hub import Snapshot
from edgespec.loading import load
from edgespec.manifest import Manifest
from edgespec.opening import read_any_manifest, tokenizer_of
from edgespec.pair import DRAFTER, TARGET, PairCheck, have_same_tokens, part_of_pair, write_pair
from edgespec.pair_check import check_pair
from edgespec.parts import as_text, whole_name
from edgespec.tokenizer import Tokenizer

Report = Callable[[str], None]


def judge_pair(
    target: str, drafter: str, *, offline: bool = False, report: Report = lambda line: None
) -> PairCheck:
    """Load both and measure what drafting gains.

    Raises:
        VocabularyMismatch: The drafter has too few of the target's tokens.
        ModelError: One of them is missing or invalid.
    """
    home = ModelHome(default_home(), offline, report)
    folders = [part_of_pair(home.resolve(model), part) for model, part in ((target, TARGET), (drafter, DRAFTER))]
    manifests = [read_any_manifest(folder, report) for folder in folders]
    with load(folders[0], drafter=str(folders[1]), offline=offline, report=report) as engine:
        templates = [_template(folder, manifest) for folder, manifest in zip(folders, manifests, strict=True)]
        return check_pair(
            engine,
            names=_names(manifests[0], manifests[1]),
            same_special_tokens=_special_tokens(manifests[0]) == _special_tokens(manifests[1]),
            same_chat_template=templates[0] == templates[1],
            same_tokens=have_same_tokens(*map(tokenizer_of, folders, manifests)),
            report=report,
        )


def export_pair(
    target: Snapshot,
    drafter: Snapshot,
    output: Path,
    *,
    precision: str = "source",
    drafter_precision: str = "source",
    open_decoder: OpenDecoder | None = None,
    report: Report = lambda line: None,
) -> PairCheck:
    """Export both into one folder that loads as a pair, judged; the folder appears whole or not at all.

    With open_decoder each is checked against its source.

    Raises:
        UsageError: output is in the way.
        SourceError: A source is missing, broken, foreign or unsupported.
        VocabularyMismatch: The drafter has too few of the target's tokens.
        DiskFull: No room for both.
    """
    planned = [
        plan_source(snapshot.path, wanted, is_checked=open_decoder is not None)
        for snapshot, wanted in ((target, precision), (drafter, drafter_precision))
    ]
    expect_pair(planned[0][0], planned[1][0])
    needed_bytes = sum(plan.write_bytes for _, plan in planned)
    with folder_in_the_making(output, needed_bytes, report) as folder:
        _export(target, folder / TARGET, precision, open_decoder, report)
        _export(drafter, folder / DRAFTER, drafter_precision, open_decoder, report)
        report("measuring the pair")
        check = judge_pair(str(folder / TARGET), str(folder / DRAFTER), report=report)
        write_pair(folder, check)
    return check


def expect_pair(target: LoadedSource, drafter: LoadedSource) -> None:
    """Raises VocabularyMismatch: two sources, before either is exported, that would make no pair."""
    vocabularies = target.vocabulary, drafter.vocabulary
    if vocabularies[0].tokenizer_json == vocabularies[1].tokenizer_json:
        return
    with TemporaryDirectory() as folder:
        in_target, in_drafter = (
            _tokenizer(Path(folder) / part, vocabulary)
            for part, vocabulary in zip((TARGET, DRAFTER), vocabularies, strict=True)
        )
    translation_between(
        (in_target, in_drafter),
        target.config.vocab_size,
        (vocabularies[0].eos_token_ids, vocabularies[1].eos_token_ids),
        (target.source.name, drafter.source.name),
    )


def _tokenizer(path: Path, vocabulary: Vocabulary) -> Tokenizer:
    path.write_text(vocabulary.tokenizer_json, encoding="utf-8")
    return Tokenizer(path, vocabulary.bos_token_id, vocabulary.add_bos)


def _export(
    source: Snapshot, folder: Path, precision: str, open_decoder: OpenDecoder | None, report: Report
) -> None:
    export_model(
        source.path,
        folder,
        name=_name(source),
        precision=precision,
        repository=source.repository,
        revision=source.revision,
        license=source.license,
        open_decoder=open_decoder,
        report=report,
    )


def _name(source: Snapshot) -> str:
    """What a source is called beside another: a file without its ending, a folder, or a repository."""
    place = source.repository or source.path.resolve().name
    return as_text(whole_name(place.rpartition("/")[2]).removesuffix(".gguf"))


def _names(target: Manifest, drafter: Manifest) -> tuple[str, str]:
    """Of both, told apart by their precisions where they are called the same."""
    if target.name != drafter.name:
        return target.name, drafter.name
    return f"{target.name} ({target.precision})", f"{drafter.name} ({drafter.precision})"


def _template(folder: Path, manifest: Manifest) -> str | None:
    return read_template(folder / manifest.chat_template) if manifest.chat_template else None


def _special_tokens(manifest: Manifest) -> tuple[int | None, tuple[int, ...]]:
    return manifest.bos_token_id, manifest.eos_token_ids
