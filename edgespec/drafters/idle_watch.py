"""Looks at memory while no answer is made: the user's other programs may need what drafter models hold.

Knows neither models nor bytes, only what to call.
"""

from collections.abc import Callable
from threading import Event, Thread
from weakref import WeakMethod

IDLE_LOOK_S = 3.0
_END_S = 2.0


class IdleWatch:
    """A thread that calls a method every few seconds, until that returns False, its object is gone, or close."""

    def __init__(self, look: Callable[[], bool], interval_s: float = IDLE_LOOK_S) -> None:
        """Start the thread.

        Args:
            look: A bound method; its object is not kept alive by the thread.
        """
        self._closed = Event()
        # A daemon, so that a program that forgets to close its engine can end.
        self._thread = Thread(
            target=_run, args=(WeakMethod(look), self._closed, interval_s), name="edgespec memory", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End the thread, and wait for a look that is going on."""
        self._closed.set()
        self._thread.join(_END_S)


def _run(weak: "WeakMethod[Callable[[], bool]]", closed: Event, interval_s: float) -> None:
    while not closed.wait(interval_s):
        look = weak()
        if look is None or not look():
            return
        del look  # its object may go before the next look
