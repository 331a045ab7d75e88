"""The passes of an answer in a thread of their own, and the queues in which they and their reader wait.

As many answers as the target has caches are made at once, the others wait. Answers could share a cache and
alternate after each pass. But it holds one text, so they would each read their whole prompt again at every pass.
Knows nothing of models: a generator makes the passes.
"""

from _thread import start_new_thread
from collections import deque
from collections.abc import Callable, Generator, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf
from queue import Empty, SimpleQueue
from threading import Condition, Lock, RLock, get_ident
from time import monotonic, sleep
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from edgespec.decoding.pass_queue import Caller
from edgespec.errors import MemoryExhausted
from edgespec.system.cancel import Flag
from edgespec.system.threads import end_at_exit, has_ended
from edgespec.types import FinishReason

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop, Future

IDLE_S = 1.0
# Passes that may wait for a reader. One that takes 5 ms a chunk delays a target of 3 ms a pass after 640 of them;
# one that asks for no more for a second (IDLE_S) is waited for sooner.
MAX_AHEAD = 256
# How often Ctrl-C is noticed where the system does not wake a waiting thread for it, as on Windows, and how
# often an interrupt is repeated, which may have come just before its pass.
_WAKE_S = 0.05
_EXIT_S = 5.0  # the longest that the end of Python waits for a pass to end
# The second pass begins so much later, in which the reader wakes and makes text of the first one.
_READ_S = 0.0002

Pass = TypeVar("Pass")


@dataclass(slots=True, eq=False, weakref_slot=True)
class Ticket:
    """An answer in the queue.

    choose: Picks a cache for it among those that are free, by their numbers.
    cache: The number of its cache, while it has one.
    num_given: How often it was given one, which may hold another text each time.
    caller: The answer as the queue of passes sees it.
    """

    interrupt: Callable[[], None] = lambda: None  # ends the running step at once
    asker: Hashable = None  # the thread or task that waits for the step, or has waited for the last one
    cancelled: Flag = field(default_factory=Flag)
    is_working: bool = False
    rested_s: float = 0.0  # since when no step is asked for
    deadline_s: float = inf  # by the monotonic clock, when the answer is to end
    finish_reason: FinishReason = "cancelled"  # what ended it, once it is cancelled
    choose: Callable[[Sequence[int]], int] = min
    cache: int | None = None
    num_given: int = 0
    caller: Caller = field(default_factory=Caller)

    @property
    def priority(self) -> int:
        return self.caller.priority

    @property
    def is_cancelled(self) -> bool:
        return self.cancelled.is_set()

    @property
    def is_late(self) -> bool:
        return self.deadline_s < inf and monotonic() >= self.deadline_s


class RequestQueue:
    """An answer holds a cache from its first step to its last.

    While its next step is not asked for it lets others go first: after IDLE_S, or at once if the thread that
    asked for its last step now asks for a step of another answer, or if one of a higher priority waits. So no
    thread waits for itself, and an abandoned answer delays the others only briefly. Until then it may make steps
    that are not asked for yet.
    """

    def __init__(self, idle_s: float = IDLE_S, num_caches: int = 1) -> None:
        self._idle_s = idle_s
        self._num_caches = num_caches
        # Entered itself, and not by its condition, in whose code Ctrl-C could strike with the lock taken.
        self._lock = RLock()
        self._changed = Condition(self._lock)
        self._waiting: list[Ticket] = []
        self._holders: list[Ticket] = []

    def take(self, ticket: Ticket, asker: Hashable) -> None:
        """Wait until the next step may run; a cancelled answer, which only has to end, does not wait."""
        with self._lock:
            ticket.asker = asker
            # One that goes first may not have woken yet, and would find this answer at work again and again.
            if ticket in self._holders and any(each.priority > ticket.priority for each in self._waiting):
                self._take_back(ticket)
            if ticket not in self._holders and (self._waiting or len(self._holders) == self._num_caches):
                self._wait(ticket)
            if not ticket.is_cancelled:
                self._admit(ticket)
                self._begin(ticket)

    def take_ahead(self, ticket: Ticket) -> bool:
        """True if a step that is not asked for may run now: others do not wait, or not long enough."""
        with self._lock:
            if ticket not in self._holders or ticket.is_cancelled or not self._rest_s(ticket):
                return False
            self._begin(ticket)
            return True

    def note(self, ticket: Ticket, asker: Hashable) -> None:
        """Record that a step was asked for that has been made already."""
        with self._lock:
            ticket.asker, ticket.rested_s = asker, monotonic()

    def release(self, ticket: Ticket, *, is_ahead: bool = False) -> None:
        """End a step; is_ahead: it was not asked for."""
        with self._lock:
            ticket.is_working = False
            if not is_ahead:
                ticket.rested_s = monotonic()
            if self._waiting:
                self._changed.notify_all()

    def leave(self, ticket: Ticket) -> None:
        """End an answer, which does not keep its models open from then on."""
        ticket.caller.rest()
        with self._lock:
            ticket.is_working, ticket.interrupt = False, lambda: None
            if ticket in self._holders:
                self._take_back(ticket)
                self._changed.notify_all()

    def cancel(self, ticket: Ticket) -> None:
        """Interrupt the running step of an answer and begin no further one."""
        with self._lock:
            ticket.cancelled.set()
            if ticket.is_working:
                ticket.interrupt()
            self._changed.notify_all()

    def is_held(self, cache: int) -> bool:
        """True if an answer has a cache."""
        with self._lock:
            return any(each.cache == cache for each in self._holders)

    def _begin(self, ticket: Ticket) -> None:
        ticket.is_working = True
        ticket.caller.work()

    def _wait(self, ticket: Ticket) -> None:
        self._waiting.append(ticket)
        self._changed.notify_all()  # the first in the queue may wait for this asker
        try:
            while not ticket.is_cancelled and (wait_s := self._wait_s(ticket)) != 0.0:
                self._changed.wait(wait_s)
            if not ticket.is_cancelled:
                self._admit(ticket)  # while it waits, which is why another one lets its cache go
        finally:
            self._waiting.remove(ticket)
            self._changed.notify_all()  # another is the first now

    def _admit(self, ticket: Ticket) -> None:
        """Give an answer a cache, which another one may have to let go that does not work."""
        if ticket in self._holders:
            return
        if len(self._holders) == self._num_caches:
            self._take_back(min((each for each in self._holders if not each.is_working), key=self._rest_s))
        taken = {each.cache for each in self._holders}
        ticket.cache = ticket.choose([number for number in range(self._num_caches) if number not in taken])
        ticket.num_given += 1
        self._holders.append(ticket)

    def _take_back(self, ticket: Ticket) -> None:
        self._holders.remove(ticket)
        ticket.cache = None

    def _wait_s(self, ticket: Ticket) -> float | None:
        """How long to wait before looking again; None until something changes."""
        if max(self._waiting, key=lambda each: each.priority) is not ticket:  # the first of equal ones
            return None
        if len(self._holders) < self._num_caches:
            return 0.0
        return min((self._rest_s(each) for each in self._holders if not each.is_working), default=None)

    def _rest_s(self, holder: Ticket) -> float:
        """How much longer an answer that has a cache may rest before it lets others go first."""
        if any(each.asker == holder.asker or each.priority > holder.priority for each in self._waiting):
            return 0.0
        return max(0.0, holder.rested_s + self._idle_s - monotonic())


