"""What clients ask and get, on a table model behind a real socket."""

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from operator import ge
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import numpy as np
import pytest
from served import Served, home_with, serving, table_engine
from until import until

from edgespec import Drafting, Engine, SamplingParams, mean_nll
from edgespec.server.answer_parts import TextPlaces, TokenWords
from edgespec.server.answers import Services
from edgespec.server.app import make_app
from edgespec.server.limits import Limits
from edgespec.server.model_names import ModelNames

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
HI = [{"role": "user", "content": "in the an"}]


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Engine:
    return table_engine(tiny_model)


@pytest.fixture(scope="module")
def served(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    names = ModelNames(home_with(tmp_path_factory.mktemp("home"), tiny=tiny_model, other=tiny_model))
    with serving(names, lambda name: table_engine(tiny_model), max_models=2) as found:
        yield found


def asked(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": HI, "max_tokens": 20, **fields}


def text_of(events: list[Any], index: int = 0) -> str:
    choices = [choice for each in events[:-1] for choice in each["choices"] if choice["index"] == index]
    return "".join(each["delta"].get("content", "") if "delta" in each else each["text"] for each in choices)


def test_an_answer_is_the_engines_own(served: Served, engine: Engine) -> None:
    wanted = engine.generate(HI, max_tokens=20)
    found = served.chat(max_tokens=20)
    assert found["object"] == "chat.completion"
    assert found["model"] == "tiny"
    (choice,) = found["choices"]
    assert choice["message"] == {"role": "assistant", "content": wanted.text, "refusal": None}
    assert choice["finish_reason"] == "length"
    assert found["usage"]["prompt_tokens"] == wanted.prompt_tokens
    assert found["usage"]["completion_tokens"] == len(wanted.token_ids)
    assert found["usage"]["total_tokens"] == wanted.prompt_tokens + len(wanted.token_ids)


def test_the_application_is_put_together_by_starlette_before_0_42_too() -> None:
    """Which gives each middleware the next one by its name."""
    app = make_app(create_autospec(Services), "127.0.0.1", None)
    made = [make(*given, app=app, **named) for make, given, named in app.user_middleware]
    assert made
    assert all(callable(each) for each in made)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_stream_joins_to_the_whole_answer_and_ends_with_usage(served: Served, path: str) -> None:
    fields = {"temperature": 0.9, "seed": 5, "n": 3, "max_tokens": 15}
    fields |= {"messages": HI} if path == CHAT else {"prompt": "in the an"}
    whole = served.post(path, {"model": "tiny", **fields}).json()
    events = served.events(path, {"model": "tiny", **fields, "stream_options": {"include_usage": True}})
    texts = [choice["message"]["content"] if path == CHAT else choice["text"] for choice in whole["choices"]]
    assert [text_of(events, i) for i in range(3)] == texts
    assert len(set(texts)) == 3
    assert events[-1] == "[DONE]"
    assert events[-2]["choices"] == []
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [events[-2]["usage"][name] for name in counts] == [whole["usage"][name] for name in counts]
    reasons = [choice["finish_reason"] for each in events[:-2] for choice in each["choices"]]
    assert [reason for reason in reasons if reason] == ["length"] * 3
    assert len({each["id"] for each in events[:-1]}) == 1


def test_usage_is_in_a_stream_only_if_it_is_asked_for(served: Served) -> None:
    events = served.events(CHAT, asked())
    assert all(each["choices"] and "usage" not in each for each in events[:-1])


def test_a_seed_gives_a_text_again_and_none_gives_others(served: Served) -> None:
    def text(**fields: Any) -> str:
        return str(served.chat(temperature=1.5, max_tokens=20, **fields)["choices"][0]["message"]["content"])

    assert text(seed=-(2**53) + 1) == text(seed=-(2**53) + 1) != text(seed=4)
    assert text() != text()
    assert text(seed=-1) != text(seed=-1)


def test_sampling_fields_are_those_of_the_engine(served: Served, engine: Engine) -> None:
    bias = {str(token): -100 for token in engine.generate(HI, max_tokens=20).token_ids[:2]}
    sampling = SamplingParams(
        temperature=0.7, top_p=0.9, top_k=40, min_p=0.01, presence_penalty=0.5, frequency_penalty=0.2,
        repetition_penalty=1.1, seed=9, logit_bias={int(token): value for token, value in bias.items()},
    )  # fmt: skip
    stated = {name: getattr(sampling, name) for name in sampling.__slots__} | {"logit_bias": bias}
    found = served.chat(max_tokens=20, **stated)
    wanted = engine.generate(HI, sampling=sampling, max_tokens=20)
    assert found["choices"][0]["message"]["content"] == wanted.text


def test_stop_strings_end_an_answer(served: Served, engine: Engine) -> None:
    whole = engine.generate(HI, max_tokens=30).text
    stop = whole[8:11]
    found = served.chat(max_tokens=30, stop=[stop, "never there"])["choices"][0]
    assert (found["message"]["content"], found["finish_reason"]) == (whole[: whole.index(stop)], "stop")
    fields = {"model": "tiny", "input": "in the an", "max_output_tokens": 30, "stop": stop}
    response = served.post(RESPONSES, fields).json()
    assert response["status"] == "completed"
    assert response["output"][0]["content"][0]["text"] == whole[: whole.index(stop)]


def test_a_last_message_of_the_assistant_is_continued(served: Served, engine: Engine) -> None:
    messages = [*HI, {"role": "assistant", "content": "the in"}]
    wanted = engine.generate(HI, prefill="the in", max_tokens=12)
    assert served.chat(messages=messages)["choices"][0]["message"]["content"] == wanted.text


def test_messages_may_have_parts_and_a_developer(served: Served) -> None:
    parts = [{"type": "text", "text": "in "}, {"type": "text", "text": "the an"}]
    first = [{"role": "developer", "content": "re"}, {"role": "user", "content": parts, "name": None}]
    second = [{"role": "system", "content": "re"}, {"role": "user", "content": "in the an"}]
    answers = [served.chat(messages=each)["choices"][0]["message"] for each in (first, second)]
    assert answers[0] == answers[1]


def test_fields_that_are_unknown_or_mean_nothing_here_change_nothing(served: Served) -> None:
    more = {
        "user": "u", "store": True, "metadata": {"a": "b"}, "parallel_tool_calls": True, "modalities": ["text"],
        "audio": {"voice": "x"}, "tools": [], "tool_choice": "auto", "service_tier": "auto",
        "response_format": {"type": "text"}, "verbosity": "low", "no_such_field": [1, {"deep": None}],
    }  # fmt: skip
    assert served.chat(**more)["choices"] == served.chat()["choices"]


def test_chat_templates_of_clients_are_not_used(served: Served) -> None:
    """S6: no field replaces the template, or what edgespec gives to it."""
    more = {"chat_template": "{{ 1/0 }}", "chat_template_kwargs": {"tokenize": True}}
    assert served.chat(**more)["choices"] == served.chat()["choices"]
    for name in ("messages", "tools", "template", "bos_token"):
        refused = served.post(CHAT, asked(chat_template_kwargs={name: []}))
        assert (refused.status_code, f"'{name}'" in refused.text) == (400, True)


def test_logprobs_of_a_chat_are_those_of_the_engine(served: Served, engine: Engine) -> None:
    wanted = engine.generate(HI, max_tokens=6, logprobs=2)
    fields = {"logprobs": True, "top_logprobs": 2, "max_tokens": 6}
    found = served.chat(**fields)["choices"][0]["logprobs"]["content"]
    assert [each["logprob"] for each in found] == [each.logprob for each in wanted.logprobs]
    assert [len(each["top_logprobs"]) for each in found] == [2] * 6
    spelled = b"".join(bytes(each["bytes"]) for each in found)
    assert spelled.decode("utf-8", "replace") == wanted.text
    events = served.events(CHAT, asked(**fields))
    parts = [choice["logprobs"] for each in events[:-1] for choice in each["choices"] if choice["logprobs"]]
    assert [entry for part in parts for entry in part["content"]] == found


def test_logprobs_of_a_completion_have_their_places_in_the_text(served: Served) -> None:
    fields = {"model": "tiny", "prompt": "in the", "max_tokens": 8, "logprobs": 3, "logit_bias": {}}
    choice = served.post(COMPLETIONS, fields).json()["choices"][0]
    found = choice["logprobs"]
    assert len(found["tokens"]) == len(found["token_logprobs"]) == len(found["text_offset"]) == 8
    assert found["text_offset"][0] == 0
    events = served.events(COMPLETIONS, fields)
    parts = [each["choices"][0]["logprobs"] for each in events[:-1] if each["choices"][0]["logprobs"]]
    assert [token for part in parts for token in part["tokens"]] == found["tokens"]
    assert [offset for part in parts for offset in part["text_offset"]] == found["text_offset"]


def test_places_of_tokens_count_characters_and_parts_of_them_have_names(served: Served) -> None:
    wanted = "日本😀é"
    fields = {"model": "tiny", "prompt": "in", "max_tokens": 40, "logprobs": 5, "temperature": 0}
    fields |= {"response_format": {"type": "regex", "regex": f"{wanted}the"}}
    choice = served.post(COMPLETIONS, fields).json()["choices"][0]
    found = choice["logprobs"]
    assert choice["text"] == wanted + "the"
    spelled = b""
    for name, place in zip(found["tokens"], found["text_offset"], strict=True):
        assert place == len(spelled.decode("utf-8", "ignore"))
        spelled += bytes.fromhex(name[6:].replace("\\x", "")) if name.startswith("bytes:") else name.encode()
    assert spelled.decode() == choice["text"]
    assert {len(each) for each in found["top_logprobs"]} == {5}
    assert any(name.startswith("bytes:\\x") for name in found["tokens"])
    events = served.events(COMPLETIONS, fields)
    parts = [each["choices"][0]["logprobs"] for each in events[:-1] if each["choices"][0]["logprobs"]]
    assert [place for part in parts for place in part["text_offset"]] == found["text_offset"]


@pytest.mark.parametrize(
    "more",
    [
        {"stop": ""}, {"stop": [""]}, {"repeat_penalty": None}, {"stop_token_ids": [2]}, {"ignore_eos": False},
        {"min_tokens": 0}, {"max_completion_tokens": 16},
    ],
)  # fmt: skip
def test_fields_that_say_nothing_change_nothing(served: Served, more: dict[str, Any]) -> None:
    assert served.chat(**{"max_tokens": 16, **more})["choices"] == served.chat(max_tokens=16)["choices"]


def test_fields_of_other_servers_mean_what_they_mean_there(served: Served) -> None:
    said = {"max_tokens": 30, "repetition_penalty": 1.9}
    other = {"max_tokens": 30, "repeat_penalty": 1.9}
    assert served.chat("re re re", **other)["choices"] == served.chat("re re re", **said)["choices"]
    assert served.post(CHAT, asked(**said, repeat_penalty=1.2)).status_code == 400
    assert served.chat(max_tokens=-1)["choices"] == served.chat(max_tokens=None)["choices"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
def test_no_token_is_an_answer_too(served: Served, path: str) -> None:
    name, prompt = {CHAT: ("max_completion_tokens", "messages"), COMPLETIONS: ("max_tokens", "prompt")}.get(
        path, ("max_output_tokens", "input")
    )
    fields = {"model": "tiny", prompt: HI if path == CHAT else "in the", name: 0}
    found = served.post(path, fields).json()
    usage = found["usage"]
    assert usage.get("completion_tokens", usage.get("output_tokens")) == 0
    assert usage["total_tokens"] == usage.get("prompt_tokens", usage.get("input_tokens")) > 0
    if path == RESPONSES:
        assert (found["status"], found["incomplete_details"]["reason"]) == ("incomplete", "max_output_tokens")
        return
    assert found["choices"][0]["finish_reason"] == "length"
    assert not found["choices"][0].get("text", found["choices"][0].get("message", {}).get("content"))
    last = served.events(path, {**fields, "stream": True})[-2]["choices"][0]
    assert last["finish_reason"] == "length"


@pytest.mark.parametrize("max_tokens", [0, 4])
@pytest.mark.parametrize("as_ids", [False, True])
def test_a_prompt_is_scored(served: Served, engine: Engine, max_tokens: int, as_ids: bool) -> None:
    text = "in the re, so 日 the"
    tokens = engine.encode(text, raw=True)
    prompt: Any = [*tokens] if as_ids else text
    fields = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "echo": True, "logprobs": 2}
    whole = served.post(COMPLETIONS, {**fields, "temperature": 0}).json()
    choice, num = whole["choices"][0], len(tokens)
    found = choice["logprobs"]
    assert choice["text"].startswith(text)
    assert {len(each) for each in found.values()} == {num + max_tokens}
    assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
    assert np.mean(found["token_logprobs"][1:num]) == pytest.approx(
        -mean_nll(engine.target, np.array(tokens, np.int32))
    )
    likeliest = [max(each.values()) for each in found["top_logprobs"][1:]]
    assert all(map(ge, likeliest, found["token_logprobs"][1:]))
    ends = [*found["text_offset"][1:], len(choice["text"])]
    spelled = [choice["text"][at:end] for at, end in zip(found["text_offset"], ends, strict=True)]
    assert all(name in (text, f"bytes:{name[6:]}") for name, text in zip(found["tokens"], spelled, strict=True))
    assert whole["usage"]["prompt_tokens"] == num
    if max_tokens:  # what it says is what it says unscored
        plain = served.post(COMPLETIONS, {**fields, "temperature": 0, "echo": False}).json()["choices"][0]
        assert choice["text"] == text + plain["text"]
        assert found["token_logprobs"][num:] == plain["logprobs"]["token_logprobs"]
    events = served.events(COMPLETIONS, {**fields, "temperature": 0, "stream": True})
    choices = [each["choices"][0] for each in events[:-1]]
    assert "".join(each["text"] for each in choices) == choice["text"]
    for name, values in found.items():
        assert [one for each in choices if each["logprobs"] for one in each["logprobs"][name]] == values


def test_places_in_a_prompt_are_those_of_its_own_text() -> None:
    words = TokenWords({1: b" the", 2: b" cat"}, {0: "<s>", 3: "<e>"}.get)
    places = TextPlaces(words, echoed="the cat<e> cat")
    assert [places.push(token) for token in (0, 1, 2, 3, 2)] == [0, 0, 3, 7, 10]
    places.begin_answer()
    assert [places.push(token) for token in (2, 3, 1)] == [14, 18, 18]


def test_an_empty_prompt_begins_a_text(served: Served, engine: Engine) -> None:
    begin = engine.manifest.bos_token_id
    assert begin is not None
    wanted = engine.generate([begin], max_tokens=8).text
    for prompt in ("", [], [""]):
        found = served.post(COMPLETIONS, {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0})
        assert (found.json()["choices"][0]["text"], found.json()["usage"]["prompt_tokens"]) == (wanted, 1)
    assert served.post("/v1/embeddings", {"model": "tiny", "input": ""}).status_code == 400


def test_tokens_of_a_stop_string_have_no_logprobs(served: Served) -> None:
    expression = {"response_format": {"type": "regex", "regex": "in the re, so"}, "max_tokens": 40, "logprobs": 1}
    fields = {"model": "tiny", "prompt": "in", **expression, "stop": "e, s"}
    choice = served.post(COMPLETIONS, fields).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("in the r", "stop")
    assert "".join(choice["logprobs"]["tokens"]).startswith("in the r")
    assert max(choice["logprobs"]["text_offset"]) < len("in the r")
    events = served.events(COMPLETIONS, fields)
    parts = [each["choices"][0]["logprobs"] for each in events[:-1] if each["choices"][0]["logprobs"]]
    assert [token for part in parts for token in part["tokens"]] == choice["logprobs"]["tokens"]
    other = served.post(COMPLETIONS, {**fields, "stop": "e, x"}).json()["choices"][0]
    assert other["logprobs"] == served.post(COMPLETIONS, {**fields, "stop": None}).json()["choices"][0]["logprobs"]


def test_a_completion_continues_texts_and_tokens_alike(served: Served, engine: Engine) -> None:
    ids = list(engine.tokenize("in the"))
    wanted = engine.generate("in the", raw=True, max_tokens=16).text
    prompts: list[Any] = ["in the", ids, ["in the", "in the"], [ids, ids]]
    for prompt in prompts:
        found = served.post(COMPLETIONS, {"model": "tiny", "prompt": prompt}).json()
        assert {each["text"] for each in found["choices"]} == {wanted}
        assert found["usage"]["prompt_tokens"] == len(ids) * len(found["choices"])
    found = served.post(COMPLETIONS, {"model": "tiny", "prompt": ids, "echo": True, "n": 2}).json()
    assert [each["text"] for each in found["choices"]] == ["in the" + wanted] * 2
    assert found["usage"]["prompt_tokens"] == len(ids)


def test_an_answer_says_what_drafting_did(served: Served) -> None:
    found = served.chat("re re re re re re re re re", max_tokens=40, speculation={"length": 3})
    speculation = found["speculation"]
    assert speculation["drafter"] == "suffix"
    assert speculation["draft_length"] == "3"
    assert speculation["drafted_tokens"] >= speculation["accepted_tokens"]
    assert speculation["by_drafter"]["suffix"]["drafted"] == speculation["drafted_tokens"] > 0
    assert speculation["reason_off"] is None
    assert speculation["device"] == "cpu"
    assert found["usage"]["speculation"].items() < speculation.items()


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
def test_usage_holds_counts_under_names_that_are_always_there(served: Served, path: str) -> None:
    """Clients add the usage of several answers up, whether anything was drafted or not."""

    def names_of_counts(value: Any) -> set[str]:
        if not isinstance(value, dict):
            assert type(value) is int
            return {""}
        return {f"{name}.{inner}" for name, each in value.items() for inner in names_of_counts(each)}

    text = "re re re re re re re re re"
    field = {CHAT: {"messages": [{"role": "user", "content": text}]}, COMPLETIONS: {"prompt": text}}
    fields = {"model": "tiny", "temperature": 0, "speculation": {"length": 3}, **field.get(path, {"input": text})}
    fields["max_output_tokens" if path == RESPONSES else "max_tokens"] = 40
    drafted = served.post(path, fields).json()
    plain = served.post(path, {**fields, "speculation": {"off": True}}).json()
    streamed = served.events(path, {**fields, "stream_options": {"include_usage": True}})
    last = streamed[-1]["response"] if path == RESPONSES else streamed[-2]
    assert drafted["speculation"]["by_drafter"]
    assert not plain["speculation"]["by_drafter"]
    for each in (plain, last):
        assert names_of_counts(each["usage"]) == names_of_counts(drafted["usage"])
        assert each["speculation"].keys() == drafted["speculation"].keys()


@pytest.mark.parametrize("field", [{"off": True}, {"drafter": "none"}], ids=["off", "none"])
def test_a_request_can_decode_plainly_and_hears_why(served: Served, field: dict[str, Any]) -> None:
    found = served.chat(max_tokens=20, speculation=field)
    speculation = found["speculation"]
    assert (speculation["drafter"], speculation["drafted_tokens"]) == ("none", 0)
    assert speculation["reason_off"] == "no drafter is in use"
    assert found["choices"] == served.chat(max_tokens=20)["choices"]


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ({"drafter": "big-model"}, "auto, none, suffix"),
        ({"length": 500}, "1 to 24"),
        ({"length": "long"}, "auto or a number"),
        ({"lenght": 4}, "lenght"),
    ],
)
def test_speculation_that_cannot_be_is_refused(served: Served, field: dict[str, Any], words: str) -> None:
    answer = served.post(CHAT, asked(speculation=field))
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


