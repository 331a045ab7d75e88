"""Passes of few widths: which are chosen by what they take, and how a text is cut into them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.runtimes.pass_shapes import PassShapes, choose_same_shapes, choose_shapes, same_cost

# Milliseconds by width on an H100 (docs/log/devices.md); widths that were not measured are left to the neighbours.
FP16 = {1: 2.75, 2: 2.80, 4: 2.77, 8: 2.80, 16: 2.91, 32: 3.0, 64: 3.1, 256: 4.0}
INT4 = {1: 2.50, 2: 2.84, 4: 2.80, 8: 3.82, 16: 6.07, 32: 6.16, 64: 6.5, 256: 9.0}
UNEVEN = {1: 1.91, 2: 2.05, 4: 2.27, 8: 4.55, 16: 3.15, 32: 3.33, 64: 4.0, 256: 5.0}
widths = st.lists(st.integers(1, 40), min_size=1, max_size=4, unique=True).map(lambda each: tuple(sorted(each)))


@pytest.mark.parametrize(
    ("taken_ms", "rows", "reads", "same", "cost"),
    [
        (FP16, (8, 32, 64), (16, 64, 256), 16, 2.91 / 2.80),
        (INT4, (1, 4, 8, 32, 64), (16, 64, 256), 4, 2.80 / 2.50),
        (UNEVEN, (1, 2, 4, 64), (16, 64, 256), 4, 2.27 / 1.91),
    ],
)
def test_a_width_stands_for_the_narrower_ones_that_take_as_long(
    taken_ms: dict[int, float], rows: tuple[int, ...], reads: tuple[int, ...], same: int, cost: float
) -> None:
    def seconds_of(width: int, num_rows: int) -> float:
        return taken_ms[width] / 1e3

    found = choose_shapes(seconds_of, 256)
    assert found is not None
    assert found == PassShapes(rows, reads)
    one = choose_same_shapes(seconds_of, 256)
    assert one == PassShapes((same,), (256,), is_same=True)
    assert same_cost(seconds_of, one, found) == pytest.approx(cost)
    narrow = choose_shapes(lambda width, num_rows: taken_ms[width] / 1e3, 20)
    assert narrow is not None
    assert max(narrow.rows + narrow.reads) == 16


def test_prompts_are_read_in_the_fastest_width_whose_passes_may_begin_anywhere() -> None:
    tried = list[int]()

    def reads_alike(shapes: PassShapes) -> bool:
        tried.append(shapes.read_width)
        return shapes.read_width == 16

    found = choose_same_shapes(lambda width, num_rows: INT4[width] / 1e3, 256, reads_alike)
    assert found == PassShapes((4,), (16,), is_same=True)
    assert tried == [256, 64, 16]
    none = choose_same_shapes(lambda width, num_rows: INT4[width] / 1e3, 256, lambda shapes: False)
    assert none
    assert (none.reads, none.read_width) == ((4,), 0), "as all others"


@given(st.data(), st.integers(1, 20), st.integers(21, 60), st.integers(1, 200))
def test_a_width_of_its_own_reads_what_the_length_of_the_prompt_says(
    data: st.DataObject, width: int, read: int, num_tokens: int
) -> None:
    """Wherever a text goes on, after a prompt or within it, and however many rows are wanted."""
    shapes = PassShapes((width,), (read,), is_same=True)
    context_length = data.draw(st.integers(max(num_tokens, read), 300))
    num_prompt = data.draw(st.integers(1, num_tokens))
    num_last = data.draw(st.integers(1, num_tokens - num_prompt + 1))
    num_read = shapes.num_read(num_prompt, num_tokens - num_last, context_length)
    assert num_read == shapes.num_read(num_prompt, num_prompt - 1, context_length)
    start, made = data.draw(st.integers(0, num_tokens - num_last)), dict[int, int]()
    begun = start
    while start < num_tokens:
        found = shapes.next_pass(start, num_tokens, num_last, context_length, num_read=num_read)
        run = found.stop - found.start + found.num_padded
        assert found.start <= start < found.stop
        assert found.start + run <= context_length
        assert found.stop <= num_tokens - num_last or found.num_given == run, "rows that are wanted are given"
        made |= dict.fromkeys(range(found.start, found.stop), run)
        start = found.stop
    assert all(made[place] == (read if place < num_read else width) for place in range(begun, num_tokens))
    assert all(width == read for place, width in made.items() if place < num_read)


def test_no_token_at_the_end_of_the_context_and_none_with_a_wanted_row_is_read_in_a_width_of_its_own() -> None:
    shapes = PassShapes((4,), (16,), is_same=True)
    assert shapes.num_read(40, 39, 100) == 39
    assert shapes.num_read(40, 39, 40) == 36
    assert shapes.num_read(40, 20, 100) == 20


def test_where_memory_is_short_a_narrower_width_reads() -> None:
    shapes = PassShapes((4,), (16, 64, 256))
    assert [shapes.next_pass(0, 300, 1, 700, most).stop for most in (None, 256, 255, 16, 15)] == [
        256,
        256,
        64,
        16,
        16,
    ]


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
