"""Markdown as a stream that only ever grows: text in, spans and tables out, none of which is taken back.

A paragraph, a heading or an item of a list comes word by word, code line by line, a table as a whole. What is half
a mark waits until it is known. Knows nothing of terminals but a width.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from edgespec.code_lines import CodeLines
from edgespec.line_wrap import LineWrap, joined
from edgespec.markdown_inline import InlineStream, Span, styled
from edgespec.printable import printable

_HEADING = re.compile(r" {0,3}(#{1,6})[ \t]+")
_ITEM = re.compile(r"([ \t]*)([-*+]|\d{1,9}[.)])[ \t]+")
_QUOTE = re.compile(r" {0,3}((?:> ?)+)")
_RULE = re.compile(r" {0,3}([-*_])[ \t]*(?:\1[ \t]*){2,}$")
_FENCE = re.compile(r"([ \t]*)(`{3,}|~{3,})[ \t]*([^`\s]*)[^`]*$")
_ROW = re.compile(r"[ \t]*\|")
_DELIMITERS = re.compile(r"[ \t]*\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$")
# The beginning of a line that may still become something else.
_UNDECIDED = re.compile(r"[ \t]*(?:#{1,6}|[-+*]|\d{1,9}[.)]?|[`~]{1,2}|[>])?$| {0,3}([-*_])(?:[ \t]*\1)*[ \t]*$")
_WHOLE_LINE = re.compile(r"[ \t]*(?:`{3}|~{3}|\|)")
_BREAK = Span("\n")
_RULE_WIDTH = 40


class Table(NamedTuple):
    """Cells by rows, the heads first; alignments are left, right or center."""

    rows: tuple[tuple[tuple[Span, ...], ...], ...]
    alignments: tuple[str, ...]


Piece = Span | Table


class MarkdownStream:
    """Text of an answer in, what to append to the screen out; what would steer a terminal is spelled out.

    width: Columns that a line may have.
    """

    def __init__(self, width: Callable[[], int]) -> None:
        self._width = width
        self._wrap = LineWrap(width)
        self._inline = InlineStream()
        self._line = ""  # what has come of a line that is not decided yet
        self._style: str | None = None  # of the line that is being shown
        self._fence = ""
        self._code: CodeLines | None = None
        self._rows: list[str] = []
        self._return = ""
        self._is_blank_due = self._has_begun = False

    def push(self, text: str) -> list[Piece]:
        text = self._return + text
        self._return = "\r" if text.endswith("\r") else ""  # half a line break, perhaps
        text = printable(text.removesuffix("\r").replace("\r\n", "\n"))
        out: list[Piece] = []
        for part in re.split(r"(?<=\n)", text):
            if part:
                out += self._fed(part)
        return _joined(out)

    def end(self) -> list[Piece]:
        """What is left; the last line is not broken."""
        out: list[Piece] = []
        if self._line:
            out += self._whole(self._line) if self._style is None else []
            self._line = ""
        if self._style is not None:
            out += self._ended()
        out += self._table()
        while out and out[-1] == _BREAK:
            out.pop()
        return _joined(out)

    def _fed(self, part: str) -> Iterator[Piece]:
        """A part of a line, or its end with the line break."""
        text, is_whole = part.removesuffix("\n"), part.endswith("\n")
        if self._style is not None:
            yield from self._words(text)
        else:
            self._line += text
            if is_whole:
                line, self._line = self._line, ""
                yield from self._whole(line)
            elif self._can_begin():
                line, self._line = self._line, ""
                yield from self._table()
                yield from self._begun(line)
        if is_whole and self._style is not None:
            yield from self._ended()
            yield _BREAK

    def _can_begin(self) -> bool:
        is_open = _UNDECIDED.match(self._line) or _WHOLE_LINE.match(self._line)
        return not is_open and self._code is None

    def _whole(self, line: str) -> Iterator[Piece]:
        """A line of which nothing was shown."""
        if self._code is not None:
            yield from self._code_line(line)
        elif _ROW.match(line) or (self._rows and _DELIMITERS.match(line)):
            self._rows.append(line)
        else:
            yield from self._table()
            if not line.strip():
                self._is_blank_due = self._has_begun
            elif fence := _FENCE.match(line):
                yield from self._blank()
                self._fence, self._code = fence[2], CodeLines(fence[3])
                yield from (Span(line.rstrip(), "dim"), _BREAK)
            elif _RULE.match(line):
                yield from self._blank()
                yield from (Span("─" * min(self._width(), _RULE_WIDTH), "dim"), _BREAK)
            else:
                yield from self._begun(line)

    def _code_line(self, line: str) -> Iterator[Piece]:
        assert self._code is not None
        stripped = line.strip()
        if stripped.startswith(self._fence) and not stripped.strip(self._fence[0]):
            self._code = None
            yield Span(line.rstrip(), "dim")
        else:
            yield from self._code.push(line)
        yield _BREAK

    def _begun(self, line: str) -> Iterator[Piece]:
        """The beginning of a line of text: its mark, and what can be shown behind it."""
        yield from self._blank()
        prefix, hang, self._style, length = _opening(line)
        self._inline = InlineStream()
        yield from self._wrap.begin(prefix, hang)
        yield from self._words(line[length:])

    def _words(self, text: str) -> list[Span]:
        return self._wrap.push([styled(span, self._style or "") for span in self._inline.push(text)])

    def _ended(self) -> list[Span]:
        rest = [styled(span, self._style or "") for span in self._inline.flush()]
        self._style = None
        return [*self._wrap.push(rest), *self._wrap.flush()]

    def _blank(self) -> Iterator[Piece]:
        if self._is_blank_due:
            yield _BREAK
        self._is_blank_due, self._has_begun = False, True

    def _table(self) -> Iterator[Piece]:
        """The rows that were held, as a table if they are one."""
        rows, self._rows = self._rows, []
        if not rows:
            return
        yield from self._blank()
        if len(rows) > 1 and _DELIMITERS.match(rows[1]):
            yield _table_of(rows)
        else:
            for row in rows:
                yield from (Span(row), _BREAK)


def _opening(line: str) -> tuple[Span, Span, str, int]:
    """What a line begins with, what its continuations do, its style, and how long its mark is."""
    if heading := _HEADING.match(line):
        return Span(""), Span(""), "bold underline" if heading[1] == "#" else "bold", heading.end()
    if item := _ITEM.match(line):
        indent = " " * len(item[1].expandtabs(4))
        mark = item[2] if item[2][0].isdigit() else "•"
        return Span(f"{indent}{mark} "), Span(f"{indent}{' ' * len(mark)} "), "", item.end()
    if quote := _QUOTE.match(line):
        bar = Span("▌ " * quote[1].count(">"), "dim")
        return bar, bar, "", quote.end()
    indent = line[: len(line) - len(line.lstrip())].expandtabs(4)
    return Span(indent), Span(indent), "", len(line) - len(line.lstrip())


def _table_of(lines: Sequence[str]) -> Table:
    alignments = tuple(
        "center" if cell.startswith(":") and cell.endswith(":") else "right" if cell.endswith(":") else "left"
        for cell in _cells(lines[1])
    )
    rows = [[tuple(_inlined(cell)) for cell in _cells(line)] for line in (lines[0], *lines[2:])]
    num = len(alignments)
    return Table(tuple((*row, *[()] * (num - len(row)))[:num] for row in rows), alignments)


def _cells(line: str) -> list[str]:
    inner = line.strip().removeprefix("|")
    inner = inner[:-1] if inner.endswith("|") and not inner.endswith("\\|") else inner
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", inner)]


def _inlined(text: str) -> list[Span]:
    stream = InlineStream()
    return [*stream.push(text), *stream.flush()]


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    out: list[Piece] = []
    spans: list[Span] = []
    for piece in pieces:
        if isinstance(piece, Table):
            out += [*joined(spans), piece]
            spans = []
        else:
            spans.append(piece)
    return [*out, *joined(spans)]