def test_a_prediction_is_drafted_and_changes_no_text(served: Served, engine: Engine) -> None:
    letters = {token for token, each in engine.tokenizer.spellings.items() if each.isalpha() and each.isascii()}
    bias = dict.fromkeys(set(range(engine.manifest.vocab_size)) - letters, -100.0)  # so that the text is all there
    sampling = SamplingParams(logit_bias=bias)
    wanted = engine.generate(HI, sampling=sampling, max_tokens=40)
    found = served.chat(
        max_tokens=40,
        logit_bias=bias,
        prediction={"type": "content", "content": [{"type": "text", "text": wanted.text}]},
        speculation={"length": 6},
    )
    assert found["choices"][0]["message"]["content"] == wanted.text
    assert found["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 20
    assert found["speculation"]["tokens_per_pass"] > 2
    drafting = Drafting(prediction=wanted.text, draft_length=6)
    own = engine.generate(HI, sampling=sampling, max_tokens=40, drafting=drafting)
    assert own.text == wanted.text
    assert own.origins.count("prediction") > 20


def test_models_are_listed_and_shown(served: Served) -> None:
    served.chat()
    listed = served.client.get("/v1/models").json()
    assert (listed["object"], [each["id"] for each in listed["data"]]) == ("list", ["other", "tiny"])
    shown = served.client.get("/v1/models/tiny").json()
    assert shown in listed["data"]
    assert (shown["object"], shown["context_length"], shown["is_loaded"]) == ("model", 700, True)


def test_a_model_stays_as_old_as_it_is_when_its_folder_is_written_to(served: Served, tiny_model: Path) -> None:
    before = served.client.get("/v1/models/tiny").json()["created"]
    now = tiny_model.stat()
    os.utime(tiny_model, (now.st_atime, now.st_mtime + 5000))
    assert served.client.get("/v1/models/tiny").json()["created"] == before


@pytest.mark.parametrize(
    "name",
    [
        "tiy", "../tiny", "./tiny", "/etc/passwd", "file:///etc/passwd", "https://example.com/x", "org/name", "",
        "a" * 5000,
    ],
)  # fmt: skip
def test_names_that_are_no_served_model_are_refused(served: Served, name: str) -> None:
    """S11: a name is compared with those that are served, and never opened."""
    answer = served.post(CHAT, asked(model=name))
    assert answer.status_code == (404 if name else 400)
    error = answer.json()["error"]
    assert error["param"] == "model"
    assert len(error["message"]) < 500
    if name == "tiy":
        assert "did you mean tiny?" in error["message"]
        assert error["code"] == "model_not_found"
        assert served.client.get("/v1/models/tiy").status_code == 404


@pytest.mark.parametrize("name", ["TINY", "SomeBody/Tiny", "./tiny"])
def test_a_near_name_is_found_whatever_its_case_and_whoever_has_it(served: Served, name: str) -> None:
    assert "did you mean tiny?" in served.post(CHAT, asked(model=name)).json()["error"]["message"]


def test_texts_become_tokens_and_back(served: Served, engine: Engine) -> None:
    tokens = list(engine.tokenize("in the an"))
    for field in ("content", "prompt"):
        found = served.post("/tokenize", {"model": "tiny", field: "in the an"}).json()
        assert (found["tokens"], found["count"]) == (tokens, len(tokens))
    pieces = served.post("/tokenize", {"model": "tiny", "content": "in the", "with_pieces": True}).json()["tokens"]
    assert "".join(each["piece"] for each in pieces) == "in the"
    found = served.post("/tokenize", {"model": "tiny", "messages": HI}).json()
    assert found["tokens"] == [*engine.encode(HI)]
    assert served.post("/detokenize", {"model": "tiny", "tokens": tokens}).json() == {"content": "in the an"}
    assert served.post("/tokenize", {"model": "tiny"}).status_code == 400


def test_embeddings_are_refused_in_words(served: Served) -> None:
    answer = served.post("/v1/embeddings", {"model": "tiny", "input": "a text"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "unsuited_model")
    assert "embeddings need one that was trained" in error["message"]


def test_a_response_has_what_clients_check_for(served: Served, engine: Engine) -> None:
    fields = {"model": "tiny", "input": "in the an", "instructions": "re", "max_output_tokens": 9}
    found = served.post(RESPONSES, fields).json()
    wanted = engine.generate([{"role": "system", "content": "re"}, *HI], max_tokens=9)
    assert found["object"] == "response"
    assert (found["status"], found["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert found["output"][0]["content"][0]["text"] == wanted.text
    assert found["usage"]["output_tokens"] == 9
    assert found["store"] is False
    items = [{"role": "user", "content": [{"type": "input_text", "text": "in the an"}]}]
    again = served.post(RESPONSES, {**fields, "input": items}).json()
    assert again["output"][0]["content"] == found["output"][0]["content"]


def test_the_events_of_a_response_are_in_order_and_join(served: Served) -> None:
    fields = {"model": "tiny", "input": "in the an", "max_output_tokens": 9}
    events = served.events(RESPONSES, fields)
    names = [each["type"].removeprefix("response.") for each in events]
    assert [each["sequence_number"] for each in events] == list(range(len(events)))
    assert names[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert names[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert set(names[4:-4]) == {"output_text.delta"}
    text = "".join(each["delta"] for each in events[4:-4])
    assert text == events[-1]["response"]["output"][0]["content"][0]["text"] == events[-4]["text"]
    assert events[-1]["response"]["usage"]["output_tokens"] == 9


def test_metrics_count_what_was_asked(served: Served) -> None:
    served.chat(max_tokens=3)
    served.client.get("/no/such/page")
    answer = served.client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    samples = dict(line.rsplit(" ", 1) for line in answer.text.splitlines() if not line.startswith("#"))
    assert float(samples['edgespec_completion_tokens_total{model="tiny"}']) >= 3
    assert float(samples['edgespec_requests_total{path="/v1/chat/completions",status="200"}']) >= 1
    assert float(samples['edgespec_requests_total{path="other",status="404"}']) >= 1
    assert samples["edgespec_answers"] == "0"
    assert "edgespec_spec_draft_tokens_total" in answer.text


def test_health_and_wrong_addresses(served: Served) -> None:
    assert served.client.get("/health").json() == {"status": "ok"}
    missing = served.client.get("/v2/chat")
    told = missing.json()["error"]["message"]
    assert (missing.status_code, told[:56]) == (404, "/v2/chat is not an address of this server; there are /, ")
    assert "/v1/chat/completions" in told
    assert "/api/chat" in told
    for path in ("", "/v1/v1", "/v1"):
        missing = served.post(f"{path}/chat/completions{'/' * (path == '/v1')}", {})
        assert "; did you mean /v1/chat/completions? there are" in missing.json()["error"]["message"]
    assert served.client.get(CHAT).status_code == 405


def test_answers_at_once_are_each_its_own_also_beside_clients_that_leave(served: Served, engine: Engine) -> None:
    prompts = ["in the", "re on an", "the other", "an in"]
    wanted = [engine.generate(prompt, max_tokens=12).text for prompt in prompts]

    def ask(number: int) -> None:
        message = [{"role": "user", "content": prompts[number % 4]}]
        if number % 3 == 0:
            fields = asked(messages=message, max_tokens=400, stream=True)
            with served.client.stream("POST", CHAT, json=fields) as answer:
                next(answer.iter_lines())
            return
        assert served.chat(prompts[number % 4])["choices"][0]["message"]["content"] == wanted[number % 4]

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(ask, range(24)))
    until(lambda: served.services.admission.num_taken == 0)


def test_a_model_of_the_home_is_not_served_under_two_names(tiny_model: Path, tmp_path: Path) -> None:
    home = home_with(tmp_path, mine=tiny_model, other=tiny_model)
    names = ModelNames(home, own=str(home.models / "mine"))
    assert names.names() == ["mine", "other"]
    assert ModelNames(home).names() == ["mine", "other"]
    assert (names.source("mine"), names.source("other")) == (str(home.models / "mine"), str(home.models / "other"))
    assert ModelNames(home, own="no such").names() == ["no such", "mine", "other"]


@pytest.mark.skipif(sys.platform != "linux", reason="needs a file name that is no text, which only Linux allows")
def test_a_name_that_is_no_utf_8_is_told_to_clients_as_text(tiny_model: Path, tmp_path: Path) -> None:
    home = home_with(tmp_path, **{"h\udcff": tiny_model})
    assert ModelNames(home, own="own\udcff.gguf").names() == ["own\ufffd.gguf", "h\ufffd"]


def test_the_model_of_the_command_line_needs_no_name_and_answers_have_a_bound(
    tiny_model: Path, tmp_path: Path, engine: Engine
) -> None:
    names = ModelNames(home_with(tmp_path), own=str(tiny_model))
    first = (str(names.own_name), table_engine(tiny_model))
    limits = Limits(num_tokens=5, drain_s=0.5)
    with serving(names, lambda name: pytest.fail("it is loaded already"), first=first, limits=limits) as served:
        for path, prompt in (
            (CHAT, {"messages": HI}),
            (COMPLETIONS, {"prompt": "in"}),
            (RESPONSES, {"input": "in"}),
        ):
            usage = served.post(path, prompt).json()["usage"]
            assert 5 in (usage.get("completion_tokens"), usage.get("output_tokens"))
        found = served.post(CHAT, {"messages": HI, "max_tokens": 9}).json()
        assert found["usage"]["completion_tokens"] == 5
        assert found["model"] == tiny_model.name
        assert [each["id"] for each in served.client.get("/v1/models").json()["data"]] == [tiny_model.name]


# -- structured output -------------------------------------------------------------------------------

POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "y": {"enum": ["up", "down"]}},
    "required": ["x", "y"],
    "additionalProperties": False,
}


def require_point(text: str) -> None:
    found = json.loads(text)
    assert [*found] == ["x", "y"]
    assert isinstance(found["x"], int)
    assert found["y"] in ("up", "down")


@pytest.mark.parametrize(
    "fields",
    [
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "p", "strict": True, "schema": POINT},
            }
        },
        {"guided_json": POINT},
        {"guided_json": json.dumps(POINT)},
        {"json_schema": POINT},
        {"structured_outputs": {"json": POINT}},
        {"response_format": {"type": "json_object", "schema": POINT}},
    ],
)
def test_an_answer_matches_its_schema(served: Served, fields: dict[str, Any]) -> None:
    for choice in served.chat(n=2, temperature=1.0, logprobs=True, max_tokens=40, **fields)["choices"]:
        require_point(choice["message"]["content"])
        assert choice["finish_reason"] == "stop"
        assert len(choice["logprobs"]["content"]) > 10


