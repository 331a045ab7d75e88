"""The server asked by openai, the package: plain, streaming and from asyncio."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from scripted import scripted_engine
from served import Served, home_with, serving, table_engine

from edgespec.server.model_names import ModelNames

openai = pytest.importorskip("openai", reason="needs the package openai: make test-serve")
pytestmark = pytest.mark.clients
HI = [{"role": "user", "content": "in the an"}]


@pytest.fixture(scope="module")
def served(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    names = ModelNames(home_with(tmp_path_factory.mktemp("home"), tiny=tiny_model))
    with serving(names, lambda name: table_engine(tiny_model), key="key") as found:
        yield found


def test_chat_completions_are_understood_plain_and_streaming(served: Served) -> None:
    with openai.OpenAI(base_url=served.url, api_key="key") as client:
        whole = client.chat.completions.create(
            model="tiny", messages=HI, max_tokens=9, logprobs=True, top_logprobs=2
        )
        text = whole.choices[0].message.content
        assert len(whole.choices[0].logprobs.content) == 9
        assert whole.model_extra["speculation"]["drafter"] == "suffix"
        stream = client.chat.completions.create(
            model="tiny", messages=HI, max_tokens=9, stream=True, stream_options={"include_usage": True},
            extra_body={"speculation": {"off": True}},
        )  # fmt: skip
        chunks = list(stream)
        joined = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert joined == text
        assert chunks[-1].usage.completion_tokens == 9


def test_asyncio_clients_ask_at_once(served: Served) -> None:
    async def ask(client: "openai.AsyncOpenAI") -> str:
        answer = await client.chat.completions.create(model="tiny", messages=HI, max_tokens=9)
        return str(answer.choices[0].message.content)

    async def ask_all() -> set[str]:
        async with openai.AsyncOpenAI(base_url=served.url, api_key="key") as client:
            return set(await asyncio.gather(*(ask(client) for _ in range(8))))

    assert len(asyncio.run(ask_all())) == 1


def test_completions_models_and_responses_are_understood(served: Served) -> None:
    with openai.OpenAI(base_url=served.url, api_key="key") as client:
        found = client.completions.create(model="tiny", prompt=["in", "the"], max_tokens=4, echo=True)
        assert [choice.index for choice in found.choices] == [0, 1]
        assert [model.id for model in client.models.list()] == ["tiny"]
        assert client.models.retrieve("tiny").id == "tiny"
        response = client.responses.create(model="tiny", input="in the an", max_output_tokens=8)
        with client.responses.stream(model="tiny", input="in the an", max_output_tokens=8) as stream:
            deltas = [each.delta for each in stream if each.type == "response.output_text.delta"]
        assert "".join(deltas) == response.output_text


def test_refusals_are_the_packages_own_errors(served: Served) -> None:
    with openai.OpenAI(base_url=served.url, api_key="key", max_retries=0) as client:
        with pytest.raises(openai.NotFoundError, match="no model 'gpt-4o'"):
            client.chat.completions.create(model="gpt-4o", messages=HI)
        with pytest.raises(openai.BadRequestError, match="embeddings"):
            client.embeddings.create(model="tiny", input="a text")
        with pytest.raises(openai.BadRequestError, match="temperature"):
            client.chat.completions.create(model="tiny", messages=HI, temperature=-1)
    with openai.OpenAI(base_url=served.url, api_key="wrong") as client, pytest.raises(openai.AuthenticationError):
        client.models.list()


CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"name": "get_weather", "description": "Of a city.", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": WEATHER}]


@pytest.fixture(scope="module")
def calling(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server whose model calls a tool, and then answers by what it gave."""
    names = ModelNames(home_with(tmp_path_factory.mktemp("home"), tiny=tiny_model))
    folder = tmp_path_factory.mktemp("tokenizer")

    def answer(prompt: str) -> str:
        return "It is sunny." if "sunny in Rome" in prompt else f"I look.\n{CALL}"

    with serving(names, lambda name: scripted_engine(tiny_model, folder, answer), key="key") as found:
        yield found


