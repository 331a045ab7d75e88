"""How much drafting fits in memory: a fallback ladder of tiers, down at once and up after a cooldown.

Pure: takes the free bytes of each place and the time, and knows neither drafters nor devices.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

COOLDOWN_S = 2.0
LONGEST_COOLDOWN_S = 300.0
# A fall within so many cooldowns after a climb means that the climb came too soon. With 5, memory that came and
# went each 32 s had a model opened each time, which at 1.5 billion parameters takes 5 s.
_TOO_SOON = 15.0

Bytes = Mapping[str, int]
"""By place: the host, and devices with memory of their own."""


class Tier(NamedTuple):
    """What a way to draft takes beyond plain decoding."""

    needed: Bytes
    has_models: bool = False


Margin = Callable[[Tier], Bytes]
"""Bytes that are to stay free in each place beside a tier."""


@dataclass(slots=True)
class Ladder:
    """The tier in use. Tiers are sorted from the most memory to the least; the last is plain decoding.

    As soon as a place has less free than must be, the ladder falls as far as the tiers' figures say that it must,
    and no further than that frees anything there. It climbs one tier once the next one has fitted for a whole
    cooldown, with more to spare than what makes it fall. A fall soon after a climb doubles the cooldown and a long
    stay restores it, so that memory that comes and goes does not open a model time and again. A place without
    figures has room.
    """

    tiers: Sequence[Tier]
    position: int = 0
    _enough_since_s: float | None = field(init=False, default=None)
    _climbed_s: float | None = field(init=False, default=None)
    _cooldown_s: float = field(init=False, default=COOLDOWN_S)

    @property
    def is_at_bottom(self) -> bool:
        return self.position == len(self.tiers) - 1

    def start(self, free: Bytes, spare: Margin) -> int:
        """Take the highest tier that leaves the spare bytes free, while none is in use yet."""
        last = len(self.tiers) - 1
        fits = (i for i in range(last) if not self._lacking_places(free, spare, last, i))
        self.position = next(fits, last)
        return self.position

    def look(self, free: Bytes, required: Margin, spare: Margin, now_s: float) -> int:
        """The tier to use, by the free bytes, those that must stay free, and those to stay free after a climb."""
        wanted = required(self.tiers[self.position])
        if any(num_bytes < wanted[place] for place, num_bytes in free.items()):
            for _ in range(self.position, self._find_relief(free, required)):
                self._step_down(now_s)
        elif self.position > 0 and self._can_climb(free, spare):
            if self._enough_since_s is None:
                self._enough_since_s = now_s
            if now_s - self._enough_since_s < self._cooldown_s:
                return self.position
            self.position, self._climbed_s = self.position - 1, now_s
        self._enough_since_s = None
        return self.position

    def fall(self, now_s: float) -> int:
        """The tier to use after an allocation failed: the next one down that frees any memory."""
        has_freed = False
        while not self.is_at_bottom and not has_freed:
            has_freed = any(num_bytes > 0 for num_bytes in self._freed_below(self.position).values())
            self._step_down(now_s)
        return self.position

    def relieve(self, place: str, num_bytes: int, now_s: float) -> int:
        """The tier to use where others wait for memory: the first one down that frees so many bytes in a place."""
        here = self.tiers[self.position].needed.get(place, 0)
        below = range(self.position + 1, len(self.tiers))
        freeing = (i for i in below if here - self.tiers[i].needed.get(place, 0) >= num_bytes)
        for _ in range(self.position, next(freeing, self.position)):
            self._step_down(now_s)
        return self.position

    def hold(self) -> None:
        """Begin the cooldown before a climb again."""
        self._enough_since_s = None

    def _step_down(self, now_s: float) -> None:
        if self._climbed_s is not None:
            is_too_soon = now_s - self._climbed_s < _TOO_SOON * self._cooldown_s
            self._cooldown_s = min(2 * self._cooldown_s, LONGEST_COOLDOWN_S) if is_too_soon else COOLDOWN_S
        self.position += 1
        self._enough_since_s = self._climbed_s = None

    def _find_relief(self, free: Bytes, required: Margin) -> int:
        """The first tier down that gives each place what a fall can give it, or else frees all that it can."""
        here, last = self.tiers[self.position], len(self.tiers) - 1
        wanted = required(here)
        relievable = {at: num for at, num in free.items() if num >= wanted[at] or here.needed.get(at, 0)}
        lacking = [at for at, num in relievable.items() if num < wanted[at]]
        if not lacking:
            return self.position
        for position in range(self.position + 1, last):
            if not self._lacking_places(relievable, required, self.position, position):
                return position
        freeing = (
            i
            for i in range(last, self.position, -1)
            if any(self._freed_below(i - 1).get(at, 0) > 0 for at in lacking)
        )
        return next(freeing, self.position)

    def _lacking_places(self, free: Bytes, required: Margin, here: int, there: int) -> list[str]:
        """Places with less free than required after a move from one tier to another."""
        now, then = self.tiers[here].needed, self.tiers[there].needed
        wanted = required(self.tiers[there])
        return [at for at, num in free.items() if num + now.get(at, 0) - then.get(at, 0) < wanted[at]]

    def _freed_below(self, position: int) -> dict[str, int]:
        above, below = self.tiers[position].needed, self.tiers[position + 1].needed
        return {place: above.get(place, 0) - below.get(place, 0) for place in {*above, *below}}

    def _can_climb(self, free: Bytes, spare: Margin) -> bool:
        wanted = spare(self.tiers[self.position - 1])
        return all(
            free[place] >= taken + wanted[place]
            for place, taken in self._freed_below(self.position - 1).items()
            if taken > 0 and place in free
        )
