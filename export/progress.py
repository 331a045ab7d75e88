"""Progress of a long step, a line every three seconds, on a terminal always, and in numbers."""

from time import monotonic

from edgespec.system.console import show_progress
from edgespec.system.progress import LoadProgress, ReportProgress
from edgespec.types import Report

_EVERY_S = 3.0


class Progress:
    """Called with the bytes done so far, reports a line every three seconds."""

    def __init__(
        self, expected_bytes: int, report: Report, name: str = "", on_step: ReportProgress = lambda progress: None
    ) -> None:
        """on_step takes each step of the export of name, in numbers."""
        self._expected_bytes = expected_bytes
        self._report = report
        self._name, self._on_step = name, on_step
        self._started = self._reported = monotonic()

    def __call__(self, done_bytes: int) -> None:
        show_progress(f"converting: {done_bytes / 1e6:.0f} of at most {self._expected_bytes / 1e6:.0f} MB")
        done = min(done_bytes, self._expected_bytes)
        self._on_step(LoadProgress("export", self._name, done, self._expected_bytes))
        now = monotonic()
        if now - self._reported < _EVERY_S:
            return
        self._reported = now
        rate = done_bytes / (now - self._started)
        self._report(
            f"{done_bytes / 1e6:.0f} MB of at most {self._expected_bytes / 1e6:.0f} MB, {rate / 1e6:.0f} MB/s"
        )
