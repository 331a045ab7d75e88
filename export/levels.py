"""Floats as integer levels and back: one scale and zero point for all, or a scale for each row.

Knows nothing of graphs and nothing of files.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from edgespec.export.blocks import Floats
from edgespec.types import Range

_HIGHEST = 65535
_LEAST_SPAN = 1e-4  # for a value that never changes


@dataclass(frozen=True, slots=True)
class Encoding:
    """Unsigned 16-bit levels: value = scale · (level − zero_point), where zero is exact."""

    scale: float
    zero_point: int

    @classmethod
    def of(cls, values: Range) -> "Encoding":
        """The finest encoding that holds all of a range, and zero."""
        low, high = min(values.low, 0.0), max(values.high, 0.0)
        scale = np.float32(max(high - low, _LEAST_SPAN) / _HIGHEST)
        return cls(float(scale), int(np.rint(-low / scale)))

    @property
    def range(self) -> Range:
        return Range(-self.zero_point * self.scale, (_HIGHEST - self.zero_point) * self.scale)

    def levels(self, values: npt.NDArray[Any]) -> npt.NDArray[np.uint16]:
        """The nearest level of each value; values outside of the range are clipped."""
        found = np.rint(values / np.float32(self.scale)) + self.zero_point
        levels: npt.NDArray[np.uint16] = np.clip(found, 0, _HIGHEST).astype(np.uint16)
        return levels


def range_of(parts: Iterable[npt.NDArray[Any]]) -> Range:
    """The smallest and the largest value of all parts."""
    ends = [(float(part.min()), float(part.max())) for part in parts]
    return Range(min(low for low, _ in ends), max(high for _, high in ends))


def row_levels(weights: Floats) -> tuple[npt.NDArray[np.int8], Floats]:
    """Signed 8-bit levels, [rows, columns], and a scale for each row, [rows].

    The largest magnitude of a row takes level 127 or −127.
    """
    scales = (np.abs(weights).max(axis=1) / 127).astype(np.float32)
    scales = np.where(scales > 0, scales, np.float32(1))
    return np.rint(weights / scales[:, None]).astype(np.int8), scales
