"""How far the matrices of an export are from its source's, row by row, and how far rounding can take them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from edgespec.export.blocks import Floats
from edgespec.export.written import WrittenMatrix

# Of half floats, which round to 1/2048 and below 6e-5 more coarsely.
_HALF_ERROR = 2e-3
# Rounding errors of all rows together are about a third of the bound for one row, which no row reaches.
_MEAN_SHARE = 0.6
# How much longer a matrix may become where it is rounded; fitting shortens it by its squared error.
_GAIN = {None: 1e-3, 8: 5e-3, 4: 2.5e-2}


@dataclass(frozen=True, slots=True)
class WeightError:
    """A matrix whose written values lie farther from the source's than its form explains."""

    role: str
    found: float
    allowed: float


@dataclass
class WeightErrors:
    """Errors of written rows relative to the source's; called with each part of each matrix."""

    written: Mapping[str, WrittenMatrix]
    largest: float = 0.0  # of all rows of all matrices
    wrong: list[WeightError] = field(default_factory=list)

    def __call__(self, role: str, parts: Sequence[Floats]) -> None:
        source, written = parts[:2]
        difference = written - source
        energy, error = _products(source, source), _products(difference, difference)
        excess = _products(difference, source).sum()
        is_used = energy > 0
        worst = math.sqrt(np.divide(error, energy, out=np.zeros_like(error), where=is_used).max(initial=0.0))
        if np.isnan(error).any() or (error[~is_used] > 0).any():
            worst = math.inf
        self.largest = max(self.largest, worst)
        matrix = self.written[role]
        if not worst <= (allowed := row_bound(matrix)):
            self.wrong.append(WeightError(role, worst, allowed))
        mean = math.sqrt(error.sum() / energy.sum()) if energy.any() else 0.0
        if not mean <= (allowed := _MEAN_SHARE * row_bound(matrix)):
            self.wrong.append(WeightError(role, mean, allowed))
        gain = abs(float(excess / energy.sum())) if energy.any() else 0.0
        if not gain <= (allowed := _GAIN[matrix.bits]):
            self.wrong.append(WeightError(role, gain, allowed))


def _products(some: Floats, others: Floats) -> npt.NDArray[np.float64]:
    """The inner product of each two rows, whose terms are added in single precision."""
    products: npt.NDArray[np.float64] = np.einsum("ij,ij->i", some, others).astype(np.float64)
    return products


def row_bound(matrix: WrittenMatrix) -> float:
    """The largest relative error of a row that rounding to the matrix's form can make.

    A block of n weights whose largest is m is rounded by half a step, m / 2**bits, at most. The sum of its squared
    errors is n · (m / 2**bits)² then, and the sum of its squares at least m². Blocks with a minimum have no better
    bound, though they are closer.
    """
    if matrix.bits is None:
        return _HALF_ERROR
    return 1.05 * math.sqrt(matrix.block_size) / (1 << matrix.bits)
