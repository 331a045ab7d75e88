from dataclasses import dataclass, field
from typing import Annotated, Any

import pytest
from msgspec import Meta

from edgespec.system.typed_json import read_as, read_lines_as, require_known_fields


@dataclass(frozen=True, kw_only=True)
class Part:
    size: Annotated[int, Meta(ge=1, le=9)]


@dataclass(frozen=True, kw_only=True)
class Whole:
    part: Part
    names: tuple[str, ...] = ()
    costs: dict[int, float] = field(default_factory=dict)
    parts: dict[str, Part] = field(default_factory=dict)


@pytest.mark.parametrize(
    ("stated", "words"),
    [
        ([], "wanted an object"),
        ({}, "part is missing"),
        ({"part": {"size": 0}}, "part.size is 0: wanted a whole number >= 1"),
        ({"part": {"size": True}}, "part.size is True: wanted a whole number"),
        ({"part": {"size": 1.5}}, "part.size is 1.5: wanted a whole number"),
        ({"part": {"size": 1}, "names": ["a", None]}, "names[1] is None: wanted a text"),
        ({"part": {"size": 1}, "costs": {"1": "x"}}, "costs[...]: wanted a number"),
        ({"part": {"size": 1}, "costs": {"x": 1.0}}, "costs: wanted a whole number"),
        ({"part": {"size": 1}, "names": 9 * [90 * "x"] + [3]}, "names[9] is 3: wanted a text"),
        ({"part": {"size": 10**4000}}, "wanted a whole number <= 9"),
        ({"part": 1000 * [1000 * "x"]}, "wanted an object"),
    ],
)
def test_message_says_where_what_was_found_and_what_was_expected(stated: Any, words: str) -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        read_as(Whole, stated)
    assert str(raised.value).endswith(words)
    assert len(str(raised.value)) < 400


def test_unknown_fields_are_named_wherever_they_are() -> None:
    stated = {"part": {"size": 1, "weight": 2}, "parts": {"a": {"size": 2, "b": 3}}, "costs": {"1": 2}, "x": 4}
    found = read_as(Whole, stated)
    assert found == Whole(part=Part(size=1), parts={"a": Part(size=2)}, costs={1: 2.0})
    with pytest.raises(ValueError, match="unknown fields") as raised:
        require_known_fields(stated, found)
    assert {*str(raised.value).removeprefix("unknown fields ").split(", ")} == {"'x'", "'weight'", "'b'"}


def test_lines_are_read_up_to_the_first_that_is_refused() -> None:
    assert [part.size for part in read_lines_as(Part, '{"size": 1}\n\n{"size": 2}\n')] == [1, 2]
    for line, words in (
        ("{", "line 2 is not JSON"),
        ("[" * 100_000, "line 2 is nested too deep"),
        ("3", "line 2: wanted an object"),
    ):
        with pytest.raises(ValueError, match=words):
            list(read_lines_as(Part, '{"size": 1}\n' + line))
