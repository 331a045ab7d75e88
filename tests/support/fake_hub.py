"""A hub on this machine that holds what a test gives it and fails where a test says so."""

import hashlib
import json
import re
from collections import defaultdict
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlsplit

from until import SOON_S

LARGE_BYTES = 10_000  # from here on a file is listed with its SHA-256, as in Git LFS


def wait_until_gone(request: BaseHTTPRequestHandler) -> None:
    """Wait until a client has closed its connection."""
    with suppress(OSError):
        request.connection.settimeout(SOON_S)
        request.connection.recv(1)


class FakeHub:
    """Repositories by name, commits by hash, and faults by file name.

    faults: for each file (or "api") what its next requests meet, one after another: a status, ("cut", n) to end
    the body after n bytes, ("close", n) to end it there and say so, "stall", or None for nothing.
    """

    def __init__(self) -> None:
        self.commits: dict[str, dict[str, dict[str, bytes]]] = defaultdict(dict)
        self.branches: dict[str, dict[str, str]] = defaultdict(dict)
        self.cards: dict[str, dict[str, Any]] = {}
        self.gated: set[str] = set()
        self.faults: dict[str, list[Any]] = defaultdict(list)
        self.requests: list[tuple[str, str | None]] = []  # paths and ranges of GETs
        self.headers: list[dict[str, str]] = []
        self.sent: dict[str, int] = defaultdict(int)  # bytes by file name
        self.knows_ranges = True
        self.redirect: str | None = None
        self.after_listing = lambda: None
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *arguments: object) -> None:
                pass

            def do_HEAD(self) -> None:
                self.answer(200)

            def do_GET(self) -> None:
                hub.answer(self)

            def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name.replace("_", "-"), value)
                if "Content_Length" not in headers:
                    self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            block_on_close = False

            def handle_error(self, *arguments: object) -> None:
                pass  # clients that hang up are what some tests are about

        self.server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def commit(self, repository: str, files: dict[str, bytes], branch: str = "main") -> str:
        sha = hashlib.sha1(repr((repository, sorted(files.items()))).encode()).hexdigest()
        self.commits[repository][sha] = files
        self.branches[repository][branch] = sha
        return sha

    def fetched(self) -> list[str]:
        """The names of files asked for, in order."""
        return [path.split("/resolve/")[1].split("/", 1)[1] for path, _ in self.requests if "/resolve/" in path]

    def answer(self, request: Any) -> None:
        path = unquote(urlsplit(request.path).path)
        self.requests.append((path, request.headers.get("Range")))
        self.headers.append(dict(request.headers))
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
            self.list(request, match[1], match[2] or "main")
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([0-9a-f]{40})/(.+)", path):
            self.give(request, *match.groups())
        else:
            request.answer(404)

    def fault(self, name: str) -> Any:
        return self.faults[name].pop(0) if self.faults[name] else None

    def list(self, request: Any, repository: str, revision: str) -> None:
        fault = self.fault("api")
        if fault == "stall":
            wait_until_gone(request)
            return
        if isinstance(fault, bytes):
            request.answer(200, fault, Content_Type="application/json")
            return
        if isinstance(fault, int):
            request.answer(fault)
            return
        if repository not in self.commits:
            request.answer(401, X_Error_Code="RepoNotFound")
            return
        sha = self.branches[repository].get(revision, revision)
        if sha not in self.commits[repository]:
            request.answer(404, X_Error_Code="RevisionNotFound")
            return
        siblings = [self.listed(name, content) for name, content in self.commits[repository][sha].items()]
        listing = {"id": repository, "sha": sha, "siblings": siblings, "cardData": self.cards.get(repository, {})}
        request.answer(200, json.dumps(listing).encode(), Content_Type="application/json")
        self.after_listing()

    @staticmethod
    def listed(name: str, content: bytes) -> dict[str, Any]:
        blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        listed: dict[str, Any] = {"rfilename": name, "size": len(content), "blobId": blob}
        if len(content) >= LARGE_BYTES:
            digest = hashlib.sha256(content).hexdigest()
            listed["lfs"] = {"sha256": digest, "size": len(content), "pointerSize": 134}
        return listed

    def give(self, request: Any, repository: str, sha: str, name: str) -> None:
        if repository in self.gated:
            request.answer(403, X_Error_Code="GatedRepo")
            return
        if self.redirect is not None:
            request.answer(302, Location=self.redirect + request.path)
            return
        content = self.commits[repository].get(sha, {}).get(name)
        fault = self.fault(name)
        if content is None:
            request.answer(404, X_Error_Code="EntryNotFound")
        elif isinstance(fault, int):
            request.answer(fault)
        elif fault == "stall":
            request.answer(200, content[: len(content) // 2], Content_Length=str(len(content)))
            request.wfile.flush()
            wait_until_gone(request)
        else:
            self.send(request, content, fault)

    def send(self, request: Any, content: bytes, fault: Any) -> None:
        start, stop, status, headers = 0, len(content), 200, {}
        asked = request.headers.get("Range")
        if asked and self.knows_ranges:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start, stop, status = int(first), int(last or len(content) - 1) + 1, 206
            if start >= len(content):
                request.answer(416)
                return
            headers["Content_Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
        body = content[start:stop]
        if isinstance(fault, bytes):
            body = fault
        elif fault is not None:
            kind, count = fault
            if kind == "cut":
                headers["Content_Length"] = str(len(body))
            body = body[:count]
        self.sent[request.path.rpartition("/")[2]] += len(body)
        request.answer(status, body, **headers)
        request.close_connection = fault is not None
