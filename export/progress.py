"""Progress of a long step, a line every three seconds, and on a terminal always."""

from collections.abc import Callable
from time import monotonic

from edgespec.system.console import show_progress

_EVERY_S = 3.0


class Progress:
    """Called with the bytes done so far, reports a line every three seconds."""

    def __init__(self, expected_bytes: int, report: Callable[[str], None]) -> None:
        self._expected_bytes = expected_bytes
        self._report = report
        self._started = self._reported = monotonic()

    def __call__(self, done_bytes: int) -> None:
        show_progress(f"converting: {done_bytes / 1e6:.0f} of at most {self._expected_bytes / 1e6:.0f} MB")
        now = monotonic()
        if now - self._reported < _EVERY_S:
            return
        self._reported = now
        rate = done_bytes / (now - self._started)
        self._report(
            f"{done_bytes / 1e6:.0f} MB of at most {self._expected_bytes / 1e6:.0f} MB, {rate / 1e6:.0f} MB/s"
        )
