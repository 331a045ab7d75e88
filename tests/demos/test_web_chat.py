"""The demo that serves a chat page: its answers, the requests that it refuses, and browsers that leave."""

import http.client
import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import chromium
import pytest
import tiny
import web_chat
from scripted import scripted_engine
from stuck import StuckDecoder, engine_of
from table_decoder import TableDecoder
from web_chat import MAX_BYTES, PAGE, ChatServer, runs

from edgespec import Chunk, load

QUESTION = [{"role": "user", "content": "the in the"}]


@contextmanager
def serving(engine: Any) -> Iterator[ChatServer]:
    """Serve an engine, and check that no thread is left behind."""
    with ChatServer(engine) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
    assert [each.name for each in threading.enumerate() if "web chat" in each.name] == []


@pytest.fixture(autouse=True)
def short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_chat, "MAX_TOKENS", 60)


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[ChatServer]:
    engine = engine_of(tiny_model, TableDecoder(tiny.VOCAB, seed=3, context_length=tiny.CONTEXT))
    with serving(engine) as server:
        yield server


def ask(server: ChatServer, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, str, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=120)
    connection.request(method, f"/{server.token}{path}", body, headers)
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    return response.status, text, response.headers


def chat(server: ChatServer, messages: Any, **headers: str) -> tuple[int, str, Any]:
    body = json.dumps({"messages": messages}).encode()
    return ask(server, "POST", "/chat", body, **{"Content-Type": "application/json", **headers})


def test_answer_is_the_engines_own(server: ChatServer) -> None:
    status, text, _ = chat(server, QUESTION)
    lines = [json.loads(line) for line in text.splitlines()]
    whole = server.engine.generate(QUESTION, max_tokens=60)
    assert status == 200
    assert "".join(piece for line in lines for piece, _ in line["runs"]) == whole.text
    assert lines[-1]["finish_reason"] == whole.finish_reason
    assert lines[-1]["stats"]["num_emitted"] == len(whole.token_ids)
    assert [line for line in lines[:-1] if "stats" in line] == []


def test_an_answer_that_repeats_itself_is_ended(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web_chat, "MAX_TOKENS", 3000)
    engine = scripted_engine(tiny_model, tmp_path, lambda prompt: "abcdefghijklmnopq " * 150)
    with engine, serving(engine) as server:
        lines = [json.loads(line) for line in chat(server, QUESTION)[1].splitlines()]
    assert lines[-1]["finish_reason"] == "loop"
    assert sum(len(line["runs"]) for line in lines) < 1000


def test_page_loads_nothing_from_elsewhere_and_never_parses_messages(server: ChatServer) -> None:
    status, text, headers = ask(server, "GET", "/")
    (nonce,) = set(re.findall(r'nonce="([^"]+)"', text))
    assert status == 200
    assert f"script-src 'nonce-{nonce}'" in headers["Content-Security-Policy"]
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert nonce not in ask(server, "GET", "/")[1]
    source = PAGE.read_text(encoding="utf-8")
    assert re.findall(r"https?://|//\w+\.|innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", source) == []


def test_about_names_the_model(server: ChatServer) -> None:
    status, text, _ = ask(server, "GET", "/about")
    assert (status, json.loads(text)) == (200, {"model": "tiny", "context_length": tiny.CONTEXT})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("Host", "evil.example"),
        ("Host", "127.0.0.1"),
        ("Host", "evil.example:PORT"),
        ("Host", "127.0.0.1:PORT.evil.example"),
        ("Origin", "http://evil.example"),
        ("Origin", "null"),
        ("Origin", "https://127.0.0.1:PORT"),
        ("Origin", "http://127.0.0.1"),
        ("Origin", "http://127.0.0.1:1"),
    ],
)
def test_pages_of_others_are_refused(server: ChatServer, name: str, value: str) -> None:
    value = value.replace("PORT", str(server.server_port))
    for method, path in (("GET", "/"), ("GET", "/about"), ("POST", "/chat"), ("GET", "/other")):
        assert ask(server, method, path, b"{}", **{name: value})[0] == 403, path


def test_an_address_without_its_token_is_refused(server: ChatServer) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=120)
    wrong = server.token[:-1] + ("a" if server.token[-1] != "a" else "b")
    for path in (
        "/",
        "/about",
        "/chat",
        f"/{wrong}/",
        f"/{wrong}/about",
        f"/{server.token[:-1]}/",
    ):
        for method in ("GET", "POST"):
            connection.request(method, path)
            response = connection.getresponse()
            assert (response.status, server.token in response.read().decode()) == (403, False), path
            connection.close()
    assert ask(server, "GET", "/about")[0] == 200


