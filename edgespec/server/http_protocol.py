"""HTTP/1.1 by uvicorn, with limits on the time that clients have to send a head and to read a response."""

import asyncio
import json
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from edgespec.server.errors import ApiError


class _PatientProtocol(H11Protocol):
    """HTTP/1.1 that closes connections of clients that send or read nothing for too long."""

    headers_s: float  # in which the whole head of a request has to come
    reader_s: float  # in which a client has to take something of what is left of a response
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._deadline = self.loop.call_later(self.headers_s, self._give_up)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._end_deadline()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(self.headers_s, self._give_up)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_deadline()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, in the shape of all refusals."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):  # within a response
            self.transport.close()
            return
        body = json.dumps(
            ApiError(400, "this is no request in HTTP/1.1, or its head is too large").body()
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
        super().on_response_complete()
        self._await_reader()

    def _await_reader(self, num_left_before: int | None = None) -> None:
        """End a connection whose client takes nothing of what is left to send."""
        num_left = self.transport.get_write_buffer_size()
        if num_left and num_left_before is not None and num_left >= num_left_before:
            self.transport.abort()
        elif num_left:
            self.loop.call_later(self.reader_s, self._await_reader, num_left)

    def _end_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        self._deadline = None
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self.transport.close()


def patient_for(headers_s: float, reader_s: float) -> type[H11Protocol]:
    """A protocol that closes connections of clients that send or read nothing.

    uvicorn limits the time between two requests alone. So a client that sends one byte now and then, or never
    reads the end of a response, could hold a connection for ever.

    Args:
        headers_s: In which the whole head of a request has to come.
        reader_s: In which a client has to take something of what is left of a response.
    """
    limits = {"headers_s": headers_s, "reader_s": reader_s}
    return type("PatientProtocol", (_PatientProtocol,), limits)  # uvicorn takes a class
