"""Signals held back while native code is initialised, which swallows what their handlers raise, or files removed.

Knows no such code.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from types import FrameType

_HEARD = ("SIGINT", "SIGTERM", "SIGHUP")  # as far as the system has them


@contextmanager
def held_back() -> Iterator[None]:
    """What is done here is done whole: Ctrl-C, and what else ends a program, is heard when it is over.

    Then the handlers that were there are called, which may raise: KeyboardInterrupt, most often. Does nothing in
    other threads, where signals are not heard anyway, nor to signals without a handler of Python's.
    """
    if current_thread() is not main_thread():
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    numbers = [getattr(signal, name) for name in _HEARD if hasattr(signal, name)]
    handlers = {number: handler for number in numbers if callable(handler := signal.getsignal(number))}
    for number in handlers:
        signal.signal(number, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number, frame in dict(came).items():
            handlers[signal.Signals(number)](number, frame)
