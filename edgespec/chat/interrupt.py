"""Ctrl-C while an answer is generated."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from time import monotonic
from types import FrameType

from edgespec.system.clock import Clock

# One press may come twice: to the process group, and once more from the supervisor, which passes on what it got.
_ONE_PRESS_S = 0.3


class Leave(KeyboardInterrupt):
    """Ctrl-C was pressed a second time while an answer was being stopped."""


@contextmanager
def catch_ctrl_c(stop: Callable[[], None], clock: Clock = monotonic) -> Iterator[Callable[[], bool]]:
    """Call stop at the first Ctrl-C; raise Leave at another one, unless it comes at once.

    Yields a function that says whether Ctrl-C was pressed.
    """
    if current_thread() is not main_thread():  # which alone may set handlers
        yield lambda: False
        return
    pressed_s: float | None = None

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal pressed_s
        if pressed_s is None:
            pressed_s = clock()
            stop()
        elif clock() - pressed_s > _ONE_PRESS_S:
            raise Leave

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: pressed_s is not None
    finally:
        signal.signal(signal.SIGINT, before)
