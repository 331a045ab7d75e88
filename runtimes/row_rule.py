"""A rule of passes on ONNX Runtime's CPU provider, so that a row has the same bits in every cut of a text.

Two kernels decide (MLAS in ONNX Runtime, measured in docs/log/exactness.md):

- A product with weights, and one of attention's, gives a single row to another kernel. So passes are of even
  width.
- Attention multiplies queries and keys in sums of up to 128 channels, or of more where it sees few positions: 256
  up to 64 positions, 512 up to 32, 1,024 up to 16. So heads of more than 128 channels have positions that no pass
  crosses. Flash attention counts these positions anew in each tile of the cache, whose length follows from the
  size of the L2 cache. Without flash attention they are counted once, from the start of the text.
"""

import os
import platform
import sys
from contextlib import suppress
from typing import NamedTuple

_LEVEL2_CACHE_SIZE = 191  # _SC_LEVEL2_CACHE_SIZE in glibc's bits/confname.h, which os.sysconf_names lacks
# Up to so many positions a sum has the second number of channels; with more positions half of them.
_SUMS = ((16, 1024), (32, 512), (64, 256))


class RowRule(NamedTuple):
    """The borders that keep rows equal to the bit, with passes of even width."""

    has_flash_attention: bool
    borders: tuple[int, ...]  # positions that no pass crosses, even and rising


class Cut(NamedTuple):
    """A pass over positions start to stop, with num_padded tokens after that mean nothing."""

    start: int
    stop: int
    num_padded: int


NO_RULE = RowRule(has_flash_attention=True, borders=())


def row_rule(head_dim: int, l2_bytes: int | None) -> RowRule:
    """The rule for heads of a size.

    Flash attention stays where it needs no borders. It shares out rows in blocks of min(tile, 2 · head_dim), so
    that an even number of rows leaves a single one behind where that block is odd. Where the size of the L2 cache
    is unknown, so is the tile.
    """
    borders = tuple(positions for positions, channels in _SUMS if 2 * head_dim > channels)
    tile = (l2_bytes or 0) // (32 * head_dim)
    is_even = tile > 0 and min(tile, 2 * head_dim) % 2 == 0
    return RowRule(has_flash_attention=is_even and not borders, borders=borders)


def read_l2_bytes() -> int | None:
    """The size of a core's L2 cache as ONNX Runtime reads it; None where the system's C library does not say."""
    if not sys.platform.startswith("linux") or platform.libc_ver()[0] != "glibc":
        return None
    with suppress(ValueError, OSError):
        return max(0, os.sysconf(_LEVEL2_CACHE_SIZE)) or None
    return None


def next_pass(start: int, stop: int, borders: tuple[int, ...], context_length: int) -> Cut:
    """The first pass of even width over positions from start, up to stop at most.

    An odd one gets one more token, whose entry in the cache the next pass overwrites. Where a border or the end of
    the context leaves no room for it, the position before is run again, which gives it the entry that it has.
    """
    begin = max((border for border in borders if border <= start), default=0)
    end = min([context_length, *(border for border in borders if border > start)])
    stop = min(stop, end)
    if (stop - start) % 2 == 0:
        return Cut(start, stop, 0)
    if stop < end:
        return Cut(start, stop, 1)
    if start > begin:
        return Cut(start - 1, stop, 0)
    # The last position alone, or all but it: a later pass runs it with the one before.
    return Cut(start, max(start + 1, stop - 1), 0)
