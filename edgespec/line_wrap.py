"""Spans broken into lines between words, as they come. What was given out is never changed.

Knows nothing of Markdown.
"""

from collections.abc import Callable, Iterator, Sequence

from rich.cells import cell_len

from edgespec.markdown_inline import Span

# Scripts that are written without spaces, in which a line may end behind any character but before few.
_UNSPACED = ((0x3040, 0x30FF), (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x3FFFF))
_NOT_FIRST = "、。，．・：；？！）］｝」』】〉》ー々ぁぃぅぇぉっゃゅょァィゥェォッャュョ"


class LineWrap:
    """Breaks spans into lines of at most width() columns, but for words that are longer.

    width: Asked at each break, for windows change.
    """

    def __init__(self, width: Callable[[], int]) -> None:
        self._width = width
        self._column = 0
        self._hang = Span("")  # before each line that is broken off
        self._space = Span("")  # before the word
        self._word: list[Span] = []
        self._word_width = 0

    def begin(self, prefix: Span, hang: Span) -> list[Span]:
        """A new line: what it begins with, and what those that are broken off it begin with."""
        self._hang, self._space = hang, Span("")
        self._column = cell_len(prefix.text)
        return [prefix] if prefix.text else []

    def push(self, spans: Sequence[Span]) -> list[Span]:
        """The words that are complete by now, with line breaks between them."""
        return joined([out for span in spans for each in _split(span) for out in self._add(each)])

    def flush(self) -> list[Span]:
        """The last word."""
        return joined(list(self._placed()))

    def _add(self, piece: Span) -> Iterator[Span]:
        if piece.text.isspace():
            yield from self._placed()
            spaces = self._space.text + " " * cell_len(piece.text.replace("\t", " " * 4))
            self._space = Span(spaces, piece.style)
            return
        is_apart = is_unspaced(piece.text[0]) or (self._word and is_unspaced(self._word[-1].text[-1]))
        if is_apart and piece.text[0] not in _NOT_FIRST:
            yield from self._placed()
        self._word.append(piece)
        self._word_width += cell_len(piece.text)
        if self._word_width > self._width():
            yield from self._placed()

    def _placed(self) -> Iterator[Span]:
        """The word, on this line if there is room."""
        if not self._word:
            return
        width, space = self._width(), cell_len(self._space.text)
        hang = cell_len(self._hang.text)
        if self._column + space + self._word_width > width and self._column > hang:
            yield Span("\n")
            if self._hang.text:
                yield self._hang
            self._column = hang
        elif space:
            yield self._space
            self._column += space
        yield from self._word
        self._column += self._word_width
        if self._column > width:  # the terminal has broken the word
            self._column %= max(1, width)
        self._space, self._word, self._word_width = Span(""), [], 0


def is_unspaced(character: str) -> bool:
    return any(low <= ord(character) <= high for low, high in _UNSPACED)


def _split(span: Span) -> Iterator[Span]:
    """Spaces, words, and single characters of scripts without spaces."""
    text, start = span.text, 0
    for i in range(1, len(text) + 1):
        is_end = i == len(text)
        if (
            is_end
            or text[i].isspace() != text[i - 1].isspace()
            or is_unspaced(text[i])
            or (is_unspaced(text[i - 1]) and text[i] not in _NOT_FIRST)
        ):
            yield Span(text[start:i], span.style)
            start = i


def joined(spans: Sequence[Span]) -> list[Span]:
    """The same with neighbours of one style in one span."""
    out: list[Span] = []
    for span in spans:
        if out and out[-1].style == span.style:
            out[-1] = Span(out[-1].text + span.text, span.style)
        elif span.text:
            out.append(span)
    return out
