"""How much drafting fits in memory, by what is free and by whether other programs wait for memory.

A ladder of tiers is followed, down at once and up after a cooldown, also while no answer is made. Knows tiers and
bytes, and no drafters.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from threading import Event, Lock, Thread
from time import perf_counter
from typing import NamedTuple
from weakref import WeakMethod

from edgespec.errors import MemoryExhausted
from edgespec.memory.free_memory import (
    HOST,
    LIMIT_RESERVE,
    Bytes,
    FreeByPlace,
    FreeMemory,
    Reserve,
    free_on_host,
)
from edgespec.memory.pressure import Level, Pressure, PressureReader
from edgespec.system.clock import Clock
from edgespec.system.context_managers import contextmanager
from edgespec.system.units import format_bytes

# A look at what is free takes 0.25 to 0.8 ms, a pass of a small model 4 ms. So the next one waits for as long as a
# program that fills memory fast would take to leave too little.
_LOOK_S = 0.1
_LONGEST_LOOK_S = 1.0
_FILLED_PER_S = 8 << 30
# What the target takes for this many tokens more is kept free too.
_LOOKAHEAD_TOKENS = 256
# A pass runs no more tokens than this after the text.
_PASS_TOKENS = 64
# Under high pressure a step down frees at least this, which only a drafter model has. Then its effect is waited
# for: Linux reports means over 10 s.
_WORTH_BYTES = 64 << 20
_PRESSURE_STEP_S = 10.0
COOLDOWN_S = 2.0
LONGEST_COOLDOWN_S = 300.0
# A fall within so many cooldowns after a climb means that the climb came too soon. With 5, memory that came and
# went each 32 s had a model opened each time, which at 1.5 billion parameters takes 5 s.
_TOO_SOON = 15.0


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
    figures has room. Pure: it takes the free bytes of each place, and the time.
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


@dataclass(slots=True)
class MemoryWatch:
    """Follows the ladder of tiers by what is free.

    tiers: Ways to draft, the largest first; the last is plain decoding.
    growth_bytes: What the target takes more for a text, by the longest text before it and its own length.
    free: Reads what is free, by place.
    place: Where the target lies.
    pressure: Reads whether programs wait for the host's memory.
    pass_bytes: What the widest pass over so many tokens takes while it runs.
    """

    tiers: Sequence[Tier] = (Tier({}),)
    growth_bytes: Callable[[int, int], int] = lambda num_held, num_tokens: 0
    free: Callable[[], FreeByPlace] = free_on_host
    place: str = HOST
    clock: Clock = perf_counter
    pressure: Callable[[], Pressure] = field(default_factory=PressureReader)
    pass_bytes: Callable[[int], int] = lambda num_tokens: 0
    reason: str = field(init=False, default="")  # of the last move
    _ladder: Ladder = field(init=False)
    _has_relief: bool = field(init=False)  # a step down may help programs that wait for memory
    _num_held: dict[int, int] = field(init=False, default_factory=dict)  # by cache, tokens of its longest text
    _next_look_s: float = field(init=False, default=float("-inf"))
    _looked_bytes: int = field(init=False, default=0)  # by which the cache was to grow soon, at the last call
    _relieved_s: float = field(init=False, default=float("-inf"))  # when pressure last had a model closed
    _growing: Lock = field(init=False, default_factory=Lock)  # one cache grows at a time, and no session is opened
    _promised_bytes: int = field(init=False, default=0)  # to a session that is being opened

    def __post_init__(self) -> None:
        self._ladder = Ladder(self.tiers)
        largest = self.tiers[0]
        self._has_relief = largest.has_models or largest.needed.get(HOST, 0) >= _WORTH_BYTES

    @property
    def position(self) -> int:
        """Index of the tier that there is memory for."""
        return self._ladder.position

    @property
    def is_at_bottom(self) -> bool:
        return self._ladder.is_at_bottom

    def start(self, free: FreeByPlace, target: Bytes) -> None:
        """Choose the tier to load beside the target, for whose bytes space is kept."""
        beside = {place: each.free_bytes - target.get(place, 0) for place, each in free.items()}
        spare = _margin(free, lambda reserve: reserve.opening_bytes, {})
        if self._ladder.start(beside, spare):
            first = self.tiers[0]
            lacking = {at: num - first.needed.get(at, 0) - spare(first)[at] for at, num in beside.items()}
            place = min(lacking, key=lacking.__getitem__)
            needed, held, reserve = (
                format_bytes(each.get(place, 0)) for each in (first.needed, target, spare(first))
            )
            self.reason = (
                f"the first needs {needed} beside the {held} of the target and {reserve} in "
                f"reserve, and {_format_free(free[place])}"
            )

    def fall(self, reason: str) -> None:
        """Go to a smaller tier: memory was refused."""
        self._ladder.fall(self.clock())
        self.reason = reason

    def look(self, num_tokens: int, cache: int = 0) -> None:
        """Move along the ladder by what is free now, with num_tokens of text in one of the target's caches."""
        growth_bytes = self.growth_bytes(self._num_held.get(cache, 0), num_tokens + _LOOKAHEAD_TOKENS)
        now_s = self.clock()
        is_more = growth_bytes > self._looked_bytes
        self._looked_bytes = growth_bytes
        if len(self.tiers) == 1 or not (is_more or now_s >= self._next_look_s):
            return
        self._next_look_s = now_s + _LOOK_S
        is_followed = self._has_relief or self._ladder.position > 0  # from where it may climb
        if not (is_followed and self._follow_pressure(now_s)):
            self._follow_free(growth_bytes, now_s)

    def _follow_pressure(self, now_s: float) -> bool:
        """Close a model, at intervals, while others wait for memory. Returns whether one was closed.

        No climb begins until they stop waiting.
        """
        pressure, before = self.pressure(), self._ladder.position
        if pressure.level > Level.NONE:
            self._ladder.hold()
        if pressure.level < Level.HIGH or now_s - self._relieved_s < _PRESSURE_STEP_S:
            return False
        if self._ladder.relieve(HOST, _WORTH_BYTES, now_s) == before:
            return False
        self._relieved_s = now_s
        self.reason = f"other programs need the memory: {pressure.sign}"
        return True

    def _follow_free(self, growth_bytes: int, now_s: float) -> None:
        free, before = self.free(), self._ladder.position
        free_bytes = {place: each.free_bytes for place, each in free.items()}
        growth = {self.place: growth_bytes}
        floor = _margin(free, lambda reserve: reserve.floor_bytes, growth)
        spare = _margin(free, lambda reserve: reserve.opening_bytes, growth)
        after = self._ladder.look(free_bytes, floor, spare, now_s)
        if after == 0:
            kept = floor(self.tiers[0])
            left = min((num_bytes - kept[place] for place, num_bytes in free_bytes.items()), default=0)
            self._next_look_s = now_s + min(max(left / _FILLED_PER_S, _LOOK_S), _LONGEST_LOOK_S)
        if after != before:
            wanted = (floor if after > before else spare)(self.tiers[min(before, after)])
            place = min(free, key=lambda place: free_bytes[place] - wanted[place])
            least = f", and {format_bytes(wanted[place])} are needed" if after > before else ""
            self.reason = _format_free(free[place]) + least

    def forget(self, cache: int) -> None:
        """Note that a cache of the target holds nothing any more."""
        self._num_held.pop(cache, None)

    def exchange(self, cache: int, other: int) -> None:
        """Note that two caches of the target have exchanged what they hold, and the memory for it."""
        held = {number: self._num_held.pop(number, 0) for number in (cache, other)}
        self._num_held[cache], self._num_held[other] = held[other], held[cache]

    def require_growth(
        self,
        num_tokens: int,
        relieve: Callable[[], bool],
        cache: int = 0,
        grow: Callable[[int, int], None] = lambda cache, num_tokens: None,
    ) -> None:
        """Let a cache of the target grow for the next pass, while no other one does.

        grow: Takes the memory of a cache for so many tokens at once: what is free counts it from then on.

        Raises MemoryExhausted: There is no space, although relieve has freed what it can.
        """
        num_tokens += _PASS_TOKENS
        num_held = self._num_held.get(cache, 0)
        if not self.growth_bytes(num_held, num_tokens):
            return
        with self._growing:
            while True:
                try:
                    self._require_free(num_held, num_tokens)
                    grow(cache, num_tokens)
                    break
                except MemoryExhausted:  # no system might refuse it in time
                    if not relieve():
                        raise
            self._num_held[cache] = max(num_held, num_tokens)

    def _require_free(self, num_held: int, num_tokens: int) -> None:
        """Raises MemoryExhausted: A cache cannot grow so far, with what a pass takes beside it."""
        free = self.free().get(self.place)

        def needed_bytes(num_tokens: int) -> int:
            return self.growth_bytes(num_held, num_tokens) + self.pass_bytes(num_tokens)

        needed = needed_bytes(num_tokens)
        if free is None or needed <= (free_bytes := free.free_bytes - self._promised_bytes):
            return
        num_fitting = max(0, bisect_right(range(num_tokens), free_bytes, key=needed_bytes) - 1)
        pass_bytes = self.pass_bytes(num_tokens)
        parts = f"{format_bytes(needed - pass_bytes)} more of KV cache"
        parts += f" and {format_bytes(pass_bytes)} for a pass" * (pass_bytes > 0)
        raise MemoryExhausted(
            f"{num_tokens} tokens need {parts}, and {_format_free(free)}: {num_fitting} tokens fit; use a shorter "
            "prompt or answer or a smaller model, or raise the limit",
            needed_bytes=needed,
            free_bytes=free.free_bytes,
        )

    @contextmanager
    def promise(self, num_bytes: int) -> Iterator[bool]:
        """Keep bytes of the host from caches that grow, while the block takes them; False: they are not free."""
        with self._growing:
            free = self.free().get(HOST)
            is_free = free is None or free.free_bytes - free.reserve.opening_bytes >= num_bytes
            promised = num_bytes if is_free else 0
            self._promised_bytes += promised
        try:
            yield is_free
        finally:
            with self._growing:
                self._promised_bytes -= promised


