"""Bounds of what clients may ask, so that the server stays responsive for all, and ends in time."""

import asyncio
from collections.abc import Awaitable, Iterator
from dataclasses import dataclass, field
from math import ceil
from time import monotonic
from typing import Any, TypeVar

from edgespec.server.errors import ApiError
from edgespec.system.context_managers import contextmanager

T = TypeVar("T")
_NEWEST = 0.2  # share of the newest answer in the running mean
_LONGEST_S = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of requests, connections and waiting."""

    body_bytes: int = 16_000_000
    bodies_bytes: int = 128_000_000  # of all bodies that are being read
    headers_bytes: int = 16 << 10
    num_connections: int = 512
    num_answers: int = 64  # that are made or wait; more are refused
    file_text_bytes: int = 1 << 20  # of the text of a file
    tokenize_length: int = 1 << 20  # characters of a text that is made to tokens for its own sake
    num_tokens: int | None = None  # of an answer, beside what its context has room for
    num_choices: int = 16  # answers to one request
    num_inputs: int = 2048  # texts of one request for vectors
    num_stops: int = 16
    stop_length: int = 1000  # characters
    num_biases: int = 1024
    num_top_logprobs: int = 20
    headers_s: float = 15.0  # to send the head of a request
    body_s: float = 30.0  # to send its body
    reader_s: float = 60.0  # to read what waits for it
    keep_alive_s: float = 10.0  # between two events of a stream
    drain_s: float = 10.0  # for answers to end by themselves when the server shuts down


@dataclass(slots=True)
class Admission:
    """Places for answers. One thread, that of the event loop."""

    num_places: int
    num_taken: int = field(init=False, default=0)
    _mean_s: float = field(init=False, default=1.0)  # from taking a place to leaving it

    @contextmanager
    def place(self, num_answers: int) -> Iterator[None]:
        """Places for the answers to one request. Raises ApiError: 429, there are not enough."""
        if self.num_taken + num_answers > self.num_places:
            raise ApiError(
                429,
                f"{self.num_taken} answers are being made or waiting, and the limit is {self.num_places}; try "
                "again later",
                # An answer leaves after about the mean over the number of them.
                headers={"Retry-After": str(min(_LONGEST_S, max(1, ceil(self._mean_s / max(1, self.num_taken)))))},
            )
        self.num_taken += num_answers
        started = monotonic()
        try:
            yield
        finally:
            self.num_taken -= num_answers
            self._mean_s += _NEWEST * (monotonic() - started - self._mean_s)

    async def wait_for(self, work: Awaitable[T]) -> T:
        """The result of work in a thread, which goes on without its client and keeps a place until it ends."""
        running = asyncio.ensure_future(work)
        try:
            await asyncio.wait([running])  # asyncio.shield would log what fails later, since Python 3.14
            return running.result()
        except asyncio.CancelledError:
            self.num_taken += 1
            running.add_done_callback(self._leave)
            raise

    def _leave(self, work: "asyncio.Future[Any]") -> None:
        self.num_taken -= 1
        if not work.cancelled():
            work.exception()  # else asyncio logs it, with what the client sent
