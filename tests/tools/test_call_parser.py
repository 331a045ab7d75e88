"""Calls in answers of each family, whole and cut at every place."""

import ast
import json
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.engine.answer_passes import TextStop
from edgespec.tools.call_events import CallEnd, CallStart, Part, TextPart, join_calls
from edgespec.tools.call_parser import CallParser
from edgespec.tools.formats import FORMATS, HERMES, CallFormat, PythonBody, TagBody
from edgespec.tools.notations import WrittenCall, write_calls
from edgespec.tools.tool import Tool

TOOLS = (
    Tool(
        name="get_weather",
        parameters={
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "units": {"enum": ["C", "F"]}},
        },
    ),
    Tool(name="list-files", parameters={"type": "object", "properties": {}}),
)
NAMED = {each.name: each for each in FORMATS}
Calls = list[tuple[str, dict[str, Any]]]
WEATHER = '{"name": "get_weather", "arguments": {"city": "Köln <b>", "days": 2}}'


def parse(
    text: str, format: CallFormat, *, holds: bool = False, cuts: Sequence[int] = ()
) -> tuple[str, Calls, tuple[str, ...]]:
    """The text, the calls, and their arguments as they are written."""
    parser = CallParser(format, TOOLS, holds_arguments=holds)
    events = []
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        events += parser.push(text[start:end])
    events += parser.flush()
    calls = join_calls(events)
    found = []
    for call in calls:
        try:
            found.append((call.name, call.parse()))
        except ValueError:
            found.append((call.name, {}))
    return join_text(events), found, tuple(call.arguments for call in calls)


def join_text(events: Sequence[Part]) -> str:
    """The text of an answer beside its calls."""
    return "".join(event.text for event in events if isinstance(event, TextPart))


def parse_everywhere(text: str, format: CallFormat, *, holds: bool) -> tuple[str, Calls, tuple[str, ...]]:
    """What is found in a text, the same however it is cut."""
    whole = parse(text, format, holds=holds)
    for cut in range(1, len(text)):
        assert parse(text, format, holds=holds, cuts=[cut]) == whole, text[:cut]
    assert parse(text, format, holds=holds, cuts=range(1, len(text))) == whole
    return whole


@pytest.mark.parametrize("holds", [True, False])
@pytest.mark.parametrize("format", FORMATS, ids=lambda each: each.name)
def test_calls_that_a_family_writes_are_found_wherever_they_are_cut(format: CallFormat, holds: bool) -> None:
    values = {"city": 'Köln, "Süd"\n<b> {x}', "days": -2, "units": "C"}
    if not isinstance(format.body, (TagBody, PythonBody)):
        values["near"] = {"a": [1.5, None, "x"], "b": True}
    calls = [WrittenCall("get_weather", values), WrittenCall("get_weather", {"city": "", "days": 0})]
    written = write_calls(format, calls)
    if format.is_open:
        written = written.removeprefix(format.frames[0][0])
    text, found, arguments = parse_everywhere(written, format, holds=holds)
    assert found == [(call.name, dict(call.arguments)) for call in calls]
    assert all(json.loads(each) for each in arguments)
    assert text == ""


@pytest.mark.parametrize("format", FORMATS, ids=lambda each: each.name)
def test_any_name_that_a_tool_may_have_can_be_called(format: CallFormat) -> None:
    text = "a 'list-files(' or \"import()\" \\"
    calls = [
        WrittenCall(name, {"city": text, "from": 1, "to-day": 2})
        for name in ("list-files", "import", "3d-view", "read-from-file", "-", "_")
    ]
    tools = [replace(TOOLS[0], name=call.name) for call in calls]
    written = write_calls(format, calls).removeprefix(format.frames[0][0] if format.is_open else "")
    parser = CallParser(format, tools, holds_arguments=True)
    found = join_calls([*parser.push(written), *parser.flush()])
    assert [(call.name, call.parse()) for call in found] == [(call.name, call.arguments) for call in calls]


