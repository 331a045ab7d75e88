"""Files whose text goes to the model with a message: read or refused, and put into the message."""

import glob
import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from edgespec import UsageError, read_pdf
from edgespec.system.command_line import split_words
from edgespec.system.printable import one_line
from edgespec.system.tables import read_table
from edgespec.system.text_files import decode_text, require_own_content
from edgespec.system.units import format_bytes

MAX_TEXT_BYTES = 1 << 20  # about 250,000 tokens, which take 2 s to count
MAX_PDF_BYTES = 64 << 20
_PDF = b"%PDF-"
_HEAD = re.compile(r"File: ([^\n]+)\n(`{3,})[^`\n]*\n")
_MIN_FENCE = 3
_LANGUAGES: dict[str, str] = read_table(__file__, "fences.toml")
_IS_LANGUAGE = re.compile(r"[a-z0-9+#]{1,12}").fullmatch


class Attachment(NamedTuple):
    """The text of a file, and what the model is told as its name."""

    name: str
    text: str


def join_message(files: Sequence[Attachment], text: str) -> str:
    """A message with the text of files before it, each with its name and in a fence that its text cannot end.

    Example: File: a.py, a line with ```python, the text, a line with ```, an empty line, and then the message.
    """
    return "".join(_fenced(file) for file in files) + text


def split_message(message: str) -> tuple[tuple[Attachment, ...], str]:
    """The files that join_message put before a message, and the message."""
    files = []
    while head := _HEAD.match(message):
        end = f"\n{head[2]}\n\n"
        at = message.find(end, head.end() - 1)  # the text may be empty
        if at < 0:
            break
        files.append(Attachment(head[1], message[head.end() : max(at, head.end())]))
        message = message[at + len(end) :]
    return tuple(files), message


def brief_message(message: str) -> str:
    """A message as its user wrote it, behind the names of its files: [notes.md, 12 lines] What is new?"""
    files, text = split_message(message)
    counted = ((file.name, file.text.count("\n") + 1) for file in files)
    return "".join(f"[{name}, {num} line{'s' if num > 1 else ''}] " for name, num in counted) + text


def _fenced(file: Attachment) -> str:
    ending = Path(file.name).suffix.lower().removeprefix(".")
    language = _LANGUAGES.get(ending, ending if _IS_LANGUAGE(ending) else "text")
    return f"File: {file.name}\n{fence(file.text, language)}\n\n"


def fence(text: str, language: str = "") -> str:
    """A text as a block of code in Markdown, whatever it holds."""
    marks = "`" * max(_MIN_FENCE, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{marks}{language}\n{text}\n{marks}" if text else f"{marks}{language}\n{marks}"


def find_paths(argument: str) -> list[Path]:
    """The files that a user named: one whose name may have spaces, or several, quoted as in a shell.

    Raises UsageError: one of them is missing.
    """
    if os.path.exists(path := expand_path(argument)):
        return [path]
    try:
        words = split_words(argument)
    except ValueError:  # a quote that is not closed
        words = [argument]
    paths = [path for word in words for path in _matching(expand_path(word))]
    for path in paths:
        if not os.path.exists(path):
            raise UsageError(f"there is no file {one_line(str(path), 200)}; nothing was attached")
    return paths


def _matching(path: Path) -> list[Path]:
    """The files of a name with wildcards, as a shell finds them; the name itself where there is none."""
    if os.path.exists(path) or not glob.has_magic(str(path)):
        return [path]
    return [Path(found) for found in sorted(glob.glob(str(path))) if os.path.isfile(found)] or [path]


def expand_path(name: str) -> Path:
    """The path of a name, in which ~ is a home folder. Raises UsageError: there is no such folder."""
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        raise UsageError(f"{one_line(name, 200)}: {error}") from None


def read_attachment(path: Path) -> Attachment:
    """Read a file of text, or the text of a PDF. Line ends become those of Unix.

    Raises UsageError: it is missing, no file, too large, binary or empty, its encoding is unknown, or it may not
    be read; EdgeSpecError: the library that reads PDFs is missing.
    """
    shown = one_line(str(path), 200)
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise UsageError(f"{shown} is a folder; attach the files in it that you need")
        if not stat.S_ISREG(status.st_mode):
            raise UsageError(f"{shown} is a pipe or a device, not a file; save its text to a file and attach that")
        with path.open("rb") as file:
            start = file.read(len(_PDF))
            most = MAX_PDF_BYTES if start == _PDF else MAX_TEXT_BYTES
            data = start + file.read(most + 1 - len(start))
    except FileNotFoundError:
        raise UsageError(f"there is no file {shown}") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {shown}: {getattr(error, 'strerror', None) or error}") from None
    if len(data) > most:
        size = max(status.st_size, len(data))
        raise UsageError(
            f"{shown} has {format_bytes(size)}; at most {format_bytes(most)} can be attached: attach a part of it"
        )
    text = read_pdf(data, shown, MAX_TEXT_BYTES) if start == _PDF else _decode(data, shown)
    text = text.replace("\r\n", "\n").strip("\n")
    if not text.strip():
        raise UsageError(f"{shown} is empty; there is nothing to attach")
    # Of another path the name alone: the model need not know the user's folders.
    is_inside = not path.is_absolute() and ".." not in path.parts
    return Attachment(one_line(path.as_posix() if is_inside else path.name, 200), text)


def _decode(data: bytes, shown: str) -> str:
    try:
        require_own_content(data)
        text = decode_text(data)
    except ValueError as error:
        if b"\0" not in data or "UTF-16" in str(error):
            raise UsageError(f"{shown} cannot be attached: {error}") from None
        text = "\0"
    if "\0" in text:
        raise UsageError(f"{shown} is binary, not text; text, code, Markdown, CSV and PDF can be attached")
    return text
