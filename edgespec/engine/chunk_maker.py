"""Makes the chunks of an answer in a thread of its own, each on request. Knows nothing of what is in them."""

from _thread import start_new_thread
from collections.abc import Callable, Generator, Hashable
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Lock, get_ident
from typing import TYPE_CHECKING, NamedTuple

from edgespec.engine.answers import Chunk
from edgespec.engine.request_queue import RequestQueue, Ticket
from edgespec.errors import MemoryExhausted
from edgespec.system.owner_process import Owner

if TYPE_CHECKING:
    from asyncio import Future

# How often Ctrl-C is noticed where the system does not wake a waiting thread for it, as on Windows, and how
# often an interrupt is repeated, which may have come just before its pass.
_WAKE_S = 0.05
END_S = 1.0  # the longest wait for the thread to end


class Made(NamedTuple):
    """A chunk or an error; the answer is over if it has neither."""

    chunk: Chunk | None = None
    error: BaseException | None = None


def _settle(reply: "Future[Made]", made: Made) -> None:
    if not reply.done():  # the task that waited was cancelled
        reply.set_result(made)


class _ChunkRequest(NamedTuple):
    asker: Hashable
    reply: Callable[[Made], None]


class ChunkMaker:
    """Makes the chunks in a thread, each on request, from passes that may have run before.

    The main thread waits here, where Ctrl-C may come between any two steps: so only queues and locks written in
    C are used, which a signal handler or the garbage collector may use at any moment too.
    """

    def __init__(self, chunks: Generator[Chunk, None, None], queue: RequestQueue, ticket: Ticket) -> None:
        self._chunks = chunks
        self._queue, self._ticket = queue, ticket
        self._requests: SimpleQueue[_ChunkRequest | None] = SimpleQueue()  # None ends the thread
        self._replies: SimpleQueue[Made] = SimpleQueue()
        # Released when there may be a reply. SimpleQueue.get(timeout=...) would do, but a signal that comes as the
        # timeout ends makes it wait for ever (CPython 3.11: the time left is negative, which means no timeout).
        self._has_reply = Lock()
        self._has_reply.acquire()
        self._begun = Lock()  # held from then on
        self._working = Lock()  # held until the thread ends
        self._working.acquire()
        self._thread: int | None = None
        self._owner = Owner()
        self._is_over = False
        self.last: Chunk | None = None  # with a finish_reason

    def next_chunk(self) -> Made:
        """Wait for the next chunk."""
        self._request(_ChunkRequest(get_ident(), self._replies.put))
        while True:
            is_over = self._is_over  # before looking: the last reply is put before that is set
            with suppress(Empty):
                return self._replies.get_nowait()
            if is_over:
                return Made()
            if not self._has_reply.acquire(timeout=_WAKE_S):
                self._repeat_cancel()

    async def next_chunk_for_task(self) -> Made:
        """Wait for the next chunk while other tasks of the event loop run."""
        import asyncio

        loop = asyncio.get_running_loop()
        reply: Future[Made] = loop.create_future()

        def answer(made: Made) -> None:
            with suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(_settle, reply, made)

        self._request(_ChunkRequest(asyncio.current_task(), answer))
        while not (await asyncio.wait([reply], timeout=_WAKE_S))[0]:
            if self._is_over:
                await asyncio.sleep(0)
                return reply.result() if reply.done() else Made()
            self._repeat_cancel()
        return reply.result()

    def cancel(self) -> None:
        if not self._is_over:
            self._queue.cancel(self._ticket)

    def cancel_for(self, finish_reason: str) -> None:
        """End the answer, unless it is being ended for another reason already."""
        if not self._ticket.is_cancelled:
            self._ticket.finish_reason = finish_reason
            self.cancel()

    def end(self, wait_s: float = END_S) -> None:
        """End the thread, and wait until it is gone, unless it hangs."""
        self._requests.put(None)
        if not self._begun.locked():
            self._is_over = True  # nothing was started, so there is nothing to end
        elif self._is_in_other_thread() and self._working.acquire(timeout=wait_s):
            self._working.release()

    def _is_in_other_thread(self) -> bool:
        """Whether the thread is still running in this process, and is not the current thread."""
        return not self._is_over and self._thread != get_ident() and self._owner.is_here

    def _repeat_cancel(self) -> None:
        self._cancel_if_late()
        if self._ticket.is_cancelled:
            self.cancel()

    def _cancel_if_late(self) -> None:
        if self._ticket.is_late:
            self.cancel_for("timeout")

    def _request(self, request: _ChunkRequest) -> None:
        self._cancel_if_late()
        self._requests.put(request)
        if self._is_over or not self._begun.acquire(blocking=False):
            return
        try:
            # Thread.start() waits for its thread in Python, where Ctrl-C can leave that stuck.
            start_new_thread(self._work, ())
        except RuntimeError as error:
            self._begun.release()
            raise MemoryExhausted(f"no thread can be started ({error}); close other programs") from error

    def _work(self) -> None:
        self._thread = get_ident()
        try:
            for request in iter(self._requests.get, None):
                made = self._make_chunk(request.asker)
                is_last = made.chunk is None or made.chunk.finish_reason is not None
                if is_last:
                    self.last = made.chunk
                request.reply(made)
                self._wake()
                if is_last:
                    break
            else:
                self._end_cancelled()
            self._chunks.close()
        finally:
            self._queue.leave(self._ticket)
            self._is_over = True
            self._wake()
            self._working.release()

    def _wake(self) -> None:
        with suppress(RuntimeError):  # it is released already
            self._has_reply.release()

    def _make_chunk(self, asker: Hashable) -> Made:
        self._ticket.asker = asker
        try:
            return Made(next(self._chunks, None))
        except BaseException as error:  # passed on to the reader
            return Made(error=error)

    def _end_cancelled(self) -> None:
        """Make the last chunk of an answer that was closed while nobody waited for a chunk."""
        if self._ticket.is_cancelled:
            made = self._make_chunk(self._ticket.asker).chunk
            self.last = made if made and made.finish_reason else None
