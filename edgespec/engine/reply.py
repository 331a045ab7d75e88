"""The answer to a message of a conversation, as a stream that ends when it is over or closed."""

from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass

from edgespec.engine.answer_stream import AnswerStream
from edgespec.engine.answers import Chunk, Completion, join_chunks
from edgespec.tokenization.chat_template import Turn
from edgespec.tools.call_events import join_calls
from edgespec.tools.tool import ToolCall


@dataclass(eq=False)
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
        """Wait for the whole answer."""
        for _ in self:
            pass
        return join_chunks(self._chunks, self.prompt_tokens)
