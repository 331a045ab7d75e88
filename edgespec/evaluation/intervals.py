"""How far a mean of ratios can be trusted: 95 % intervals of geometric means. Pure.

Ratios are compared by their logarithms, of which twice as fast and half as fast are equally far from 1. A prompt
is one observation, however often it was answered: answers to one prompt resemble each other, and what the machine
adds to them differs from prompt to prompt, so that the spread between prompts holds both. Student's t, and no
bootstrap, whose intervals are too narrow for a handful of prompts (docs/log/evaluation.md).
"""

from collections.abc import Sequence
from math import atan, cos, exp, lgamma, log, pi, sqrt, tan
from statistics import fmean, variance
from typing import NamedTuple

import numpy as np

from edgespec.evaluation.document import LARGEST_FIGURE

CONFIDENCE = 0.95
# Nodes of the quadrature: t quantiles of 1 to 1000 degrees of freedom are right to 1e-9.
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(48)
_LARGEST_DEGREES = 1000.0  # beyond, the quantile changes by less than 0.2 %
# Spreads below this, in logarithms, are rounding: exactly equal ratios have an interval of no width.
_SMALLEST_VARIANCE = 1e-24
SMALLEST_GAIN = 0.05  # that a reader notices
MOST_OBSERVATIONS = 1000  # that anybody would measure
_LARGEST_LOG = log(LARGEST_FIGURE)


class Mean(NamedTuple):
    """The mean of some logarithms, the variance of that mean, and its degrees of freedom; 0 if it is not known."""

    value: float
    variance: float
    degrees: float

    @property
    def ratio(self) -> float:
        return exp(self.value)

    def interval(self, confidence: float = CONFIDENCE) -> tuple[float, float] | None:
        """The ratios between which the true one lies; None where one observation tells nothing of its spread."""
        if not self.degrees:
            return None
        half = t_quantile(confidence, self.degrees) * sqrt(self.variance)
        # Two ratios that are far apart say nothing; the ends stay within what a document holds.
        low, high = (
            exp(min(max(end, -_LARGEST_LOG), _LARGEST_LOG)) for end in (self.value - half, self.value + half)
        )
        return low, min(high, LARGEST_FIGURE)

    def num_enough(self, num_now: int) -> int | None:
        """Observations, of num_now that spread as these do, whose interval would leave 1 out.

        A mean so near 1 that nobody would notice needs as many as show that. None where no spread is known.
        """
        if not self.degrees:
            return None
        wanted = max(abs(self.value), log(1 + SMALLEST_GAIN))
        found = num_now
        while (
            t_quantile(CONFIDENCE, self.degrees + found - num_now) * sqrt(self.variance * num_now / found) > wanted
            and found < MOST_OBSERVATIONS
        ):
            found += 1 + found // 20
        return found


def mean_of(ratios: Sequence[float]) -> Mean:
    """The geometric mean of ratios that are independent of each other."""
    return _mean_of_logs([log(ratio) for ratio in ratios])


def mean_by_prompt(ratios: Sequence[Sequence[float]]) -> Mean:
    """The geometric mean over prompts of the ratios of their answers, each prompt with the same weight.

    With a single prompt its answers are the observations, and the mean is that of this prompt alone.
    """
    if len(ratios) == 1:
        return mean_of(ratios[0])
    return _mean_of_logs([fmean(map(log, each)) for each in ratios])


def mean_of_categories(categories: Sequence[Sequence[Sequence[float]]]) -> Mean:
    """The geometric mean over categories, each with the same weight; ratios by category, prompt and answer.

    The categories stand for themselves, so that only the prompts within them spread (Welch and Satterthwaite).
    Where one has a single prompt, the categories are the observations, whose spread is larger.
    """
    means = [mean_by_prompt(each) for each in categories]
    if len(means) == 1:
        return means[0]
    if any(len(prompts) < 2 for prompts in categories):
        return _mean_of_logs([mean.value for mean in means])
    weight = 1 / len(means) ** 2
    spread = weight * sum(mean.variance for mean in means)
    uncertainty = weight**2 * sum(mean.variance**2 / mean.degrees for mean in means)
    degrees = spread**2 / uncertainty if uncertainty else sum(mean.degrees for mean in means)
    return Mean(fmean(mean.value for mean in means), spread, degrees)


def simultaneous(num_intervals: int) -> float:
    """The confidence at which so many independent intervals all hold the truth with 95 % (Šidák)."""
    return float(CONFIDENCE ** (1 / num_intervals))


def t_quantile(confidence: float, degrees: float) -> float:
    """The t within which Student's distribution has a share of confidence, on both sides together."""
    degrees = min(degrees, _LARGEST_DEGREES)
    # With t = sqrt(degrees) tan(angle) the density is cos(angle) ** (degrees - 1), up to a factor.
    factor = 2 * exp(lgamma((degrees + 1) / 2) - lgamma(degrees / 2)) / sqrt(pi)
    low, high = 0.0, pi / 2
    angle = atan(2 / sqrt(degrees))
    for _ in range(60):
        slope = factor * cos(angle) ** (degrees - 1)
        angles = angle / 2 * (_NODES + 1)
        excess = float(factor * angle / 2 * (_WEIGHTS @ np.cos(angles) ** (degrees - 1))) - confidence
        low, high = (low, angle) if excess > 0 else (angle, high)
        newton = angle - excess / slope if slope > 1e-12 else low
        following = newton if low < newton < high else (low + high) / 2
        if abs(following - angle) < 1e-13:
            break
        angle = following
    return sqrt(degrees) * tan(angle)


def _mean_of_logs(logs: Sequence[float]) -> Mean:
    spread = variance(logs) if len(logs) > 1 else 0.0
    spread = 0.0 if spread < _SMALLEST_VARIANCE else spread
    return Mean(fmean(logs), spread / len(logs), len(logs) - 1)
