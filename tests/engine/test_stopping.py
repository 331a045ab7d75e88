import itertools

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from edgespec.engine.answer_passes import TextStop, TokenStop


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


@pytest.mark.parametrize(
    ("blocks", "kept", "reason"),
    [
        ([[1, 2], [3, 9, 4]], [1, 2, 3], "stop"),
        ([[9]], [], "stop"),
        ([[1, 2, 3], [4, 5, 6]], [1, 2, 3, 4, 5], "length"),
        ([[1, 2, 3, 4, 5, 9]], [1, 2, 3, 4, 5], "length"),
        ([[1, 2, 3, 4, 9]], [1, 2, 3, 4], "stop"),
        ([[1], [2]], [1, 2], None),
    ],
)
def test_blocks_are_cut_at_an_end_token_or_the_count(
    blocks: list[list[int]], kept: list[int], reason: str | None
) -> None:
    stop = TokenStop({9}, max_tokens=5)
    found: list[int] = []
    ended = None
    for block in blocks:
        tokens, ended = stop.cut(ids(*block))
        found += tokens.tolist()
        if ended:
            break
    assert (found, ended) == (kept, reason)


@given(
    text=st.text("abc", max_size=40),
    strings=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 40), max_size=12),
)
@example(text="cabc", strings=["b", "abc"], cuts=[])
def test_text_is_cut_at_the_first_stop_string_however_it_arrives(
    text: str, strings: list[str], cuts: list[int]
) -> None:
    bounds = [0, *sorted(cut for cut in cuts if cut <= len(text)), len(text)]
    stop = TextStop(strings)
    shown, ended = "", False
    for start, end in itertools.pairwise(bounds):
        piece, ended = stop.push(text[start:end])
        shown += piece
        if ended:
            break
    if not ended:
        shown += stop.flush()
    # Text ends where a string is first complete; of those that are complete there, the longest is cut off.
    complete = [(at + len(string), at) for string in strings if (at := text.find(string)) >= 0]
    expected = (text[: min(complete)[1]], True) if complete else (text, False)
    assert (shown, ended) == expected


def test_nothing_is_held_back_without_stop_strings() -> None:
    assert TextStop([]).push("abc") == ("abc", False)


def test_only_what_may_begin_a_stop_string_is_held_back() -> None:
    stop = TextStop(["</end>"])
    assert stop.push("hello <") == ("hello ", False)
    assert stop.push("/e") == ("", False)
    assert stop.push("x") == ("</ex", False)
    assert stop.push("abc</end>tail") == ("abc", True)
