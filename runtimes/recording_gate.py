"""Keeps what uses NVIDIA's GPUs apart from the recording of a pass, which taking memory beside it spoils."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition


class RecordingGate:
    """Lets many threads use GPUs at once, or one alone."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._num_inside = 0

    @contextmanager
    def beside_others(self) -> Iterator[None]:
        with self._changed:
            self._num_inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_inside -= 1
                self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: self._num_inside == 0)
            yield


GATE = RecordingGate()
