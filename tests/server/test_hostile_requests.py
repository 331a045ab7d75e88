"""Requests made to stop a server: while each is worked on, others are answered."""

import gc
import json
import logging
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from time import monotonic
from typing import Any

import httpx2
import psutil
import pytest
from served import Served, home_with, serving, table_engine
from until import until

from edgespec import Engine
from edgespec.errors import FormatError, IntegrityError
from edgespec.server.limits import Limits
from edgespec.server.model_names import ModelNames

CHAT = "/v1/chat/completions"
HI: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "in the an"}], "max_tokens": 5}
# For /health, on a machine that runs other tests; more where it has more to do. What is refused here took minutes.
LONGEST_S = 3.0
PRIVATE = "".join(map(chr, [*range(0xE000, 0xF8FF), *range(0xF0000, 0xFFFFD)]))
LONG = 60_000  # times, in texts of at most 131,072 characters


@pytest.fixture(scope="module")
def served(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    names = ModelNames(home_with(tmp_path_factory.mktemp("home"), tiny=tiny_model))
    with serving(names, lambda name: table_engine(tiny_model), limits=Limits(drain_s=0.3)) as found:
        assert found.post(CHAT, HI).status_code == 200
        yield found


def longest_health_s(served: Served, is_over: Event) -> float:
    """The longest time that /health took, asked again and again until something is over."""
    longest_s = 0.0
    with httpx2.Client(base_url=str(served.client.base_url), verify=False, timeout=60) as client:
        while not is_over.wait(0.01):
            began_s = monotonic()
            assert client.get("/health").status_code == 200
            longest_s = max(longest_s, monotonic() - began_s)
    return longest_s


def longest_pause_s(served: Served, is_over: Event) -> float:
    """The longest time between two lines of another client's streams, until something is over."""
    longest_s, last_s = 0.0, monotonic()
    with httpx2.Client(base_url=str(served.client.base_url), verify=False, timeout=60) as client:
        while not is_over.wait(0.01):
            with client.stream("POST", CHAT, json={**HI, "stream": True}) as stream:
                for _ in stream.iter_lines():
                    last_s, longest_s = monotonic(), max(longest_s, monotonic() - last_s)
    return longest_s


def answer_beside(served: Served, path: str, document: dict[str, Any] | bytes) -> httpx2.Response:
    """The answer to a request, beside which /health and streams of another client go on."""
    is_over = Event()
    with ThreadPoolExecutor(2) as clients:
        watches = [clients.submit(watch, served, is_over) for watch in (longest_health_s, longest_pause_s)]
        try:
            body = document if isinstance(document, bytes) else json.dumps(document).encode()
            answer = served.client.post(path, content=body, headers={"Content-Type": "application/json"})
        finally:
            is_over.set()
        allowed_s = LONGEST_S * max(1.0, psutil.getloadavg()[0] / (os.cpu_count() or 1))
        assert max(watch.result() for watch in watches) < allowed_s
    until(lambda: served.services.admission.num_taken == 0)
    return answer


def schema(stated: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": stated}}


UNCLOSED: list[dict[str, Any]] = [
    {"type": "regex", "regex": "[" * LONG},
    {"type": "regex", "regex": "[\\" * LONG},
    schema({"type": "string", "pattern": "[" * LONG}),
    schema({"type": "object", "patternProperties": {"[" * LONG: {}}}),
    {"type": "grammar", "grammar": 'start: "' + '\\"' * LONG},
    {"type": "grammar", "grammar": "start: /" + "\\/" * LONG},
    {"type": "grammar", "grammar": "a" + " " * LONG},
]


@pytest.mark.parametrize("stated", UNCLOSED, ids=range(len(UNCLOSED)))
def test_what_is_never_closed_holds_nobody_up(served: Served, stated: dict[str, Any]) -> None:
    answer = answer_beside(served, CHAT, {**HI, "response_format": stated})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "response_format"


def test_a_comment_of_slashes_holds_nobody_up(served: Served) -> None:
    grammar = 'start: "in"\n//' + "\\/" * LONG
    answer = answer_beside(served, CHAT, {**HI, "response_format": {"type": "grammar", "grammar": grammar}})
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["message"]["content"] == "in"


STEPS: list[Any] = [
    {"type": "integer", "multipleOf": 99_999_989},
    {"type": "number", "multipleOf": 0.99999989},
    {"type": "integer", "multipleOf": 10**30 + 7},
    {"allOf": [{"type": "integer", "multipleOf": 997}, {"multipleOf": 1009}]},
    {"type": "integer", "multipleOf": 997, "anyOf": [{"multipleOf": 1009}]},
    {"properties": {f"p{i}": {"type": "integer", "multipleOf": 999} for i in range(200)}},
]


@pytest.mark.parametrize("stated", STEPS, ids=range(len(STEPS)))
def test_multiples_that_take_many_states_are_refused(served: Served, stated: Any) -> None:
    answer = answer_beside(served, CHAT, {**HI, "response_format": schema(stated)})
    assert answer.status_code == 400
    assert "states for multipleOf; wanted at most 100000" in answer.json()["error"]["message"]


@pytest.mark.parametrize("step", [7, 60, 0.01, 86_400])
def test_multiples_in_use_are_taken(served: Served, step: float) -> None:
    stated = schema({"type": "number", "multipleOf": step, "minimum": 0, "maximum": 0})
    answer = served.post(CHAT, {**HI, "max_tokens": 20, "response_format": stated})
    assert answer.json()["choices"][0]["message"]["content"].startswith("0")


def test_every_private_use_character_is_refused_and_keeps_no_place(served: Served) -> None:
    for path in (CHAT, "/tokenize"):
        answer = answer_beside(served, path, {**HI, "messages": [{"role": "user", "content": PRIVATE}]})
        assert answer.status_code == 400
        found = "private-use" if path == "/tokenize" else "255681 or more tokens"  # which are too many first
        assert found in answer.json()["error"]["message"]


LETTERS = {"role": "user", "content": "a" * 131_000}


@pytest.mark.slow
def test_a_prompt_in_many_messages_is_refused_by_their_sum(served: Served) -> None:
    answer = answer_beside(served, CHAT, {**HI, "messages": [LETTERS] * 100})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_messages_to_tokenize_have_the_bound_of_a_text(served: Served) -> None:
    answer = answer_beside(served, "/tokenize", {"messages": [{**LETTERS, "content": "a " * 100_000}] * 10})
    assert answer.status_code == 413
    assert served.post("/tokenize", {"messages": HI["messages"]}).json()["count"] > 3


@pytest.mark.slow
@pytest.mark.parametrize("value", ["[],", "1,", '"",'], ids=["lists", "numbers", "texts"])
def test_bodies_of_millions_of_values_are_refused_before_they_are_read(served: Served, value: str) -> None:
    body = json.dumps(HI).removesuffix("}") + f', "ignored": [{value * (15_000_000 // len(value))}1]}}'
    answer = answer_beside(served, CHAT, body.encode())
    assert answer.status_code == 413
    assert "300000 texts, lists and objects, or 2097152 values" in answer.json()["error"]["message"]


@pytest.mark.slow
def test_the_longest_texts_to_tokens_and_back_leave_others_the_interpreter(served: Served) -> None:
    tokens = answer_beside(served, "/tokenize", {"content": "in the an " * 104_857}).json()["tokens"]
    assert len(tokens) > 300_000
    assert answer_beside(served, "/detokenize", {"tokens": tokens}).json()["content"].count("in the an") == 104_857


def test_bodies_have_a_bound_together(tiny_model: Path, tmp_path: Path) -> None:
    names = ModelNames(home_with(tmp_path, tiny=tiny_model))
    limits, body = Limits(drain_s=0.3, bodies_bytes=3000), json.dumps({**HI, "user": "x" * 2000})
    with serving(names, lambda name: table_engine(tiny_model), limits=limits) as served:
        with served.raw() as slow:
            head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            slow.sendall(f"{head}Content-Length: {len(body) + 1}\r\n\r\n{body}".encode())
            until(lambda: served.services.bodies._num_bytes > 2000)
            refused = served.client.post(CHAT, content=body, headers={"Content-Type": "application/json"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
            assert int(refused.headers["Retry-After"]) >= 1
            assert served.post(CHAT, HI).status_code == 200
        until(lambda: served.services.bodies._num_bytes == 0)
        assert served.client.post(CHAT, content=body, headers={"Content-Type": "application/json"}).is_success


def test_a_large_body_of_few_values_is_read(served: Served) -> None:
    """Its text has what would begin values outside of it."""
    body = {**HI, "user": '[{,\\"' * 100_000}
    assert answer_beside(served, CHAT, json.dumps(body).encode()).status_code == 200


def raw_request(document: dict[str, Any]) -> bytes:
    body = json.dumps(document).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def test_a_client_that_leaves_gives_its_place_back_when_its_work_ends(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine, has_begun, may_end = table_engine(tiny_model), Event(), Event()
    stream = engine.stream

    def slow(*given: Any, **options: Any) -> Any:
        has_begun.set()
        assert may_end.wait(60)
        return stream(*given, **options)

    engine.stream = slow  # type: ignore[method-assign]
    names = ModelNames(home_with(tmp_path, tiny=tiny_model))
    with caplog.at_level(logging.INFO, "edgespec"), serving(names, lambda name: engine) as served:
        try:
            with served.raw() as connection:
                connection.sendall(raw_request(HI))
                assert has_begun.wait(60)
            until(lambda: "client gone" in caplog.text)
            assert served.services.admission.num_taken == 1
        finally:
            may_end.set()
        until(lambda: served.services.admission.num_taken == 0)
        assert served.post(CHAT, HI).status_code == 200


def test_a_failure_that_no_client_waits_for_is_not_logged(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine, has_begun, may_end = table_engine(tiny_model), Event(), Event()

    def fail(*given: Any, **options: Any) -> Any:
        has_begun.set()
        assert may_end.wait(60)
        raise FormatError("what the client sent")

    engine.stream = fail  # type: ignore[method-assign]
    names = ModelNames(home_with(tmp_path, tiny=tiny_model))
    with caplog.at_level(logging.INFO), serving(names, lambda name: engine) as served:
        with served.raw() as connection:
            connection.sendall(raw_request(HI))
            assert has_begun.wait(60)
        until(lambda: "client gone" in caplog.text)
        may_end.set()
        until(lambda: served.services.admission.num_taken == 0)
        gc.collect()
        assert "what the client sent" not in caplog.text
        assert "Traceback" not in caplog.text


def test_a_tokenizer_that_is_gone_is_the_servers_fault_and_its_path_untold(
    tiny_model: Path, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    with serving(ModelNames(home_with(tmp_path, tiny=tiny_model)), lambda name: table_engine(model)) as served:
        assert served.post(CHAT, HI).status_code == 200
        (model / "tokenizer.json").unlink()
        answer = served.post(CHAT, {**HI, "response_format": {"type": "json_object"}})
        assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")
        assert str(tmp_path) not in answer.text
        assert "tokenizer.json can no longer be read" in answer.text


@pytest.mark.parametrize("path", ["/home/me/models/x/model.onnx", "models/x", r"C:\Users\me\x", r"x\model.onnx"])
def test_errors_of_a_model_name_no_file_of_the_server(tiny_model: Path, tmp_path: Path, path: str) -> None:
    def open_engine(name: str) -> Engine:
        raise IntegrityError(f"{path} has another hash than its manifest says; export the model again")

    with serving(ModelNames(home_with(tmp_path, tiny=tiny_model)), open_engine) as served:
        answer = served.post(CHAT, HI)
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "engine_error")
        assert answer.json()["error"]["message"] == "the model cannot be used; the server's log says why"
