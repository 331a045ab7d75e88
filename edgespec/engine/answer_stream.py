"""An answer as a stream of chunks, which its reader can end at any moment. Knows nothing of models."""

import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator

from edgespec.decoding.repetition import LoopWatch
from edgespec.engine.answers import Chunk
from edgespec.engine.chunk_maker import END_S, ChunkMaker, Made
from edgespec.engine.request_queue import RequestQueue, Ticket
from edgespec.system.owner_process import Owner


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
        num_read: Callable[[], int] = int,
        *,
        ends_loops: bool = False,
    ) -> None:
        """Nothing is made before a chunk is asked for.

        Args:
            ticket: The answer's place in the queue; once it is cancelled, the generator ends with a last chunk.
            on_end: Is called once, by the reader that finds the answer over.
            prompt_tokens: How many tokens the model reads before it writes.
            num_read: How many of them it has read by now.
            ends_loops: End an answer that repeats one span of tokens over and over, with the finish reason loop.
        """
        self.prompt_tokens, self._num_read = prompt_tokens, num_read
        self._maker = ChunkMaker(chunks, queue, ticket)
        self._on_end = on_end
        self._loops = LoopWatch() if ends_loops else None
        self._is_closed = self._is_interrupted = False
        self._owner = Owner()
        self._collected = weakref.finalize(self, self._maker.end)

    @property
    def num_read(self) -> int:
        """How many tokens of the prompt a cache holds by now, also from earlier answers."""
        return self._num_read()

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
        self._close(END_S)

    def _close(self, wait_s: float) -> None:
        self._is_closed = True
        self._maker.cancel()
        self._maker.end(wait_s)
        self._finish()

    def _unpack(self, made: Made) -> Chunk | None:
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
