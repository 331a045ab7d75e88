"""What stays free, by what bounds the memory."""

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.memory.free_memory import (
    LIMIT_RESERVE,
    RESERVE_BYTES,
    FreeMemory,
    Reserve,
    device_reserve,
    free_memory,
    machine_reserve,
    tightest,
)

MIB, GIB = 1 << 20, 1 << 30


@pytest.mark.parametrize(
    ("total", "wanted"), [(512 * MIB, RESERVE_BYTES), (4 * GIB, 4 * GIB // 10), (8 * GIB, 8 * GIB // 10)]
)
def test_a_small_machine_keeps_a_tenth(total: int, wanted: int) -> None:
    assert machine_reserve(total) == Reserve(wanted, wanted // 2)


@pytest.mark.parametrize("total", [10 * GIB, 24 * GIB, 512 * GIB])
def test_a_desktop_keeps_a_gibibyte_and_closes_drafters_at_half(total: int) -> None:
    assert machine_reserve(total) == Reserve(GIB, GIB // 2)


@pytest.mark.parametrize(
    ("total", "wanted"), [(GIB, RESERVE_BYTES), (4 * GIB, 256 * MIB), (8 * GIB, 512 * MIB), (141 * GIB, 512 * MIB)]
)
def test_a_gpu_keeps_some_hundred_mebibytes(total: int, wanted: int) -> None:
    assert device_reserve(total).opening_bytes == wanted


def test_a_context_leaves_what_a_drafter_model_may_use_but_never_less_than_the_least() -> None:
    assert machine_reserve(16 * GIB).context_bytes == GIB // 2
    assert LIMIT_RESERVE.context_bytes == RESERVE_BYTES


def test_the_machine_has_the_reserve_of_a_machine_and_a_limit_the_least() -> None:
    total = psutil.virtual_memory().total
    assert free_memory().reserve.opening_bytes >= RESERVE_BYTES
    if "this machine" in free_memory().bound:
        assert free_memory().reserve == machine_reserve(total)
    held = psutil.Process().memory_info().rss
    limited = free_memory(held + 300 * MIB)
    assert "memory limit" in limited.bound
    if psutil.virtual_memory().available > 4 * GIB:
        assert limited.reserve == LIMIT_RESERVE


bounds = st.builds(
    lambda free, opening: FreeMemory(free, str(free), reserve=Reserve(opening, opening // 2)),
    st.integers(0, 3000),
    st.integers(0, 1500),
)


@given(st.lists(bounds, min_size=1, max_size=4))
def test_of_several_bounds_each_keeps_its_reserve(several: list[FreeMemory]) -> None:
    found = tightest(several)
    assert found.free_bytes == min(each.free_bytes for each in several)
    for part in range(2):
        usable = min(each.free_bytes - each.reserve[part] for each in several)
        assert found.free_bytes - found.reserve[part] == usable
