import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.tools.text_reader import JsonScanner

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
VALUES = st.recursive(SCALARS, lambda each: st.lists(each) | st.dictionaries(st.text(), each), max_leaves=8)


def scan(text: str) -> str:
    """What a scanner takes of a text, which is to be a value."""
    scanner = JsonScanner()
    taken = [added for character in text if (added := scanner.push(character)) is not None]
    scanner.push(" ")  # the end of a number
    if not scanner.is_done:
        raise ValueError("the value is not complete")
    return "".join(taken)


@given(VALUES, st.booleans(), st.sampled_from([None, 0, 2]))
def test_every_value_is_taken_as_it_is(value: Any, is_ascii: bool, indent: int | None) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii, indent=indent)
    assert scan(text) == text


@given(st.text(alphabet='{}[]",:\\0-1.e tru\nx', max_size=12))
def test_what_it_takes_is_json_and_what_json_is_it_takes(text: str) -> None:
    try:
        json.dumps(json.loads(text), allow_nan=False)
        is_json = not text[0].isspace() and not text[-1].isspace()
    except ValueError:
        is_json = False
    try:
        json.loads(scan(text))
        is_taken = True
    except ValueError:
        is_taken = False
    assert is_taken or not is_json


@pytest.mark.parametrize(
    "text", ["{'a': 1}", "{a: 1}", '{"a" 1}', '{"a": }', "[1,]x", "truth", "01", '"\\x"', "]", "[-1e999]"]
)
def test_it_stops_at_the_character_that_breaks(text: str) -> None:
    with pytest.raises(ValueError, match=r"found|complete"):
        scan(text)


def test_line_ends_in_a_text_become_escapes() -> None:
    assert scan('{"code": "a\n\tb\x01"}') == '{"code": "a\\n\\tb\\u0001"}'


def test_a_number_ends_before_what_follows() -> None:
    scanner = JsonScanner()
    assert [scanner.push(character) for character in "12,,"] == ["1", "2", None, None]
    assert scanner.is_done
