"""Ctrl-C while an answer is made, and keys that are typed meanwhile."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import current_thread, main_thread
from time import monotonic
from types import FrameType

from edgespec.clock import Clock

# One press may come twice: to the process group, and once more from the supervisor, which passes on what it got.
_ONE_PRESS_S = 0.3


class Leave(KeyboardInterrupt):
    """Ctrl-C a second time while an answer was being stopped."""


@contextmanager
def stopped_by_ctrl_c(stop: Callable[[], None], clock: Clock = monotonic) -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C calls stop, another one before the end raises Leave, unless it comes at once.

    Yields:
        Whether it was pressed.
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


@contextmanager
def unseen_keys() -> Iterator[None]:
    """What is typed meanwhile is not echoed into the answer; the next prompts get it, key by key.

    The terminal leaves Enter as it is: made into a line feed, as otherwise, it would be Ctrl-J to the prompt, and
    what was typed one message of many lines. Nor does it edit lines: Ctrl-U would take back all of them.
    """
    try:
        import termios
    except ImportError:  # Windows echoes only where somebody reads
        yield
        return
    try:
        file = sys.stdin.fileno()
        before = termios.tcgetattr(file)
    except (termios.error, OSError, ValueError):
        yield
        return
    silent = [*before]
    silent[0] &= ~termios.ICRNL
    silent[3] &= ~(termios.ECHO | termios.ICANON)
    silent[6] = [*before[6]]
    silent[6][termios.VMIN], silent[6][termios.VTIME] = 1, 0
    with suppress(termios.error):
        termios.tcsetattr(file, termios.TCSANOW, silent)
    try:
        yield
    finally:
        with suppress(termios.error):
            termios.tcsetattr(file, termios.TCSANOW, before)
