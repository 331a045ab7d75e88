"""Ollama's API on the server: what its clients ask and get, beside what the engine and OpenAI's API say."""

import asyncio
import json
import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from threading import Event
from time import sleep
from typing import Any

import httpx2
import numpy as np
import pytest
import tiny
from embedding_models import write_folder
from scripted import THINKING_TEMPLATE, scripted_engine
from served import WAIT_S, Served, home_with, serving, table_engine
from table_decoder import TableDecoder
from until import until

from edgespec import Engine, Inventory, SamplingParams, load
from edgespec.decoding.decoder import Pass, Rows
from edgespec.export.convert import export_model
from edgespec.server import sse
from edgespec.server.errors import ApiError
from edgespec.server.messages import conversation_of
from edgespec.server.model_host import DEFAULT_S
from edgespec.server.model_names import ModelNames
from edgespec.server.ollama_answers import timestamp
from edgespec.server.ollama_pages import model_details
from edgespec.server.ollama_protocol import OllamaChat, OllamaMessage, closed, keep_alive_s

CHAT, GENERATE = "/api/chat", "/api/generate"
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z")  # clients demand the fraction
HI = [{"role": "user", "content": "in the an"}]
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}]  # fmt: skip


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Engine:
    return table_engine(tiny_model)


@pytest.fixture(scope="module")
def served(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    names = ModelNames(home_with(tmp_path_factory.mktemp("home"), tiny=tiny_model, other=tiny_model))
    with serving(names, lambda name: table_engine(tiny_model)) as found:
        yield found


def ask(served: Served, path: str, **fields: Any) -> dict[str, Any]:
    """The answer as one document, which its lines have to join to."""
    asked = {"model": "tiny", **({"messages": HI} if path == CHAT else {"prompt": "in the an"}), **fields}
    answer = served.post(path, {**asked, "stream": False})
    assert answer.status_code == 200, answer.text
    whole: dict[str, Any] = answer.json()
    streamed = served.post(path, asked)
    assert streamed.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in streamed.text.splitlines()]
    assert [each["done"] for each in lines] == [False] * (len(lines) - 1) + [True]
    for each in (whole, lines[-1]):
        assert all(type(value) is int and value > 0 for key, value in each.items() if key.endswith("_duration"))
        assert TIME.fullmatch(each["created_at"])
        parts = ("load_duration", "prompt_eval_duration", "eval_duration")
        assert each["total_duration"] >= sum(each[part] for part in parts)
    pieces = [each.get("message", each) for each in lines]
    message = whole.get("message", whole)
    content = "content" if path == CHAT else "response"
    assert "".join(each[content] for each in pieces) == message[content]
    assert "".join(each.get("thinking", "") for each in pieces) == message.get("thinking", "")
    calls = [call["function"] for each in pieces for call in each.get("tool_calls", ())]
    assert calls == [call["function"] for call in message.get("tool_calls", ())]
    for name in ("done_reason", "prompt_eval_count", "eval_count", "model"):
        assert lines[-1][name] == whole[name]
    return whole


def refusal(served: Served, path: str, status: int = 400, **fields: Any) -> str:
    asked = {"model": "tiny", **({"messages": HI} if path == CHAT else {"prompt": "in the an"}), **fields}
    answer = served.post(path, asked)
    assert answer.status_code == status, answer.text
    assert [*answer.json()] == ["error"]
    return str(answer.json()["error"])


def test_a_chat_is_the_engines_answer(served: Served, engine: Engine) -> None:
    wanted = engine.generate(HI, max_tokens=9)
    found = ask(served, CHAT, options={"num_predict": 9.0, "num_ctx": 64.0, "top_k": 1.0, "num_gpu": 1})
    assert found["message"] == {"role": "assistant", "content": wanted.text}
    assert (found["done_reason"], found["prompt_eval_count"], found["eval_count"]) == (
        "length",
        wanted.prompt_tokens,
        9,
    )
    assert found["speculation"]["drafter"] == "suffix"


class SlowTable(TableDecoder):
    def run(self, given: Pass) -> Rows:
        sleep(0.01)  # beside which all else of a request is short
        return super().run(given)


def test_durations_of_a_short_answer_are_no_more_than_the_whole(tiny_model: Path, tmp_path: Path) -> None:
    names = ModelNames(home_with(tmp_path, tiny=tiny_model))
    with serving(names, lambda name: table_engine(tiny_model, SlowTable(tiny.VOCAB, seed=3))) as slow:
        found = ask(slow, CHAT, options={"num_predict": 2})
    assert found["eval_duration"] > 10_000_000


