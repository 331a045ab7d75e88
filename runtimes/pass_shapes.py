"""The widths to which passes of a device are padded, and their choice by what passes of each width take.

On a GPU the first pass of each width takes 50 ms, and rows cost little or nothing (docs/log/devices.md). So passes
have few widths, each of which runs once as the model is opened. Rows are then made by the same kernels whether a
pass verifies a draft or not.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

# Widths of passes that give rows and of passes that read a text, from which those that pay are chosen.
_ROWS, _READS = (1, 2, 4, 8, 16, 32, 64), (16, 64, 256)
_MOST_FIRST = 8  # plain decoding computes as many rows
_FREE = 1.06  # a wider pass that takes no longer than this many times the narrower one replaces it
_SLOW_S = 0.25  # no GPU: padding costs what it computes
_SAME = (4, 64)  # where all passes have one width: at least and at most

SecondsOf = Callable[[int, int], float]
"""The width of a pass and how many rows of logits it gives → its seconds, with its kernels loaded."""


class PaddedPass(NamedTuple):
    """A pass over positions start to stop and num_padded tokens that mean nothing.

    num_given: How many rows of logits the graph gives at least, those of the padding at the end among them.
    """

    start: int
    stop: int
    num_padded: int = 0
    num_given: int = 0


class PassShapes(NamedTuple):
    """Widths of passes, ascending.

    rows: Of passes that give the rows of all their tokens.
    reads: Of passes that only read a text, which give one row that nobody wants.
    """

    rows: tuple[int, ...]
    reads: tuple[int, ...]

    def next_pass(
        self, start: int, num_tokens: int, num_last: int, context_length: int, most: int | None = None
    ) -> PaddedPass:
        """The first pass over positions from start on, of a text whose last num_last rows are wanted.

        Args:
            most: The most tokens that a pass may have.
        """
        num_new, narrow = num_tokens - start, self.rows[0]
        width = next((each for each in self.rows if each >= num_new), None)
        if width:
            return _pad(start, num_tokens, width, width, context_length)
        num_read = num_new - max(num_last, narrow)
        if num_read <= 0:  # more rows are wanted than one pass gives
            return _pad(start, start + self.rows[-1], self.rows[-1], self.rows[-1], context_length)
        allowed = [each for each in self.reads if most is None or each <= most] or self.reads[:1]
        width = next((each for each in allowed if each >= num_read), allowed[-1])
        return _pad(start, start + min(num_read, width), width, 1, context_length)

    def all(self) -> list[tuple[int, int]]:
        """Width and number of rows of each pass that there is."""
        return [*((width, width) for width in self.rows), *((width, 1) for width in self.reads)]


def _pad(start: int, stop: int, width: int, num_given: int, context_length: int) -> PaddedPass:
    """A pass of a width; at the end of the context tokens before it run again rather than padding after it."""
    start = max(0, min(start, context_length - width))
    return PaddedPass(start, stop, max(0, min(width, context_length) - (stop - start)), num_given)


def choose_shapes(seconds_of: SecondsOf, widest: int, *, is_same: bool = False) -> PassShapes | None:
    """The widths that pay on a device; None where padding would cost as much as it computes.

    Args:
        widest: The widest pass that the device computes rightly.
        is_same: Let all passes have one width, so that each row is made by the same kernels.
    """
    if seconds_of(1, 1) > _SLOW_S:
        return None
    rows_s = {width: seconds_of(width, width) for width in _ROWS if width <= widest}
    if is_same:
        least, most = _SAME
        usable = [width for width in rows_s if least <= width <= most]
        if not usable:
            return None
        width = max((each for each in usable if rows_s[each] <= _FREE * rows_s[1]), default=usable[0])
        return PassShapes((width,), (width,))
    reads_s = {width: seconds_of(width, 1) for width in _READS if width <= widest}
    rows = _steps(rows_s, _MOST_FIRST)
    return PassShapes(rows, _steps(reads_s, max(_READS)) or rows)


def _steps(taken_s: Mapping[int, float], most_first: int) -> tuple[int, ...]:
    """Widths, each the widest that takes no longer than the narrowest that it stands for."""
    steps: list[int] = []
    for width in sorted(taken_s):
        if steps and width <= steps[-1]:
            continue
        most = max(taken_s) if steps else most_first
        steps.append(
            max(each for each in taken_s if width <= each <= most and taken_s[each] <= _FREE * taken_s[width])
        )
    return tuple(steps)
