"""A queue for the target: one answer after another, in the order of their first request.

Answers could alternate after each pass. But the target's cache holds one text, so two alternating answers would
each read their whole prompt again at every pass.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from math import inf
from threading import Condition, RLock
from time import monotonic

from edgespec.system.cancel import Flag

IDLE_S = 1.0


@dataclass(slots=True, eq=False)
class Ticket:
    """The place of an answer in the queue."""

    interrupt: Callable[[], None] = lambda: None  # ends the running step at once
    asker: Hashable = None  # the thread or task that waits for the step, or has waited for the last one
    cancelled: Flag = field(default_factory=Flag)
    is_working: bool = False
    rested_s: float = 0.0  # since when no step is asked for
    deadline_s: float = inf  # by the monotonic clock, when the answer is to end
    finish_reason: str = "cancelled"  # what ended it, once it is cancelled

    @property
    def is_cancelled(self) -> bool:
        return self.cancelled.is_set()

    @property
    def is_late(self) -> bool:
        return self.deadline_s < inf and monotonic() >= self.deadline_s


class RequestQueue:
    """An answer holds the target from its first step to its last.

    While its next step is not asked for it lets others go first: after IDLE_S, or at once if the thread that
    asked for its last step now asks for a step of another answer. So no thread waits for itself, and an
    abandoned answer delays the others only briefly. Until then it may make steps that are not asked for yet.
    """

    def __init__(self, idle_s: float = IDLE_S) -> None:
        self._idle_s = idle_s
        # Entered itself, and not by its condition, in whose code Ctrl-C could strike with the lock taken.
        self._lock = RLock()
        self._changed = Condition(self._lock)
        self._waiting: list[Ticket] = []
        self._holder: Ticket | None = None

    def take(self, ticket: Ticket, asker: Hashable) -> None:
        """Wait until the next step may run; a cancelled answer, which only has to end, does not wait."""
        with self._lock:
            ticket.asker = asker
            if self._holder is not ticket:
                self._wait(ticket)
            if not ticket.is_cancelled:
                self._holder, ticket.is_working = ticket, True

    def take_ahead(self, ticket: Ticket) -> bool:
        """Whether a step that is not asked for may run now: others do not wait, or not long enough."""
        with self._lock:
            if self._holder is not ticket or ticket.is_cancelled or not self._rest_s(ticket):
                return False
            ticket.is_working = True
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
        """End an answer."""
        with self._lock:
            ticket.is_working = False
            if self._holder is ticket:
                self._holder = None
                self._changed.notify_all()

    def cancel(self, ticket: Ticket) -> None:
        """Interrupt the running step of an answer and begin no further one."""
        with self._lock:
            ticket.cancelled.set()
            if ticket.is_working:
                ticket.interrupt()
            self._changed.notify_all()

    def _wait(self, ticket: Ticket) -> None:
        self._waiting.append(ticket)
        self._changed.notify_all()  # the first in the queue may wait for this asker
        try:
            while not ticket.is_cancelled and (wait_s := self._wait_s(ticket)) != 0.0:
                self._changed.wait(wait_s)
        finally:
            self._waiting.remove(ticket)
            self._changed.notify_all()  # another is the first now

    def _wait_s(self, ticket: Ticket) -> float | None:
        """How long to wait before looking again; None until something changes."""
        holder = self._holder
        if self._waiting[0] is not ticket:
            return None
        if holder is None:
            return 0.0
        return None if holder.is_working else self._rest_s(holder)

    def _rest_s(self, holder: Ticket) -> float:
        """How much longer the answer that holds the target may rest before it lets others go first."""
        if self._waiting and any(each.asker == holder.asker for each in self._waiting):
            return 0.0
        return max(0.0, holder.rested_s + self._idle_s - monotonic())