@pytest.mark.parametrize("format", [each for each in FORMATS if isinstance(each.body, PythonBody)])
def test_texts_within_lists_are_written_to_the_letter_in_python(format: CallFormat) -> None:
    value = {"👩\u200d👧": ["<\ue000|end|>", "a\u00a0b", [True, None, 1.5]], "'": '"\n\\'}
    written = write_calls(format, [WrittenCall("f", {"x": value})])
    assert "<\ue000|end|>" in written
    assert "a\u00a0b" in written
    assert ast.literal_eval(written[written.index("{") : written.rindex("}") + 1]) == value


@pytest.mark.parametrize("holds", [True, False])
@pytest.mark.parametrize("format", FORMATS, ids=lambda each: each.name)
def test_text_before_calls_is_content(format: CallFormat, holds: bool) -> None:
    if not format.frames[0][0]:
        return  # a call is all of an answer
    call = write_calls(format, [WrittenCall("get_weather", {"city": "Rom"})])
    begin = "all\n" if getattr(format.body, "text_name", None) else ""
    text, found, _ = parse_everywhere(f"{begin}I look {{it}} up.\n\n{call}", format, holds=holds)
    assert (text, found) == ("I look {it} up.", [("get_weather", {"city": "Rom"})])


@pytest.mark.parametrize("holds", [True, False])
@pytest.mark.parametrize("format", FORMATS, ids=lambda each: each.name)
def test_what_is_no_call_is_passed_on_to_the_letter(format: CallFormat, holds: bool) -> None:
    for text in (
        "An answer  in words,\n\twith {braces} and [1, 2] and <tags>.\n",
        "",
        "  \n",
        '{"name": "other", "arguments": {"city": "Rom"}}',
        '{"city": "Rom"}',
        "[1, 2, 3]",
        "```json\n{}\n```",
        '{"name": "get_weather", "arguments": {"city": Rom}}',
        "<",
    ):
        if "Rom}" in text and not holds:
            continue  # its beginning has been passed on as a call
        begin = "all\n" if getattr(format.body, "text_name", None) else ""
        assert parse_everywhere(begin + text, format, holds=holds)[:2] == (text, []), text


@pytest.mark.parametrize("format", FORMATS, ids=lambda each: each.name)
def test_unknown_names_and_broken_calls_stay_text(format: CallFormat) -> None:
    unknown = write_calls(format, [WrittenCall("rm", {"city": "Rom"})])
    known = write_calls(format, [WrittenCall("get_weather", {"city": "Rom"})])
    closed = replace(format, is_open=False)
    assert parse_everywhere(unknown, closed, holds=True)[:2] == (unknown, [])
    cut = known[: known.index("Rom") + 1]
    assert parse_everywhere(cut, closed, holds=True)[:2] == (cut, [])
    text, found, _ = parse_everywhere(f"{unknown}\n{known}", closed, holds=True)
    if format.frames[0][0]:
        assert [name for name, _ in found] == ["get_weather"]
        assert unknown.startswith(
            text
        )  # without the end of the frame around all calls, which may stand beside both
        assert "Rom" in text


