"""The rule that keeps rows equal to the bit, on numbers alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.runtimes.pass_shapes import RowRule, row_rule
from edgespec.system.system_info import read_l2_bytes

BORDERS = st.lists(st.sampled_from([16, 32, 64, 70, 128]), unique=True).map(lambda found: tuple(sorted(found)))


@given(BORDERS, st.integers(1, 300), st.integers(0, 300), st.integers(1, 300))
def test_passes_run_every_position_in_even_widths_and_cross_no_border(
    borders: tuple[int, ...], context_length: int, start: int, length: int
) -> None:
    start = min(start, context_length - 1)
    stop = min(start + length, context_length)
    at = start
    while at < stop:
        first, end, num_padded, _ = RowRule(True, borders).next_pass(at, stop, context_length)
        width, filled = end + num_padded - first, end + num_padded
        assert at - 1 <= first <= at < end <= stop
        assert filled <= context_length
        assert not any(first < border < filled for border in borders)
        # A single row is left alone only where no pass over it can have another.
        alone = width == 1 and at in (0, *borders) and filled in (*borders, context_length)
        assert width % 2 == 0 or alone
        at = end


@given(BORDERS, st.integers(1, 300), st.integers(0, 299))
def test_a_position_alone_at_the_end_is_alone_in_every_cut(
    borders: tuple[int, ...], context_length: int, start: int
) -> None:
    last = context_length - 1
    start = min(start, last)
    at, first = start, start
    while at < context_length:
        first, at, *_ = RowRule(True, borders).next_pass(at, context_length, context_length)
    alone = RowRule(True, borders).next_pass(last, context_length, context_length)
    assert (context_length - first == 1) == (context_length - alone.start == 1)


@pytest.mark.parametrize(
    ("head_dim", "borders"),
    [(64, ()), (80, ()), (96, ()), (128, ()), (160, (64,)), (192, (64,)), (256, (64,)), (512, (32, 64))],
)
def test_borders_follow_from_the_size_of_a_head(head_dim: int, borders: tuple[int, ...]) -> None:
    for l2_bytes in (None, 1 << 18, 1 << 20, 1 << 21):
        rule = row_rule([head_dim], l2_bytes)
        assert rule.borders == borders
        assert not (rule.borders and rule.has_flash_attention)


@pytest.mark.parametrize(
    ("head_dim", "l2_bytes", "has_flash_attention"),
    [
        (64, 1 << 21, True),
        (96, 1 << 21, True),
        (96, 1 << 18, False),  # tiles of 85 positions
        (128, 1 << 18, True),  # of 64
        (64, None, False),  # unknown
        (64, 100, False),  # none
    ],
)
def test_flash_attention_stays_where_it_shares_rows_out_evenly(
    head_dim: int, l2_bytes: int | None, has_flash_attention: bool
) -> None:
    assert row_rule([head_dim], l2_bytes) == RowRule(has_flash_attention, ())


def test_the_size_of_the_cache_is_positive_or_unknown() -> None:
    found = read_l2_bytes()
    assert found is None or found > 1 << 10
