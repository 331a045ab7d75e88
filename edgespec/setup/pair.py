"""A pair folder: a target and its drafter, each in one form or more, and pair.json with what drafting gained.

target/        the form that the pair was exported in, whichever that is; so drafter/
target-gpu/    another form of the same model, added later; so drafter-npu/ and so on
pair.json      a check for each pair of devices on which the speed was measured
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal, cast

from msgspec import Meta

from edgespec.manifest import FILE_NAME as MANIFEST_FILE
from edgespec.manifest import FORMS, read_manifest
from edgespec.system.disk import hold_lock, replace_file
from edgespec.system.file_hashes import file_record
from edgespec.system.typed_json import read_as, read_json, require_known_fields

if TYPE_CHECKING:
    from edgespec.setup.learned_file import LearnedFile

FILE_NAME = "pair.json"
_LOCK = ".pair.lock"
_VERSION: Final = 2
TARGET, DRAFTER = "target", "drafter"  # the folders beside it

PartName = Literal[
    "target", "target-cpu", "target-gpu", "target-npu", "drafter", "drafter-cpu", "drafter-gpu", "drafter-npu"
]
Share = Annotated[float, Meta(ge=0, le=1)]
Ratio = Annotated[float, Meta(ge=0, le=1e9)]


@dataclass(frozen=True, kw_only=True)
class PairCheck:
    """The gain of drafting on some prompts, and the verdict.

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

    def in_words(self) -> str:
        """The check as lines for a person."""
        return (
            f"{self.verdict}: {self.reason}\n"
            f"  drafter, target   {self.drafter}, {self.target}\n"
            f"  tokens accepted   {self.greedy_acceptance:.0%} greedy, "
            f"{self.sampled_acceptance:.0%} at temperature 1\n"
            f"  expected speed    {self.expected_gain:.2f} × plain decoding, "
            f"with draft length {self.num_draft}\n"
            f"  special tokens    {'identical' if self.same_special_tokens else 'different'}\n"
            f"  chat templates    {'identical' if self.same_chat_template else 'different'}"
        )


@dataclass(frozen=True, kw_only=True)
class CheckOnDevices:
    """A check on two devices, each with the versions that its speed depends on, and by the folders that ran there.

    manifests: The SHA-256 of the manifest of each of the two folders, by the folder's name.
    """

    target_device: str
    drafter_device: str
    manifests: dict[PartName, str]
    check: PairCheck


@dataclass(frozen=True)
class Pair:
    """A pair folder and its checks, one at most for each pair of devices.

    problem: Why the checks that were stored cannot be used; empty if they can.
    is_later: A later edgespec has written them.
    """

    folder: Path
    checks: tuple[CheckOnDevices, ...]
    problem: str = ""
    is_later: bool = False

    def check_on(self, devices: tuple[str, str], parts: tuple[Path, Path]) -> PairCheck | None:
        """The check on a pair of devices; None where there is none of the models as they are.

        parts: The folders of the target and the drafter that are to run.
        """
        found = next((each for each in self.checks if (each.target_device, each.drafter_device) == devices), None)
        if found is None or set(found.manifests) != {part.name for part in parts}:
            return None
        return found.check if found.manifests == _manifest_hashes(self.folder, found.manifests) else None

    def part(self, part: str, form: str | None = None) -> Path | None:
        """The folder of the target or of the drafter in a form; None where the pair does not have it.

        Without a form, the one that the pair was exported in. A CPU runs every form: where the cpu form is missing
        that one serves.
        """
        forms = forms_of(self.folder, part)
        first = next(iter(forms.values()), None)
        return first if form is None else forms.get(form, first if form == "cpu" else None)


@dataclass(frozen=True)
class _PairDocument:
    schema_version: Literal[2]  # _VERSION
    checks: tuple[CheckOnDevices, ...]


def is_pair(folder: Path) -> bool:
    """True if a folder holds the checks of a pair, or the models of one that was not checked."""
    has_models = all((folder / part / MANIFEST_FILE).is_file() for part in (TARGET, DRAFTER))
    return has_models or (folder / FILE_NAME).is_file()


def read_pair(folder: Path) -> Pair | None:
    """The checks of a pair folder, none where they cannot be used; None where the folder holds no pair."""
    if not is_pair(folder):
        return None
    path = folder / FILE_NAME
    try:
        stated = read_json(path)
        version = stated.get("schema_version") if isinstance(stated, dict) else None
        if type(version) is int and version > _VERSION:
            problem = f"{path} has schema version {version}, and this edgespec reads {_VERSION}"
            return Pair(folder, (), problem, is_later=True)
        document = read_as(_PairDocument, stated)
        for each, check in zip(stated["checks"], document.checks, strict=True):
            require_known_fields(each, check)
            require_known_fields(each["check"], check.check)
        return Pair(folder, document.checks)
    except FileNotFoundError:
        return Pair(folder, ())
    except (ValueError, OSError) as error:
        return Pair(folder, (), f"{path} cannot be used ({getattr(error, 'strerror', None) or error})")


def write_pair(folder: Path, checks: Sequence[CheckOnDevices] = ()) -> None:
    """Write the checks of a pair folder; without any, its speed is unknown."""
    document = asdict(_PairDocument(_VERSION, tuple(checks)))
    replace_file(folder / FILE_NAME, (json.dumps(document, indent=2) + "\n").encode(), 0o666)


def record_check(folder: Path, check: PairCheck, devices: tuple[str, str], parts: tuple[Path, Path]) -> None:
    """Write a check on two devices into a pair folder, in place of an earlier one on them."""
    target, drafter = devices
    manifests = _manifest_hashes(folder, [cast(PartName, part.name) for part in parts])
    new = CheckOnDevices(target_device=target, drafter_device=drafter, manifests=manifests, check=check)
    with hold_lock(folder / _LOCK):  # another process may write the check on other devices
        pair = read_pair(folder) or Pair(folder, ())
        others = [each for each in pair.checks if (each.target_device, each.drafter_device) != devices]
        write_pair(folder, [*others, new])


def forms_of(folder: Path, part: str) -> dict[str, Path]:
    """The folders of the target or the drafter of a pair by their forms; that of its export is the first."""
    found: dict[str, Path] = {}
    for name in _part_names(part):
        if (folder / name / MANIFEST_FILE).is_file():
            found.setdefault(read_manifest(folder / name).form, folder / name)
    return found


def part_folders(folder: Path) -> list[Path]:
    """All model folders of a pair folder; its target/ and drafter/ also where they are missing."""
    return [
        folder / name
        for part in (TARGET, DRAFTER)
        for name in _part_names(part)
        if name == part or (folder / name).is_dir()
    ]


def learned_files(folder: Path) -> "list[LearnedFile]":
    """The files of lessons of all heads in a model or pair folder, by folder and name."""
    from edgespec.setup.learned_file import files_beside

    return [each for head in (folder, *part_folders(folder)) for each in files_beside(head)]


def _part_names(part: str) -> list[str]:
    return [part, *(f"{part}-{form}" for form in FORMS)]


def _manifest_hashes(folder: Path, names: Iterable[PartName]) -> dict[PartName, str]:
    # Each manifest states the hashes of all other files.
    paths = {name: folder / name / MANIFEST_FILE for name in names}
    return {name: file_record(path).sha256 for name, path in paths.items() if path.is_file()}