FAMILIAR = [
    ("hermes", f"<tool_call>{WEATHER}</tool_call>", [{"city": "Köln <b>", "days": 2}]),
    ("hermes", f"<tool_call>\n{WEATHER}", [{"city": "Köln <b>", "days": 2}]),
    ("hermes", f"<tool_call>\n{WEATHER[:-1]}", [{"city": "Köln <b>", "days": 2}]),
    ("hermes", f"<tool_call>\n[{WEATHER}, {WEATHER}]\n</tool_call>", [{"city": "Köln <b>", "days": 2}] * 2),
    ("hermes", f"\n{WEATHER}\n", [{"city": "Köln <b>", "days": 2}]),
    ("hermes", f"```json\n{WEATHER}\n```", [{"city": "Köln <b>", "days": 2}]),
    ("hermes", f"<tools>\n{WEATHER}\n</tools>", [{"city": "Köln <b>", "days": 2}]),
    ("hermes", '<tool_call>{"arguments": {"days": 1}, "name": "get_weather"}</tool_call>', [{"days": 1}]),
    ("hermes", '<tool_call>{"name": "get_weather", "arguments": "{\\"days\\": 1}"}</tool_call>', [{"days": 1}]),
    ("hermes", '<tool_call>{"name": "get_weather", "arguments": null, "id": 3}</tool_call>', [{}]),
    ("hermes", '<tool_call>{"name": "list-files"}</tool_call>', [{}]),
    (
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": {"city": "a\nb"}}</tool_call>',
        [{"city": "a\nb"}],
    ),
    ("llama3", '{"name": "get_weather", "parameters": {"days": 1}}', [{"days": 1}]),
    ("llama3", '<|python_tag|>{"type": "function", "name": "get_weather", "parameters": {}}', [{}]),
    (
        "llama3",
        '{"name": "get_weather", "parameters": {"days": 1}}; {"name": "get_weather", "parameters": {"days": 2}}',
        [{"days": 1}, {"days": 2}],
    ),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"days": 1}, "id": "abcdefghi"}]',
        [{"days": 1}],
    ),
    ("mistral-args", '[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{"days": 1}', [{"days": 1}]),
    ("mistral-args", '[TOOL_CALLS]get_weather{"days": 1}[TOOL_CALLS]list-files[ARGS]{}', [{"days": 1}, {}]),
    ("granite", '<|tool_call|>[{"name": "get_weather", "arguments": {"days": 1}}]', [{"days": 1}]),
    ("granite", '[{"name": "get_weather", "arguments": {"days": 1}}]', [{"days": 1}]),
    ("phi-4-mini", '<|tool_call|>{"name": "get_weather", "arguments": {"days": 1}}<|/tool_call|>', [{"days": 1}]),
    ("kimi", "<|tool_call_begin|>functions.list-files:0<|tool_call_argument_begin|>{}<|tool_call_end|>", [{}]),
    ("command-r", 'Action: ```json\n[{"tool_name": "list-files", "parameters": {}}]\n```', [{}]),
    ("qwen3-coder", "<function=list-files>\n</function>\n</tool_call>", [{}]),
    (
        "qwen3-coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\n12\n</parameter>\n<parameter=days>\nmany\n"
        "</parameter>\n</function>\n</tool_call>",
        [{"city": "12", "days": "many"}],
    ),
    (
        "minimax",
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Köln</parameter>\n'
        '<parameter name="days">2</parameter>\n</invoke>\n'
        '<invoke name="list-files">\n</invoke>\n</minimax:tool_call>',
        [{"city": "Köln", "days": 2}, {}],
    ),
    (
        "deepseek-v3.2",
        '\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="city" string="true">12</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="units" string="true">C</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="near" string="false">[1, null]</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        [{"city": "12", "units": "C", "near": [1, None]}],
    ),
    (
        "deepseek-v4",
        '<｜DSML｜tool_calls><｜DSML｜invoke name="get_weather"><｜DSML｜parameter name="days">3'
        "</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜tool_calls>",
        [{"days": 3}],
    ),
    (
        "minicpm5",
        '<function name="get_weather"><param name="city"><![CDATA[a <b>\n</param> & c]]></param>'
        '<param name="days">2</param></function>\n<function name="list-files"></function>',
        [{"city": "a <b>\n</param> & c", "days": 2}, {}],
    ),
    (
        "minicpm5",
        '<function name="get_weather"><param name="units"><![CDATA[C]]></param></function>',
        [{"units": "C"}],
    ),
    (
        "olmo3",
        '<function_calls>get_weather(city="Rom", days=1)\nget_weather(city="Köln")</function_calls>',
        [{"city": "Rom", "days": 1}, {"city": "Köln"}],
    ),
    ("olmo3", '<function_calls>\n[get_weather(city="Rom")]\n</function_calls>', [{"city": "Rom"}]),
    (
        "lfm2",
        '<|tool_call_start|>[get_weather(city="Rom", near={"b": true, "c": [null, False]})]<|tool_call_end|>',
        [{"city": "Rom", "near": {"b": True, "c": [None, False]}}],
    ),
    ("olmo3", "<function_calls># it's\nget_weather('Rom')</function_calls>", [{"city": "Rom"}]),
    ("lfm2", '<|tool_call_start|>[get_weather("Rom", days=1)]', [{"city": "Rom", "days": 1}]),
    ("function-gemma", "<start_function_call>call:list-files{}<end_function_call>", [{}]),
]