def test_a_browser_that_still_sends_gets_to_know_why_it_was_refused(server: ChatServer) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "the " * (MAX_BYTES // 2)}]}).encode()
    with socket.create_connection(server.server_address, timeout=120) as raw:
        raw.sendall(
            f"POST /{server.token}/chat HTTP/1.1\r\nHost: {server.hosts[0]}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n".encode()
        )
        assert raw.recv(12) == b"HTTP/1.0 413"
        raw.sendall(body)
        raw.shutdown(socket.SHUT_WR)
        assert b"too long" in raw.makefile("rb").read()


def test_two_hosts_or_none_are_refused(server: ChatServer) -> None:
    own = f"Host: {server.hosts[0]}\r\n"
    for hosts in ("", own + own, own + "Host: evil.example\r\n"):
        with socket.create_connection(server.server_address, timeout=120) as raw:
            raw.sendall(f"GET /{server.token}/about HTTP/1.0\r\n{hosts}\r\n".encode())
            assert raw.makefile("rb").readline().split()[1] == b"403", hosts


@pytest.mark.parametrize("host", [0, 1])
def test_its_own_page_is_served(server: ChatServer, host: int) -> None:
    own = server.hosts[host]
    assert chat(server, QUESTION, Host=own, Origin=f"http://{own}")[0] == 200


@pytest.mark.parametrize(
    ("status", "body", "headers"),
    [
        (415, b'{"messages": []}', {"Content-Type": "text/plain"}),
        (413, b"", {"Content-Length": str(MAX_BYTES + 1)}),
        (413, b"", {"Content-Length": "-1"}),
        (413, b"", {"Content-Length": "²"}),
        (400, b"[1]", {}),
        (400, b"{", {}),
        (400, b"[" * 100_000, {}),
        (400, b"\xff\xff", {}),
        (400, b'{"messages": 5}', {}),
        (400, b'{"messages": [{"role": "wizard", "content": "x"}]}', {}),
        (400, b'{"messages": [{"role": "user", "content": 5}]}', {}),
        (400, b'{"messages": []}', {}),
        (400, json.dumps({"messages": [{"role": "user", "content": "the in " * 5000}]}).encode(), {}),
    ],
)
def test_malformed_requests_are_refused(
    server: ChatServer, status: int, body: bytes, headers: dict[str, str]
) -> None:
    found, text, _ = ask(server, "POST", "/chat", body, **{"Content-Type": "application/json", **headers})
    assert (found, bool(text)) == (status, True)
    assert chat(server, QUESTION)[0] == 200


@pytest.mark.parametrize(("method", "path"), [("GET", "/chat"), ("GET", "/../README.md"), ("POST", "/")])
def test_nothing_else_is_there(server: ChatServer, method: str, path: str) -> None:
    assert ask(server, method, path)[0] == 404


def begin(server: ChatServer) -> socket.socket:
    raw = socket.create_connection(server.server_address, timeout=120)
    body = json.dumps({"messages": QUESTION})
    raw.sendall(
        f"POST /{server.token}/chat HTTP/1.1\r\nHost: {server.hosts[0]}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
    )
    return raw


def test_browser_that_leaves_ends_its_answer_within_a_pass(tiny_model: Path) -> None:
    decoder = StuckDecoder()
    with serving(engine_of(tiny_model, decoder)) as server:
        raw = begin(server)
        assert decoder.has_begun.wait(120)
        assert not decoder.is_interrupted.is_set()
        raw.close()
        assert decoder.is_interrupted.wait(120)


def test_closing_ends_answers_and_leaves_no_thread(tiny_model: Path) -> None:
    decoder = StuckDecoder()
    with serving(engine_of(tiny_model, decoder)) as server:
        raw, silent = begin(server), socket.create_connection(server.server_address)
        assert decoder.has_begun.wait(120)
    assert decoder.is_interrupted.is_set()
    assert raw.recv(1 << 16).startswith(b"HTTP/1.0 200")
    raw.close()
    silent.close()


@pytest.mark.parametrize("port", ["99999", "taken"])
def test_unusable_port_is_reported(
    server: ChatServer, port: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    port = port.replace("taken", str(server.server_port))
    monkeypatch.setattr(web_chat, "load", lambda model, report: nullcontext(server.engine))
    monkeypatch.setattr("sys.argv", ["web_chat.py", "--port", port])
    assert web_chat.main() == 1
    assert f"cannot use port {port}" in capsys.readouterr().err


def test_runs_say_what_was_drafted(tiny_model: Path) -> None:
    with load(tiny_model, drafter="ngram", draft_length=3) as engine:
        chunks = list(engine.stream("the in the an the in the an", max_tokens=80))
        coloured = [runs(engine, chunk) for chunk in chunks]
    assert ["".join(text for text, _ in each) for each in coloured] == [chunk.text for chunk in chunks]
    for chunk, each in zip(chunks, coloured, strict=True):
        assert {origin for _, origin in each} <= set(chunk.origins) | {"target"}
    assert {origin for each in coloured for _, origin in each} == {"target", "ngram"}


class ScriptedAnswer:
    """An answer that would do harm if the page parsed it."""

    def __init__(self, texts: list[str]) -> None:
        self.is_cancelled = threading.Event()
        self._texts = texts

    def __enter__(self) -> "ScriptedAnswer":
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def __iter__(self) -> Iterator[Chunk]:
        for text in self._texts:
            yield Chunk(text=text, token_ids=(1,), origins=("target",))
        self.is_cancelled.wait(120)

    def cancel(self) -> None:
        self.is_cancelled.set()


class WholeAnswer(ScriptedAnswer):
    """An answer that ends by itself."""

    def __init__(self, chunks: list[Any]) -> None:
        super().__init__([])
        self._all = chunks

    def __iter__(self) -> Iterator[Any]:
        yield from self._all


@pytest.mark.slow
@pytest.mark.skipif(chromium.PROGRAM is None, reason="needs Chromium on the PATH (Debian: chromium)")
def test_page_in_a_browser_shows_markup_as_text_and_stops(tmp_path: Path) -> None:
    markup = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"
    answer = ScriptedAnswer(["see: ", markup])
    scripted = SimpleNamespace(
        manifest=SimpleNamespace(name="<b>scripted</b>"),
        context_length=100,
        model_sampling=None,
        stream=lambda *_, **__: answer,
    )
    with serving(scripted) as server, chromium.browser(tmp_path) as page:
        page.open(server.url)
        page.wait_for("document.title === '<b>scripted</b>'")
        page.type(f"{markup}\n")
        page.wait_for("document.querySelector('.assistant')?.textContent.includes('</script>')")
        assert page.evaluate("document.querySelector('.user').textContent") == markup
        assert page.evaluate("document.querySelector('.assistant').textContent") == "see: " + markup
        assert page.evaluate("document.querySelectorAll('#log img, #log script').length") == 0
        assert not answer.is_cancelled.is_set()
        page.evaluate("document.querySelector('#stop').click()")
        assert answer.is_cancelled.wait(120)
        page.wait_for("document.querySelector('.note').textContent === 'stopped'")
        assert page.evaluate("[document.title, document.querySelector('#send').hidden]") == [
            "<b>scripted</b>",
            False,
        ]


@pytest.mark.slow
@pytest.mark.skipif(chromium.PROGRAM is None, reason="needs Chromium on the PATH (Debian: chromium)")
def test_a_browser_that_has_not_the_whole_address_gets_no_page(server: ChatServer, tmp_path: Path) -> None:
    with chromium.browser(tmp_path) as page:
        page.open(f"http://127.0.0.1:{server.server_port}/")
        assert page.evaluate("document.querySelector('form') === null")
        assert page.evaluate("fetch('/about').then(found => found.status)") == 403
        page.open(server.url)
        page.wait_for("document.querySelector('form') !== null")


@pytest.mark.slow
@pytest.mark.skipif(chromium.PROGRAM is None, reason="needs Chromium on the PATH (Debian: chromium)")
def test_page_in_a_browser_shows_code_keeps_the_chat_over_a_reload_and_gives_a_refused_message_back(
    tiny_model: Path, tmp_path: Path
) -> None:
    code = "See:\n```python\nx = 1\n```\nDone."
    stats = SimpleNamespace(as_dict=lambda: {"tokens_per_pass": 1.0, "acceptance_rate": None})
    chunks = [Chunk(text=code, token_ids=(1,), origins=("target",))]
    last = SimpleNamespace(text="", token_ids=(), origins=(), finish_reason="stop", stats=stats)
    scripted = SimpleNamespace(
        manifest=SimpleNamespace(name="scripted"),
        context_length=100,
        model_sampling=None,
        stream=lambda *_, **__: WholeAnswer([*chunks, last]),
    )
    with serving(scripted) as server, chromium.browser(tmp_path) as page:
        page.open(server.url)
        page.wait_for("document.title === 'scripted'")
        page.type("code?\n")
        page.wait_for("document.querySelector('.note')?.textContent.includes('tokens per pass')")
        assert page.evaluate("document.querySelector('.assistant pre').textContent") == "x = 1\n"
        assert "```" not in page.evaluate("document.querySelector('.assistant').textContent")
        family = page.evaluate("getComputedStyle(document.querySelector('.assistant pre')).fontFamily")
        assert "monospace" in family
        page.evaluate("window.isOld = true, location.reload()")
        page.wait_for("!window.isOld && document.readyState === 'complete'")
        page.wait_for("document.querySelector('.assistant pre')?.textContent === 'x = 1\\n'")
        assert page.evaluate("turns.map(turn => turn.content)") == ["code?", code]
        page.evaluate(f"$('text').value = 'long '.repeat({MAX_BYTES // 4})")
        page.evaluate("$('form').requestSubmit()")
        page.wait_for("!$('alert').hidden && $('alert').textContent.includes('too long')")
        assert page.evaluate("[$('text').value.slice(0, 9), turns.length]") == ["long long", 2]


@pytest.mark.model
def test_a_real_model_answers_as_it_does_without_a_page(smollm2: Path) -> None:
    question = [{"role": "user", "content": "Name three rivers, then name them once more."}]
    with load(smollm2, deterministic=True) as engine, serving(engine) as server:
        lines = [json.loads(line) for line in chat(server, question)[1].splitlines()]
        whole = engine.generate(question, max_tokens=60)
    assert "".join(piece for line in lines for piece, _ in line["runs"]) == whole.text
    assert {origin for line in lines for _, origin in line["runs"]} == {"target", "suffix"}
    assert "River" in whole.text
