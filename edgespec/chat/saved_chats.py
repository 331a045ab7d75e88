"""The conversations of earlier chats: listed, found by name, opened, deleted, exported, and gone on with.

What the model has read of one is kept beside it when the chat is left, so that it need not be read again.
"""

import difflib
import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import chain, count
from pathlib import Path
from typing import NamedTuple

from edgespec import CATALOG, EdgeSpecError, ModelHome, Stats, Transcript, UsageError, in_flags
from edgespec.chat.attachments import brief_message, fence, split_message
from edgespec.chat.call_text import format_turn
from edgespec.chat.command import whole_number
from edgespec.chat.compacting import SUMMARY_REQUEST
from edgespec.chat.past_rounds import show_last
from edgespec.chat.session import ChatSession
from edgespec.config.config_file import default_home
from edgespec.system.command_line import join_words
from edgespec.system.disk import explain_change, holder_digits, is_locked
from edgespec.system.printable import one_line
from edgespec.system.units import format_bytes, format_count

_TITLE_CHARACTERS = 44
_NAME_CHARACTERS = 50  # before a number; names have 60 at most
SUFFIX = ".jsonl"
PREFIX_SUFFIX = ".prefix"  # of the file beside a conversation with what the model has read of it
# In the list: the cell of the title, the cells (model, length) that are left out for it if it has fewer columns
# than the minimum, the columns that it has in any case, and the columns between two cells.
_TITLE, _LEFT_OUT_FIRST, _MIN_TITLE, _SHORTEST_TITLE, _BETWEEN = 1, (4, 2), 30, 8, 2
# Of names that a user may have meant: how like they are, of 1, how many are named, and among how many.
_LEAST_LIKENESS, _MOST_NAMED, _MOST_COMPARED = 0.6, 3, 500
_FEWEST_READ = 100  # tokens; fewer take longer for each
_MOST_LISTED = 20


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
        _, typed_text = split_message(first)
        return one_line(typed_text if typed_text.strip() else brief_message(first), _TITLE_CHARACTERS)

    @property
    def is_empty(self) -> bool:
        """True if it has no name and nobody has said anything in it, as after /undo of the first message."""
        return not self.transcript.name and all(each.role == "system" for each in self.transcript.messages)

    def contains(self, words: Sequence[str]) -> bool:
        """True if each word is in its name or in a message, in any case."""
        text = "\n".join(
            [self.transcript.name or "", *(each.content for each in self.transcript.messages)]
        ).lower()
        return all(word.lower() in text for word in words)


def list_chats(folder: Path) -> list[SavedChat]:
    """All conversations in a folder that can be read, the latest first."""
    found = (each for each in _read_all(folder) if not each.is_empty)
    return sorted(found, key=lambda each: each.changed, reverse=True)


def _read_all(folder: Path) -> Iterator[SavedChat]:
    try:
        paths = [*folder.glob(f"*{SUFFIX}")]
    except OSError:
        return
    for path in paths:
        try:
            changed = datetime.fromtimestamp(path.stat().st_mtime)
            yield SavedChat(path, Transcript.read(path), changed)
        except (OSError, UsageError):  # it was deleted meanwhile, or is damaged
            continue


def find_latest(folder: Path) -> Path | None:
    """The conversation in a folder that was written last, and that no running chat writes; it may be damaged."""
    written: list[tuple[float, Path]] = []
    for path in folder.glob(f"*{SUFFIX}"):
        with suppress(OSError):  # it was deleted meanwhile
            written.append((path.lstat().st_mtime, path))
    empty = {each.path for each in _read_all(folder) if each.is_empty}
    latest_first = (path for _, path in sorted(written, reverse=True))
    return next((path for path in latest_first if path not in empty and not is_running(path)), None)


def running_mark(path: Path) -> Path:
    """The lock that the chat holds which writes a conversation."""
    return path.parent.with_name(f"{path.parent.name}-running") / path.stem


def is_running(path: Path) -> bool:
    """True if another process goes on with a conversation now."""
    mark = running_mark(path)
    with suppress(OSError):  # there is none
        return holder_digits(mark) != str(os.getpid()).encode() and is_locked(mark)
    return False