@pytest.mark.parametrize("holds", [True, False])
@pytest.mark.parametrize(("name", "text", "wanted"), FAMILIAR)
def test_what_models_write_in_its_place_is_found_too(
    name: str, text: str, wanted: list[dict[str, Any]], holds: bool
) -> None:
    rest, found, _ = parse_everywhere(text, NAMED[name], holds=holds)
    assert [arguments for _, arguments in found] == wanted
    assert rest == ""


def test_name_comes_first_and_arguments_as_they_come() -> None:
    parser = CallParser(HERMES, TOOLS)
    assert parser.push('<tool_call>\n{"name": "get_weather", "argu') == []
    first, *_ = parser.push('ments": {"ci')
    assert isinstance(first, CallStart)
    assert (first.index, first.name) == (0, "get_weather")
    fragments = [event for text in ('ty": "Ro', 'm"', "}}") for event in parser.push(text)]
    assert [getattr(event, "text", "") for event in fragments] == ['ty": "Ro', 'm"', "}", ""]
    assert fragments[-1] == CallEnd(0)
    assert parser.output.num_calls == 1


def test_a_text_argument_between_tags_comes_as_it_is_written() -> None:
    parser = CallParser(NAMED["qwen3-coder"], TOOLS)
    parser.push("<tool_call>\n<function=get_weather>\n<parameter=city>\n")
    (event,) = parser.push('one "line"\nand')
    assert getattr(event, "text", "").endswith('one \\"line\\"\\nand')


def test_text_comes_at_once_where_it_begins_no_call() -> None:
    parser = CallParser(HERMES, TOOLS)
    assert parser.push("Hello") == [TextPart("Hello")]
    assert parser.push(" wor<b>") == [TextPart(" wor<b>")]
    assert parser.push("x <too") == [TextPart("x")]
    assert parser.push("ls are sharp") == [TextPart(" <tools are sharp")]


def test_arguments_that_break_in_a_stream_stay_as_they_are_written() -> None:
    text = '<tool_call>{"name": "get_weather", "arguments": {"city": Rom}}</tool_call> So.'
    rest, found, arguments = parse_everywhere(text, HERMES, holds=False)
    assert (found, rest) == ([("get_weather", {})], " So.")
    assert arguments == ('{"city": Rom}}',)


def test_an_answer_that_ends_within_arguments_has_them_as_far_as_they_came() -> None:
    text = '<tool_call>{"name": "get_weather", "arguments": {"city": "Ro'
    assert parse_everywhere(text, HERMES, holds=False)[2] == ('{"city": "Ro',)


def test_whole_calls_before_a_broken_one_are_kept() -> None:
    text = f"<tool_call>\n{WEATHER}\n</tool_call>\n<tool_call>\n{{oh}}\n</tool_call>"
    rest, found, _ = parse_everywhere(text, HERMES, holds=True)
    assert len(found) == 1
    assert rest == "\n<tool_call>\n{oh}\n</tool_call>"


PIECES = [
    "get_weather",
    '{"name": "get_weather", "arguments": ',
    '{"city": "Rom"}',
    "}",
    "{",
    "[",
    "]",
    ",",
    '"',
    "x",
    " ",
    "\n",
    "```json",
]


@given(st.sampled_from(FORMATS), st.data(), st.booleans())
def test_any_text_is_read_alike_however_it_is_cut_and_none_is_lost(
    format: CallFormat, data: st.DataObject, holds: bool
) -> None:
    pieces = data.draw(
        st.lists(st.sampled_from([*PIECES, *(mark for mark in format.marks() if mark)]), max_size=9)
    )
    text = "".join(pieces)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    whole = parse(text, format, holds=holds)
    assert parse(text, format, holds=holds, cuts=cuts) == whole
    if not whole[1] and not (format.is_open and text.startswith("all")):
        assert whole[0] == text


