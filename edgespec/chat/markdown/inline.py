"""The inline part of Markdown as it streams: which text can be shown by now, in which style. Knows no blocks."""

import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

from markdown_it import MarkdownIt
from markdown_it.rules_inline import StateInline
from markdown_it.token import Token

# An opening mark is taken for text if its style is still open after this many characters.
_LONGEST_OPEN = 300
_ESCAPABLE = "*_`~#|[]"
_STYLES = {"strong": "bold", "em": "italic", "s": "strike", "link": "underline"}
_CODE, _ADDRESS = "cyan", "dim"
# Marks that the parser left as text and that may open a style when more text comes (CommonMark, delimiter runs);
# a bracket may unless it is closed and no address, or a whole one, follows.
_BRACKETED = r"(?:[^\[\]]|\[[^\[\]]*\])*\]"
_OPENER = re.compile(rf"`|\*(?=\S)|~~|(?<!\w)_+(?=\S)|\[(?!{_BRACKETED}(?:[^(]|\([^)]*\)))")
# At the end of the text a mark may become another one with the next character.
_UNFINISHED_MARKS = "*_~`!\\"


class Span(NamedTuple):
    """Text and its style, as rich names styles: "bold italic"."""

    text: str
    style: str = ""


class InlineStream:
    """Takes the text of one line in pieces and gives spans; a style that is open holds the text back."""

    def __init__(self) -> None:
        self._held = ""
        # Stands for the character before the held text, which decides what a mark may open or close.
        self._before = ""

    def push(self, text: str) -> list[Span]:
        """Return what can be shown by now: all text so far, or nothing while a style may be open."""
        self._held += text
        ready = self._held.rstrip(_UNFINISHED_MARKS)
        tokens = _parse(self._before + ready)
        if _OPENER.search("".join(map(_undecided, tokens))) and len(self._held) <= _LONGEST_OPEN:
            return []
        return self._take(ready, tokens)

    def flush(self) -> list[Span]:
        """Return the rest; marks that opened nothing are text."""
        return self._take(self._held, _parse(self._before + self._held))

    def _take(self, ready: str, tokens: Sequence[Token]) -> list[Span]:
        if not ready:
            return []
        spans = list(spans_of(tokens))
        if self._before:
            spans[0] = Span(spans[0].text[1:], spans[0].style)
        self._before = "a" if ready[-1].isalnum() else "" if ready[-1].isspace() else "."
        self._held = self._held[len(ready) :]
        return [span for span in spans if span.text]


@cache  # making one takes as long as parsing a page
def parser() -> MarkdownIt:
    """A parser for inline marks and tables, without HTML, entities and automatic links."""
    rules = ["backticks", "emphasis", "strikethrough", "link", "image", "balance_pairs", "fragments_join", "table"]
    made = MarkdownIt("zero").enable(rules).disable("text_join")  # escaped marks stay apart from marks
    made.inline.ruler.before("backticks", "marks", _escape)
    return made


def _escape(state: StateInline, silent: bool) -> bool:
    """Take backslashes before Markdown's own marks alone: LaTeX and Windows paths keep theirs."""
    after = state.src[state.pos + 1 : state.pos + 2]
    if state.src[state.pos] != "\\" or not after or after not in _ESCAPABLE:
        return False
    if not silent:
        state.push("text_special", "", 0).content = after
    state.pos += 2
    return True


def _parse(text: str) -> Sequence[Token]:
    return parser().parseInline(text)[0].children or []


def _undecided(token: Token) -> str:
    """The text of a token in which marks may still open something; a full stop stands for all other text.

    Emphasis within a closed style is settled; code and links, which bind tighter, are not.
    """
    if token.type != "text":
        return "."
    return re.sub(r"[*_~]", ".", token.content) if token.level else token.content


def spans_of(tokens: Sequence[Token]) -> Iterator[Span]:
    styles: list[str] = []
    address, shown = "", ""
    for token in tokens:
        name = token.type.rpartition("_")[0]
        if token.nesting == 1:
            styles.append(_STYLES[name])
            if name == "link":
                address, shown = str(token.attrs["href"]), ""
        elif token.nesting == -1:
            styles.pop()
            if name == "link" and shown != address:
                yield Span(f" ({address})", _ADDRESS)
        elif token.type == "image":
            yield Span(f"{token.content} ({token.attrs['src']})", _ADDRESS)
        elif token.content:
            shown += token.content
            code = [_CODE] if token.type == "code_inline" else []
            yield Span(token.content, " ".join([*styles, *code]))
