"""How many answers may be made or wait at once; more are refused, with the time after which to ask again."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import ceil
from time import monotonic

from edgespec.server.errors import ApiError

_NEWEST = 0.2  # share of the newest answer in the running mean
_LONGEST_S = 60


@dataclass(slots=True)
class Admission:
    """Places for answers. One thread, that of the event loop."""

    num_places: int
    num_taken: int = field(init=False, default=0)
    _mean_s: float = field(init=False, default=1.0)  # from taking a place to leaving it

    @contextmanager
    def place(self, num_answers: int) -> Iterator[None]:
        """Places for the answers to one request. Raises ApiError: 429, there are not enough."""
        if self.num_taken + num_answers > self.num_places:
            raise ApiError(
                429,
                f"{self.num_taken} answers are being made or wait, and {self.num_places} may; ask again later",
                headers={"Retry-After": str(self._retry_s())},
            )
        self.num_taken += num_answers
        started = monotonic()
        try:
            yield
        finally:
            self.num_taken -= num_answers
            self._mean_s += _NEWEST * (monotonic() - started - self._mean_s)

    def _retry_s(self) -> int:
        """When a place may be free: an answer leaves after about the mean over the number of them."""
        return min(_LONGEST_S, max(1, ceil(self._mean_s / max(1, self.num_taken))))
