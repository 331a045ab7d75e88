"""How often a watch reads what is free: it takes 0.25 ms, and a pass of a small model 7."""

from edgespec.draft.memory_watch import MemoryWatch
from edgespec.memory.free_memory import HOST, FreeByPlace, FreeMemory
from edgespec.memory.ladder import Tier
from edgespec.memory.pressure import NO_PRESSURE
from edgespec.system.clock import VirtualClock

ROOMY = {HOST: FreeMemory(1 << 40, "a limit")}


def capacity(num_tokens: int) -> int:
    return 1 << max(5, (num_tokens - 1).bit_length())


def test_free_memory_is_read_where_the_cache_grows_and_ten_times_a_second() -> None:
    """Not in each round of a short text, whose cache will soon grow."""
    clock, read = VirtualClock(), list[float]()

    def free() -> FreeByPlace:
        read.append(clock.now)
        return ROOMY

    watch = MemoryWatch(
        [Tier("model", {HOST: 1}, has_models=True), Tier("plain decoding", {})],
        lambda held, wanted: 1000 * max(0, capacity(wanted) - capacity(held)),
        free,
        clock=clock,
        pressure=lambda: NO_PRESSURE,
    )
    for num_tokens in range(30, 230):
        watch.look(num_tokens)
        watch.require_growth(num_tokens, lambda: False)
        clock.now += 0.007
    # 1.4 s of answer, and the cache has grown to 128, 256 and 512.
    assert 14 <= len(read) <= 14 + 8


def test_a_cache_that_does_not_grow_is_refused_nothing() -> None:
    watch = MemoryWatch(growth_bytes=lambda held, wanted: 0, free=lambda: {HOST: FreeMemory(-1, "a limit")})
    asked: list[str] = []

    def give_up() -> bool:
        asked.append("to close a drafter")
        return False

    watch.require_growth(100, give_up)
    assert asked == []
