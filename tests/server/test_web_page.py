"""The chat page at the server's address: what it may do, whose pages may ask, and the page in a browser."""

import base64
import json
import re
import socket
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import chromium
import pytest
import tiny
from embedding_models import write_folder
from pdfs import make_pdf
from scripted import TOOL_TEMPLATE, scripted_engine
from served import Served, home_with, serving, table_engine

from edgespec import Inventory, Tool, ToolCall
from edgespec.cli.main import main
from edgespec.errors import UsageError
from edgespec.export.convert import export_model
from edgespec.server.limits import Limits
from edgespec.server.model_names import ModelNames
from edgespec.server.security import parse_origins
from edgespec.system.units import format_bytes

HI = {"model": "tiny", "messages": [{"role": "user", "content": "in the an"}], "max_tokens": 4}
BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
SITE = "http://localhost:3000"


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@contextmanager
def page_of(tiny_model: Path, tmp_path: Path, **settings: Any) -> Iterator[Served]:
    names = ModelNames(home_with(tmp_path / "home", tiny=tiny_model))
    with serving(names, lambda name: table_engine(tiny_model), **settings) as served:
        yield served


def test_the_page_asks_nobody_else_and_never_parses_what_a_model_writes(tiny_model: Path, tmp_path: Path) -> None:
    with page_of(tiny_model, tmp_path) as served:
        first, second = served.client.get("/", headers=BROWSER), served.client.get("/", headers=BROWSER)
        assert first.headers["content-type"] == "text/html; charset=utf-8"
        (nonce,) = set(re.findall(r'nonce="([^"]+)"', first.text))
        assert nonce not in second.text
        policy = first.headers["content-security-policy"]
        assert f"default-src 'none'; script-src 'nonce-{nonce}'" in policy
        assert "connect-src 'self'" in policy
        assert "frame-ancestors 'none'" in policy
    found = re.findall(
        r"""innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|["'(]https?://|//\w+\.""", first.text
    )
    assert found == []


def test_the_page_can_be_left_out(tiny_model: Path, tmp_path: Path) -> None:
    with page_of(tiny_model, tmp_path, has_page=False) as served:
        assert "html" not in served.client.get("/", headers=BROWSER).headers["content-type"]
        assert served.client.get("/v1/models").status_code == 200


def test_the_text_of_a_pdf_is_read_for_the_page(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pypdf", reason="needs pypdf: pip install edgespec[pdf]")

    def asked(data: bytes, begin: str = "") -> dict[str, str]:
        return {"filename": "/etc/a.pdf", "file_data": begin + base64.b64encode(data).decode()}

    with page_of(tiny_model, tmp_path) as served:
        printed = make_pdf(["In print."])
        found = served.post("/v1/files/text", asked(printed, "data:application/pdf;base64,"))
        assert (found.status_code, found.json()) == (200, {"filename": "/etc/a.pdf", "text": "In print."})
        for data, said in (
            (make_pdf([""]), "has no text on 1 pages"),
            (b"GIF8", "is not a PDF"),
            (b"%PDF-", "cannot"),
        ):
            refused = served.post("/v1/files/text", asked(data))
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "file_data")
            assert said in refused.json()["error"]["message"]
        assert served.post("/v1/files/text", asked(printed, "?,?")).status_code == 400
        monkeypatch.setitem(sys.modules, "pypdf", None)
        refused = served.post("/v1/files/text", asked(printed))
        assert (refused.status_code, 'pip install "edgespec[pdf]"' in refused.text.replace("\\", "")) == (
            501,
            True,
        )


