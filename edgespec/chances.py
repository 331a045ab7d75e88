"""How likely a drafted token is kept, by its source and what it rests on.

Knows nothing of drafters and costs.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

Key = tuple[str, int]  # source and evidence

_MEMORY = 0.98  # weight that an answer's past keeps at each token that is judged
_LONG_MEMORY = 0.998
_LONG_WEIGHT = 12.0  # how many trials in this answer what was seen before it counts as
# Nothing known of a source: as if one token of three had been kept. A new class starts from its source's mean.
_SHARE, _TRIED = 1 / 3, 3.0
_ALL = -1


@dataclass(slots=True)
class _Count:
    kept: float
    tried: float

    def see(self, is_kept: bool, memory: float) -> None:
        self.kept = memory * self.kept + is_kept
        self.tried = memory * self.tried + 1


@dataclass(slots=True)
class Chances:
    """Running shares of kept tokens: those of this answer, which lean on those of all before.

    A token behind one that was not kept was not judged and says nothing.
    """

    past: dict[Key, tuple[float, float]] = field(default_factory=dict)  # kept, tried
    _assumed: dict[Key, tuple[float, float]] = field(default_factory=dict)  # the same, of what was never tried
    _long: dict[Key, _Count] = field(default_factory=dict)
    _now: dict[Key, _Count] = field(default_factory=dict)

    def of(self, source: str, evidence: int) -> float:
        key = (source, evidence)
        long = self._long.get(key) or self._start(key)
        prior = long.kept / long.tried
        now = self._now.get(key)
        if now is None:
            return prior
        return (now.kept + _LONG_WEIGHT * prior) / (now.tried + _LONG_WEIGHT)

    def judge(self, source: str, evidence: int, is_kept: bool) -> None:
        key = (source, evidence)
        for counted in (key, (source, _ALL)):
            if counted not in self._long:
                self._long[counted] = self._start(counted)
            self._long[counted].see(is_kept, _LONG_MEMORY)
        self._now.setdefault(key, _Count(0.0, 0.0)).see(is_kept, _MEMORY)

    def expect(self, source: str, counts: tuple[float, float]) -> None:
        """Tokens kept, and tried, of a source of which nothing is known."""
        self._assumed.setdefault((source, _ALL), counts)

    def learned(self) -> Mapping[Key, tuple[float, float]]:
        """What the next answer starts from: what was counted, and nothing that was assumed."""
        return self.past | {key: (count.kept, count.tried) for key, count in self._long.items()}

    def _start(self, key: Key) -> _Count:
        """What is known of a class before it is judged."""
        if before := self._before(key):
            return _Count(*before)
        whole = (key[0], _ALL)
        known = self._long.get(whole) or _Count(*(self._before(whole) or (_SHARE * _TRIED, _TRIED)))
        return _Count(_TRIED * known.kept / known.tried, _TRIED)

    def _before(self, key: Key) -> tuple[float, float] | None:
        return self.past.get(key) or self._assumed.get(key)


def position_class(position: int) -> int:
    """The evidence for a token of which nothing is known but its place in the draft."""
    return min(position, 15)


def expected(chances: Iterable[float]) -> list[float]:
    """Tokens that a pass yields by the number that is drafted: 1, 1 + a₁, 1 + a₁ + a₁a₂, …"""
    totals, reached = [1.0], 1.0
    for chance in chances:
        reached *= chance
        totals.append(totals[-1] + reached)
    return totals
