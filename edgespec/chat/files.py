"""Files of a chat: the one that saves it as it goes, attached ones, and those that commands write."""

import json
import secrets
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from edgespec import (
    ContextOverflow,
    EdgeSpecError,
    Interval,
    Transcript,
    UsageError,
    chrome_trace,
    latest,
    picture,
    svg_picture,
)
from edgespec.chat.attachments import Attachment, expand_path, find_paths, join_message, read_attachment
from edgespec.chat.saved_chats import SUFFIX, export_text, free_name, running_mark
from edgespec.chat.session import ChatSession
from edgespec.system.console import print_stderr, warn
from edgespec.system.disk import has_content, hold_lock, replace_file
from edgespec.system.printable import one_line
from edgespec.system.signals import defer_signals
from edgespec.system.units import format_count

_NUM_SHOWN = 12
_NOTHING = "no file is attached; /attach FILE sends a file's text with your next message"


class TraceFile:
    """The timeline of all answers so far, rewritten after each: the file is a whole document at any time.

    A name that ends in .svg gives a picture, any other the JSON that chrome://tracing and Perfetto open.
    """

    def __init__(self, path: Path) -> None:
        """Raises UsageError: the file cannot be written."""
        self._path = path
        self._intervals: list[Interval] = []
        try:
            self._write()
        except OSError as error:
            raise UsageError(f"cannot write {path}: {error.strerror}") from None

    def add(self, timeline: Sequence[Interval]) -> None:
        """Add an answer; a file that cannot be written any more is reported and ends nothing."""
        self._intervals += timeline
        try:
            self._write()
        except OSError as error:
            warn(f"cannot write {self._path}: {error.strerror}")
        if timeline:
            print_stderr(f"the last {_NUM_SHOWN} passes of the target, and what was drafted meanwhile:")
            print_stderr(picture(latest(timeline, "target", _NUM_SHOWN)))

    def _write(self) -> None:
        is_picture = self._path.suffix.lower() == ".svg"
        document = svg_picture(self._intervals) if is_picture else json.dumps(chrome_trace(self._intervals))
        replace_file(self._path, document.encode(), 0o666)


def add_files(session: ChatSession, files: Sequence[Attachment], report: Callable[[str], None]) -> None:
    """Attach files to the next message, in place of those of the same name; report takes a line for each.

    Raises ContextOverflow: they do not fit beside what the model is sent already; nothing was attached then.
    """
    if not files:
        return
    names = {file.name for file in files}
    others = [file for file in session.attachments if file.name not in names]
    counts = [_count(session, file) for file in files]
    room = session.conversation.count_room(join_message(others, ""))
    if sum(counts) > room:
        found = ", ".join(f"{file.name} {count}" for file, count in zip(files, counts, strict=True))
        report(
            f"too long: {sum(counts)} tokens ({found}), and there is room for {max(0, room)}; nothing was attached"
        )
        context = session.engine.context_length
        needed = sum(counts) + context - room
        raise ContextOverflow(needed, context, session.engine.manifest.context_length)
    session.attachments = [*others, *files]
    for file, count in zip(files, counts, strict=True):
        report(f"attached {file.name}: {format_count(count, 'token')}")
    report(f"{room - sum(counts)} tokens are left for your message and the answer")


def attach(session: ChatSession, argument: str) -> None:
    """Attach the files of an argument; without one, list those that are attached."""
    if argument:
        add_files(session, [*map(read_attachment, find_paths(argument))], session.info)
        return
    lines = [
        f"{number}  {file.name}: {format_count(_count(session, file), 'token')}"
        for number, file in enumerate(session.attachments, 1)
    ]
    if lines:
        lines.append("sent with your next message; /detach removes all of them, /detach NAME one")
    session.info("\n".join(lines) or _NOTHING)


def detach(session: ChatSession, argument: str) -> None:
    """Drop the file of a name or number, or all files."""
    if not session.attachments:
        raise UsageError(_NOTHING)
    chosen = [
        file
        for number, file in enumerate(session.attachments, 1)
        if not argument or argument in (file.name, str(number))
    ]
    if not chosen:
        raise UsageError(f"no attached file is called {one_line(argument, 100)!r}; /attach lists them")
    session.attachments = [file for file in session.attachments if file not in chosen]
    session.info(f"no longer attached: {', '.join(file.name for file in chosen)}")


def _count(session: ChatSession, file: Attachment) -> int:
    return len(session.engine.tokenize(join_message([file], "")))


