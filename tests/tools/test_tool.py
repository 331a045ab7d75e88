"""What is taken for a tool and for a choice of one."""

from dataclasses import dataclass, make_dataclass
from enum import Enum
from typing import Annotated, Any, Literal, TypedDict

import msgspec
import pytest

from edgespec.errors import ToolError, UsageError
from edgespec.text.chat_template import CallMessage, ResultMessage, parse_calls, require_answerable
from edgespec.tools.function_arguments import describe_function, schema_of
from edgespec.tools.tool import Tool, ToolCall, parse_choice, parse_tools

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
STATED = {"name": "weather", "description": "Of a city.", "parameters": SCHEMA}


@dataclass
class Place:
    lat: float
    name: str = ""


class Units(Enum):
    CELSIUS = "C"
    KELVIN = "K"


class Span(TypedDict, total=False):
    start: int


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"x": schema}}
    return schema


def forecast(
    city: str, days: int = 1, units: Literal["C", "K"] | None = None, *, near: list[Place], **_: Any
) -> str:
    """The weather of a city."""
    return ""


def look_up(
    word: Annotated[str, msgspec.Meta(min_length=1)], units: Units, span: Span, extra=None, many: bool = False
) -> str:
    """Looks a word up.

    In a dictionary.

    Args:
        word (str): The word,
            in lower case.
        many: All of them.

    Returns:
        word: The entry.
    """
    return ""


def test_a_function_becomes_a_schema() -> None:
    schema = schema_of(look_up)
    assert schema["required"] == ["word", "units", "span"]
    assert schema["properties"]["word"] == {
        "type": "string",
        "minLength": 1,
        "description": "The word, in lower case.",
    }
    assert schema["properties"]["units"] == {"$ref": "#/$defs/Units"}
    assert schema["$defs"]["Units"]["enum"] == ["C", "K"]
    assert schema["$defs"]["Span"]["properties"] == {"start": {"type": "integer"}}
    assert schema["properties"]["many"] == {"type": "boolean", "description": "All of them."}
    assert schema["properties"]["extra"] == {}
    assert describe_function(look_up) == "Looks a word up.\n\nIn a dictionary."


def test_fields_of_a_docstring_describe_arguments_too() -> None:
    def shout(text: str) -> None:
        """Says it loud.

        :param text: What to say.
        :returns: Nothing.
        """

    assert schema_of(shout)["properties"]["text"]["description"] == "What to say."
    assert describe_function(shout) == "Says it loud."


def test_a_function_whose_arguments_have_no_names_is_refused() -> None:
    with pytest.raises(ToolError, match=r"^forecast has the argument \*\*_") as refused:
        parse_tools([forecast])
    assert refused.value.field == "tools[0]"
    with pytest.raises(UsageError, match="no JSON schema"):
        schema_of(lambda_with(object()))


def lambda_with(hint: object) -> Any:
    def function(x: Any) -> None: ...

    function.__annotations__["x"] = complex
    return function


def test_two_types_of_one_name_are_refused() -> None:
    def travel(start: Any, end: Any) -> None: ...

    travel.__annotations__ = {"start": Place, "end": Place}
    assert [*schema_of(travel)["$defs"]] == ["Place"]
    travel.__annotations__ = {"start": Place, "end": make_dataclass("Place", [("street", str)])}
    with pytest.raises(UsageError, match="travel has arguments of two types called 'Place'; give one another"):
        schema_of(travel)


def test_dicts_in_both_shapes_and_functions_are_tools() -> None:
    nested, flat, function = parse_tools(
        [
            {"type": "function", "function": STATED},
            {"type": "function", **STATED, "name": "flat", "strict": True},
            look_up,
        ]
    )
    assert nested == Tool(name="weather", description="Of a city.", parameters=SCHEMA)
    assert flat == Tool(name="flat", description="Of a city.", parameters=SCHEMA, strict=True)
    assert function.name == "look_up"
    assert parse_tools(None) == ()
    plain = {"type": "object", "properties": {}}
    nothing = {"type": "object", "properties": None, "required": None}  # as clients in Go write it
    for stated in ({}, {"parameters": plain}, {"parameters": nothing}):
        assert parse_tools([{"function": {"name": "now", **stated}}])[0].parameters == plain