def test_the_page_is_let_in_and_no_other_one(tiny_model: Path, tmp_path: Path) -> None:
    with page_of(tiny_model, tmp_path) as served:
        own = served.url.removesuffix("/v1")
        port = own.rpartition(":")[2]
        answers = {
            origin: served.post("/v1/chat/completions", HI, headers={"Origin": origin})
            for origin in (
                own,
                "http://127.0.0.1:1",
                f"http://localhost:{port}",
                "null",
                "https://evil.example",
                SITE,
            )
        }
        assert [answer.status_code for answer in answers.values()] == [200, 403, 403, 403, 403, 403]
        assert "--allow-origin" in answers[SITE].text
        rebound = {"Origin": "http://evil.example", "Host": "evil.example"}
        assert served.post("/v1/chat/completions", HI, headers=rebound).status_code == 403


def test_a_site_that_was_named_may_ask_with_the_key(tiny_model: Path, tmp_path: Path) -> None:
    with page_of(tiny_model, tmp_path, origins=(SITE, "app://obsidian.md"), key="secret") as served:
        asking = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        for origin in (SITE, "app://obsidian.md"):
            leave = served.client.request("OPTIONS", "/v1/chat/completions", headers={"Origin": origin, **asking})
            assert leave.status_code == 204
            assert leave.headers["access-control-allow-origin"] == origin
            assert "authorization" in leave.headers["access-control-allow-headers"]
            assert leave.headers["access-control-allow-private-network"] == "true"
            without = served.post("/v1/chat/completions", HI, headers={"Origin": origin})
            assert (without.status_code, without.headers["access-control-allow-origin"]) == (401, origin)
            with_key = {"Origin": origin, "Authorization": "Bearer secret"}
            answer = served.post("/v1/chat/completions", HI, headers=with_key)
            assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, origin)
        other = served.client.request(
            "OPTIONS", "/v1/models", headers={"Origin": "https://evil.example", **asking}
        )
        assert (other.status_code, "access-control-allow-origin" in other.headers) == (403, False)
        assert "html" in served.client.get("/", headers=BROWSER).text, "the page asks for the key"
        assert served.client.get("/v1/models").status_code == 401


def test_origins_are_read_and_what_is_none_is_refused() -> None:
    assert parse_origins(None) == parse_origins(" ") == ()
    assert parse_origins("http://localhost:3000/, chrome-extension://ABC") == (SITE, "chrome-extension://abc")
    for wrong in ("*", "localhost:3000", "http://a/b", "http://", "null"):
        with pytest.raises(UsageError, match="is not the origin of a page; wanted a scheme and a host"):
            parse_origins(f"http://a, {wrong}")


