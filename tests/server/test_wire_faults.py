"""What comes over the wire that is no plain request: odd JSON, odd HTTP, and clients that leave in odd ways."""

import json
import logging
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st
from served import Served, home_with, rest_of, serving, table_engine
from stuck import StuckDecoder
from until import until

from edgespec.errors import FormatError
from edgespec.server.errors import explain_format
from edgespec.server.limits import Limits
from edgespec.server.model_names import ModelNames
from edgespec.server.protocol import ChatRequest, CompletionRequest, ResponsesRequest

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
HI: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "in the an"}], "max_tokens": 5}
PATIENT = Limits(drain_s=0.3, body_bytes=4 << 20, tokenize_length=300_000)
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
JSON = {"Content-Type": "application/json"}


@pytest.fixture
def names(tiny_model: Path, tmp_path: Path) -> ModelNames:
    return ModelNames(home_with(tmp_path, tiny=tiny_model))


@pytest.fixture(scope="module")
def served(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    names = ModelNames(home_with(tmp_path_factory.mktemp("home"), tiny=tiny_model))
    with serving(names, lambda name: table_engine(tiny_model), limits=PATIENT, send_bytes=4096) as found:
        yield found


def error_of(served: Served, path: str, body: dict[str, Any] | bytes, **headers: str) -> dict[str, Any]:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = served.client.post(path, content=content, headers={**JSON, **headers})
    assert answer.status_code == 400, answer.text
    found: dict[str, Any] = answer.json()["error"]
    return found


def head_of(path: str, size: int, *lines: str) -> bytes:
    first = [
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {size}",
    ]
    return "\r\n".join([*first, *lines, "", ""]).encode()


def ask_raw(served: Served, *parts: bytes) -> bytes:
    """What comes back until the server closes the connection."""
    with served.raw() as connection:
        for part in parts:
            connection.sendall(part)
        found = b""
        while part := connection.recv(1 << 16):
            found += part
        return found


@pytest.mark.parametrize(
    "body",
    [
        b'{"model": "tiny", "max_tokens": 3, "messages": [{"role": "user", "content": "a"}], "max_tokens": 4}',
        b'{"model": "tiny", "messages": [{"role": "user", "content": "a", "role": "system"}]}',
        b'{"model": "tiny", "messages": [{"role": "user", "content": "a"}], "metadata": {"x": {"y": 1, "y": 1}}}',
        b'{"model": "tiny", "messages": [{"role": "user", "content": "a"}], "m\\u006fdel": "tiny"}',
    ],
    ids=["a field", "a message", "an unknown field", "an escaped name"],
)
def test_names_that_stand_twice_are_refused(served: Served, body: bytes) -> None:
    """A proxy on the way may read the first where this server would read the last."""
    assert "stands twice" in error_of(served, CHAT, body)["message"]


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999", "0x1", "01", "'a'"])
def test_numbers_that_json_lacks_are_refused(served: Served, value: str) -> None:
    for field in ("temperature", "seed", "no_such_field"):
        body = json.dumps(HI).removesuffix("}") + f', "{field}": {value}}}'
        assert "JSON" in error_of(served, CHAT, body.encode())["message"]


def test_seeds_beyond_64_bits_are_other_seeds(served: Served) -> None:
    def text(seed: int) -> str:
        return str(served.chat(temperature=1.5, seed=seed, max_tokens=20)["choices"][0]["message"]["content"])

    assert text(7) == text(7 + 2**64) == text(7 - 2**70)
    assert text(7) != text(8)


@pytest.mark.parametrize(
    ("path", "field", "param"),
    [
        (CHAT, {"min_p": -1}, "min_p"),
        (CHAT, {"temperature": 1e300}, "temperature"),
        (CHAT, {"logit_bias": {"999999": 1}}, "logit_bias"),
        (CHAT, {"speculation": {"length": 0}}, "speculation"),
        (CHAT, {"max_completion_tokens": -2}, "max_completion_tokens"),
        (CHAT, {"speculation": {"x" * 9000: 0}}, "speculation"),
        (CHAT, {"prediction": {"type": "audio", "content": "x"}}, "prediction"),
        (CHAT, {"stream_options": [1], "stream": True}, "stream_options"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages"),
        (CHAT, {"messages": [HI["messages"][0]] * 10_001}, "messages"),
        (COMPLETIONS, {"prompt": ["a"] * 5, "n": 5}, "prompt"),
        (COMPLETIONS, {"prompt": [99999]}, "prompt"),
        (CHAT, {"tools": TOOLS, "tool_choice": "required", "max_tokens": 2}, "tools"),
        (CHAT, {"tools": TOOLS, "response_format": {"type": "regex", "regex": "a"}}, "tools"),
        (COMPLETIONS, {"prompt": [-1]}, "prompt"),
        (CHAT, {"logit_bias": {str(i): -100 for i in range(tiny.VOCAB)}}, "logit_bias"),
        (COMPLETIONS, {"prompt": [1] * ((1 << 20) + 1)}, "prompt"),
        (RESPONSES, {"conversation": "conv_1"}, "conversation"),
        (RESPONSES, {"conversation": {"id": "conv_1"}}, "conversation"),
        (RESPONSES, {"background": True}, "background"),
        (RESPONSES, {"prompt": {"id": "pmpt_1"}}, "prompt"),
        (RESPONSES, {"metadata": {"a": {"b": 1}}}, "metadata"),
        (RESPONSES, {"metadata": {str(i): "x" for i in range(17)}}, "metadata"),
        (RESPONSES, {"metadata": {"a": "x" * 513}}, "metadata"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
    ],
)
def test_refusals_name_the_field(served: Served, path: str, field: dict[str, Any], param: str) -> None:
    base = {CHAT: HI, COMPLETIONS: {"model": "tiny"}, RESPONSES: {"model": "tiny", "input": "a"}}
    assert error_of(served, path, {**base.get(path, {"model": "tiny"}), **field})["param"] == param


SCHEMA = {"type": "json_schema", "name": "f"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "field", "param", "said"),
    [
        (RESPONSES, {"input": []}, "input", "input has nothing to answer"),
        (RESPONSES, {"input": "a " * 5000}, "input", "tokens do not fit the context"),
        (
            RESPONSES,
            {"instructions": "re", "input": [{"role": "bot", "content": "a"}]},
            "input",
            "input[0] has the role",
        ),
        (
            RESPONSES,
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input",
            "input[0] has a part",
        ),
        (
            RESPONSES,
            {"input": [{"type": "web_search_call"}]},
            "input",
            "input[0] is of the type 'web_search_call'",
        ),
        (RESPONSES, {"input": [{"content": "a"}]}, "input", "input[0] is a message without a role"),
        (
            RESPONSES,
            {"input": [{"type": "item_reference", "id": "msg_1"}]},
            "input",
            "input[0] is of the type 'item_reference', and nothing is stored here; send the item itself",
        ),
        (
            RESPONSES,
            {"input": [{"type": "function_call", "call_id": "c"}]},
            "input",
            "input[0] is a function_call without",
        ),
        (
            RESPONSES,
            {"input": [{"type": "function_call_output", "call_id": "c", "output": "a"}]},
            "input",
            "input[0] has the call_id 'c', which no function_call before it has (there are: none)",
        ),
        (RESPONSES, {"text": {"format": SCHEMA}}, "text.format", "text.format has no schema"),
        (RESPONSES, {"text": {"format": {"type": "xml"}}}, "text.format", "text.format has the type 'xml'"),
        (
            RESPONSES,
            {"text": {"format": {**SCHEMA, "schema": {"not": {}}}}},
            "text.format",
            "",
        ),
        (
            RESPONSES,
            {"text": {"format": {**SCHEMA, "schema": {"const": "a" * 99}}}, "max_output_tokens": 3},
            "text.format",
            "matches its text.format has",
        ),
        (COMPLETIONS, {"prompt": "a " * 5000}, "prompt", "tokens do not fit the context"),
        (CHAT, {"messages": [{"role": "bot", "content": "a"}]}, "messages", "messages[0] has the role"),
        (CHAT, {"response_format": {"type": "xml"}}, "response_format", "response_format has the type 'xml'"),
    ],
)
def test_refusals_have_the_names_that_the_client_sent(
    served: Served, path: str, field: dict[str, Any], param: str, said: str, stream: bool
) -> None:
    base = {CHAT: HI, COMPLETIONS: {"model": "tiny"}, RESPONSES: {"model": "tiny", "input": "a"}}
    error = error_of(served, path, {**base[path], **field, "stream": stream})
    assert error["param"] == param
    assert said in error["message"]
    for other in {"messages", "response_format", "input", "text.format"} - {param, "messages"}:
        assert other not in error["message"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("guided_json", {"not": {}}),
        ("guided_json", '{"const": "aaaaaaaaaaaaaaaaaaaaaaaaaa"}'),
        ("guided_json", "{"),
        ("json_schema", {"not": {}}),
        ("guided_regex", "(a"),
        ("guided_choice", ["aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"]),
        ("guided_grammar", "start: b"),
        ("grammar", "root ::= b"),
        ("structured_outputs.json", '{"const": "aaaaaaaaaaaaaaaaaaaaaaaaaa"}'),
        ("structured_outputs.choice", []),
        ("structured_outputs", {"structural_tag": "{}"}),
    ],
)
def test_formats_of_other_servers_are_refused_by_their_own_names(
    served: Served, path: str, field: str, value: Any
) -> None:
    base = HI if path == CHAT else {"model": "tiny", "prompt": "a"}
    outer, _, inner = field.partition(".")
    error = error_of(served, path, {**base, "max_tokens": 3, outer: {inner: value} if inner else value})
    assert error["param"] == field
    assert "response_format" not in error["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_json": {}, "json_schema": {"type": "object"}},
        {"guided_grammar": 'start: "a"', "grammar": 'start: "b"'},
        {"guided_choice": ["a"], "grammar": 'start: "b"'},
    ],
)
def test_two_formats_are_refused_by_their_names(served: Served, fields: dict[str, Any]) -> None:
    error = error_of(served, CHAT, {**HI, **fields})
    assert error["param"] == [*fields][1]
    assert all(name in error["message"] for name in fields)


