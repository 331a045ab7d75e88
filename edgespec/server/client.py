"""The other end of a request: it may leave at any moment, read slowly, or send its body slowly."""

import asyncio
import re
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import Receive

from edgespec.server.errors import ApiError, closing
from edgespec.server.limits import Limits
from edgespec.server.protocol import ModelRequest, parse
from edgespec.system.threads import in_thread

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


async def read_request(kind: type[R], request: Request, limits: Limits) -> R:
    """A request from its body; raises what read_body and parse raise."""
    body = await read_body(request, limits)
    if len(body) <= _LARGE_BYTES:
        return parse(kind, body)
    return await in_thread(_parse_large, kind, body)


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


async def read_body(request: Request, limits: Limits) -> bytes:
    """The body of a request in JSON.

    Raises:
        ApiError: 415, 413 or 408; it is of another type, too large, or does not come.
        ClientGone: The client left while it sent.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "the content type must be application/json")
    if request.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        raise ApiError(415, "the body is compressed (Content-Encoding); send it as it is")
    stated = request.headers.get("content-length", "0")
    # A client that asks first, or would send on and on, is refused at once.
    most = limits.body_bytes if "expect" in request.headers else _DISCARDED * limits.body_bytes
    if not (stated.isascii() and stated.isdecimal()) or int(stated) > most:
        raise _too_large(limits)
    try:
        async with asyncio.timeout(limits.body_s):
            return await _read_at_most(limits, request)
    except TimeoutError:
        raise ApiError(
            408,
            f"the body did not come within {limits.body_s:g} s",
            code="timeout",
            headers={"Connection": "close"},
        ) from None


async def _read_at_most(limits: Limits, request: Request) -> bytes:
    body, num_bytes = bytearray(), 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        num_bytes += len(message.get("body", b""))
        if num_bytes <= limits.body_bytes:
            body += message.get("body", b"")
        else:
            body.clear()
        has_more = message.get("more_body", False)
        if num_bytes > limits.body_bytes and (not has_more or num_bytes > _DISCARDED * limits.body_bytes):
            raise _too_large(limits)
        if not has_more:
            return bytes(body)


def _too_large(limits: Limits) -> ApiError:
    return ApiError(
        413, f"the body is larger than {limits.body_bytes >> 20} MiB; shorten it", headers={"Connection": "close"}
    )


async def run_for_client(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of work, which is cancelled when the client leaves.

    Args:
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
