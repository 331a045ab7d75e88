"""Clocks: time.monotonic, or one that a simulation moves."""

from collections.abc import Callable

Clock = Callable[[], float]  # seconds


class VirtualClock:
    """A clock that only sleep() moves on, so that hours are simulated in seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
