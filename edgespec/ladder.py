"""How much drafting there is room for: a ladder of rungs, down at once and up with patience.

Pure: it is told how many bytes are free in each place and what time it is, and knows neither drafters nor devices.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

PATIENCE_S = 2.0
LONGEST_PATIENCE_S = 300.0
# A fall so many patiences behind a climb says that the climb came too soon. With 5, memory that came and went each
# 32 s had a model opened each time, which at 1.5 billion parameters takes 5 s.
_TOO_SOON = 15.0
# What must be free behind a climb beyond what must be free anyway, as a share of that.
_SLACK = 0.5


Bytes = Mapping[str, int]
"""By place: the host, and devices with memory of their own."""


class Rung(NamedTuple):
    """A way to draft and what it takes beyond plain decoding."""

    name: str
    needed: Bytes


@dataclass(slots=True)
class Ladder:
    """Stands on one of its rungs, which come with the most first; the last is plain decoding.

    It falls as soon as less is free in a place than is wanted there, as far as the rungs' figures say that it
    must, and no further than that frees anything there. It climbs one rung when so much has been free all through
    its patience that the rung fits and half of what is wanted is free besides. A fall soon after a climb doubles
    the patience, and a long stay restores it, so that memory that comes and goes does not open a model time and
    again. A place of which nothing is known has room.
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

    def start(self, free: Bytes, wanted: Bytes) -> int:
        """Stand on the highest rung that leaves what is wanted, while none of them is in use yet."""
        last = len(self.rungs) - 1
        fits = (i for i in range(last) if not any(wanted[at] > left for at, left in self._left(free, last, i)))
        self.position = next(fits, last)
        return self.position

    def look(self, free: Bytes, wanted: Bytes, now_s: float) -> int:
        """Where to stand when so much is free and so much must be."""
        if any(free[place] < wanted[place] for place in free):
            enough = self._relieved(free, wanted)
            while self.position < enough:
                self._fall(now_s)
            self._enough_since_s = None
            return self.position
        if self.position == 0 or not self._has_room_above(free, wanted):
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
        has_freed = False
        while not self.is_at_bottom and not has_freed:
            has_freed = any(step > 0 for step in self._step(self.position).values())
            self._fall(now_s)
        return self.position

    def _fall(self, now_s: float) -> None:
        if self._climbed_s is not None:
            is_too_soon = now_s - self._climbed_s < _TOO_SOON * self._patience_s
            longer_s = min(2 * self._patience_s, LONGEST_PATIENCE_S)
            self._patience_s = longer_s if is_too_soon else self.patience_s
        self.position += 1
        self._enough_since_s = self._climbed_s = None

    def _relieved(self, free: Bytes, wanted: Bytes) -> int:
        """The first rung below at which all is enough that falling helps; else where all that helps is freed."""
        here, last = self.rungs[self.position].needed, len(self.rungs) - 1
        helped = {place: held for place, held in free.items() if held >= wanted[place] or here.get(place, 0)}
        short = [place for place, held in helped.items() if held < wanted[place]]
        if not short:
            return self.position
        for position in range(self.position + 1, last):
            if not any(wanted[at] > left for at, left in self._left(helped, self.position, position)):
                return position
        frees = (
            i for i in range(last, self.position, -1) if any(self._step(i - 1).get(at, 0) > 0 for at in short)
        )
        return next(frees, self.position)

    def _left(self, free: Bytes, here: int, there: int) -> list[tuple[str, int]]:
        """What is free of each place once it stands there instead of here."""
        now, then = self.rungs[here].needed, self.rungs[there].needed
        return [(place, held + now.get(place, 0) - then.get(place, 0)) for place, held in free.items()]

    def _step(self, position: int) -> dict[str, int]:
        """What a step down from a rung frees."""
        above, below = self.rungs[position].needed, self.rungs[position + 1].needed
        return {place: above.get(place, 0) - below.get(place, 0) for place in {*above, *below}}

    def _has_room_above(self, free: Bytes, wanted: Bytes) -> bool:
        step = self._step(self.position - 1)
        return all(
            free[place] >= taken + int((1 + _SLACK) * wanted[place])
            for place, taken in step.items()
            if taken > 0 and place in free
        )