def _margin(free: FreeByPlace, part: Callable[[Reserve], int], growth: Bytes) -> Margin:
    """Bytes that are to stay free in each place: a part of its reserve, and what the target soon takes.

    Drafter models leave the reserve of the machine to other programs. Without them there is next to nothing to
    leave.
    """

    return lambda tier: {
        at: part(each.reserve if tier.has_models else LIMIT_RESERVE) + growth.get(at, 0)
        for at, each in free.items()
    }


def _format_free(free: FreeMemory) -> str:
    return f"{format_bytes(max(0, free.free_bytes))} are free within {free.bound}"


IDLE_LOOK_S = 3.0
_END_S = 2.0


class IdleWatch:
    """A thread that calls a method every few seconds, until that returns False, its object is gone, or close."""

    def __init__(self, look: Callable[[], bool], interval_s: float = IDLE_LOOK_S) -> None:
        """Start the thread, which does not keep the object of look alive."""
        self._closed = Event()
        # A daemon, so that a program that forgets to close its engine can end.
        self._thread = Thread(
            target=_run, args=(WeakMethod(look), self._closed, interval_s), name="edgespec memory", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End the thread, and wait for a look that is going on."""
        self._closed.set()
        self._thread.join(_END_S)


def _run(weak: "WeakMethod[Callable[[], bool]]", closed: Event, interval_s: float) -> None:
    while not closed.wait(interval_s):
        look = weak()
        if look is None or not look():
            return
        del look  # its object may go before the next look
