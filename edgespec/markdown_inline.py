"""The inline part of Markdown, in pieces as they come: which text may be shown by now, and in which style.

Knows nothing of blocks, widths and terminals.
"""

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from markdown_it import MarkdownIt
from markdown_it.rules_inline import StateInline
from markdown_it.token import Token

# Longer than this no style is waited for: the mark was none.
_LONGEST_OPEN = 300
_ESCAPABLE = "*_`~#|[]"
_STYLES = {"strong": "bold", "em": "italic", "s": "strike", "link": "underline"}
_CODE, _ADDRESS = "cyan", "dim"


class Span(NamedTuple):
    """Text and a style, in words as rich knows them: "bold italic"."""

    text: str
    style: str = ""


def styled(span: Span, style: str) -> Span:
    """The same in a style more."""
    return Span(span.text, f"{style} {span.style}".strip())


class InlineStream:
    """Text of one line in, spans out. Text behind a mark waits until the style that it opens is closed."""

    def __init__(self) -> None:
        self._parser = _parser()
        self._held = ""
        self._before = ""  # the kind of character that came last, which says what a mark behind it may do

    def push(self, text: str) -> list[Span]:
        """What can be shown by now: all that stands before the first style that is still open."""
        self._held += text
        cut = max(0, first_open(self._before + self._held) - len(self._before))
        if len(self._held) - cut > _LONGEST_OPEN:
            cut = len(self._held)
        ready, self._held = self._held[:cut], self._held[cut:]
        return self._spans(ready)

    def flush(self) -> list[Span]:
        """The rest; marks that opened nothing are text."""
        ready, self._held = self._held, ""
        return self._spans(ready)

    def _spans(self, text: str) -> list[Span]:
        if not text:
            return []
        first, *others = _spans(self._parser.parseInline(self._before + text)[0].children or [])
        spans = [Span(first.text[len(self._before) :], first.style), *others]
        self._before = "a" if text[-1].isalnum() else "" if text[-1].isspace() else "."
        return [span for span in spans if span.text]


def first_open(text: str) -> int:
    """Where the first mark stands that opens a style, or may when more comes; the end if there is none."""
    openers: list[tuple[str, int, int]] = []  # mark, how many of it, where
    at = 0
    while at < len(text):
        mark, end = text[at], _run_end(text, at)
        if mark == "\\":
            if at + 1 == len(text):
                break
            at += 2 if text[at + 1] in _ESCAPABLE else 1
        elif mark == "`":
            closed = _code_end(text, at, end)
            if closed is None:
                break
            at = closed
        elif mark in "*_~":
            if end == len(text):
                break
            _weigh(openers, text, at, end)
            at = end
        elif mark == "[" or text[at:] == "!":
            closed = _link_end(text, at)
            if closed is None:
                break
            at = closed
        else:
            at += 1
    return min([opened for *_, opened in openers] + [at])


def _run_end(text: str, at: int) -> int:
    end = at
    while end < len(text) and text[end] == text[at]:
        end += 1
    return end


def _code_end(text: str, at: int, end: int) -> int | None:
    """Behind the run of as many backticks that closes the one from at to end."""
    ticks = text[at:end]
    found = text.find(ticks, end)
    while found >= 0 and (text[found - 1] == "`" or text[found + len(ticks) : found + len(ticks) + 1] == "`"):
        found = text.find(ticks, _run_end(text, found))
    # One more may come and make another run of it.
    return None if found < 0 or found + len(ticks) == len(text) else found + len(ticks)


def _link_end(text: str, at: int) -> int | None:
    """Behind a link; behind its bracket, if that is closed and no address follows."""
    bracket = text.find("]", at)
    if bracket < 0 or bracket + 1 == len(text):
        return None
    if text[bracket + 1] != "(":
        return at + 1
    closed = text.find(")", bracket)
    return None if closed < 0 else closed + 1


def _weigh(openers: list[tuple[str, int, int]], text: str, at: int, end: int) -> None:
    """Close what the marks from at to end close, open what they open (CommonMark, delimiter runs)."""
    mark, num = text[at], end - at
    before, after = text[at - 1 : at] or " ", text[end]
    is_word = mark == "_" and before.isalnum()
    if not before.isspace():
        while num and (match := next((each for each in reversed(openers) if each[0] == mark), None)):
            del openers[openers.index(match) :]
            if match[1] > num:
                openers.append((mark, match[1] - num, match[2]))
            num = max(0, num - match[1])
    if num and not after.isspace() and not is_word and not (mark == "~" and num != 2):
        openers.append((mark, num, at))


@cache  # making one takes as long as parsing a page
def _parser() -> MarkdownIt:
    parser = MarkdownIt("zero").enable(
        ["backticks", "emphasis", "strikethrough", "link", "image", "balance_pairs", "fragments_join"]
    )
    parser.inline.ruler.before("backticks", "marks", _escape)
    return parser


def _escape(state: StateInline, silent: bool) -> bool:
    """Backslashes of Markdown's own marks alone: those of LaTeX and of Windows stay."""
    after = state.src[state.pos + 1 : state.pos + 2]
    if state.src[state.pos] != "\\" or not after or after not in _ESCAPABLE:
        return False
    if not silent:
        state.pending += after
    state.pos += 2
    return True


def _spans(tokens: list[Token]) -> Iterator[Span]:
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
