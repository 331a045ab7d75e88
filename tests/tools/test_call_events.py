"""Text and calls of an answer, apart and in their order."""

import pytest

from edgespec.engine.generation import split_parts
from edgespec.tools.call_events import CallArguments, CallEnd, CallStart, Part, TextPart, in_order

CALL: list[Part] = [CallStart(0, "f", "a"), CallArguments(0, "{}"), CallEnd(0)]


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [TextPart("a")],
        CALL,
        [TextPart("a"), *CALL, TextPart("b")],
        [*CALL, TextPart("ab"), *CALL],
        [TextPart("a"), *CALL[:1], TextPart("b"), *CALL[1:]],
    ],
)
def test_what_is_taken_apart_is_put_together_in_its_order(parts: list[Part]) -> None:
    assert list(in_order(*split_parts(parts))) == parts


def test_neighbouring_texts_become_one_and_empty_ones_none() -> None:
    parts = [TextPart("a"), TextPart(""), TextPart("b"), *CALL, TextPart("")]
    text, events, places = split_parts(parts)
    assert (text, events, places) == ("ab", tuple(CALL), (2, 2, 2))
    assert list(in_order(text, events, places)) == [TextPart("ab"), *CALL]
