"""A table for a terminal."""

from collections.abc import Sequence

from edgespec.system.printable import printable


def table(width: int | None, below: Sequence[str], head: Sequence[str], *rows: Sequence[str]) -> list[str]:
    """Lines of a table without its last columns that do not fit, a line on these, and lines below its rows."""
    printed = [[printable(cell, keep="") for cell in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*printed, strict=True)]
    num = len(widths)
    while width and num > 1 and sum(widths[:num]) + 2 * (num - 1) > width:
        num -= 1
    lines = []
    for row, note in zip(printed, ["", *(below or [""] * len(rows))], strict=True):
        lines.append("  ".join(cell.ljust(size) for cell, size in zip(row[:num], widths, strict=False)).rstrip())
        lines += [note] if note else []
    left_out = f"(a wider window, or --json, also shows {', '.join(head[num:]).lower()})"
    return lines if num == len(widths) else [*lines, left_out]
