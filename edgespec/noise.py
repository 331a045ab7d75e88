"""Gumbel noise as a pure function of seed, position and token, and the token that wins with it.

The token with the largest score + noise is a draw from the softmax of the scores (Gumbel, 1954).
"""

import math

import numpy as np
import numpy.typing as npt

from edgespec.truncation import Ids, Peak, Scores, Weights, above, scores_of, top_k
from edgespec.types import Row

# Uniforms have 32 bits, so the noise never exceeds −log(−log(1 − 2⁻³³)).
_LARGEST = 22.88
_ROUNDING = 1e-5  # more than what a noise that is compared may be off
_NEAR = 7.0  # behind the best; who is so near is found 0.05 ms sooner than the likeliest 64
_LEADERS = 64
_NO_TOKEN = 2**63
_BELOW_ONE = 1 - 2.0**-53
_SLICE = 256
_FEW = 1024  # so many are drawn sooner than sifted
# Of ids that are hashed at a time, so that they stay in a core's cache: 0.25 ms for 152,000, 0.9 ms in one piece.
_PIECE = 1 << 15


def gumbel_noise(seed: int, position: int, ids: Ids) -> npt.NDArray[np.float64]:
    """Standard Gumbel noise for token ids at a position, [num_ids]."""
    uniform = ((_bits(seed, position, ids) >> np.uint64(32)).astype(np.float64) + 0.5) * 2.0**-32
    return -np.log(-np.log(uniform))


def noisy_argmax(scores: Scores, ids: Ids, seed: int, position: int) -> int:
    """The id with the largest score + noise."""
    if len(scores) > _FEW:
        able = able_to_win(scores, scores.max(), 1.0, seed, position, ids)
        scores, ids = scores[able], ids[able]
    return int(ids[np.argmax(scores + gumbel_noise(seed, position, ids))])


def able_to_win(
    logits: Row, best: Peak, temperature: float, seed: int, position: int, ids: Ids | None = None
) -> Ids:
    """Indices of a few hundred logits, and among them of that with the largest logit / temperature + noise.

    Noise is drawn for the likeliest, and the best of them is what others have to reach. Most that the largest
    noise would lift so far do not have the bits for it, which are compared before any logarithm is taken.

    Args:
        ids: Whose the logits are, [num_logits]; unless given, their indices.
    """
    leaders, scores, behind = _leaders(logits, best, temperature)
    reached = float((scores + gumbel_noise(seed, position, leaders if ids is None else ids[leaders])).max())
    alive = above(logits, best, temperature, reached - _LARGEST)
    lifted = _lifted(alive if ids is None else ids[alive], seed, position, reached - behind)
    return np.union1d(leaders, alive[lifted])


def _leaders(logits: Row, best: Peak, temperature: float) -> tuple[Ids, Scores, float]:
    """The likeliest, their scores beside the best, and a score that no other exceeds."""
    near = above(logits, best, temperature, -_NEAR)
    if len(near) <= _FEW:
        return near, scores_of(logits[near], best, temperature), -_NEAR
    ids = top_k(logits, _LEADERS)
    scores = scores_of(logits[ids], best, temperature)
    return ids, scores, float(scores.min())


def picked(weights: Weights, ids: Ids, seed: int, position: int) -> int:
    """The index of a draw from weights, which are those of ids.

    Of few that with the largest score + noise, as noisy_argmax has it. Of many, whose logarithms take 1 ms, by a
    single number.
    """
    if len(weights) > _FEW:
        return drawn(weights, uniform(seed, position))
    with np.errstate(divide="ignore"):
        scores = np.log(weights.astype(np.float64, copy=False))
    return int(np.argmax(scores + gumbel_noise(seed, position, ids)))


def uniform(seed: int, position: int) -> float:
    """A number from 0 below 1 for a position, with 53 bits, of which the noise of tokens knows nothing."""
    return float((_mixed(int(_key(seed, position)) ^ _NO_TOKEN) >> 11) * 2.0**-53)


def drawn(weights: Weights, share: float) -> int:
    """The index whose stretch of the weights' running sum a number from 0 below 1 falls into.

    Slices are summed first, then what is in one: 0.05 ms for 152,000, where all running sums take 0.5.
    """
    starts = np.arange(0, len(weights), _SLICE)
    which, share = _fallen(np.add.reduceat(weights, starts), share)
    start = int(starts[which])
    return start + _fallen(weights[start : start + _SLICE], share)[0]


def _fallen(weights: Weights, share: float) -> tuple[int, float]:
    """The index, and how far into its stretch, from 0 below 1."""
    reached = np.cumsum(weights, dtype=np.float64)
    place = share * float(reached[-1])
    index = int(np.searchsorted(reached, place, side="right"))
    before = float(reached[index - 1]) if index else 0.0
    return index, min((place - before) / (float(reached[index]) - before), _BELOW_ONE)


def derived(seed: int, domain: int) -> int:
    """A seed of its own for each domain, a number from 0."""
    return int(_key(int(_key(domain, seed)), 0))


def _lifted(ids: Ids, seed: int, position: int, least: float) -> Ids:
    """Indices of all ids whose noise is least or more, and of few others."""
    share = math.exp(-math.exp(_ROUNDING - min(max(least, -_LARGEST), _LARGEST)))  # of uniforms: too small
    # The last step of the mix, left out, changes none of the upper 31 bits.
    key, floor = _key(seed, position), np.uint64(max(0, int(share * 2**31) - 1) << 33)
    numbers = ids.astype(np.int64, copy=False).view(np.uint64)
    pieces = [_stirred(numbers[i : i + _PIECE] ^ key) >= floor for i in range(0, len(ids), _PIECE)]
    return np.flatnonzero(np.concatenate(pieces)) if pieces else ids


def _bits(seed: int, position: int, ids: Ids) -> npt.NDArray[np.uint64]:
    return _mix(ids.astype(np.uint64) ^ _key(seed, position))


def _key(seed: int, position: int) -> np.uint64:
    """Of a position's noise. In Python's own numbers: an array of one takes a microsecond an operation."""
    return np.uint64(_mixed(_mixed(int(seed)) ^ position))


def _mixed(x: int) -> int:
    """_mix for one number."""
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The SplitMix64 generator's step (Steele et al., 2014) in place; arithmetic wraps at 64 bits."""
    x = _stirred(x)
    x ^= x >> np.uint64(31)
    return x


def _stirred(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x += np.uint64(0x9E3779B97F4A7C15)
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    return x
