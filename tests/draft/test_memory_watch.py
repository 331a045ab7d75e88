"""When a watch reads what is free, and that nobody is given what another is about to take."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

import pytest

from edgespec.draft.memory_watch import MemoryWatch, Tier
from edgespec.errors import MemoryExhausted
from edgespec.memory.free_memory import HOST, FreeByPlace, FreeMemory, Reserve
from edgespec.memory.pressure import NO_PRESSURE, Level, Pressure
from edgespec.system.clock import VirtualClock

ROOMY = {HOST: FreeMemory(1 << 40, "a limit")}


def capacity(num_tokens: int) -> int:
    return 1 << max(5, (num_tokens - 1).bit_length())


@pytest.mark.parametrize(("free_gigabytes", "looks"), [(0.5, 14), (4, 3), (40, 2)])
def test_free_memory_is_read_where_the_cache_grows_and_the_oftener_the_less_there_is(
    free_gigabytes: float, looks: int
) -> None:
    """Ten times a second at most, and not in each round of a short text, whose cache will soon grow."""
    clock, read = VirtualClock(), list[float]()

    def free() -> FreeByPlace:
        read.append(clock.now)
        return {HOST: FreeMemory(int(free_gigabytes * (1 << 30)), "a limit")}

    watch = MemoryWatch(
        [Tier({HOST: 1}, has_models=True), Tier({})],
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
    assert looks <= len(read) <= looks + 8


def test_drafters_from_the_text_come_back_once_no_program_waits_for_memory() -> None:
    """While all of them draft that is not asked for: none would free enough to help."""
    clock, asked = VirtualClock(), list[float]()
    machine = {HOST: FreeMemory(0, "a limit")}, Pressure(Level.SOME)

    def read() -> Pressure:
        asked.append(clock.now)
        return machine[1]

    tiers = [Tier({HOST: 1 << 20}), Tier({})]
    watch = MemoryWatch(tiers, free=lambda: machine[0], clock=clock, pressure=read)
    watch.look(1)
    assert (watch.position, asked) == (1, [])
    for shown, position in ((Pressure(Level.SOME), 1), (NO_PRESSURE, 0)):
        machine = ROOMY, shown
        for _ in range(30):
            clock.now += 0.2
            watch.look(1)
        assert watch.position == position


def test_a_cache_that_does_not_grow_is_refused_nothing() -> None:
    watch = MemoryWatch(growth_bytes=lambda held, wanted: 0, free=lambda: {HOST: FreeMemory(-1, "a limit")})
    asked: list[str] = []

    def give_up() -> bool:
        asked.append("to close a drafter")
        return False

    watch.require_growth(100, give_up)
    assert asked == []


class Limited:
    """A limit of 100 bytes, of which a cache takes 60 when it grows, and a pass 20."""

    def __init__(self) -> None:
        self.taken = 0
        self.watch = MemoryWatch(
            growth_bytes=lambda held, wanted: 60 * (wanted > held),
            free=lambda: {HOST: FreeMemory(100 - self.taken, "a limit", reserve=Reserve(10, 5))},
            pass_bytes=lambda num_tokens: 20,
        )

    def require(self, cache: int, grow: Callable[[int, int], None], relieve: Callable[[], bool]) -> None:
        self.watch.require_growth(10, relieve, cache, grow)


def test_two_caches_that_grow_at_once_are_not_given_the_same_memory() -> None:
    limited, others = Limited(), list[Future[None]]()

    def take(cache: int, num_tokens: int) -> None:
        if not others:  # which sees the memory as free still
            others.append(pool.submit(limited.require, 1, take, lambda: False))
            assert not wait(others, 0.05).done
        limited.taken += 60

    with ThreadPoolExecutor(1) as pool:
        limited.require(0, take, lambda: False)
        with pytest.raises(MemoryExhausted, match="60 bytes more of KV cache"):
            others[0].result(60)
    assert limited.taken == 60


def test_what_a_pass_takes_stays_free_beside_a_cache_that_grows() -> None:
    limited, asked = Limited(), list[int]()
    limited.taken = 21

    def relieve() -> bool:
        asked.append(limited.taken)
        limited.taken -= 1
        return True

    limited.require(0, lambda cache, num_tokens: None, relieve)
    assert asked == [21]


def test_a_cache_that_is_refused_its_memory_has_more_freed() -> None:
    limited, refusals = Limited(), [MemoryExhausted("refused"), MemoryExhausted("refused")]

    def grow(cache: int, num_tokens: int) -> None:
        if refusals:
            raise refusals.pop()

    limited.require(0, grow, lambda: True)
    assert refusals == []
    refusals.append(MemoryExhausted("refused"))
    with pytest.raises(MemoryExhausted, match="refused"):
        limited.require(1, grow, lambda: False)


def test_memory_that_is_promised_to_a_session_is_no_caches() -> None:
    limited = Limited()
    with limited.watch.promise(91) as is_free:
        assert not is_free, "10 stay in reserve"
    with limited.watch.promise(30) as is_free:
        assert is_free
        with pytest.raises(MemoryExhausted):
            limited.require(0, lambda cache, num_tokens: None, lambda: False)
    limited.require(0, lambda cache, num_tokens: None, lambda: False)
