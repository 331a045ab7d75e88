"""Arguments of calls, in the types of the functions that take them."""

from dataclasses import dataclass
from datetime import date
from enum import Enum
from typing import Any, Literal

import pytest

from edgespec import ToolCall
from edgespec.tools.function_arguments import typed_arguments


class Unit(Enum):
    METRE = "m"
    FOOT = "ft"


@dataclass
class Place:
    city: str
    height: float = 0.0


def plan(
    place: Place, day: date, unit: Unit = Unit.METRE, kind: Literal["a", "b"] = "a", num: int = 1, more: Any = None
) -> None:
    """Plan a day."""


def test_arguments_become_what_the_signature_states() -> None:
    given = {"place": {"city": "Rome"}, "day": "2026-01-02", "unit": "ft", "num": "3", "more": {"x": [1]}}
    assert typed_arguments(plan, given) == {
        "place": Place("Rome"),
        "day": date(2026, 1, 2),
        "unit": Unit.FOOT,
        "num": 3,
        "more": {"x": [1]},
    }


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"day": "2026-01-02"}, "plan needs the argument 'place'"),
        ({"place": {"city": "Rome"}, "day": "2026-01-02", "size": 1}, "plan has no argument 'size'"),
        ({"place": {"city": "Rome"}, "day": "tomorrow"}, "the argument 'day' is wrong"),
        ({"place": {"city": 3}, "day": "2026-01-02"}, "the argument 'place' is wrong"),
        ({"place": {"city": "Rome"}, "day": "2026-01-02", "kind": "c"}, "the argument 'kind' is wrong"),
        ({"place": {"city": "Rome"}, "day": "2026-01-02", "num": "many"}, "the argument 'num' is wrong"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        typed_arguments(plan, given)


def test_a_call_is_parsed_for_a_function() -> None:
    call = ToolCall(id="a", name="plan", arguments='{"place": {"city": "Rome"}, "day": "2026-01-02"}')
    assert call.parse()["day"] == "2026-01-02"
    assert call.parse(plan)["day"] == date(2026, 1, 2)
