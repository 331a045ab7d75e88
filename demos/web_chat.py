"""A chat page in your browser, served to this machine only.

    python demos/web_chat.py
    python demos/web_chat.py --model my-model --port 8080 --open

Open the address that it prints; Ctrl-C ends the server. Other users of this machine cannot use it, since the
address has a token that only you see. Pages of other sites can neither ask nor read: the server refuses requests
to any other host name, and requests that come from any other page.
"""

import argparse
import json
import secrets
import select
import socket
import sys
import webbrowser
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread
from typing import Any

from edgespec import AnswerStream, Chunk, EdgeSpecError, Engine, SamplingParams, load

PAGE = Path(__file__).with_suffix(".html")
MAX_TOKENS = 800
MAX_BYTES = 1 << 20  # of a conversation
_REST_S, _MOST_REST = 5.0, 64 << 20  # for and of what is still sent once a request is refused


class Refused(Exception):
    """A request that is refused, with the status and the message for the browser."""

    def __init__(self, status: HTTPStatus, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class ChatServer(ThreadingHTTPServer):
    """Answers with an engine that somebody else closes; port 0 means any free port."""

    daemon_threads = False  # closing the server waits for the answers to end

    def __init__(self, engine: Engine, port: int = 0) -> None:
        self.engine = engine
        self.token = secrets.token_urlsafe(24)
        self._connections: set[Any] = set()
        super().__init__(("127.0.0.1", port), _Handler)

    @property
    def hosts(self) -> tuple[str, str]:
        return f"127.0.0.1:{self.server_port}", f"localhost:{self.server_port}"

    @property
    def url(self) -> str:
        return f"http://{self.hosts[0]}/{self.token}/"

    def process_request(self, request: Any, client_address: Any) -> None:
        self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._connections.discard(request)
        super().shutdown_request(request)

    def server_close(self) -> None:
        """Close all connections, which ends their answers too."""
        for connection in self._connections.copy():
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        super().server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # a browser may close its connection at any time
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    """HTTP/1.0: one connection per request, and the end of the answer closes it."""

    server: ChatServer
    timeout = 30

    def do_GET(self) -> None:
        self._serve({"": self._page, "about": self._about})

    def do_POST(self) -> None:
        self._serve({"chat": self._chat})

    def _serve(self, pages: Mapping[str, Any]) -> None:
        try:
            self._require_own_page()
            _, token, name = [*self.path.split("/", 2), "", ""][:3]
            if not secrets.compare_digest(token.encode(errors="replace"), self.server.token.encode()):
                raise Refused(HTTPStatus.FORBIDDEN, "open the whole address that web_chat.py has printed")
            if name not in pages:
                raise Refused(HTTPStatus.NOT_FOUND, f"there is no {name} on this server")
            pages[name]()
        except Refused as refusal:
            self._send(refusal.status, "text/plain; charset=utf-8", str(refusal).encode())
            self._read_rest()

    def _read_rest(self) -> None:
        """Read what the browser still sends: it would take a connection that is closed meanwhile for a failure."""
        self.connection.settimeout(_REST_S)
        with suppress(OSError):
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_WR)
            for _ in range(_MOST_REST // MAX_BYTES):
                if not self.rfile.read1(MAX_BYTES):
                    break

    def _require_own_page(self) -> None:
        """Refuse other sites, which can point a host name here (DNS rebinding) or link to this server."""
        if self.headers.get_all("Host", []) not in [[host] for host in self.server.hosts]:
            raise Refused(HTTPStatus.FORBIDDEN, "wrong host name; open the address that web_chat.py has printed")
        if self.headers.get_all("Origin", []) not in [[], *([f"http://{host}"] for host in self.server.hosts)]:
            raise Refused(HTTPStatus.FORBIDDEN, "pages of other sites may not use this server")

    def _page(self) -> None:
        nonce = secrets.token_urlsafe(16)  # the browser runs only scripts and styles that carry it
        policy = (
            f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; "
            "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        page = PAGE.read_text(encoding="utf-8").replace("{{nonce}}", nonce)
        self._send(HTTPStatus.OK, "text/html; charset=utf-8", page.encode(), {"Content-Security-Policy": policy})

    def _about(self) -> None:
        engine = self.server.engine
        about = {"model": engine.manifest.name, "context_length": engine.context_length}
        self._send(HTTPStatus.OK, "application/json", json.dumps(about).encode())

    def _chat(self) -> None:
        """Send a line of JSON for each chunk; the last one has the stats, or an error."""
        try:
            engine = self.server.engine
            sampling = engine.model_sampling or SamplingParams()
            chunks = engine.stream(self._conversation(), sampling=sampling, max_tokens=MAX_TOKENS, ends_loops=True)
        except EdgeSpecError as error:
            raise Refused(HTTPStatus.BAD_REQUEST, str(error)) from None
        self._begin(HTTPStatus.OK, "application/x-ndjson")
        with chunks, cancel_when_browser_leaves(chunks, self.connection), suppress(OSError):
            for line in _lines(self.server.engine, chunks):
                self.wfile.write(json.dumps(line).encode() + b"\n")

    def _conversation(self) -> Any:
        if self.headers.get_content_type() != "application/json":
            raise Refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "the content type must be application/json")
        length = self.headers.get("Content-Length", "")
        if not length.isascii() or not length.isdecimal() or int(length) > MAX_BYTES:
            raise Refused(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"the conversation is too long; at most {MAX_BYTES >> 10} KiB are taken",
            )
        try:
            return json.loads(self.rfile.read(int(length)))["messages"]
        except (ValueError, LookupError, TypeError, RecursionError):
            raise Refused(HTTPStatus.BAD_REQUEST, 'wanted {"messages": [{"role": …, "content": …}]}') from None

    def _send(
        self, status: HTTPStatus, content_type: str, body: bytes, headers: Mapping[str, str] | None = None
    ) -> None:
        self._begin(status, content_type, {"Content-Length": str(len(body)), **(headers or {})})
        self.wfile.write(body)

    def _begin(self, status: HTTPStatus, content_type: str, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        common = {"Content-Type": content_type, "Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
        for name, value in (common | {"Referrer-Policy": "no-referrer"} | dict(headers or {})).items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        """Log nothing: what a user asks is private."""


def _lines(engine: Engine, chunks: AnswerStream) -> Iterator[dict[str, Any]]:
    try:
        for chunk in chunks:
            line: dict[str, Any] = {"runs": runs(engine, chunk)}
            if chunk.stats is not None:
                line |= {"finish_reason": chunk.finish_reason, "stats": chunk.stats.as_dict()}
            yield line
    except EdgeSpecError as error:
        yield {"error": str(error)}


def runs(engine: Engine, chunk: Chunk) -> list[tuple[str, str]]:
    """Split the text of a chunk by origin: first the accepted draft, then the target's own token."""
    origins = chunk.origins or ("target",)
    last = engine.tokenizer.decode(chunk.token_ids[-1:]) if len(origins) > 1 else chunk.text
    drafted = chunk.text.removesuffix(last)
    pairs = (drafted, origins[0]), (chunk.text[len(drafted) :], origins[-1])
    return [(text, origin) for text, origin in pairs if text]


@contextmanager
def cancel_when_browser_leaves(chunks: AnswerStream, connection: socket.socket) -> Iterator[None]:
    """Cancel the answer when the browser closes its connection, even before the first token."""
    is_done = Event()

    def watch() -> None:
        while not is_done.wait(0.05):
            if _has_left(connection):
                chunks.cancel()
                return

    watcher = Thread(target=watch, name="web chat watcher")
    watcher.start()
    try:
        yield
    finally:
        is_done.set()
        watcher.join()


def _has_left(connection: socket.socket) -> bool:
    """A browser sends nothing after its request, so a readable connection means that it was closed."""
    try:
        return bool(select.select([connection], [], [], 0)[0]) and not connection.recv(1)
    except (OSError, ValueError):
        return True


@contextmanager
def opened(url: str) -> Iterator[None]:
    """Open a page in the browser, by a file that leads there: others can see the arguments of a program."""
    page = f'<!doctype html><meta http-equiv="refresh" content="0;url={url}">'
    with TemporaryDirectory(prefix="edgespec-") as folder:  # which only its owner may read
        path = Path(folder) / "chat.html"
        path.write_text(page, encoding="utf-8")
        webbrowser.open(path.as_uri())
        yield


def main() -> int:
    parser = argparse.ArgumentParser(description="Chat in your browser.")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--port", type=int, default=0, help="default: any free port")
    parser.add_argument("--open", action="store_true", help="open the page in your browser")
    options = parser.parse_args()
    try:
        with (
            load(options.model, report=lambda line: print(line, file=sys.stderr)) as engine,
            ChatServer(engine, options.port) as server,
        ):
            print(f"chat with {engine.manifest.name} at {server.url} (Ctrl-C ends the server)", flush=True)
            with opened(server.url) if options.open else nullcontext(), suppress(KeyboardInterrupt):
                server.serve_forever()
    except EdgeSpecError as error:
        print(f"web_chat: {error}", file=sys.stderr)
        return error.exit_code
    except (OSError, OverflowError) as error:
        print(f"web_chat: cannot use port {options.port} ({error}); choose another --port", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
