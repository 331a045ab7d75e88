"""How wide a device's passes may be before it chooses wrong kernels, and whether it picks the right tokens."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Timer
from time import perf_counter
from typing import NamedTuple

import numpy as np

from edgespec.decoders import Argmax
from edgespec.errors import DeviceUnavailable
from edgespec.types import Logits, TokenIds

WIDTHS = (256, 64, 16)
_NARROW = 8
_LEAST_TOKENS = 2 * WIDTHS[-1]  # so that a pass has others before it
_BUDGET_S = (
    30.0  # of the passes that are compared: a GPU of an old laptop takes less for all, a GPU in software hours
)
# Share of the spread of the rows. Half floats move a row by some thousandths of it, a wrong kernel by most.
_TOLERANCE = 0.05
_SLOW = "checking that '%s' computes this model correctly, which is done once"
_QUIET_S = 2.0  # a check that takes longer is reported
_log = logging.getLogger(__name__)

RowsOf = Callable[[TokenIds, int, int], Logits]
"""Tokens, how many of them the call before has run, and how many a pass may run → the rows after the others."""


class SoundPasses(NamedTuple):
    """The widest pass that gives the right rows, and these rows, [num_compared, vocab_size].

    is_cut_short: No wider passes were tried, for the device is too slow for that; else they are wrong, if not all
    of WIDTHS are right.
    """

    max_width: int
    rows: Logits
    is_cut_short: bool


def find_sound_passes(
    rows_of: RowsOf, vocab_size: int, context_length: int, device: str, clock: Callable[[], float] = perf_counter
) -> SoundPasses:
    """The widest of WIDTHS whose passes give the rows of passes of eight tokens.

    All of WIDTHS are tried, over as many tokens as the widest has, unless this takes longer than a budget: then
    fewer tokens are compared, and passes that are wider than what was compared are not trusted.

    Raises DeviceUnavailable: No width gives the right rows.
    """
    tokens = probe_tokens(vocab_size, context_length)
    first = rows_of(tokens[:_NARROW], 0, _NARROW)  # takes longer: it compiles
    started_s = clock()
    begun = tokens[:_LEAST_TOKENS]
    parts = [first, rows_of(begun, len(first), _NARROW)] if len(begun) > len(first) else [first]
    token_s = (clock() - started_s) / max(1, len(begun) - len(first))
    num_tokens = _num_affordable(token_s, len(tokens))
    widths: tuple[int, ...] = WIDTHS
    if num_tokens < len(tokens):
        widths = tuple(width for width in WIDTHS if width <= num_tokens)
        _log.info(
            "'%s' takes %.2f s for each token, so that only passes of up to %d tokens are checked, on %d tokens "
            "in about %.0f s; longer passes are split",
            device, token_s, widths[0], num_tokens, _num_passed(num_tokens) * token_s,
        )  # fmt: skip
    if num_tokens > len(begun):
        parts.append(rows_of(tokens[:num_tokens], len(begun), _NARROW))
    expected = np.concatenate(parts)
    for width in widths:
        if are_close(rows_of(tokens[:num_tokens], 0, width), expected):
            return SoundPasses(width, expected, widths[0] < WIDTHS[0] and width == widths[0])
    raise DeviceUnavailable(
        f"'{device}' gives other logits in passes of {WIDTHS[-1]} tokens than in passes of {_NARROW}: it computes "
        "this model wrongly; use --device cpu",
        device=device,
    )


def _num_affordable(token_s: float, num_tokens: int) -> int:
    """How many tokens can be compared within the budget, if each width has to be tried."""
    for num in (num_tokens, *(width for width in WIDTHS[1:] if _LEAST_TOKENS < width < num_tokens)):
        if _num_passed(num) * token_s <= _BUDGET_S:
            return num
    return min(_LEAST_TOKENS, num_tokens)


def _num_passed(num_tokens: int) -> int:
    """Tokens that are run at most to compare num_tokens, after the first ones."""
    num_widths = sum(width <= num_tokens for width in WIDTHS)
    return max(0, num_tokens - _LEAST_TOKENS) + num_tokens * max(1, num_widths)


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
