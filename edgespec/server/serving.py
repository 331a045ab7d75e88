"""A server process: its socket, HTTP/1.1 by uvicorn, its signals and its end."""

import asyncio
import errno
import json
import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from threading import current_thread, main_thread
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from edgespec import EdgeSpecError, Engine
from edgespec.server.answers import Services
from edgespec.server.errors import RETRY_S, ApiError, error_response
from edgespec.server.limits import Limits
from edgespec.server.security import OPEN_PAGE
from edgespec.system.signals import ENDING

_LOG = logging.getLogger("edgespec.server")
_GRACE_S = 5.0  # beyond the time that answers have, for clients that do not read their end
# Parts of a body that may come, and one more for so many bytes; each takes 14 µs of all clients' time.
_MAX_PARTS, _PART_BYTES = 4_000, 64
_BACKLOG = 128  # connections that wait to be taken
_TAKEN = 4  # of these at once; some more are taken before the first of them can be refused
_FILES = 4  # that may be open for each connection, models and threads included


def within_open_files(limits: Limits) -> Limits:
    """Limits without connections that this process may open no files for, once it may open more, if it may."""
    if sys.platform == "win32":
        return limits
    import resource

    unlimited, most = resource.RLIM_INFINITY, _FILES * limits.num_connections
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # macOS begins with 256
    if soft != unlimited and soft < most:
        soft = most if hard == unlimited else min(most, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == unlimited:
        return limits
    return replace(limits, num_connections=min(limits.num_connections, soft // _FILES))


def open_socket(host: str, port: int) -> socket.socket:
    """A socket that listens; port 0 is any free one.

    Raises EdgeSpecError: The port is in use or not allowed, or the address is none of this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        opened = socket.socket(family, kind, protocol)
        try:
            # On Windows SO_REUSEADDR lets two programs share a port.
            option = getattr(socket, "SO_EXCLUSIVEADDRUSE", socket.SO_REUSEADDR)
            opened.setsockopt(socket.SOL_SOCKET, option, 1)
            opened.bind(address)
            opened.listen(_BACKLOG)
        except OSError:
            opened.close()
            raise
        return opened
    except (OSError, OverflowError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        is_foreign = getattr(error, "errno", None) == errno.EADDRNOTAVAIL
        if is_foreign or isinstance(error, (socket.gaierror, UnicodeError)):
            raise EdgeSpecError(
                f"--host {host} is not an address of this machine ({reason}); name one of its own "
                "addresses, or leave it out for 127.0.0.1"
            ) from None
        raise EdgeSpecError(
            f"cannot listen on port {port} of {host} ({reason}); choose another one with --port, or --port 0 for "
            "any that is free"
        ) from None


def url_of(listening: socket.socket) -> str:
    """The address that clients are given, such as http://127.0.0.1:8080/v1"""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"


class Server(uvicorn.Server):
    """uvicorn's server, which tells when it is ready, and lets answers end when it is stopped.

    The first signal begins the end: no connection is taken, and answers have some time. The second one cuts them
    short.
    """

    def __init__(self, config: uvicorn.Config, services: Services, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self.stopped_by: int | None = None  # the first signal
        self._drain_s, self._is_closing = services.limits.drain_s, services.is_closing
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for each in sockets or ():
            each.listen(_BACKLOG)  # asyncio lets no more wait than it takes at once
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        num_left = len(self.server_state.tasks)
        _LOG.info("shutting down; requests being answered: %d, with %g s to finish", num_left, self._drain_s)
        timer = asyncio.get_running_loop().call_later(self._drain_s, self._is_closing.set)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Have signals end the server; uvicorn's own method raises them once more behind its end."""
        if current_thread() is not main_thread():
            yield
            return
        loop = asyncio.get_running_loop()

        def note(number: int, frame: object) -> None:
            if self.stopped_by is None:
                self.stopped_by = number
                self.should_exit = True
            else:
                loop.call_soon_threadsafe(self._is_closing.set)

        wanted = [number for number in ENDING if signal.getsignal(number) != signal.SIG_IGN]
        before = {number: signal.signal(number, note) for number in wanted}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def make_server(app: ASGIApp, services: Services, on_ready: Callable[[], None]) -> Server:
    limits = services.limits
    config = uvicorn.Config(
        app,
        http=type("PatientProtocol", (_PatientProtocol,), {"limits": limits}),  # uvicorn takes a class
        ws="none",
        loop="asyncio",
        lifespan="off",
        access_log=False,
        log_config=None,
        log_level="critical",  # what goes wrong is logged by the application
        backlog=_TAKEN,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=int(limits.drain_s + _GRACE_S),
        h11_max_incomplete_event_size=limits.headers_bytes,
    )
    return Server(config, services, on_ready)


async def run_server(
    server: Server, listening: socket.socket, services: Services, first: tuple[str, Engine] | None = None
) -> int:
    """Serve until a signal comes; the exit code of the program.

    first: A model that is loaded already, by its name.
    """
    await services.host.start(*(first or (None, None)))
    try:
        await server.serve(sockets=[listening])
    finally:
        await services.host.close()
    return 0 if server.stopped_by is None else 128 + server.stopped_by


class _BoundedConnection(h11.Connection):
    """A connection that takes bodies in no more parts than their bytes justify: a chunk may have a single byte."""

    _spare = 0  # parts that may still come without bytes of their own

    def next_event(self) -> Any:
        """Raises RemoteProtocolError: What comes is no HTTP, or in too many parts."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._spare = _MAX_PARTS * _PART_BYTES
        elif isinstance(event, h11.Data):
            self._spare += len(event.data) - _PART_BYTES
            if self._spare < 0:
                raise h11.RemoteProtocolError("the body comes in too many parts")
        return event


class _PatientProtocol(H11Protocol):
    """HTTP/1.1 that closes connections of clients that send or read nothing for too long.

    uvicorn limits the time between two requests alone. So a client that sends one byte now and then, or never
    reads the end of a response, could hold a connection for ever. Where there are too many connections, the one
    that has asked for nothing for longest is closed for a new one; where all ask, the new one is refused.
    """

    limits: Limits
    _deadline: asyncio.TimerHandle | None = None
    _idle_since_s = 0.0

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.conn = _BoundedConnection(h11.SERVER, self.limits.headers_bytes)

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._idle_since_s = self.loop.time()
        self._deadline = self.loop.call_later(self.limits.headers_s, self._give_up)
        if len(self.connections) > self.limits.num_connections:
            self._make_room()

    def _make_room(self) -> None:
        """Close the connection that waits for a request for longest, or refuse this one."""
        peers = [each for each in self.connections if isinstance(each, _PatientProtocol)]
        left = [each for each in peers if not each.transport.is_closing()]
        idle = [each for each in left if each.conn.their_state is h11.IDLE and each is not self]
        if len(left) <= self.limits.num_connections:
            return
        if idle:
            min(idle, key=lambda each: each._idle_since_s).transport.abort()
        else:
            self.app = partial(_refuse_more, self.app, self.limits.num_connections)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._end_deadline()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(self.limits.headers_s, self._give_up)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_deadline()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, in the shape of all refusals."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):  # within a response
            self.transport.close()
            return
        body = json.dumps(
            ApiError(
                400, "this is not an HTTP/1.1 request, its head is too large, or its body comes in too small parts"
            ).body("")
        ).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        for event in (
            h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def on_response_complete(self) -> None:
        self._idle_since_s = self.loop.time()
        super().on_response_complete()
        self._await_reader()

    def _await_reader(self, num_left_before: int | None = None) -> None:
        """End a connection whose client takes nothing of what is left to send."""
        num_left = self.transport.get_write_buffer_size()
        if num_left and num_left_before is not None and num_left >= num_left_before:
            self.transport.abort()
        elif num_left:
            self.loop.call_later(self.limits.reader_s, self._await_reader, num_left)

    def _end_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        self._deadline = None
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self.transport.close()


async def _refuse_more(app: Any, num_connections: int, scope: Scope, receive: Receive, send: Send) -> None:
    """Say that there are too many connections, except to who asks if the server runs."""
    full = ApiError(
        503,
        f"{num_connections} connections are open, which is the limit; try again later",
        headers={"Retry-After": str(RETRY_S), "Connection": "close"},
    )
    await (app if scope["path"] == OPEN_PAGE else error_response(full, scope["path"]))(scope, receive, send)
