"""Reasoning over HTTP: apart from the answer, whole and streamed, and switched off by a request."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from scripted import THINKING_TEMPLATE, scripted_engine
from served import Served, home_with, serving

from edgespec import Preset, UsageError
from edgespec.server.answer_fields import template_options_of, thinking_of
from edgespec.server.messages import conversation_of
from edgespec.server.model_names import ModelNames
from edgespec.server.ollama_protocol import OllamaChat, OllamaGenerate
from edgespec.server.protocol import ChatMessage, ChatRequest

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"


def answer(prompt: str) -> str:
    """Begins with what the template opens, which the decoder takes for written."""
    if "off" in prompt:
        return "<think>\n\n</think>\n\nNo, <think> is a mark."
    if "short" in prompt:
        return "<think>\nOnly this\n"
    if "weather" in prompt and "sunny" not in prompt:
        call = '{"name": "get_weather", "arguments": {"city": "Rome"}}'
        return f"<think>\nI ask.\n</think>\n\n<tool_call>\n{call}\n</tool_call>"
    return "<think>\nLet me see.\n</think>\n\nYes, 4."


@pytest.fixture(scope="module", params=[THINKING_TEMPLATE, None], ids=["opened", "by itself"])
def served(
    request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    template = request.param or THINKING_TEMPLATE.replace("{% else %}<think>\n", "")
    names = ModelNames(home_with(tmp_path_factory.mktemp("home"), tiny=tiny_model))
    folder = tmp_path_factory.mktemp("tokenizer")
    with serving(names, lambda name: scripted_engine(tiny_model, folder, answer, template)) as found:
        yield found


def message(served: Served, text: str = "2 + 2?", **fields: Any) -> dict[str, Any]:
    asked = {"model": "tiny", "messages": [{"role": "user", "content": text}], **fields}
    whole = served.post(CHAT, asked)
    assert whole.status_code == 200, whole.text
    found = dict(whole.json()["choices"][0]["message"])
    streamed = {"content": "", "reasoning_content": ""}
    lines = served.post(CHAT, {**asked, "stream": True}).text.splitlines()
    for line in lines:
        if line.startswith("data: {"):
            for name, piece in json.loads(line[6:])["choices"][0]["delta"].items():
                if name != "role":
                    streamed[name] += piece
    assert streamed["content"] == found["content"]
    assert streamed["reasoning_content"] == found.get("reasoning_content", "")
    return found


def test_reasoning_is_a_field_of_its_own(served: Served) -> None:
    found = message(served)
    assert (found["reasoning_content"], found["content"]) == ("Let me see.", "Yes, 4.")


def test_what_has_to_match_a_format_is_the_answer(served: Served) -> None:
    schema = {"const": 4}
    found = message(served, response_format={"type": "json_schema", "json_schema": {"schema": schema}})
    assert (found["content"], "reasoning_content" in found) == ("4", False)
    document = {"model": "tiny", "input": "2 + 2?", "text": {"format": {"type": "json_schema", "schema": schema}}}
    (item,) = served.post(RESPONSES, document).json()["output"]
    assert (item["type"], item["content"][0]["text"]) == ("message", "4")


def test_a_call_that_must_come_is_no_reasoning(served: Served) -> None:
    function = {"name": "get_weather", "parameters": {"type": "object", "properties": {"n": {"const": 1}}}}
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "2 + 2?"}]}
    with_tools = {**asked, "tools": [{"type": "function", "function": function}]}
    fields: list[dict[str, Any]] = [
        {**with_tools, "tool_choice": "required"},
        with_tools,
        {**asked, "response_format": {"type": "json_schema", "json_schema": {"schema": {"const": 4}}}},
        asked,
    ]
    demanded, free, formatted, plain = (served.post(CHAT, {**each, "max_tokens": 300}).json() for each in fields)
    assert demanded["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "get_weather"
    assert demanded["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0
    read = [each["usage"]["prompt_tokens"] for each in (demanded, free, formatted, plain)]
    assert read[0] - read[1] == read[2] - read[3]  # the tokens that close it


def test_a_format_that_is_any_text_changes_nothing(served: Served) -> None:
    assert message(served, response_format={"type": "text"}, thinking_budget=99) == message(served)


def test_reasoning_that_never_ends_is_no_answer(served: Served) -> None:
    found = message(served, "short")
    assert (found["reasoning_content"], found["content"]) == ("Only this", "")


@pytest.mark.parametrize(
    "switch",
    [
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"enable_thinking": False},
        {"reasoning_effort": "none"},
    ],
)
def test_a_request_turns_reasoning_off_and_later_marks_are_text(served: Served, switch: dict[str, Any]) -> None:
    found = message(served, "off", **switch)
    assert "reasoning_content" not in found
    assert found["content"] == "No, <think> is a mark."


def test_a_switch_that_is_no_truth_value_is_refused(served: Served) -> None:
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "off"}]}
    refused = served.post(CHAT, {**asked, "chat_template_kwargs": {"enable_thinking": "no"}})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "chat_template_kwargs.enable_thinking"


@pytest.mark.parametrize("content", ["Yes, 4", "<think>\nLet me see.\n</think>\n\nYes, 4"])
def test_what_an_answer_begins_with_is_content_behind_the_reasoning(served: Served, content: str) -> None:
    """The scripted model goes on with what its whole answer has behind the beginning."""
    begun = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": content}]
    asked = {"model": "tiny", "messages": begun, "with_pieces": True}
    shown = "".join(each["piece"] for each in served.post("/tokenize", asked).json()["tokens"])
    assert (shown.count("<think>"), shown.count("</think>")) in ((1, 1), (0, 0))
    assert shown.endswith(content.partition("</think>")[2] or content)
    found = message(served, messages=begun)
    assert "reasoning_content" not in found


def test_an_answer_that_begins_in_the_reasoning_goes_on_with_it(served: Served) -> None:
    begun = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "<think>\nLet me"}]
    found = message(served, messages=begun)
    assert (found["reasoning_content"], found["content"]) == ("see.", "Yes, 4.")


def test_names_of_a_request_reach_the_template(tiny_model: Path, tmp_path: Path) -> None:
    template = (
        "{% if thinking %}Think{{ note }} {% endif %}{{ messages[0].content }}"
        "<|im_start|>assistant\n{% if 1 %}{% endif %}"
    )
    special = "<|im_end|>"
    with scripted_engine(tiny_model, tmp_path, answer, template) as engine:
        options = {"thinking": True, "note": special}
        said = engine.generate("hi", max_tokens=1, template_options=options)
        plain = engine.generate("hi", max_tokens=1)
        assert said.prompt_tokens > plain.prompt_tokens + 1
        tokens = engine.encode("hi", thinking=True)
        assert engine.detokenize(tokens).startswith("Think")
        assert engine.can_switch_thinking
        with pytest.raises(UsageError, match="'messages'"):
            engine.generate("hi", template_options={"messages": []})


def test_the_degree_of_reasoning_reaches_the_template() -> None:
    asked = ChatRequest(model="tiny", messages=[], reasoning_effort="low")
    assert template_options_of(asked) == {"reasoning_effort": "low"}
    stated = {"reasoning_effort": "high", "enable_thinking": True}
    assert template_options_of(replace(asked, chat_template_kwargs=stated)) == {"reasoning_effort": "high"}
    assert template_options_of(replace(asked, reasoning_effort="none")) is None


def test_a_degree_of_reasoning_turns_it_on_whatever_the_preset_says() -> None:
    preset = Preset(name="brief", model="tiny", think=False)
    engine: Any = SimpleNamespace(preset=preset, can_switch_thinking=True)
    asked = ChatRequest(model="brief", messages=[])
    assert thinking_of(asked, engine) is False
    assert thinking_of(replace(asked, reasoning_effort="low"), engine) is True
    assert thinking_of(replace(asked, reasoning_effort="low", enable_thinking=False), engine) is False
    for request in (OllamaChat(think="high"), OllamaGenerate(think="high")):
        stated = request.as_openai()
        assert isinstance(stated, ChatRequest)
        assert thinking_of(stated, engine) is True
    engine.can_switch_thinking = False
    assert thinking_of(replace(asked, reasoning_effort="low"), engine) is None


def test_reasoning_that_a_client_sends_back_reaches_the_template(tiny_model: Path, tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{{ m.reasoning_content }}|{{ m.content }};{% endfor %}<|im_start|>assistant\n"
    )
    stated = [
        ChatMessage(role="user", content="a"),
        ChatMessage(role="assistant", content="b", reasoning_content="why"),
    ]
    messages, prefill = conversation_of([*stated, ChatMessage(role="user", content="c")])
    assert prefill == ""
    with scripted_engine(tiny_model, tmp_path, answer, template) as engine:
        assert engine.detokenize(engine.encode(messages)).startswith("|a;why|b;|c;")
    assert conversation_of(stated) == (messages[:1], "<think>\nwhy\n</think>\n\nb")
    by_its_other_name = [stated[0], ChatMessage(role="assistant", content="b", reasoning="why")]
    assert conversation_of(by_its_other_name) == conversation_of(stated)


def response(served: Served, text: Any = "2 + 2?", **fields: Any) -> dict[str, Any]:
    """A response, whose stream has the same output, events that join to it, and as many tokens."""
    asked = {"model": "tiny", "input": text, **fields}
    answer = served.post(RESPONSES, asked)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    events = served.events(RESPONSES, asked)
    assert [each["sequence_number"] for each in events] == list(range(len(events)))
    streamed = events[-1]["response"]
    assert [_without_ids(item) for item in streamed["output"]] == [_without_ids(item) for item in found["output"]]
    assert streamed["usage"]["output_tokens_details"] == found["usage"]["output_tokens_details"]
    deltas = [each for each in events if each["type"] == "response.reasoning_text.delta"]
    for index, item in enumerate(streamed["output"]):
        mine = [each for each in deltas if each["output_index"] == index]
        assert {each["item_id"] for each in mine} <= {item["id"]}
        text = item["content"][0]["text"] if item["type"] == "reasoning" else ""
        assert "".join(each["delta"] for each in mine) == text
    return found


def _without_ids(item: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in item.items() if name not in ("id", "call_id")}


def test_reasoning_of_a_response_is_an_item_before_the_message(served: Served) -> None:
    found = response(served)
    reasoning, said = found["output"]
    assert reasoning["id"].startswith("rs_")
    assert _without_ids(reasoning) == {
        "type": "reasoning",
        "status": "completed",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "Let me see."}],
        "encrypted_content": None,
    }
    assert said["type"] == "message"
    assert said["content"][0]["text"] == "Yes, 4."
    assert found["reasoning"] is None


def test_a_stream_tells_of_reasoning_as_of_other_items(served: Served) -> None:
    events = served.events(RESPONSES, {"model": "tiny", "input": "2 + 2?"})
    kinds = [each["type"].removeprefix("response.") for each in events]
    assert [each for i, each in enumerate(kinds) if i == 0 or kinds[i - 1] != each] == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done",
        "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done",
        "content_part.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    done = next(each for each in events if each["type"] == "response.reasoning_text.done")
    assert done["text"] == "Let me see."
    assert "logprobs" not in done


def test_tokens_of_reasoning_are_counted_with_its_marks(served: Served, tiny_model: Path) -> None:
    def num_tokens(text: str) -> int:
        found = served.post("/tokenize", {"model": "tiny", "content": text}).json()
        return len(found["tokens"])

    usage = response(served)["usage"]
    count = usage["output_tokens_details"]["reasoning_tokens"]
    assert num_tokens("Let me see.") < count <= usage["output_tokens"] - num_tokens("Yes, 4.")
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "2 + 2?"}]}
    in_chat = served.post(CHAT, asked).json()["usage"]["completion_tokens_details"]
    assert in_chat["reasoning_tokens"] == count
    usage = response(served, "off", reasoning={"effort": "none"})["usage"]
    assert usage["output_tokens_details"]["reasoning_tokens"] == 0
    cut = response(served, "short", max_output_tokens=response(served, "short")["usage"]["output_tokens"] - 3)
    usage = cut["usage"]
    assert usage["output_tokens_details"]["reasoning_tokens"] == usage["output_tokens"]
    assert [(item["type"], item["status"]) for item in cut["output"]] == [("reasoning", "incomplete")]


def test_reasoning_that_never_ends_is_the_only_item_of_a_response(served: Served) -> None:
    found = response(served, "short")
    assert [(item["type"], item["status"]) for item in found["output"]] == [("reasoning", "completed")]
    assert found["output"][0]["content"][0]["text"] == "Only this"


@pytest.mark.parametrize(
    "switch", [{"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning": {"effort": "none"}}]
)
def test_a_response_without_reasoning_is_a_message(served: Served, switch: dict[str, Any]) -> None:
    found = response(served, "off", **switch)
    assert [item["type"] for item in found["output"]] == ["message"]
    assert found["output"][0]["content"][0]["text"] == "No, <think> is a mark."
    if "reasoning" in switch:
        assert found["reasoning"] == {"effort": "none", "summary": None}
    assert response(served, reasoning={"effort": "high"})["output"][0]["type"] == "reasoning"


@pytest.mark.slow
def test_reasoning_that_was_sent_back_is_accepted_and_calls_follow_it(served: Served) -> None:
    tool = {"type": "function", "name": "get_weather", "parameters": {"type": "object"}}
    found = response(served, "weather", tools=[tool])["output"]
    assert [item["type"] for item in found] == ["reasoning", "function_call"]
    assert found[0]["content"][0]["text"] == "I ask."
    result = {"type": "function_call_output", "call_id": found[1]["call_id"], "output": "sunny"}
    items = [{"role": "user", "content": "And?"}, *found, result]
    again = response(served, items, tools=[tool])["output"]
    assert [item["type"] for item in again] == ["reasoning", "message"]
    bare = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "so"}]}
    assert response(served, [{"role": "user", "content": "2 + 2?"}, bare, {"role": "user", "content": "Now."}])


@pytest.mark.parametrize("stop", [None, "</think>?"])
def test_log_probabilities_of_a_response_are_those_of_its_message(served: Served, stop: str | None) -> None:
    """Also where those of the reasoning come late, as a stop string may have begun."""
    found = response(served, include=["message.output_text.logprobs"], top_logprobs=1, stop=stop)
    (part,) = found["output"][1]["content"]
    said = "".join(each["token"] for each in part["logprobs"])
    assert said.strip().startswith("Yes, 4.")
    assert "think" not in said
    num_reasoning = found["usage"]["output_tokens_details"]["reasoning_tokens"]
    assert len(part["logprobs"]) + num_reasoning == found["usage"]["output_tokens"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"reasoning": "none"}, "reasoning"),
        ({"reasoning": {"effort": 3}}, "reasoning"),
        ({"chat_template_kwargs": {"enable_thinking": 1}}, "chat_template_kwargs.enable_thinking"),
    ],
)
def test_a_wrong_switch_of_a_response_is_refused(served: Served, fields: dict[str, Any], param: str) -> None:
    refused = served.post(RESPONSES, {"model": "tiny", "input": "off", **fields})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


BUDGETS = ("thinking_budget", "thinking_token_budget", "thinking_budget_tokens")


@pytest.mark.parametrize("name", BUDGETS)
def test_reasoning_is_closed_at_the_budget_of_a_request(served: Served, name: str) -> None:
    whole = message(served)
    assert message(served, **{name: 200}) == message(served, **{name: -1}) == whole
    cut = message(served, **{name: 3})
    assert len(cut["reasoning_content"]) < len(whole["reasoning_content"])
    assert whole["reasoning_content"].startswith(cut["reasoning_content"])
    items = response(served, **{name: 3})["output"]
    assert (items[0]["type"], items[0]["status"]) == ("reasoning", "completed")
    assert items[0]["content"][0]["text"] == cut["reasoning_content"]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"thinking_budget": -2}, "thinking_budget", "from 0, or -1"),
        ({"thinking_budget": "many"}, "thinking_budget", ""),
        ({"thinking_budget": 3, "thinking_token_budget": 4}, "thinking_token_budget", "one thing"),
        ({"thinking_budget": 3, "response_format": {"type": "json_object"}}, None, "has to begin with"),
    ],
)
def test_a_wrong_budget_is_refused(served: Served, fields: dict[str, Any], param: str | None, words: str) -> None:
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "2 + 2?"}], **fields}
    refused = served.post(CHAT, asked)
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, param)
    assert words in error["message"]


def test_a_model_that_does_not_reason_takes_no_budget(tiny_model: Path, tmp_path: Path) -> None:
    names = ModelNames(home_with(tmp_path / "home", tiny=tiny_model))
    plain = THINKING_TEMPLATE.replace("think", "plan")
    with serving(names, lambda name: scripted_engine(tiny_model, tmp_path / "t", answer, plain)) as served:
        for path, fields in (
            (CHAT, {"messages": [{"role": "user", "content": "?"}]}),
            (RESPONSES, {"input": "?"}),
        ):
            refused = served.post(path, {"model": "tiny", **fields, "thinking_budget": 3})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "thinking_budget")
            assert served.post(path, {"model": "tiny", **fields, "thinking_budget": -1}).status_code == 200
