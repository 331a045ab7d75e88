"""Prints on a terminal: answers as Markdown or coloured by drafter, reasoning, and the chat's own lines."""

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from textwrap import wrap as break_lines
from typing import TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style
from rich.table import Table as RichTable
from rich.text import Text

from edgespec import Chunk, ReasoningStream, TextStream, Tokenizer
from edgespec.chat.markdown.blocks import MarkdownStream, Piece, Table
from edgespec.chat.markdown.inline import Span
from edgespec.chat.markdown.line_wrap import LineWrap
from edgespec.chat.plain import LastLine, Printer, is_plain
from edgespec.chat.status import format_origin_shares
from edgespec.system.console import print_stderr
from edgespec.system.printable import printable
from edgespec.system.terminal import terminal_width

_MAX_WIDTH = 100  # longer lines are hard to read
# Colours of the target and of drafters without a model; models share the others.
_ORIGIN_STYLES = {"target": "", "suffix": "green", "ngram": "cyan", "answers": "yellow", "lookahead": "magenta"}
_MODEL_STYLES = ("bright_blue", "bright_red", "bright_magenta")
_BREAK = Span("\n")
_BETWEEN = 3  # columns of the terminal that stand between two of a table


def column_widths(rows: Sequence[Sequence[str]], width: int) -> list[int]:
    """Columns of text, for each column of a table; together at most width, but at least 1 each.

    rows have a text for each column. Cells that are too long for a line are broken between words; where the
    longest words do not fit beside one another, only the longest of them are broken.
    """
    columns = list(zip(*rows, strict=True))
    whole = [max(1, *(cell_len(line) for cell in column for line in cell.split("\n"))) for column in columns]
    words = [max(1, *(cell_len(word) for cell in column for word in cell.split() or [""])) for column in columns]
    if sum(whole) <= width:
        return whole
    if sum(words) <= width:
        # What is left is shared in proportion to what each lacks.
        left, lacking = width - sum(words), sum(whole) - sum(words)
        return [least + left * (most - least) // lacking for least, most in zip(words, whole, strict=True)]
    most = max(words)
    while most > 1 and sum(min(each, most) for each in words) > width:
        most -= 1
    return [min(each, most) for each in words]


def text_width(console: Console) -> int:
    """Columns of a line of words; some terminals break the line in the last column."""
    return max(10, min(console.width - 1, _MAX_WIDTH))


def console_of(stream: TextIO) -> Console:
    return Console(file=stream, highlight=False, soft_wrap=True)


class MarkdownPrinter:
    """Appends Markdown block by block and word by word; nothing that was shown is touched again."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._markdown = MarkdownStream(lambda: text_width(console))
        self._ends_line = True
        self._progress = LastLine(console.file)  # which it has for itself

    def push(self, chunk: Chunk) -> None:
        self._print(self._markdown.push(chunk.text))
        if (num := self._markdown.num_held_rows) and self._ends_line and self._console.is_terminal:
            text = f"… a table, {num} {'row' if num == 1 else 'rows'} so far"
            self._progress.show(text[: max(0, self._console.width - 1)])

    def end(self) -> None:
        self._print(self._markdown.end())
        self._progress.show("")
        if not self._ends_line:
            print_spans(self._console, [_BREAK])

    def _print(self, pieces: Iterable[Piece]) -> None:
        if pieces := [*pieces]:
            self._progress.show("")
        spans: list[Span] = []
        for piece in pieces:
            if isinstance(piece, Span):
                spans.append(piece)
                continue
            print_spans(self._console, spans)
            self._console.print(
                _rich_table(piece, text_width(self._console)), soft_wrap=False, width=text_width(self._console)
            )
            self._ends_line, spans = True, []
        if text := print_spans(self._console, spans):
            self._ends_line = text.endswith("\n")


class OriginPrinter:
    """Prints text as it is, coloured by who drafted it, and a legend at the end."""

    def __init__(self, console: Console, tokenizer: Tokenizer) -> None:
        self._console = console
        self._texts = TokenTexts(tokenizer)
        self._counts: Counter[str] = Counter()
        self._wrap = LineWrap(lambda: text_width(console))

    def push(self, chunk: Chunk) -> None:
        self._counts.update(chunk.origins)
        for text, origin in self._texts.push(chunk):
            print_spans(self._console, self._wrap.push([Span(printable(text), origin_style(origin))]))

    def end(self) -> None:
        shares = [Span(f"{share}  ", origin_style(name)) for name, share in format_origin_shares(self._counts)]
        legend = [Span("tokens from: ", "dim"), *shares]
        print_spans(self._console, [*self._wrap.flush(), _BREAK, *legend, _BREAK])


def origin_style(origin: str) -> str:
    model_style = _MODEL_STYLES[sum(origin.encode()) % len(_MODEL_STYLES)]
    return _ORIGIN_STYLES.get(origin, model_style)


def print_line(line: str) -> None:
    """Print a line of the chat's own on stderr, dim where that shows, broken between words."""
    if is_plain(sys.stderr):
        width = max(10, (terminal_width(sys.stderr) or len(line) + 1) - 1)
        for each in line.split("\n"):
            pieces = break_lines(each, width, break_long_words=False, break_on_hyphens=False)
            print_stderr("\n".join(pieces) if len(each) > width else each)
        return
    console = console_of(sys.stderr)
    wrap = LineWrap(lambda: max(10, console.width - 1))
    for each in line.split("\n"):
        indent = len(each) - len(each.lstrip()) + 2
        hang = wrap.begin(hang=Span(" " * indent))
        print_spans(console, [hang, *wrap.push([Span(each, "dim")]), *wrap.flush(), _BREAK])


def print_spans(console: Console, spans: Iterable[Span]) -> str:
    """Print spans, without a line break at their end; return their text."""
    segments = [Segment(printable(text), Style.parse(style) if style else None) for text, style in spans if text]
    if segments:
        console.print(Segments(Segment.simplify(segments)), end="", soft_wrap=True)
    return "".join(segment.text for segment in segments)


def _rich_table(table: Table, width: int) -> RichTable:
    drawn = RichTable(show_edge=False, pad_edge=False)
    header, *rows = ([Text.assemble(*cell) for cell in row] for row in table.rows)
    texts = [[cell.plain for cell in row] for row in (header, *rows)]
    widths = column_widths(texts, width - _BETWEEN * (len(header) - 1))
    for head, alignment, columns in zip(header, table.alignments, widths, strict=True):
        drawn.add_column(head, justify=alignment, overflow="fold", width=columns)  # type: ignore[arg-type]
    for row in rows:
        drawn.add_row(*row)
    return drawn


class TokenTexts:
    """Texts of tokens, each with its origin, as far as an answer's text goes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._stream = TextStream(tokenizer)
        self._waiting: list[tuple[str, str]] = []  # characters

    def push(self, chunk: Chunk) -> list[tuple[str, str]]:
        """Return the pieces of the chunk's text, each with its origin."""
        for token, origin in zip(chunk.token_ids, chunk.origins, strict=True):
            self._waiting += [(character, origin) for character in self._stream.push([token])]
        if chunk.finish_reason is not None:
            self._waiting += [(character, "target") for character in self._stream.flush()]
        if chunk.text:  # what a call of a tool was written with is not part of the text
            start = max(0, "".join(character for character, _ in self._waiting).find(chunk.text))
            self._waiting = self._waiting[start:]
        num = len(chunk.text)
        ready, self._waiting = self._waiting[:num], self._waiting[num:]
        return [("".join(text for text, _ in group), origin) for origin, group in groupby(ready, itemgetter(1))]


class ThinkingPrinter:
    """view is one of session.THINKING_VIEWS; is_open as for ReasoningStream."""

    def __init__(self, answer: Printer, console: Console, view: str, *, is_open: bool) -> None:
        self._answer, self._console, self._view = answer, console, view
        self._stream = ReasoningStream(is_open=is_open)
        self._wrap = LineWrap(lambda: text_width(console))
        self._num_tokens = 0
        self._progress = LastLine(console.file)
        self._is_shown = self._is_told = False

    def push(self, chunk: Chunk) -> None:
        parts = self._stream.push(chunk.text)
        reasoning = "".join(part.text for part in parts if part.is_reasoning)
        if reasoning or self._stream.is_reasoning:
            self._num_tokens += len(chunk.token_ids)
            self._show(reasoning)
        if not self._stream.is_reasoning:
            self._tell_end()
        text = "".join(part.text for part in parts if not part.is_reasoning)
        self._answer.push(replace(chunk, text=text))

    def end(self) -> None:
        for part in self._stream.end():
            if part.is_reasoning:
                self._show(part.text)
            else:
                self._answer.push(Chunk(text=part.text, token_ids=()))
        self._tell_end()
        self._answer.end()

    def _show(self, text: str) -> None:
        if self._view == "show" and text:
            self._is_shown = True
            print_spans(self._console, self._wrap.push([Span(text, "dim")]))
        elif self._view == "fold" and self._num_tokens and self._console.is_terminal:
            self._progress.show(f"… thinking, {self._num_tokens} tokens"[: max(0, self._console.width - 1)])

    def _tell_end(self) -> None:
        if self._is_told or not (self._num_tokens or self._is_shown):
            return
        self._is_told = True
        self._progress.show("")
        if self._is_shown:
            print_spans(self._console, [*self._wrap.flush(), _BREAK, _BREAK])
        elif self._view == "fold":
            note = f"(thought for {self._num_tokens} tokens; /think show shows what)"
            print_spans(self._console, [Span(note, "dim"), _BREAK, _BREAK])