@pytest.mark.parametrize(
    ("path", "fields", "param", "said"),
    [
        (CHAT, {**HI, "speculation": {"length": 25}}, "speculation", "speculation.length is 25"),
        ("/detokenize", {"tokens": [-1]}, "tokens", "tokens has the token -1"),
        (CHAT, {**HI, "guided_choice": []}, "guided_choice", "guided_choice has no texts"),
        (CHAT, {"model": "tiny"}, "messages", "messages is missing"),
        ("/v1/completions", {"model": "tiny"}, "prompt", "prompt is missing"),
        ("/v1/responses", {"model": "tiny"}, "input", "input is missing"),
    ],
)
def test_refusals_name_the_fields_that_were_sent(
    served: Served, path: str, fields: dict[str, Any], param: str, said: str
) -> None:
    error = error_of(served, path, fields)
    assert error["param"] == param
    assert error["message"].startswith(said)


def test_names_that_a_schema_has_are_not_changed() -> None:
    for message in ("the schema refers at /x to '#/response_format'", "a 'response_format' is no type"):
        assert str(explain_format(FormatError(message), "text.format")) == message
    found = explain_format(FormatError("the response_format has 'response_format'"), "text.format")
    assert (str(found), found.param) == ("the text.format has 'response_format'", "text.format")


