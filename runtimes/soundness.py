"""How wide a pass of a device may be before its rows are no longer those of narrow ones; whether it chooses well.

Providers choose other kernels for long passes, and some adapters compute these wrongly and say nothing.
"""

from collections.abc import Callable

import numpy as np

from edgespec.errors import DeviceUnavailable
from edgespec.types import Likeliest, Logits, TokenIds

WIDTHS = (256, 64, 16)
_NARROW = 8
# Of the spread of the rows. Rounding to half floats moves a row by some thousandths of it, a wrong kernel by most.
_TOLERANCE = 0.05

RowsOf = Callable[[TokenIds, int], Logits]
"""Tokens, and how many of them a pass may have → the rows behind all of them, [num_tokens, vocab_size]."""


def widest_sound(rows_of: RowsOf, vocab_size: int, context_length: int, device: str) -> int:
    """The widest of WIDTHS whose passes give the rows of passes of eight tokens.

    Raises:
        DeviceUnavailable: None of them does.
    """
    tokens = probe(vocab_size, context_length)
    expected = rows_of(tokens, _NARROW)
    for width in WIDTHS:
        if _far_apart(rows_of(tokens, width), expected) < _TOLERANCE:
            return width
    raise DeviceUnavailable(
        f"'{device}' gives other rows for passes of {WIDTHS[-1]} tokens than for passes of {_NARROW}: it computes "
        "this model wrongly; use --device cpu",
        device=device,
    )


def probe(vocab_size: int, context_length: int) -> TokenIds:
    """Tokens that are far apart, and no two the same, so that a row that sees too little shows it."""
    return (np.arange(min(WIDTHS[0], context_length)) * 7919 % vocab_size).astype(np.int32)


def chooses_soundly(rows: Logits, found: Likeliest) -> bool:
    """Whether tokens that a device chose are the likeliest of rows, but for the rounding between two passes."""
    short = rows.max(1) - rows[np.arange(len(rows)), found.ids]
    return bool(found.is_sound.all() and short.max() <= _TOLERANCE * rows.std())


def _far_apart(rows: Logits, expected: Logits) -> float:
    """The largest root mean square difference of a row, in standard deviations of all; inf where there is none."""
    difference = np.sqrt(np.square(rows.astype(np.float64) - expected).mean(1)).max() / expected.std()
    return float(difference) if np.isfinite(difference) else np.inf
