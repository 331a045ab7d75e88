"""What time it is: the machine's, or one that moves when it is told to."""

from collections.abc import Callable

Clock = Callable[[], float]  # seconds


class VirtualClock:
    """Time that passes only while somebody sleeps, so that hours are simulated in seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