@pytest.mark.parametrize("name", ["input_schema", "inputSchema"])
def test_schemas_have_the_names_of_other_apis_too(name: str) -> None:
    (tool,) = parse_tools([{"name": "weather", name: SCHEMA}])
    assert tool.parameters == SCHEMA
    with pytest.raises(UsageError, match=rf"tools\[0\].{name} of the tool 'weather' is \[\]"):
        parse_tools([{"name": "weather", name: []}])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"type": "function"}, "wanted a list"),
        ("weather", "wanted a list"),
        ([3], r"tools\[0\] is 3"),
        ([{"type": "web_search"}], "web_search"),
        ([{"type": "function", "function": 3}], r"tools\[0\].function is 3"),
        ([{"type": "function", "function": {"name": "a b"}}], "'a b'"),
        ([{"type": "function", "function": {"name": "x" * 65}}], "1 to 64"),
        ([{"type": "function", "function": {}}], "None"),
        ([STATED, STATED], "two tools named 'weather'"),
        ([{**STATED, "parameters": []}], r"tools\[0\].parameters of the tool 'weather' is \[\]"),
        ([{**STATED, "parameters": {"type": "string"}}], "of the type object"),
        (
            [{**STATED, "parameters": {"type": "object", "properties": []}}],
            r"of the tool 'weather' has the properties \[\]",
        ),
        ([{**STATED, "description": 3}], "description of the tool 'weather' is 3"),
        ([{**STATED, "strict": "yes"}], r"tools\[0\].strict of the tool 'weather' is 'yes'; wanted true or false"),
        ([{**STATED, "parameters": nested(100)}], "deeper than 64"),
    ],
)
def test_what_is_no_tool_is_refused_with_what_was_wanted(given: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse_tools(given)


def test_a_choice_is_a_word_or_a_tool() -> None:
    tools = parse_tools([STATED])
    assert [parse_choice(each, tools) for each in (None, "auto", "none", "required")] == [
        "auto", "auto", "none", "required",
    ]  # fmt: skip
    assert parse_choice({"type": "function", "function": {"name": "weather"}}, tools) == "weather"
    assert parse_choice({"type": "function", "name": "weather"}, tools) == "weather"
    assert parse_choice("weather", tools) == "weather"
    assert parse_choice("none", ()) == "none"
    for wrong in ("rain", {"type": "function", "function": {"name": "rain"}}, {"type": "tool"}, 3, {}):
        with pytest.raises(UsageError, match="tool_choice is"):
            parse_choice(wrong, tools)
    with pytest.raises(UsageError, match="there are no tools"):
        parse_choice("required", ())
    with pytest.raises(UsageError, match="names the tool 'none', which is a word of tool_choice itself"):
        parse_choice({"type": "function", "name": "none"}, parse_tools([{**STATED, "name": "none"}]))


def test_results_belong_to_calls_before_them() -> None:
    (call,) = parse_calls([{"id": "a", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}])
    assert call == ToolCall(id="a", name="f", arguments='{"x": 1}')
    asked = CallMessage("", (call,))
    require_answerable([asked, ResultMessage("", "a"), ResultMessage("", "")])
    with pytest.raises(UsageError, match=r"'b'.*there are: a"):
        require_answerable([asked, ResultMessage("", "b")])
    with pytest.raises(UsageError, match="none"):
        require_answerable([ResultMessage("", "")])
    deep = {"function": {"name": "f", "arguments": nested(100)}}
    for wrong in (3, "f", [3], [{"name": "f"}], [deep], [{"function": {"name": "f", "arguments": 3}}]):
        with pytest.raises(UsageError, match="tool_calls"):
            parse_calls(wrong)


def test_arguments_that_are_no_object_say_so() -> None:
    with pytest.raises(ValueError, match="wanted a JSON object"):
        ToolCall(id="", name="f", arguments="[1]").parse()
