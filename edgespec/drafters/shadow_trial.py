"""Whether one way of drafting is better than another, from rows at which both were asked."""

from dataclasses import dataclass
from math import sqrt
from typing import Literal

import numpy as np
import numpy.typing as npt

# Standard deviations of a coin's that a lead must have: one look in 100 at two equal ways finds it.
_LEAD = 2.3
_FEWEST = 20  # rows at which just one of both is right
# After so many rows a trial goes on only with a lead of half a deviation, and not beyond the second number.
_PROMISING, _HALF_WAY_ROWS, _LONGEST_ROWS = 0.5, 512, 4096

Verdict = Literal["better", "worse", "open"]


@dataclass(frozen=True)
class ShadowTrial:
    """Counts of rows at which just the new way, or just the old one, would have drafted the target's token.

    At other rows they are equal, so that of two equal ways each is right in half of these (McNemar's test).
    """

    num_rows: int = 0
    num_new: int = 0
    num_old: int = 0

    def count(self, is_new_right: npt.NDArray[np.bool_], is_old_right: npt.NDArray[np.bool_]) -> "ShadowTrial":
        """The trial after more rows."""
        return ShadowTrial(
            self.num_rows + len(is_new_right),
            self.num_new + int((is_new_right & ~is_old_right).sum()),
            self.num_old + int((is_old_right & ~is_new_right).sum()),
        )

    @property
    def lead(self) -> float:
        """By how much the new way leads, in standard deviations of what chance alone makes of equal ways."""
        return (self.num_new - self.num_old) / sqrt(max(1, self.num_new + self.num_old))

    @property
    def verdict(self) -> Verdict:
        """Whether the new way is better or worse; also worse if it has not proved better in enough rows."""
        if self.num_new + self.num_old >= _FEWEST and abs(self.lead) >= _LEAD:
            return "better" if self.lead > 0 else "worse"
        is_hopeless = self.num_rows >= _HALF_WAY_ROWS and self.lead < _PROMISING
        return "worse" if is_hopeless or self.num_rows >= _LONGEST_ROWS else "open"