def test_stream_options_mean_nothing_without_a_stream(served: Served) -> None:
    assert "usage" in served.chat(stream_options={"include_usage": False})


def test_compressed_bodies_are_refused_in_words(served: Served) -> None:
    answer = served.client.post(CHAT, content=b"\x1f\x8b", headers={**JSON, "Content-Encoding": "gzip"})
    assert answer.status_code == 415
    assert "compressed" in answer.json()["error"]["message"]


def test_clients_that_send_too_much_read_why(names: ModelNames, tiny_model: Path) -> None:
    """Also those that send all of it before they read."""
    limits = Limits(drain_s=0.3, body_bytes=4 << 20)
    with serving(names, lambda name: table_engine(tiny_model), limits=limits) as served:
        large = b"x" * (15 << 20)
        assert b" 413 " in ask_raw(served, head_of(CHAT, len(large)), large)
        chunked = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        chunks = b"100000\r\n" + b"x" * (1 << 20) + b"\r\n"
        sent = [chunked + b"Transfer-Encoding: chunked\r\n\r\n", chunks * 12, b"0\r\n\r\n"]
        assert b" 413 " in ask_raw(served, *sent)
        asking = head_of(CHAT, len(large), "Expect: 100-continue")
        assert ask_raw(served, asking).startswith(b"HTTP/1.1 413 ")


