"""The other end of a request: it may leave at any moment, read slowly, or send its body slowly."""

import asyncio
import re
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import Receive

from edgespec.server.errors import OLLAMA, RETRY_S, ApiError, closing
from edgespec.server.limits import Limits
from edgespec.server.protocol import ModelRequest, parse
from edgespec.system.threads import in_thread
from edgespec.system.units import format_bytes

T = TypeVar("T")
R = TypeVar("R", bound=ModelRequest)
# A body of up to so many times the limit is taken and thrown away. A client that still sends when its connection
# is closed does not read why.
_DISCARDED = 4
# Python's readers of JSON hold the interpreter: 5 million empty lists took 5 s. Texts are passed in one step.
_PIECE = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[{,]', re.DOTALL)
_MAX_PARTS = 300_000
_MAX_VALUES = 1 << 21  # twice as many as a prompt of token ids may have
_LARGE_BYTES = 64 << 10  # a body beyond is read in a thread, so that others do not wait for it


class ClientGone(Exception):
    """The client has closed its connection, or does not read what it is sent."""


@dataclass(slots=True)
class Bodies:
    """Reads the bodies of requests: so many bytes of all at once, and one large body after another.

    So nobody waits longer for the interpreter than one body takes. One thread, that of the event loop.
    """

    limits: Limits
    _num_bytes: int = field(init=False, default=0)  # that have come and are not parsed yet
    _turn: asyncio.Lock = field(init=False, default_factory=asyncio.Lock)

    async def read(self, kind: type[R], request: Request) -> R:
        """A request from its body in JSON.

        Raises:
            ApiError: 415, 413, 408 or 429, it is of another type, too large, does not come, or is one too many;
                400, it is no such request.
            ClientGone: The client left while it sent.
        """
        _require_readable(request, self.limits)
        body = bytearray()
        try:
            try:
                async with asyncio.timeout(self.limits.body_s):
                    await self._receive(request, body)
            except TimeoutError:
                message = f"the body did not come within {self.limits.body_s:g} s"
                raise ApiError(408, message, code="timeout", headers={"Connection": "close"}) from None
            if len(body) <= _LARGE_BYTES:
                return parse(kind, bytes(body))
            return await self.in_turn(partial(_parse_large, kind, bytes(body)))
        finally:
            self._num_bytes -= len(body)

    async def in_turn(self, work: Callable[[], T]) -> T:
        """The result of work of a second and of much memory, in a thread, once the work before it has ended."""
        async with self._turn:
            return await in_thread(work)

    async def _receive(self, request: Request, body: bytearray) -> None:
        """Receive a body to its end; what is too large is taken and thrown away."""
        num_bytes = 0
        while True:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            part = message.get("body", b"")
            num_bytes += len(part)
            if num_bytes <= self.limits.body_bytes:
                self._hold(body, part)
            else:
                self._num_bytes -= len(body)
                body.clear()
            has_more = message.get("more_body", False)
            if num_bytes > self.limits.body_bytes and (
                not has_more or num_bytes > _DISCARDED * self.limits.body_bytes
            ):
                raise _too_large(self.limits)
            if not has_more:
                return

    def _hold(self, body: bytearray, part: bytes) -> None:
        """Add a part to a body. Raises ApiError: 429, there is no room for it beside other bodies."""
        if self._num_bytes + len(part) > self.limits.bodies_bytes:
            raise ApiError(
                429,
                f"bodies of {format_bytes(self.limits.bodies_bytes)} are being read; try again later",
                headers={"Retry-After": str(RETRY_S), "Connection": "close"},
            )
        body += part
        self._num_bytes += len(part)


def _parse_large(kind: type[R], body: bytes) -> R:
    """A request from a large body. Raises ApiError: 413, reading its values would hold other threads up."""
    num_parts = num_values = 0
    for found in _PIECE.finditer(body):
        if body[found.start()] == ord(","):
            num_values += 1
        else:
            num_parts += 1
        if num_parts > _MAX_PARTS or num_values > _MAX_VALUES:
            raise ApiError(
                413,
                f"the body has more than {_MAX_PARTS} texts, lists and objects, or {_MAX_VALUES} values; "
                "send it in parts",
            )
    return parse(kind, body)


def _require_readable(request: Request, limits: Limits) -> None:
    """Raises ApiError: 415 or 413, a body is of another type, or states that it is too large."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    # Programs that know ollama send none, or what curl or fetch states; pages of other sites were refused before.
    others = ("", "application/x-www-form-urlencoded", "text/plain") if request.url.path.startswith(OLLAMA) else ()
    if kind not in ("application/json", *others):
        raise ApiError(415, "the content type must be application/json")
    if request.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        raise ApiError(415, "the body is compressed (Content-Encoding); send it as it is")
    stated = request.headers.get("content-length", "0")
    # A client that asks first, or would send on and on, is refused at once.
    most = limits.body_bytes if "expect" in request.headers else _DISCARDED * limits.body_bytes
    if not (stated.isascii() and stated.isdecimal()) or int(stated) > most:
        raise _too_large(limits)


def _too_large(limits: Limits) -> ApiError:
    return ApiError(
        413,
        f"the body is larger than {format_bytes(limits.body_bytes)}; shorten it",
        headers={"Connection": "close"},
    )


async def run_for_client(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of work, which is cancelled when the client leaves.

    receive: Of a request whose body was read.

    Raises ClientGone: The client left.
    """
    return await _run_until(_until_gone(receive), work, ClientGone())


async def run_until_closing(is_closing: asyncio.Event, work: Coroutine[Any, Any, T]) -> T:
    """The result of work, which is cancelled when the server closes; raises ApiError: 503, it does."""
    return await _run_until(is_closing.wait(), work, closing())


async def _run_until(end: Coroutine[Any, Any, Any], work: Coroutine[Any, Any, T], error: Exception) -> T:
    """The result of work; raises the error if the end comes first."""
    working, ending = asyncio.ensure_future(work), asyncio.ensure_future(end)
    try:
        await asyncio.wait({working, ending}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise error
    finally:
        for task in (working, ending):
            task.cancel()
        await asyncio.gather(working, ending, return_exceptions=True)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
