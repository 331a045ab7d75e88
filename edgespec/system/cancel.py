"""How one thread ends the work of another. Knows nothing of the work."""

from collections.abc import Callable, Iterator
from threading import Lock

from edgespec.errors import Cancelled
from edgespec.system.context_managers import contextmanager


class Flag:
    """A switch that can only be set. It has no lock, so that a signal handler may set it at any moment."""

    __slots__ = ("_is_set",)

    def __init__(self) -> None:
        self._is_set = False

    def set(self) -> None:
        self._is_set = True

    def is_set(self) -> bool:
        return self._is_set


class Cancel:
    """A request to end a piece of work, which calls whatever ends its present steps."""

    def __init__(self) -> None:
        self.is_set = False
        self._ends: list[Callable[[], None]] = []
        self._lock = Lock()

    def set(self) -> None:
        with self._lock:
            self.is_set = True
            for end in self._ends:
                end()

    def require_unset(self) -> None:
        """Raises Cancelled: It is set."""
        if self.is_set:
            raise Cancelled("given up")

    @contextmanager
    def on_set(self, end: Callable[[], None]) -> Iterator[None]:
        """Call `end`, from whichever thread calls set(), while the block runs and not after it.

        Raises Cancelled: It is set already.
        """
        with self._lock:
            self.require_unset()
            self._ends.append(end)
        try:
            yield
        finally:
            with self._lock:
                self._ends.remove(end)