@pytest.mark.parametrize(
    "fields",
    [{"guided_json": {}}, {"json_schema": {}}, {"guided_json": "{}"}, {"structured_outputs": {"json": {}}}],
)
def test_an_empty_schema_is_one_too(served: Served, fields: dict[str, Any]) -> None:
    (choice,) = served.chat(temperature=1.0, seed=3, **fields)["choices"]
    assert choice["finish_reason"] == "stop"
    json.loads(choice["message"]["content"])


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"response_format": {"type": "regex", "regex": "[0-9]{3}-(ab|cd)"}}, "[0-9]{3}-(ab|cd)"),
        ({"guided_regex": "[xyz]{5}"}, "[xyz]{5}"),
        ({"guided_choice": ["yes sir", 'no "way"']}, 'yes sir|no "way"'),
        ({"guided_choice": ["\u00fcber/\\n\n", "\U0001f600"]}, "\u00fcber/\\\\n\n|\U0001f600"),
        ({"response_format": {"type": "grammar", "grammar": 'start: "a" /[bc]+/ "d"'}}, "a[bc]+d"),
        ({"guided_grammar": 'start: ("x" | "y")~3'}, "[xy]{3}"),
        ({"grammar": 'root ::= "left" | "right"'}, "left|right"),
        ({"structured_outputs": {"regex": "[xyz]{5}"}}, "[xyz]{5}"),
        ({"structured_outputs": {"choice": ["yes", "no"], "backend": "auto"}}, "yes|no"),
        ({"structured_outputs": {"grammar": 'root ::= "a" | "b"'}}, "a|b"),
        ({"structured_outputs": {"json_object": True}}, r"(?s:\{.*\})"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_an_answer_matches_its_expression_or_grammar(
    served: Served, path: str, fields: dict[str, Any], wanted: str
) -> None:
    prompt = {"messages": HI} if path == CHAT else {"prompt": "in the an"}
    (choice,) = served.post(path, {"model": "tiny", "max_tokens": 20, **prompt, **fields}).json()["choices"]
    assert re.fullmatch(wanted, choice["message"]["content"] if path == CHAT else choice["text"])


def test_a_response_has_the_text_format_that_was_asked_for(served: Served) -> None:
    stated = {"type": "json_schema", "name": "point", "schema": POINT, "strict": True}
    fields = {"model": "tiny", "input": "in the an", "max_output_tokens": 40, "text": {"format": stated}}
    whole = served.post(RESPONSES, fields).json()
    require_point(whole["output"][0]["content"][0]["text"])
    assert (whole["status"], whole["text"]["format"]) == ("completed", stated)
    streamed = [each["delta"] for each in served.events(RESPONSES, fields) if each["type"].endswith("text.delta")]
    require_point("".join(streamed))


def test_a_format_that_is_stated_twice_is_refused(served: Served) -> None:
    answer = served.post(CHAT, asked(guided_regex="a", response_format={"type": "json_object"}))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "guided_regex")


