"""How much drafting the free memory has space for, looked at while answers are made.

Knows tiers and bytes, and no drafters.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from edgespec.errors import MemoryExhausted
from edgespec.memory.estimate import RESERVE_BYTES
from edgespec.memory.free_memory import HOST, FreeByPlace, FreeMemory, free_memory
from edgespec.memory.ladder import Bytes, Ladder, Tier
from edgespec.system.clock import Clock

# This much of the reserve that was kept at loading must stay free.
_MIN_FREE_BYTES = RESERVE_BYTES // 2
# A look at what is free takes 0.25 ms, a pass of a small model 4 ms.
_LOOK_S = 0.1
# What the target takes for this many tokens more is kept free too.
_LOOKAHEAD_TOKENS = 256
# A pass runs no more tokens than this behind the text.
_PASS_TOKENS = 64


@dataclass(slots=True)
class MemoryWatch:
    """Follows the ladder of tiers by what is free.

    tiers: Ways to draft, the largest first; the last is plain decoding.
    growth_bytes: What the target takes more for a text, by the longest text before it and its own length.
    free: Reads what is free, by place.
    place: Where the target lies.
    """

    tiers: Sequence[Tier] = (Tier("plain decoding", {}),)
    growth_bytes: Callable[[int, int], int] = lambda num_held, num_tokens: 0
    free: Callable[[], FreeByPlace] = lambda: {HOST: free_memory()}
    place: str = HOST
    clock: Clock = perf_counter
    reason: str = field(init=False, default="")  # of the last move
    _ladder: Ladder = field(init=False)
    _num_held: int = field(init=False, default=0)  # tokens of the longest text so far
    _looked_s: float = field(init=False, default=float("-inf"))

    def __post_init__(self) -> None:
        self._ladder = Ladder(self.tiers)

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
        if self._ladder.start(beside, dict.fromkeys(free, RESERVE_BYTES)):
            first = self.tiers[0].needed
            place = min(beside, key=lambda place: beside[place] - first.get(place, 0))
            needed = f"{first.get(place, 0) + RESERVE_BYTES >> 20} MiB beside the {target.get(place, 0) >> 20}"
            self.reason = f"the first needs {needed} of the target, and {_format_free(free[place])}"

    def fall(self, reason: str) -> None:
        """Go to a smaller tier: memory was refused."""
        self._ladder.fall(self.clock())
        self.reason = reason

    def look(self, num_tokens: int) -> None:
        """Move along the ladder by what is free now, with num_tokens of text."""
        growth_bytes = self.growth_bytes(self._num_held, num_tokens + _LOOKAHEAD_TOKENS)
        now_s, before = self.clock(), self._ladder.position
        if len(self.tiers) == 1 or not (growth_bytes or now_s - self._looked_s >= _LOOK_S):
            return
        self._looked_s = now_s
        free = self.free()
        wanted = {place: _MIN_FREE_BYTES + growth_bytes * (place == self.place) for place in free}
        free_bytes = {place: each.free_bytes for place, each in free.items()}
        if self._ladder.look(free_bytes, wanted, now_s) != before:
            place = min(free, key=lambda place: free_bytes[place] - wanted[place])
            self.reason = f"{_format_free(free[place])}, and {wanted[place] >> 20} MiB are to be"

    def require_growth(self, num_tokens: int, relieve: Callable[[], bool]) -> None:
        """Make sure that the next pass can grow the target's cache, which no system might refuse in time.

        Args:
            relieve: Frees memory; whether it freed any.

        Raises MemoryExhausted: There is no space, though all that drafts was given up.
        """
        if not self.growth_bytes(self._num_held, num_tokens + _LOOKAHEAD_TOKENS):
            return
        num_tokens += _PASS_TOKENS
        needed_bytes = self.growth_bytes(self._num_held, num_tokens)
        while (free := self.free().get(self.place)) and needed_bytes > free.free_bytes:
            if not relieve():
                num_fitting = self._num_fitting(num_tokens, free.free_bytes)
                raise MemoryExhausted(
                    f"{num_tokens} tokens need {needed_bytes >> 20} MiB more of KV cache, and "
                    f"{_format_free(free)}: {num_fitting} tokens fit; use a shorter prompt or answer or a smaller "
                    "model, or raise the limit",
                    needed_bytes=needed_bytes,
                    free_bytes=free.free_bytes,
                )
        self._num_held = max(self._num_held, num_tokens)

    def _num_fitting(self, num_tokens: int, free_bytes: int) -> int:
        """The longest text up to num_tokens that the target's cache has space for, or can have."""
        lengths = range(num_tokens)
        return bisect_right(lengths, free_bytes, key=lambda num: self.growth_bytes(self._num_held, num)) - 1


def _format_free(free: FreeMemory) -> str:
    return f"{max(0, free.free_bytes) >> 20} MiB are free within {free.bound}"
