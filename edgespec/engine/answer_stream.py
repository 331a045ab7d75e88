"""An answer as a stream of chunks, which its reader can end at any moment. Knows nothing of models.

Passes run in a thread of their own; the reader's thread, which waits for them, makes chunks of them.
"""

import reprlib
import weakref
from _thread import start_new_thread
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from threading import RLock
from typing import Any, NoReturn, Protocol, TypeVar

from edgespec.engine.answers import Chunk, Completion, cancelled_chunk, join_chunks
from edgespec.engine.run_ahead import Made, RunAhead, Ticket
from edgespec.system.threads import Owner, in_thread
from edgespec.text.chat_template import Turn
from edgespec.tools.call_events import join_calls
from edgespec.tools.tool import ToolCall
from edgespec.types import FinishReason

_END_S = 1.0  # the longest wait for the thread of the passes to end

Pass = TypeVar("Pass", contravariant=True)


class Writer(Protocol[Pass]):
    """Makes chunks of the passes of an answer."""

    def add(self, new: Pass) -> Chunk:
        """The chunk that the reader gets of a pass, with a finish reason if the answer ends with it."""

    def finish(self, last: Chunk) -> Chunk:
        """The last chunk, once no pass runs any more."""

    def close(self) -> None:
        """Take what was added for the answer."""


class _Reading:
    """The chunks of an answer, made where they are read, and its end, which any thread may bring about.

    last: The last chunk, once it is made.
    owner: The process that the answer is made in.
    """

    def __init__(self, passes: RunAhead[Any], writer: Writer[Any], ticket: Ticket) -> None:
        self._passes, self._writer, self.ticket = passes, writer, ticket
        self._lock = RLock()  # of the writer; a signal handler may end the answer within a step of it
        self._is_torn = False  # within a step, or one was left half done
        self._last_read: Chunk | None = None  # with a finish reason
        self.owner = Owner()
        self.is_over = False
        self.last: Chunk | None = None

    def take(self, made: Made[Any]) -> Chunk | None:
        """The chunk of a pass; None where the end of the passes is to be waited for. Raises what ended them."""
        if made.result is None:
            try:
                self._finish(made.error)
            finally:
                del made  # its error's traceback holds this frame
            return self.last
        with self._lock:
            if self.is_over:
                return None
            self._is_torn = True
            chunk = self._writer.add(made.result)
            self._is_torn = False
        if chunk.finish_reason is None:
            return chunk
        self._last_read = chunk
        self._passes.stop()
        return None

    def end(self, wait_s: float = _END_S) -> None:
        """End the answer, and wait until its thread is gone, unless that takes longer; then it ends later."""
        if self.is_over or not self.owner.is_here:
            return
        if self._passes.end(wait_s):
            self._finish()
        else:
            self._end_later()

    def abandon(self) -> None:
        """End an answer that nobody holds; the garbage collector calls this at any moment, within any lock."""
        if not self.is_over and self.owner.is_here:
            self._passes.end(_END_S)
            if self._passes.is_begun:
                self._end_later()

    def _end_later(self) -> None:
        with suppress(RuntimeError):  # no thread can be started
            start_new_thread(self.end, (inf,))

    def _finish(self, error: BaseException | None = None) -> None:
        with self._lock:
            if self.is_over:
                return
            self.is_over = True
            is_cancelled = self.ticket.is_cancelled
            try:
                if error is not None and self._last_read is None and not is_cancelled:
                    raise error
                if not self._is_torn and self._passes.is_begun:
                    reason: FinishReason = self.ticket.finish_reason if is_cancelled else "context"
                    ended = self._last_read or Chunk(text="", token_ids=(), finish_reason=reason)
                    self.last = self._writer.finish(ended)
            finally:
                del error  # its traceback holds this frame
                self._writer.close()
                del self._writer  # which keeps drafter models open


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
        passes: RunAhead[Any],
        writer: Writer[Any],
        ticket: Ticket,
        on_end: Callable[[], None] = lambda: None,
        prompt_tokens: int = 0,
        num_read: Callable[[], int] = int,
        *,
        schema: Any = None,
        opens_reasoning: bool = False,
    ) -> None:
        """Nothing is made before a chunk is asked for.

        Args:
            ticket: The answer's place in the queue.
            on_end: Is called once, by the reader that finds the answer over.
            prompt_tokens: How many tokens the model reads before it writes.
            num_read: How many of them it has read by now.
            schema: What the answer has to match, as its caller gave it.
            opens_reasoning: Its text begins within the reasoning, without the mark that opens it.
        """
        self.prompt_tokens, self._num_read, self.schema = prompt_tokens, num_read, schema
        self.opens_reasoning = opens_reasoning
        self._passes = passes
        self._reading = _Reading(passes, writer, ticket)
        self._on_end = on_end
        self._is_closed = self._is_prompt_read = False
        self._collected = weakref.finalize(self, self._reading.abandon)

    def __reduce__(self) -> NoReturn:
        """Refuse copies: only its reader ends an answer."""
        raise TypeError("a stream cannot be copied or pickled; generate() gives the whole answer, which can")

    def __repr__(self) -> str:
        return f"<AnswerStream to {self.prompt_tokens} tokens, {'over' if self._reading.is_over else 'open'}>"

    @property
    def num_read(self) -> int:
        """How many tokens of the prompt the model has read by now, also for earlier answers."""
        return self.prompt_tokens if self._is_prompt_read else self._num_read()

    @property
    def last(self) -> Chunk | None:
        """The last chunk, once it is made; also if the stream was closed before it was read."""
        return self._reading.last

    def __enter__(self) -> "AnswerStream":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __next__(self) -> Chunk:
        self._reading.owner.require_here()
        chunk = None
        try:
            while chunk is None and not self._reading.is_over:
                chunk = self._reading.take(self._passes.wait())
        except BaseException:  # Ctrl-C, while waiting, or the answer's own error
            self.close()
            raise
        if (chunk := self._give(chunk)) is None:
            raise StopIteration
        return chunk

    async def __aenter__(self) -> "AnswerStream":
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._close(0.0)  # the event loop must not wait

    async def __anext__(self) -> Chunk:
        self._reading.owner.require_here()
        chunk = None
        try:
            while chunk is None and not self._reading.is_over:
                chunk = self._reading.take(await self._passes.wait_in_task())
        except BaseException:  # the task was cancelled, or the answer's own error
            self._close(0.0)
            raise
        if (chunk := self._give(chunk)) is None:
            raise StopAsyncIteration
        return chunk

    def cancel(self) -> None:
        """End the answer: its reader gets a last chunk that is "cancelled", and no more tokens.

        May be called from any thread, from a signal handler, and more than once; a finished answer stays as it is.
        """
        if not self._reading.is_over:
            self._passes.cancel()

    def close(self) -> None:
        """End the answer without a last chunk."""
        self._close(_END_S)

    def _close(self, wait_s: float) -> None:
        self._is_closed = True
        self.cancel()
        self._reading.end(wait_s)
        self._finish()

    def _give(self, chunk: Chunk | None) -> Chunk | None:
        """The chunk as the reader gets it; None for none, if the answer is over."""
        if chunk is not None and (chunk.token_ids or chunk.finish_reason in ("stop", "length")):
            self._is_prompt_read = True
        # Where another thread has closed it, a chunk before the last still belongs to the answer: a reader waited.
        if chunk is None or chunk.finish_reason is not None:
            self._finish()
            return None if self._is_closed else chunk
        return chunk

    def _finish(self) -> None:
        if self._collected.detach():
            on_end, self._on_end = self._on_end, lambda: None  # it keeps drafter models open
            on_end()


