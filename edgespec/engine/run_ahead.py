"""Passes of an answer in a thread of their own, so that the next one begins before its reader has taken the last.

Knows nothing of models: a generator makes the passes.
"""

from _thread import start_new_thread
from collections.abc import Generator, Hashable, Iterator
from queue import SimpleQueue
from threading import Lock
from typing import Generic, NamedTuple, TypeVar

from edgespec.engine.request_queue import RequestQueue, Ticket
from edgespec.errors import Cancelled, MemoryExhausted
from edgespec.system.owner_process import Owner

# Passes that may wait for a reader. One that takes 5 ms a chunk delays a target of 3 ms a pass after 640 of them;
# one that asks for no more for a second (IDLE_S) is waited for sooner.
MAX_AHEAD = 256
# How often an interrupt is repeated, which may have come just before its pass.
_REPEAT_S = 0.05

Pass = TypeVar("Pass")


class _Asked(NamedTuple):
    """The reader wants a pass; asker is its thread or task."""

    asker: Hashable


class _Made(NamedTuple, Generic[Pass]):
    """A pass; without one the answer is over, with an error if there was one."""

    result: Pass | None = None
    error: BaseException | None = None


class RunAhead(Iterator[Pass]):
    """The passes of a generator, which runs in a thread of its own and goes on while they wait for the reader.

    It begins with the first pass that is asked for, goes at most MAX_AHEAD passes ahead, and does not go ahead
    where that would keep another answer in the queue from the target. Once the answer is cancelled the passes
    that wait are dropped. It leaves the queue when the generator has ended.
    """

    def __init__(
        self,
        passes: Generator[Pass, None, None],
        queue: RequestQueue,
        ticket: Ticket,
        max_ahead: int | None = None,
        *,
        is_prompt: bool = True,
    ) -> None:
        """Nothing is made before a pass is asked for.

        Args:
            max_ahead: MAX_AHEAD unless given.
            is_prompt: Hand each pass over at once. Otherwise the generator calls hand_over when its next pass
                begins: a reader that wakes before would compete with it for the interpreter.
        """
        self._passes = passes
        self._queue, self._ticket = queue, ticket
        self._max_ahead = MAX_AHEAD if max_ahead is None else max_ahead
        self._requests: SimpleQueue[_Asked | None] = SimpleQueue()  # None ends the thread
        self._made: SimpleQueue[_Made[Pass]] = SimpleQueue()
        self._is_prompt = is_prompt
        self._held: list[_Made[Pass]] = []  # not handed over yet
        self._is_begun = self._is_over = False
        self._working = Lock()  # held until the thread ends
        self._owner = Owner()

    def __next__(self) -> Pass:
        """Raises what a pass raised; Cancelled: the answer was cancelled."""
        if self._ticket.is_cancelled:
            raise Cancelled("the answer was cancelled")
        if self._is_over:
            raise StopIteration
        self._begin()
        self._requests.put(_Asked(self._ticket.asker))
        made = self._made.get()
        if made.result is not None:
            return made.result
        self._is_over = True
        if made.error is None:
            raise StopIteration
        try:
            raise made.error
        finally:
            del made  # its traceback holds this frame

    def hand_over(self) -> None:
        """Let the reader have what was made; the generator's thread calls this."""
        for made in self._held:
            self._made.put(made)
        self._held.clear()

    def close(self) -> None:
        """End the running pass, whose result nobody takes, and the thread; wait until it is gone."""
        if not self._is_begun:
            self._passes.close()
            return
        self._requests.put(None)
        if self._is_over or not self._owner.is_here:  # a forked process has no such thread
            return
        self._is_over = True
        wait_s = 0.0
        while not self._working.acquire(timeout=wait_s):
            self._queue.cancel(self._ticket)
            wait_s = _REPEAT_S

    def _begin(self) -> None:
        if self._is_begun:
            return
        self._working.acquire()
        try:
            start_new_thread(self._work, ())
        except RuntimeError as error:
            self._working.release()
            raise MemoryExhausted(f"no thread can be started ({error}); close other programs") from error
        self._is_begun = True

    def _work(self) -> None:
        end: _Made[Pass] = _Made()
        try:
            self._make_passes()
        except BaseException as error:  # passed on to the reader
            end = _Made(error=error)
        try:
            self._passes.close()
        except BaseException as error:
            end = _Made(error=end.error or error)
        self._queue.leave(self._ticket)
        self._held.append(end)
        self.hand_over()
        self._working.release()

    def _make_passes(self) -> None:
        num_ahead = 0  # passes that nobody has asked for; -1 while one is waited for
        for request in iter(self._next_request, None):
            num_ahead -= 1
            if num_ahead < 0:
                self._queue.take(self._ticket, request.asker)
                if not self._make_pass():
                    return
                num_ahead += 1
            else:
                self._queue.note(self._ticket, request.asker)
            while num_ahead < self._max_ahead and self._requests.empty() and self._queue.take_ahead(self._ticket):
                if not self._make_pass(is_ahead=True):
                    return
                num_ahead += 1

    def _next_request(self) -> _Asked | None:
        if self._requests.empty():
            self.hand_over()
            self._queue.rest(self._ticket)
        return self._requests.get()

    def _make_pass(self, is_ahead: bool = False) -> bool:
        """Make the next pass. Returns False when the answer is over."""
        try:
            result = next(self._passes, None)
        finally:
            # The reader may have asked for it meanwhile.
            self._queue.release(self._ticket, is_ahead=is_ahead and self._requests.empty())
        if result is None:
            return False
        self._held.append(_Made(result))
        if self._is_prompt:
            self.hand_over()
        return True
