"""Classes of guesses by how sure a drafter model was of them, to count how often they come true. Pure."""

from math import exp, floor, log

_LEAST = 1e-6
_PER_RANK = 8  # classes of first choices, and as many of the next best ones
NUM_CLASSES = 2 * _PER_RANK


def confidence_class(probability: float, *, is_first: bool) -> int:
    """The class of a guess, by the log-odds of its probability in steps of 1.

    Args:
        probability: The drafter's own.
        is_first: It was the drafter's choice, which noise may have made; else one of the next best.
    """
    bounded = min(max(probability, _LEAST), 1 - _LEAST)
    step = floor(log(bounded / (1 - bounded))) + _PER_RANK // 2
    return min(max(step, 0), _PER_RANK - 1) + (0 if is_first else _PER_RANK)


def typical_probability(confidence: int) -> float:
    """The probability in the middle of a class."""
    return 1 / (1 + exp(_PER_RANK // 2 - confidence % _PER_RANK - 0.5))
