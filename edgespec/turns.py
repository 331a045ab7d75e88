"""Who may use the target: one answer after another, in the order in which they ask.

Answers are made step by step, a pass each, so that they could take turns at every step. But the target's cache
holds one text: two answers in turn would each read their whole prompt again at every step.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from threading import Condition, RLock
from time import monotonic

from edgespec.errors import Cancelled

PATIENCE_S = 1.0


@dataclass(slots=True, eq=False)
class Turn:
    """An answer as Turns knows it. interrupt: ends at once what its step is doing."""

    interrupt: Callable[[], None] = lambda: None
    asker: Hashable = None  # who waits for its step, or has waited for the last
    is_cancelled: bool = False
    is_working: bool = False
    rested_s: float = 0.0  # since when nobody has asked for a step

    def expect_wanted(self) -> None:
        """Raises Cancelled."""
        if self.is_cancelled:
            raise Cancelled("the answer was cancelled")


class Turns:
    """An answer keeps its turn from its first step to its last.

    While nobody asks for its next step it lets others go first: after PATIENCE_S, or at once where whoever asked
    for its last step now asks for another answer's, as nobody can ask for two at the same time. So none waits for
    himself, and an answer that is left lying holds up nobody for long.
    """

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        # Entered itself, and not by its condition, in whose code Ctrl-C could strike with the lock taken.
        self._lock = RLock()
        self._changed = Condition(self._lock)
        self._waiting: list[Turn] = []
        self._holder: Turn | None = None

    def take(self, turn: Turn, asker: Hashable) -> None:
        """Wait until the next step may be made; a cancelled answer, which is only to be ended, waits no more."""
        with self._lock:
            turn.asker = asker
            if self._holder is not turn:
                self._wait(turn)
            if not turn.is_cancelled:
                self._holder, turn.is_working = turn, True

    def rest(self, turn: Turn) -> None:
        """The step is made."""
        with self._lock:
            turn.is_working, turn.rested_s = False, monotonic()
            if self._waiting:
                self._changed.notify_all()

    def leave(self, turn: Turn) -> None:
        """The answer is over."""
        with self._lock:
            turn.is_working = False
            if self._holder is turn:
                self._holder = None
                self._changed.notify_all()

    def cancel(self, turn: Turn) -> None:
        """Let it make no further step, and interrupt the one that it is making."""
        with self._lock:
            turn.is_cancelled = True
            if turn.is_working:
                turn.interrupt()
            self._changed.notify_all()

    def _wait(self, turn: Turn) -> None:
        self._waiting.append(turn)
        self._changed.notify_all()  # it may be the holder's asker for whom the first is waiting
        try:
            while not turn.is_cancelled and (wait_s := self._wait_s(turn)) != 0.0:
                self._changed.wait(wait_s)
        finally:
            self._waiting.remove(turn)
            self._changed.notify_all()  # another is the first now

    def _wait_s(self, turn: Turn) -> float | None:
        """How long it is to wait before it asks again; None until something changes."""
        holder = self._holder
        if self._waiting[0] is not turn:
            return None
        if holder is None:
            return 0.0
        if holder.is_working:
            return None
        if any(each.asker == holder.asker for each in self._waiting):
            return 0.0
        return max(0.0, holder.rested_s + self._patience_s - monotonic())
