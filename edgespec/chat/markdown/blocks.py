"""Markdown as a stream that only grows: takes text, gives spans and tables to append, and takes none back.

Paragraphs, headings, list items and code come word by word, a table as a whole. A mark that is not
complete waits. Knows nothing of terminals but a width.
"""

import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple

from pygments.lexers import get_lexer_by_name
from pygments.token import Comment, String, _TokenType
from pygments.util import ClassNotFound
from rich.syntax import ANSI_DARK, ANSISyntaxTheme

from edgespec.chat.markdown.inline import InlineStream, Span, parser, spans_of
from edgespec.chat.markdown.line_wrap import LineWrap
from edgespec.system.printable import printable

# Beyond this many lines, those before the last line break outside of strings and comments are dropped.
_MAX_LINES = 12
_MOST_LEXED = 2000  # characters, again with each word of a line; 12 lines take 1 ms
_LAST_WORD = re.compile(r"(?:\w+|[^\w\s]+)?$")  # which may go on
_HEADING = re.compile(r" {0,3}(#{1,6})[ \t]+")
_ITEM = re.compile(r"([ \t]*)([-*+]|\d{1,9}[.)])[ \t]+")
_QUOTE = re.compile(r" {0,3}((?:> ?)+)")
_RULE = re.compile(r" {0,3}([-*_])[ \t]*(?:\1[ \t]*){2,}$")
_FENCE = re.compile(r"[ \t]*(`{3,}|~{3,})[ \t]*([^`\s]*)[^`]*$")
_ROW = re.compile(r"[ \t]*\|")
_DELIMITERS = re.compile(r"[ \t]*\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$")
# A line of marks alone may still become anything, and rows and fences are read as a whole.
_UNDECIDED = re.compile(r"(?:[\s#>*+_~`|:-]*|[ \t]*\d{1,9}[.)]?[ \t]*)$|[ \t]*(?:`{3}|~{3}|\|)")
_BREAK = Span("\n")
_RULE_WIDTH = 40


class CodeLines:
    """Takes code in the language behind a fence, and gives spans; an unknown one is not highlighted.

    What was given stays, so that the colours of a line that comes in parts are those of its beginning.
    """

    def __init__(self, language: str) -> None:
        self._before = self._line = ""
        self._num_shown = 0  # characters of the line
        try:
            self._lexer = get_lexer_by_name(language, stripnl=False, ensurenl=False) if language else None
        except ClassNotFound:
            self._lexer = None

    @property
    def is_in_line(self) -> bool:
        return bool(self._line)

    def push(self, text: str, *, is_end: bool = True) -> list[Span]:
        """Return what can be shown of a line without its line break: all of it at its end, else whole words."""
        self._line += text
        num_ready = len(self._line) if is_end else next(_LAST_WORD.finditer(self._line)).start()
        spans = self._spans(is_end=is_end) if num_ready > self._num_shown or is_end else []
        shown, at = [], 0
        for span in spans:
            low, high = max(self._num_shown - at, 0), max(num_ready - at, 0)
            shown.append(Span(span.text[low:high], span.style))
            at += len(span.text)
        self._num_shown = num_ready
        if is_end:
            self._line, self._num_shown = "", 0
        return [span for span in shown if span.text]

    def _spans(self, *, is_end: bool) -> list[Span]:
        """The spans of the line as far as it goes; at its end it belongs to what is before the next one."""
        code = self._before + self._line
        if self._lexer is None or (len(code) > _MOST_LEXED and not is_end):
            return [Span(self._line)]
        lines: list[list[Span]] = [[]]
        restart = at = 0  # where reading may begin the next time
        for kind, text in self._lexer.get_tokens(code):
            for part in text.splitlines(keepends=True):
                at += len(part)
                lines[-1].append(Span(part.removesuffix("\n"), _style(kind)))
                if part.endswith("\n"):
                    lines.append([])
                    spans_lines = any(each in (String, Comment.Multiline) for each in kind.split())
                    restart = restart if spans_lines else at
        if is_end:
            keep_from = restart if len(lines) > _MAX_LINES else 0
            self._before = code[keep_from:] + "\n"
        is_whole = "".join(span.text for span in lines[-1]) == self._line
        return lines[-1] if is_whole else [Span(self._line)]  # a lexer may drop a byte order mark


@cache
def _style(kind: _TokenType) -> str:
    style = str(ANSISyntaxTheme(ANSI_DARK).get_style_for_token(kind))
    return "" if style == "none" else style


class Table(NamedTuple):
    """Cells by rows, the header first; alignments are left, right or center."""

    rows: tuple[tuple[tuple[Span, ...], ...], ...]
    alignments: tuple[str, ...]


Piece = Span | Table


