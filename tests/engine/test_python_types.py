"""schema= takes JSON schemas and types of Python, and parse() gives values of these types."""

import dataclasses
import enum
import json
from collections.abc import Callable, Iterator
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

import msgspec
import pytest
from msgspec import Meta

from edgespec import Engine, FormatError, ToolCall, UsageError, load
from edgespec.engine.request import require_format
from edgespec.grammar.python_type import read_schema, read_value, type_schema
from edgespec.tools.function_arguments import schema_of, typed_arguments

PROMPT = "the in the an"


class Kind(enum.Enum):
    LONG = "long"
    SHORT = "short"


@dataclasses.dataclass
class Sea:
    name: Literal["north", "south"]


@dataclasses.dataclass
class River:
    kind: Kind
    sea: Sea | None
    deep: bool
    ways: list[Literal["in", "out"]] = dataclasses.field(default_factory=list)


class Place(TypedDict):
    sea: Sea
    near: bool


SCHEMA = {
    "type": "object",
    "properties": {"near": {"type": "boolean"}},
    "required": ["near"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[Engine]:
    with load(tiny_model, drafter="none") as engine:
        yield engine


def is_near(value: Any) -> bool:
    return isinstance(value["near"], bool)


@pytest.mark.parametrize(
    ("schema", "is_right"),
    [
        (River, lambda value: isinstance(value, River) and isinstance(value.kind, Kind)),
        (Place, lambda value: is_near(value) and isinstance(value["sea"], Sea)),
        (Kind, lambda value: isinstance(value, Kind)),
        (Literal["yes", "no"], lambda value: value in ("yes", "no")),
        (bool, lambda value: isinstance(value, bool)),
        (bool | None, lambda value: value in (True, False, None)),
        (set[Kind], lambda value: isinstance(value, set)),
        (Decimal, lambda value: isinstance(value, Decimal)),
        (bytes, lambda value: isinstance(value, bytes)),
        (date, lambda value: isinstance(value, date)),
        (timedelta, lambda value: isinstance(value, timedelta)),
        (Annotated[datetime, Meta(tz=True)], lambda value: value.tzinfo is not None),
        (SCHEMA, is_near),
        (json.dumps(SCHEMA), is_near),
    ],
    ids=[
        "dataclass",
        "TypedDict",
        "Enum",
        "Literal",
        "bool",
        "Optional",
        "set",
        "Decimal",
        "bytes",
        "date",
        "timedelta",
        "datetime",
        "schema",
        "text",
    ],
)
def test_an_answer_is_a_value_of_the_type_that_was_asked_for(
    engine: Engine, schema: Any, is_right: Callable[[Any], bool]
) -> None:
    answer = engine.generate(PROMPT, schema=schema, max_tokens=60, temperature=1.0, seed=3)
    assert is_right(answer.parse()), answer.text
    conversation = engine.chat(schema=schema, max_tokens=60)
    assert is_right(conversation.say(PROMPT).parse())
    assert isinstance(conversation.say(PROMPT, schema=Kind).parse(), Kind)
    assert conversation.say(PROMPT, response_format={"type": "regex", "regex": "no"}).text == "no"


def test_parse_takes_the_type_too_and_says_why_an_answer_is_none(engine: Engine) -> None:
    answer = engine.generate(PROMPT, response_format={"type": "json_schema", "schema": SCHEMA}, max_tokens=40)
    assert is_near(answer.parse())
    with pytest.raises(ValueError, match=r"finish reason stop, is not what was asked for: .*kind"):
        answer.parse(River)
    with pytest.raises(FormatError, match="an enum has values that are neither all texts nor all whole numbers"):
        answer.parse(Mixed)
    with pytest.raises(ValueError, match="finish reason length, is not JSON"):
        engine.generate(PROMPT, max_tokens=3).parse()


def test_a_number_too_large_for_a_float_is_no_value(engine: Engine) -> None:
    answer = dataclasses.replace(engine.generate(PROMPT, max_tokens=1), text="1e999")
    with pytest.raises(ValueError, match=r"is not what was asked for: .*out of range"):
        answer.parse(float)


def test_a_mark_of_reasoning_within_a_value_is_part_of_it(engine: Engine) -> None:
    answer = engine.generate(PROMPT, max_tokens=1)
    for text in ('{"note": "a</think>b"}', 'So.\n</think>\n\n{"note": "a</think>b"}'):
        assert dataclasses.replace(answer, text=text).parse() == {"note": "a</think>b"}


@pytest.mark.parametrize("kind", [None, list[Any], River])
def test_what_is_nested_too_deep_for_python_is_no_value(engine: Engine, kind: Any) -> None:
    deep = "[" * 200_000 + "]" * 200_000  # Python 3.14 reads 5,000
    answer = dataclasses.replace(engine.generate(PROMPT, max_tokens=1), text=deep)
    with pytest.raises(ValueError, match=r"finish reason length, is not .*: it is nested too deep"):
        answer.parse(kind)
    with pytest.raises(ValueError, match="the arguments of find are nested too deep"):
        ToolCall(id="", name="find", arguments=deep).parse()


def test_pydantic_classes_are_known_by_their_own_methods(engine: Engine) -> None:
    pydantic = pytest.importorskip("pydantic", reason="needs the package pydantic")
    made = pydantic.create_model("Lake", deep=(bool, ...), kind=(Kind, ...), seas=(dict[str, int] | None, None))
    lake = engine.generate(PROMPT, schema=made, max_tokens=80).parse()
    assert isinstance(lake, made)
    assert isinstance(lake.kind, Kind)
    with pytest.raises(ValueError, match="deep"):
        read_value(made, "{}")
    holder = dataclasses.make_dataclass("Holder", [("lake", made), ("other", made | None)])
    lakes = [{"deep": True, "kind": "long"}]
    for kind, stated in (
        (list[made], lakes),
        (made | None, lakes[0]),
        (holder, {"lake": lakes[0], "other": None}),
    ):
        require_format({"type": "json_schema", "schema": read_schema(kind)})
        found = read_value(kind, json.dumps(stated))
        lake = found[0] if isinstance(found, list) else getattr(found, "lake", found)
        assert lake == made(deep=True, kind=Kind.LONG)
    with pytest.raises(ValueError, match="deep"):
        read_value(list[made], "[{}]")
    answer = engine.generate(PROMPT, schema=made | None, max_tokens=80).parse()
    assert answer is None or isinstance(answer, made)

    def store(lake: made, others: list[made]) -> None:
        """Store lakes."""

    assert typed_arguments(store, {"lake": lakes[0], "others": lakes})["others"] == [lake]
    assert schema_of(store)["properties"]["lake"]["type"] == "object"
    plain = pydantic.dataclasses.dataclass(
        type("Plain", (), {"__annotations__": {"x": int}, "x": pydantic.Field(1)})
    )
    with pytest.raises(FormatError, match="it has a dataclass of pydantic: derive that from"):
        read_schema(plain)
    callback = pydantic.create_model("Odd", call=(Callable[[], int], ...))
    with pytest.raises(FormatError, match="cannot be written as a JSON schema"):
        read_schema(callback)


def test_msgspec_0_20_has_schemas_of_types(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which takes fewer arguments than later ones."""
    schema = msgspec.json.schema
    monkeypatch.setattr(msgspec.json, "schema", lambda kind, *, schema_hook: schema(kind, schema_hook=schema_hook))
    assert type_schema(int) == {"type": "integer"}


def test_a_type_that_json_lacks_is_named_without_advice_to_programmers_of_the_library() -> None:
    def rotate(by: complex) -> None:
        """Rotate."""

    for attempt in (partial(read_schema, list[complex]), partial(schema_of, rotate)):
        with pytest.raises(UsageError, match="JSON has no complex") as refused:
            attempt()
        assert "hook" not in str(refused.value)
        assert "extra_json_schema" not in str(refused.value)


def test_objects_of_a_type_have_its_fields_alone() -> None:
    schema = read_schema(River)
    assert isinstance(schema, dict)
    assert all(part["additionalProperties"] is False for part in schema["$defs"].values() if "properties" in part)
    assert read_schema(dict[str, int]) == {"type": "object", "additionalProperties": {"type": "integer"}}


@dataclasses.dataclass
class Event:
    times: dict[str, list[datetime | None]]
    cause: "Event | None" = None


@pytest.mark.parametrize("schema", [datetime, time, Event, Annotated[datetime, Meta(tz=False)]])
def test_times_without_a_zone_whose_form_no_schema_holds_are_refused(schema: Any) -> None:
    with pytest.raises(FormatError, match=r"has no zone: .*Annotated\[datetime, msgspec.Meta\(tz=True\)\]"):
        read_schema(schema)


@pytest.mark.parametrize("key", [int, Kind, Literal["a"], date])
def test_keys_that_are_no_texts_are_refused(key: Any) -> None:
    for kind in (dict[key, int], list[dict[key, int] | None]):
        with pytest.raises(FormatError, match=r"keys that are no texts: write dict\[str, …\], or a dataclass"):
            read_schema(kind)


class Mixed(enum.Enum):
    ONE = 1
    TWO = "two"


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (River | Event, "a union has two kinds of objects, which only a JSON schema with anyOf can say"),
        (list[River | dict[str, int]], "a union has two kinds of objects"),
        (list[int] | set[int], "a union has two kinds of lists"),
        (str | datetime, "a union has two kinds of texts, as which enums, dates"),
        (Mixed, "an enum has values that are neither all texts nor all whole numbers"),
        (Literal[1, 1.5], "a Literal has other values than texts, whole numbers"),
    ],
)
def test_a_type_that_no_schema_can_say_is_refused_in_plain_words(kind: Any, said: str) -> None:
    def store(value: Any) -> None:
        """Store it."""

    store.__annotations__["value"] = kind
    with pytest.raises(FormatError, match=f"cannot be written as a JSON schema .{said}"):
        read_schema(kind)
    with pytest.raises(UsageError, match=f"has no JSON schema .{said}"):
        schema_of(store)


def test_a_pydantic_class_in_a_union_is_refused_in_plain_words() -> None:
    pydantic = pytest.importorskip("pydantic", reason="needs the package pydantic")
    kind = pydantic.create_model("Lake", deep=(bool, ...))
    for union in (kind | int, list[kind | str]):
        with pytest.raises(FormatError, match="a pydantic class beside another type than None, which only a JSON"):
            read_schema(union)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"kind": "tall", "sea": null, "deep": true}', "kind is 'tall': none of the values that may stand there"),
        ('{"kind": "long", "sea": null}', "deep is missing"),
        ('{"kind": "long", "sea": null, "deep": 3}', "deep is 3: wanted true or false"),
        ("[1]", "wanted an object"),
    ],
)
def test_an_answer_of_another_type_is_refused_in_plain_words(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read_value(River, text)
    with pytest.raises(ValueError, match=f"the argument 'river' is wrong: {said}") as refused:
        typed_arguments(_store, {"river": json.loads(text)})
    assert "`" not in str(refused.value)


def _store(river: River) -> None:
    """Store it."""


@pytest.mark.parametrize(
    "schema", [complex, object, 5, River(Kind.LONG, None, True), "River", ["a"], list[Path], ""]
)
def test_what_no_schema_can_say_is_refused_with_what_is_wanted(engine: Engine, schema: Any) -> None:
    with pytest.raises(FormatError, match="the schema is"):
        engine.generate(PROMPT, schema=schema, max_tokens=20)


def test_a_type_as_response_format_is_refused_with_the_way_to_give_it(engine: Engine) -> None:
    with pytest.raises(FormatError, match=r"response_format is <class .* in Python schema=, which takes"):
        engine.generate(PROMPT, response_format=River)  # type: ignore[arg-type]


def test_schema_and_response_format_are_not_given_together(engine: Engine) -> None:
    with pytest.raises(UsageError, match="schema and response_format both"):
        engine.generate(PROMPT, schema=bool, response_format={"type": "json_object"})
