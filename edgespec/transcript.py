"""Conversations as files: JSON Lines, a header and then a message a line. Each write is whole or not at all.

    {"format": "edgespec conversation", "version": 1, "model": "smollm2-135m", "num_dropped": 0}
    {"role": "user", "content": "Why is the sky blue?"}
    {"role": "assistant", "content": "Because …", "finish_reason": "cancelled"}

A message of the user that another follows got no word of an answer.

Knows nothing of engines and terminals.
"""

import json
import os
import secrets
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from edgespec.chat_template import ROLES, Message
from edgespec.disk import replace_file
from edgespec.errors import EdgeSpecError, UsageError
from edgespec.interrupts import held_back

FORMAT, VERSION = "edgespec conversation", 1
SUFFIX = ".jsonl"
_MOST_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class Transcript:
    """What was said.

    model: As the user named it.
    num_dropped: Messages after the system message that the model is not sent any more.
    cut_short: Of which answers (positions in messages) why they ended, where that was not by themselves.
    """

    messages: tuple[Message, ...] = ()
    model: str | None = None
    num_dropped: int = 0
    cut_short: tuple[tuple[int, str], ...] = ()

    def lines(self) -> list[str]:
        reasons = dict(self.cut_short)
        header = {"format": FORMAT, "version": VERSION, "model": self.model, "num_dropped": self.num_dropped}
        documents: list[dict[str, Any]] = [header]
        for i, message in enumerate(self.messages):
            reason = {"finish_reason": reasons[i]} if i in reasons else {}
            documents.append({"role": message.role, "content": message.content, **reason})
        return [json.dumps(document) for document in documents]


def write_transcript(path: Path, transcript: Transcript) -> None:
    """Only its owner may read the file.

    Raises:
        OSError: It cannot be written; what was there stays.
    """
    replace_file(path, "".join(line + "\n" for line in transcript.lines()).encode())


def read_transcript(path: Path) -> Transcript:
    """Raises UsageError: The file cannot be read, is damaged, or is none of ours."""
    try:
        stated = path.stat()
        if not stat.S_ISREG(stated.st_mode):
            raise UsageError(f"{path} is no file; wanted a conversation that /save wrote")
        if stated.st_size > _MOST_BYTES:
            raise UsageError(f"{path} has {stated.st_size >> 20} MiB; wanted a conversation that /save wrote")
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UsageError(f"{path} is no text; wanted a conversation that /save wrote") from None
    except (OSError, ValueError) as error:
        why = (isinstance(error, OSError) and error.strerror) or error
        raise UsageError(f"cannot read {path}: {why}") from None
    documents = [_document(path, number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    return _transcript(path, documents)


def _document(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        document = json.loads(line)
    except (ValueError, RecursionError):
        raise UsageError(f"line {number} of {path} is damaged (no JSON); wanted a message") from None
    if not isinstance(document, dict):
        raise UsageError(f"line {number} of {path} is a {type(document).__name__}; wanted an object")
    return document


def _transcript(path: Path, documents: Sequence[dict[str, Any]]) -> Transcript:
    header = documents[0] if documents else {}
    if header.get("format") != FORMAT:
        raise UsageError(f"{path} does not begin as a conversation of edgespec does; nothing was loaded")
    if header.get("version") != VERSION:
        raise UsageError(
            f"{path} is of version {header.get('version')!r} and this edgespec reads {VERSION}; use a newer one"
        )
    messages = tuple(_message(path, number, each) for number, each in enumerate(documents[1:], 2))
    num_dropped, model = header.get("num_dropped", 0), header.get("model")
    if type(num_dropped) is not int or not 0 <= num_dropped <= len(messages):
        raise UsageError(
            f"{path} says that {num_dropped!r} of {len(messages)} messages were dropped; it is damaged"
        )
    return Transcript(
        messages=messages,
        model=model if isinstance(model, str) else None,
        num_dropped=num_dropped,
        cut_short=tuple(
            (i, str(each["finish_reason"])) for i, each in enumerate(documents[1:]) if "finish_reason" in each
        ),
    )


def _message(path: Path, number: int, document: dict[str, Any]) -> Message:
    role, content = document.get("role"), document.get("content")
    if role not in ROLES or not isinstance(content, str):
        raise UsageError(
            f"line {number} of {path} is no message: wanted a role ({', '.join(ROLES)}) and a content"
        )
    return Message(role, content)


def latest(folder: Path) -> Path | None:
    """The transcript that was written last."""
    try:
        found = [(path.stat().st_mtime_ns, path) for path in folder.glob(f"*{SUFFIX}")]
    except OSError:
        return None
    return max(found, default=(0, None))[1]


class AutosaveFile:
    """A conversation's own file in a folder, written anew with what is new, made with the first message.

    report: Takes a line, once, where it cannot be written.
    name: Takes the path of the file, and of another that it goes on in.
    """

    def __init__(
        self,
        folder: Path,
        report: Callable[[str], None],
        path: Path | None = None,
        name: Callable[[Path], None] = lambda path: None,
    ) -> None:
        self._folder, self._report, self._name = folder, report, name
        self._path = path
        if path:
            name(path)
        self._seen = _state(path)
        self._has_failed = False

    @property
    def path(self) -> Path | None:
        return self._path

    def write(self, transcript: Transcript) -> None:
        """Where another process has written the file meanwhile, this one goes on in a new file."""
        if self._path is None and not any(message.role != "system" for message in transcript.messages):
            return
        try:
            with held_back():  # else what Ctrl-C left half done is taken for another process's
                self._write(transcript)
        except OSError as error:
            if not self._has_failed:
                self._has_failed = True
                self._report(f"this conversation is not kept: cannot write {self._folder} ({error.strerror})")

    def _write(self, transcript: Transcript) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._path
        if path is None or _state(path) != self._seen:
            path = self._new_path()
        write_transcript(path, transcript)
        if path != self._path:
            self._path = path
            self._name(path)
        self._seen = _state(self._path)

    def begin_anew(self) -> None:
        self._path, self._seen = None, None

    def _new_path(self) -> Path:
        now = datetime.now().strftime("%Y-%m-%d-%H%M%S")
        return self._folder / f"{now}-{secrets.token_hex(2)}{SUFFIX}"


def _state(path: Path | None) -> tuple[int, int] | None:
    try:
        stated = os.stat(path) if path else None
    except OSError:
        return None
    return (stated.st_mtime_ns, stated.st_size) if stated else None


def save_transcript(path: Path, transcript: Transcript) -> None:
    """The same where a user wants it.

    Raises:
        EdgeSpecError: It cannot be written there.
    """
    try:
        write_transcript(path, transcript)
    except (OSError, ValueError) as error:
        why = (isinstance(error, OSError) and error.strerror) or error
        raise EdgeSpecError(f"cannot write {path}: {why}") from None
