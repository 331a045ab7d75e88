"""Clients that err, leave, read slowly or mean harm, and what the server does in each case."""

import json
import logging
import re
import socket
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event, Semaphore
from typing import Any

import httpx2
import pytest
import tiny
from served import Served, home_with, rest_of, serving, table_engine
from stuck import StuckDecoder, StuckLater, engine_of
from table_decoder import TableDecoder
from until import until

from edgespec import Engine
from edgespec.errors import EdgeSpecError, MemoryExhausted
from edgespec.server.limits import Limits
from edgespec.server.model_names import ModelNames
from edgespec.server.security import is_loopback, require_key_on_network
from edgespec.server.serving import open_socket
from edgespec.types import Logits, TokenIds

CHAT = "/v1/chat/completions"
SECRET = "the in re an on"
HI = {"model": "tiny", "messages": [{"role": "user", "content": SECRET}], "max_tokens": 5}
PATIENT = Limits(drain_s=0.3, body_bytes=100_000, keep_alive_s=0.1)  # with what a client does in its time
QUICK = replace(PATIENT, headers_s=0.5, body_s=0.5)


@pytest.fixture
def names(tiny_model: Path, tmp_path: Path) -> ModelNames:
    return ModelNames(home_with(tmp_path, tiny=tiny_model))


@pytest.fixture(scope="module")
def served(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    names = ModelNames(home_with(tmp_path_factory.mktemp("home"), tiny=tiny_model))
    with serving(names, lambda name: table_engine(tiny_model), limits=PATIENT) as found:
        yield found


@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS", "HEAD"])
@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:80",
        "127.0.0.1.evil.example",
        "[::2]",
        "[::1].evil.example",
        "host.docker.internal.evil.example",
        "evil-internal",
        "internal",
        "localhost:a",
        "",
    ],
)
def test_other_host_names_are_refused(served: Served, method: str, host: str) -> None:
    """S1: a name that was pointed at this machine."""
    for path in ("/v1/models", CHAT, "/health"):
        assert served.client.request(method, path, headers={"Host": host}).status_code == 403


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "localhost:1",
        "LOCALHOST",
        "127.0.0.1:99",
        "[::1]:8080",
        "host.docker.internal:8080",
        "a.localhost",
    ],
)
def test_own_host_names_are_answered(served: Served, host: str) -> None:
    assert served.client.get("/health", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("host", ["host.docker.internal:8080", "a.localhost"])
def test_pages_under_reserved_names_are_refused(served: Served, host: str) -> None:
    """S1: a hostile network may answer for such a name, but only a browser sends an origin."""
    headers = {"Host": host, "Origin": f"http://{host}"}
    assert served.client.post(CHAT, json=HI, headers=headers).status_code == 403


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://localhost:3000", "file://"])
def test_pages_of_sites_are_let_in_by_no_method(served: Served, origin: str) -> None:
    """S2: also the question before a request that changes something."""
    asking = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
    answers = [
        served.client.request("OPTIONS", CHAT, headers={"Origin": origin, **asking}),
        served.client.post(CHAT, json=HI, headers={"Origin": origin}),
        served.client.get("/v1/models", headers={"Origin": origin}),
    ]
    for answer in answers:
        assert answer.status_code == 403
        assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_bodies_of_forms_are_refused(served: Served, kind: str) -> None:
    """S2: what a page can send without being asked first."""
    answer = served.client.post(CHAT, content=json.dumps(HI), headers={"Content-Type": kind})
    assert answer.status_code == 415


def test_other_machines_need_a_key() -> None:
    """S3"""
    for host in ("0.0.0.0", "::", "192.168.1.5", "my-machine", ""):
        assert not is_loopback(host)
        with pytest.raises(EdgeSpecError, match="--api-key"):
            require_key_on_network(host, None)
        require_key_on_network(host, "key")
    for host in ("127.0.0.1", "localhost", "::1", "127.0.0.2", "[::1]"):
        require_key_on_network(host, None)
    with pytest.raises(EdgeSpecError, match="empty"):
        require_key_on_network("127.0.0.1", " ")


@pytest.mark.parametrize("key", [" k", "k ", "k\r", "k\n", "k\0y", "\udcff\udcfe", "k\ty", "sécret"])
def test_a_key_that_no_client_can_send_is_refused(key: str) -> None:
    """S3: at the start, and not at each request."""
    with pytest.raises(EdgeSpecError, match="an HTTP header cannot contain"):
        require_key_on_network("127.0.0.1", key)


def test_a_key_is_asked_for_everywhere_but_at_health(names: ModelNames, tiny_model: Path) -> None:
    """S4"""
    with serving(names, lambda name: table_engine(tiny_model), key="clé", host="0.0.0.0") as served:
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "Bearer"},
            {"Authorization": "clé".encode()},
            {"x-api-key": "cl"},
        ):
            for path in ("/v1/models", "/metrics", "/no/page"):
                answer = served.client.get(path, headers=headers)
                assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        for headers in ({"Authorization": "Bearer clé".encode()}, {"x-api-key": "clé".encode()}):
            assert served.client.get("/v1/models", headers={**headers, "Host": "any.name"}).status_code == 200
        assert served.client.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0), ("n", -1), ("n", 1000), ("n", "two"), ("n", True), ("max_tokens", -5),
        ("max_tokens", 1.5), ("max_completion_tokens", -2), ("temperature", -0.1), ("temperature", "hot"),
        ("top_p", 1.5), ("top_p", -1), ("top_k", -7), ("presence_penalty", 1e9), ("seed", "s"), ("seed", 1.5),
        ("stop_token_ids", [5]), ("min_tokens", 3), ("ignore_eos", True), ("functions", [{}]),
        ("stop", "x" * 5000), ("stop", ["a"] * 50), ("stop", 7), ("logit_bias", {"a": 1}),
        ("logit_bias", {"1": 500}), ("logit_bias", {str(i): 1 for i in range(5000)}), ("logit_bias", {"-1": 1}),
        ("top_logprobs", 3), ("logprobs", "yes"), ("messages", []), ("messages", "hi"), ("messages", [{}]),
        ("messages", [{"role": "wizard", "content": "x"}]), ("messages", [{"role": "user", "content": 7}]),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
        ("messages", [{"role": "tool", "content": "x"}]), ("stream", "yes"), ("prediction", "text"),
        ("response_format", {"type": "xml"}), ("response_format", {"type": "json_schema"}),
        ("response_format", {"type": "regex", "regex": "[a"}), ("response_format", 3),
        ("tool_choice", "required"), ("speculation", 3),
        ("tool_choice", {"type": "function"}),
    ],
)  # fmt: skip
def test_fields_that_cannot_be_are_refused_by_name(served: Served, field: str, value: Any) -> None:
    """S5, before any work; the server goes on."""
    answer = served.client.post(CHAT, json={**HI, field: value})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert set(error) == {"message", "type", "param", "code"}
    assert field.split("_")[0] in error["message"]
    assert served.client.get("/health").status_code == 200


