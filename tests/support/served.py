"""A server in a thread, on a real socket, and a client that asks it."""

import asyncio
import json
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event, Thread
from typing import Any

import httpx2
import tiny
from stuck import engine_of
from table_decoder import TableDecoder

from edgespec import Engine, Tool
from edgespec.decoding.decoder import Decoder
from edgespec.draft.speculation import Speculation
from edgespec.draft.suffix import SuffixDrafter
from edgespec.server.answers import Services
from edgespec.server.app import make_app
from edgespec.server.kept_prefixes import KeptPrefixes
from edgespec.server.limits import Limits
from edgespec.server.model_host import ModelHost
from edgespec.server.model_names import ModelNames
from edgespec.server.serving import Server, make_server, open_socket, run_server, url_of
from edgespec.setup.home import ModelHome

WAIT_S = 120.0


@dataclass
class Served:
    """A running server, and what tests look at."""

    url: str
    services: Services
    server: Server
    client: httpx2.Client
    thread: Thread

    def post(self, path: str, document: dict[str, Any] | None = None, **settings: Any) -> httpx2.Response:
        return self.client.post(path, json=document, **settings)

    def chat(self, text: str = "in the an", **fields: Any) -> dict[str, Any]:
        asked = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 12, **fields}
        answer = self.post("/v1/chat/completions", asked)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def events(self, path: str, document: dict[str, Any]) -> list[Any]:
        """The documents of a stream; its last line as it is, if it is none."""
        with self.client.stream("POST", path, json={**document, "stream": True}) as answer:
            assert answer.status_code == 200, answer.read()
            assert answer.headers["content-type"].startswith("text/event-stream")
            lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]

    def raw(self, receive_bytes: int | None = None) -> socket.socket:
        """A connection without a client library; receive_bytes is the size of its buffer."""
        host, port = self.url.removeprefix("http://").removesuffix("/v1").rsplit(":", 1)
        connection = socket.socket()
        connection.settimeout(WAIT_S)
        if receive_bytes:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        connection.connect((host, int(port)))
        return connection


def rest_of(connection: socket.socket) -> bytes:
    """What has come over a connection and was not read, up to its end."""
    found = b""
    with suppress(ConnectionResetError):
        while part := connection.recv(1 << 16):
            found += part
    return found


def home_with(folder: Path, **models: Path) -> ModelHome:
    """A model home that holds links to model folders."""
    (folder / "models").mkdir(parents=True, exist_ok=True)
    for name, model in models.items():
        (folder / "models" / name).symlink_to(model, target_is_directory=True)
    return ModelHome(folder, offline=True)


def table_engine(model: Path, decoder: Decoder | None = None) -> Engine:
    """An engine of a table, which drafts from the text, with the tokenizer of a model folder."""
    engine = engine_of(model, decoder or TableDecoder(tiny.VOCAB, seed=3))
    engine._drafting = replace(engine._drafting, speculation=Speculation(lambda: [SuffixDrafter()]))
    return engine


@contextmanager
def serving(
    names: ModelNames,
    open_engine: Callable[[str], Engine],
    *,
    key: str | None = None,
    host: str = "127.0.0.1",
    limits: Limits | None = None,
    max_models: int = 1,
    first: tuple[str, Engine] | None = None,
    send_bytes: int | None = None,
    prefixes: KeptPrefixes | None = None,
    origins: Sequence[str] = (),
    has_page: bool = True,
    tools: Sequence[Tool] = (),
) -> Iterator[Served]:
    """Serve on a free port until the block ends; send_bytes is the size of the buffers of sockets."""
    limits = limits or Limits(drain_s=0.5)
    model_host = ModelHost(open_engine, max_models, prefixes=prefixes)
    services = Services(limits, names, model_host, tools)
    listening = open_socket("127.0.0.1", 0)
    if send_bytes:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_bytes)
    is_ready = Event()
    server = make_server(make_app(services, host, key, origins, has_page=has_page), services, is_ready.set)
    url = url_of(listening)
    thread = Thread(target=lambda: asyncio.run(run_server(server, listening, services, first)), daemon=True)
    thread.start()
    assert is_ready.wait(WAIT_S)
    # Without certificates, which take 20 ms to read; there is no TLS.
    with httpx2.Client(base_url=url.removesuffix("/v1"), verify=False, timeout=WAIT_S) as client:
        try:
            yield Served(url, services, server, client, thread)
        finally:
            client.close()
            server.should_exit = True
            thread.join(WAIT_S)
            assert not thread.is_alive()
