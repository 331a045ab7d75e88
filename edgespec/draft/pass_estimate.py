"""The times of passes of each width, as one normal distribution of log seconds that every pass corrects.

The widths share the machine's speed, which every pass shows; what a width takes over a pass of one token is shown
by passes of both, or of neighbouring widths. Passes of one width alone fix the sum of both, and the spread of the
ratio says that it is not known: neither is blamed for what the other may have done. (A Kalman filter over a
Gaussian process of the width.)
"""

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from math import exp, log, sqrt
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from edgespec.config.drafter_names import MAX_DRAFT_TOKENS

_Floats: TypeAlias = npt.NDArray[np.float64]

NUM_WIDTHS = MAX_DRAFT_TOKENS + 1
# Standard deviations, all of log seconds: of a ratio that was measured once, and of one that was not.
MEASURED, UNMEASURED = 0.15, 0.3
# Of a ratio since the last session, and of the machine's speed since the last answer, or before any pass.
_SINCE_SESSION, _SINCE_ANSWER, _UNKNOWN_SPEED = 0.03, 0.15, 4.0
# From one pass to the next: the speed, and the ratios, which are as unsure again after 2,500 passes of others.
_SPEED_DRIFT, _RATIO_DRIFT = 0.015, 0.003
# What widths have in common of the error of their ratios; the rest is alike within a doubling of the width.
_SHARED = 0.5
# A pass itself varies by the spread that was seen lately, within these bounds.
_NOISE, _NOISE_BOUNDS, _NOISE_SHARE = 0.03, (0.005**2, 0.2**2), 0.05
# A pass that is later than this many standard deviations counts as disturbed, unless the next one is too.
_DISTURBED = 3.0
# After two of them the machine may have changed: by their surprise, but no more than this at once, for the better
# part in its speed.
_MOST_CHANGE, _SPEED_CHANGE, _RATIO_CHANGE = 0.5, 0.5, 0.3
_REFRESH = 32  # passes
_LEAST_S = 1e-9  # a clock may have seen none


# The correlation of the errors of two widths' ratios; none of width 1, whose ratio is 1.
_DOUBLINGS = np.log2(np.arange(1, NUM_WIDTHS + 1))
_ALIKE: _Floats = _SHARED + (1 - _SHARED) * np.exp(-np.abs(_DOUBLINGS[:, None] - _DOUBLINGS))
_ALIKE[0] = _ALIKE[:, 0] = 0.0


class PassEstimate:
    """Mean and covariance of the log seconds of passes of 1, 2, … NUM_WIDTHS tokens."""

    __slots__ = ("_buffer", "_cov", "_drift", "_late", "_mean", "_noise", "_num_seen", "is_started")

    def __init__(self, ratios: Sequence[float], spreads: Sequence[float]) -> None:
        """Start from ratios to a pass of one token and their spreads, [NUM_WIDTHS], and no known speed."""
        self._mean: list[float] = np.log(np.asarray(ratios, np.float64)).tolist()
        deviations = np.array([0.0, *spreads[1:]], np.float64)
        self._cov = _ALIKE * np.outer(deviations, deviations) + _UNKNOWN_SPEED**2
        self._noise = _NOISE**2
        self._buffer = np.empty_like(self._cov)
        self._late = [0.0, 0.0]  # the surprise of the last pass without a draft, and with one, where it was late
        self._num_seen = 0
        self.is_started = False  # some pass was seen
        self._drift = _drift(self._cov)

    def copy(self) -> "PassEstimate":
        """This estimate for another answer: the ratios are known, and the speed about."""
        twin = deepcopy(self)
        twin._cov += _SINCE_ANSWER**2
        twin._late = [0.0, 0.0]
        return twin

    @property
    def step_s(self) -> float:
        """Seconds of a pass of one token."""
        return exp(self._mean[0])

    def ratios(self) -> list[float]:
        """Passes to one of one token, [NUM_WIDTHS]; none counts as cheaper than that."""
        step = self._mean[0]
        return [exp(mean - step) if mean > step else 1.0 for mean in self._mean]

    def spread(self, width: int) -> float:
        """Standard deviation of the log of a width's ratio."""
        i = min(width, NUM_WIDTHS) - 1
        at = self._cov.item
        return sqrt(max(0.0, at(i, i) + at(0, 0) - 2 * at(i, 0)))

    def mean_spread(self, shares: Iterable[tuple[int, float]]) -> float:
        """Standard deviation of the log of a mean over several widths' ratios, by the shares of widths in it."""
        weights = np.zeros(NUM_WIDTHS)
        for width, share in shares:
            weights[min(width, NUM_WIDTHS) - 1] += share
        weights[0] -= weights.sum()
        return sqrt(max(0.0, float(weights @ self._cov @ weights)))

    def observe(self, width: int, taken_s: float) -> None:
        i = min(width, NUM_WIDTHS) - 1
        cov = self._cov
        cov += self._drift
        known = cov.item(i, i)
        surprise = log(max(taken_s, _LEAST_S)) - self._mean[i]
        variance = known + self._noise
        is_late = surprise > _DISTURBED * sqrt(variance)
        # The last pass of the kind was late too, by half as much at least.
        if is_late and self._late[i > 0] > surprise / 2:
            change = min(surprise, _MOST_CHANGE) ** 2
            cov += change * _SPEED_CHANGE**2
            cov += _ALIKE * (change * _RATIO_CHANGE**2)
            known = cov.item(i, i)
            variance = known + self._noise
        self._late[i > 0] = surprise if is_late else 0.0
        bounded = min(surprise, _DISTURBED * sqrt(variance))
        # The further off, the less it counts: as if it had varied so much that it lay at the bound.
        weight = variance * max(1.0, surprise / bounded if bounded > 0 else 1.0) ** 2
        row, gain = cov[i] * weight**-0.5, surprise * weight**-0.5
        self._mean = [mean + gain * each for mean, each in zip(self._mean, row.tolist(), strict=True)]
        cov -= np.multiply(row[:, None], row, self._buffer)
        if self.is_started:
            noise = self._noise + _NOISE_SHARE * (bounded * bounded - known - self._noise)
            self._noise = min(max(noise, _NOISE_BOUNDS[0]), _NOISE_BOUNDS[1])
        self.is_started = True
        self._num_seen += 1
        if self._num_seen % _REFRESH == 0:
            self._cov = (cov + cov.T) / 2
            self._drift = _drift(self._cov)


def _drift(cov: _Floats) -> _Floats:
    """The covariance that a pass adds: a ratio becomes as unsure again as after one measurement, and no more."""
    now = np.diag(cov) + cov[0, 0] - 2 * cov[0]
    left = np.sqrt(np.clip(1 - now / MEASURED**2, 0.0, 1.0))
    drift: _Floats = _RATIO_DRIFT**2 * _ALIKE * np.outer(left, left) + _SPEED_DRIFT**2
    return drift


def starting_spreads(known: Mapping[int, float], measured: Sequence[int]) -> list[float]:
    """The spread of each ratio before a session's first pass, [NUM_WIDTHS].

    Args:
        known: Spreads that were stored, by width.
        measured: Widths of more than a step that were measured at least once.
    """
    if not known:
        known = dict.fromkeys(measured, MEASURED)
    if not known:
        return [0.0] + [UNMEASURED] * (NUM_WIDTHS - 1)
    widths = sorted(known)
    spreads = np.interp(np.arange(1, NUM_WIDTHS + 1), widths, [known[width] for width in widths])
    return [0.0, *np.hypot(spreads[1:], _SINCE_SESSION).tolist()]
