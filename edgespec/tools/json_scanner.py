"""A JSON value read a character at a time, without waiting for its end. Knows nothing of what it means."""

import re

_SPACE = " \t\n\r"
_ESCAPED = '"\\/bfnrt'
_SCALAR = re.compile(r"true|false|null|-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
_BEGUN = re.compile(r"-?(0|[1-9]\d*)?(\.\d*)?([eE][+-]?\d*)?")
_CLOSE = {"{": "}", "[": "]"}


class JsonScanner:
    """Checks one value as it comes.

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
        """What the character adds to the value; None if the value ended before it.

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
        if character in _SPACE:
            return character
        return self._structure(character)

    def end(self) -> None:
        """Raises ValueError: The text ends within the value."""
        if self._scalar and not self._open:
            self._end_scalar()
        if not self.is_done:
            raise ValueError("the value is not complete")

    def _structure(self, character: str) -> str:
        expects = self._expects
        if character == '"' and expects in ("value", "first value", "key", "first key"):
            self._is_key = "key" in expects
            self._expects = "string"
        elif character == ":" and expects == "colon":
            self._expects = "value"
        elif character == "," and expects == "next":
            self._expects = "key" if self._open[-1] == "{" else "value"
        elif character in "]}" and self._may_close(character):
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

    def _may_close(self, character: str) -> bool:
        return (
            bool(self._open)
            and _CLOSE[self._open[-1]] == character
            and self._expects in ("next", "first key", "first value")
        )

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
        if not _SCALAR.fullmatch(self._scalar):
            raise ValueError(f"found {self._scalar!r}, expected a value")
        self._scalar = ""
        self._end_value()

    def _end_value(self) -> None:
        self._expects = "next"
        self.is_done = not self._open
