"""An answer while it is made, and when it is done.

It is made in a thread of its own, the target's lane, so that whoever waits for it can end it at any moment. Knows
nothing of models: what is made is a generator of chunks.
"""

import weakref
from _thread import start_new_thread
from collections.abc import AsyncGenerator, Callable, Generator, Hashable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Lock, get_ident
from typing import TYPE_CHECKING, NamedTuple

from edgespec.errors import MemoryExhausted
from edgespec.forks import Owner
from edgespec.stats import Stats
from edgespec.timeline import Interval
from edgespec.turns import Turn, Turns

if TYPE_CHECKING:
    from asyncio import Future

# So often Ctrl-C is heard where the system does not wake a waiting thread for it, as on Windows, and so often an
# interrupt is repeated, as it may have come just before its pass.
_WAKE_S = 0.05
_END_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A piece of an answer. The last one says why it ended and what it cost, and when each lane worked.

    origins: For each token "target", or who drafted it: suffix, ngram, memory, lookahead, or the name of a model.
    finish_reason: stop (an end token or a stop string), length (max_tokens), context (no room left), cancelled.
    """

    text: str
    token_ids: tuple[int, ...]
    origins: tuple[str, ...] = ()
    finish_reason: str | None = None
    stats: Stats | None = None
    timeline: tuple[Interval, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A whole answer. token_ids end with the token that completed a stop string, if one did."""

    text: str
    token_ids: tuple[int, ...]
    origins: tuple[str, ...]
    finish_reason: str
    prompt_tokens: int
    stats: Stats
    timeline: tuple[Interval, ...] = ()