def test_a_loop_of_calls_ends_with_an_answer(calling: Served) -> None:
    messages: list[object] = [{"role": "user", "content": "Weather in Rome?"}]
    with openai.OpenAI(base_url=calling.url, api_key="key") as client:
        for _ in range(3):
            found = client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS).choices[0]
            messages.append(found.message)
            if found.finish_reason != "tool_calls":
                break
            for call in found.message.tool_calls:
                city = json.loads(call.function.arguments)["city"]
                messages.append({"role": "tool", "tool_call_id": call.id, "content": f"sunny in {city}"})
    assert found.message.content == "It is sunny."
    assert len(messages) == 4


def test_stream_helpers_take_calls_and_parse_their_arguments(calling: Served) -> None:
    ask = [{"role": "user", "content": "Weather in Rome?"}]
    strict = [{"type": "function", "function": {**WEATHER, "strict": True}}]
    with openai.OpenAI(base_url=calling.url, api_key="key") as client:
        with client.chat.completions.stream(model="tiny", messages=ask, tools=strict) as stream:
            events = list(stream)
            final = stream.get_final_completion().choices[0]
        assert final.finish_reason == "tool_calls"
        assert final.message.content == "I look."
        (call,) = final.message.tool_calls
        assert call.function.parsed_arguments == {"city": "Rome"}
        done = [each for each in events if each.type == "tool_calls.function.arguments.done"]
        assert [(each.name, each.arguments) for each in done] == [("get_weather", '{"city": "Rome"}')]
        parsed = client.chat.completions.parse(model="tiny", messages=ask, tools=strict).choices[0]
        assert parsed.message.tool_calls[0].function.parsed_arguments == {"city": "Rome"}


def test_responses_stream_calls_and_read_their_results(calling: Served) -> None:
    flat = [{"type": "function", **WEATHER, "strict": False}]
    with openai.OpenAI(base_url=calling.url, api_key="key") as client:
        with client.responses.stream(model="tiny", input="Weather in Rome?", tools=flat) as stream:
            deltas = [each.delta for each in stream if each.type == "response.function_call_arguments.delta"]
            final = stream.get_final_response()
        message, call = final.output
        assert (message.type, call.type, call.name) == ("message", "function_call", "get_weather")
        assert "".join(deltas) == call.arguments == '{"city": "Rome"}'
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny in Rome"}
        stated = [{"role": "user", "content": "Weather?"}, message, call, result]
        assert client.responses.create(model="tiny", input=stated, tools=flat).output_text == "It is sunny."


@pytest.fixture(scope="module")
def thinking(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    def answer(prompt: str) -> str:
        return "Again." if "Yes" in prompt else "<think>\nLet me see.\n</think>\n\nYes, 4."

    names = ModelNames(home_with(tmp_path_factory.mktemp("home"), tiny=tiny_model))
    folder = tmp_path_factory.mktemp("tokenizer")
    with serving(names, lambda name: scripted_engine(tiny_model, folder, answer), key="key") as found:
        yield found


def test_reasoning_of_responses_is_read_and_sent_back(thinking: Served) -> None:
    asked = [{"role": "user", "content": "2 + 2?"}]
    with openai.OpenAI(base_url=thinking.url, api_key="key") as client:
        with client.responses.stream(model="tiny", input=asked, reasoning={"effort": "low"}) as stream:
            deltas = [each.delta for each in stream if each.type == "response.reasoning_text.delta"]
            final = stream.get_final_response()
        assert [item.type for item in final.output] == ["reasoning", "message"]
        assert final.output[0].content[0].text == "".join(deltas) == "Let me see."
        assert final.output_text == "Yes, 4."
        assert final.reasoning.effort == "low"
        assert final.usage.output_tokens_details.reasoning_tokens > 0
        whole = client.responses.create(model="tiny", input=asked)
        assert [item.type for item in whole.output] == ["reasoning", "message"]
        stated = [*asked, *whole.output, {"role": "user", "content": "Really?"}]
        assert client.responses.create(model="tiny", input=stated).output_text == "Again."
