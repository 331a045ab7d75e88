"""Highlights code line by line as it streams. Knows nothing of Markdown."""

from functools import cache

from pygments.lexers import get_lexer_by_name
from pygments.token import Comment, String, _TokenType
from pygments.util import ClassNotFound
from rich.syntax import ANSI_DARK, ANSISyntaxTheme

from edgespec.chat.markdown.inline import Span

# Beyond this many lines, those before the last line break outside of strings and comments are dropped.
_MAX_LINES = 40


class CodeLines:
    """Takes lines of code in the language behind a fence, and gives spans; an unknown one is not highlighted."""

    def __init__(self, language: str) -> None:
        self._before = ""
        try:
            self._lexer = get_lexer_by_name(language, stripnl=False, ensurenl=False) if language else None
        except ClassNotFound:
            self._lexer = None

    def push(self, line: str) -> list[Span]:
        """Return the spans of a line without its line break."""
        if self._lexer is None:
            return [Span(line)]
        code = self._before + line
        lines: list[list[Span]] = [[]]
        restart = at = 0  # where reading may begin the next time
        for kind, text in self._lexer.get_tokens(code):
            for part in text.splitlines(keepends=True):
                at += len(part)
                lines[-1].append(Span(part.removesuffix("\n"), _style(kind)))
                if part.endswith("\n"):
                    lines.append([])
                    restart = restart if _spans_lines(kind) else at
        keep_from = restart if len(lines) > _MAX_LINES else 0
        self._before = code[keep_from:] + "\n"
        return lines[-1]


def _spans_lines(kind: _TokenType) -> bool:
    return any(each in (String, Comment.Multiline) for each in kind.split())


@cache
def _style(kind: _TokenType) -> str:
    style = str(ANSISyntaxTheme(ANSI_DARK).get_style_for_token(kind))
    return "" if style == "none" else style
