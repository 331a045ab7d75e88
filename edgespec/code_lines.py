"""Code, highlighted line by line as it comes. Knows nothing of Markdown."""

from functools import cache

from pygments.lexer import Lexer
from pygments.lexers import get_lexer_by_name
from pygments.token import Comment, String, _TokenType
from pygments.util import ClassNotFound
from rich.syntax import ANSI_DARK, ANSISyntaxTheme

from edgespec.markdown_inline import Span

# Lines are read again from the last place outside of strings and comments that is so many lines back.
_LINES_AGAIN = 40


class CodeLines:
    """Lines of a language in, spans out.

    language: As behind the fence of a block; one that nobody knows is not highlighted.
    """

    def __init__(self, language: str) -> None:
        self._lexer = _lexer(language)
        self._before: list[str] = []

    def push(self, line: str) -> list[Span]:
        """A line without its end."""
        if self._lexer is None or not line.strip():
            self._before.append(line)
            return [Span(line)] if line else []
        self._before.append(line)
        lines = _highlighted(self._lexer, "\n".join(self._before))
        if len(self._before) > _LINES_AGAIN:
            self._forget()
        return lines[-1]

    def _forget(self) -> None:
        assert self._lexer is not None
        kinds = _kinds_at_line_ends(self._lexer, "\n".join(self._before))
        for i in reversed(range(len(self._before) - 1)):
            if not _spans_lines(kinds[i]):
                del self._before[: i + 1]
                return


def _spans_lines(kind: _TokenType) -> bool:
    return any(each in (String, Comment.Multiline) for each in kind.split())


def _lexer(language: str) -> Lexer | None:
    try:
        return get_lexer_by_name(language, stripnl=False, stripall=False, ensurenl=False) if language else None
    except ClassNotFound:
        return None


def _highlighted(lexer: Lexer, code: str) -> list[list[Span]]:
    """Spans of each line."""
    lines: list[list[Span]] = [[]]
    for kind, text in lexer.get_tokens(code):
        for i, part in enumerate(text.split("\n")):
            if i:
                lines.append([])
            if part:
                lines[-1].append(Span(part, _style(kind)))
    return lines


def _kinds_at_line_ends(lexer: Lexer, code: str) -> list[_TokenType]:
    """The kind of token that each line end lies in."""
    return [kind for kind, text in lexer.get_tokens(code) for _ in range(text.count("\n"))]


@cache
def _style(kind: _TokenType) -> str:
    style = str(ANSISyntaxTheme(ANSI_DARK).get_style_for_token(kind))
    return "" if style == "none" else style
