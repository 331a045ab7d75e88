"""Passes that a device computes wrongly beyond a width, and how many of them a slow device is asked for."""

import logging
from collections.abc import Callable

import numpy as np
import pytest

from edgespec.errors import DeviceUnavailable
from edgespec.runtimes.device_checks import WIDTHS, RowsOf, SoundPasses, find_sound_passes
from edgespec.types import Logits, TokenIds

VOCAB = 50
TABLE = np.random.default_rng(0).normal(0, 2, (VOCAB, VOCAB)).astype(np.float32)


class Clock:
    """Seconds that pass only where a device takes them."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def device(sound_to: int, *, rounding: float = 0.0, wrong: float = 1.0) -> RowsOf:
    """Rows of a table; in passes wider than sound_to, all but the first four are of another token."""

    def rows_of(tokens: TokenIds, start: int, width: int) -> Logits:
        rows = TABLE[tokens] + np.float32(rounding * width)
        if min(width, len(tokens)) > sound_to:
            rows[4:] = TABLE[tokens[4:] - 1] * np.float32(wrong)
        return rows[start:]

    return rows_of


def slow_device(sound_to: int, token_s: float, clock: Clock) -> tuple[RowsOf, Callable[[], int]]:
    """A device that takes token_s for each token, and how many tokens it has run."""
    rows_of, num_run = device(sound_to), 0

    def take_time(tokens: TokenIds, start: int, width: int) -> Logits:
        nonlocal num_run
        num_run += len(tokens) - start
        clock.now_s += token_s * (len(tokens) - start)
        return rows_of(tokens, start, width)

    return take_time, lambda: num_run


def check(rows_of: RowsOf, context_length: int = 1000) -> SoundPasses:
    return find_sound_passes(rows_of, VOCAB, context_length, "gpu")


@pytest.mark.parametrize(("sound_to", "widest"), [(1000, 256), (255, 64), (64, 64), (63, 16), (31, 16)])
def test_widest_pass_is_the_widest_that_gives_the_rows_of_narrow_ones(sound_to: int, widest: int) -> None:
    found = check(device(sound_to))
    assert (found.max_width, found.is_cut_short, len(found.rows)) == (widest, False, WIDTHS[0])


def test_rounding_is_no_fault_and_what_is_no_number_is() -> None:
    assert check(device(1000, rounding=1e-5)).max_width == WIDTHS[0]
    assert check(device(63, wrong=np.nan)).max_width == 16


def test_device_that_computes_even_short_passes_wrongly_is_refused() -> None:
    with pytest.raises(DeviceUnavailable, match="'gpu' gives other logits in passes of 16 tokens"):
        check(device(8))


@pytest.mark.parametrize("token_s", [0.0, 5.0])
@pytest.mark.parametrize("context_length", [5, 8, 20, 32])
def test_short_context_is_tried_as_far_as_it_goes(context_length: int, token_s: float) -> None:
    rows_of, _ = slow_device(1000, token_s, clock := Clock())
    found = find_sound_passes(rows_of, VOCAB, context_length, "gpu", clock)
    assert (found.max_width, found.is_cut_short, len(found.rows)) == (WIDTHS[0], False, context_length)


@pytest.mark.parametrize(
    ("token_s", "widest", "most_tokens"), [(0.001, 256, 512), (0.03, 256, 512), (0.1, 64, 128), (0.5, 16, 64)]
)
def test_slow_device_is_asked_for_less_and_trusted_no_further(
    caplog: pytest.LogCaptureFixture, token_s: float, widest: int, most_tokens: int
) -> None:
    caplog.set_level(logging.INFO)
    rows_of, num_run = slow_device(1000, token_s, clock := Clock())
    found = find_sound_passes(rows_of, VOCAB, 1000, "gpu", clock)
    assert (found.max_width, found.is_cut_short, num_run()) == (widest, widest < 256, most_tokens)
    said = f"'gpu' takes {token_s:.2f} s for each token, so that only passes of up to {widest} tokens are checked"
    assert (said in caplog.text) == (widest < 256)


def test_slow_device_that_is_wrong_is_found_wrong() -> None:
    clock = Clock()
    rows_of, _ = slow_device(63, 0.1, clock)
    found = find_sound_passes(rows_of, VOCAB, 1000, "gpu", clock)
    assert (found.max_width, found.is_cut_short) == (16, False)
    with pytest.raises(DeviceUnavailable, match="in passes of 16 tokens"):
        find_sound_passes(slow_device(8, 0.5, clock)[0], VOCAB, 1000, "gpu", clock)


def test_single_floats_are_held_to_less_rounding_than_half_floats() -> None:
    """A kernel that is wrong in layers with a short window alone moved rows by 0.033 of their spread."""
    rng = np.random.default_rng(1)

    def rows_of(tokens: TokenIds, start: int, width: int) -> Logits:
        rows = TABLE[tokens]
        return (rows + 0.033 * TABLE.std() * rng.normal(0, 1, rows.shape) * (width > 16)).astype(np.float32)[
            start:
        ]

    assert check(rows_of).max_width == 256
    assert find_sound_passes(rows_of, VOCAB, 1000, "gpu", tolerance=0.005).max_width == 16