def test_answers_that_share_passes_keep_their_own_formats(served: Served) -> None:
    def ask(i: int) -> str:
        pattern = f"{i}[ab]{{8}}"
        found = served.chat(
            max_tokens=20, temperature=1.0, seed=i, response_format={"type": "regex", "regex": pattern}
        )
        return str(found["choices"][0]["message"]["content"])

    with ThreadPoolExecutor(4) as pool:
        assert all(re.fullmatch(f"{i}[ab]{{8}}", text) for i, text in enumerate(pool.map(ask, range(8))))


def test_a_damaged_model_is_refused_with_what_is_wrong_with_it(tiny_model: Path, tmp_path: Path) -> None:
    home = home_with(tmp_path)
    shutil.copytree(tiny_model, home.models / "cut")
    os.truncate(home.models / "cut" / "model.onnx.data", 10)
    home.presets.path.mkdir()
    (home.presets.path / "mine.toml").write_text('model = "cut"\n')
    with serving(ModelNames(home), lambda name: pytest.fail("it cannot be loaded")) as served:
        assert served.client.get("/v1/models").json()["data"] == []
        for asked in ("cut", "cut:latest", "mine"):
            answer = served.post(CHAT, {"model": asked, "messages": HI})
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (503, "model_damaged")
            assert error["message"].startswith("the model 'cut' cannot be used: cut/model.onnx.data has 10 bytes")
        assert served.post(CHAT, {"model": "other", "messages": HI}).status_code == 404
