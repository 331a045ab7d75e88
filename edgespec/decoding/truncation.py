"""Which tokens remain when the unlikely ones are cut off: top-k, top-p (a nucleus) and min-p.

Weights and scores are relative to the best token, which has the weight 1 and the score 0.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from edgespec.types import Row

Ids = npt.NDArray[np.intp]
Scores = npt.NDArray[np.float64]
Weights = npt.NDArray[np.floating[Any]]
Peak = np.floating[Any]  # the best logit

_FOLD = 64
# Only the columns that can hold a large logit are looked through where they are few of many: 0.046 ms instead of
# 0.060 for 152,000 logits; for 49,000 it would be 0.034 instead of 0.028.
_FEW_COLUMNS, _MANY_COLUMNS = 8, 1024
_DEEP, _COARSE = -11.5, 16
_FEW = 512  # up to here a sort of all is fastest
_COLDEST = 1e-30  # the lowest temperature for single precision
_SINGLE = 2e-5  # more than the relative error of a weight in single precision, or of a sum of many
_DOUBLE = 1e-10  # more than the order of its terms changes a sum in double precision
_LEVEL, _ONE = 19, 0x3F800000  # numbers in single precision that agree down to bit 19 are within 1/16 octave
_TINY = 1e-300
_PIECE = 1 << 14  # logits whose weights stay in a core's cache: 0.3 ms for 152,000, 1.5 ms in one piece


def scores_of(logits: Row, best: Peak, temperature: float) -> Scores:
    """Log-probabilities less that of the best, [num_logits].

    In doubles, so that a tiny temperature sends the rest to −∞ and not the best to +∞.
    """
    with np.errstate(over="ignore"):
        scores = (logits - best).astype(np.float64)
        scores /= temperature
    return scores


def weights_of(logits: Row, best: Peak, temperature: float) -> Weights:
    """Probabilities divided by that of the best, [num_logits].

    Many come in single precision: 0.1 ms for 152,000, half the time of doubles. Each has a relative error below
    2e-5, their distribution one of 2e-7 (total variation, a model's rows): 10¹³ samples would show it.
    """
    if len(logits) <= _FEW or temperature < _COLDEST:
        return np.exp(scores_of(logits, best, temperature))
    with np.errstate(over="ignore"):
        single = (logits - best).astype(np.float32, copy=False)
        single *= 1 / temperature
    return np.exp(single, out=single)


def top_k(logits: Row, k: int) -> Ids:
    """Indices of the k largest logits and their ties.

    0.04 ms for 152,000 entries: maxima of slices bound the k-th largest from below, and few slices
    reach that bound. A full argpartition takes 1.4 ms.
    """
    if k >= len(logits):
        return np.arange(len(logits))
    columns = len(logits) // _FOLD
    maxima = logits[: columns * _FOLD].reshape(_FOLD, columns).max(axis=0) if columns else logits[:0]
    pool = np.append(maxima, logits[columns * _FOLD :])
    bound = _kth_largest(pool, k) if k <= len(pool) else -np.inf
    ids = _at_least(logits, bound, maxima)
    return ids[logits[ids] >= _kth_largest(logits[ids], k)]


def _at_least(logits: Row, bound: np.floating[Any] | float, maxima: Row) -> Ids:
    """Indices, rising, of the logits that are bound or more, given the maxima of top_k's columns."""
    num_columns = len(maxima)
    if num_columns < _MANY_COLUMNS:
        return np.flatnonzero(logits >= bound)
    columns = np.flatnonzero(maxima >= bound)
    if len(columns) * _FEW_COLUMNS > num_columns:
        return np.flatnonzero(logits >= bound)
    values = logits[: num_columns * _FOLD].reshape(_FOLD, num_columns)[:, columns]
    rows, places = np.nonzero(values >= bound)
    behind = num_columns * _FOLD + np.flatnonzero(logits[num_columns * _FOLD :] >= bound)
    ids = np.concatenate([rows * num_columns + columns[places], behind])
    ids.sort()
    return ids


def above(logits: Row, best: Peak, temperature: float, score: float) -> Ids:
    """Indices of all tokens whose score is score or more, and of few others."""
    peak, least = float(best), float(best) + temperature * score
    return np.flatnonzero(logits >= least - _SINGLE * (abs(peak) + abs(least) + 1))


def likely(logits: Row, best: Peak, temperature: float, min_p: float) -> Ids:
    """Indices of the tokens whose weight is min_p or more."""
    ids = above(logits, best, temperature, math.log(min_p))
    return ids[np.exp(scores_of(logits[ids], best, temperature)) >= min_p]


def least_share(logits: Row, best: Peak, temperature: float, top_p: float, token: int) -> float:
    """A lower bound of a token's probability; 0 if it may not be in the nucleus of top_p.

    Computed from the likeliest tokens and the best of every 16 others: 0.09 ms for 152,000 logits, where the
    weights of all and their sum take 0.13 and a nucleus 0.2.
    """
    weights = weights_of(logits[above(logits, best, temperature, _DEEP)], best, temperature)
    columns = len(logits) // _COARSE
    others = logits[: columns * _COARSE].reshape(_COARSE, columns).max(axis=0)
    others = np.append(others, logits[columns * _COARSE :])
    rest = _COARSE * float(np.minimum(weights_of(others, best, temperature), math.exp(_DEEP)).sum())
    head, own = float(weights.sum()), float(weights_of(logits[token : token + 1], best, temperature)[0])
    before = float(weights.sum(where=weights >= own * (1 - 5 * _SINGLE))) - own
    return (1 - 5 * _SINGLE) * own / (head + rest) if before < (1 - 5 * _SINGLE) * top_p * head else 0.0


def nucleus(logits: Row, best: Peak, temperature: float, top_p: float) -> Ids:
    """Indices of the fewest likeliest tokens that have top_p of all probability; of equal ones the first."""
    if len(logits) > _FEW and temperature >= _COLDEST:
        found = _fast_nucleus(logits, best, temperature, top_p)
        if found is not None:
            return found
    weights = np.exp(scores_of(logits, best, temperature))
    falling = np.sort(weights)[::-1]
    before = np.cumsum(falling) - falling
    num = max(1, int(np.searchsorted(before, top_p * weights.sum())))
    return _largest(weights, falling[num - 1], num)


def _fast_nucleus(logits: Row, best: Peak, temperature: float, top_p: float) -> Ids | None:
    """The nucleus in a tenth of the time; None where it depends on the order in which a sum is taken."""
    head = _head(logits, best, temperature, top_p)
    weights = np.exp(scores_of(logits[head.ids], best, temperature))
    is_above = weights >= head.high
    falling = np.sort(weights[np.flatnonzero(~is_above)])[::-1]
    over, num_over = float(weights.sum(where=is_above)), len(weights) - len(falling)
    reached = over + np.cumsum(falling)
    for total, error in _totals(logits, best, temperature, weights, head.rest):
        masses = np.maximum(top_p * np.array([total - error, total + error]), _TINY)
        num, most = 1 + np.searchsorted(reached, masses)
        if over < masses[0] and num == most <= len(falling) and falling[num - 1] >= head.low:
            return head.ids[_largest(weights, falling[num - 1], num_over + num)]
    return None


def _totals(
    logits: Row, best: Peak, temperature: float, weights: Scores, rest: float
) -> Iterator[tuple[float, float]]:
    """The sum of all weights and a bound of its error, first with the rest in single precision, then exactly."""
    total = float(weights.sum()) + rest
    yield total, _SINGLE * rest + _DOUBLE * total
    pieces = (logits[i : i + _PIECE] for i in range(0, len(logits), _PIECE))
    total = sum(float(np.exp(scores_of(piece, best, temperature)).sum()) for piece in pieces)
    yield total, _DOUBLE * total


class _Head(NamedTuple):
    """The likeliest tokens. The last of the nucleus has a weight between low and high."""

    ids: Ids
    low: float
    high: float
    rest: float  # sum of the weights of all others


def _head(logits: Row, best: Peak, temperature: float, top_p: float) -> _Head:
    """The tokens that may end the nucleus, by weights in single precision, summed level by level.

    Of n tokens those that weigh less than an n-th of 1 − top_p are no part of a nucleus, even all together. Mostly
    the nucleus is found as if n were small, which leaves few to look at.
    """
    single = weights_of(logits, best, temperature)
    for num in (_FOLD, _FOLD**2, len(single)):
        least = ((1 - 5 * _SINGLE) * (1 - top_p) - _DOUBLE) / num
        ids = np.flatnonzero(single >= least)
        head, single[ids] = single[ids], 0.0
        rest = float(single.sum())
        if head.sum() * (1 - top_p) > top_p * rest * (1 + 5 * _SINGLE):
            break
        single[ids] = head
    if len(ids) <= _FEW:
        return _Head(ids, least * (1 + 5 * _SINGLE), math.inf, rest)
    level = (_ONE >> _LEVEL) - (head.view(np.int32) >> _LEVEL)
    sums = np.bincount(level, head).cumsum()
    last = int(np.searchsorted(sums, top_p * (sums[-1] + rest)))
    low, high = ((np.array([-last, 1 - last], np.int32) << _LEVEL) + _ONE).view(np.float32)
    # One level more: rounding may have moved a weight down.
    below = sums[-1] - sums[min(last + 1, len(sums) - 1)]
    return _Head(ids[np.flatnonzero(level <= last + 1)], float(low), float(high), rest + float(below))


def _largest(weights: Scores, least: float, num: int) -> Ids:
    """Indices of the num largest weights, the smallest of which is least; of weights equal to it the first."""
    ids = np.flatnonzero(weights >= least)
    num_more = len(ids) - num
    return np.delete(ids, np.flatnonzero(weights[ids] == least)[-num_more:]) if num_more else ids


def _kth_largest(values: Row, k: int) -> np.floating[Any]:
    found: np.floating[Any] = np.partition(values, len(values) - k)[len(values) - k]
    return found
