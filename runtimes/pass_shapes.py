"""How a text is cut into passes: the widths that pay on a device, and the rule of the CPU.

On a GPU the first pass of each width takes 50 ms, and rows cost little or nothing (docs/log/devices.md). So passes
have few widths, each of which runs once as the model is opened. Rows are then made by the same kernels whether a
pass verifies a draft or not.

In deterministic mode there are two: one for passes that give rows, and a wider one for those that only read a
prompt. Their keys and values may differ in the last bits. So which token is read in which of them follows from how
long the prompt is, and from nothing else: neither from drafts nor from what the cache held before.

On the CPU a rule keeps rows equal to the bit in that mode. Two kernels of ONNX Runtime decide on it (MLAS,
measured in docs/log/exactness.md):

- A product with weights, and one of attention's, gives a single row to another kernel. So passes are of even
  width.
- Attention multiplies queries and keys in sums of up to 128 channels, or of more where it sees few positions: 256
  up to 64 positions, 512 up to 32, 1,024 up to 16. So heads of more than 128 channels have positions that no pass
  crosses. Flash attention counts these positions anew in each tile of the cache, whose length follows from the
  size of the L2 cache. Without flash attention they are counted once, from the start of the text.
"""

from collections.abc import Callable, Collection, Mapping
from math import ceil
from typing import NamedTuple

from edgespec.decoding.decoder import Can

