"""Gumbel noise as a pure function of seed, position and token, and the token that wins with it.

The token with the largest score + noise is a sample from the softmax of the scores (Gumbel, 1954).
"""

import math

import numpy as np
import numpy.typing as npt

from edgespec.decoding.truncation import Ids, Peak, Scores, Weights, above, scores_of, top_k
from edgespec.types import Row

# Uniforms have 32 bits, so the noise never exceeds −log(−log(1 − 2⁻³³)).
_LARGEST = 22.88
_ROUNDING = 1e-5  # more than the error of a noise that is compared
_NEAR = 7.0  # below the best score; tokens within it are found 0.05 ms sooner than the likeliest 64
_LEADERS = 64
_NO_TOKEN = 2**63
_BELOW_ONE = 1 - 2.0**-53
_SLICE = 256
_FEW = 1024  # up to here noise for all is faster than a search for those that can win
# Ids hashed at a time, so that they stay in a core's cache: 0.25 ms for 152,000, 0.9 ms in one piece.
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
    """Indices of a few hundred logits, the one with the largest logit / temperature + noise among them.

    The best sum among the likeliest tokens is a threshold for the others. Most of these have too small a hash to
    reach it, so hashes are compared before any logarithm is taken.

    Args:
        ids: The tokens of the logits, [num_logits]; unless given, their indices.
    """
    leaders, scores, behind = _leaders(logits, best, temperature)
    reached = float((scores + gumbel_noise(seed, position, leaders if ids is None else ids[leaders])).max())
    alive = above(logits, best, temperature, reached - _LARGEST)
    found = _with_noise(alive if ids is None else ids[alive], seed, position, reached - behind)
    return np.union1d(leaders, alive[found])


def _leaders(logits: Row, best: Peak, temperature: float) -> tuple[Ids, Scores, float]:
    """The likeliest tokens, their scores relative to the best, and a score that no other token exceeds."""
    near = above(logits, best, temperature, -_NEAR)
    if len(near) <= _FEW:
        return near, scores_of(logits[near], best, temperature), -_NEAR
    ids = top_k(logits, _LEADERS)
    scores = scores_of(logits[ids], best, temperature)
    return ids, scores, float(scores.min())


def sample_index(weights: Weights, ids: Ids, seed: int, position: int) -> int:
    """An index sampled by the weights of ids.

    Few are sampled as noisy_argmax does; many, whose logarithms would take 1 ms, by a single uniform number.
    """
    if len(weights) > _FEW:
        return sample_by_cdf(weights, uniform(seed, position))
    with np.errstate(divide="ignore"):
        scores = np.log(weights.astype(np.float64, copy=False))
    return int(np.argmax(scores + gumbel_noise(seed, position, ids)))


def uniform(seed: int, position: int) -> float:
    """A number from 0 below 1 for a position, with 53 bits, independent of the noise of tokens."""
    return float((mix_bits(int(_key(seed, position)) ^ _NO_TOKEN) >> 11) * 2.0**-53)


def sample_by_cdf(weights: Weights, share: float) -> int:
    """The index where the weights' running sum passes a share, from 0 below 1, of their sum (inverse CDF).

    Slices are summed first, then the weights of one: 0.05 ms for 152,000, where all running sums take 0.5.
    """
    starts = np.arange(0, len(weights), _SLICE)
    which, share = _locate(np.add.reduceat(weights, starts), share)
    start = int(starts[which])
    return start + _locate(weights[start : start + _SLICE], share)[0]


def _locate(weights: Weights, share: float) -> tuple[int, float]:
    """The index, and the share of its own weight that is passed, from 0 below 1."""
    reached = np.cumsum(weights, dtype=np.float64)
    place = share * float(reached[-1])
    index = int(np.searchsorted(reached, place, side="right"))
    before = float(reached[index - 1]) if index else 0.0
    return index, min((place - before) / (float(reached[index]) - before), _BELOW_ONE)


def derive_seed(seed: int, domain: int) -> int:
    """A seed for a domain, a number from 0, independent of all others."""
    return int(_key(int(_key(domain, seed)), 0))


def _with_noise(ids: Ids, seed: int, position: int, least: float) -> Ids:
    """Indices of all ids whose noise is least or more, and of few others."""
    share = math.exp(-math.exp(_ROUNDING - min(max(least, -_LARGEST), _LARGEST)))  # of uniforms: too small
    # The last step of the mix, left out, changes none of the upper 31 bits.
    key, floor = _key(seed, position), np.uint64(max(0, int(share * 2**31) - 1) << 33)
    numbers = ids.astype(np.int64, copy=False).view(np.uint64)
    pieces = [_mix_in_part(numbers[i : i + _PIECE] ^ key) >= floor for i in range(0, len(ids), _PIECE)]
    return np.flatnonzero(np.concatenate(pieces)) if pieces else ids


def _bits(seed: int, position: int, ids: Ids) -> npt.NDArray[np.uint64]:
    return _mix(ids.astype(np.uint64) ^ _key(seed, position))


def _key(seed: int, position: int) -> np.uint64:
    # In Python's own numbers: an array of one takes a microsecond an operation.
    return np.uint64(mix_bits(mix_bits(int(seed)) ^ position))


def mix_bits(x: int) -> int:
    """The step of the SplitMix64 generator (Steele et al., 2014)."""
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Do as mix_bits does, in place; arithmetic wraps at 64 bits."""
    x = _mix_in_part(x)
    x ^= x >> np.uint64(31)
    return x


def _mix_in_part(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x += np.uint64(0x9E3779B97F4A7C15)
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    return x
