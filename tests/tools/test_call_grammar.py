"""Calls that a grammar ensures, in each family's form, from a model that writes at random."""

import re
from collections.abc import Callable, Sequence
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import tiny
from llguidance import LLMatcher
from scripted import TOOL_TEMPLATE, scripted_engine
from tokenizers import Tokenizer as Library

from edgespec import Engine, UsageError
from edgespec.engine.request_reader import explain_refusal
from edgespec.errors import FormatError, ToolError
from edgespec.grammar.compile import GrammarCompiler
from edgespec.grammar.vocabulary import GrammarVocabulary
from edgespec.text.tokenizer import Tokenizer
from edgespec.tools.call_grammar import call_grammar, constrained_format
from edgespec.tools.formats import FORMATS, HERMES, CallFormat, JsonBody, PairsBody
from edgespec.tools.notations import WrittenCall, write_calls
from edgespec.tools.tool import ToolUse, parse_tools

TOOLS = [
    {
        "name": "set_light",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {
                "room": {"type": "string", "maxLength": 6},
                "color": {"type": "string", "enum": ["red", "blue"]},
                "level": {"type": "integer", "minimum": 0, "maximum": 9},
                "fade": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
            },
            "required": ["color", "level"],
            "additionalProperties": False,
        },
    },
    {"name": "stop", "parameters": {"type": "object", "properties": {}}},
]
ASK = [{"role": "user", "content": "Do it."}]
WITH_GRAMMAR = [each for each in FORMATS if not isinstance(each.body, PairsBody)]
Make = Callable[..., Engine]


@pytest.fixture
def make(tiny_model: Path, tmp_path: Path) -> Make:
    def make(format: CallFormat, answer: str = "", **settings: Any) -> Engine:
        template = (
            "{# " + " ".join(format.signs[0] if format.signs else (format.frames[0][0],)) + " #}" + TOOL_TEMPLATE
        )
        rule = answer_always(answer)
        return scripted_engine(tiny_model, tmp_path, rule, template, special_marks(format), **settings)

    return make


def answer_always(answer: str) -> Callable[[str], str]:
    return lambda prompt: answer


def special_marks(format: CallFormat) -> tuple[str, ...]:
    """The marks of a format that are special tokens of its models."""
    marks = [mark.strip() for mark in format.marks()]
    return tuple(mark for mark in marks if mark.startswith(("<|", "<｜", "[")) and "\n" not in mark)


def require_schema(arguments: dict[str, Any], name: str) -> None:
    if name == "stop":
        assert arguments == {}
        return
    assert arguments.keys() <= {"room", "color", "level", "fade"}
    assert arguments["color"] in ("red", "blue")
    assert arguments["level"] in range(10)
    assert isinstance(arguments.get("room", ""), str)
    assert arguments.get("fade") in (True, False, None)


