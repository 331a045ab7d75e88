"""A difference between two programs, with the smallest input that shows it."""

from collections.abc import Callable
from typing import NamedTuple

_MAX_SHOWN = 220


class Difference(NamedTuple):
    """where: The model, the form and the programs that differ."""

    where: str
    text: str
    ours: str
    theirs: str

    def __str__(self) -> str:
        lines = (f"    input   {self.text!r}", f"    ours    {self.ours}", f"    theirs  {self.theirs}")
        return "\n".join([self.where, *(line[:_MAX_SHOWN] for line in lines)])


class Row(NamedTuple):
    """A line of the table. explained: Differences that are no fault, with their reason."""

    where: str
    num_inputs: int
    differences: tuple[Difference, ...] = ()
    explained: dict[str, int] = {}  # noqa: RUF012  read only
    skipped: str = ""

    def __str__(self) -> str:
        if self.skipped:
            return f"{self.where:<72} skipped: {self.skipped}"
        reasons = "; ".join(f"{count} {reason}" for reason, count in self.explained.items())
        return f"{self.where:<72} {self.num_inputs:>5} {len(self.differences):>5}  {reasons}".rstrip()


def shrink(text: str, differs: Callable[[str], bool]) -> str:
    """A text that still differs, of which no part can be left out."""
    size = len(text) // 2
    while size:
        for start in range(0, len(text), size):
            shorter = text[:start] + text[start + size :]
            if differs(shorter):
                text = shorter
                break
        else:
            size //= 2
    return text
