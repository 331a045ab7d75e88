"""Calls of tools over HTTP, from a decoder that answers by rule."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scripted import scripted_engine
from served import Served, home_with, serving
from until import until

from edgespec.server.model_names import ModelNames

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "get_weather", "description": "Of a city.", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": WEATHER}]
FLAT = [{"type": "function", **WEATHER}]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
ASK = [{"role": "user", "content": "Weather in Rome?"}]


def answer(prompt: str) -> str:
    if "sunny" in prompt:
        return "It is sunny."
    if "both" in prompt:
        return f"I look.\n{CALL}\n{CALL}"
    if "twice" in prompt:
        return f"{CALL}\n{CALL}"
    if "between" in prompt:
        return f"I look.\n{CALL}\nIt may rain.\n{CALL}\nDone."
    if "turns" in prompt:
        return f"{prompt.count('<|im_start|>assistant')} turns"
    if "mark" in prompt:
        return "I <|im_start|>look."
    if "broken" in prompt:
        return CALL.replace('"Rome"', "Rome")
    return CALL


@pytest.fixture(scope="module")
def served(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    names = ModelNames(home_with(tmp_path_factory.mktemp("home"), tiny=tiny_model))
    folder = tmp_path_factory.mktemp("tokenizer")
    with serving(names, lambda name: scripted_engine(tiny_model, folder, answer)) as found:
        yield found


def asked(text: str = "Weather in Rome?", **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], "tools": TOOLS, **fields}


def with_schema(schema: Any, *, strict: bool = False) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": schema, "strict": strict}}


def choice(served: Served, **fields: Any) -> dict[str, Any]:
    found = served.post(CHAT, asked(**fields))
    assert found.status_code == 200, found.text
    (only,) = found.json()["choices"]
    return dict(only)


def test_a_call_is_answered_and_its_result_read(served: Served) -> None:
    found = served.post(CHAT, asked()).json()
    assert found["tool_format"] == "hermes, by the chat template"
    (first,) = found["choices"]
    assert first["finish_reason"] == "tool_calls"
    assert first["message"]["content"] is None
    (call,) = first["message"]["tool_calls"]
    assert call["type"] == "function"
    assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Rome"}'}
    result = {"role": "tool", "tool_call_id": call["id"], "content": [{"type": "text", "text": "sunny"}]}
    second = choice(served, messages=[*ASK, first["message"], result])
    assert second["message"] == {"role": "assistant", "content": "It is sunny.", "refusal": None}
    assert second["finish_reason"] == "stop"


def test_text_stands_beside_calls_and_one_call_can_be_asked_for(served: Served) -> None:
    found = choice(served, text="both")
    assert found["message"]["content"] == "I look."
    assert [each["function"]["name"] for each in found["message"]["tool_calls"]] == ["get_weather"] * 2
    assert len(choice(served, text="both", parallel_tool_calls=False)["message"]["tool_calls"]) == 1


def test_a_tool_that_is_named_is_called_once(served: Served) -> None:
    """Clients such as instructor take a single call alone."""
    named = {"type": "function", "function": {"name": "get_weather"}}
    for tool_choice, num_calls in ((named, 1), ("required", 2)):
        found = choice(served, messages=[{"role": "user", "content": "twice"}], tool_choice=tool_choice)
        assert len(found["message"]["tool_calls"]) == num_calls


def test_a_stream_gives_id_and_name_first_and_arguments_in_pieces(served: Served) -> None:
    events = served.events(CHAT, asked("both"))
    choices = [each["choices"][0] for each in events[:-1]]
    assert "".join(each["delta"].get("content") or "" for each in choices) == "I look."
    deltas = [each["delta"]["tool_calls"][0] for each in choices if "tool_calls" in each["delta"]]
    for index in (0, 1):
        first, *rest = [each for each in deltas if each["index"] == index]
        assert (first["type"], first["function"]) == ("function", {"name": "get_weather", "arguments": ""})
        assert first["id"].startswith("call_")
        assert all(each.keys() == {"index", "function"} for each in rest)
        assert len(rest) > 2
        assert json.loads("".join(each["function"]["arguments"] for each in rest)) == {"city": "Rome"}
    assert choices[-1]["finish_reason"] == "tool_calls"
    assert events[0]["tool_format"]


def test_what_is_no_call_stays_text(served: Served) -> None:
    found = choice(served, text="broken")
    assert found["finish_reason"] == "stop"
    assert found["message"]["content"] == CALL.replace('"Rome"', "Rome")
    assert "tool_calls" not in found["message"]
    assert choice(served, tool_choice="none")["message"]["content"] == CALL


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"tools": {}}, "tools", "wanted a list"),
        ({"tools": [*TOOLS, {"type": "web_search"}]}, "tools[1].type", "web_search"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "'a b'"),
        ({"tools": TOOLS * 2}, "tools[1].function.name", "two tools named 'get_weather'"),
        (
            {"tools": [*TOOLS, with_schema([1])]},
            "tools[1].function.parameters",
            "'f' is [1]; wanted a JSON schema",
        ),
        ({"tools": [{"name": "f", "parameters": [1]}]}, "tools[0].parameters", "tool 'f'"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "strict": 1}}]},
            "tools[0].function.strict",
            "is 1; wanted true or false",
        ),
        ({"tool_choice": "sometimes"}, "tool_choice", "'sometimes'"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "get_weather"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice", "no tools"),
        ({"messages": [*ASK, {"role": "tool", "tool_call_id": "a", "content": ""}]}, "messages", "'a'"),
        ({"messages": [*ASK, {"role": "assistant", "tool_calls": [3]}]}, "messages", "tool_calls has 3"),
    ],
)
def test_wrong_tools_are_refused_in_words(served: Served, fields: dict[str, Any], param: str, said: str) -> None:
    found = served.post(CHAT, asked(**fields))
    assert found.status_code == 400
    error = found.json()["error"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert said in error["message"]


REFUSED_SCHEMAS: list[tuple[Any, str]] = [
    ({"properties": {"x": {"oneOf": [{"type": "string"}, {"type": "string"}]}}}, "#/properties/x/oneOf"),
    ({"properties": {"x": {"type": "string", "pattern": "(?=a)b"}}}, "look-around"),
    ({"properties": {"x": {"not": {"type": "string"}}}}, "#/properties/x"),
    ({"required": 5}, "required"),
    ({"properties": {"x": {"$ref": "#/$defs/y"}}}, "#/$defs/y"),
]


@pytest.mark.parametrize(("schema", "said"), REFUSED_SCHEMAS)
@pytest.mark.parametrize("fields", [{"tool_choice": "required"}, {}])
def test_a_schema_that_no_grammar_ensures_names_its_tool(
    served: Served, schema: Any, said: str, fields: dict[str, Any]
) -> None:
    tools = [*TOOLS, with_schema({"type": "object", **schema}, strict=not fields)]
    found = served.post(CHAT, asked(tools=tools, **fields))
    error = found.json()["error"]
    assert (found.status_code, error["param"]) == (400, "tools[1].function.parameters")
    assert error["message"].startswith("tools[1].function.parameters of the tool 'f' cannot be ensured: ")
    assert said in error["message"]
    flat = [{"type": "function", **tool["function"]} for tool in tools]
    found = served.post(RESPONSES, {"model": "tiny", "input": "x", "tools": flat, **fields})
    assert (found.status_code, found.json()["error"]["param"]) == (400, "tools[1].parameters")
    named = {"type": "function", "function": {"name": "get_weather"}}
    assert choice(served, tools=[*TOOLS, with_schema({"type": "object", **schema})], tool_choice=named)


def test_a_call_that_finds_no_room_is_refused_in_the_words_of_tools(served: Served) -> None:
    found = served.post(CHAT, asked(tool_choice="required", max_tokens=2)).json()["error"]["message"]
    assert "an answer may have 2 tokens here, and the shortest call of a tool takes about" in found
    assert "allow more tokens" in found
    assert "format" not in found


def test_responses_leave_out_tools_that_are_no_functions(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    """Codex sends such tools with every request."""
    others: list[dict[str, Any]] = [{"type": "web_search"}, {"type": "namespace", "name": "n", "tools": FLAT}]
    request = {"model": "tiny", "input": "Weather in Rome?", "tools": [*others, *FLAT]}
    with caplog.at_level(logging.INFO, "edgespec.server"):
        answer = served.post(RESPONSES, request)
        until(lambda: "left out: web_search, namespace" in caplog.text)
    found = answer.json()
    assert [each["type"] for each in found["output"]] == ["function_call"]
    assert [each["name"] for each in found["tools"]] == ["get_weather"]
    refused = served.post(RESPONSES, {**request, "tool_choice": {"type": "web_search"}})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tool_choice")


def test_responses_have_calls_as_items(served: Served) -> None:
    found = served.post(RESPONSES, {"model": "tiny", "input": "both", "tools": FLAT}).json()
    assert found["status"] == "completed"
    message, call, _ = found["output"]
    assert message["content"][0]["text"] == "I look."
    assert (call["type"], call["status"], call["name"]) == ("function_call", "completed", "get_weather")
    assert call["arguments"] == '{"city": "Rome"}'
    flat = [{**FLAT[0], "strict": False}]
    assert (found["tools"], found["tool_choice"]) == (flat, "auto")
    none = {"model": "tiny", "input": "x", "tools": FLAT, "tool_choice": "none", "parallel_tool_calls": False}
    echo = served.post(RESPONSES, none).json()
    assert (echo["tools"], echo["tool_choice"], echo["parallel_tool_calls"]) == (flat, "none", False)
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
    items = [{"role": "user", "content": "Weather?"}, message, call, result]
    again = served.post(RESPONSES, {"model": "tiny", "input": items, "tools": FLAT}).json()
    assert [item["type"] for item in again["output"]] == ["message"]
    assert again["output"][0]["content"][0]["text"] == "It is sunny."


def test_a_stream_of_a_response_tells_of_each_item(served: Served) -> None:
    events = served.events(RESPONSES, {"model": "tiny", "input": "both", "tools": FLAT})
    kinds = [each["type"].removeprefix("response.") for each in events]
    assert [each["sequence_number"] for each in events] == list(range(len(events)))
    assert [each for i, each in enumerate(kinds) if i == 0 or kinds[i - 1] != each] == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
        "output_item.done",
        *["output_item.added", "function_call_arguments.delta", "function_call_arguments.done",
          "output_item.done"] * 2,
        "completed",
    ]  # fmt: skip
    done = [each for each in events if each["type"] == "response.output_item.done"]
    assert [each["output_index"] for each in done] == [0, 1, 2]
    assert [each["item"] for each in done] == events[-1]["response"]["output"]
    deltas = [
        each["delta"] for each in events if each["type"].endswith("arguments.delta") and each["output_index"] == 1
    ]
    assert "".join(deltas) == '{"city": "Rome"}'


@pytest.mark.slow
def test_text_between_calls_is_an_item_between_them(served: Served) -> None:
    """With a stream as without; sent back, all of them are one turn."""
    fields = {"model": "tiny", "input": "between", "tools": FLAT}
    whole = served.post(RESPONSES, fields).json()
    events = served.events(RESPONSES, fields)
    for output in (whole["output"], events[-1]["response"]["output"]):
        kinds = [item["type"] for item in output]
        assert kinds == ["message", "function_call", "message", "function_call", "message"]
        assert [item["content"][0]["text"] for item in output[::2]] == ["I look.", "It may rain.", "Done."]
        assert {item["status"] for item in output} == {"completed"}
    added = [each for each in events if each["type"] == "response.output_item.added"]
    assert [each["output_index"] for each in added] == [0, 1, 2, 3, 4]
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "turns"}
        for item in whole["output"][1::2]
    ]
    items = [{"role": "user", "content": "Weather?"}, *whole["output"], *results]
    again = served.post(RESPONSES, {**fields, "input": items}).json()
    assert again["output"][0]["content"][0]["text"] == "2 turns"  # that of the calls, and the one that begins


@pytest.mark.slow
def test_log_probabilities_of_calls_are_not_those_of_messages(served: Served) -> None:
    """Each message lists the tokens of its own text, in order; those that spell a call are in no list."""
    fields = {"model": "tiny", "input": "between", "tools": FLAT, "include": ["message.output_text.logprobs"]}
    whole = served.post(RESPONSES, fields).json()
    events = served.events(RESPONSES, fields)
    for output in (whole["output"], events[-1]["response"]["output"]):
        parts = [item["content"][0] for item in output if item["type"] == "message"]
        said = ["".join(each["token"] for each in part["logprobs"]).strip() for part in parts]
        assert [text.removesuffix("<|im_end|>") for text in said] == ["I look.", "It may rain.", "Done."]
    streamed = [each for event in events if event["type"].endswith("text.delta") for each in event["logprobs"]]
    assert len(streamed) == sum(len(part["logprobs"]) for part in parts)
    one = served.post(RESPONSES, {**fields, "input": "both", "parallel_tool_calls": False}).json()["output"]
    assert "".join(each["token"] for each in one[0]["content"][0]["logprobs"]) == "I look."
    only = served.post(RESPONSES, {**fields, "input": "x"}).json()["output"]
    assert [item["type"] for item in only] == ["function_call"]


def test_an_answer_without_calls_lists_all_of_its_tokens(served: Served) -> None:
    """Also those that are no text, in whatever passes they come."""
    fields = {"model": "tiny", "input": "mark", "tools": FLAT, "include": ["message.output_text.logprobs"]}
    found = served.post(RESPONSES, fields).json()
    (part,) = found["output"][0]["content"]
    assert part["text"] == "I look."
    assert len(part["logprobs"]) == found["usage"]["output_tokens"]


def test_an_answer_cut_within_a_call_says_so(served: Served) -> None:
    events = served.events(CHAT, asked(max_tokens=50))
    assert events[-2]["choices"][0]["finish_reason"] == "length"
    found = served.post(RESPONSES, {"model": "tiny", "input": "x", "tools": FLAT, "max_output_tokens": 50}).json()
    assert found["status"] == "incomplete"
    assert found["output"][-1]["status"] == "incomplete"


@pytest.mark.slow
def test_a_whole_call_is_completed_in_a_response_that_ends_too_early(served: Served) -> None:
    """With a stream as without."""
    cut = {"model": "tiny", "input": "both", "tools": FLAT}
    whole = served.post(RESPONSES, cut).json()["usage"]["output_tokens"]
    for max_tokens in (whole - 3, whole + 1):
        asked = {**cut, "max_output_tokens": max_tokens}
        found = served.post(RESPONSES, asked).json()
        last = served.events(RESPONSES, asked)[-1]["response"]
        assert found["status"] == last["status"] == ("completed" if max_tokens > whole else "incomplete")
        for response in (found, last):
            calls = [each for each in response["output"] if each["type"] == "function_call"]
            assert calls[0]["status"] == "completed"
    assert all(each["status"] == "completed" for each in found["output"])