@dataclass
class AutosaveFile:
    """The file of a conversation in a folder, made with the first message and rewritten with each change."""

    folder: Path
    report: Callable[[str], None]  # takes a line, if the file can no longer be written
    path: Path | None = None
    on_path: Callable[[Path], None] = lambda path: None  # called with each new path
    has_failed: bool = False  # at the last write

    def __post_init__(self) -> None:
        self._mark = ExitStack()
        if self.path:
            self._begin(self.path)
        self.seen = _fingerprint(self.path)  # as it was read or written the last time

    def close(self) -> None:
        """Let other chats go on with this one."""
        self._mark.close()

    def _begin(self, path: Path) -> None:
        """Hold the mark by which other chats see that this one runs, where its file system knows locks."""
        self._mark.close()
        mark = running_mark(path)
        with suppress(OSError):  # among them TimeoutError: two chats write one file, which the fingerprints show
            if path.parent == self.folder:
                mark.parent.mkdir(mode=0o700, exist_ok=True)
                self._mark.enter_context(hold_lock(mark, timeout_s=0.0))
        self.on_path(path)

    def write(self, transcript: Transcript) -> str | None:
        """Write the conversation; return its name.

        If another process has written its file meanwhile, it has a new file, and a name of its own.
        """
        if self.path is None and not any(message.role != "system" for message in transcript.messages):
            return transcript.name
        try:
            with defer_signals():  # a write that Ctrl-C left half done would look like another process's
                transcript = self._write(transcript)
            self.has_failed = False
        except OSError as error:
            if not self.has_failed:
                self.has_failed = True
                self.report(f"this conversation is not saved: cannot write {self.folder} ({error.strerror})")
        return transcript.name

    def go_on_in(self, path: Path, seen: tuple[int, int] | None = None) -> None:
        """Write another file from now on; seen: its fingerprint when it was written, if that is long ago."""
        self.path, self.seen = path, seen or _fingerprint(path)
        self._begin(path)

    def start_new_file(self) -> None:
        """Leave the file as it is; the next write makes another one."""
        self._mark.close()
        self.path, self.seen = None, None

    def _write(self, transcript: Transcript) -> Transcript:
        """Returns what was written."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self.path
        if path is None or _fingerprint(path) != self.seen:
            path = self.folder / f"{datetime.now():%Y-%m-%d-%H%M%S}-{secrets.token_hex(2)}{SUFFIX}"
        is_another = self.path is not None and path != self.path
        if is_another and transcript.name:
            transcript = replace(transcript, name=free_name(self.folder, transcript.name))
        transcript.write(path)
        if is_another:
            called = f", called {transcript.name}" if transcript.name else ""
            self.report(
                f"another program changed or deleted the file of this chat, which continues in a new one{called}"
            )
        if path != self.path:
            self.path = path
            self._begin(path)
        self.seen = _fingerprint(path)
        return transcript


def _fingerprint(path: Path | None) -> tuple[int, int] | None:
    """Time and size, by which a file shows that it was written."""
    try:
        status = path.stat() if path else None
    except OSError:
        return None
    return (status.st_mtime_ns, status.st_size) if status else None


def parse_path(argument: str, name: str, example: str = "talk.jsonl") -> Path:
    """The path that follows a command. Raises UsageError: there is none, or it names no home folder."""
    if not argument:
        raise UsageError(f"/{name} needs a file name, for example /{name} {example}")
    return expand_path(argument)


def parse_new_path(session: ChatSession, argument: str, name: str, example: str) -> Path:
    """The path of a file to write. Raises UsageError: a file is there already.

    Only a file that was written from this conversation, and not changed since, is written again.
    """
    path = parse_path(argument, name, example)
    if has_content(path) and session.written.get(path.absolute()) != _fingerprint(path):
        shown = one_line(str(path), 200)
        found = "was changed by another program" if path.absolute() in session.written else "exists already"
        raise UsageError(f"{shown} {found} and was not replaced; to replace it: /{name}! {shown}")
    return path


def save_to(session: ChatSession, path: Path) -> None:
    """Write the conversation as JSON Lines. Raises EdgeSpecError: it cannot be written."""
    session.transcript().save(path)
    session.written[path.absolute()] = _fingerprint(path)
    num = format_count(len(session.conversation.messages), "message")
    session.info(f"{num} saved to {one_line(str(path), 200)}")


def export_to(session: ChatSession, path: Path) -> None:
    """Write the conversation to be read elsewhere. Raises EdgeSpecError: it cannot be written."""
    text = export_text(session.transcript(), path)
    try:
        replace_file(path, text.encode(errors="replace"), 0o666)
    except (OSError, ValueError) as error:
        raise EdgeSpecError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}") from None
    session.written[path.absolute()] = _fingerprint(path)
    num = format_count(len(session.conversation.messages), "message")
    session.info(f"{num} written to {one_line(str(path), 200)}")


def trace_to(session: ChatSession, path: Path) -> None:
    """Write when target and drafter worked on the last answer. Raises UsageError: there is none."""
    if session.last is None or not session.last.timeline:
        raise UsageError("there is no answer to trace yet")
    TraceFile(path).add(session.last.timeline)
    session.written[path.absolute()] = _fingerprint(path)
    session.info(
        f"saved to {one_line(str(path), 200)}; open .svg in a browser, other files in chrome://tracing or Perfetto"
    )
