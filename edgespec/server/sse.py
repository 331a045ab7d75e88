"""Server-sent events, or lines of JSON, sent as they are made. Knows nothing of what they say."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from edgespec.server.client import ClientGone, run_for_client
from edgespec.server.errors import closing, error_response, explain
from edgespec.server.limits import Limits
from edgespec.server.request_log import log_failure, record_of

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
_BREAKS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}  # which JSON leaves as they are in a text


def event(document: Mapping[str, Any], name: str | None = None) -> bytes:
    """An event with a JSON document; JSON has no line breaks of its own."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: ".encode() + line(document) + b"\n"


def line(document: Mapping[str, Any]) -> bytes:
    """A line with a JSON document, also for clients that take all line breaks of Unicode for ends of lines."""
    data = json.dumps(document, ensure_ascii=False, separators=(",", ":")).translate(_BREAKS)
    return f"{data}\n".encode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class StreamForm:
    """How a stream is written.

    end: Makes its last part of an error and of the number of events before it.
    pause: What is sent in pauses, if anything may be.
    """

    content_type: str
    end: Callable[[Mapping[str, Any], int], bytes]
    pause: bytes = b""


EVENTS = StreamForm("text/event-stream; charset=utf-8", lambda told, _: event(told) + DONE, KEEP_ALIVE)
LINES = StreamForm("application/x-ndjson", lambda told, _: line(told))


class EventStream(Response):
    """Events of a generator, which ends with its reader.

    The head of the response waits for the first event, or for a pause of limits.keep_alive_s, so that an error
    which comes first has its own status. A later one is an event. A comment is sent in each such pause, where the
    form has one. A reader that takes nothing for longer than limits.reader_s is left.
    """

    def __init__(
        self, events: AsyncGenerator[bytes, None], limits: Limits, is_closing: asyncio.Event, form: StreamForm
    ) -> None:
        super().__init__()
        self._form = form
        self._events = events
        self._limits = limits
        self._is_closing = is_closing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await run_for_client(receive, self._answer(scope, receive, send))
        except ClientGone:
            record_of(scope).notes.append("client gone")

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun, num_events = False, 0
        try:
            async for part in self._parts():
                if not has_begun:
                    has_begun = True
                    headers = [(b"content-type", self._form.content_type.encode()), (b"x-accel-buffering", b"no")]
                    await self._send(send, {"type": "http.response.start", "status": 200, "headers": headers})
                await self._send_part(send, part)
                num_events += part != self._form.pause
        except ClientGone:
            raise
        except Exception as error:
            told = explain(error, scope["path"])
            if told.status >= 500 and told is not error:
                log_failure(scope, error)
            record_of(scope).notes.append(told.code or told.kind)
            if not has_begun:
                await error_response(told, scope["path"])(scope, receive, send)
                return
            await self._send_part(send, self._form.end(told.body(scope["path"]), num_events))
        await self._send(send, {"type": "http.response.body", "body": b"", "more_body": False})

    async def _parts(self) -> AsyncGenerator[bytes, None]:
        """Events, and comments in the pauses. Raises ApiError: 503, the server closes."""
        ending = asyncio.ensure_future(self._is_closing.wait())
        upcoming = asyncio.ensure_future(anext(self._events, None))
        try:
            while True:
                await asyncio.wait(
                    {upcoming, ending}, timeout=self._limits.keep_alive_s, return_when=asyncio.FIRST_COMPLETED
                )
                if upcoming.done():
                    if (part := upcoming.result()) is None:
                        return
                    upcoming = asyncio.ensure_future(anext(self._events, None))
                    yield part
                elif ending.done():
                    raise closing()
                elif self._form.pause:
                    yield self._form.pause
        finally:
            for task in (upcoming, ending):
                task.cancel()
            await asyncio.gather(upcoming, ending, return_exceptions=True)
            await self._events.aclose()

    async def _send_part(self, send: Send, part: bytes) -> None:
        await self._send(send, {"type": "http.response.body", "body": part, "more_body": True})

    async def _send(self, send: Send, message: dict[str, Any]) -> None:
        try:
            async with asyncio.timeout(self._limits.reader_s):
                await send(message)
        except (TimeoutError, OSError):
            raise ClientGone from None
