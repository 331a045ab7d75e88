"""Nothing that others wrote steers a terminal."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.system.printable import one_line, printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b]52;c;eA==\x07", "\\x1b]52;c;eA==\\x07"),
        ("a\rb\x9bm", "a\\x0db\\x9bm"),
        ("abc\u202edcba", "abc\\u202edcba"),
        ("a\tb\n", "a\tb\n"),
        ("👩‍👩‍👧 世界 e\u0301 \u00a0", "👩‍👩‍👧 世界 e\u0301 \u00a0"),
        ("\ud83d", "\\ud83d"),
    ],
)
def test_control_characters_are_spelled_out_and_text_stays(text: str, shown: str) -> None:
    assert printable(text) == shown


@given(st.text())
def test_no_text_has_a_control_character_left(text: str) -> None:
    assert not {*printable(text)} & {chr(code) for code in (*range(9), *range(11, 32), *range(127, 160))}


def test_a_name_is_one_line_of_a_bounded_length() -> None:
    assert one_line("a\n\x1b[2J  b") == "a \\x1b[2J b"
    assert one_line("x" * 300, 10) == "x" * 9 + "…"