@pytest.fixture(scope="module")
def vocabulary(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[GrammarVocabulary, Tokenizer]:
    """Tokens of a tiny model, and the special ones of all families."""
    library = Library.from_file(str(tiny_model / "tokenizer.json"))
    library.add_special_tokens(sorted({mark for format in WITH_GRAMMAR for mark in special_marks(format)}))
    library.add_tokens(["<tool_call>", "</tool_call>"])  # as in Qwen's, where they are shown too
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    library.save(str(path))
    tokenizer = Tokenizer(path)
    return GrammarVocabulary(path, len(tokenizer.pieces), (2,)), tokenizer


@pytest.mark.parametrize("format", WITH_GRAMMAR, ids=lambda each: each.name)
def test_each_familys_calls_match_and_wrong_ones_do_not(
    vocabulary: tuple[GrammarVocabulary, Tokenizer], format: CallFormat
) -> None:
    grammars, tokenizer = vocabulary

    def matches(text: str, *, closed: bool = True, **settings: Any) -> bool:
        use = ToolUse(tools=parse_tools(TOOLS), **settings)
        named = grammars.special_among(tokenizer.added_tokens)
        lark = call_grammar(use, constrained_format(format), named).source
        matcher = LLMatcher(grammars.tokenizer, LLMatcher.grammar_from_lark(lark), log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        text = text.removeprefix(format.frames[0][0]) if format.is_open and closed else text
        tokens = tokenizer.encode(text, special=True).tolist()
        return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())

    right = WrittenCall("set_light", {"room": "h<b>", "color": "red", "level": 3})
    one = write_calls(format, [right])
    two = write_calls(format, [right, WrittenCall("stop", {})])
    wrong = write_calls(format, [WrittenCall("set_light", {"color": "green", "level": 3})])
    more = write_calls(format, [WrittenCall("set_light", {"color": "red", "level": 3, "x": 1})])
    unknown = write_calls(format, [WrittenCall("rm", {})])
    said = format.said + ("all\nI do. " if format.is_open else "I do. ")
    for choice in ("auto", "required", "set_light"):
        assert matches(one, choice=choice)
        assert matches(two, choice=choice) == (choice != "set_light")
        assert not matches(two, choice=choice, is_parallel=False)
        assert not any(matches(each, choice=choice) for each in (wrong, more, unknown))
        assert matches(said, choice=choice, closed=False) == (choice == "auto")
    if format.frames[0][0]:
        said = "I do.".join(format.asides[-1]) if format.asides else said
        assert matches(said + one, closed=False)
        assert not matches(said + wrong, closed=False)
    if format.is_bare and isinstance(format.body, JsonBody) and format.frames[0][0]:
        head = f'{{\n  "{format.body.names[0]}": "set_light",\n  "{format.body.arguments[0]}": '
        for begin, end in (("", ""), ("```json\n", "\n```")):
            assert matches(begin + head + '{\n    "color": "red",\n    "level": 3\n  }\n}' + end)
            assert not matches(begin + head + '{\n    "color": "green"')
            assert matches(begin + '{"name": "Ada"}' + end)


def follows(
    vocabulary: tuple[GrammarVocabulary, Tokenizer],
    format: CallFormat,
    parameters: dict[str, Any],
    arguments: dict[str, Any],
    *,
    beside: Sequence[dict[str, Any]] = (),
) -> bool:
    """True if a call may have the arguments: of a tool that must be called, or beside others may be."""
    grammars, tokenizer = vocabulary
    tools = parse_tools([{"name": "go", "parameters": parameters}, *beside])
    use = ToolUse(tools=tools, choice="auto" if beside else "required")
    lark = call_grammar(use, constrained_format(format), grammars.special_among(tokenizer.added_tokens)).source
    matcher = LLMatcher(grammars.tokenizer, LLMatcher.grammar_from_lark(lark), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = tokenizer.encode(write_calls(format, [WrittenCall("go", arguments)]), special=True).tolist()
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


OBJECT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("hermes", {"$ref": "#/$defs/A", "$defs": {"A": OBJECT}}),
        ("qwen3-coder", {"type": "object", "$ref": "#/$defs/A", "$defs": {"A": OBJECT}}),
        ("hermes", {"allOf": [OBJECT]}),
        ("hermes", {"anyOf": [OBJECT, {"type": "object", "properties": {"x": False}, "required": ["y"]}]}),
    ],
)
def test_arguments_that_a_schema_states_in_its_parts_can_be_given(
    vocabulary: tuple[GrammarVocabulary, Tokenizer], name: str, parameters: dict[str, Any]
) -> None:
    format = next(each for each in FORMATS if each.name == name)
    assert follows(vocabulary, format, parameters, {"x": 3})
    assert not follows(vocabulary, format, parameters, {"x": "a"})


def test_parts_that_state_no_argument_leave_none_open(
    vocabulary: tuple[GrammarVocabulary, Tokenizer],
) -> None:
    least = [{"type": "object", "required": ["x"]}, {"type": "object", "required": ["y"]}, {"minProperties": 1}]
    parameters = {"properties": {"x": {}, "y": {}}, "anyOf": least}
    assert follows(vocabulary, HERMES, parameters, {"x": 1})
    assert not follows(vocabulary, HERMES, parameters, {"x": 1, "z": 1})


