"""The requests of Open WebUI, replayed as its source sends them: it is too heavy to be installed for a test.

Models are listed when a connection is added. Behind each answer to a person it asks for follow-ups, a title and
tags at once, by templates that begin and end alike. Its "stop" closes the connection of the stream.
"""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import tiny
from served import Served, home_with, serving, table_engine
from stuck import StuckDecoder
from table_decoder import TableDecoder
from until import until

from edgespec import Engine
from edgespec.server.answer_fields import priority_of
from edgespec.server.limits import Limits
from edgespec.server.model_names import ModelNames
from edgespec.server.protocol import ChatRequest, parse
from edgespec.types import Logits, TokenIds

CHAT = "/v1/chat/completions"
PERSON = [{"role": "user", "content": "in the an"}]
HEADERS = {
    "Content-Type": "application/json",
    "Authorization": "Bearer key",
    "Accept-Encoding": "gzip, deflate, br",
}


def task(output: str, extra: str = "") -> list[dict[str, str]]:
    """A question about a chat in the form that the templates have."""
    lines = ["### Task:", "Generate what is asked for.", "### Output:", f"JSON format: {{ {output}: [] }}", extra]
    return [{"role": "user", "content": "\n".join([*lines, "<chat_history>", "USER: in", "</chat_history>"])}]


TITLE, TAGS, FOLLOW_UPS = task('"title"'), task('"tags"'), task('"follow_ups"')


def body(messages: list[dict[str, str]], **fields: Any) -> bytes:
    return json.dumps({"model": "tiny", "messages": messages, **fields}).encode()


@pytest.fixture(scope="module")
def served(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    names = ModelNames(home_with(tmp_path_factory.mktemp("home"), tiny=tiny_model))
    limits = Limits(drain_s=0.5)
    with serving(names, lambda name: table_engine(tiny_model), key="key", limits=limits) as found:
        yield found


def test_a_connection_lists_its_models(served: Served) -> None:
    found = served.client.get("/v1/models", headers=HEADERS).json()
    assert [each["id"] for each in found["data"]] == ["tiny"]
    assert all(isinstance(each["id"], str) and each["owned_by"] for each in found["data"])


def test_a_chat_streams_with_its_fields_and_the_tasks_behind_it_are_answered(served: Served) -> None:
    fields = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 20}
    with served.client.stream("POST", CHAT, content=body(PERSON, **fields), headers=HEADERS) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert "content-encoding" not in answer.headers
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1] if line.startswith("data: ")]
    assert chunks[-1]["usage"]["completion_tokens"] == 20
    text = "".join(choice["delta"].get("content", "") for each in chunks for choice in each["choices"])

    def ask(messages: list[dict[str, str]]) -> Any:
        content = body(messages, stream=False, max_tokens=30)
        return served.client.post(CHAT, content=content, headers=HEADERS).json()

    asked = [[*PERSON, {"role": "assistant", "content": text}, *PERSON], TITLE, TAGS, FOLLOW_UPS]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(ask, asked))
    assert all(isinstance(each["choices"][0]["message"]["content"], str) for each in answers)


def test_an_answer_that_is_continued_goes_on_behind_its_text(served: Served) -> None:
    messages = [*PERSON, {"role": "assistant", "content": "the in"}]
    more = {"continue_final_message": True, "add_generation_prompt": False, "max_tokens": 9}
    plain = served.client.post(CHAT, content=body(messages, max_tokens=9), headers=HEADERS).json()
    found = served.client.post(CHAT, content=body(messages, **more), headers=HEADERS).json()
    assert found["choices"] == plain["choices"]


def test_stop_ends_the_answer(tiny_model: Path, tmp_path: Path) -> None:
    decoder = StuckDecoder()  # its pass would never end by itself
    names = ModelNames(home_with(tmp_path, tiny=tiny_model))
    with serving(names, lambda name: table_engine(tiny_model, decoder), limits=Limits(drain_s=0.5)) as served:
        with served.client.stream("POST", CHAT, content=body(PERSON, stream=True), headers=HEADERS) as answer:
            lines = answer.iter_lines()  # the connection is closed with it
            next(lines)
            assert decoder.has_begun.wait(120)
        assert decoder.is_interrupted.wait(120)
        until(lambda: served.services.admission.num_taken == 0)


@pytest.mark.parametrize(
    ("messages", "fields", "priority"),
    [
        (TITLE, {"stream": False}, -1), (TAGS, {}, -1), (FOLLOW_UPS, {}, -1), (PERSON, {}, 0),
        (TITLE, {"priority": 0}, 0), (PERSON, {"priority": -3}, -3), (TITLE, {"stream": True}, 0),
        (task('"queries"'), {}, 0), ([*PERSON, *TITLE], {}, 0),
        ([{"role": "user", "content": [{"type": "text", "text": TITLE[0]["content"]}]}], {}, 0),
        ([{"role": "user", "content": 'What does "title" mean in ### Task: and <chat_history>?'}], {}, 0),
    ],
)  # fmt: skip
def test_only_what_nobody_waits_for_has_a_low_priority(
    messages: list[dict[str, str]], fields: dict[str, Any], priority: int
) -> None:
    assert priority_of(parse(ChatRequest, body(messages, **fields))) == priority


