"""Markdown that only grows: whatever chunks text comes in, the same pieces, and nothing of the text lost."""

import re
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from edgespec.chat.markdown.blocks import CodeLines, MarkdownStream, Table
from edgespec.chat.markdown.inline import InlineStream, Span
from edgespec.chat.markdown.line_wrap import LineWrap
from edgespec.chat.printer import column_widths

SAMPLE = """# Title **x**

Hello **bold text** and *it*, `code **x**`. 2 * 3 * 4, a_b_c, [link](http://x.y), \\(x_1\\) and C:\\new.
A line of a poem
这是一个很长的中文句子，它需要在适当的地方换行，不能断在标点之前。 👩‍👩‍👧 ok

- one
- two with a rather long text that has to be wrapped somewhere
  - nested **b**
1. first

---
> quoted

| a | b |
|---|--:|
| 1 | **2** |

```python
def f(x):
    \"\"\"doc
    more\"\"\"
    return x  # hi
```
done **unclosed"""


def render(chunks: Sequence[str], width: int = 60) -> list[Span | Table]:
    stream = MarkdownStream(lambda: width)
    pieces = [piece for chunk in chunks for piece in stream.push(chunk)] + stream.end()
    out: list[Span | Table] = []
    for piece in pieces:  # neighbours of one style are one piece
        if out and isinstance(piece, Span) and isinstance(out[-1], Span) and out[-1].style == piece.style:
            out[-1] = Span(out[-1].text + piece.text, piece.style)
        else:
            out.append(piece)
    return out


def text_of(pieces: Sequence[Span | Table]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, Span))


def styles(text: str) -> dict[str, str]:
    return {piece.text.strip(): piece.style for piece in render([text]) if isinstance(piece, Span) and piece.style}


@given(st.lists(st.integers(0, len(SAMPLE)), max_size=60))
def test_pieces_do_not_depend_on_chunks(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(SAMPLE)]
    chunks = [SAMPLE[low:high] for low, high in pairwise(edges)]
    assert render(chunks) == render([SAMPLE])


@given(st.text("ab *_`~[]()#>-|1.\\\n!世é\t", max_size=80), st.integers(1, 7))
def test_any_text_comes_out_whatever_chunks_it_comes_in(text: str, size: int) -> None:
    chunks = [text[i : i + size] for i in range(0, len(text), size)]
    pieces = render(chunks)
    assert pieces == render([text])
    letters = "".join(re.findall(r"[ab世é]", text))
    cells = "".join(
        span.text
        for piece in pieces
        if isinstance(piece, Table)
        for row in piece.rows
        for cell in row
        for span in cell
    )
    found = "".join(re.findall(r"[ab世é]", text_of(pieces) + cells))
    assert sorted(found) == sorted(letters) or "|" in text or "](" in text


def test_styles_of_a_paragraph() -> None:
    assert styles("x **bold** *it* __b2__ _i2_ ~~gone~~ `co*d*e` ***both*** 2*3 a_b_c") == {
        "bold": "bold",
        "it": "italic",
        "b2": "bold",
        "i2": "italic",
        "gone": "strike",
        "co*d*e": "cyan",
        "both": "italic bold",
    }


@pytest.mark.parametrize(
    "text", ["2 * 3 * 4", "a_b_c d_e", "C:\\new\\x", "\\(x_1\\)", "5 > 3", "**open", "a*", "`x"]
)
def test_marks_that_mark_nothing_are_text(text: str) -> None:
    assert render([f"x {text}"]) == [Span(f"x {text}")]


@pytest.mark.parametrize(
    ("text", "shown_at_once"),
    [
        ("plain", "plain"),
        ("a **b", ""),
        ("a **b** c", "a b c"),
        ("a `b", ""),
        ("*a `b* c", ""),
        ("[x](y", ""),
        ("[x] y", "[x] y"),
        ("[x[1]](y", ""),
        ("2 * 3", "2 * 3"),
        ("a_b", "a_b"),
        ("a \\*b", "a *b"),
        ("a *", "a "),
    ],
)
def test_text_waits_while_a_mark_may_open_a_style(text: str, shown_at_once: str) -> None:
    assert "".join(span.text for span in InlineStream().push(text)) == shown_at_once


def test_a_link_without_text_and_address_shows_nothing() -> None:
    assert text_of(render(["[]()"])) == ""


def test_plain_words_stream_at_once() -> None:
    stream = MarkdownStream(lambda: 60)
    assert text_of(stream.push("The sky is ")) == "The sky is"
    assert stream.push("bl") == []
    assert text_of(stream.push("ue ")) == " blue"


def test_a_mark_that_never_closes_holds_no_answer_up() -> None:
    stream = InlineStream()
    released = "".join(span.text for i in range(200) for span in stream.push(f"word{i} " if i else "**word0 "))
    assert len(released) > 1000


def test_code_streams_word_by_word_as_it_is() -> None:
    stream = MarkdownStream(lambda: 60)
    assert text_of(stream.push("```python\n  x = **1** ")) == "```python\n  x = **1** "
    assert text_of(stream.push("# long " * 20 + "wor")) == "# long " * 20
    assert text_of(stream.push("ds\n  ``")) == "words\n", "the fence may come"
    assert text_of(stream.push("`\nafter ")) == "  ```\nafter"


