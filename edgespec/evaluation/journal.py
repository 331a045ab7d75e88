"""A file that records each prompt of a benchmark as it is answered, so that an interrupted run can be continued.

JSON Lines: what was asked for; the setup, once a run; then a line for each prompt of a round.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypedDict

from edgespec import UsageError
from edgespec.evaluation.document import BenchDocument, BenchSetup, Count, PeerInfo, TurnRecord
from edgespec.evaluation.results import build_document
from edgespec.system.command_line import quote
from edgespec.system.disk import explain_full_disk, has_content
from edgespec.system.text_files import explain_unreadable, read_plain
from edgespec.system.typed_json import read_as

_LARGEST_BYTES = 1 << 28
_KIND = "edgespec bench journal"
_LASTING = ("model", "weights_sha256", "drafter", "drafter_sha256", "devices", "mode", "plain")


class Unit(TypedDict):
    """A prompt of a round, answered; without turns where it did not fit the context."""

    round: Count
    prompt: Count
    turns: list[TurnRecord]
    peers: list[PeerInfo]


class _JournalLine(TypedDict, total=False):
    kind: str
    asked: dict[str, Any]
    setup: BenchSetup
    unit: Unit


class Journal:
    """The units that are done, and a file that takes those that follow.

    asked: What the figures depend on, by name; a file that was begun with other values is refused.

    Raises:
        UsageError: The file cannot be read or written, or was begun with other values.
        DiskFull: There is no room for it.
    """

    def __init__(self, path: Path, asked: Mapping[str, Any]) -> None:
        self._path = path
        self.setup: BenchSetup | None = None
        self.units: dict[tuple[int, int], Unit] = {}
        if path.exists() and (has_content(path) or not path.is_file()):  # a full disk leaves an empty file
            self._read(asked)
        else:
            self._write({"kind": _KIND, "asked": asked})

    def is_done(self, number: int, prompt: int) -> bool:
        """True if a prompt was answered in a round."""
        return (number, prompt) in self.units

    def begin(self, setup: BenchSetup) -> None:
        """Note the setup of a run. Raises UsageError: The file was begun with another one."""
        self._require_same(_lasting(self.setup or setup), _lasting(setup))
        self.setup = setup
        self._write({"setup": setup})

    def add(self, unit: Unit) -> None:
        self.units[unit["round"], unit["prompt"]] = unit
        self._write({"unit": unit})

    def document(self) -> BenchDocument:
        """The document of all units so far. Raises UsageError: Nothing was measured yet."""
        if self.setup is None or not any(unit["turns"] for unit in self.units.values()):
            again = f"run the same bench with --resume {quote(self._path)}"
            raise UsageError(f"{self._path} holds no answers yet; {again}")
        return build_document(self.setup, *gather(list(self.units.values())))

    def _read(self, asked: Mapping[str, Any]) -> None:
        first, *lines = _read_lines(self._path)
        self._require_same(first["asked"], json.loads(json.dumps(asked)))
        for line in lines:
            self.setup = line.get("setup", self.setup)
            if unit := line.get("unit"):
                self.units[unit["round"], unit["prompt"]] = unit

    def _require_same(self, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        for name, wanted in now.items():
            if before.get(name) != wanted:
                raise UsageError(
                    f"{self._path} was begun with {name} {json.dumps(before.get(name))}, and this run has "
                    f"{json.dumps(wanted)}; name another file after --resume"
                )

    def _write(self, line: Mapping[str, Any]) -> None:
        # What an interrupted run wrote of a line stands alone, and is passed over.
        text = f"\n{json.dumps(line)}\n"
        try:
            with (
                explain_full_disk(self._path.absolute().parent, len(text)),
                self._path.open("a", encoding="utf-8") as file,
            ):
                file.write(text)
        except OSError as error:
            raise UsageError(f"cannot write {self._path}: {error.strerror}") from None


def _lasting(setup: Mapping[str, Any]) -> dict[str, Any]:
    """What the figures of one file have in common: model, drafter, devices, machine and versions."""
    return {**{name: setup.get(name) for name in _LASTING}, **setup.get("host", {})}


def read_journal(path: Path) -> Journal | None:
    """The journal in a file; None where it is none. Raises UsageError: It is damaged, or cannot be read."""
    if not path.is_file():  # a pipe is read once
        return None
    with explain_unreadable(path, "what edgespec bench wrote"), path.open("rb") as file:
        begins = file.read(100)
    return Journal(path, {}) if _KIND.encode() in begins else None


def gather(units: Sequence[Unit]) -> tuple[list[TurnRecord], list[PeerInfo]]:
    """All turns, and the last known state of each peer."""
    peers = {(peer["name"], peer["way"]): peer for unit in units for peer in unit["peers"]}
    return [turn for unit in units for turn in unit["turns"]], list(peers.values())


def _read_lines(path: Path) -> list[_JournalLine]:
    """The lines of a journal, the first with what was asked; lines that were cut off are left out."""
    lines = []
    with explain_unreadable(path, "a file of --resume"):
        for text in read_plain(path, _LARGEST_BYTES).decode().splitlines():
            with suppress(json.JSONDecodeError):
                lines.append(read_as(_JournalLine, json.loads(text)))
        if not lines or lines[0].get("kind") != _KIND or "asked" not in lines[0]:
            raise ValueError("it does not begin as one; name another")
    return lines
