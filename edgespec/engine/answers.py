"""An answer as a stream of chunks, made in a thread of its own so that its reader can end it at any moment.

Knows nothing of models: a generator makes the chunks.
"""

import weakref
from _thread import start_new_thread
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Lock, get_ident
from typing import TYPE_CHECKING, Any, NamedTuple

from edgespec.decoding.logprobs import TokenLogprob
from edgespec.decoding.repetition import LoopWatch
from edgespec.drafters.timeline import Interval
from edgespec.engine.reasoning import CLOSE, OPEN, split_reasoning
from edgespec.engine.request_queue import RequestQueue, Ticket
from edgespec.engine.stats import Stats
from edgespec.errors import MemoryExhausted
from edgespec.system.owner_process import Owner
from edgespec.tools.call_events import CallEvent, join_calls
from edgespec.tools.tool import ToolCall

if TYPE_CHECKING:
    from asyncio import Future

# How often Ctrl-C is noticed where the system does not wake a waiting thread for it, as on Windows, and how
# often an interrupt is repeated, which may have come just before its pass.
_WAKE_S = 0.05
_END_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A piece of an answer. The last one says why the answer ended, what it cost, and when each device worked.

    origins: For each token "target", or who drafted it: suffix, ngram, answers, lookahead, or the name of a model.
    logprobs: For each token, if they were asked for.
    tool_calls: What it adds to the calls of tools: CallStart, CallArguments and CallEnd.
    finish_reason: stop (an end token or a stop string), tool_calls (the same, with calls of tools), length
        (max_tokens), context (no room left), cancelled, timeout (timeout_s), or loop (it repeated itself, in a
        conversation that ends loops).
    """

    text: str
    token_ids: tuple[int, ...]
    origins: tuple[str, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    tool_calls: tuple[CallEvent, ...] = ()
    finish_reason: str | None = None
    stats: Stats | None = None
    timeline: tuple[Interval, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A whole answer. token_ids end with the token that completed a stop string, if one did.

    tool_calls: Calls of tools that it asks for; text is what it says beside them.
    """

    text: str
    token_ids: tuple[int, ...]
    origins: tuple[str, ...]
    finish_reason: str
    prompt_tokens: int
    stats: Stats
    timeline: tuple[Interval, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()

    @property
    def reasoning(self) -> str:
        """What a thinking model reasoned before it answered; empty where it did not."""
        return self._parts[0]

    @property
    def answer(self) -> str:
        """The text behind the reasoning; all of it where there is none."""
        return self._parts[1]

    @property
    def _parts(self) -> tuple[str, str]:
        # Where the prompt has opened the reasoning, its end alone is in the text.
        head, mark, _ = self.text.partition(CLOSE)
        return split_reasoning(self.text, is_open=bool(mark) and OPEN not in head)

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message of the conversation that goes on, with its calls."""
        calls = {"tool_calls": [call.as_dict() for call in self.tool_calls]} if self.tool_calls else {}
        return {"role": "assistant", "content": self.text, **calls}


def join_chunks(chunks: Sequence[Chunk], prompt_tokens: int) -> Completion:
    """All chunks of an answer as one."""
    last = chunks[-1]
    assert last.finish_reason is not None
    assert last.stats is not None
    return Completion(
        text="".join(chunk.text for chunk in chunks),
        token_ids=tuple(token for chunk in chunks for token in chunk.token_ids),
        origins=tuple(origin for chunk in chunks for origin in chunk.origins),
        finish_reason=last.finish_reason,
        prompt_tokens=prompt_tokens,
        stats=last.stats,
        timeline=last.timeline,
        logprobs=tuple(each for chunk in chunks for each in chunk.logprobs),
        tool_calls=join_calls(each for chunk in chunks for each in chunk.tool_calls),
    )


class AnswerStream(Iterator[Chunk], AsyncIterator[Chunk]):
    """The chunks of an answer, a pass of the target each; read by one thread, or by one task of asyncio.

    Once the first is asked for, passes go on while their chunks wait for the reader: 256 of them, or for a
    second in which none is asked for. The answer ends at once, even within a pass and before the first chunk,
    when it is cancelled or closed from any thread, or when Ctrl-C interrupts its reader; it then consists of the
    chunks that were read, and chunks that still waited are dropped. It is closed when it is garbage-collected,
    and at the end of a with statement.

        with engine.stream("Why is the sky blue?") as answer:
            for chunk in answer:
                print(chunk.text, end="")

    A task reads with async with and async for; to cancel it cancels the answer.
    """

    def __init__(
        self,
        chunks: Generator[Chunk, None, None],
        queue: RequestQueue,
        ticket: Ticket,
        on_end: Callable[[], None] = lambda: None,
        prompt_tokens: int = 0,
        *,
        ends_loops: bool = False,
    ) -> None:
        """Nothing is made before a chunk is asked for.

        Args:
            ticket: The answer's place in the queue; once it is cancelled, the generator ends with a last chunk.
            on_end: Is called once, by the reader that finds the answer over.
            prompt_tokens: How many tokens the model reads before it writes.
            ends_loops: End an answer that repeats one span of tokens over and over, with the finish reason loop.
        """
        self.prompt_tokens = prompt_tokens
        self._maker = _Maker(chunks, queue, ticket)
        self._on_end = on_end
        self._loops = LoopWatch() if ends_loops else None
        self._is_closed = self._is_interrupted = False
        self._owner = Owner()
        self._collected = weakref.finalize(self, self._maker.end)

    @property
    def last(self) -> Chunk | None:
        """The last chunk, once it is made; also if the stream was closed before it was read."""
        return self._maker.last

    def __enter__(self) -> "AnswerStream":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __next__(self) -> Chunk:
        self._owner.require_here()
        try:
            chunk = self._unpack(self._maker.next_chunk())
        except BaseException:  # Ctrl-C, while waiting, or the answer's own error
            self._is_interrupted = True
            self.close()
            raise
        if chunk is None:
            raise StopIteration
        return chunk

    async def __aenter__(self) -> "AnswerStream":
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._close(0.0)  # the event loop must not wait

    async def __anext__(self) -> Chunk:
        self._owner.require_here()
        try:
            chunk = self._unpack(await self._maker.next_chunk_for_task())
        except BaseException:  # the task was cancelled, or the answer's own error
            self._is_interrupted = True
            self._close(0.0)
            raise
        if chunk is None:
            raise StopAsyncIteration
        return chunk

    def cancel(self) -> None:
        """End the answer: its reader gets a last chunk that is "cancelled", and no more tokens.

        May be called from any thread, from a signal handler, and more than once; a finished answer stays as it is.
        """
        self._maker.cancel()

    def close(self) -> None:
        """End the answer without a last chunk."""
        self._close(_END_S)

    def _close(self, wait_s: float) -> None:
        self._is_closed = True
        self._maker.cancel()
        self._maker.end(wait_s)
        self._finish()

    def _unpack(self, made: "_Made") -> Chunk | None:
        """The chunk; None if the answer is over."""
        is_over = made.chunk is None or made.chunk.finish_reason is not None
        if is_over or self._is_closed:
            self._maker.end()
            self._finish()
        # Where another thread has closed it, a chunk before the last still belongs to the answer: a reader waited.
        if self._is_closed and (is_over or self._is_interrupted):
            return None
        if made.error is not None:
            try:
                raise made.error
            finally:
                del made  # its traceback holds this frame
        if made.chunk and self._loops and self._loops.push(made.chunk.token_ids):
            self._maker.cancel_for("loop")
        return made.chunk

    def _finish(self) -> None:
        if self._collected.detach():
            self._on_end()


async def chunks_of(open_stream: Callable[[], AnswerStream]) -> AsyncGenerator[Chunk, None]:
    """Chunks for an asyncio task; the stream ends with the generator.

    Args:
        open_stream: Makes the stream, in another thread.
    """
    import asyncio  # takes 50 ms

    async with await asyncio.to_thread(open_stream) as stream:
        async for chunk in stream:
            yield chunk


class _Made(NamedTuple):
    """A chunk or an error; the answer is over if it has neither."""

    chunk: Chunk | None = None
    error: BaseException | None = None


def _settle(reply: "Future[_Made]", made: _Made) -> None:
    if not reply.done():  # the task that waited was cancelled
        reply.set_result(made)


class _ChunkRequest(NamedTuple):
    asker: Hashable
    reply: Callable[[_Made], None]


class _Maker:
    """Makes the chunks in a thread, each on request, from passes that may have run before.

    The main thread waits here, where Ctrl-C may come between any two steps: so only queues and locks written in
    C are used, which a signal handler or the garbage collector may use at any moment too.
    """

    def __init__(self, chunks: Generator[Chunk, None, None], queue: RequestQueue, ticket: Ticket) -> None:
        self._chunks = chunks
        self._queue, self._ticket = queue, ticket
        self._requests: SimpleQueue[_ChunkRequest | None] = SimpleQueue()  # None ends the thread
        self._replies: SimpleQueue[_Made] = SimpleQueue()
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

    def next_chunk(self) -> _Made:
        """Wait for the next chunk."""
        self._request(_ChunkRequest(get_ident(), self._replies.put))
        while True:
            is_over = self._is_over  # before looking: the last reply is put before that is set
            with suppress(Empty):
                return self._replies.get_nowait()
            if is_over:
                return _Made()
            if not self._has_reply.acquire(timeout=_WAKE_S):
                self._repeat_cancel()

    async def next_chunk_for_task(self) -> _Made:
        """Wait for the next chunk while other tasks of the event loop run."""
        import asyncio

        loop = asyncio.get_running_loop()
        reply: Future[_Made] = loop.create_future()

        def answer(made: _Made) -> None:
            with suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(_settle, reply, made)

        self._request(_ChunkRequest(asyncio.current_task(), answer))
        while not (await asyncio.wait([reply], timeout=_WAKE_S))[0]:
            if self._is_over:
                await asyncio.sleep(0)
                return reply.result() if reply.done() else _Made()
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

    def end(self, wait_s: float = _END_S) -> None:
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

    def _make_chunk(self, asker: Hashable) -> _Made:
        self._ticket.asker = asker
        try:
            return _Made(next(self._chunks, None))
        except BaseException as error:  # passed on to the reader
            return _Made(error=error)

    def _end_cancelled(self) -> None:
        """Make the last chunk of an answer that was closed while nobody waited for a chunk."""
        if self._ticket.is_cancelled:
            made = self._make_chunk(self._ticket.asker).chunk
            self.last = made if made and made.finish_reason else None