class Made(NamedTuple, Generic[Pass]):
    """A pass; without one no further pass runs, because of an error if there is one."""

    result: Pass | None = None
    error: BaseException | None = None


class RunAhead(Generic[Pass]):
    """The passes of a generator, which runs in a thread of its own and goes on while they wait for the reader.

    It begins with the first pass that is asked for, goes at most MAX_AHEAD passes ahead, and does not go ahead
    where that would keep another answer in the queue from the target. Once the answer is cancelled or stopped, the
    passes that wait are dropped. It leaves the queue when the generator has ended.

    The main thread waits here, where Ctrl-C may come between any two steps: so only queues and locks written in
    C are used, which a signal handler or the garbage collector may use at any moment too.
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
            is_prompt: Hand each pass over at once. Otherwise that is done with the first one alone, and the
                generator calls hand_over when its next pass begins: a reader that wakes before would compete with
                it for the interpreter, and one that wakes then, for a core with the pass.
        """
        self._passes = passes
        self._queue, self._ticket = queue, ticket
        self._max_ahead = MAX_AHEAD if max_ahead is None else max_ahead
        self._requests: SimpleQueue[Hashable] = SimpleQueue()  # who wants a pass; None ends the thread
        self._made: SimpleQueue[Made[Pass]] = SimpleQueue()
        self._is_prompt, self._is_first = is_prompt, True
        self._held: deque[Made[Pass]] = deque()  # not handed over yet
        # Released when there may be a pass. SimpleQueue.get(timeout=...) would do, but a signal that comes as the
        # timeout ends makes it wait for ever (CPython 3.11: the time left is negative, which means no timeout).
        self._has_made = Lock()
        self._has_made.acquire()
        self._wake: Callable[[], None] = partial(_wake_thread, self._has_made)
        self._begun = Lock()  # held from then on
        self._working = Lock()  # held until the thread ends
        self._working.acquire()
        self._is_stopped = False
        self.is_begun = False
        self._thread: int | None = None

    def wait(self) -> Made[Pass]:
        """Wait for the next pass; raises MemoryExhausted: no thread can be started."""
        self._wake = partial(_wake_thread, self._has_made)
        self._ask(get_ident())
        while (made := self._next_made()) is None:
            if not self._has_made.acquire(timeout=_WAKE_S):
                self._repeat_cancel()
        return made

    async def wait_in_task(self) -> Made[Pass]:
        """Wait for the next pass while other tasks of the event loop run."""
        import asyncio  # takes 50 ms

        loop = asyncio.get_running_loop()
        self._ask(asyncio.current_task())
        while True:
            has_made: Future[None] = loop.create_future()
            self._wake = partial(_wake_task, loop, has_made)
            if (made := self._next_made()) is not None:
                return made
            if not (await asyncio.wait([has_made], timeout=_WAKE_S))[0]:
                self._repeat_cancel()

    def stop(self) -> None:
        """End the running pass and begin no further one; whoever waits gets no pass any more."""
        self._is_stopped = True
        self._requests.put(None)
        if self._working.locked():
            self._queue.cancel(self._ticket)

    def cancel_if_late(self) -> None:
        if self._ticket.is_late:
            self.cancel("timeout")

    def cancel(self, finish_reason: FinishReason | None = None) -> None:
        """Cancel the answer; for another reason than the ticket's only if it is not cancelled already."""
        if finish_reason is not None:
            if self._ticket.is_cancelled:
                return
            self._ticket.finish_reason = finish_reason
        self._queue.cancel(self._ticket)
        self._requests.put(None)

    def end(self, wait_s: float) -> bool:
        """End the running pass and the thread; True if it is gone before wait_s have passed."""
        self._requests.put(None)
        if self._begun.acquire(blocking=False):  # nothing was started, so there is nothing to end
            self._passes.close()
            self._ticket.interrupt = lambda: None
            return True
        if self._thread == get_ident():  # the garbage collector runs here
            return False
        ends_s, pause_s = monotonic() + wait_s, 0.0
        while not self._working.acquire(timeout=pause_s):
            self._queue.cancel(self._ticket)
            if (pause_s := min(_WAKE_S, ends_s - monotonic())) <= 0:
                return self._thread is None  # it has yet to begin, and will find nothing to do
        self._working.release()
        return True

    def hand_over(self) -> None:
        """Let the reader have what was made; called by the generator's thread, or one that runs a pass for it."""
        if not self._held:
            return
        while self._held:
            with suppress(IndexError):  # another thread was quicker
                self._made.put(self._held.popleft())
        self._wake()

    def _ask(self, asker: Hashable) -> None:
        self.cancel_if_late()
        is_over = self._is_stopped or self._ticket.is_cancelled
        self._requests.put(None if is_over else asker)
        if not self._begun.acquire(blocking=False):
            return
        end_at_exit(self._end_at_exit)
        try:
            # Thread.start() waits for its thread in Python, where Ctrl-C can leave that stuck.
            start_new_thread(self._work, ())
        except RuntimeError as error:
            has_ended(self._end_at_exit)
            self._begun.release()
            raise MemoryExhausted(f"no thread can be started ({error}); close other programs") from error
        self.is_begun = True

    def _next_made(self) -> Made[Pass] | None:
        """The oldest that was made and not taken; None for nothing so far."""
        is_over = not self._working.locked()  # before looking: what is last is put before that is released
        with suppress(Empty):
            while True:
                made = self._made.get_nowait()
                if made.result is None or not (self._is_stopped or self._ticket.is_cancelled):
                    return made
        return Made() if is_over else None

    def _repeat_cancel(self) -> None:
        self.cancel_if_late()
        if self._is_stopped or self._ticket.is_cancelled:
            self.cancel()

    def _work(self) -> None:
        self._thread = get_ident()
        end: Made[Pass] = Made()
        try:
            self._make_passes()
        except BaseException as error:  # passed on to the reader
            end = Made(error=error)
        try:
            self._passes.close()
        except BaseException as error:
            end = Made(error=end.error or error)
        self._queue.leave(self._ticket)
        if self._is_stopped or self._ticket.is_cancelled:
            end = Made()  # nobody wants the error, whose traceback keeps the models
        self._held.append(end)
        self.hand_over()
        has_ended(self._end_at_exit)
        self._working.release()

    def _end_at_exit(self) -> None:
        self.cancel()
        self.end(_EXIT_S)

    def _make_passes(self) -> None:
        num_ahead = 0  # passes that nobody has asked for; -1 while one is waited for
        for asker in iter(self._next_request, None):
            num_ahead -= 1
            if num_ahead < 0:
                self._queue.take(self._ticket, asker)
                if self._ticket.is_cancelled or not self._make_pass():  # which may have no cache then
                    return
                num_ahead += 1
            else:
                self._queue.note(self._ticket, asker)
            while num_ahead < self._max_ahead and self._requests.empty() and self._queue.take_ahead(self._ticket):
                if not self._make_pass(is_ahead=True):
                    return
                num_ahead += 1

    def _next_request(self) -> Hashable:
        if self._requests.empty():
            self.hand_over()
            self._ticket.caller.rest()  # no pass is made before it is asked for
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
        self._held.append(Made(result))
        if self._is_prompt or self._is_first:
            self.hand_over()
        if self._is_first:
            sleep(_READ_S)
        self._is_first = False
        return True


def _wake_thread(has_made: Lock) -> None:
    with suppress(RuntimeError):  # it is released already
        has_made.release()


def _wake_task(loop: "AbstractEventLoop", has_made: "Future[None]") -> None:
    with suppress(RuntimeError):  # the event loop is closed
        loop.call_soon_threadsafe(_settle, has_made)


def _settle(has_made: "Future[None]") -> None:
    if not has_made.done():  # a task that was cancelled waits no more
        has_made.set_result(None)