# Widths of passes that give rows and of passes that read a text, from which those that pay are chosen.
_ROWS, _READS = (1, 2, 4, 8, 16, 32, 64), (16, 64, 256)
_MOST_FIRST = 8  # plain decoding computes as many rows
_FREE = 1.06  # a wider pass that takes no longer than this many times the narrower one replaces it
_SLOW_S = 0.25  # no GPU: padding costs what it computes
_SAME = (4, 64)  # where all passes that give rows have one width: at least and at most
_PROMPTS = (50, 200, 500, 1000, 1500)  # tokens, for which a width that reads prompts is chosen
RULE_VERSION = 1  # raised when passes of deterministic mode or their proof change
# Up to so many positions a sum has the second number of channels; with more positions half of them.
_SUMS = ((16, 1024), (32, 512), (64, 256))

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
    is_same: There is one of each, and a token of a prompt is read in one width always, by the count that says so.
    """

    rows: tuple[int, ...]
    reads: tuple[int, ...]
    is_same: bool = False

    @property
    def read_width(self) -> int:
        """The width of its own that prompts are read in; 0 where keys and values do not depend on the width."""
        return self.reads[0] if self.is_same and self.reads != self.rows else 0

    def can(self) -> Can:
        """The abilities of a decoder whose passes have these widths."""
        return Can(widths=self.rows, read_width=self.read_width)

    def num_read(self, num_prompt: int, num_unwanted: int, context_length: int) -> int:
        """How many of the first tokens of a text are read in passes of read_width.

        num_unwanted: How many tokens there are before the first one whose row is wanted.
        """
        # At the end of the context a pass runs tokens before it again, which must be of its own width.
        return max(0, min(num_prompt - 1, num_unwanted, context_length - self.rows[0])) if self.read_width else 0

    def next_pass(
        self,
        start: int,
        num_tokens: int,
        num_last: int,
        context_length: int,
        most: int | None = None,
        num_read: int = 0,
    ) -> PaddedPass:
        """The first pass over positions from start on, of a text whose last num_last rows are wanted.

        Args:
            most: The most tokens that a pass may have.
            num_read: As the method has it; counts where there is a read_width.
        """
        num_new, narrow = num_tokens - start, self.rows[0]
        if self.read_width and start < num_read:
            return _pad(start, min(start + self.read_width, num_read), self.read_width, 1, context_length)
        num_unwanted = num_new - max(num_last, narrow)
        if num_new <= self.rows[-1] or num_unwanted <= 0 or self.read_width:
            width = next((each for each in self.rows if each >= num_new), self.rows[-1])
            return _pad(start, min(num_tokens, start + width), width, width, context_length)
        allowed = [each for each in self.reads if most is None or each <= most] or self.reads[:1]
        width = next((each for each in allowed if each >= num_unwanted), allowed[-1])
        return _pad(start, start + min(num_unwanted, width), width, 1, context_length)

    def all(self) -> list[tuple[int, int]]:
        """Width and number of rows of each pass that there is."""
        return [*((width, width) for width in self.rows), *((width, 1) for width in self.reads)]


def _pad(start: int, stop: int, width: int, num_given: int, context_length: int) -> PaddedPass:
    """A pass of a width; at the end of the context tokens before it run again rather than padding after it."""
    start = max(0, min(start, context_length - width))
    return PaddedPass(start, stop, max(0, min(width, context_length) - (stop - start)), num_given)


def choose_shapes(seconds_of: SecondsOf, widest: int) -> PassShapes | None:
    """The widths that pay on a device; None where padding would cost as much as it computes.

    widest: The widest pass that the device computes rightly.
    """
    if seconds_of(1, 1) > _SLOW_S:
        return None
    rows_s = _rows_s(seconds_of, widest)
    reads_s = {width: seconds_of(width, 1) for width in _READS if width <= widest}
    rows = _steps(rows_s, _MOST_FIRST)
    return PassShapes(rows, _steps(reads_s, max(_READS)) or rows)


def choose_same_shapes(
    seconds_of: SecondsOf, widest: int, reads_alike: Callable[[PassShapes], bool] = lambda shapes: True
) -> PassShapes | None:
    """The widths for deterministic mode: one for rows, and the one that reads prompts fastest.

    reads_alike: Tells if what these read does not depend on where passes begin. Where no width is so, prompts are
        read in the width of rows.
    """
    if seconds_of(1, 1) > _SLOW_S:
        return None
    rows_s, (least, most) = _rows_s(seconds_of, widest), _SAME
    usable = [width for width in rows_s if least <= width <= most]
    if not usable:
        return None
    width = max((each for each in usable if rows_s[each] <= _FREE * rows_s[1]), default=usable[0])
    token_s = {
        each: read_token_s(seconds_of(each, 1), each) for each in (width, *_READS) if width <= each <= widest
    }
    for read in sorted(token_s, key=token_s.__getitem__):
        shapes = PassShapes((width,), (read,), is_same=True)
        if read == width or reads_alike(shapes):
            return shapes
    raise AssertionError("the width of rows is among those that read")


def read_token_s(pass_s: float, width: int) -> float:
    """Seconds that a token of a prompt takes in passes of a width, at the mean of prompts of some lengths."""
    return sum(ceil(length / width) * pass_s / length for length in _PROMPTS) / len(_PROMPTS)


def same_cost(seconds_of: SecondsOf, same: PassShapes | None, fast: PassShapes | None) -> float:
    """How many times as long a pass over one token takes in deterministic mode as without it."""
    if not same or not fast:
        return 1.0
    return seconds_of(same.rows[0], same.rows[0]) / seconds_of(fast.rows[0], fast.rows[0])


def _rows_s(seconds_of: SecondsOf, widest: int) -> dict[int, float]:
    return {width: seconds_of(width, width) for width in _ROWS if width <= widest}


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


class RowRule(NamedTuple):
    """The borders that keep rows equal to the bit, with passes of even width."""

    has_flash_attention: bool
    borders: tuple[int, ...]  # positions that no pass crosses, even and rising

    def next_pass(self, start: int, stop: int, context_length: int) -> PaddedPass:
        """The first pass of even width over positions from start, up to stop at most.

        An odd one gets one more token, whose entry in the cache the next pass overwrites. Where a border or the
        end of the context leaves no room for it, the position before is run again, which gives it the entry that
        it has.
        """
        begin = max((border for border in self.borders if border <= start), default=0)
        end = min([context_length, *(border for border in self.borders if border > start)])
        stop = min(stop, end)
        if (stop - start) % 2 == 0:
            return PaddedPass(start, stop)
        if stop < end:
            return PaddedPass(start, stop, 1)
        if start > begin:
            return PaddedPass(start - 1, stop)
        # The last position alone, or all but it: a later pass runs it with the one before.
        return PaddedPass(start, max(start + 1, stop - 1))


NO_RULE = RowRule(has_flash_attention=True, borders=())


def row_rule(head_dims: Collection[int], l2_bytes: int | None) -> RowRule:
    """The rule for a model with heads of these sizes.

    Flash attention stays where it needs no borders. It shares out rows in blocks of min(tile, 2 · head_dim), so
    that an even number of rows leaves a single one behind where that block is odd. Where the size of the L2 cache
    is unknown, so is the tile.
    """
    borders = tuple(positions for positions, channels in _SUMS if 2 * max(head_dims) > channels)
    tiles = [((l2_bytes or 0) // (32 * size), 2 * size) for size in head_dims]
    is_even = all(tile > 0 and min(tile, rows) % 2 == 0 for tile, rows in tiles)
    return RowRule(has_flash_attention=is_even and not borders, borders=borders)