@pytest.mark.parametrize(("field", "value"), [("stop_token_ids", [5]), ("min_tokens", 3), ("ignore_eos", True)])
def test_responses_refuse_what_they_do_not_follow_too(served: Served, field: str, value: Any) -> None:
    answer = served.client.post("/v1/responses", json={"model": "tiny", "input": SECRET, field: value})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"model": "\xff"}', b'{"messages": NaN}', b"[" * 100_000,
        b'{"messages":' + b'[{"a":' * 20_000, b'{"temperature": 1e999, "messages": []}', b'{"model": "\\ud800"}',
    ],
    ids=range(11),
)  # fmt: skip
def test_bodies_that_are_no_request_are_refused(served: Served, body: bytes) -> None:
    """S5"""
    answer = served.client.post(CHAT, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code in (400, 413)
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize("text", ["\\ud83d", "a\\ud83d and more", "\\ud83d\\u0041", "\\ud83d\\ud83d", "\\ude00"])
def test_half_of_a_surrogate_pair_is_named(served: Served, text: str) -> None:
    body = f'{{"model": "tiny", "messages": [{{"role": "user", "content": "{text}"}}]}}'.encode()
    answer = served.client.post(CHAT, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    half = "\\ude00" if "de00" in text else "\\ud83d"
    assert f"the body has {half}, half of a surrogate pair" in answer.json()["error"]["message"]


def test_a_huge_body_is_refused_before_it_is_read(served: Served) -> None:
    """S5, with a stated length and without."""
    content = {"Content-Type": "application/json"}
    large = json.dumps({**HI, "user": "x" * 200_000}).encode()
    assert served.client.post(CHAT, content=large, headers=content).status_code == 413
    assert served.client.post(CHAT, content=iter([large]), headers=content).status_code == 413
    with served.raw() as connection:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: 999999999999\r\n\r\n".encode())
        assert b" 413 " in connection.recv(4096)


def test_a_prompt_beyond_the_context_is_refused(names: ModelNames, tiny_model: Path) -> None:
    with serving(names, lambda name: table_engine(tiny_model), limits=PATIENT) as served:
        answer = served.client.post(CHAT, json={**HI, "messages": [{"role": "user", "content": "re in " * 9000}]})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"


@contextmanager
def leaving(served: Served, *, stream: bool) -> Iterator[socket.socket]:
    """A client that asks and is reset when the block ends."""
    body = json.dumps({**HI, "max_tokens": 500, "stream": stream}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with served.raw() as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        yield connection
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "whole"])
@pytest.mark.parametrize("kind", [StuckDecoder, StuckLater], ids=["before the first token", "later"])
def test_a_client_that_leaves_ends_its_pass(
    names: ModelNames, tiny_model: Path, kind: type[StuckDecoder], stream: bool
) -> None:
    """S7: within the pass, which would never end by itself; its place is free then."""
    decoder = kind()
    with serving(names, lambda name: table_engine(tiny_model, decoder), limits=PATIENT) as served:
        with leaving(served, stream=stream):
            assert decoder.has_begun.wait(120)
        assert decoder.is_interrupted.wait(120)
        until(lambda: served.services.admission.num_taken == 0)
        assert served.client.get("/health").status_code == 200


def test_a_reader_that_takes_nothing_is_left(
    names: ModelNames, tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """S8: what waits for it is bounded, and its answer ends."""

    def engine(name: str) -> Engine:
        made = table_engine(tiny_model)
        made._model = replace(made._model, manifest=replace(made.manifest, eos_token_ids=()))
        made._encoder.context_length = 1 << 20
        return made

    with (
        caplog.at_level(logging.INFO, "edgespec"),
        serving(names, engine, limits=replace(PATIENT, reader_s=0.3), send_bytes=4096) as served,
        served.raw(4096) as connection,
    ):
        body = json.dumps({**HI, "max_tokens": 200_000, "stream": True}).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        until(lambda: "client gone" in caplog.text)
        until(lambda: served.services.admission.num_taken == 0)
        assert b"[DONE]" not in rest_of(connection)


def test_heads_and_bodies_that_never_end_are_given_up(names: ModelNames, tiny_model: Path) -> None:
    """S9: connections that send a little and stay."""
    with serving(names, lambda name: table_engine(tiny_model), limits=QUICK) as served, ExitStack() as opened:

        def send(data: bytes) -> socket.socket:
            """Connect and send at once: the time that a head has begins with the connection."""
            connection = opened.enter_context(served.raw())
            connection.sendall(data)
            return connection

        nothing = send(b"")
        head = send(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nX-A: ")
        body = send(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b'Content-Length: 100\r\n\r\n{"model"'
        )
        assert nothing.recv(4096) == b""
        assert head.recv(4096) == b""
        assert b" 408 " in body.recv(4096)
        assert served.client.get("/health").status_code == 200


def test_idle_connections_give_way_to_new_ones(names: ModelNames, tiny_model: Path) -> None:
    limits = replace(PATIENT, num_connections=4)
    with (
        serving(names, lambda name: table_engine(tiny_model), limits=limits) as served,
        ExitStack() as opened,
    ):
        silent = [opened.enter_context(served.raw()) for _ in range(20)]
        for connection in silent[1:]:
            connection.sendall(b"GET /hea")
        assert served.client.post(CHAT, json=HI).status_code == 200
        assert served.client.get("/health").status_code == 200
        until(lambda: len(served.server.server_state.connections) <= 4)
        assert rest_of(silent[0]) == b""


def test_beyond_the_bound_of_connections_one_is_told_so(names: ModelNames, tiny_model: Path) -> None:
    limits = replace(PATIENT, num_connections=3)
    sending = (
        f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n"
    )
    with (
        serving(names, lambda name: table_engine(tiny_model), limits=limits) as served,
        ExitStack() as opened,
    ):
        for _ in range(3):
            opened.enter_context(served.raw()).sendall(sending.encode())
        until(lambda: len(served.server.server_state.tasks) == 3)
        answer = served.client.get("/v1/models")
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
        assert answer.json()["error"]["message"].startswith("3 connections are open")
        assert served.client.get("/health").status_code == 200


def test_floods_of_headers_are_refused(served: Served) -> None:
    """S9"""
    with served.raw() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"X-A: b\r\n" * 9000)
        assert b" 400 " in connection.recv(4096)


def test_a_full_queue_says_when_to_come_back(names: ModelNames, tiny_model: Path) -> None:
    """S9"""
    decoder = StuckDecoder()
    limits = replace(PATIENT, num_answers=2)
    with serving(names, lambda name: table_engine(tiny_model, decoder), limits=limits) as served:
        with leaving(served, stream=True):
            assert decoder.has_begun.wait(120)
            answer = served.client.post(CHAT, json={**HI, "n": 2})
            assert answer.status_code == 429
            assert int(answer.headers["Retry-After"]) >= 1
            assert answer.json()["error"]["type"] == "rate_limit_error"
            assert served.client.get("/health").status_code == 200
        until(lambda: served.services.admission.num_taken == 0)


def _nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


NO_SYSTEM = (
    "{% for message in messages %}{% if message.role == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}{{ message.content }}{% endfor %}"
)


def test_messages_that_a_chat_template_refuses_are_a_wrong_request(names: ModelNames, tiny_model: Path) -> None:
    """At every address that takes messages, streaming too, with the words of the template and the roles."""
    asked = {**HI, "messages": [{"role": "system", "content": "Be brief."}, *HI["messages"]]}
    response = {"model": "tiny", "input": "in the", "instructions": "Be brief.", "max_output_tokens": 5}
    with serving(names, lambda name: engine_of(tiny_model, TableDecoder(tiny.VOCAB, seed=3), NO_SYSTEM)) as served:
        for path, body in ((CHAT, asked), ("/v1/responses", response), ("/tokenize", asked)):
            for stream in (False, True):
                answer = served.post(path, {**body, "stream": stream})
                error = answer.json()["error"]
                assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
                sent = "input" if path == "/v1/responses" else "messages"
                assert (error["param"], error["code"]) == (sent, "messages_refused")
                assert "refuses the conversation: System role not supported" in error["message"]
                assert "system, user" in error["message"]
        assert served.post(CHAT, HI).status_code == 200


HOSTILE_SCHEMAS: list[tuple[Any, str]] = [
    ({"type": "strin"}, "strin"),
    ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
    ({"type": "string", "pattern": "["}, "unclosed"),
    ({"type": "object", "properties": {"a": {"not": {"type": "string"}}}}, "#/properties/a"),
    ({"$ref": "https://example.com/schema.json"}, "within the schema"),
    ({"$ref": "file:///etc/passwd"}, "within the schema"),
    ({"$ref": "#/$defs/missing"}, "#/$defs/missing"),
    ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "no end"),
    ({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}, "oneOf"),
    ({"oneOf": [{"type": "object"} for _ in range(800)]}, "oneOf"),
    (_nested(300), "nested deeper"),
    ({"type": "string", "minLength": 500, "maxLength": 600}, "allow more tokens"),
    ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "nsatisfiable"),
]