def test_texts_that_are_only_counted_have_a_bound(served: Served) -> None:
    answer = served.post("/tokenize", {"model": "tiny", "content": "a" * 300_001})
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_large")


SCALARS = (
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["", "a", "in the an", "<|im_end|>", "user", "text", "none", "auto", "suffix", "\0", "é"])
)  # fmt: skip
NAMES = sorted({each.name for kind in (ChatRequest, CompletionRequest, ResponsesRequest) for each in fields(kind)})
INNER = st.sampled_from(
    [*NAMES, "role", "content", "type", "text", "drafter", "length", "off", "format", "1", "a"]
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(INNER, inner, max_size=3), max_leaves=8
)


@given(
    st.sampled_from([CHAT, COMPLETIONS, RESPONSES]), st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=3)
)
def test_any_fields_are_answered_or_refused(served: Served, path: str, more: dict[str, Any]) -> None:
    base = {CHAT: HI, COMPLETIONS: {"model": "tiny", "prompt": "in"}, RESPONSES: {"model": "tiny", "input": "in"}}
    answer = served.post(path, {**base[path], **more, "max_tokens": 2, "max_output_tokens": 2})
    assert answer.status_code in (200, 400, 404), answer.text
    if answer.status_code != 200:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("path", ["/v1/models/", "/v1/chat/completions/", "/v1", "/v1/nope", "/V1/models"])
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
def test_unknown_addresses_are_not_found_and_lead_nowhere(served: Served, path: str, method: str) -> None:
    if (method, path) in [("POST", "/v1/models/"), ("OPTIONS", "/v1/models/")]:
        return  # the address of a model, which takes no such method
    answer = served.client.request(method, path, headers=JSON)
    assert answer.status_code == 404
    message = answer.json()["error"]["message"]
    assert "/v1/models/NAME" in message
    assert "{" not in message


def test_wrong_methods_are_told_the_right_ones(served: Served) -> None:
    for method, path, allowed in (
        ("GET", CHAT, {"POST"}), ("OPTIONS", CHAT, {"POST"}), ("HEAD", CHAT, {"POST"}),
        ("PUT", RESPONSES, {"POST"}),
        ("POST", "/v1/models", {"GET", "HEAD"}), ("DELETE", "/v1/models/tiny", {"GET", "HEAD"}),
    ):  # fmt: skip
        answer = served.client.request(method, path)
        assert answer.status_code == 405
        assert set(answer.headers["Allow"].split(", ")) == allowed
    assert served.client.head("/v1/models").status_code == 200


def test_model_names_with_slashes_are_compared_and_not_opened(served: Served) -> None:
    for name in ("a%2Fb", "..%2Ftiny", "tiny%2F", "%2e%2e%2ftiny", "%00", "%ff"):
        answer = served.client.get(f"/v1/models/{name}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert served.client.get("/v1/models/%74iny").json()["id"] == "tiny"


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n",
        b"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n123456",
        b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-A: " + b"a" * 40_000,
    ],
    ids=["tls", "no host", "two hosts", "two lengths", "a negative length", "gzip", "a bad chunk", "a long head"],
)
def test_what_is_no_http_is_refused_in_the_shape_of_all_refusals(served: Served, request_bytes: bytes) -> None:
    head, _, body = ask_raw(served, request_bytes).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"application/json" in head
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("http://localhost/health", 200), ("HTTP://127.0.0.1:80/v1/models", 200), ("http://localhost", 200),
        ("http://evil.example/health", 403), ("http://localhost@evil.example/health", 403),
        ("http:///health", 403), ("http://evil.example/v1/../health", 403),
    ],
)  # fmt: skip
def test_a_whole_address_is_asked_for_by_its_own_host(served: Served, target: str, status: int) -> None:
    """The host in the first line decides whether a request is answered, not the Host header (RFC 9112, 3.2.2)."""
    asked = f"GET {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    assert ask_raw(served, asked.encode()).startswith(f"HTTP/1.1 {status} ".encode())


