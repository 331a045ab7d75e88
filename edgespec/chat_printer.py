"""Answers on a terminal: as Markdown, or coloured by who drafted what; and words beside them."""

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TextIO

from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style
from rich.table import Table as RichTable
from rich.text import Text

from edgespec.answers import Chunk
from edgespec.chat_plain import is_plain
from edgespec.chat_status import origin_shares
from edgespec.line_wrap import LineWrap, joined
from edgespec.markdown_blocks import MarkdownStream, Piece, Table
from edgespec.markdown_inline import Span
from edgespec.printable import printable
from edgespec.talk import say
from edgespec.tokenizer import TextStream, Tokenizer

_WIDEST = 100  # longer lines are hard to read
# Of what drafts from the text or the target; models share the rest.
_ORIGIN_STYLES = {
    "target": "",
    "suffix": "green",
    "ngram": "cyan",
    "memory": "yellow",
    "lookahead": "magenta",
}
_TARGET = "target"
_MODEL_STYLES = ("bright_blue", "bright_red", "bright_magenta")


def text_width(console: Console) -> int:
    """Columns that a line of words may have; in the last one some terminals break the line."""
    return max(10, min(console.width - 1, _WIDEST))


def console_of(stream: TextIO) -> Console:
    return Console(file=stream, highlight=False, soft_wrap=True)


class MarkdownPrinter:
    """Markdown, appended block by block and word by word; nothing that was shown is touched again."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._markdown = MarkdownStream(lambda: text_width(console))
        self._ends_line = True

    def push(self, chunk: Chunk) -> None:
        self._show(self._markdown.push(chunk.text))

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

    def __init__(self, console: Console, tokenizer: Tokenizer) -> None:
        self._console = console
        self._texts = TokenTexts(tokenizer)
        self._counts: Counter[str] = Counter()
        self._wrap = LineWrap(lambda: text_width(console))

    def push(self, chunk: Chunk) -> None:
        self._counts.update(chunk.origins)
        self._push([Span(text, origin_style(origin)) for text, origin in self._texts.push(chunk)])

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
    """Shares of tokens by origin, each in its colour."""
    shares = [Span(f"{words}  ", origin_style(origin)) for origin, words in origin_shares(counts)]
    return [Span("tokens from: ", "dim"), *shares]


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


class TokenTexts:
    """Texts of tokens one by one, each with its origin, as far as an answer's text goes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._stream = TextStream(tokenizer)
        self._waiting: list[tuple[str, str]] = []

    def push(self, chunk: Chunk) -> list[tuple[str, str]]:
        """What of the chunk's text comes from whom."""
        for token, origin in zip(chunk.token_ids, chunk.origins, strict=True):
            self._waiting.append((self._stream.push([token]), origin))
        if chunk.finish_reason is not None:
            self._waiting.append((self._stream.flush(), _TARGET))
        return self._taken(len(chunk.text))

    def _taken(self, num_characters: int) -> list[tuple[str, str]]:
        taken = []
        while self._waiting and len(self._waiting[0][0]) <= num_characters:
            taken.append(self._waiting.pop(0))
            num_characters -= len(taken[-1][0])
        if num_characters and self._waiting:
            text, origin = self._waiting[0]
            taken.append((text[:num_characters], origin))
            self._waiting[0] = (text[num_characters:], origin)
        return taken