@given(
    st.lists(st.text("ab =(){}\"'#/*\\\t`~.é世1\ufeff\u3000", max_size=30), max_size=8),
    st.integers(1, 9),
    st.sampled_from(["", "python", "c", "json", "bash", "markdown", "html", "nonsense"]),
    st.sampled_from(["```", "````", "~~~", "~~~~~"]),
    st.booleans(),
)
def test_code_shows_exactly_as_it_is_written(
    lines: list[str], size: int, language: str, fence: str, is_closed: bool
) -> None:
    lines = [line for line in lines if not line.strip().startswith(fence)]
    code = "\n".join([fence + language, *lines, *[fence] * is_closed])
    shown = text_of(render([code[i : i + size] for i in range(0, len(code), size)]))
    assert shown.rstrip("\n") == code.rstrip("\n")


def test_code_of_many_lines_is_highlighted_as_the_whole() -> None:
    lines = ['x = """', *(f"def {i}" for i in range(120)), '"""', "def f(): return 1", *["y = 2"] * 100]
    code = CodeLines("python")
    spans = [code.push(line) for line in lines]
    assert ["".join(span.text for span in line) for line in spans] == lines
    assert spans[60] == [Span("def 59", "yellow")]
    assert spans[-1] == spans[-50] != [Span("y = 2")]
    assert CodeLines("no-such-language").push("def x") == [Span("def x")]


def test_table_comes_as_one_with_its_alignments() -> None:
    pieces = render(["| a | b | c |\n|:-:|--:|---|\n| **1** | x \\| y |\n\nafter"])
    assert pieces[0] == Table(
        (
            ((Span("a"),), (Span("b"),), (Span("c"),)),
            ((Span("1", "bold"),), (Span("x | y"),), ()),
        ),
        ("center", "right", "left"),
    )
    assert text_of(pieces) == "\nafter"


@pytest.mark.parametrize(
    ("width", "widths"),
    [(40, [6, 19, 5]), (24, [6, 13, 5]), (14, [4, 4, 4]), (2, [1, 1, 1])],
)
def test_columns_keep_words_whole_where_they_fit(width: int, widths: list[int]) -> None:
    rows = [["planet", "what it has for one", "moons"], ["Saturn", "a great many rings", "274"]]
    assert column_widths(rows, width) == widths


@given(
    st.lists(st.lists(st.text("ab 世", max_size=30), min_size=3, max_size=3), min_size=1, max_size=4),
    st.integers(3, 90),
)
def test_columns_fit_and_break_words_only_where_these_do_not(rows: list[list[str]], width: int) -> None:
    found = column_widths(rows, width)
    assert sum(found) <= width
    words = [max([1, *(cell_len(word) for row in rows for word in row[i].split())]) for i in range(3)]
    assert sum(words) > width or all(has >= wants for has, wants in zip(found, words, strict=True))


def test_rows_without_a_delimiter_are_text() -> None:
    assert text_of(render(["| a | b |\n\nafter"])) == "| a | b |\n\nafter"


def test_a_delimiter_row_without_outer_pipes_makes_a_table_whatever_chunks_it_comes_in() -> None:
    chunks = list("| a | b |\n---|---\n")
    assert (
        render(chunks) == render(["".join(chunks)]) == [Table((((Span("a"),), (Span("b"),)),), ("left", "left"))]
    )


@pytest.mark.parametrize("size", [1, 3, 100])
def test_line_breaks_of_windows_are_breaks_and_other_returns_are_shown(size: int) -> None:
    text = "a\r\n\r\nb\rc"
    chunks = [text[i : i + size] for i in range(0, len(text), size)]
    assert text_of(render(chunks)) == "a\n\nb\\x0dc"


def test_blank_lines_are_one_and_none_is_left_at_the_end() -> None:
    assert text_of(render(["\n\na\n\n\n\nb\n\n\n"])) == "a\n\nb\n"


def test_lists_quotes_and_rules_have_their_marks_and_hang() -> None:
    text = text_of(
        render(["- one two three\n  * four five six\n12. seven eight nine\n> ten eleven twelve\n***"], 12)
    )
    assert text == (
        "• one two\n  three\n  • four\n    five six\n12. seven\n    eight\n    nine\n"
        "▌ ten eleven\n▌ twelve\n────────────"
    )


@given(st.lists(st.sampled_from(["a", "longer", "世界", "界，", " ", "👩‍👩‍👧", "é", "e\u0301"]), max_size=60))
def test_wrapped_lines_fit_and_keep_every_character(parts: list[str]) -> None:
    text, wrap = "".join(parts), LineWrap(lambda: 20)
    spans = [*wrap.push([Span(text)]), *wrap.flush()]
    wrapped = "".join(span.text for span in spans)
    assert re.sub(r"\s", "", wrapped) == re.sub(r"\s", "", text)
    assert not re.search(r"\n[，]", wrapped)
    for line in wrapped.split("\n"):
        assert cell_len(line) <= 20 or max(map(cell_len, line.split())) > 20
    assert "👩‍\n" not in wrapped
    assert "e\n\u0301" not in wrapped
