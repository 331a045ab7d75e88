"""Passes of few widths: which are chosen by what they take, and how a text is cut into them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.runtimes.pass_shapes import PassShapes, choose_shapes

# Milliseconds by width on an H100 (docs/log/devices.md); widths that were not measured are left to the neighbours.
FP16 = {1: 2.75, 2: 2.80, 4: 2.77, 8: 2.80, 16: 2.91, 32: 3.0, 64: 3.1, 256: 4.0}
INT4 = {1: 2.50, 2: 2.84, 4: 2.80, 8: 3.82, 16: 6.07, 32: 6.16, 64: 6.5, 256: 9.0}
UNEVEN = {1: 1.91, 2: 2.05, 4: 2.27, 8: 4.55, 16: 3.15, 32: 3.33, 64: 4.0, 256: 5.0}
widths = st.lists(st.integers(1, 40), min_size=1, max_size=4, unique=True).map(lambda each: tuple(sorted(each)))


@pytest.mark.parametrize(
    ("taken_ms", "rows", "reads", "same"),
    [
        (FP16, (8, 32, 64), (16, 64, 256), 16),
        (INT4, (1, 4, 8, 32, 64), (16, 64, 256), 4),
        (UNEVEN, (1, 2, 4, 64), (16, 64, 256), 4),
    ],
)
def test_a_width_stands_for_the_narrower_ones_that_take_as_long(
    taken_ms: dict[int, float], rows: tuple[int, ...], reads: tuple[int, ...], same: int
) -> None:
    found = choose_shapes(lambda width, num_rows: taken_ms[width] / 1e3, 256)
    assert found is not None
    assert found == PassShapes(rows, reads)
    assert choose_shapes(lambda width, num_rows: taken_ms[width] / 1e3, 256, is_same=True) == ((same,), (same,))
    narrow = choose_shapes(lambda width, num_rows: taken_ms[width] / 1e3, 20)
    assert narrow is not None
    assert max(narrow.rows + narrow.reads) == 16


def test_a_device_that_takes_long_for_each_row_pads_nothing() -> None:
    assert choose_shapes(lambda width, num_rows: 0.4 * width, 256) is None


@given(st.data(), widths, widths, st.integers(1, 200))
def test_a_text_is_cut_into_passes_of_these_widths_alone(
    data: st.DataObject, rows: tuple[int, ...], reads: tuple[int, ...], num_tokens: int
) -> None:
    shapes = PassShapes(rows, reads)
    context_length = data.draw(st.integers(max(num_tokens, *rows, *reads), 300))
    num_last = data.draw(st.integers(1, num_tokens))
    start = data.draw(st.integers(0, num_tokens - num_last))
    wanted: list[int] = []
    while start < num_tokens:
        found = shapes.next_pass(start, num_tokens, num_last, context_length)
        run = found.stop - found.start + found.num_padded
        assert (run, found.num_given) in shapes.all()
        assert found.start <= start < found.stop <= num_tokens, "each pass runs something new"
        assert found.start + run <= context_length
        first = max(start, num_tokens - num_last)
        if found.stop > first:
            assert found.stop - first + found.num_padded <= found.num_given, "rows that are wanted are given"
            wanted += range(first, found.stop)
        start = found.stop
    assert wanted == list(range(num_tokens - num_last, num_tokens))
