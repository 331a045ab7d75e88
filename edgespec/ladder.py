"""How much drafting there is room for: a ladder of rungs, down at once and up with patience.

Pure: it is told how many bytes are free and what time it is, and knows neither drafters nor devices.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

PATIENCE_S = 2.0
LONGEST_PATIENCE_S = 300.0
# A fall so many patiences behind a climb says that the climb came too soon.
_TOO_SOON = 5.0
# What must be free behind a climb beyond what must be free anyway, as a share of that.
_SLACK = 0.5


class Rung(NamedTuple):
    """A way to draft and what it takes beyond plain decoding."""

    name: str
    needed_bytes: int


@dataclass(slots=True)
class Ladder:
    """Stands on one of its rungs, which come with the most first; the last is plain decoding.

    It falls as soon as less is free than is wanted, as far as the rungs' figures say that it must. It climbs one
    rung when so much has been free all through its patience that the rung fits and half of what is wanted is free
    besides. A fall soon after a climb doubles the patience, and a long stay restores it, so that memory that comes
    and goes does not open a model time and again.
    """

    rungs: Sequence[Rung]
    patience_s: float = PATIENCE_S
    position: int = 0
    _enough_since_s: float | None = field(init=False, default=None)
    _climbed_s: float | None = field(init=False, default=None)
    _patience_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._patience_s = self.patience_s

    @property
    def is_at_bottom(self) -> bool:
        return self.position == len(self.rungs) - 1

    def start(self, free_bytes: int, wanted_bytes: int) -> int:
        """Stand on the highest rung that leaves wanted_bytes, while none of them is in use yet."""
        fits = (i for i, rung in enumerate(self.rungs) if rung.needed_bytes + wanted_bytes <= free_bytes)
        self.position = next(fits, len(self.rungs) - 1)
        return self.position

    def look(self, free_bytes: int, wanted_bytes: int, now_s: float) -> int:
        """Where to stand when free_bytes are free and wanted_bytes must be."""
        if free_bytes < wanted_bytes:
            while not self.is_at_bottom and free_bytes < wanted_bytes:
                free_bytes += self._step_bytes(self.position)
                self._fall(now_s)
            return self.position
        if self.position == 0 or free_bytes < self._climb_bytes(wanted_bytes):
            self._enough_since_s = None
            return self.position
        if self._enough_since_s is None:
            self._enough_since_s = now_s
        if now_s - self._enough_since_s >= self._patience_s:
            self.position -= 1
            self._enough_since_s, self._climbed_s = None, now_s
        return self.position

    def fall(self, now_s: float) -> int:
        """Where to stand when memory was asked for and not given: a rung further down that frees any."""
        freed_bytes = 0
        while not self.is_at_bottom and not freed_bytes:
            freed_bytes = self._step_bytes(self.position)
            self._fall(now_s)
        return self.position

    def _fall(self, now_s: float) -> None:
        if self._climbed_s is not None:
            is_too_soon = now_s - self._climbed_s < _TOO_SOON * self._patience_s
            longer_s = min(2 * self._patience_s, LONGEST_PATIENCE_S)
            self._patience_s = longer_s if is_too_soon else self.patience_s
        self.position += 1
        self._enough_since_s = self._climbed_s = None

    def _step_bytes(self, position: int) -> int:
        """What a step down from a rung frees."""
        return self.rungs[position].needed_bytes - self.rungs[position + 1].needed_bytes

    def _climb_bytes(self, wanted_bytes: int) -> int:
        return self._step_bytes(self.position - 1) + int((1 + _SLACK) * wanted_bytes)