@pytest.mark.parametrize(("schema", "reason"), HOSTILE_SCHEMAS)
def test_schemas_that_cannot_be_used_are_refused_with_their_reason(
    served: Served, schema: Any, reason: str
) -> None:
    """S10: the server goes on."""
    stated = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer = served.client.post(CHAT, json={**HI, "max_tokens": 40, "response_format": stated})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", "response_format")
    assert reason in error["message"]
    assert served.client.get("/health").status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize(
    "pattern", ["(a+)+" * 1000, "^((a{1000}){1000}){100}$", "(x|y|xy)*z" * 200, "^(.{0,500}x){0,50}$"]
)
def test_an_expression_that_is_much_work_holds_nobody_up(served: Served, pattern: str) -> None:
    """S10: it is refused, or its answer is made, or ends with a reason; the next one is answered."""
    stated = {"type": "json_schema", "json_schema": {"schema": {"type": "string", "pattern": pattern}}}
    answer = served.client.post(CHAT, json={**HI, "max_tokens": 200, "response_format": stated})
    assert answer.status_code in (200, 400)
    assert served.client.post(CHAT, json={**HI, "max_tokens": 5}).status_code == 200


NESTED_STARS = "\n".join(f'T{i}: T{i + 1}* "b"' for i in range(2000))
LARGE_FORMATS: list[tuple[dict[str, Any], str, str]] = [
    ({"guided_grammar": f'start: T0\n{NESTED_STARS}\nT2000: "a"'}, "2000 repetitions", "at most 500"),
    ({"guided_grammar": "start: " + "'a'* ".replace("'", '"') * 11_000}, "22001 parts", "at most 20000"),
    ({"guided_grammar": "\n".join(f"r{i} ::= r{i + 1}*" for i in range(1500))}, "1500 rules", "at most 1000"),
    ({"guided_regex": "(a*b*)*" * 10_000}, "30000 repetitions", "at most 500"),
    ({"guided_json": {"type": "string", "pattern": "(a|b)*" * 501}}, "501 repetitions", "at most 500"),
    ({"guided_json": {"properties": {f"p{i}": {} for i in range(5000)}}}, "5002 schemas", "at most 5000"),
]