@pytest.mark.parametrize(
    ("family", "text", "value"),
    [
        ("qwen3-coder", "<tool_call><function=get_weather><parameter=days>\nNaN\n</parameter></function>", "NaN"),
        ("gemma4", "<|tool_call>call:get_weather{days:NaN}<tool_call|>", "NaN"),
        ("gemma4", "<|tool_call>call:get_weather{days:1e999}<tool_call|>", "1e999"),
        ("lfm2", '<|tool_call_start|>[get_weather(days="\\ud800")]<|tool_call_end|>', "\ud800"),
        ("hermes", r'{"name": "get_weather", "arguments": "{\"days\": \"\ud800\"}"}', "\ud800"),
    ],
)
def test_arguments_are_json_in_utf_8_whatever_the_model_writes(family: str, text: str, value: str) -> None:
    _, _, (arguments,) = parse_everywhere(text, NAMED[family], holds=True)
    assert json.loads(arguments.encode(), parse_constant=float) == {"days": value}


@pytest.mark.parametrize(
    ("written", "value"),
    [
        (r'"\d"', r"\d"),
        (r"r'\d\\'", r"\d\\"),
        (r"'\400'", "Ā"),
        ("1if 1else 2", None),
        ("f'{1or 2}'", None),
    ],
)
def test_python_warns_of_nothing_that_a_model_wrote(written: str, value: str | None) -> None:
    text = f"<|tool_call_start|>[get_weather(city={written})]<|tool_call_end|>"
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = parse(text, NAMED["lfm2"], holds=True)[1]
    assert (told, found) == ([], [("get_weather", {"city": value})] if value else [])


def test_warnings_of_the_users_program_are_left_as_they_are() -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")  # once a place, until something changes how Python warns
        for _ in range(2):
            warnings.warn("of the user's program", stacklevel=1)
            parse("<|tool_call_start|>[get_weather(city='a')]<|tool_call_end|>", NAMED["lfm2"], holds=True)
    assert len(told) == 1


def test_what_json_cannot_hold_is_no_call() -> None:
    for arguments in (r'"{\"days\": NaN}"', '{"days": 1e999}'):
        text = f'<tool_call>{{"name": "get_weather", "arguments": {arguments}}}</tool_call>'
        assert parse(text, NAMED["hermes"], holds=True)[:2] == (text, [])


@given(
    st.lists(st.sampled_from(["One\n", "ab", "cab", " ", f"<tool_call>\n{WEATHER}", "</tool_call>"]), max_size=7),
    st.data(),
)
@pytest.mark.parametrize("holds", [True, False])
def test_where_a_stop_string_ends_text_does_not_depend_on_cuts(
    holds: bool, pieces: list[str], data: st.DataObject
) -> None:
    text = "".join(pieces)
    stop = data.draw(st.lists(st.sampled_from(["b", "ca", "ab ", "\n", "Köln", "}", "<", "call>"]), max_size=2))

    def run(cuts: Sequence[int]) -> tuple[str, list[str], bool]:
        parser = CallParser(HERMES, TOOLS, holds_arguments=holds, stop=TextStop(stop))
        events = []
        for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
            events += parser.push(text[start:end])
        events += parser.flush()
        return join_text(events), [call.arguments for call in join_calls(events)], parser.output.is_stopped

    whole = run([])
    assert run(range(1, len(text))) == whole if text else True
    assert not any(each in whole[0] for each in stop if len(each) == 1)
    assert all(json.loads(each) for each in whole[1])


OPTIONAL = {"anyOf": [{"type": "string"}, {"type": "null"}]}