def test_ps_lists_what_a_server_has_loaded(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with page_of(tiny_model, tmp_path) as served:
        port = served.url.removesuffix("/v1").rpartition(":")[2]
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # for other programs: it would get the key
        monkeypatch.setenv("no_proxy", "")
        assert main(["models", "ps", "--port", port]) == 0
        assert "has loaded no model" in capsys.readouterr().out
        served.chat()
        monkeypatch.setenv("EDGESPEC_PORT", port)
        assert main(["models", "ps"]) == 0
        head, row = capsys.readouterr().out.splitlines()
        assert head.split() == ["LOADED", "MEMORY", "DEVICE", "CONTEXT", "CLOSES"]
        (listed,) = Inventory(served.services.names.home).models()
        assert row.split("  ")[0] == "tiny"
        assert f"  {format_bytes(listed.memory_bytes or 0)}  " in row
        assert "  cpu  " in row
        assert main(["models", "ps", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["loaded"] == ["tiny"]
    with page_of(tiny_model, tmp_path / "locked", key="secret") as served:
        monkeypatch.setenv("EDGESPEC_PORT", served.url.removesuffix("/v1").rpartition(":")[2])
        assert main(["models", "ps"]) == 1
        assert "wants a key; give the key in EDGESPEC_API_KEY" in capsys.readouterr().err
    assert main(["models", "ps"]) == 1
    said = capsys.readouterr().err
    assert "no server of edgespec answers at http://127.0.0.1:" in said
    assert "edgespec serve, or give the port of one that runs with --port\n" in said
    monkeypatch.setenv("EDGESPEC_API_KEY", "s✓cret")
    assert main(["models", "ps"]) == 2
    assert "EDGESPEC_API_KEY has a character that an HTTP header cannot contain" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n", "(SSH-2.0-OpenSSH_9.2)"),
        (
            b'HTTP/1.0 200 OK\r\n\r\n{"models": [{"name": "llama3.2:latest", "size": 1}]}',
            "(another program does, such as ollama)",
        ),
    ],
)
def test_ps_tells_a_server_of_another_program(sent: bytes, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, asked, port = ps_of("127.0.0.1", sent)
    assert code == 1
    assert f"no server of edgespec answers at http://127.0.0.1:{port} {said}; start one" in capsys.readouterr().err
    assert b"GET /api/ps" in asked


@pytest.mark.skipif(not has_ipv6(), reason="needs IPv6 (::1), which this machine lacks")
def test_ps_names_an_address_of_ipv6_as_servers_take_it() -> None:
    code, asked, port = ps_of("::1", b'HTTP/1.0 200 OK\r\n\r\n{"models": []}')
    assert (code, f"Host: [::1]:{port}\r\n".encode() in asked) == (0, True)


def ps_of(host: str, sent: bytes) -> tuple[int, bytes, int]:
    """The exit code of models ps where a server sends these bytes, what it was asked, and its port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as server, ThreadPoolExecutor() as pool:
        port = int(server.getsockname()[1])

        def answer() -> bytes:
            connection, _ = server.accept()
            with connection:
                asked = connection.recv(4096)
                connection.sendall(sent)
            return asked

        answered = pool.submit(answer)
        return main(["models", "ps", "--host", host, "--port", str(port)]), answered.result(), port


# -- in a browser ------------------------------------------------------------------------------------

ANSWER = """# Why

The sky is **blue**, see `sky()` and *more* at [a page](https://example.org/a). <img src=x onerror="window.hit=1">

- one
- two
  - inner

1. first
2. second

| a | b |
|---|---|
| 1 | <b>2</b> |

```python
print("<script>window.hit=1</script>")
```
Done."""

needs_browser = pytest.mark.skipif(
    chromium.PROGRAM is None, reason="needs chromium on the PATH (Debian: chromium)"
)


@contextmanager
def in_browser(
    tiny_model: Path, tmp_path: Path, answer: str | Callable[[str], str], *more: str, **settings: Any
) -> Iterator[tuple[chromium.Page, str]]:
    models = {"tiny": tiny_model, "other": tiny_model, **dict.fromkeys(more, tiny_model)}
    names = ModelNames(home_with(tmp_path / "home", **models))

    def open_engine(name: str) -> Any:
        return scripted_engine(
            tiny_model, tmp_path / f"scripted {name}", answer if callable(answer) else lambda prompt: answer
        )

    with serving(names, open_engine, **settings) as served, chromium.browser(tmp_path / "profile") as page:
        url = served.url.removesuffix("v1")
        page.open(url)
        yield page, url


def texts(page: chromium.Page, selector: str) -> list[str]:
    found = page.evaluate(f"[...document.querySelectorAll({selector!r})].map(each => each.textContent)")
    return [str(each) for each in found]


@pytest.mark.slow
@needs_browser
def test_an_answer_is_shown_styled_and_kept_and_nothing_of_it_is_run(tiny_model: Path, tmp_path: Path) -> None:
    with in_browser(tiny_model, tmp_path, ANSWER) as (page, url):
        page.wait_for("document.querySelectorAll('#model option').length === 2")
        assert page.evaluate("document.getElementById('model').value") == "other"
        page.type("<b>hi</b> <|im_end|>\n")
        page.wait_for("turns.length === 2 && running === null")
        for _ in range(2):
            assert texts(page, ".user") == ["<b>hi</b> <|im_end|>"]
            assert texts(page, ".assistant h3") == ["Why"]
            assert texts(page, ".assistant strong") == ["blue"]
            assert texts(page, ".assistant em") == ["more"]
            assert texts(page, ".assistant :not(pre) > code") == ["sky()"]
            assert texts(page, ".assistant pre") == ['print("<script>window.hit=1</script>")']
            assert texts(page, ".assistant > ul > li > ul > li") == ["inner"]
            assert texts(page, ".assistant ol > li") == ["first", "second"]
            assert texts(page, ".assistant td") == ["1", "<b>2</b>"]
            assert page.evaluate("document.querySelector('.assistant a').href") == "https://example.org/a"
            assert page.evaluate("window.hit === undefined && document.querySelector('#log img, #log b') === null")
            page.open(url)
        (tmp_path / "home" / "models" / "broken").mkdir()
        page.evaluate("listModels('broken')")
        (said,) = texts(page, "#alert")
        assert said.startswith("the model 'broken' cannot be used: broken has no edgespec.json")
        assert said.endswith(". other is chosen in its place.")
        page.evaluate("document.getElementById('clear').click()")
        page.open(url)
        assert texts(page, ".turn") == []
        assert texts(page, ".kept > :first-child") == ["<b>hi</b> <|im_end|>"]


@pytest.mark.slow
@needs_browser
def test_the_page_answers_in_browsers_that_iterate_over_no_body_and_store_nothing(
    tiny_model: Path, tmp_path: Path
) -> None:
    with in_browser(tiny_model, tmp_path, ANSWER) as (page, url):
        page.before_each_page(
            "delete ReadableStream.prototype[Symbol.asyncIterator];"
            "Object.defineProperty(navigator, 'clipboard', { value: undefined });"
            "Object.defineProperty(window, 'localStorage', { value: null });"
            "Object.defineProperty(window, 'sessionStorage',"
            "  { get() { throw new DOMException('', 'SecurityError'); } });"
        )
        page.open(url)
        page.wait_for("document.querySelectorAll('#model option').length === 2")
        page.wait_for("document.getElementById('alert').textContent.startsWith('this browser stores no data')")
        page.type("hi\n")
        page.wait_for("turns.length === 2 && running === null")
        assert texts(page, ".assistant strong") == ["blue"]
        page.click("document.querySelector('.code button')")
        page.wait_for("document.querySelector('.code button').textContent === 'Copied'")
        page.evaluate("document.getElementById('text').focus()")
        page.type("again")
        page.press("Enter", is_composing=True)
        assert page.evaluate("document.getElementById('text').value") == "again"


def chats(page: chromium.Page) -> list[list[str]]:
    """The beginnings of the texts of each chat that the browser keeps, sorted."""
    found = page.evaluate("chats().map(each => JSON.parse(each.raw).turns.map(turn => turn.text.slice(0, 10)))")
    return sorted(found)


@pytest.mark.slow
@needs_browser
def test_of_several_tabs_every_chat_is_kept(tiny_model: Path, tmp_path: Path) -> None:
    with in_browser(tiny_model, tmp_path, answer_at_length) as (page, url):
        page.evaluate("""localStorage.setItem('edgespec chat', '[{"role": "user", "text": "old"}]')""")
        page.open(url)
        page.wait_for("$('model').value")
        assert texts(page, ".user") == ["old"], "an earlier version saved it"
        page.evaluate("$('clear').click()")
        page.type("one\n")
        page.wait_for("turns.length === 2 && running === null")
        with page.in_another_tab(url):
            page.wait_for("$('model').value")
            assert texts(page, ".user") == ["one"]
            page.evaluate("$('clear').click()")
            page.type("two\n")
            page.wait_for("turns.length === 2 && running === null")
        page.type("more\n")
        page.wait_for("turns.length === 4 && running === null")
        both = [["old"], ["one", "yes", "more", "yes"], ["two", "yes"]]
        assert chats(page) == both
        with page.in_another_tab(url):
            page.wait_for("$('model').value")
            page.type("here\n")
            page.wait_for("turns.length === 6 && running === null")
        page.wait_for("turns.length === 6")  # an idle tab follows
        page.type("long\n")
        page.wait_for("turns.length === 6 && running !== null && partial[1].text.length > 10")
        with page.in_another_tab(url):
            page.wait_for("$('model').value")
            page.type("too\n")
            page.wait_for("running !== null")
        # A tab sees what others store some milliseconds later.
        page.wait_for("!$('alert').hidden || ![null, stored].includes(localStorage.getItem(CHAT + chat))")
        page.press("Escape")
        page.wait_for("running === null && !$('alert').hidden")
        assert "in another tab too. Both are kept" in texts(page, "#alert")[0]
        begun = [*both[1], "here", "yes", "long", "word word "]
        assert begun in chats(page)
        assert any(found[:7] == begun[:7] and "too" in found for found in chats(page))
        page.evaluate(
            "[...document.querySelectorAll('.kept')].find(e => e.textContent.includes('two')).children[0].click()"
        )
        assert texts(page, ".user") == ["two"]
        delete = (
            "[...document.querySelectorAll('.kept')].find(e => e.textContent.includes('old')).lastChild.click()"
        )
        page.evaluate(f"{delete}; {delete}")
        assert ["old"] not in chats(page)


@pytest.mark.slow
@needs_browser
def test_the_oldest_chats_go_with_a_word_where_there_is_no_room(tiny_model: Path, tmp_path: Path) -> None:
    with in_browser(tiny_model, tmp_path, "yes") as (page, _):
        page.wait_for("$('model').value")
        page.evaluate(
            """for (let i = 0; i < 4; i++) localStorage.setItem(`edgespec chat/${i}`, JSON.stringify(
              { at: i, turns: [{ role: "user", text: `chat ${i} ${"x".repeat(i ? 10 : 3.9e6)}` }] }))"""
        )
        page.type("new\n")
        page.wait_for("running === null && turns.length === 2")
        assert page.evaluate("chats().length") == 5
        page.evaluate("turns = [{ role: 'user', text: 'n'.repeat(2e5) }]; save()")
        assert "were deleted, as at most 50 chats" in texts(page, "#alert")[0]
        assert "“chat 0 xxx" in texts(page, "#alert")[0]
        assert [text[:6] for (text,) in chats(page)] == ["chat 1", "chat 2", "chat 3", "nnnnnn"]
        page.evaluate("turns = [{ role: 'user', text: 'm'.repeat(5e6) }]; save()")
        assert "cannot save the chat: it has 5.0 million characters" in texts(page, "#alert")[0]
        page.evaluate(
            """const set = Storage.prototype.setItem;
            Storage.prototype.setItem = function (name, value) {
              if (value.includes("oooo")) throw new DOMException("full", "QuotaExceededError");
              set.call(this, name, value);
            }"""
        )
        page.evaluate("turns = [{ role: 'user', text: 'oooo' }]; save()")
        assert "cannot save the chat: full" in texts(page, "#alert")[0]
        assert len(chats(page)) == 4, "none was given up for nothing"


def answer_at_length(prompt: str) -> str:
    return "word " * 3000 if "long" in prompt.rpartition("user")[2] else "yes"


@pytest.mark.slow
@needs_browser
def test_an_answer_that_was_broken_off_goes_on(tiny_model: Path, tmp_path: Path) -> None:
    names = ModelNames(home_with(tmp_path / "home", tiny=tiny_model))

    def open_engine(name: str) -> Any:
        return scripted_engine(tiny_model, tmp_path / "scripted", answer_at_length)

    with serving(names, open_engine) as served, chromium.browser(tmp_path / "profile") as page:
        page.open(served.url.removesuffix("v1"))
        page.wait_for("$('model').value")
        page.type("long\n")
        page.wait_for("(partial?.[1].text ?? '').length > 20")
        page.open(served.url.removesuffix("v1"))
        page.wait_for("$('model').value")
        assert (texts(page, ".note"), texts(page, ".user")) == (["interrupted"], ["long"])
        ended = "() => { isLeaving = true; return Promise.reject(new TypeError('the page closes')); }"
        page.evaluate(f"fetch = {ended}; ask({{ role: 'user', text: 'early' }})")
        page.open(served.url.removesuffix("v1"))
        page.wait_for("$('model').value")
        assert (texts(page, ".user"), texts(page, ".again button")) == (["long", "early"], ["Try again"])
        page.evaluate("turns = turns.slice(0, 2); save(); show(chat)")
        assert texts(page, ".again button") == ["Continue", "Try again"]
        length = len(texts(page, ".assistant")[0])
        page.evaluate("document.querySelector('.again button').click()")
        page.wait_for(f"(partial?.[1].text ?? '').length > {length + 20}")
        served.server.should_exit = True
        page.wait_for("running === null")
        assert texts(page, ".note") == ["the server is shutting down"]
        assert texts(page, ".again button") == ["Continue", "Try again"]
        served.thread.join(60)
        page.evaluate("document.querySelectorAll('.again button')[1].click()")
        page.wait_for("running === null")
        assert "not sent: no connection to the server" in texts(page, "#alert")[0]
        assert len(texts(page, ".assistant")[0]) > length + 20, "the begun answer stays"
        assert texts(page, ".again button") == ["Continue", "Try again"]
        page.type("next\n")
        page.wait_for("running === null")
        assert page.evaluate("$('text').value") == "next"


@pytest.mark.slow
@needs_browser
def test_escape_stops_an_answer_which_stays(tiny_model: Path, tmp_path: Path) -> None:
    with in_browser(tiny_model, tmp_path, "word " * 3000 + "end") as (page, _):
        page.wait_for("document.querySelectorAll('#model option').length === 2")
        page.type("go\n")
        page.wait_for("(document.querySelector('.assistant')?.textContent ?? '').length > 20")
        page.press("Escape")
        page.wait_for("document.getElementById('send').hidden === false")
        assert texts(page, ".note") == ["stopped"]
        assert "end" not in texts(page, ".assistant")[0]
        assert texts(page, ".again button") == ["Continue", "Try again"]
        length = len(texts(page, ".assistant")[0])
        page.evaluate("document.querySelector('.again button').click()")
        page.wait_for(f"document.querySelector('.assistant').textContent.length > {length + 20}")
        page.press("Escape")
        page.wait_for("running === null")
        assert (len(texts(page, ".user")), len(texts(page, ".again"))) == (1, 1)
        page.evaluate("document.querySelectorAll('.again button')[1].click()")
        page.wait_for("(document.querySelector('.assistant')?.textContent ?? '').length > 20")
        assert texts(page, ".again") == []
        page.press("Escape")
        page.wait_for("running === null")
        assert page.evaluate("turns.length") == 2


@pytest.mark.slow
@needs_browser
def test_an_answer_that_ends_at_a_limit_goes_on(tiny_model: Path, tmp_path: Path) -> None:
    limits = Limits(num_tokens=30, drain_s=0.5)
    with in_browser(tiny_model, tmp_path, "word " * 3000, limits=limits) as (page, _):
        page.wait_for("document.querySelectorAll('#model option').length === 2")
        page.type("go\n")
        page.wait_for("turns.length === 2 && running === null")
        assert "ended at a limit" in texts(page, ".note")[0]
        assert texts(page, ".again button") == ["Continue", "Try again"]
        length = len(texts(page, ".assistant")[0])
        page.evaluate("document.querySelector('.again button').click()")
        page.wait_for(f"turns.length === 2 && running === null && turns[1].text.length > {length}")
        assert page.evaluate("drafting({ gain: null, drafted_tokens: 5 }, 1)") == (
            "drafting is on; the time saved is not known"
        )
        page.evaluate("ask({ role: 'user', text: 'in '.repeat(9000) })")
        page.wait_for("$('alert').textContent.endsWith('which all messages of a chat share; begin a new chat')")


@pytest.mark.slow
@needs_browser
def test_files_thinking_a_schema_and_the_key_go_with_the_request(tiny_model: Path, tmp_path: Path) -> None:
    with in_browser(tiny_model, tmp_path, "<think>\nhm\n</think>\n\nyes", key="secret") as (page, _):
        page.wait_for("document.getElementById('unlock').hidden === false")
        home = tmp_path / "home" / "models"
        switch = {"tokenizer.chat_template": "{# enable_thinking #}" + TOOL_TEMPLATE}
        tiny.write_gguf(tmp_path / "thinker.gguf", tiny.random_weights(), override=switch)
        write_folder(tmp_path / "vectors", tiny.random_weights())
        for source in ("thinker.gguf", "vectors"):
            export_model(tmp_path / source, home / Path(source).stem, precision="fp32")
        page.evaluate("document.getElementById('key').focus()")
        page.type("secret\n")
        page.wait_for("document.querySelectorAll('#model option').length === 4")
        page.evaluate("attach([new File(['a ``` b\\n'], 'notes.md'), new File(['\\0'], 'x.bin')])")
        page.wait_for("document.querySelectorAll('#files .file').length === 1")
        assert "x.bin is not text" in texts(page, "#alert")[0]
        page.evaluate("attach([new File(['\\n '], 'empty.txt')])")
        page.wait_for("$('alert').textContent === 'empty.txt is empty; there is nothing to attach'")
        page.evaluate("attach([new File(['%PDF-1.7'], 'x.pdf')])")
        page.wait_for(
            "document.getElementById('alert').textContent.includes('x.pdf is a PDF that cannot be read')"
        )
        page.evaluate(f"attach([new File([{make_pdf(['In print.']).decode()!r}], 'a.pdf')])")
        page.wait_for("files.length === 2")
        assert page.evaluate("files.pop()") == {"name": "a.pdf", "content": "In print."}
        assert page.evaluate("$('thinking').disabled && !$('fixed').hidden"), "tiny has no switch for it"
        assert "chat_template_kwargs" not in page.evaluate(
            "(() => { $('thinking').value = 'on'; return request({ role: 'user', text: 'sum up' }); })()"
        )
        page.evaluate("$('model').value = 'thinker'; $('model').dispatchEvent(new Event('change'))")
        assert page.evaluate("!$('thinking').disabled && $('fixed').hidden")
        assert texts(page, "#model option:disabled") == ["vectors (for embeddings)"]
        asked = page.evaluate(
            """(() => {
              document.getElementById('schema').value = '{"type": "object"}';
              document.getElementById('thinking').value = 'off';
              return request({ role: 'user', text: 'sum up', files });
            })()"""
        )
        assert asked["messages"][-1]["content"] == "notes.md:\n````\na ``` b\n````\n\nsum up"
        assert asked["response_format"]["json_schema"]["schema"] == {"type": "object"}
        assert asked["chat_template_kwargs"] == {"enable_thinking": False}
        page.evaluate("document.getElementById('temperature').value = '900'")
        page.evaluate("document.getElementById('text').value = 'warm'")
        page.evaluate("document.getElementById('form').requestSubmit()")
        page.wait_for("document.getElementById('alert').textContent.includes('not a number from 0 to 100')")
        page.evaluate("document.getElementById('text').value = document.getElementById('temperature').value = ''")
        page.evaluate("document.getElementById('schema').value = '{'")
        page.evaluate("document.getElementById('text').focus()")
        page.type("go\n")
        page.wait_for("document.getElementById('alert').textContent.includes('is not JSON')")
        assert page.evaluate("document.getElementById('text').value") == "go"
        page.evaluate("$('schema').value = '{\"type\": \"objekt\"}'; $('form').requestSubmit()")
        page.wait_for("$('alert').textContent.startsWith('not sent: the schema in Options cannot be used')")
        page.evaluate(
            "document.getElementById('schema').value = ''; document.getElementById('form').requestSubmit()"
        )
        page.wait_for("document.querySelectorAll('.note').length === 1 && running === null")
        assert texts(page, ".assistant") == ["yes"]
        assert [text.strip() for text in texts(page, "details.thinking div")] == ["hm"]
        assert texts(page, ".user .file") == ["notes.md · 1 line"]


@pytest.mark.slow
@needs_browser
def test_tools_run_after_a_yes_and_their_results_stay_in_the_chat(tiny_model: Path, tmp_path: Path) -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "<b>Rome</b>"}}\n</tool_call>'
    ran: list[str] = []

    def run(asked: ToolCall) -> str:
        ran.append(asked.arguments)
        return "sunny"

    tool = Tool(name="weather", parameters={"type": "object", "properties": {"city": {}}}, run=run)

    def answer(prompt: str) -> str:
        asked = prompt.rpartition("<|im_start|>user")[2]
        return "No." if "refused" in asked else "It is fine." if "sunny" in asked else f"I look.\n{call}"

    def click(label: str) -> None:
        page.wait_for("document.querySelector('.call button') !== null")
        page.evaluate(
            f"[...document.querySelectorAll('.call button')].find(e => e.textContent === '{label}').click()"
        )
        page.wait_for("running === null")

    with in_browser(tiny_model, tmp_path, answer, tools=[tool]) as (page, url):
        page.wait_for("tools.length === 1")
        page.type("Weather?\n")
        page.wait_for("document.querySelector('.call button') !== null")
        assert ran == []
        click("Run it")
        assert [json.loads(each) for each in ran] == [{"city": "<b>Rome</b>"}]
        assert texts(page, ".assistant") == ["It is fine."]
        page.type("And now?\n")
        click("Refuse")
        assert (len(ran), texts(page, ".assistant")) == (1, ["It is fine.", "No."])
        page.type("Once more?\n")
        page.wait_for("document.querySelector('.call button') !== null")
        page.press("Escape")
        page.wait_for("running === null")
        assert len(ran) == 1
        page.open(url)
        page.wait_for("tools.length === 1")
        assert len(texts(page, ".call")) == 2
        asked = page.evaluate("request({ role: 'user', text: 'and?' })")["messages"]
        roles = ["user", "assistant", "tool", "assistant"]
        assert [each["role"] for each in asked] == [*roles, *roles, "user", "assistant", "user"]
        assert page.evaluate("document.querySelector('#log b') === null")


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize("is_dark", [False, True])
@pytest.mark.parametrize("width", [390, 1200])
def test_the_page_fits_a_phone_and_a_window(tiny_model: Path, tmp_path: Path, width: int, is_dark: bool) -> None:
    with in_browser(tiny_model, tmp_path, ANSWER, "a-model-of-a-long-name-" * 4) as (page, _):
        page.look(width, 800, is_dark=is_dark)
        page.wait_for("document.querySelectorAll('#model option').length === 3")
        page.type("Why is the sky blue? " + "wide" * 40 + "\n")
        page.wait_for("turns.length === 2 && running === null")
        page.look(1200, 800, is_dark=is_dark)
        page.evaluate(
            "$('text').value = 'a message that is written now '.repeat(3); refresh(); toggleOptions(true)"
        )
        page.look(width, 480, is_dark=is_dark)  # as where a phone shows its keys
        page.wait_for("$('text').clientHeight >= $('text').scrollHeight")
        assert page.evaluate("$('form').getBoundingClientRect().bottom") <= 480
        page.evaluate("toggleOptions(false)")
        for part in (
            "document.documentElement.scrollWidth",
            "document.getElementById('clear').getBoundingClientRect().right",
        ):
            assert page.evaluate(part) <= width
        assert page.evaluate("innerWidth") == width, "a phone would shrink a page that is too wide"
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert colour == ("rgb(20, 23, 28)" if is_dark else "rgb(246, 247, 249)")
        page.look(width, 800, is_dark=is_dark, path=tmp_path / "page.png")
        assert (tmp_path / "page.png").stat().st_size > 5000