def test_bytes_behind_a_broken_stream_end_it(served: Served) -> None:
    body = json.dumps({**HI, "max_tokens": 2, "stream": True}).encode()
    found = ask_raw(served, head_of(CHAT, len(body)) + body + b"\x00\x01 no request\r\n\r\n")
    assert found.startswith(b"HTTP/1.1 ")
    assert served.client.get("/health").status_code == 200


def in_chunks(body: bytes, size: int) -> bytes:
    """A request whose body comes in chunks of so many bytes."""
    chunks = (body[at : at + size] for at in range(0, len(body), size))
    framed = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    lines = "Host: localhost", "Content-Type: application/json", "Transfer-Encoding: chunked", "Connection: close"
    return "\r\n".join([f"POST {CHAT} HTTP/1.1", *lines, "", ""]).encode() + framed + b"0\r\n\r\n"


def test_a_body_may_come_in_small_chunks_but_not_in_a_hundred_thousand(served: Served) -> None:
    """Each takes the time of all clients: a million of them took 14 s."""
    body = json.dumps({**HI, "user": "a" * 500}).encode()
    assert ask_raw(served, in_chunks(body, 1)).startswith(b"HTTP/1.1 200 ")
    large = json.dumps({**HI, "user": "a" * 2_000_000}).encode()
    assert ask_raw(served, in_chunks(large, 64)).startswith(b"HTTP/1.1 200 ")
    with served.raw() as connection, suppress(OSError):  # it may be closed while this is sent
        connection.sendall(in_chunks(large[:100_000], 1))
    with served.raw() as connection:
        connection.sendall(in_chunks(large[:5_000], 1).removesuffix(b"0\r\n\r\n"))
        found = json.loads(rest_of(connection).partition(b"\r\n\r\n")[2])
        assert "in too small parts" in found["error"]["message"]


def test_a_byte_order_mark_before_a_body_is_no_part_of_it(served: Served) -> None:
    body = b"\xef\xbb\xbf" + json.dumps(HI).encode()
    assert served.client.post(CHAT, content=body, headers=JSON).status_code == 200


def test_of_many_ids_of_calls_some_are_named(served: Served) -> None:
    calls = [
        {"id": f"call_{i}", "type": "function", "function": {"name": "f", "arguments": "{}"}} for i in range(9000)
    ]
    messages = [{"role": "assistant", "tool_calls": calls}, {"role": "tool", "content": "", "tool_call_id": "x"}]
    assert len(error_of(served, CHAT, {**HI, "messages": messages})["message"]) < 1000


def test_a_name_that_the_template_has_is_refused_with_its_field(served: Served) -> None:
    found = error_of(served, CHAT, {**HI, "chat_template_kwargs": {"messages": []}})
    assert (found["param"], found["message"].split()[0]) == ("chat_template_kwargs", "chat_template_kwargs")


def test_a_client_may_wait_to_be_asked_for_its_body(served: Served) -> None:
    body = json.dumps(HI).encode()
    with served.raw() as connection:
        connection.sendall(head_of(CHAT, len(body), "Expect: 100-continue", "Connection: close"))
        assert connection.recv(4096).startswith(b"HTTP/1.1 100 ")
        connection.sendall(body)
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200 ")


