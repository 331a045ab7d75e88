"""A queue for the target's caches: as many answers as there are caches are made at once, the others wait.

Answers could share a cache and alternate after each pass. But it holds one text, so they would each read their
whole prompt again at every pass.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from math import inf
from threading import Condition, RLock
from time import monotonic

from edgespec.decoding.pass_queue import Caller
from edgespec.system.cancel import Flag

IDLE_S = 1.0


@dataclass(slots=True, eq=False, weakref_slot=True)
class Ticket:
    """An answer in the queue.

    choose: Picks a cache for it among those that are free, by their numbers.
    cache: The number of its cache, while it has one.
    caller: The answer as the queue of passes sees it.
    """

    interrupt: Callable[[], None] = lambda: None  # ends the running step at once
    asker: Hashable = None  # the thread or task that waits for the step, or has waited for the last one
    cancelled: Flag = field(default_factory=Flag)
    is_working: bool = False
    rested_s: float = 0.0  # since when no step is asked for
    deadline_s: float = inf  # by the monotonic clock, when the answer is to end
    finish_reason: str = "cancelled"  # what ended it, once it is cancelled
    choose: Callable[[Sequence[int]], int] = min
    cache: int | None = None
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
            if ticket not in self._holders:
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

    def rest(self, ticket: Ticket) -> None:
        """Say that no further step is made before one is asked for."""
        ticket.caller.rest()

    def leave(self, ticket: Ticket) -> None:
        """End an answer."""
        ticket.caller.rest()
        with self._lock:
            ticket.is_working = False
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