@pytest.mark.parametrize("priority", [1, -11, 2**70, "high", 0.5, True])
def test_no_request_goes_before_those_of_persons(served: Served, priority: Any) -> None:
    answer = served.client.post(CHAT, content=body(PERSON, priority=priority), headers=HEADERS)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "priority")


class HeldDecoder(TableDecoder):
    """Its first pass waits until it is let go on; it notes the length of the text of each pass."""

    def __init__(self) -> None:
        super().__init__(tiny.VOCAB, seed=3)
        self.has_begun, self.may_go_on, self.lengths = Event(), Event(), list[int]()

    def logits(self, tokens: TokenIds, num_last: int) -> Logits:
        self.lengths.append(len(tokens))
        self.has_begun.set()
        assert self.may_go_on.wait(120)
        return super().logits(tokens, num_last)


def test_a_title_that_is_being_written_lets_a_person_go_first(tiny_model: Path, tmp_path: Path) -> None:
    """Also where one answer is made at a time: the title waits between two passes, and goes on afterwards."""
    decoder = HeldDecoder()
    engines: list[Engine] = []

    def open_engine(name: str) -> Engine:
        engines.append(table_engine(tiny_model, decoder))
        engines[0]._caches.queue._idle_s = 120.0  # however late a busy machine asks for the next pass
        return engines[0]

    names = ModelNames(home_with(tmp_path, tiny=tiny_model))
    with serving(names, open_engine, limits=Limits(drain_s=0.5)) as served, ThreadPoolExecutor(2) as pool:

        def ask(messages: list[dict[str, str]], num: int) -> Any:
            plainly = {"speculation": {"off": True}, "logit_bias": {"0": -100, "2": -100}}
            content = body(messages, max_tokens=num, **plainly)
            return served.client.post(CHAT, content=content, headers=HEADERS).json()["usage"]

        title = pool.submit(ask, TITLE, 40)
        assert decoder.has_begun.wait(120)
        person = pool.submit(ask, PERSON, 15)
        until(lambda: bool(engines[0]._caches.queue._waiting))
        decoder.may_go_on.set()
        usages = person.result(120), title.result(120)
    assert [each["completion_tokens"] for each in usages] == [15, 40]
    is_person = [length < usages[1]["prompt_tokens"] for length in decoder.lengths]
    first = is_person.index(True)
    assert first <= 2
    assert is_person[first : first + 15] == [True] * 15


class SlowDecoder(TableDecoder):
    """Each pass takes so long that no answer of many tokens ends within a test."""

    def __init__(self) -> None:
        super().__init__(tiny.VOCAB, seed=3)
        self.has_begun, self.never = Event(), Event()

    def logits(self, tokens: TokenIds, num_last: int) -> Logits:
        self.has_begun.set()
        self.never.wait(0.3)
        return super().logits(tokens, num_last)


def test_a_title_gives_the_place_of_its_model_up_and_is_written_afterwards(
    tiny_model: Path, tmp_path: Path
) -> None:
    """With --max-models 1 a person who asks for another model waits for no more than the pass that runs."""
    opened, slow = list[str](), SlowDecoder()

    def open_engine(name: str) -> Engine:
        opened.append(name)
        return table_engine(tiny_model, slow if len(opened) == 1 else None)

    names = ModelNames(home_with(tmp_path, tiny=tiny_model, other=tiny_model))
    with serving(names, open_engine, limits=Limits(drain_s=0.5)) as served, ThreadPoolExecutor(1) as pool:

        def ask(messages: list[dict[str, str]], num: int, **fields: Any) -> Any:
            plainly = {"speculation": {"off": True}, "logit_bias": {"0": -100, "2": -100}, "temperature": 0}
            content = body(messages, max_tokens=num, **plainly, **fields)
            return served.client.post(CHAT, content=content, headers=HEADERS).json()

        title = pool.submit(ask, TITLE, 100)
        assert slow.has_begun.wait(120)
        assert ask(PERSON, 5, model="other")["usage"]["completion_tokens"] == 5
        made = title.result(120)
        assert opened == ["tiny", "other", "tiny"]
        assert made["usage"]["completion_tokens"] == 100
        assert made["choices"] == ask(TITLE, 100)["choices"]


def test_a_stream_that_gives_the_place_of_its_model_up_says_so(tiny_model: Path, tmp_path: Path) -> None:
    names = ModelNames(home_with(tmp_path, tiny=tiny_model, other=tiny_model))
    slow = SlowDecoder()
    with (
        serving(names, lambda name: table_engine(tiny_model, slow if name == "tiny" else None)) as served,
        served.client.stream(
            "POST", CHAT, content=body(PERSON, stream=True, priority=-1, max_tokens=600), headers=HEADERS
        ) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        person = body(PERSON, model="other", max_tokens=5)
        assert served.client.post(CHAT, content=person, headers=HEADERS).status_code == 200
        *_, last, done = [line for line in lines if line]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "preempted"
    assert done == "data: [DONE]"
