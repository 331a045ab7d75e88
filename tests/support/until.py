"""Waits for what another thread or process does."""

from collections.abc import Callable
from time import monotonic, sleep

SOON_S = 60.0  # on a busy machine


def until(is_true: Callable[[], object]) -> None:
    deadline = monotonic() + 2 * SOON_S
    while not is_true():
        assert monotonic() < deadline, "it never came true"
        sleep(0.001)
