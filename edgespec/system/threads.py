"""Threads of Python: how often they give up the interpreter, which go first, how deep, and when they end.

A fork of the process has none of them.
"""

import atexit
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from edgespec.errors import EdgeSpecError

T = TypeVar("T")
NO_THREAD = "no further thread can be started; close other programs, or raise ulimit -u or the container's limit"
# By default a thread that computes keeps the interpreter for 5 ms at a time; a pass of a fast GPU takes 3.
# Not less than this: what Python does between two passes would be interrupted itself.
_SWITCH_S = 2e-4
_IDLE_NICENESS = 10
_STARTING = threading.Lock()  # the size of stacks is a setting of the whole process
_ENDS: set[Callable[[], object]] = set()  # of threads that run native code


def hand_over_soon() -> None:
    """Let a thread get the interpreter soon after its pass while others compute, in the whole process."""
    sys.setswitchinterval(_SWITCH_S)


def lower_priority() -> None:
    """Let other threads and programs go before this thread, where the system has priorities of threads."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _IDLE_NICENESS)


def run_settled(work: Callable[..., T], *given: Any) -> T:
    """The result of work; its StopIteration, which no Future takes, is a RuntimeError."""
    try:
        return work(*given)
    except StopIteration as error:
        raise RuntimeError("an iterator had no more to give") from error


def end_at_exit(end: Callable[[], object]) -> None:
    """Call a method that ends a thread when Python ends, unless has_ended is called with it before.

    Python stops a daemon thread that comes back from native code then, and C++ aborts the process for that.
    """
    _ENDS.add(end)


def has_ended(end: Callable[[], object]) -> None:
    """Forget what was given to end_at_exit: its thread is gone, or runs no native code any more."""
    _ENDS.discard(end)


@atexit.register
def _end_all() -> None:
    while _ENDS:
        with suppress(KeyError):  # it has ended meanwhile
            _ENDS.pop()()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_ENDS.clear)  # a fork has none of the threads


async def in_thread(work: Callable[..., T], *given: Any) -> T:
    """The result of work in one of asyncio's threads."""
    import asyncio  # takes 50 ms

    return await asyncio.to_thread(run_settled, work, *given)


def begin(work: Callable[[], T], name: str) -> Future[T]:
    """The result of work in a thread of its own, for which the end of the program does not wait."""
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return done


def run_with_stack(work: Callable[[], T], stack_bytes: int) -> T:
    """Run work in a thread with a stack of so many bytes, of which it takes what it uses."""
    with _STARTING:
        before = threading.stack_size(stack_bytes)
        try:
            done = begin(work, "deep stack")
        finally:
            threading.stack_size(before)
    return done.result()


@dataclass(frozen=True, slots=True)
class Owner:
    """Remembers the process that it is made in."""

    process_id: int = field(default_factory=os.getpid)

    @property
    def is_here(self) -> bool:
        """True if the current process is that one, and not a fork of it."""
        return os.getpid() == self.process_id

    def require_here(self) -> None:
        """Raises EdgeSpecError: The current process is a fork of that one."""
        if not self.is_here:
            raise EdgeSpecError(
                f"this engine was loaded by process {self.process_id}, of which this one is a fork, and its "
                "threads stayed there; load the model in this process, or start processes with the method 'spawn'"
            )
