"""Answers on stdout: as Markdown on a terminal, coloured by who drafted what, or as they are."""

import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style
from rich.table import Table as RichTable
from rich.text import Text

from edgespec.line_wrap import LineWrap, joined
from edgespec.markdown_blocks import MarkdownStream, Piece, Table
from edgespec.markdown_inline import Span
from edgespec.printable import printable

_WIDEST = 100  # longer lines are hard to read
# Of what drafts from the text or the target; models share the rest.
_ORIGIN_STYLES = {
    "target": "",
    "suffix": "green",
    "ngram": "cyan",
    "memory": "yellow",
    "lookahead": "magenta",
}
_MODEL_STYLES = ("bright_blue", "bright_red", "bright_magenta")


class Printer(Protocol):
    """Shows one answer."""

    def push(self, text: str) -> None: ...

    def end(self) -> None:
        """The cursor is at the beginning of a line then."""
        ...


def is_plain(stream: TextIO, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a stream gets text alone: it is no terminal, or a dumb one, or the user wants no colour."""
    is_dumb = environment.get("TERM", "") in ("dumb", "unknown")
    is_terminal = stream.isatty() or bool(environment.get("FORCE_COLOR"))
    return not is_terminal or is_dumb or bool(environment.get("NO_COLOR"))


def text_width(console: Console) -> int:
    """Columns that a line of words may have; in the last one some terminals break the line."""
    return max(10, min(console.width - 1, _WIDEST))


def console_of(stream: TextIO) -> Console:
    return Console(file=stream, highlight=False, soft_wrap=True)


class PlainPrinter:
    """Text as it is; on a terminal what would steer it is escaped."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._ends_line = True

    def push(self, text: str) -> None:
        if text:
            self._stream.write(printable(text) if self._is_terminal else text)
            self._ends_line = text.endswith("\n")
        self._stream.flush()

    def end(self) -> None:
        if not self._ends_line:
            self._stream.write("\n")
        self._stream.flush()


class MarkdownPrinter:
    """Markdown, appended block by block and word by word; nothing that was shown is touched again."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._markdown = MarkdownStream(lambda: text_width(console))
        self._ends_line = True

    def push(self, text: str) -> None:
        self._show(self._markdown.push(text))

    def end(self) -> None:
        self._show(self._markdown.end())
        if not self._ends_line:
            self._show([Span("\n")])

    def _show(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            if isinstance(piece, Table):
                self._console.print(_as_rich(piece), soft_wrap=False, width=text_width(self._console))
                self._ends_line = True
            else:
                show(self._console, [piece])
                self._ends_line = piece.text.endswith("\n")


class OriginPrinter:
    """Text as it is, coloured by who drafted it, with a legend behind it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._counts: Counter[str] = Counter()
        self._wrap = LineWrap(lambda: text_width(console))

    def push_tokens(self, pieces: Sequence[tuple[str, str]]) -> None:
        """Texts of tokens, each with its origin."""
        self._counts.update(origin for _, origin in pieces)
        self._push([Span(text, origin_style(origin)) for text, origin in pieces])

    def push(self, text: str) -> None:
        """Of nobody in particular."""
        self._push([Span(text)])

    def _push(self, spans: Sequence[Span]) -> None:
        for span in spans:
            first, *others = printable(span.text).split("\n")
            out = self._wrap.push([Span(first, span.style)])
            for line in others:
                out += [*self._wrap.flush(), Span("\n"), *self._wrap.begin(Span(""), Span(""))]
                out += self._wrap.push([Span(line, span.style)])
            show(self._console, out)

    def end(self) -> None:
        show(self._console, [*self._wrap.flush(), Span("\n"), *legend(self._counts), Span("\n")])


def origin_style(origin: str) -> str:
    if origin in _ORIGIN_STYLES:
        return _ORIGIN_STYLES[origin]
    return _MODEL_STYLES[sum(origin.encode()) % len(_MODEL_STYLES)]


def legend(counts: Mapping[str, int]) -> list[Span]:
    """Shares of tokens by origin, each in its colour; the target first."""
    total = sum(counts.values())
    spans = [Span("tokens from: ", "dim")]
    for origin, count in sorted(counts.items(), key=lambda each: (each[0] != "target", -each[1])):
        spans.append(Span(f"{origin} {count / total:.0%}  ", origin_style(origin)))
    return spans


def show(console: Console, spans: Sequence[Span]) -> None:
    segments = [Segment(printable(span.text), _style(span.style)) for span in spans if span.text]
    if segments:
        console.print(Segments(segments), end="", soft_wrap=True)


def _style(words: str) -> Style | None:
    return Style.parse(words) if words else None


def _as_rich(table: Table) -> RichTable:
    drawn = RichTable(show_edge=False, pad_edge=False)
    heads, *rows = table.rows
    for head, alignment in zip(heads, table.alignments, strict=True):
        drawn.add_column(_text(head), justify=alignment, overflow="fold")  # type: ignore[arg-type]
    for row in rows:
        drawn.add_row(*map(_text, row))
    return drawn


def _text(spans: Sequence[Span]) -> Text:
    text = Text()
    for span in spans:
        text.append(printable(span.text, keep=""), span.style)
    return text


class Aside:
    """Words beside the talk, on stderr: dim where that shows."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream

    def __call__(self, line: str) -> None:
        stream = self._stream or sys.stderr
        if is_plain(stream):
            from edgespec.talk import say

            say(line)
        else:
            console = console_of(stream)
            show(console, [*_wrapped(line, lambda: max(10, console.width - 1)), Span("\n")])


def _wrapped(text: str, width: Callable[[], int]) -> list[Span]:
    """Dim lines, broken between words."""
    wrap = LineWrap(width)
    out: list[Span] = []
    for i, line in enumerate(text.split("\n")):
        indent = Span(" " * (len(line) - len(line.lstrip()) + 2))
        out += [*([Span("\n")] if i else []), *wrap.begin(Span(""), indent)]
        out += [*wrap.push([Span(line, "dim")]), *wrap.flush()]
    return joined(out)


class Waiting:
    """A mark where the answer will begin, until it does; only on a terminal that can take it away again."""

    def __init__(self, console: Console | None, words: str = "…") -> None:
        self._console, self._words = console if console and console.file.isatty() else None, words
        self._is_shown = False

    def begin(self) -> None:
        if self._console:
            show(self._console, [Span(self._words, "dim")])
            self._is_shown = True

    def end(self) -> None:
        if self._is_shown and self._console:
            self._is_shown = False
            self._console.file.write("\r" + " " * cell_len(self._words) + "\r")
            self._console.file.flush()
