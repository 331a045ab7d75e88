"""HTTP/1.1 by uvicorn, with a limit on the time that the head of a request may take."""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


def patient_for(headers_s: float) -> type[H11Protocol]:
    """A protocol that closes connections on which no whole head came in so many seconds.

    uvicorn limits the time between two requests alone, so a client that sends one byte now and then could hold a
    connection for ever.
    """

    class PatientProtocol(H11Protocol):
        _deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._deadline = self.loop.call_later(headers_s, self._give_up)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.conn.their_state is not h11.IDLE:
                self._end_deadline()
            elif self._deadline is None:
                self._deadline = self.loop.call_later(headers_s, self._give_up)

        def connection_lost(self, exc: Exception | None) -> None:
            self._end_deadline()
            super().connection_lost(exc)

        def _end_deadline(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

        def _give_up(self) -> None:
            self._deadline = None
            if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
                self.transport.close()

    return PatientProtocol
