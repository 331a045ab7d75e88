"""Measurements in turn, so that ratios compare neighbours in time."""

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import TypeVar

Name = TypeVar("Name")
Result = TypeVar("Result")


def measure_in_turn(measures: Mapping[Name, Callable[[int], Result]], num_rounds: int) -> dict[Name, list[Result]]:
    """Call each measurement with the number of the round, in the opposite order in every second round."""
    results: dict[Name, list[Result]] = {name: [] for name in measures}
    for i in range(num_rounds):
        for name in list(measures)[:: -1 if i % 2 else 1]:
            results[name].append(measures[name](i))
    return results


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """The median over rounds of the ratio within a round."""
    return median(one / other for one, other in zip(numerators, denominators, strict=True))
