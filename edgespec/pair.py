"""A target and its drafter: whether their tokens mean the same, and the pair.json of a folder that holds both.

Knows nothing of models.
"""

import json
from dataclasses import asdict, dataclass, fields, replace
from math import isfinite
from pathlib import Path
from typing import cast

from edgespec.errors import ManifestError
from edgespec.json_file import read_json
from edgespec.manifest import FILE_NAME as MANIFEST_FILE
from edgespec.manifest import file_record
from edgespec.tokenizer import Tokenizer

FILE_NAME = "pair.json"
SCHEMA_VERSION = 1
_LARGEST_BYTES = 1 << 20  # a real one has 1 kB
TARGET, DRAFTER = "target", "drafter"  # the folders beside it


@dataclass(frozen=True, kw_only=True)
class PairCheck:
    """What drafting gained on some prompts, and what to make of it.

    greedy_acceptance and sampled_acceptance (temperature 1) are the shares of drafted tokens that were kept, among
    those that were judged. draft_cost is the time of a drafted token in steps of the target. expected_gain is
    decoding speed over plain decoding at num_draft tokens a draft, 1 at num_draft 0.
    """

    target: str
    drafter: str
    same_special_tokens: bool
    same_chat_template: bool
    greedy_acceptance: float
    sampled_acceptance: float
    draft_cost: float
    expected_gain: float
    num_draft: int
    pays: bool
    verdict: str
    reason: str


def have_same_tokens(target: Tokenizer, drafter: Tokenizer) -> bool:
    """Whether every id that both use is one piece in both; models pad their vocabularies differently."""
    in_target, in_drafter = target.pieces, drafter.pieces
    return all(in_target[token] == in_drafter[token] for token in in_target.keys() & in_drafter.keys())


def read_pair(folder: Path) -> PairCheck | None:
    """The check of a pair folder; None where the folder holds no pair.

    A check of other models than those that are there now says that it does not count.

    Raises:
        ManifestError: The file is damaged or of another schema.
    """
    path = folder / FILE_NAME
    if not path.is_file():
        return None
    try:
        stated = read_json(path, _LARGEST_BYTES)
        if stated["schema_version"] != SCHEMA_VERSION:
            raise ManifestError(f"{path} has schema version {stated['schema_version']}; export the pair again")
        check, judged = PairCheck(**stated["check"]), stated["manifests"]
        _expect_kinds(check)
    except (ValueError, LookupError, TypeError, AttributeError, OSError) as error:
        raise ManifestError(f"{path} is damaged ({error!r}); export the pair again") from None
    for part in (TARGET, DRAFTER):
        if not (folder / part / MANIFEST_FILE).is_file():
            return replace(
                check,
                pays=False,
                verdict="this pair is not whole",
                reason=f"{folder / part} is no model folder; export the pair again",
            )
    if judged == _manifests(folder):
        return check
    reason = "the models have changed since; judge them again with edgespec pair check"
    return replace(check, pays=False, verdict="this pair was judged with other models", reason=reason)


_KINDS = {str: (str,), bool: (bool,), int: (int,), float: (int, float)}


def _expect_kinds(check: PairCheck) -> None:
    """Raises ValueError: a value that is not of the kind that its field has, or a number that is none."""
    for field in fields(check):
        value, kind = getattr(check, field.name), cast(type, field.type)
        is_number = type(value) in (int, float) and isfinite(value)
        if type(value) not in _KINDS[kind] or (kind in (int, float) and not is_number):
            raise ValueError(f"{field.name} is {value!r}, wanted a {kind.__name__}")


def part_of_pair(folder: Path, part: str) -> Path:
    """The target or drafter of a pair folder; any other folder itself."""
    return folder / part if (folder / FILE_NAME).is_file() else folder


def write_pair(folder: Path, check: PairCheck) -> None:
    document = {
        "schema_version": SCHEMA_VERSION,
        "target": TARGET,
        "drafter": DRAFTER,
        "manifests": _manifests(folder),
        "check": asdict(check),
    }
    (folder / FILE_NAME).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _manifests(folder: Path) -> dict[str, str]:
    """Hashes of the manifests of both, which state those of all their files."""
    return {name: file_record(folder / name / MANIFEST_FILE).sha256 for name in (TARGET, DRAFTER)}
