"""The program of a FastAPI app: its events, what it refuses, and clients that leave."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import Any

import httpx2
import pytest
import tiny
import uvicorn
from fastapi_app import make_app
from stuck import StuckDecoder, StuckLater, engine_of
from table_decoder import TableDecoder
from until import until

from edgespec import Engine, load

DEMOS = Path(__file__).parents[2] / "demos"
QUESTION = [{"role": "user", "content": "the in the"}]
WAIT_S = 120.0


@contextmanager
def serving(engine: Engine) -> Iterator[httpx2.Client]:
    """A client of the app on a real socket."""
    config = uvicorn.Config(make_app(engine), port=0, log_level="error", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = Thread(target=server.run, name="app")
    thread.start()
    try:
        until(lambda: server.started)
        port = server.servers[0].sockets[0].getsockname()[1]
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", verify=False, timeout=WAIT_S) as client:
            yield client
    finally:
        server.should_exit = True
        thread.join(WAIT_S)
    assert not thread.is_alive()


def table() -> TableDecoder:
    return TableDecoder(tiny.VOCAB, seed=3, context_length=tiny.CONTEXT)


@pytest.fixture(scope="module")
def client(tiny_model: Path) -> Iterator[httpx2.Client]:
    with serving(engine_of(tiny_model, table())) as client:
        yield client


def read_events(client: httpx2.Client, **fields: Any) -> list[dict[str, Any]]:
    with client.stream("POST", "/answers", json={"messages": QUESTION, **fields}) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        return [json.loads(line.removeprefix("data: ")) for line in answer.iter_lines() if line]


def test_events_are_the_answer_of_the_engine(client: httpx2.Client, tiny_model: Path) -> None:
    whole = engine_of(tiny_model, table()).generate(QUESTION, max_tokens=60)
    events = read_events(client, max_tokens=60)
    assert "".join(event["text"] for event in events) == whole.text
    assert [event["finish_reason"] for event in events if event["finish_reason"]] == [whole.finish_reason]
    assert len(events) > 2


@pytest.mark.parametrize(
    ("asked", "status", "said"),
    [
        ({"messages": []}, 422, "at least 1 item"),
        ({"messages": [{"role": "nobody", "content": "the"}]}, 422, "role"),
        ({"messages": QUESTION, "max_tokens": 0}, 422, "greater than or equal to 1"),
        ({"messages": [{"role": "user", "content": "the in " * 4000}]}, 413, "do not fit the context"),
    ],
)
def test_what_cannot_be_answered_is_refused_before_the_stream_begins(
    client: httpx2.Client, asked: dict[str, Any], status: int, said: str
) -> None:
    answer = client.post("/answers", json=asked)
    assert (answer.status_code, said in answer.text) == (status, True), answer.text


def test_an_answer_ends_when_its_client_leaves_before_the_first_word(tiny_model: Path) -> None:
    decoder = StuckDecoder()
    with (
        serving(engine_of(tiny_model, decoder)) as client,
        client.stream("POST", "/answers", json={"messages": QUESTION}),
    ):
        assert decoder.has_begun.wait(WAIT_S)
        assert not decoder.is_interrupted.is_set()
        client.close()
        assert decoder.is_interrupted.wait(WAIT_S)


def test_an_answer_ends_when_its_client_leaves_it(tiny_model: Path) -> None:
    decoder = StuckLater()
    engine = engine_of(tiny_model, decoder)
    with serving(engine) as client:
        with client.stream("POST", "/answers", json={"messages": QUESTION}) as answer:
            lines = answer.iter_lines()  # the end of which would close the answer
            assert json.loads(next(lines).removeprefix("data: "))["finish_reason"] is None
            assert decoder.has_begun.wait(WAIT_S)
            assert not decoder.is_interrupted.is_set()
        assert decoder.is_interrupted.wait(WAIT_S)
        until(lambda: not engine._caches.queue._holders)


def test_the_end_of_the_server_ends_answers(tiny_model: Path) -> None:
    decoder = StuckDecoder()

    def ask() -> None:
        with suppress(httpx2.HTTPError):
            client.post("/answers", json={"messages": QUESTION})

    with serving(engine_of(tiny_model, decoder)) as client:
        asking = Thread(target=ask)
        asking.start()
        assert decoder.has_begun.wait(WAIT_S)
    assert decoder.is_interrupted.wait(WAIT_S)
    asking.join(WAIT_S)


@pytest.mark.slow
def test_the_program_runs_as_it_is_printed(tiny_model: Path) -> None:
    command = [sys.executable, str(DEMOS / "fastapi_app.py"), "--model", str(tiny_model), "--port", "0"]
    program = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert program.stderr is not None
    try:
        lines = iter(program.stderr.readline, "")
        url = next(found[0] for line in lines if (found := re.search(r"http://127.0.0.1:\d+", line)))
        with httpx2.Client(base_url=url, verify=False, timeout=WAIT_S) as client, load(tiny_model) as engine:
            events = read_events(client, max_tokens=20)
            assert "".join(event["text"] for event in events) == engine.generate(QUESTION, max_tokens=20).text
    finally:
        program.send_signal(signal.SIGINT)
        program.communicate(timeout=WAIT_S)