def test_requests_in_one_write_are_answered_in_their_order(served: Served) -> None:
    bodies = [json.dumps({**HI, "max_tokens": number}).encode() for number in (2, 5, 3)]
    last = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    found = ask_raw(served, b"".join(head_of(CHAT, len(body)) + body for body in bodies) + last)
    assert found.count(b"HTTP/1.1 200 ") == 4
    counts = [int(part.partition(b",")[0]) for part in found.split(b'"completion_tokens":')[1:]]
    assert counts == [2, 5, 3]
    assert found.endswith(b'{"status":"ok"}')


@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "whole"])
def test_a_client_that_closes_its_side_counts_as_gone(names: ModelNames, tiny_model: Path, stream: bool) -> None:
    """Nothing tells it from one that has left, whose pass must not go on."""
    decoder = StuckDecoder()
    with serving(names, lambda name: table_engine(tiny_model, decoder), limits=PATIENT) as served:
        with served.raw() as connection:
            body = json.dumps({**HI, "stream": stream}).encode()
            connection.sendall(head_of(CHAT, len(body)) + body)
            assert decoder.has_begun.wait(120)
            connection.shutdown(socket.SHUT_WR)
            assert decoder.is_interrupted.wait(120)
            while connection.recv(4096):
                pass  # the role, which a stream begins with
        until(lambda: served.services.admission.num_taken == 0)


def test_a_client_that_never_reads_a_whole_answer_is_left(
    names: ModelNames, tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The rest of a response waits for it no longer than limits.reader_s."""
    limits = replace(PATIENT, reader_s=0.3)
    with (
        caplog.at_level(logging.INFO, "edgespec"),
        serving(names, lambda name: table_engine(tiny_model), limits=limits, send_bytes=4096) as served,
        served.raw(4096) as connection,
    ):
        body = json.dumps({"model": "tiny", "content": "a b " * 70_000}).encode()
        connection.sendall(head_of("/tokenize", len(body)) + body)
        own = connection.getsockname()
        until(lambda: "POST /tokenize 200" in caplog.text)
        until(lambda: own not in [each.client for each in list(served.server.server_state.connections)])
        assert not rest_of(connection).endswith(b"}")


def test_metrics_count_answers_that_were_cut_short(names: ModelNames, tiny_model: Path) -> None:
    def counted(name: str) -> int:
        lines = served.client.get("/metrics").text.splitlines()
        found = [line for line in lines if line.startswith(f'edgespec_{name}_total{{model="tiny"}}')]
        return int(found[0].rsplit(" ", 1)[1]) if found else 0

    with serving(names, lambda name: table_engine(tiny_model), limits=PATIENT) as served:
        with served.client.stream("POST", CHAT, json={**HI, "max_tokens": 600, "stream": True}) as answer:
            lines = answer.iter_lines()
            assert sum(1 for _, line in zip(range(40), lines, strict=False) if line)
        until(lambda: served.services.admission.num_taken == 0)
        assert counted("completion_tokens") > 0
        assert counted("prompt_tokens") == served.chat()["usage"]["prompt_tokens"]


def test_responses_give_logprobs_where_they_are_included(served: Served) -> None:
    fields = {"model": "tiny", "input": "in the an", "max_output_tokens": 3}
    found = served.post(RESPONSES, {**fields, "include": ["message.output_text.logprobs"]}).json()
    assert len(found["output"][0]["content"][0]["logprobs"]) == 3
    assert served.post(RESPONSES, fields).json()["output"][0]["content"][0]["logprobs"] == []
    assert found["id"].startswith("resp_")
    assert found["output"][0]["id"].startswith("msg_")


def test_the_log_says_that_the_server_ends(
    names: ModelNames, tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.INFO, "edgespec.server"),
        serving(names, lambda name: table_engine(tiny_model, StuckDecoder()), limits=PATIENT) as served,
        served.client.stream("POST", CHAT, json={**HI, "stream": True}) as answer,
    ):
        served.server.should_exit = True
        answer.read()
    lines = [each.getMessage() for each in caplog.records]
    assert any(line.startswith("shutting down; requests being answered: 1") for line in lines)
    assert not any("failed" in line for line in lines)
