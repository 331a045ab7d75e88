"""A server process: its socket, its signals and its end."""

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread

import uvicorn
from starlette.types import ASGIApp

from edgespec.engine.engine import Engine
from edgespec.errors import EdgeSpecError
from edgespec.server.answers import Services
from edgespec.server.drain import Drain
from edgespec.server.http_protocol import patient_for
from edgespec.server.limits import Limits
from edgespec.system.signals import ENDING

_LOG = logging.getLogger("edgespec.server")
_GRACE_S = 5.0  # beyond the time that answers have, for clients that do not read their end


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
            if hasattr(
                socket, "SO_EXCLUSIVEADDRUSE"
            ):  # Windows, where SO_REUSEADDR lets two programs share a port
                opened.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)
            else:
                opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            opened.bind(address)
            opened.listen(128)
        except OSError:
            opened.close()
            raise
        return opened
    except socket.gaierror as error:
        raise EdgeSpecError(
            f"--host {host} is no address that this machine knows ({error.strerror}); name one of its own "
            "addresses, or leave it out for 127.0.0.1"
        ) from None
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
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

    def __init__(self, config: uvicorn.Config, drain: Drain, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self.stopped_by: int | None = None  # the first signal
        self._drain = drain
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        num_left = len(self.server_state.tasks)
        _LOG.info(
            "shutting down; requests that are being answered: %d, with %g s to end", num_left, self._drain.drain_s
        )
        self._drain.begin()
        try:
            await super().shutdown(sockets)
        finally:
            self._drain.cancel()

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
                loop.call_soon_threadsafe(self._drain.is_closing.set)

        wanted = [number for number in ENDING if signal.getsignal(number) != signal.SIG_IGN]
        before = {number: signal.signal(number, note) for number in wanted}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def make_server(app: ASGIApp, drain: Drain, limits: Limits, on_ready: Callable[[], None] = lambda: None) -> Server:
    config = uvicorn.Config(
        app,
        http=patient_for(limits.headers_s, limits.reader_s),
        ws="none",
        loop="asyncio",
        lifespan="off",
        access_log=False,
        log_config=None,
        log_level="critical",  # what goes wrong is logged by the application
        proxy_headers=False,
        server_header=False,
        limit_concurrency=limits.num_connections,
        timeout_graceful_shutdown=int(limits.drain_s + _GRACE_S),
        h11_max_incomplete_event_size=limits.headers_bytes,
    )
    return Server(config, drain, on_ready)


async def run_server(
    server: Server, listening: socket.socket, services: Services, first: tuple[str, Engine] | None = None
) -> int:
    """Serve until a signal comes; the exit code of the program.

    Args:
        first: A model that is loaded already, by its name.
    """
    await services.host.start(*(first or (None, None)))
    try:
        await server.serve(sockets=[listening])
    finally:
        await services.host.close()
    return 0 if server.stopped_by is None else 128 + server.stopped_by