@pytest.mark.parametrize(("fields", "found", "limit"), LARGE_FORMATS)
def test_formats_that_would_take_minutes_are_refused_with_the_figure_and_the_limit(
    served: Served, fields: dict[str, Any], found: str, limit: str
) -> None:
    """S10: before the library begins to work on them."""
    answer = served.client.post(CHAT, json={**HI, **fields})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, next(iter(fields)))
    assert found in error["message"]
    assert limit in error["message"]


class FailingDecoder(StuckDecoder):
    """It fails after some passes."""

    def __init__(self, num_passes: int, error: Exception) -> None:
        super().__init__()
        self._table, self._left, self._error = TableDecoder(tiny.VOCAB, seed=3), num_passes, error

    def logits(self, tokens: TokenIds, num_last: int) -> Logits:
        self._left -= 1
        if self._left < 0:
            raise self._error
        return self._table.logits(tokens, num_last)


def test_an_error_within_a_stream_is_an_event(
    names: ModelNames, tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """S12: without a traceback, which the log has for those who ask."""
    errors: list[Exception] = [EdgeSpecError("the device is gone"), RuntimeError("secret of the machine")]
    for error in errors:
        decoder = FailingDecoder(3, error)
        with serving(names, lambda name, decoder=decoder: table_engine(tiny_model, decoder)) as served:
            events = served.events(CHAT, {**HI, "max_tokens": 50})
            assert events[-1] == "[DONE]"
            told = events[-2]["error"]
            assert told["type"] == "server_error"
            assert ("the device is gone" in told["message"]) == isinstance(error, EdgeSpecError)
            assert "secret" not in told["message"]
            events = served.events("/v1/responses", {"model": "tiny", "input": SECRET})
            assert events[-1] == {"type": "error", "sequence_number": len(events) - 1, "error": told} | {
                name: told[name] for name in ("code", "message", "param")
            }
            whole = served.client.post(CHAT, json=HI)
            assert (whole.status_code, whole.json()["error"]["type"]) == (500, "server_error")
            assert served.client.get("/health").status_code == 200


def test_memory_that_is_short_is_told_with_a_time_to_come_back(names: ModelNames, tiny_model: Path) -> None:
    def refuse(name: str) -> Engine:
        raise MemoryExhausted("the model needs 8 GiB and 2 are free; close other programs")

    with serving(names, refuse) as served:
        for stream in (False, True):
            answer = served.client.post(CHAT, json={**HI, "stream": stream})
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "out_of_memory")
            assert answer.headers["Retry-After"]


