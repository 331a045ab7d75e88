"""Text that comes in pieces, read by a parser that may go back, and JSON within it. Knows nothing of what is read.

Methods that may have to wait are generators: they yield where more text is needed.
"""

import json
import re
from collections.abc import Callable, Generator, Sequence
from math import inf
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]
_SPACE = " \t\n\r"
_ESCAPED = '"\\/bfnrt'
_SCALAR = re.compile(r"true|false|null|-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
_BEGUN = re.compile(r"-?(0|[1-9]\d*)?(\.\d*)?([eE][+-]?\d*)?")
_CLOSE = {"{": "}", "[": "]"}


def num_begun(text: str, marks: Sequence[str], start: int = 0) -> int:
    """Length of the longest end of a text, from start on, that begins one of several marks and is no whole one."""
    longest = max(map(len, marks), default=1) - 1
    for size in range(min(longest, len(text) - start), 0, -1):
        if any(len(mark) > size and mark.startswith(text[-size:]) for mark in marks):
            return size
    return 0


class EndOfText(Exception):
    """There is no more text."""


class TextReader:
    """A place in a text that is still coming."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.mark: int | None = None  # where a parser may go back to
        self.is_over = False

    def add(self, text: str) -> None:
        """Take more text; unless a place is marked, what was read is dropped."""
        if self.mark is None:
            self.text, self.at = self.text[self.at :], 0
        self.text += text

    def keep(self) -> None:
        """Never go back behind here."""
        self.mark = self.at

    def peek(self) -> Reading[str]:
        """The next character. Raises EndOfText."""
        while self.at == len(self.text):
            if self.is_over:
                raise EndOfText
            yield
        return self.text[self.at]

    def next(self) -> Reading[str]:
        """Take the next character. Raises EndOfText."""
        character = yield from self.peek()
        self.at += 1
        return character

    def skip_space(self) -> Reading[None]:
        """Go to the next character that is no white space. Raises EndOfText."""
        while (yield from self.peek()).isspace():
            self.at += 1

    def take(self, literal: str) -> Reading[bool]:
        """Take a text if it comes next."""
        while len(self.text) - self.at < len(literal):
            if self.is_over or not literal.startswith(self.text[self.at :]):
                return False
            yield
        if not self.text.startswith(literal, self.at):
            return False
        self.at += len(literal)
        return True

    def take_while(self, belongs: Callable[[str], bool]) -> Reading[str]:
        """Take the characters for which something holds, up to the first other one. Raises EndOfText."""
        found = ""
        while belongs((yield from self.peek())):
            found += self.text[self.at]
            self.at += 1
        return found

    def take_until(self, literal: str, on_text: Callable[[str], None]) -> Reading[None]:
        """Take what is before a text, in pieces as it comes, and the text itself.

        Raises EndOfText: It does not come; what there is has been taken.
        """
        while True:
            found = self.text.find(literal, self.at)
            num_held = 0 if self.is_over else num_begun(self.text, [literal], self.at)
            end = found if found >= 0 else len(self.text) - num_held
            if end > self.at:
                on_text(self.text[self.at : end])
            self.at = end
            if found >= 0:
                self.at += len(literal)
                return
            if self.is_over:
                raise EndOfText
            yield


class JsonScanner:
    """Checks one JSON value as it comes, a character at a time; a number too large to be written is none.

    Line ends and tabs within a string, which JSON does not allow and models write, are taken as their escapes.
    """

    def __init__(self) -> None:
        self.is_done = False
        self._open: list[str] = []  # brackets and braces that are not closed
        self._expects = "value"  # value, first value, key, first key, colon, next, string, escape, or hex
        self._is_key = False  # the string
        self._num_hex = 0
        self._scalar = ""  # a number or a word, as far as it is read

    def push(self, character: str) -> str | None:
        """The addition of a character to the value; None if the value ended before it.

        Raises ValueError: No JSON value goes on so.
        """
        if self.is_done:
            return None
        if self._scalar:
            if character not in _SPACE + ",]}":
                return self._add_to_scalar(character)
            self._end_scalar()
            if self.is_done:
                return None
        if self._expects in ("string", "escape", "hex"):
            return self._in_string(character)
        return character if character in _SPACE else self._structure(character)

    def _structure(self, character: str) -> str:
        expects = self._expects
        if character == '"' and expects in ("value", "first value", "key", "first key"):
            self._is_key = "key" in expects
            self._expects = "string"
        elif character == ":" and expects == "colon":
            self._expects = "value"
        elif character == "," and expects == "next":
            self._expects = "key" if self._open[-1] == "{" else "value"
        elif (
            character in "]}"
            and expects in ("next", "first key", "first value")
            and self._open
            and _CLOSE[self._open[-1]] == character
        ):
            self._open.pop()
            self._end_value()
        elif "value" not in expects:
            raise ValueError(f"found {character!r}, expected a {expects}")
        elif character in "{[":
            self._open.append(character)
            self._expects = "first key" if character == "{" else "first value"
        else:
            self._add_to_scalar(character)
        return character

    def _in_string(self, character: str) -> str:
        if self._expects == "hex":
            if character not in "0123456789abcdefABCDEF":
                raise ValueError(f"found {character!r} in the number of a character")
            self._num_hex -= 1
            self._expects = "hex" if self._num_hex else "string"
        elif self._expects == "escape":
            if character == "u":
                self._expects, self._num_hex = "hex", 4
            elif character in _ESCAPED:
                self._expects = "string"
            else:
                raise ValueError(f"found {character!r} behind a backslash")
        elif character == "\\":
            self._expects = "escape"
        elif character == '"':
            if self._is_key:
                self._expects = "colon"
            else:
                self._end_value()
        elif character < " ":
            return {"\n": "\\n", "\t": "\\t", "\r": "\\r"}.get(character, f"\\u{ord(character):04x}")
        return character

    def _add_to_scalar(self, character: str) -> str:
        begun = self._scalar + character
        if not _BEGUN.fullmatch(begun) and not any(word.startswith(begun) for word in ("true", "false", "null")):
            raise ValueError(f"found {begun!r}, expected a value")
        self._scalar = begun
        return character

    def _end_scalar(self) -> None:
        if not _SCALAR.fullmatch(self._scalar) or json.loads(self._scalar) in (inf, -inf):
            raise ValueError(f"found {self._scalar!r}, expected a value")
        self._scalar = ""
        self._end_value()

    def _end_value(self) -> None:
        self._expects = "next"
        self.is_done = not self._open
