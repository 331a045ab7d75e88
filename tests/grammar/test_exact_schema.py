"""Answers to schemas that leave names free, and dates and times, which have to be valid to the letter."""

import re
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny

from edgespec.errors import FormatError
from edgespec.grammar.compile import GrammarCompiler
from edgespec.grammar.constraint import GrammarConstraint
from edgespec.grammar.exact_schema import PATTERNS
from edgespec.grammar.response_format import read_format
from edgespec.text.tokenizer import Tokenizer

MayBegin = Callable[[Any, str], bool]
A_NUMBER: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "at": {}},
    "required": ["a"],
}


@pytest.fixture(scope="module")
def compiler(tiny_model: Path) -> GrammarCompiler:
    return GrammarCompiler(tiny_model / "tokenizer.json", tiny.VOCAB, (2, 0))


@pytest.fixture(scope="module")
def may_begin(compiler: GrammarCompiler, tokenizer: Tokenizer) -> MayBegin:
    return partial(_may_begin, compiler, tokenizer)


def _may_begin(compiler: GrammarCompiler, tokenizer: Tokenizer, schema: Any, text: str) -> bool:
    """True if an answer to a schema may begin with a text."""
    wanted = read_format({"type": "json_schema", "schema": schema})
    assert wanted
    try:
        GrammarConstraint(compiler.compile(wanted), 500, tokenizer.encode(text))
    except FormatError:
        return False
    return True


@pytest.mark.parametrize("name", ["\\u0061", "\\u0061t", "a"])
def test_a_declared_name_cannot_be_written_by_an_escape(may_begin: MayBegin, name: str) -> None:
    within = {"anyOf": [{"type": "null"}, {"type": "array", "items": A_NUMBER}]}
    text = f'{{"a":1,"{name}":"x"'
    assert not may_begin(A_NUMBER, text)
    assert not may_begin(within, f"[{text}")
    assert not may_begin(A_NUMBER | {"patternProperties": {"^x-": {"type": "integer"}}}, text)


@pytest.mark.parametrize("name", ["", "b", "A", "ab", "att", "é", "\\n", '\\"', "a\\\\"])
def test_any_other_name_is_free(may_begin: MayBegin, name: str) -> None:
    assert may_begin(A_NUMBER, f'{{"a":1,"{name}":"x"}}')
    assert not may_begin(A_NUMBER | {"additionalProperties": {"type": "null"}}, f'{{"a":1,"{name}":"x"')


def test_names_of_patterns_are_not_free(may_begin: MayBegin) -> None:
    schema = {"type": "object", "patternProperties": {"^x-": {"type": "integer"}}}
    assert may_begin(schema, '{"x-1":1,"x":"y","y":"x"}')
    for name in ("x-", "\\u0078-", "x\\u002d1"):
        assert not may_begin(schema, f'{{"{name}":"x"')
    vowels = {"type": "object", "patternProperties": {"[aeiou]": {"type": "integer"}}}
    assert may_begin(vowels, '{"ba":1}')
    assert not may_begin(vowels, '{"b\\u0061":"x"')


def test_objects_that_are_joined_can_still_be_answered(may_begin: MayBegin) -> None:
    other = {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]}
    assert may_begin({"allOf": [A_NUMBER, other]}, '{"a":1,"b":2,"c":3}')
    assert may_begin({"$defs": {"a": A_NUMBER}, "allOf": [{"$ref": "#/$defs/a"}, other]}, '{"a":1,"b":2}')
    assert may_begin({**A_NUMBER, "anyOf": [{"required": ["c"]}, other]}, '{"a":1,"b":2}')


def test_dates_are_those_of_the_calendar() -> None:
    pattern = re.compile(PATTERNS["date"])
    for year in (0, 1, 4, 99, 100, 400, 1000, 1900, 2000, 2023, 2024, 2100, 9999):
        for month in range(14):
            for day in (0, 1, 9, 28, 29, 30, 31, 32):
                written = f"{year:04}-{month:02}-{day:02}"
                try:
                    date.fromisoformat(written)
                    is_date = True
                except ValueError:
                    is_date = False
                assert bool(pattern.search(written)) is is_date, written


@pytest.mark.parametrize(
    ("kind", "written", "is_right"),
    [
        ("date", "2024-02-29", True),
        ("date", "1900-02-29", False),
        ("time", "21:44:60Z", False),
        ("time", "23:59:60Z", False),  # which datetime refuses
        ("time", "23:59:59.9Z", True),
        ("time", "24:00:00Z", False),
        ("time", "09:30:00.25+05:30", True),
        ("date-time", "2023-02-29T00:00:00Z", False),
        ("date-time", "2023-02-28T00:00:00Z", True),
        ("date-time", "2023-02-28T00:00:00", False),
        ("date-time", "2023-02-28T21:44:60Z", False),
    ],
)
def test_dates_and_times_of_answers_are_valid(
    may_begin: MayBegin, kind: str, written: str, is_right: bool
) -> None:
    for schema in ({"type": "string", "format": kind}, {"type": "string", "format": kind, "pattern": "[0-9]"}):
        assert may_begin(schema, f'"{written}"') is is_right