class AnswerStream(Iterator[Chunk]):
    """The chunks of an answer, each made when it is asked for, a pass of the target each.

    It ends at once, also within a pass and before the first chunk, when it is cancelled or closed from any thread,
    or when whoever waits for a chunk is interrupted by Ctrl-C. It is closed when it is collected, and at the end
    of a with statement.

        with engine.stream("Why is the sky blue?") as answer:
            for chunk in answer:
                print(chunk.text, end="")
    """

    def __init__(
        self,
        chunks: Generator[Chunk, None, None],
        turns: Turns,
        turn: Turn,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        """Nothing is made before a chunk is asked for.

        Args:
            turn: Of this answer; the generator ends with a last chunk where it finds it cancelled.
            on_end: Is called once by whoever finds the answer over.
        """
        self._maker = _Maker(chunks, turns, turn)
        self._on_end = on_end
        self._is_closed = False
        self._owner = Owner()
        self._collected = weakref.finalize(self, self._maker.end)

    @property
    def last(self) -> Chunk | None:
        """The last chunk, once it is made: also where the stream was closed before anybody had it."""
        return self._maker.last

    def __enter__(self) -> "AnswerStream":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __next__(self) -> Chunk:
        self._owner.expect_here()
        try:
            made = self._maker.made()
        except BaseException:  # Ctrl-C, while waiting
            self.close()
            raise
        if (chunk := self._seen(made)) is None:
            raise StopIteration
        return chunk

    def cancel(self) -> None:
        """End the answer: whoever reads it has what is made, and a last chunk that is "cancelled".

        May be called from any thread, from a signal handler, and more than once; an answer that is over stays as
        it is.
        """
        self._maker.cancel()

    def close(self) -> None:
        """End the answer without a last chunk."""
        self._close(_END_S)

    def _close(self, wait_s: float) -> None:
        self._is_closed = True
        self._maker.cancel()
        self._maker.end(wait_s)
        self._ended()

    def _seen(self, made: "_Made") -> Chunk | None:
        """The chunk, unless the answer is over."""
        if made.chunk is None or made.chunk.finish_reason is not None:
            self._maker.end()
            self._ended()
        if self._is_closed:
            return None
        if made.error is not None:
            try:
                raise made.error
            finally:
                del made  # its traceback holds this frame
        return made.chunk

    def _ended(self) -> None:
        if self._collected.detach():
            self._on_end()


async def chunks_of(ask: Callable[[], AnswerStream]) -> AsyncGenerator[Chunk, None]:
    """The chunks of the stream that is asked for, for a task; the stream ends with the generator."""
    import asyncio  # takes 50 ms, and few want it

    stream = await asyncio.to_thread(ask)
    try:
        while (chunk := stream._seen(await stream._maker.made_for_task())) is not None:
            yield chunk
    finally:
        stream._close(0.0)  # the loop waits for nothing


class _Made(NamedTuple):
    """A chunk or an error; neither, and the answer is over."""

    chunk: Chunk | None = None
    error: BaseException | None = None


def _settle(reply: "Future[_Made]", made: _Made) -> None:
    if not reply.done():  # whoever waited was cancelled
        reply.set_result(made)


class _Wish(NamedTuple):
    """Somebody asks for a chunk."""

    asker: Hashable
    reply: Callable[[_Made], None]


class _Maker:
    """Makes the chunks in a thread, each when it is wished for.

    Main threads wait here, where Ctrl-C may strike between any two steps: nothing but queues and locks of C is
    used, which a signal handler or the collection of garbage may use at any moment too.
    """

    def __init__(self, chunks: Generator[Chunk, None, None], turns: Turns, turn: Turn) -> None:
        self._chunks = chunks
        self._turns, self._turn = turns, turn
        self._wishes: SimpleQueue[_Wish | None] = SimpleQueue()  # None: no more
        self._replies: SimpleQueue[_Made] = SimpleQueue()
        self._begun = Lock()  # held from then on
        self._working = Lock()  # held until the thread ends
        self._working.acquire()
        self._thread: int | None = None
        self._owner = Owner()
        self._is_over = False
        self.last: Chunk | None = None  # with a finish_reason

    def made(self) -> _Made:
        """The next chunk; waits for it."""
        self._wish(_Wish(get_ident(), self._replies.put))
        while True:
            with suppress(Empty):
                return self._replies.get(timeout=_WAKE_S)
            if self._is_over:
                with suppress(Empty):
                    return self._replies.get_nowait()
                return _Made()
            self._insist()

    async def made_for_task(self) -> _Made:
        """The same; the loop's other tasks run meanwhile."""
        import asyncio

        loop = asyncio.get_running_loop()
        reply: Future[_Made] = loop.create_future()

        def answer(made: _Made) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(_settle, reply, made)

        self._wish(_Wish(asyncio.current_task(), answer))
        while not (await asyncio.wait([reply], timeout=_WAKE_S))[0]:
            if self._is_over:
                await asyncio.sleep(0)
                return reply.result() if reply.done() else _Made()
            self._insist()
        return reply.result()

    def cancel(self) -> None:
        if not self._is_over:
            self._turns.cancel(self._turn)

    def end(self, wait_s: float = _END_S) -> None:
        """Make no more; waits until the thread is gone, unless it hangs."""
        self._wishes.put(None)
        if not self._begun.locked():
            self._is_over = True  # nothing was made, so that nothing is to be undone
        elif self._works_elsewhere() and self._working.acquire(timeout=wait_s):
            self._working.release()

    def _works_elsewhere(self) -> bool:
        """In another thread, and not in a process of which this one is a fork."""
        return not self._is_over and self._thread != get_ident() and self._owner.is_here

    def _insist(self) -> None:
        if self._turn.is_cancelled:
            self.cancel()

    def _wish(self, wish: _Wish) -> None:
        self._wishes.put(wish)
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
            for wish in iter(self._wishes.get, None):
                made = self._make(wish.asker)
                is_last = made.chunk is None or made.chunk.finish_reason is not None
                if is_last:
                    self.last = made.chunk
                wish.reply(made)
                if is_last:
                    break
            self._chunks.close()
        finally:
            self._turns.leave(self._turn)
            self._is_over = True
            self._working.release()

    def _make(self, asker: Hashable) -> _Made:
        self._turns.take(self._turn, asker)
        try:
            return _Made(next(self._chunks, None))
        except BaseException as error:  # it goes to whoever asked
            return _Made(error=error)
        finally:
            self._turns.rest(self._turn)
