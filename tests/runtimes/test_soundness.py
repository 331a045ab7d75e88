"""Passes that a device computes wrongly beyond a width."""

import numpy as np
import pytest

from edgespec.errors import DeviceUnavailable
from edgespec.runtimes.soundness import WIDTHS, RowsOf, max_sound_width
from edgespec.types import Logits, TokenIds

VOCAB = 50
TABLE = np.random.default_rng(0).normal(0, 2, (VOCAB, VOCAB)).astype(np.float32)


def device(sound_to: int, *, rounding: float = 0.0, wrong: float = 1.0) -> RowsOf:
    """Rows of a table; in passes wider than sound_to, all but the first four are of another token."""

    def rows_of(tokens: TokenIds, width: int) -> Logits:
        rows = TABLE[tokens] + np.float32(rounding * width)
        if min(width, len(tokens)) > sound_to:
            rows[4:] = TABLE[tokens[4:] - 1] * np.float32(wrong)
        return rows

    return rows_of


@pytest.mark.parametrize(("sound_to", "widest"), [(1000, 256), (255, 64), (64, 64), (63, 16), (31, 16)])
def test_widest_pass_is_the_widest_that_gives_the_rows_of_narrow_ones(sound_to: int, widest: int) -> None:
    assert max_sound_width(device(sound_to), VOCAB, 1000, "gpu") == widest


def test_rounding_is_no_fault_and_what_is_no_number_is() -> None:
    assert max_sound_width(device(1000, rounding=1e-5), VOCAB, 1000, "gpu") == WIDTHS[0]
    assert max_sound_width(device(63, wrong=np.nan), VOCAB, 1000, "gpu") == 16


def test_device_that_computes_even_short_passes_wrongly_is_refused() -> None:
    with pytest.raises(DeviceUnavailable, match="'gpu' gives other logits in passes of 16 tokens"):
        max_sound_width(device(8), VOCAB, 1000, "gpu")


def test_short_context_is_tried_as_far_as_it_goes() -> None:
    asked: list[int] = []

    def rows_of(tokens: TokenIds, width: int) -> Logits:
        asked.append(len(tokens))
        return TABLE[tokens]

    assert max_sound_width(rows_of, VOCAB, 20, "gpu") == WIDTHS[0]
    assert set(asked) == {20}
