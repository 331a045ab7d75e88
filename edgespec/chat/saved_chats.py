"""The conversations of earlier chats: listed, searched, found by name, deleted, and exported."""

import difflib
import json
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from edgespec.chat.attachments import brief_message
from edgespec.engine.transcript import SUFFIX, Transcript, read_transcript
from edgespec.errors import EdgeSpecError, UsageError
from edgespec.system.printable import one_line

_TITLE_CHARACTERS = 44


class SavedChat(NamedTuple):
    """A conversation in a file; its title is its name, or the beginning of its first message."""

    path: Path
    transcript: Transcript
    changed: datetime

    @property
    def title(self) -> str:
        if self.transcript.name:
            return self.transcript.name
        first = next((each.content for each in self.transcript.messages if each.role == "user"), "")
        return one_line(brief_message(first), _TITLE_CHARACTERS)

    def contains(self, words: Sequence[str]) -> bool:
        """Whether each word is in its name or in a message, in any case."""
        text = "\n".join(
            [self.transcript.name or "", *(each.content for each in self.transcript.messages)]
        ).lower()
        return all(word.lower() in text for word in words)


def list_chats(folder: Path) -> list[SavedChat]:
    """All conversations in a folder that can be read, the latest first."""
    return sorted(_read_all(folder), key=lambda each: each.changed, reverse=True)


def _read_all(folder: Path) -> Iterator[SavedChat]:
    try:
        paths = [*folder.glob(f"*{SUFFIX}")]
    except OSError:
        return
    for path in paths:
        try:
            changed = datetime.fromtimestamp(path.stat().st_mtime)
            yield SavedChat(path, read_transcript(path), changed)
        except (OSError, UsageError):  # it was deleted meanwhile, or is damaged
            continue


def find_chat(folder: Path, wanted: str) -> SavedChat:
    """A conversation by its name, by the beginning of its title, or by its number in the list.

    Raises UsageError: There is none, or there are several.
    """
    chats = list_chats(folder)
    named = [each for each in chats if each.transcript.name == wanted]
    if named:
        return named[0]
    if wanted.isascii() and wanted.isdigit() and 0 < int(wanted[:9]) <= len(chats):
        return chats[int(wanted[:9]) - 1]
    found = [each for each in chats if each.title.lower().startswith(wanted.lower())]
    if len(found) == 1:
        return found[0]
    shown = one_line(wanted, 40)
    if found:
        titles = ", ".join(f"'{each.title}'" for each in found[:5])
        raise UsageError(
            f"'{shown}' fits {len(found)} chats: {titles}; write more of the name, or its number in /chats"
        )
    near = difflib.get_close_matches(wanted, [each.title for each in chats], n=1)
    hint = f"did you mean '{near[0]}'? " if near else ""
    raise UsageError(f"there is no chat '{shown}'; {hint}/chats in a chat lists all {len(chats)}")


def describe_chats(
    chats: Sequence[SavedChat], numbers: Sequence[int], now: datetime, current: Path | None
) -> list[str]:
    """A line for each chat: number, title, length, when it was changed, model; * marks the current one."""
    rows = [
        (
            f"{'*' if each.path == current else ' '}{number}",
            each.title,
            f"{len(each.transcript.messages)} messages",
            _when(each.changed, now),
            one_line(each.transcript.model or "", 24),
        )
        for number, each in zip(numbers, chats, strict=True)
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _when(changed: datetime, now: datetime) -> str:
    days = (now.date() - changed.date()).days
    if days == 0:
        return f"today {changed:%H:%M}"
    return "yesterday" if days == 1 else f"{changed:%Y-%m-%d}"


def export_text(transcript: Transcript, path: Path) -> str:
    """The conversation as the suffix of a path says: Markdown for .md, messages as programs take them for .json.

    Raises UsageError: Another suffix.
    """
    if path.suffix == ".json":
        messages = [{"role": each.role, "content": each.content} for each in transcript.messages]
        document = {"name": transcript.name, "model": transcript.model, "messages": messages}
        return json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    if path.suffix in (".md", ".markdown"):
        return "".join(_markdown(transcript))
    raise UsageError(f"{path.name} names no format; end it with .md or .json (/save writes what /load reads)")


def _markdown(transcript: Transcript) -> Iterator[str]:
    yield f"# {transcript.name or 'A conversation'}\n\nModel: {transcript.model}\n"
    reasons = dict(transcript.cut_short)
    titles = {"system": "System message", "user": "You", "assistant": "Answer"}
    for i, message in enumerate(transcript.messages):
        yield f"\n## {titles[message.role]}\n\n{message.content.rstrip()}\n"
        if i in reasons:
            yield f"\n*(ended early: {reasons[i]})*\n"


def delete_chat(chat: SavedChat) -> None:
    """Delete the file. Raises EdgeSpecError: it cannot be deleted."""
    try:
        chat.path.unlink()
    except OSError as error:
        raise EdgeSpecError(f"cannot delete {chat.path}: {error.strerror}") from None
