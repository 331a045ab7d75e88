"""Arguments of calls, in the types of the functions that take them."""

from dataclasses import dataclass
from datetime import UTC, date, datetime, time
from enum import Enum
from typing import Annotated, Any, Literal

import msgspec
import pytest

from edgespec import ToolCall
from edgespec.tools.function_arguments import schema_of, typed_arguments


class Unit(Enum):
    METRE = "m"
    FOOT = "ft"


@dataclass
class Place:
    city: str
    height: float = 0.0


class Point(msgspec.Struct):
    x: int


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


def remind(
    at: datetime, until: datetime | None = None, daily: time | None = None, pause: tuple[time, time] | None = None
) -> None:
    """Remind of something."""


def test_the_model_is_told_how_to_write_times() -> None:
    stated = schema_of(remind)["properties"]
    assert stated["at"] == {"type": "string", "format": "date-time"}
    assert {"type": "string", "format": "date-time"} in stated["until"]["anyOf"]
    assert {"type": "string", "format": "time"} in stated["daily"]["anyOf"]


@dataclass
class Meeting:
    place: str
    begins: datetime
    breaks: list[time]


def test_the_model_is_told_how_to_write_the_times_of_a_class() -> None:
    def meet(meetings: list[Meeting]) -> None: ...

    stated = schema_of(meet)["$defs"]["Meeting"]["properties"]
    assert stated["begins"] == {"type": "string", "format": "date-time"}
    assert stated["breaks"]["items"] == {"type": "string", "format": "time"}
    assert stated["place"] == {"type": "string"}


def test_what_a_field_of_pydantic_says_of_an_argument_counts() -> None:
    field = pytest.importorskip("pydantic", reason="needs the package pydantic").Field

    def plan(day, num, place, best=None, others=None) -> None:  # type: ignore[no-untyped-def]
        ...

    plan.__annotations__ = {
        "day": Annotated[date, field(description="the first day", ge=date(2026, 1, 1))],
        "num": Annotated[int, field(ge=1, le=5)] | None,
        "place": Annotated[Point, field(description="where")],  # which pydantic does not read
        "best": Meeting,
        "others": Annotated[list[Meeting], field(min_length=1)],
    }
    stated = schema_of(plan)["properties"]
    assert stated["day"] == {"type": "string", "format": "date", "description": "the first day"}
    assert {"type": "integer", "minimum": 1, "maximum": 5} in stated["num"]["anyOf"]
    assert stated["others"]["items"] == {"$ref": "#/$defs/pydantic.Meeting"}
    good = {"day": "2026-01-02", "num": "3", "place": {"x": 1}}
    assert typed_arguments(plan, good) == {"day": date(2026, 1, 2), "num": 3, "place": Point(1)}
    for wrong in ({"day": "2025-12-31"}, {"num": 6}):
        with pytest.raises(ValueError, match=f"the argument '{next(iter(wrong))}' is wrong"):
            typed_arguments(plan, good | wrong)


def test_texts_beside_times_are_no_times() -> None:
    def meet(where: datetime | Place, named: tuple[str, datetime], days: list[datetime]) -> None: ...

    stated = schema_of(meet)
    assert "format" not in stated["$defs"]["Place"]["properties"]["city"]
    assert "format" not in stated["properties"]["named"]["prefixItems"][0]
    assert stated["properties"]["days"]["items"] == {"type": "string", "format": "date-time"}


@pytest.mark.parametrize(
    ("written", "at"),
    [
        ("2026-01-02T10:30:00Z", datetime(2026, 1, 2, 10, 30, tzinfo=UTC)),
        ("2026-01-02 10:30", datetime(2026, 1, 2, 10, 30)),
        ("2026-01-02", datetime(2026, 1, 2)),
    ],
)
def test_times_are_taken_as_models_write_them(written: str, at: datetime) -> None:
    given = {"at": written, "until": None, "daily": "08:15"}
    assert typed_arguments(remind, given) == {"at": at, "until": None, "daily": time(8, 15)}
    with pytest.raises(ValueError, match="the argument 'at' is wrong: it is no datetime"):
        typed_arguments(remind, {"at": "tomorrow"})


def test_none_is_given_where_it_is_the_default() -> None:
    def forecast(days: int = None, units: str = "C") -> None: ...  # noqa: RUF013  as many write it

    assert typed_arguments(forecast, {"days": None}) == {"days": None}
    with pytest.raises(ValueError, match="the argument 'units' is wrong"):
        typed_arguments(forecast, {"units": None})


def test_a_call_is_parsed_for_a_function() -> None:
    call = ToolCall(id="a", name="plan", arguments='{"place": {"city": "Rome"}, "day": "2026-01-02"}')
    assert call.parse()["day"] == "2026-01-02"
    assert call.parse(plan)["day"] == date(2026, 1, 2)