def test_options_are_those_of_the_engine(served: Served, engine: Engine) -> None:
    options = {
        "temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "presence_penalty": 0.5,
        "frequency_penalty": 0.2, "repeat_penalty": 1.1, "seed": 9,
    }  # fmt: skip
    params = {("repetition_penalty" if name == "repeat_penalty" else name): each for name, each in options.items()}
    wanted = engine.generate(HI, sampling=SamplingParams(**params), max_tokens=20).text  # type: ignore[arg-type]
    assert ask(served, CHAT, options={**options, "num_predict": 20})["message"]["content"] == wanted
    params["repetition_penalty"] = 1.0
    without = engine.generate(HI, sampling=SamplingParams(**params), max_tokens=20).text  # type: ignore[arg-type]
    for off in ({"repeat_last_n": 0}, {"repeat_penalty": 0}):
        found = ask(served, CHAT, options={**options, **off, "num_predict": 20})
        assert found["message"]["content"] == without
    stop = wanted[4:7]
    found = ask(served, CHAT, options={**options, "num_predict": 20, "stop": [stop]})
    assert (found["message"]["content"], found["done_reason"]) == (wanted[: wanted.index(stop)], "stop")


def test_generate_takes_a_prompt_with_a_system_message_or_as_it_is(served: Served, engine: Engine) -> None:
    wanted = engine.generate("in the an", system="the", max_tokens=6)
    found = ask(served, GENERATE, system="the", options={"num_predict": 6})
    assert (found["response"], found["prompt_eval_count"]) == (wanted.text, wanted.prompt_tokens)
    raw = engine.generate("in the an", raw=True, max_tokens=30)
    found = ask(served, GENERATE, raw=True, options={"num_predict": 30}, logprobs=True, top_logprobs=2)
    assert (found["response"], found["prompt_eval_count"]) == (raw.text, raw.prompt_tokens)
    assert len(found["logprobs"]) == 30
    assert {len(each["top_logprobs"]) for each in found["logprobs"]} == {2}
    assert "context" not in found


def test_log_probabilities_are_in_the_lines_too(served: Served) -> None:
    asked = {"model": "tiny", "messages": HI, "options": {"num_predict": 8}, "logprobs": True}
    whole = served.post(CHAT, {**asked, "stream": False}).json()["logprobs"]
    lines = [json.loads(line) for line in served.post(CHAT, asked).text.splitlines()]
    assert [each for line in lines for each in line.get("logprobs", ())] == whole
    assert len(whole) == 8


def test_a_format_is_json_or_a_schema(served: Served) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}
    assert ask(served, CHAT, format=schema, options={"num_predict": 20})["message"]["content"] == '{"a":1}'
    assert json.loads(ask(served, GENERATE, format="json", options={"num_predict": 12})["response"]) is not None
    assert ask(served, CHAT, format="", options={"num_predict": 2})["done_reason"] == "length"


def test_objects_of_a_schema_have_no_names_but_those_that_it_gives() -> None:
    inner = {"type": "object", "properties": {"b": {}}}
    found = closed({"properties": {"a": inner, "c": {"items": inner}}, "$defs": {"d": inner}, "enum": [inner]})
    shut = {**inner, "additionalProperties": False}
    assert found == {
        "properties": {"a": shut, "c": {"items": shut}}, "$defs": {"d": shut}, "enum": [inner],
        "additionalProperties": False,
    }  # fmt: skip
    for stated in ({**inner, "additionalProperties": True}, {**inner, "allOf": [inner]}, {"type": "object"}):
        assert closed(stated) == stated