@pytest.mark.parametrize("family", ["qwen3-coder", "glm", "seed", "minimax", "deepseek-v3.2"])
@pytest.mark.parametrize(
    ("schema", "written", "value"),
    [
        (OPTIONAL, "123", "123"),
        (OPTIONAL, '{"a": 1}', '{"a": 1}'),
        (OPTIONAL, "null", None),
        (OPTIONAL, '"in quotes"', "in quotes"),  # as a grammar has it
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"type": ["string", "null"]}, "12", "12"),
        ({"type": ["string", "integer"]}, "12", 12),
        ({"$ref": "#/$defs/name"}, "0.5", "0.5"),
        ({"allOf": [{"$ref": "#/$defs/name"}, {}]}, "true", "true"),
        ({"oneOf": [{"const": 1}, {"const": "2"}]}, "2", "2"),
        ({"type": "boolean"}, "True", True),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "None", None),
        ({"type": "object"}, "{'a': [True]}", {"a": [True]}),
        ({"type": "integer"}, "many", "many"),
        ({"anyOf": [{"properties": {"a": {"type": "string"}}}, {"type": "string"}]}, '{"a": 1}', '{"a": 1}'),
        ({"anyOf": [{"properties": {"a": {"type": "integer"}}}, {"type": "string"}]}, '{"a": 1}', {"a": 1}),
        ({"anyOf": [{"required": ["b"]}, {"type": "string"}]}, '{"a": 1}', '{"a": 1}'),
        ({"anyOf": [{"items": {"type": "string"}}, {"type": "string"}]}, "[1, 2]", "[1, 2]"),
        ({"type": ["array", "string"], "items": {"type": "integer"}}, "[1, 2]", [1, 2]),
        ({"$ref": "#/$defs/loop"}, "7", 7),
        ({}, "True", "True"),
    ],
)
def test_a_value_between_tags_is_what_its_schema_allows(
    family: str, schema: dict[str, Any], written: str, value: object
) -> None:
    loop = {"anyOf": [{"$ref": "#/$defs/loop"}] * 50}
    parameters = {"properties": {"o": schema}, "$defs": {"name": {"type": "string"}, "loop": loop}}
    body = NAMED[family].body
    assert isinstance(body, TagBody)
    text = body.begin + "f" + body.name_end + body.opening("o", is_text=False) + written + body.space
    begin, end = NAMED[family].frames[0]
    parser = CallParser(NAMED[family], [Tool(name="f", parameters=parameters)])
    calls = join_calls(parser.push(begin + text + body.value_end + body.end + end) + parser.flush())
    assert [call.parse() for call in calls] == [{"o": value}]


@pytest.mark.parametrize("behind", ["", "}}", "}}}", "}]", '}, "id": "7"}', "\n}}\n}"])
def test_braces_too_few_or_many_do_not_bring_the_end_of_a_frame_into_the_text(behind: str) -> None:
    call = '{"name": "get_weather", "arguments": {"city": "x"}' + behind
    for text in (f"<tool_call>\n{call}\n</tool_call>", f"Well<tool_call>{call}</tool_call> so"):
        said, calls, _ = parse_everywhere(text, HERMES, holds=False)
        assert (said, len(calls)) == ("Well so" if "Well" in text else "", 1)


@pytest.mark.parametrize("missing", ["", "</function>\n"])
def test_the_end_of_a_tagged_call_may_be_missing_before_that_of_its_frame(missing: str) -> None:
    parameter = "<parameter=city>\nx\n</parameter>\n"
    call = f"<tool_call>\n<function=get_weather>\n{parameter}</function>\n</tool_call>".replace(missing, "", 1)
    said, calls, _ = parse_everywhere(call + "so", NAMED["qwen3-coder"], holds=True)
    assert (said, calls) == ("so", [("get_weather", {"city": "x"})])
    rest = call.removesuffix("</tool_call>") + "and"
    assert missing == "" or parse_everywhere(rest, NAMED["qwen3-coder"], holds=True)[:2] == (rest, [])


def test_text_behind_a_call_stays_text_where_the_frame_does_not_end() -> None:
    call = '<tool_call>{"name": "get_weather", "arguments": {}}'
    assert parse_everywhere(call + "} and so on", HERMES, holds=True)[0] == "} and so on"
    assert parse_everywhere(call + ' {"name": 1}</tool_call>', HERMES, holds=True)[0] == ' {"name": 1}</tool_call>'
