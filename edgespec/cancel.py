"""The end of a piece of work, as another thread wishes for it. Knows nothing of the work."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock

from edgespec.errors import Cancelled


class Flag:
    """That something is not wanted any more. Without a lock, so that a signal handler may set it anywhere."""

    __slots__ = ("_is_set",)

    def __init__(self) -> None:
        self._is_set = False

    def set(self) -> None:
        self._is_set = True

    def is_set(self) -> bool:
        return self._is_set


class Cancel:
    """A wish that a piece of work ends, told to whatever it consists of at the time."""

    def __init__(self) -> None:
        self._is_set = False
        self._ends: list[Callable[[], None]] = []
        self._lock = Lock()

    @property
    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        with self._lock:
            self._is_set = True
            for end in self._ends:
                end()

    def expect_unset(self) -> None:
        """Raises Cancelled: It is set."""
        if self._is_set:
            raise Cancelled("given up")

    @contextmanager
    def ending(self, end: Callable[[], None]) -> Iterator[None]:
        """Work that end ends, from whichever thread calls set; end is never called when the work is over.

        Raises:
            Cancelled: It was set before.
        """
        with self._lock:
            self.expect_unset()
            self._ends.append(end)
        try:
            yield
        finally:
            with self._lock:
                self._ends.remove(end)