@pytest.mark.parametrize("name", ["qwen3-coder", "lfm2", "hermes"])
def test_references_of_an_argument_lead_to_the_other_arguments(
    vocabulary: tuple[GrammarVocabulary, Tokenizer], name: str
) -> None:
    format = next(each for each in FORMATS if each.name == name)
    copy, tree = {"$ref": "#/properties/start"}, {"type": "array", "items": {"$ref": "#"}}
    parameters = {"properties": {"start": {"$ref": "#/$defs/A"}, "to": copy, "c": tree}, "$defs": {"A": OBJECT}}
    assert follows(vocabulary, format, parameters, {"start": {"x": 1}, "to": {"x": 2}, "c": [{"to": {"x": 3}}]})
    for wrong in ({"to": {"x": "a"}}, {"c": [[]]}, {"c": [{"to": 3}]}, {"c": [{"y": 3}]}):
        assert not follows(vocabulary, format, parameters, wrong)


@pytest.mark.parametrize("name", ["qwen3-coder", "lfm2"])
@pytest.mark.parametrize(
    ("bound", "said"),
    [
        ({"anyOf": [{"required": ["x"]}, {"required": ["y"]}]}, "bounds its arguments together by anyOf"),
        ({"allOf": [OBJECT]}, "bounds its arguments together by allOf"),
        ({"not": {"required": ["x"]}}, "bounds its arguments together by not"),
        ({"minProperties": 1}, "bounds its arguments together by minProperties"),
        ({"required": ["z"]}, "it requires 'z', which is none of its properties"),
    ],
)
def test_what_bounds_arguments_together_is_refused_where_each_is_written_alone(
    name: str, bound: dict[str, Any], said: str
) -> None:
    format = next(each for each in FORMATS if each.name == name)
    parameters = {"type": "object", "properties": {"x": {"type": "integer"}, "y": {}}, **bound}
    use = ToolUse(tools=parse_tools([{"name": "go", "strict": True, "parameters": parameters}]))
    with pytest.raises(ToolError, match=said):
        call_grammar(use, constrained_format(format), {})


@pytest.mark.parametrize("name", ["hermes", "qwen3-coder", "lfm2"])
def test_a_tool_that_is_not_strict_is_not_refused_beside_one_that_is(make: Make, name: str) -> None:
    plain = {"x": {"type": "string"}, "n": {"type": "integer"}}
    branches = [{"properties": {"n": {"type": "integer"}}}, {"properties": {"n": True}}]
    schemas: list[dict[str, Any]] = [
        {"properties": plain, "required": ["z"]},
        {"properties": plain, "minProperties": 1, "not": {"required": ["x"]}},
        {"oneOf": branches},
        {"properties": {**plain, "x": {"type": "string", "not": {"const": "a"}}, "to-day": {}}},
    ]
    format = next(each for each in FORMATS if each.name == name)
    with make(format, write_calls(format, [WrittenCall("go", {"n": 3})])) as engine:
        for schema in schemas:
            tool = {"name": "go", "parameters": schema}
            answer = engine.generate(ASK, tools=[*TOOLS, tool], max_tokens=150)
            assert [call.parse() for call in answer.tool_calls] == [{"n": 3}]
            for is_strict, choice in ((True, "auto"), (False, "required")):
                with pytest.raises(UsageError, match="'go' cannot be ensured"):
                    engine.stream(ASK, tools=[*TOOLS, {**tool, "strict": is_strict}], tool_choice=choice)


@pytest.mark.parametrize("name", ["hermes", "granite", "qwen3-coder", "functionary-v3.2", "lfm2", "olmo3"])
def test_a_demanded_call_comes_and_follows_its_schema(make: Make, name: str) -> None:
    format = next(each for each in FORMATS if each.name == name)
    with make(format, seed=5) as engine:
        assert engine.tool_format.startswith(f"{name},")
        answer = engine.generate(
            ASK, tools=TOOLS, tool_choice="set_light", max_tokens=240, parallel_tool_calls=False
        )
        assert (answer.text, answer.finish_reason) == ("", "tool_calls")
        (call,) = answer.tool_calls
        require_schema(call.parse(), call.name)


