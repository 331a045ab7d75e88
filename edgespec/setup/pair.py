"""A pair folder: a target and its drafter, each in one form or more, and pair.json with what drafting gained.

target/        the form that the pair was exported in, whichever that is; so drafter/
target-gpu/    another form of the same model, added later; so drafter-npu/ and so on
pair.json      a check for each pair of devices on which the speed was measured
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, cast

from msgspec import Meta

from edgespec.errors import ManifestError
from edgespec.manifest import FILE_NAME as MANIFEST_FILE
from edgespec.manifest import read_manifest
from edgespec.setup.learned_file import LearnedFile, files_beside
from edgespec.system.command_line import quote
from edgespec.system.disk import hold_lock, replace_file
from edgespec.system.file_hashes import file_record
from edgespec.system.typed_json import read_as, read_json, require_known_fields
from edgespec.types import Report

FILE_NAME = "pair.json"
_LOCK = ".pair.lock"
SCHEMA_VERSION = 2
TARGET, DRAFTER = "target", "drafter"  # the folders beside it
_FORMS = ("cpu", "gpu", "npu")

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
    """A pair folder and its checks, one at most for each pair of devices."""

    folder: Path
    checks: tuple[CheckOnDevices, ...]

    def check_on(self, devices: tuple[str, str], parts: tuple[Path, Path]) -> PairCheck | None:
        """The check on a pair of devices; None where there is none, or where it was made with other forms.

        Where one of the models was changed since, the check says that the pair does not pay, and why.

        parts: The folders of the target and the drafter that are to run.
        """
        found = self._find(devices, parts)
        if found is None or self._is_current(found):
            return found.check if found else None
        reason = "this pair was checked with other models; run edgespec pair check again"
        return replace(found.check, pays=False, verdict="cannot say whether to use this drafter", reason=reason)

    def current_check(self, devices: tuple[str, str], parts: tuple[Path, Path]) -> PairCheck | None:
        """The check on a pair of devices, as check_on has it; None where one of the models was changed since."""
        found = self._find(devices, parts)
        return found.check if found and self._is_current(found) else None

    def _find(self, devices: tuple[str, str], parts: tuple[Path, Path]) -> CheckOnDevices | None:
        found = next((each for each in self.checks if (each.target_device, each.drafter_device) == devices), None)
        return found if found and set(found.manifests) == {part.name for part in parts} else None

    def _is_current(self, check: CheckOnDevices) -> bool:
        return check.manifests == _manifest_hashes(self.folder, check.manifests)

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
    schema_version: int
    checks: tuple[CheckOnDevices, ...]


def is_pair(folder: Path) -> bool:
    return (folder / FILE_NAME).is_file()


def lacks_pair_file(folder: Path) -> bool:
    """True if a folder holds the models of a pair, and no pair.json."""
    return not is_pair(folder) and all((folder / part / MANIFEST_FILE).is_file() for part in (TARGET, DRAFTER))


def advise_pair_check(folder: Path) -> str:
    """The command that checks a pair folder again, as the end of a message."""
    return f"to write it again, run: edgespec pair check {quote(folder)}"


def require_pair_file(folder: Path) -> None:
    """Raises ManifestError: A folder holds the models of a pair, and no pair.json."""
    if lacks_pair_file(folder):
        raise ManifestError(f"{folder} is a pair whose {FILE_NAME} is missing; {advise_pair_check(folder)}")


def restore_pair(folder: Path, report: Report) -> Pair | None:
    """The checks of a pair folder, whose pair.json is written again, without any, if it is missing or damaged.

    None where the folder holds no pair.

    Raises ManifestError: pair.json is of another schema or cannot be read.
    """
    try:
        if not lacks_pair_file(folder):
            return read_pair(folder)
        problem = f"{folder / FILE_NAME} is missing"
    except _DamagedPair as error:
        problem = error.problem
    report(f"{problem}: it is written again, without earlier measurements")
    write_pair(folder)
    return Pair(folder, ())


class _DamagedPair(ManifestError):
    """pair.json is damaged; problem says how."""

    def __init__(self, folder: Path, why: object) -> None:
        self.problem = f"{folder / FILE_NAME} is damaged ({why})"
        super().__init__(f"{self.problem}; {advise_pair_check(folder)}")


def read_pair(folder: Path) -> Pair | None:
    """The checks of a pair folder; None where the folder holds no pair.

    Raises ManifestError: the file is damaged or of another schema.
    """
    path = folder / FILE_NAME
    if not path.is_file():
        return None
    try:
        stated = read_json(path)
        version = stated.get("schema_version") if isinstance(stated, dict) else None
        if isinstance(version, int) and version > SCHEMA_VERSION:
            raise ManifestError(
                f"{path} has schema version {version}, that of a later edgespec; update edgespec, or delete the "
                f"file, and {advise_pair_check(folder)}"
            )
        document = read_as(_PairDocument, stated)
        for each, check in zip(stated["checks"], document.checks, strict=True):
            require_known_fields(each, check)
            require_known_fields(each["check"], check.check)
    except ValueError as error:
        raise _DamagedPair(folder, error) from None
    except OSError as error:
        raise ManifestError(f"{path} cannot be read ({error.strerror}); fix its permissions") from None
    return Pair(folder, document.checks)


def write_pair(folder: Path, checks: Sequence[CheckOnDevices] = ()) -> None:
    """Write the checks of a pair folder; without any, its speed is unknown."""
    document = {"schema_version": SCHEMA_VERSION, "checks": [asdict(check) for check in checks]}
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


def learned_files(folder: Path) -> list[LearnedFile]:
    """The files of lessons of all heads in a model or pair folder, by folder and name."""
    return [each for head in (folder, *part_folders(folder)) for each in files_beside(head)]


def _part_names(part: str) -> list[str]:
    return [part, *(f"{part}-{form}" for form in _FORMS)]


def _manifest_hashes(folder: Path, names: Iterable[PartName]) -> dict[PartName, str]:
    # Each manifest states the hashes of all other files.
    paths = {name: folder / name / MANIFEST_FILE for name in names}
    return {name: file_record(path).sha256 for name, path in paths.items() if path.is_file()}
