"""How wide a device's passes may be before it chooses wrong kernels, and whether it picks the right tokens."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Timer

import numpy as np

from edgespec.errors import DeviceUnavailable
from edgespec.types import Argmax, Logits, TokenIds

WIDTHS = (256, 64, 16)
_NARROW = 8
# Share of the spread of the rows. Half floats move a row by some thousandths of it, a wrong kernel by most.
_TOLERANCE = 0.05
_SLOW = "checking that '%s' computes this model correctly; on a slow device this takes minutes"
_QUIET_S = 2.0  # a check that takes longer is reported
_log = logging.getLogger(__name__)

RowsOf = Callable[[TokenIds, int], Logits]
"""Tokens, and how many of them a pass may run → the rows behind all of them, [num_tokens, vocab_size]."""


def max_sound_width(rows_of: RowsOf, vocab_size: int, context_length: int, device: str) -> int:
    """The widest of WIDTHS whose passes give the rows of passes of eight tokens.

    Raises DeviceUnavailable: No width gives the right rows.
    """
    tokens = probe_tokens(vocab_size, context_length)
    expected = rows_of(tokens, _NARROW)
    for width in WIDTHS:
        if are_close(rows_of(tokens, width), expected):
            return width
    raise DeviceUnavailable(
        f"'{device}' gives other logits in passes of {WIDTHS[-1]} tokens than in passes of {_NARROW}: it computes "
        "this model wrongly; use --device cpu",
        device=device,
    )


@contextmanager
def report_slow_check(device: str) -> Iterator[None]:
    """Log what the block does where it takes longer than some seconds, as on a GPU in software."""
    timer = Timer(_QUIET_S, _log.info, (_SLOW, device))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def probe_tokens(vocab_size: int, context_length: int) -> TokenIds:
    """Distinct tokens, far apart, so that a row that sees too few of them is wrong by much."""
    return (np.arange(min(WIDTHS[0], context_length)) * 7919 % vocab_size).astype(np.int32)


def is_argmax_sound(rows: Logits, found: Argmax) -> bool:
    """Whether tokens that a device chose are the likeliest of rows, apart from the rounding between two passes."""
    missed = rows.max(1) - rows[np.arange(len(rows)), found.ids]
    return bool(found.is_sound.all() and missed.max() <= _TOLERANCE * rows.std())


def are_close(rows: Logits, expected: Logits) -> bool:
    """Whether rows are those expected, apart from the rounding between two passes."""
    return _distance(rows, expected) < _TOLERANCE


def _distance(rows: Logits, expected: Logits) -> float:
    """The largest root mean square difference of a row, in standard deviations of all; inf where there is none."""
    difference = np.sqrt(np.square(rows.astype(np.float64) - expected).mean(1)).max() / expected.std()
    return float(difference) if np.isfinite(difference) else np.inf