@pytest.fixture(scope="module")
def thinking(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    def answer(prompt: str) -> str:
        return "<think>\n\n</think>\n\nYes." if "off" in prompt else "<think>\nI see.\n</think>\n\nYes, 4."

    names = ModelNames(home_with(tmp_path_factory.mktemp("home"), tiny=tiny_model))
    folder = tmp_path_factory.mktemp("tokenizer")
    with serving(names, lambda name: scripted_engine(tiny_model, folder, answer, THINKING_TEMPLATE)) as found:
        yield found


def test_thinking_is_apart_from_the_answer(thinking: Served) -> None:
    for think in ({}, {"think": True}, {"think": "high"}, {"think": "max"}):
        found = ask(thinking, CHAT, **think)
        assert found["message"] == {"role": "assistant", "content": "Yes, 4.", "thinking": "I see."}
        assert ask(thinking, GENERATE, **think)["thinking"] == "I see."
    found = ask(thinking, CHAT, think=False, messages=[{"role": "user", "content": "off"}])
    assert found["message"] == {"role": "assistant", "content": "Yes."}
    assert "wanted true, false, low, medium, high" in refusal(thinking, CHAT, think="much")


@pytest.fixture(scope="module")
def calling(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    def answer(prompt: str) -> str:
        call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
        if "half" in prompt:
            return call.replace("Rome", r"Rome \ud83d")
        return "It is sunny." if "sunny" in prompt else f"I look.\n{call}\n{call}"

    names = ModelNames(home_with(tmp_path_factory.mktemp("home"), tiny=tiny_model))
    folder = tmp_path_factory.mktemp("tokenizer")
    with serving(names, lambda name: scripted_engine(tiny_model, folder, answer)) as found:
        yield found


def test_calls_of_tools_are_objects_and_their_results_are_read(calling: Served) -> None:
    first = ask(calling, CHAT, tools=TOOLS)
    assert (first["message"]["content"].strip(), first["done_reason"]) == ("I look.", "stop")
    functions = [call["function"] for call in first["message"]["tool_calls"]]
    assert functions == [{"index": i, "name": "get_weather", "arguments": {"city": "Rome"}} for i in (0, 1)]
    for call in first["message"]["tool_calls"]:  # clients that do not keep ids
        del call["id"]
    result = {"role": "tool", "tool_name": "get_weather", "content": "sunny"}
    second = ask(calling, CHAT, tools=TOOLS, messages=[*HI, first["message"], result])
    assert second["message"] == {"role": "assistant", "content": "It is sunny."}


def test_a_call_with_half_of_a_surrogate_pair_is_answered(calling: Served) -> None:
    found = ask(calling, CHAT, tools=TOOLS, messages=[{"role": "user", "content": "half"}])
    assert [call["function"]["arguments"] for call in found["message"]["tool_calls"]] == [{"city": "Rome ?"}]


RESULT = {"role": "tool", "tool_name": "get_weather", "content": "sunny"}
SAID = {"role": "assistant", "content": "It is sunny."}
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "get_weather", "arguments": {}}}]}


@pytest.mark.parametrize(
    ("messages", "read"),
    [
        ([RESULT, RESULT, SAID, *HI], ["<tool_response>\nsunny\n</tool_response>"] * 2),
        ([*HI, RESULT], ["in the an", "<tool_response>\nsunny\n</tool_response>"]),
        ([*HI, CALL, {**RESULT, "tool_call_id": "call_1"}], ["sunny"]),
    ],
)
def test_a_result_whose_call_the_client_dropped_is_read(
    calling: Served, messages: list[dict[str, Any]], read: list[str]
) -> None:
    found = ask(calling, CHAT, tools=TOOLS, messages=[{"role": "system", "content": "re"}, *messages])
    assert found["message"] == SAID
    turns, _ = conversation_of(
        OllamaChat(messages=[OllamaMessage(**each) for each in messages]).as_openai().messages
    )
    assert "\n".join(read) in [turn.content for turn in turns]


