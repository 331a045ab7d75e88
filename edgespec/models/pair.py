"""A target and its drafter: whether their tokens agree, and the pair.json of a folder that holds both."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from edgespec.errors import ManifestError
from edgespec.manifest import FILE_NAME as MANIFEST_FILE
from edgespec.manifest import file_record
from edgespec.system.json_file import read_json
from edgespec.system.typed_json import read_as, require_known_fields
from edgespec.tokenization.tokenizer import Tokenizer

FILE_NAME = "pair.json"
SCHEMA_VERSION = 1
_LARGEST_BYTES = 1 << 20  # a real one has 1 kB
TARGET, DRAFTER = "target", "drafter"  # the folders beside it

Share = Annotated[float, Meta(ge=0, le=1)]
Ratio = Annotated[float, Meta(ge=0, le=1e9)]


@dataclass(frozen=True, kw_only=True)
class PairCheck:
    """What drafting gained on some prompts, and the verdict.

    greedy_acceptance and sampled_acceptance (temperature 1) are the shares of drafted tokens that the target kept,
    of the tokens up to the first rejected one of each draft. draft_cost is the time of a drafted token in steps of
    the target. expected_gain is decoding speed over plain decoding at num_draft tokens a draft, 1 at num_draft 0.
    """

    target: str
    drafter: str
    same_special_tokens: bool
    same_chat_template: bool
    greedy_acceptance: Share
    sampled_acceptance: Share
    draft_cost: Ratio
    expected_gain: Ratio
    num_draft: Annotated[int, Meta(ge=0)]
    pays: bool
    verdict: str
    reason: str


@dataclass(frozen=True)
class _Document:
    schema_version: int
    check: PairCheck
    manifests: dict[str, str]


def have_same_tokens(target: Tokenizer, drafter: Tokenizer) -> bool:
    """Whether every id that both use is one piece in both; models pad their vocabularies differently."""
    in_target, in_drafter = target.pieces, drafter.pieces
    return all(in_target[token] == in_drafter[token] for token in in_target.keys() & in_drafter.keys())


def read_pair(folder: Path) -> PairCheck | None:
    """The check of a pair folder; None where the folder holds no pair.

    Where a model is missing or was changed since, the check says that the pair does not pay, and why.
    Raises ManifestError: the file is damaged or of another schema.
    """
    path = folder / FILE_NAME
    if not path.is_file():
        return None
    try:
        stated = read_json(path, _LARGEST_BYTES)
        document = read_as(_Document, stated)
        require_known_fields(stated["check"], document.check)
    except (ValueError, OSError) as error:
        raise ManifestError(f"{path} is damaged ({error}); export the pair again") from None
    if document.schema_version != SCHEMA_VERSION:
        raise ManifestError(f"{path} has schema version {document.schema_version}; export the pair again")
    check = document.check
    for part in (TARGET, DRAFTER):
        if not (folder / part / MANIFEST_FILE).is_file():
            reason = f"{folder / part} is no model folder; export the pair again"
            return replace(check, pays=False, verdict="this pair is not complete", reason=reason)
    if document.manifests == _manifest_hashes(folder):
        return check
    reason = "the models have changed since; check them again with edgespec pair check"
    return replace(check, pays=False, verdict="this pair was checked with other models", reason=reason)


def part_of_pair(folder: Path, part: str) -> Path:
    """The target or drafter of a pair folder; any other folder itself."""
    return folder / part if (folder / FILE_NAME).is_file() else folder


def write_pair(folder: Path, check: PairCheck) -> None:
    document = {
        "schema_version": SCHEMA_VERSION,
        "target": TARGET,
        "drafter": DRAFTER,
        "manifests": _manifest_hashes(folder),
        "check": asdict(check),
    }
    (folder / FILE_NAME).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _manifest_hashes(folder: Path) -> dict[str, str]:
    # Each manifest states the hashes of all other files.
    return {name: file_record(folder / name / MANIFEST_FILE).sha256 for name in (TARGET, DRAFTER)}
