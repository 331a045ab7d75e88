"""Work that needs a deeper stack than threads have."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")

_STARTING = threading.Lock()  # the size of stacks is a setting of the whole process


def run_with_stack(work: Callable[[], T], stack_bytes: int) -> T:
    """Run work in a thread with a stack of so many bytes, of which it takes what it uses."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    thread = threading.Thread(target=run, name="deep stack", daemon=True)
    with _STARTING:
        before = threading.stack_size(stack_bytes)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    return done.result()
