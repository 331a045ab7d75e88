"""The answer to a message of a conversation, as a stream that ends when it is over, closed or in a loop."""

from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace

from edgespec.decoding.repetition import Repetition, find_loop
from edgespec.engine.answer_stream import AnswerStream
from edgespec.engine.answers import Chunk, Completion, join_chunks
from edgespec.tokenization.chat_template import Message

_LOOK_AFTER = 64  # tokens, between two looks for a loop


@dataclass(eq=False)
class Reply(Iterator[Chunk], AsyncIterator[Chunk]):
    """An answer as a stream of chunks, for a thread or a task, and a context manager that closes it.

    However it ends, the conversation has the answer as far as it came. Errors are those of Engine.stream.
    """

    prompt_tokens: int  # of all that the model was sent
    dropped: tuple[Message, ...]  # which the model was sent the last time and is no longer
    _stream: AnswerStream
    _chunks: list[Chunk]  # that were read so far; the conversation has this list too
    _on_end: Callable[["Reply", str], None]  # takes the reply and its finish reason, maybe more than once
    _ends_loops: bool  # whether an answer that repeats itself ends
    begun: str = ""  # the beginning of the answer, which was given
    is_over: bool = False
    _loop: Repetition | None = None
    _num_since: int = 0  # tokens since a loop was looked for

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
        self._look_for_loop(chunk)
        if chunk.finish_reason == "cancelled" and self._loop:
            chunk = replace(chunk, finish_reason="loop")
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
    def last(self) -> Chunk | None:
        """The last chunk, once there is one: also if the answer was closed before it was read."""
        last = self._stream.last
        is_loop = last is not None and last.finish_reason == "cancelled" and self._loop is not None
        return replace(last, finish_reason="loop") if last and is_loop else last

    def cancel(self) -> None:
        """End the answer at once, from any thread or a signal handler; a last chunk says that it was cancelled."""
        self._stream.cancel()

    def close(self) -> None:
        """End the answer, if it is not over; the conversation has it as far as it came."""
        self._stream.close()
        self._on_end(self, "cancelled")

    def completion(self) -> Completion:
        """Wait for the whole answer."""
        for _ in self:
            pass
        return join_chunks(self._chunks, self.prompt_tokens)

    def _look_for_loop(self, chunk: Chunk) -> None:
        self._num_since += len(chunk.token_ids)
        if self._num_since < _LOOK_AFTER or not self._ends_loops or self._loop:
            return
        self._num_since = 0
        self._loop = find_loop([token for each in (*self._chunks, chunk) for token in each.token_ids])
        if self._loop:
            self.cancel()
