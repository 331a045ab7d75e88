"""Splits an answer that streams into text and code, without the lines that fence code in Markdown."""

import re

_FENCE = re.compile(r"[ \t]*(`{3,}|~{3,})[^`\n]*\n?\Z")
_MAY_BE_FENCE = re.compile(r"[ \t]*(`{0,2}|~{0,2}|`{3,}[^`\n]*|~{3,}[^\n]*)\Z")


class CodeFences:
    """Takes pieces of Markdown, and gives (text, is_code) as soon as it is known which of both a line is."""

    def __init__(self) -> None:
        self._line = ""  # the beginning of a line that may become a fence
        self._fence = ""  # that began the code
        self._is_line_begun = False

    def push(self, text: str) -> list[tuple[str, bool]]:
        return [each for part in text.splitlines(keepends=True) for each in self._add(part)]

    def end(self) -> list[tuple[str, bool]]:
        """Give what was held back."""
        line, self._line = self._line, ""
        return self._show(line) if line and not self._take_fence(line) else []

    def _add(self, part: str) -> list[tuple[str, bool]]:
        if self._is_line_begun:
            return self._show(part)
        self._line += part
        if _MAY_BE_FENCE.match(self._line):
            return []
        line, self._line = self._line, ""
        return [] if self._take_fence(line) else self._show(line)

    def _take_fence(self, line: str) -> bool:
        """Begin or end code if the line says so."""
        mark = found[1] if (found := _FENCE.match(line)) else ""
        if not mark or (self._fence and (not mark.startswith(self._fence) or line.strip() != mark)):
            return False
        self._fence = "" if self._fence else mark
        return True

    def _show(self, text: str) -> list[tuple[str, bool]]:
        self._is_line_begun = not text.endswith("\n")
        return [(text, bool(self._fence))]