async def chunks_of(open_stream: Callable[[], AnswerStream]) -> AsyncGenerator[Chunk, None]:
    """Chunks for an asyncio task; the stream ends with the generator.

    open_stream: Makes the stream, in another thread.
    """
    async with await in_thread(open_stream) as stream:
        async for chunk in stream:
            yield chunk


@dataclass(eq=False, repr=False)
class Reply(Iterator[Chunk], AsyncIterator[Chunk]):
    """An answer as a stream of chunks, for a thread or a task, and a context manager that closes it.

    However it ends, the conversation has the answer as far as it came. Errors are those of Engine.stream.
    """

    prompt_tokens: int  # of all that the model was sent
    dropped: tuple[Turn, ...]  # which the model was sent the last time and is no longer
    _stream: AnswerStream
    _chunks: list[Chunk]  # that were read so far; the conversation has this list too
    _on_end: Callable[["Reply", str], None]  # takes the reply and its finish reason, maybe more than once
    begun: str = ""  # the beginning of the answer, which was given
    is_over: bool = False

    def __repr__(self) -> str:
        return f"<Reply {reprlib.repr(self.text)}, {'over' if self.is_over else 'open'}>"

    def __next__(self) -> Chunk:
        try:
            chunk = next(self._stream)
        except BaseException:
            self.close()
            raise
        return self._take(chunk)

    async def __anext__(self) -> Chunk:
        try:
            chunk = await anext(self._stream)
        except BaseException:
            await self.__aexit__()
            raise
        return self._take(chunk)

    def _take(self, chunk: Chunk) -> Chunk:
        self._chunks.append(chunk)
        if chunk.finish_reason is not None:
            self._on_end(self, chunk.finish_reason)
        return chunk

    async def __aenter__(self) -> "Reply":
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._stream.__aexit__()
        self._on_end(self, "cancelled")

    def __enter__(self) -> "Reply":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def text(self) -> str:
        """The answer so far, with what it was given to begin with."""
        return self.begun + "".join(chunk.text for chunk in self._chunks)

    @property
    def opens_reasoning(self) -> bool:
        """True if what is new of the answer begins within the reasoning, without the mark that opens it."""
        return self._stream.opens_reasoning

    @property
    def num_read(self) -> int:
        """How many of prompt_tokens the model has read by now, also for earlier answers."""
        return min(self._stream.num_read, self.prompt_tokens)

    @property
    def last(self) -> Chunk | None:
        """The last chunk, once there is one: also if the answer was closed before it was read."""
        return self._stream.last

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """The calls of tools that the answer ended with; their results go to Conversation.give_results."""
        if not self._chunks or self._chunks[-1].finish_reason != "tool_calls":
            return ()
        return join_calls(event for chunk in self._chunks for event in chunk.tool_calls)

    def cancel(self) -> None:
        """End the answer at once, from any thread or a signal handler; a last chunk says that it was cancelled."""
        self._stream.cancel()

    def close(self) -> None:
        """End the answer, if it is not over; the conversation has it as far as it came."""
        self._stream.close()
        self._on_end(self, "cancelled")

    def completion(self) -> Completion:
        """Wait for the whole answer; of one that was closed, give what had come of it, as a cancelled one."""
        for _ in self:
            pass
        is_whole = bool(self._chunks) and self._chunks[-1].finish_reason is not None
        chunks = self._chunks if is_whole else [*self._chunks, cancelled_chunk(self.last)]
        return join_chunks(chunks, self.prompt_tokens, self._stream.schema)
