"""How wide the columns of a table are: words stay whole where that fits."""

from collections.abc import Sequence

from rich.cells import cell_len


def column_widths(rows: Sequence[Sequence[str]], width: int) -> list[int]:
    """Columns of text, for each column of a table; together at most width, but at least 1 each.

    rows have a text for each column. Cells that are too long for a line are broken between words; where the
    longest words do not fit beside one another, only the longest of them are broken.
    """
    columns = list(zip(*rows, strict=True))
    whole = [max(1, *(cell_len(line) for cell in column for line in cell.split("\n"))) for column in columns]
    words = [max(1, *(cell_len(word) for cell in column for word in cell.split() or [""])) for column in columns]
    if sum(whole) <= width:
        return whole
    if sum(words) <= width:
        return _share(words, whole, width)
    return _cap(words, width)


def _share(least: Sequence[int], most: Sequence[int], width: int) -> list[int]:
    """Give each its least, and of what is left a part in proportion to what it lacks."""
    left, lacking = width - sum(least), [high - low for low, high in zip(least, most, strict=True)]
    given = [left * lack // sum(lacking) for lack in lacking]
    return [low + more for low, more in zip(least, given, strict=True)]


def _cap(wanted: Sequence[int], width: int) -> list[int]:
    """Cut the largest to one size, so that the sum fits."""
    cap = max(1, max(wanted))
    while cap > 1 and sum(min(each, cap) for each in wanted) > width:
        cap -= 1
    return [min(each, cap) for each in wanted]
