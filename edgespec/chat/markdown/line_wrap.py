"""Breaks streamed spans into lines between words; what was returned stays. Knows nothing of Markdown."""

import re
from collections.abc import Callable, Iterator, Sequence

from rich.cells import cell_len

from edgespec.chat.markdown.inline import Span

# Scripts that are written without spaces: a line may end behind any of their characters, but before few.
_UNSPACED = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_NOT_FIRST = "、。，．・：；？！）］｝」』】〉》ー々ぁぃぅぇぉっゃゅょァィゥェォッャュョ\u3099\u309a"
_PIECE = re.compile(rf"\n|[^\S\n]+|[{_UNSPACED}]|[^\s{_UNSPACED}]+")
_EMPTY = Span("")
_IS_UNSPACED = re.compile(f"[{_UNSPACED}]").match


class LineWrap:
    """Breaks spans into lines of at most width() columns, except words that are longer."""

    def __init__(self, width: Callable[[], int]) -> None:
        self._width = width  # called at each break, since windows change
        self._column = 0
        self._hang = _EMPTY  # begins each line that is broken off
        self._space = _EMPTY  # before the word
        self._word: list[Span] = []
        self._word_width = 0

    def begin(self, prefix: Span = _EMPTY, hang: Span = _EMPTY) -> Span:
        """Begin a line with prefix, which is returned; hang begins each line that is broken off it."""
        self._hang, self._space = hang, _EMPTY
        self._column = cell_len(prefix.text)
        return prefix

    def push(self, spans: Sequence[Span]) -> list[Span]:
        """Return the words that are complete by now, with line breaks between them."""
        pieces = (Span(text, span.style) for span in spans for text in _PIECE.findall(span.text))
        return [out for piece in pieces for out in self._add(piece)]

    def flush(self) -> list[Span]:
        return list(self._place_word())

    def _add(self, piece: Span) -> Iterator[Span]:
        if piece.text == "\n":
            yield from self._place_word()
            yield piece
            self._column, self._space = 0, _EMPTY
            return
        if piece.text.isspace():
            yield from self._place_word()
            self._space = Span(self._space.text + piece.text.replace("\t", " " * 4), piece.style)
            return
        can_break = _IS_UNSPACED(piece.text) or (self._word and _IS_UNSPACED(self._word[-1].text[-1]))
        if can_break and piece.text[0] not in _NOT_FIRST:
            yield from self._place_word()
        self._word.append(piece)
        self._word_width += cell_len(piece.text)
        if self._word_width > self._width():
            yield from self._place_word()

    def _place_word(self) -> Iterator[Span]:
        if not self._word:
            return
        width, space, hang = self._width(), cell_len(self._space.text), cell_len(self._hang.text)
        is_beyond = self._column + space + self._word_width > width
        if is_beyond and self._column > hang:
            yield Span("\n")
            yield self._hang
            self._column = hang
        elif space and not (is_beyond and self._column + self._word_width <= width):
            yield self._space
            self._column += space
        yield from self._word
        self._column += self._word_width
        if self._column > width:  # the terminal has broken the word
            self._column %= max(1, width)
        self._space, self._word, self._word_width = _EMPTY, [], 0