def test_a_pause_is_filled_with_signs_of_life(names: ModelNames, tiny_model: Path) -> None:
    decoder = StuckDecoder()
    with (
        serving(names, lambda name: table_engine(tiny_model, decoder), limits=PATIENT) as served,
        served.client.stream("POST", CHAT, json={**HI, "stream": True}) as answer,
    ):
        lines = answer.iter_lines()
        assert next(line for line in lines if line.startswith(":")) == ": keep-alive"


def test_shutdown_lets_answers_end_and_cuts_short_what_does_not(names: ModelNames, tiny_model: Path) -> None:
    """S13: the reader of an answer that is cut short is told."""
    decoder = StuckLater()
    with serving(names, lambda name: table_engine(tiny_model, decoder), limits=PATIENT) as served:
        with served.client.stream("POST", CHAT, json={**HI, "max_tokens": 50, "stream": True}) as answer:
            assert decoder.has_begun.wait(120)
            served.server.should_exit = True
            lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
        assert lines[-1] == "data: [DONE]"
        assert json.loads(lines[-2].removeprefix("data: "))["error"]["code"] == "shutting_down"
        served.thread.join(120)
        with pytest.raises(httpx2.ConnectError):
            served.client.get("/health")


def test_logs_have_no_texts_and_no_control_characters(
    names: ModelNames, tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """S14: one line a request."""
    with (
        caplog.at_level(logging.INFO, "edgespec"),
        serving(names, lambda name: table_engine(tiny_model), key="k3y") as served,
    ):
        headers = {"Authorization": "Bearer k3y"}
        served.client.post(CHAT, json=HI, headers=headers)
        served.client.post(CHAT, json={**HI, "model": "a\x1b[31m\nb", "user": "mallory"}, headers=headers)
        served.client.get("/v1/%1b%5b31m%0aforged", headers=headers)
        served.client.get("/v1/models", headers={"Authorization": "Bearer wr0ng"})
    lines = [each.getMessage() for each in caplog.records if each.name == "edgespec.server"]
    requests = [line for line in lines if line.startswith(("POST", "GET"))]
    assert len(requests) == 4
    assert requests[0].startswith(f"POST {CHAT} 200 in ")
    assert ", tiny, 10 + 5 tokens" in requests[0]
    assert [line.split()[2] for line in requests] == ["200", "404", "404", "401"]
    for line in lines:
        assert line.isprintable()
        assert not any(word in line for word in (SECRET, "k3y", "wr0ng", "mallory"))


def test_a_port_in_use_is_told(served: Served) -> None:
    with served.raw() as connection:
        port = connection.getpeername()[1]
    with pytest.raises(EdgeSpecError, match=rf"cannot listen on port {port} .*--port") as raised:
        open_socket("127.0.0.1", port)
    assert raised.value.exit_code == 1
    for host in ("no such host.invalid", "a" * 64, "192.0.2.1"):  # the last is of no machine
        with pytest.raises(EdgeSpecError, match=rf"--host {re.escape(host)} is not an address of this machine"):
            open_socket(host, 0)


def test_formats_that_take_long_hold_nobody_up(names: ModelNames, tiny_model: Path) -> None:
    """More of them than asyncio has threads."""
    engine, num_begun, may_end = table_engine(tiny_model), Semaphore(0), Event()
    stream = engine.stream

    def slow(*given: Any, **options: Any) -> Any:
        if options.get("response_format"):
            num_begun.release()
            assert may_end.wait(60)
        return stream(*given, **options)

    engine.stream = slow  # type: ignore[method-assign]
    prompt = {"model": "tiny", "prompt": "a", "max_tokens": 4}
    with serving(names, lambda name: engine) as served:
        with ThreadPoolExecutor(40) as clients:
            try:
                asked = {**prompt, "guided_regex": "[ab]"}
                slow_ones = [clients.submit(served.post, "/v1/completions", asked) for _ in range(40)]
                assert all(num_begun.acquire(timeout=60) for _ in range(40))
                assert served.post("/v1/completions", prompt).status_code == 200
            finally:
                may_end.set()
        assert {each.result().status_code for each in slow_ones} == {200}