class MarkdownStream:
    """Takes the text of an answer and gives what to append to the screen; control characters are escaped."""

    def __init__(self, width: Callable[[], int]) -> None:
        self._width = width
        self._wrap = LineWrap(width)
        self._inline = InlineStream()
        self._line = ""  # the beginning of a line of which nothing is shown yet
        self._style: str | None = None  # of the line that is being shown
        self._fence = ""
        self._code: CodeLines | None = None
        self._rows: list[str] = []
        self._return = ""
        self._is_blank_due = self._has_begun = False

    @property
    def num_held_rows(self) -> int:
        """Rows of a table that is not complete, so that nothing of it is shown yet."""
        return len(self._rows)

    def push(self, text: str) -> list[Piece]:
        text = self._return + text
        self._return = "\r" if text.endswith("\r") else ""  # half a line break, perhaps
        text = printable(text.removesuffix("\r").replace("\r\n", "\n"))
        return [piece for part in text.splitlines(keepends=True) for piece in self._add(part)]

    def end(self) -> list[Piece]:
        """Return what is left, without a line break at its end."""
        if self._code is not None:
            out = [*self._add_code(self._code, "", is_end=True)]
        else:
            out = [*(self._show_line(self._line) if self._line else ()), *self._end_line(), *self._end_table()]
            self._line = ""
        while out and out[-1] == _BREAK:
            out.pop()
        return out

    def _add(self, part: str) -> Iterator[Piece]:
        """Take a part of a line, or its end with the line break."""
        text, is_end = part.removesuffix("\n"), part.endswith("\n")
        if self._code is not None:
            yield from self._add_code(self._code, text, is_end=is_end)
            return
        if self._style is not None:
            yield from self._show_words(text)
        else:
            self._line += text
            if is_end or not _UNDECIDED.match(self._line):
                line, self._line = self._line, ""
                yield from self._show_line(line)
        if is_end and self._style is not None:
            yield from self._end_line()
            yield _BREAK

    def _show_line(self, line: str) -> Iterator[Piece]:
        """Show a whole line, or the beginning of one that can be nothing but text."""
        if _ROW.match(line) or (self._rows and _DELIMITERS.match(line)):
            self._rows.append(line)
            return
        yield from self._end_table()
        if not line.strip():
            self._is_blank_due = self._has_begun
            return
        yield from self._begin_block()
        if fence := _FENCE.match(line):
            self._fence, self._code = fence[1], CodeLines(fence[2])
            yield from (Span(line.rstrip(), "dim"), _BREAK)
        elif _RULE.match(line):
            yield from (Span("─" * min(self._width(), _RULE_WIDTH), "dim"), _BREAK)
        else:
            prefix, hang, self._style, length = _parse_opening(line)
            self._inline = InlineStream()
            yield self._wrap.begin(prefix, hang)
            yield from self._show_words(line[length:])

    def _add_code(self, code: CodeLines, text: str, *, is_end: bool) -> Iterator[Piece]:
        """Take a part of a line of code, which waits while it may become the fence that closes the block."""
        self._line += text
        marks = self._line.strip()
        may_close = not (code.is_in_line or marks.strip(self._fence[0]))
        if may_close and not is_end:
            return
        line, self._line = self._line, ""
        if may_close and marks.startswith(self._fence):
            self._code = None
            yield Span(line.rstrip(), "dim")
        else:
            yield from code.push(line, is_end=is_end)
        if is_end:
            yield _BREAK

    def _show_words(self, text: str) -> list[Span]:
        return self._wrap.push(self._in_style(self._inline.push(text)))

    def _end_line(self) -> Iterator[Span]:
        if self._style is not None:
            yield from self._wrap.push(self._in_style(self._inline.flush()))
            yield from self._wrap.flush()
            self._style = None

    def _in_style(self, spans: list[Span]) -> list[Span]:
        return [Span(span.text, f"{self._style} {span.style}".strip()) for span in spans]

    def _begin_block(self) -> Iterator[Piece]:
        if self._is_blank_due:
            yield _BREAK
        self._is_blank_due, self._has_begun = False, True

    def _end_table(self) -> Iterator[Piece]:
        """Show the rows that were held back, as text where they are no table."""
        rows, self._rows = self._rows, []
        if not rows:
            return
        yield from self._begin_block()
        if table := _parse_table(rows):
            yield table
        else:
            for row in rows:
                yield from (Span(row), _BREAK)


def _parse_opening(line: str) -> tuple[Span, Span, str, int]:
    """The beginnings of a line and of lines broken off it, its style, and the length of its mark."""
    if heading := _HEADING.match(line):
        return Span(""), Span(""), "bold underline" if heading[1] == "#" else "bold", heading.end()
    if item := _ITEM.match(line):
        indent = " " * len(item[1].expandtabs(4))
        mark = item[2] if item[2][0].isdigit() else "•"
        return Span(f"{indent}{mark} "), Span(f"{indent}{' ' * len(mark)} "), "", item.end()
    if quote := _QUOTE.match(line):
        bar = Span("▌ " * quote[1].count(">"), "dim")
        return bar, bar, "", quote.end()
    length = len(line) - len(line.lstrip())
    indent_span = Span(line[:length].expandtabs(4))
    return indent_span, indent_span, "", length


def _parse_table(rows: list[str]) -> Table | None:
    tokens = parser().parse("\n".join(row.strip() for row in rows))
    columns = [token for token in tokens if token.type == "th_open"]
    if not columns:
        return None
    cells = [tuple(spans_of(token.children or [])) for token in tokens if token.type == "inline"]
    alignments = tuple(str(each.attrs.get("style", "left")).removeprefix("text-align:") for each in columns)
    width = len(columns)
    return Table(tuple(tuple(cells[i : i + width]) for i in range(0, len(cells), width)), alignments)