def find_chat(folder: Path, wanted: str, listed: Sequence[Path] = ()) -> SavedChat:
    """A conversation by its name, by the beginning of its title, or by its number.

    Numbers are those of the list that the user saw, listed: other chats may have changed places since. Without one
    they are those of the list now.

    Raises UsageError: There is none, or there are several.
    """
    chats = list_chats(folder)
    numbered = [next((each for each in chats if each.path == path), None) for path in listed] or chats
    named = [each for each in chats if each.transcript.name == wanted]
    if len(named) > 1:
        now = datetime.now()
        places = [f"{i} ({_when(each.changed, now)})" for i, each in enumerate(numbered, 1) if each in named]
        raise UsageError(
            f"{len(named)} chats are called {wanted}; use a number from /chats instead: " + " or ".join(places)
        )
    if named:
        return named[0]
    if 0 < whole_number(wanted) <= len(numbered):
        if (chosen := numbered[whole_number(wanted) - 1]) is None:
            raise UsageError(f"chat {wanted} of the list has been deleted; /chats lists those that are left")
        return chosen
    beginning = wanted.removesuffix("…").lower()  # as titles are cut in the list
    found = [each for each in chats if each.title.lower().startswith(beginning)]
    if len(found) == 1:
        return found[0]
    shown = one_line(wanted, 40)
    if found:
        titles = ", ".join(f"'{each.title}'" for each in found[:5])
        raise UsageError(
            f"'{shown}' matches {len(found)} chats: {titles}; type more of the name, or its number in /chats"
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
            format_count(len(each.transcript.messages), "message"),
            _when(each.changed, now),
            # Of a path the last part, which tells most.
            one_line(re.split(r"[/\\]", (each.transcript.model or "").rstrip("/\\"))[-1], 24),
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
        messages = transcript.documents()
        document = {"name": transcript.name, "model": transcript.model, "messages": messages}
        return json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    if path.suffix in (".md", ".markdown"):
        return "".join(_markdown(transcript))
    raise UsageError(f"{path.name} does not say the format; end the name with .md or .json (for /load, use /save)")


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


def kept_path(file: Path) -> Path:
    """The file beside that of a conversation."""
    return file.with_suffix(PREFIX_SUFFIX)


def keep_prefix(session: ChatSession) -> None:
    """Write the file, if the user wants one and the conversation has a file; what goes wrong is said."""
    if not session.keeps_prefix or session.file is None or not session.answer:
        return
    path = kept_path(session.file)
    try:
        num_tokens = session.engine.save_prefix(path)
    except EdgeSpecError as error:
        session.info(f"the KV cache of this chat was not saved: {in_flags(str(error))}")
        return
    speed = _reading_speed(session.stats)
    saved = f"; to read them again takes about {num_tokens / speed:.1f} s" if speed else ""
    size, place = format_bytes(path.stat().st_size), one_line(str(path), 200)
    session.info(f"saved the KV cache of {num_tokens} tokens ({size}) at {place}{saved}")


def _reading_speed(stats: Stats | None) -> float | None:
    """Tokens that the last answer has read in a second, if they were enough to tell."""
    if stats is None or not stats.prefill_tokens_per_second or not stats.time_to_first_token_s:
        return None
    num_read = stats.prefill_tokens_per_second * stats.time_to_first_token_s
    return stats.prefill_tokens_per_second if num_read >= _FEWEST_READ else None


def take_prefix(session: ChatSession) -> None:
    """Read the file, if there is one; where it cannot be used the model reads the conversation again."""
    if session.file is None or not (path := kept_path(session.file)).exists():
        return
    try:
        num_tokens = session.engine.load_prefix(path)
    except EdgeSpecError as error:
        session.info(f"the model reads the conversation again: {in_flags(str(error))}")
        return
    if not session.is_quiet:
        session.info(f"loaded the KV cache: {num_tokens} tokens need not be read again")


def free_name(folder: Path, name: str) -> str:
    """A name that no saved chat has: this one, or with a number behind it, as in "recipes (2)"."""
    taken = {each.transcript.name for each in _read_all(folder)}
    stem = re.sub(r" \(\d+\)$", "", name)[:_NAME_CHARACTERS]
    return next(each for each in chain([name], (f"{stem} ({i})" for i in count(2))) if each not in taken)


def name_chat(session: ChatSession, name: str) -> None:
    folder = require_folder(session)
    if not name:
        session.info(f"this chat is called {session.name}" if session.name else "this chat has no name yet")
        return
    if name.isdigit() or name.startswith("-") or one_line(name, 60) != name:
        raise UsageError(
            "a name has one line of at most 60 characters, is not a number, and does not begin with -"
        )
    others = [each for each in list_chats(folder) if each.transcript.name == name]
    if any(each.path != session.file for each in others):
        raise UsageError(f"another chat is called {name}; choose another name, or /delete {name}")
    session.name = name
    session.save()
    if session.autosave and session.autosave.has_failed:
        raise UsageError(f"this chat is called {name}, but it is not saved; /save FILE saves it elsewhere")
    again = join_words(["edgespec", "chat", "--continue", name])
    session.info(f"this chat is called {name}; {again} opens it again")


def show_chats(session: ChatSession, words: str) -> None:
    chats = list_chats(require_folder(session))
    found = [(i, each) for i, each in enumerate(chats, 1) if each.contains(words.split())]
    if not found:
        session.info(f"no chat contains '{one_line(words, 40)}'" if words else "there are no saved chats yet")
        return
    shown = found[:_MOST_LISTED]
    session.listed = tuple(each.path for each in chats)
    columns = shutil.get_terminal_size().columns - 1
    numbers, listed = [i for i, _ in shown], [each for _, each in shown]
    lines = describe_chats(listed, numbers, datetime.now(), session.file, columns)
    if len(found) > len(shown):
        lines.append(f"and {format_count(len(found) - len(shown), 'older one')}; /chats WORDS searches them")
    session.info("\n".join([*lines, "/open NAME or /open NUMBER continues one"]))


def open_chat(session: ChatSession, wanted: str) -> SavedChat:
    """Continue another conversation in its own file. Raises UsageError: there is none of that name."""
    if not wanted:
        raise UsageError("/open needs the name of a chat or its number; /chats lists them")
    chat = find_chat(require_folder(session), wanted, session.listed)
    session.conversation.restore(chat.transcript)
    session.open_file(chat.path, chat.transcript)
    show_last(session.conversation.rounds, session.info)
    return chat


def suggest_instead(session: ChatSession, wanted: str) -> None:
    """Raises UsageError: What is no file for /load is a saved chat, a model or a preset."""
    shown = one_line(wanted, 60)
    home = ModelHome(default_home())
    if wanted in CATALOG or wanted in home.names() or home.presets.has(wanted):
        raise UsageError(f"there is no file {shown}; /model {shown} switches to the model of that name")
    if session.autosave is None:
        return
    try:
        chat = find_chat(session.autosave.folder, wanted, session.listed)
    except UsageError:  # there is no such chat either, which is for read_transcript to say of the file
        return
    raise UsageError(
        f"there is no file {shown}; /open {shown} continues the saved chat '{one_line(chat.title, 60)}'"
    )


def delete_chat(chat: SavedChat) -> None:
    """Delete its files. Raises EdgeSpecError: one cannot be deleted."""
    with explain_change(f"delete {chat.path}"):
        chat.path.unlink()
        kept_path(chat.path).unlink(missing_ok=True)


def offer_deletion(session: ChatSession, wanted: str) -> None:
    """Say how to delete a saved chat, which has to be confirmed. Raises UsageError: it cannot be deleted."""
    chat = _deletable_chat(session, wanted)
    num = format_count(len(chat.transcript.messages), "message")
    session.info(f"/delete! {wanted} deletes '{one_line(chat.title, 60)}' with {num} for good")


def delete_saved(session: ChatSession, wanted: str) -> None:
    """Delete a saved chat for good. Raises EdgeSpecError: it cannot be deleted."""
    chat = _deletable_chat(session, wanted)
    delete_chat(chat)
    session.info(f"deleted '{one_line(chat.title, 60)}'")


def _deletable_chat(session: ChatSession, wanted: str) -> SavedChat:
    if not wanted:
        raise UsageError("/delete needs the name of a chat or its number; /chats lists them")
    chat = find_chat(require_folder(session), wanted, session.listed)
    if chat.path == session.file:
        raise UsageError("this chat is open; begin another one with /clear, then delete this one")
    return chat


def branch(session: ChatSession, argument: str) -> None:
    """Go on in a new file with the first messages and their answers; the present file stays as it is."""
    conversation = session.conversation
    num = len(conversation.rounds)
    if not num:
        raise UsageError("there is nothing to branch from yet")
    if argument and not 0 < whole_number(argument) <= num:
        raise UsageError(f"/branch takes the number of a message from 1 to {num}, as /history shows them")
    kept = whole_number(argument) if argument else num
    conversation.keep(kept)
    session.start_new_file()
    session.save()
    of = format_count(num, "message")
    session.info(f"a branch with the first {kept} of {of}; the other chat stays as it is (/chats)")


def require_folder(session: ChatSession) -> Path:
    """The folder of saved chats. Raises UsageError: this chat saves nothing."""
    if session.autosave is None:
        raise UsageError("this chat saves nothing (--no-history), so there is no list of chats")
    return session.autosave.folder