@pytest.mark.parametrize(
    ("path", "fields", "said"),
    [
        (CHAT, {"messages": [{**HI[0], "images": ["aGk="]}]}, "messages[0] has images; models here"),
        (GENERATE, {"images": ["aGk="]}, "images is given, and models here read text alone"),
        (GENERATE, {"suffix": "x"}, "suffix is given, and models here only write at the end"),
        (GENERATE, {"template": "{{ .Prompt }}"}, "template is given, and a model here has its own"),
        (GENERATE, {"context": [1]}, "context is given, which is not kept here; send the conversation"),
        (GENERATE, {"raw": True, "system": "x"}, "system is given with raw"),
        (CHAT, {"think": True}, "think is given, but tiny does not reason"),
        (CHAT, {"format": "xml"}, "format is 'xml'; wanted json, or a JSON schema"),
        (CHAT, {"format": {"type": "nope"}}, "the JSON schema of format cannot be used"),
        (CHAT, {"options": {"mirostat": 2}}, "options.mirostat is 2, which models here do not have"),
        (CHAT, {"options": {"temperature": -1}}, "options.temperature is -1"),
        (CHAT, {"options": {"repeat_penalty": -1}}, "options.repeat_penalty is -1.0; wanted a number from 0.01"),
        (CHAT, {"options": {"num_predict": -3}}, "options.num_predict is -3; wanted 0 or more, or -1"),
        (CHAT, {"options": {"seed": "x"}}, "options.seed is 'x': wanted a whole number"),
        (CHAT, {"keep_alive": "soon"}, "keep_alive is 'soon'; wanted seconds, or a time such as 5m"),
        (CHAT, {"messages": [{"role": "user", "content": "the " * 3000}]}, "tokens"),
        ("/api/embed", {"input": "x"}, "embeddings need one that was trained for them"),
        ("/api/embed", {}, "input is missing; give a text, or an empty one to load the model"),
        ("/api/embed", {"input": ""}, "embeddings need one that was trained for them"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_words(
    served: Served, path: str, fields: dict[str, Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "edgespec.server")
    assert said in refusal(served, path, **fields)
    until(lambda: f"POST {path} 400" in caplog.text)
    code = (
        "context_length_exceeded" if said == "tokens" else "unsuited_model" if "embeddings" in said else "invalid"
    )
    assert code in caplog.text, "the log has the kind of error, also of what would be streamed"


def test_unknown_models_addresses_and_changes_are_refused(served: Served) -> None:
    for path in (CHAT, GENERATE, "/api/show", "/api/pull"):
        told = refusal(served, path, 404, model="tinny")
        assert "no model 'tinny' is prepared here; did you mean tiny? GET /api/tags lists" in told
    told = refusal(served, "/api/nope", 404)
    assert "there are /api/version" in told
    assert "/api/delete" in told
    assert "{" not in told
    assert served.client.get("/api/chat").json()["error"] == "/api/chat takes POST, and GET was sent"
    for path in ("/api/create", "/api/copy", "/api/push", "/api/blobs/sha256:0"):
        assert "edgespec models" in refusal(served, path, 403)
    assert served.client.request("DELETE", "/api/delete", json={"model": "tiny"}).status_code == 403
    assert served.post("/api/pull", {"model": "tiny:latest", "stream": False}).json() == {"status": "success"}


def test_no_line_break_of_unicode_stands_in_a_line() -> None:
    document = {"content": "a\x85b\u2028c\u2029d\x0be\x1cf\u0301\n"}
    (line,) = sse.line(document).decode().splitlines()
    assert json.loads(line) == document
    assert "\u0301" in line


def test_an_error_within_a_stream_is_a_line(tiny_model: Path, tmp_path: Path) -> None:
    class Failing:
        num_left = 6

        def __call__(self, *given: Any) -> Any:
            self.num_left -= 1
            if self.num_left < 0:
                raise RuntimeError("a secret")
            return real(*given)

    engine = table_engine(tiny_model)
    real, failing = engine.target.logits, Failing()
    engine.target.logits = failing  # type: ignore[method-assign]
    with serving(ModelNames(home_with(tmp_path, tiny=tiny_model)), lambda name: engine) as served:
        lines = served.post(CHAT, {"model": "tiny", "messages": HI}).text.splitlines()
    assert "error" not in lines[0]
    assert [*json.loads(lines[-1])] == ["error"]
    assert "a secret" not in lines[-1]


def test_models_are_listed_and_described(served: Served) -> None:
    models = served.client.get("/api/tags").json()["models"]
    assert [each["name"] for each in models] == ["other:latest", "tiny:latest"]
    assert all(TIME.fullmatch(each["modified_at"]) for each in models)
    assert all(len(each["digest"]) == 64 and each["size"] > 0 for each in models)
    assert models[0]["details"]["family"] == "llama"
    named = {"SmolLM2-135M-Instruct.Q4_1.gguf": ("135M", "Q4_1"), "qwen2.5-0.5b-q4_k_m.gguf": ("0.5B", "Q4_K_M")}
    (model, _) = served.services.names.models()
    for name, wanted in {**named, "Mixtral-8x7B.gguf": ("", "source"), "tiny.gguf": ("", "source")}.items():
        manifest = replace(model.manifest, source=replace(model.manifest.source, name=name), precision="source")
        details = model_details(replace(model, manifest=manifest))
        assert (details["parameter_size"], details["quantization_level"]) == wanted
    found = served.post("/api/show", {"model": "tiny:latest"}).json()
    assert found == served.post("/api/show", {"name": "tiny"}).json()
    assert found["capabilities"] == ["completion"]
    assert "im_start" in found["template"]
    assert found["model_info"]["llama.context_length"] == 700


def test_the_version_is_one_of_ollama_that_has_responses(served: Served) -> None:
    """Codex asks for it before it asks /v1/responses."""
    assert [int(part) for part in served.client.get("/api/version").json()["version"].split(".")] >= [0, 13, 4]


def test_keep_alive_says_how_long_a_model_stays_loaded(served: Served) -> None:
    def load_with(**fields: Any) -> Any:
        return served.post(GENERATE, {"model": "tiny", **fields}).json()

    def loaded() -> list[dict[str, Any]]:
        models: list[dict[str, Any]] = served.client.get("/api/ps").json()["models"]
        return models

    assert load_with(keep_alive="10m")["done_reason"] == "load"
    (entry,) = loaded()
    left = datetime.fromisoformat(entry["expires_at"]) - datetime.now().astimezone()
    assert 550 < left.total_seconds() <= 600
    assert (entry["name"], entry["size_vram"], entry["device"]) == ("tiny:latest", 0, "cpu")
    assert entry["size"] == Inventory(served.services.names.home).describe("tiny").memory_bytes
    assert entry["context_length"] == served.services.host.hosted["tiny"].engine.context_length
    load_with(keep_alive=-1)
    never = loaded()[0]["expires_at"]
    assert never.startswith("9999")
    assert all(map(TIME.fullmatch, (never, entry["expires_at"], timestamp(0.0))))
    ask(served, CHAT, keep_alive=-1, options={"num_predict": 1})
    assert load_with(keep_alive=0)["done_reason"] == "unload"
    until(lambda: not loaded())
    assert served.post(CHAT, {"model": "tiny", "keep_alive": 0}).json()["message"]["content"] == ""
    assert loaded() == [], "a model that is not loaded is not loaded to be closed"


def test_a_model_that_is_being_loaded_is_closed_once_it_is(tiny_model: Path, tmp_path: Path) -> None:
    def open_engine(name: str) -> Engine:
        assert may_load.wait(WAIT_S)
        return table_engine(tiny_model)

    def send(**fields: Any) -> Future[httpx2.Response]:
        return pool.submit(served.post, GENERATE, {"model": "tiny", **fields})

    may_load, names = Event(), ModelNames(home_with(tmp_path, tiny=tiny_model))
    with serving(names, open_engine) as served, ThreadPoolExecutor(2) as pool:
        host = served.services.host
        loads = send()
        until(lambda: "tiny" in host)
        closes = send(keep_alive=0)
        until(lambda: closes.done() or len(host._models["tiny"].leases) == 2)
        has_waited = not closes.done()
        may_load.set()
        assert has_waited
        assert [each.result().json()["done_reason"] for each in (loads, closes)] == ["load", "unload"]
        until(lambda: not host.hosted)


@pytest.mark.parametrize(
    ("stated", "seconds"),
    [
        (None, DEFAULT_S), (0, 0.0), ("0", 0.0), (300, 300.0), ("5m", 300.0), ("1h30m", 5400.0), ("1.5s", 1.5),
        ("250ms", 0.25), (-1, None), ("-1", None), ("-5m", None), (1e300, 1e9),
    ],
)  # fmt: skip
def test_times_are_read_as_ollama_writes_them(stated: Any, seconds: float | None) -> None:
    assert keep_alive_s(stated) == seconds


@pytest.mark.parametrize("stated", ["", "m", "5 m", "5mm", "--1", "nan", "inf", "5d"])
def test_what_is_no_time_is_refused(stated: str) -> None:
    with pytest.raises(ApiError, match="keep_alive"):
        keep_alive_s(stated)


def test_a_context_above_that_of_the_model_is_noted(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "edgespec.server")
    ask(served, CHAT, options={"num_ctx": 1 << 20, "num_predict": 1})
    assert "num_ctx 1048576 is above the context of" in caplog.text


def test_the_root_is_what_clients_of_ollama_look_for(served: Served) -> None:
    assert served.client.get("/").text == "Ollama is running"
    assert served.client.head("/").status_code == 200
    page = served.client.get("/", headers={"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"})
    assert page.headers["content-type"].startswith("text/html")


def test_what_curl_and_fetch_send_without_a_content_type_is_read(served: Served) -> None:
    body = json.dumps({"model": "tiny", "prompt": "in", "stream": False, "options": {"num_predict": 2}})
    for kind in ("application/x-www-form-urlencoded", "text/plain;charset=UTF-8", None):
        headers = {"Content-Type": kind} if kind else {}
        assert served.client.post(GENERATE, content=body, headers=headers).json()["eval_count"] == 2
        assert served.client.post("/v1/completions", content=body, headers=headers).status_code == 415
        page = {**headers, "Origin": "http://evil.example"}
        refused = served.client.post(GENERATE, content=body, headers=page)
        assert (refused.status_code, [*refused.json()]) == (403, ["error"])


def test_vectors_are_those_of_the_other_api_and_long_texts_are_cut(tmp_path: Path) -> None:
    write_folder(tmp_path / "source", tiny.random_weights(5))
    export_model(tmp_path / "source", tmp_path / "vectors", precision="fp32")
    home = home_with(tmp_path / "home", vectors=tmp_path / "vectors")
    with serving(ModelNames(home), lambda name: load(home.models / name, home=tmp_path / "home")) as served:
        wanted = served.post("/v1/embeddings", {"model": "vectors", "input": ["the an", "in"]}).json()
        found = served.post("/api/embed", {"model": "vectors", "input": ["the an", "in"]}).json()
        assert np.allclose(found["embeddings"], [each["embedding"] for each in wanted["data"]], atol=1e-6)
        assert found["prompt_eval_count"] == wanted["usage"]["prompt_tokens"]
        older = served.post("/api/embeddings", {"model": "vectors", "prompt": "in"}).json()
        assert np.allclose(older["embedding"], found["embeddings"][1], atol=1e-6)
        for nothing in ("", []):
            assert served.post("/api/embed", {"model": "vectors", "input": nothing}).json()["embeddings"] == []
        assert served.post("/api/embeddings", {"model": "vectors", "prompt": ""}).json() == {"embedding": []}
        long = {"model": "vectors", "input": "the " * 5000, "dimensions": 3}
        cut = served.post("/api/embed", long).json()
        context = served.services.host.hosted["vectors"].engine.embedder.context_length
        assert (cut["prompt_eval_count"], len(cut["embeddings"][0])) == (context, 3)
        assert "tokens" in refusal(served, "/api/embed", **{**long, "truncate": False})


@pytest.mark.clients
def test_the_client_of_ollama(calling: Served, served: Served) -> None:
    ollama = pytest.importorskip("ollama", reason="needs the package ollama: make test-serve")
    with ollama.Client(host=calling.url.removesuffix("/v1")) as client:
        first = client.chat("tiny", messages=HI, tools=TOOLS)
        assert first.message.tool_calls[0].function.arguments == {"city": "Rome"}
        second = [*HI, first.message, {"role": "tool", "tool_name": "get_weather", "content": "sunny"}]
        assert client.chat("tiny:latest", messages=second, tools=TOOLS).message.content == "It is sunny."
    host, nine = served.url.removesuffix("/v1"), {"num_predict": 9}
    with ollama.Client(host=host) as client:
        wanted = client.generate("tiny", "in the an", options=nine)
        assert wanted.eval_count == 9
        parts = [each.response for each in client.generate("tiny", "in the an", stream=True, options=nine)]
        assert "".join(parts) == wanted.response
        assert [each.model for each in client.ps().models] == ["tiny:latest"]
        assert {each.model for each in client.list().models} == {"other:latest", "tiny:latest"}
        assert client.show("tiny").modelinfo["general.architecture"] == "llama"
        with pytest.raises(ollama.ResponseError, match="no model 'nope'") as caught:
            client.chat("nope", messages=HI)
        assert caught.value.status_code == 404

    async def ask() -> str:
        async with ollama.AsyncClient(host=host) as client:
            stream = await client.generate("tiny", "in the an", stream=True, options=nine)
            return "".join([each.response async for each in stream])

    assert asyncio.run(ask()) == wanted.response


@pytest.mark.clients
@pytest.mark.filterwarnings("ignore")  # it leaves its connections open
def test_langchain_by_ollama(served: Served) -> None:
    langchain = pytest.importorskip("langchain_ollama", reason="needs langchain-ollama: make test-serve")
    named = {"model": "tiny", "base_url": served.url.removesuffix("/v1"), "num_predict": 9, "temperature": 0}
    model = langchain.ChatOllama(**named, validate_model_on_init=True)
    whole = model.invoke("in the an")
    assert (whole.usage_metadata["output_tokens"], whole.response_metadata["done_reason"]) == (9, "length")
    assert "".join(each.content for each in model.stream("in the an")) == whole.content
    schema = {"title": "x", "type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}
    longer = langchain.ChatOllama(**{**named, "num_predict": 30})
    assert longer.with_structured_output(schema, method="json_schema").invoke("in") == {"a": 1}
    for each in (model, longer):
        each._client.close()
        asyncio.run(each._async_client.close())
