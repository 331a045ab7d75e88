"""The conversations of earlier chats: listed, searched, found by name, deleted, and exported."""

import difflib
import json
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from edgespec.chat.attachments import brief_message, fence
from edgespec.chat.call_text import format_turn
from edgespec.chat.compacting import SUMMARY_REQUEST
from edgespec.engine.transcript import SUFFIX, Transcript, describe_turn, read_transcript
from edgespec.errors import EdgeSpecError, UsageError
from edgespec.system.printable import one_line

_TITLE_CHARACTERS = 44
PREFIX_SUFFIX = ".prefix"  # of the file beside a conversation with what the model has read of it
# In the list: the cell of the title, the cells (model, length) that are left out for it if it has fewer columns
# than the minimum, the columns that it has in any case, and the columns between two cells.
_TITLE, _LEFT_OUT_FIRST, _MIN_TITLE, _SHORTEST_TITLE, _BETWEEN = 1, (4, 2), 30, 8, 2
# Of names that a user may have meant: how like they are, of 1, how many are named, and among how many.
_LEAST_LIKENESS, _MOST_NAMED, _MOST_COMPARED = 0.6, 3, 500


class SavedChat(NamedTuple):
    """A conversation in a file; its title is its name, or how the first message begins that a person wrote."""

    path: Path
    transcript: Transcript
    changed: datetime

    @property
    def title(self) -> str:
        if self.transcript.name:
            return self.transcript.name
        typed = (each.content for each in self.transcript.messages if each.role == "user")
        first = next((text for text in typed if text != SUMMARY_REQUEST), "")
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


def find_chat(folder: Path, wanted: str, listed: Sequence[Path] = ()) -> SavedChat:
    """A conversation by its name, by the beginning of its title, or by its number.

    Numbers are those of the list that the user saw, listed: other chats may have changed places since. Without one
    they are those of the list now.

    Raises UsageError: There is none, or there are several.
    """
    chats = list_chats(folder)
    numbered = [next((each for each in chats if each.path == path), None) for path in listed] or chats
    named = [each for each in chats if each.transcript.name == wanted]
    if named:
        return named[0]
    if wanted.isascii() and wanted.isdigit() and 0 < int(wanted[:9]) <= len(numbered):
        if (chosen := numbered[int(wanted[:9]) - 1]) is None:
            raise UsageError(f"chat {wanted} of the list was deleted meanwhile; /chats lists what is there now")
        return chosen
    beginning = wanted.removesuffix("…").lower()  # as titles are cut in the list
    found = [each for each in chats if each.title.lower().startswith(beginning)]
    if len(found) == 1:
        return found[0]
    shown = one_line(wanted, 40)
    if found:
        titles = ", ".join(f"'{each.title}'" for each in found[:5])
        raise UsageError(
            f"'{shown}' fits {len(found)} chats: {titles}; write more of the name, or its number in /chats"
        )
    if near := _nearest(wanted, [each.title for each in chats]):
        hint = f"did you mean {' or '.join(repr(each) for each in near)}?"
    else:
        hint = f"the latest are {', '.join(repr(each.title) for each in chats[:3])}" if chats else "none is saved"
    raise UsageError(f"there is no chat '{shown}'; {hint}")


def _nearest(wanted: str, titles: Sequence[str]) -> list[str]:
    """The titles that are like a text, as a whole or in one of their words; the nearest come first."""
    text = wanted.lower()

    def likeness(title: str) -> float:
        parts = [title.lower(), *title.lower().split()]
        return (
            1.0 if text in parts[0] else max(difflib.SequenceMatcher(None, text, each).ratio() for each in parts)
        )

    by_title = {title: likeness(title) for title in titles[:_MOST_COMPARED]}
    ordered = sorted(by_title, key=lambda title: -by_title[title])
    return [title for title in ordered if by_title[title] >= _LEAST_LIKENESS][:_MOST_NAMED]


def describe_chats(
    chats: Sequence[SavedChat], numbers: Sequence[int], now: datetime, current: Path | None, columns: int
) -> list[str]:
    """A line for each chat: number, title, length, when it was changed, model; * marks the current one.

    Where columns are few, the model and the length are left out, and then titles are cut.
    """
    from rich.cells import cell_len, set_cell_size

    rows = [
        (
            f"{'*' if each.path == current else ' '}{number}",
            each.title,
            f"{len(each.transcript.messages)} messages",
            _when(each.changed, now),
            _brief_model(each.transcript.model or ""),
        )
        for number, each in zip(numbers, chats, strict=True)
    ]
    widths = {i: max(map(cell_len, column)) for i, column in enumerate(zip(*rows, strict=True))}
    title = widths.pop(_TITLE)
    for left_out in _LEFT_OUT_FIRST:
        if sum(widths.values()) + _BETWEEN * len(widths) + min(title, _MIN_TITLE) > columns:
            del widths[left_out]
    room = columns - sum(widths.values()) - _BETWEEN * len(widths)
    widths[_TITLE] = min(title, max(_SHORTEST_TITLE, room))

    def fit(cell: str, width: int) -> str:
        return set_cell_size(cell, width) if cell_len(cell) <= width else f"{set_cell_size(cell, width - 1)}…"

    return [(" " * _BETWEEN).join(fit(row[i], widths[i]) for i in sorted(widths)).rstrip() for row in rows]


def _brief_model(model: str) -> str:
    """A path by its last part, which tells most."""
    return one_line(model.rstrip("/\\").replace("\\", "/").rpartition("/")[2], 24)


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
        messages = [describe_turn(each) for each in transcript.messages]
        document = {"name": transcript.name, "model": transcript.model, "messages": messages}
        return json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    if path.suffix in (".md", ".markdown"):
        return "".join(_markdown(transcript))
    raise UsageError(f"{path.name} names no format; end it with .md or .json (/save writes what /load reads)")


def _markdown(transcript: Transcript) -> Iterator[str]:
    yield f"# {transcript.name or 'A conversation'}\n\nModel: {transcript.model}\n"
    reasons = dict(transcript.cut_short)
    titles = {"system": "System message", "user": "You", "assistant": "Answer", "tool": "Result of a call"}
    for i, message in enumerate(transcript.messages):
        text = format_turn(message).rstrip()
        if message.role == "tool":
            text = fence(text)
        yield f"\n## {titles[message.role]}\n\n{text}\n"
        if i in reasons:
            yield f"\n*(ended early: {reasons[i]})*\n"


def delete_chat(chat: SavedChat) -> None:
    """Delete its files. Raises EdgeSpecError: one cannot be deleted."""
    try:
        chat.path.unlink()
        chat.path.with_suffix(PREFIX_SUFFIX).unlink(missing_ok=True)
    except OSError as error:
        raise EdgeSpecError(f"cannot delete {chat.path}: {error.strerror}") from None