@pytest.mark.parametrize("seed", [5, 6])
def test_a_demanded_call_with_several_objects_ends_in_time(make: Make, seed: int) -> None:
    place, span = (
        {"type": "object", "properties": {key: {"type": kind} for key in keys}, "required": keys}
        for keys, kind in ((["city", "country"], "string"), (["start", "end"], "integer"))
    )
    objects = {"here": place, "there": place, "when": span}
    travel = {"name": "travel", "parameters": {"properties": objects, "required": [*objects]}}
    with make(HERMES, seed=seed) as engine:
        options: dict[str, Any] = {"tool_choice": "travel", "max_tokens": 240}
        answer = engine.generate(ASK, tools=[travel], **options)
    assert answer.finish_reason == "tool_calls"
    assert answer.tool_calls[0].parse().keys() == objects.keys()


def test_demanded_arguments_are_of_the_types_that_a_function_states(make: Make) -> None:
    def pack(sizes: set[int], wait: timedelta, key: bytes, price: Decimal) -> None:
        """Pack it."""

    with make(HERMES, seed=5) as engine:
        answer = engine.generate(ASK, tools=[pack], tool_choice="pack", max_tokens=240, temperature=1.0)
    arguments = answer.tool_calls[0].parse(pack)
    assert [type(each) for each in arguments.values()] == [set, timedelta, bytes, Decimal]


@pytest.mark.parametrize("name", ["lfm2", "olmo3"])
def test_names_that_python_does_not_have_are_demanded_too(make: Make, name: str) -> None:
    schema = {"properties": {key: {"const": 3} for key in ("from", "to-day")}, "required": ["from", "to-day"]}
    with make(next(each for each in FORMATS if each.name == name)) as engine:
        answer = engine.generate(
            ASK,
            tools=[{"name": "read-from", "parameters": schema}],
            tool_choice="required",
            max_tokens=240,
            parallel_tool_calls=False,
        )
    assert [(call.name, call.parse()) for call in answer.tool_calls] == [("read-from", {"from": 3, "to-day": 3})]


def test_strict_arguments_follow_their_schema_where_calls_are_free(make: Make) -> None:
    wrong = write_calls(HERMES, [WrittenCall("set_light", {"room": "hall", "color": "green", "level": 3})])
    with make(HERMES, f"I do it. {wrong}") as engine:
        answer = engine.generate(ASK, tools=TOOLS, max_tokens=150, parallel_tool_calls=False)
    assert answer.text == "I do it."
    (call,) = answer.tool_calls
    assert call.name == "set_light"
    require_schema(call.parse(), call.name)


def test_an_answer_without_calls_can_have_a_schema_of_its_own(make: Make) -> None:
    schema = {
        "type": "json_schema",
        "schema": {
            "type": "object",
            "properties": {"ok": {"type": "boolean"}},
            "required": ["ok"],
            "additionalProperties": False,
        },
    }
    with make(HERMES, '{"ok": true}') as engine:
        answer = engine.generate(ASK, tools=TOOLS[1:], response_format=schema, max_tokens=100)
        assert answer.text in ('{"ok":true}', '{"ok":false}')
    with make(HERMES, '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>') as engine:
        answer = engine.generate(ASK, tools=TOOLS[1:], response_format=schema, max_tokens=100)
        assert [call.name for call in answer.tool_calls] == ["stop"]


def test_what_no_grammar_ensures_is_refused(make: Make) -> None:
    gemma4 = next(each for each in FORMATS if each.name == "gemma4")
    with make(gemma4) as engine:
        for options in ({"tool_choice": "required"}, {}):
            with pytest.raises(UsageError, match="there is none for calls of the form 'gemma4'"):
                engine.stream(ASK, tools=TOOLS, **options)
    spaced = {"name": "go", "parameters": {"properties": {"to day": {"type": "string"}}}}
    lfm2 = next(each for each in FORMATS if each.name == "lfm2")
    with make(lfm2) as engine, pytest.raises(UsageError, match="'to day' is not a name in calls"):
        engine.stream(ASK, tools=[spaced], tool_choice="required")
    with make(HERMES) as engine:
        with pytest.raises(UsageError, match="response_format of the type regex"):
            engine.stream(ASK, tools=TOOLS, response_format={"type": "regex", "regex": "a"})
        with pytest.raises(UsageError, match="cannot be ensured"):
            engine.stream(ASK, tools=TOOLS, tool_choice="required", max_tokens=3)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3-coder", "glm"])
