"""Signals that end a program, Ctrl-C, SIGTERM and SIGHUP, or the piece of work that it does."""

import signal
import sys
from collections.abc import Callable, Iterator
from threading import current_thread, get_ident, main_thread
from time import monotonic
from types import FrameType
from typing import NoReturn

from edgespec.system.clock import Clock
from edgespec.system.context_managers import contextmanager

ENDING = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
"""Signals that end a program and can be handled; Windows has no SIGHUP."""
# One press may come twice: to the process group, and once more from the supervisor, which passes on what it got.
_ONE_PRESS_S = 0.3


def exit_on_signals() -> None:
    """Let SIGTERM and SIGHUP raise SystemExit, once, so that nothing half written stays."""
    for number in ENDING:
        if number != signal.SIGINT and signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, _exit)


@contextmanager
def clean_up_on_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise SystemExit within the block, where the program has no handler of its own."""
    if current_thread() is not main_thread():  # which alone may set handlers
        yield
        return
    unset = [number for number in ENDING if signal.getsignal(number) is signal.SIG_DFL]
    try:
        for number in unset:
            signal.signal(number, _exit)
        yield
    finally:
        for number in unset:
            signal.signal(number, signal.SIG_DFL)


def ignore_ctrl_c() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _exit(number: int, frame: object) -> NoReturn:
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


@contextmanager
def defer_signals() -> Iterator[None]:
    """Delay these signals until the block has ended: for native code that swallows exceptions, and for cleanup.

    Then their handlers are called, which may raise, KeyboardInterrupt most often. Nothing changes for signals
    without a handler, nor in other threads than the main one, where Python calls none.
    """
    if get_ident() != main_thread().ident:
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    handlers = {number: handler for number in ENDING if callable(handler := signal.getsignal(number))}
    for number in handlers:
        signal.signal(number, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number, frame in dict(came).items():
            handlers[signal.Signals(number)](number, frame)


class Leave(KeyboardInterrupt):
    """Ctrl-C was pressed a second time while an answer was being stopped."""


class HeldCtrlC:
    """A handler of Ctrl-C that remembers it until catch_ctrl_c or release_ctrl_c takes its place.

    handle: Is asked first, and returns True where nothing is to be remembered.
    """

    def __init__(self, handle: Callable[[], bool]) -> None:
        self._handle, self.is_pressed = handle, False
        self.before = signal.signal(signal.SIGINT, self)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if not self._handle():
            self.is_pressed = True


def release_ctrl_c() -> bool:
    """Have Ctrl-C handled as before it was held; return whether it was pressed meanwhile."""
    held = signal.getsignal(signal.SIGINT)
    if not isinstance(held, HeldCtrlC):
        return False
    signal.signal(signal.SIGINT, held.before)
    return held.is_pressed


@contextmanager
def catch_ctrl_c(stop: Callable[[], None], clock: Clock = monotonic) -> Iterator[Callable[[], bool]]:
    """Call stop at the first Ctrl-C, also one that was held; raise Leave at another one, unless it comes at once.

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
    if isinstance(before, HeldCtrlC):
        if before.is_pressed:
            handle(signal.SIGINT, None)
        before = before.before
    try:
        yield lambda: pressed_s is not None
    finally:
        signal.signal(signal.SIGINT, before)
