"""Threads that work which has ended may leave behind."""

import threading


def wait_for_threads_since(before: set[threading.Thread]) -> None:
    """Wait until every thread that was started since has ended.

    There is no time limit, which a busy machine could exceed: a thread that stays is a test that hangs, and that
    fails with the stacks of all threads.
    """
    for thread in set(threading.enumerate()) - before:
        # A record that logging made of a thread without one; it outlives that thread and cannot be joined.
        if not isinstance(thread, threading._DummyThread):
            thread.join()