def test_texts_between_tags_keep_to_their_bounds(make: Make, family: str) -> None:
    bounds = {
        "fix": {"const": 'f"x'},
        "size": {"minLength": 3, "maxLength": 5, "format": "password"},
        "shape": {"pattern": r"^[ab]/\d$"},
    }
    bounds |= {"end": {"pattern": "x$"}, "words": {"enum": ["", "a\nb", "</parameter></arg_value>"]}}
    properties = {key: {"type": "string", **each} for key, each in bounds.items()}
    parameters = {"type": "object", "properties": properties, "required": [*properties]}
    engine = make(next(each for each in FORMATS if each.name == family), seed=1)
    settings: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 400}
    answer = engine.generate(ASK, tools=[{"name": "set", "parameters": parameters}], **settings)
    found = answer.tool_calls[0].parse()
    assert found["fix"] == 'f"x'
    assert 3 <= len(found["size"]) <= 5
    assert re.fullmatch(r"[ab]/\d", found["shape"])
    assert found["end"].endswith("x")
    assert found["words"] in ("", "a\nb")
    properties["end"] = {"type": "string", "format": "email"}
    with pytest.raises(UsageError, match="bounds its argument 'end' by format"):
        engine.generate(ASK, tools=[{"name": "set", "parameters": parameters}], **settings)


@pytest.mark.parametrize("bounds", [{}, {"minLength": 3}, {"pattern": "y$"}])
def test_a_text_between_tags_ends_where_its_reader_ends_it(
    vocabulary: tuple[GrammarVocabulary, Tokenizer], bounds: dict[str, Any]
) -> None:
    format = next(each for each in FORMATS if each.name == "qwen3-coder")
    parameters = {"properties": {"a": {"type": "string", **bounds}}, "required": ["a"]}
    assert follows(vocabulary, format, parameters, {"a": "xyy"})
    assert not follows(vocabulary, format, parameters, {"a": "x</parameter>yyy"})


def test_times_between_tags_keep_to_their_format(vocabulary: tuple[GrammarVocabulary, Tokenizer]) -> None:
    format = next(each for each in FORMATS if each.name == "qwen3-coder")
    for kind, text in (("date", "2026-02-28"), ("date-time", "2026-02-28T10:30:00Z"), ("time", "10:30:00Z")):
        parameters = {"properties": {"a": {"type": "string", "format": kind}}, "required": ["a"]}
        assert follows(vocabulary, format, parameters, {"a": text})
        assert not follows(vocabulary, format, parameters, {"a": f"at {text}"})
        assert not follows(vocabulary, format, parameters, {"a": text.replace("28", "30").replace(":", "h")})


@pytest.mark.parametrize("key", ["not", "if"])
def test_a_text_between_tags_that_must_not_be_something_is_refused(key: str) -> None:
    format = next(each for each in FORMATS if each.name == "qwen3-coder")
    parameters = {"properties": {"a": {"type": "string", key: {"const": "x"}}}}
    use = ToolUse(tools=parse_tools([{"name": "go", "strict": True, "parameters": parameters}]))
    with pytest.raises(ToolError, match=f"bounds its argument 'a' by {key}, which"):
        call_grammar(use, constrained_format(format), {})


def test_the_tool_whose_schema_is_too_large_is_named(tiny_model: Path) -> None:
    compiler = GrammarCompiler(tiny_model / "tokenizer.json", tiny.VOCAB, (2,))
    large = {"type": "object", "properties": {f"p{i}": {} for i in range(5000)}}
    use = ToolUse(tools=parse_tools([*TOOLS, {"name": "large", "parameters": large}]))
    wanted = call_grammar(use, constrained_format(HERMES), {})
    with pytest.raises(FormatError, match="schemas within each other; wanted at most 5000") as refused:
        compiler.compile(wanted)
    found = explain_refusal(use, refused.value, compiler)
    assert isinstance(found, ToolError)
    assert found.field == "tools[2].parameters"
    assert "of the tool 'large' cannot be ensured: the response_format has 5002 schemas" in str(found)
    fine = ToolUse(tools=parse_tools(TOOLS))
    assert "as they are asked for" in str(explain_refusal(fine, FormatError("no"), compiler))
