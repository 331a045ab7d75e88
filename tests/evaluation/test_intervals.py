"""Intervals hold the truth as often as they say, on a machine whose speed drifts by a third within minutes."""

from collections import Counter, defaultdict
from functools import cache
from math import exp, log

import numpy as np
import pytest

from edgespec.evaluation.benchmark import schedule
from edgespec.evaluation.document import LARGEST_FIGURE
from edgespec.evaluation.intervals import (
    Mean,
    mean_by_prompt,
    mean_of,
    mean_of_categories,
    simultaneous,
    t_quantile,
)
from edgespec.evaluation.prompts import BenchPrompt


@pytest.mark.parametrize(
    ("degrees", "quantile"), [(1, 12.706204736), (2, 4.302652730), (4, 2.776445105), (48, 2.010634758)]
)
def test_quantiles_are_those_of_the_tables(degrees: int, quantile: float) -> None:
    assert t_quantile(0.95, degrees) == pytest.approx(quantile, rel=1e-9)


def test_quantiles_that_have_a_formula() -> None:
    for confidence in (0.5, 0.95, 0.9957, 0.9999):
        assert t_quantile(confidence, 1) == pytest.approx(np.tan(np.pi / 2 * confidence), rel=1e-7)
        tail = (1 - confidence) / 2
        squared = (1 - 2 * tail) ** 2 / (2 * tail * (1 - tail))
        assert t_quantile(confidence, 2) == pytest.approx(squared**0.5, rel=1e-8)


@pytest.mark.parametrize(("mean", "spread"), [(0.1, 0.3), (-0.2, 0.3), (0.07, 0.1), (0.001, 0.1)])
def test_as_many_observations_as_are_called_enough_decide(mean: float, spread: float) -> None:
    def sample(num: int) -> Mean:
        logs = np.linspace(-1, 1, num)
        return mean_of(np.exp(mean + spread * logs / np.std(logs, ddof=1)).tolist())

    enough = sample(4).num_enough(4)
    assert enough is not None
    wanted = max(abs(mean), log(1.05))
    low, high = sample(enough).interval() or (0.0, 0.0)
    assert log(high / low) / 2 <= wanted + 1e-9
    low, high = sample(int(enough * 0.94) - 1).interval() or (0.0, 0.0)
    assert log(high / low) / 2 > wanted
    assert mean_of([1.5]).num_enough(1) is None


def test_twice_and_half_as_fast_are_no_gain() -> None:
    low, high = mean_of([2.0, 0.5, 2.0, 0.5]).interval() or (0.0, 0.0)
    assert mean_of([2.0, 0.5]).ratio == pytest.approx(1.0)
    assert low * high == pytest.approx(1.0)


def test_answers_to_one_prompt_count_as_one_observation() -> None:
    once = mean_by_prompt([[1.1], [1.3], [0.9]])
    often = mean_by_prompt([[1.1] * 9, [1.3] * 9, [0.9] * 9])
    assert (often.ratio, often.degrees) == (pytest.approx(once.ratio), 2)
    assert often.interval() == pytest.approx(once.interval())


def test_one_prompt_has_the_interval_of_its_answers_and_one_answer_has_none() -> None:
    assert mean_by_prompt([[1.1, 1.2, 1.3]]).interval() == mean_of([1.1, 1.2, 1.3]).interval()
    assert mean_by_prompt([[1.1]]).interval() is None
    assert mean_of_categories([[[1.1]]]).interval() is None
    assert mean_of_categories([[[1.1]], [[1.3]]]).interval() == mean_of([1.1, 1.3]).interval()


def test_equal_ratios_have_an_interval_of_no_width() -> None:
    assert mean_of_categories([[[1.1], [1.1]], [[1.1], [1.1]]]).interval() == pytest.approx((1.1, 1.1))


def test_far_apart_ratios_have_finite_intervals() -> None:
    low, high = mean_of([1e-9, 1e9]).interval() or (0.0, 0.0)
    assert 0 < low < high <= LARGEST_FIGURE


def test_equal_categories_of_many_prompts_have_the_interval_of_all_prompts() -> None:
    rng = np.random.default_rng(1)
    ratios = [[[float(each)] for each in np.exp(rng.normal(0.1, 0.2, 200))] for _ in range(2)]
    both = mean_of_categories(ratios).interval()
    assert both == pytest.approx(mean_by_prompt(ratios[0] + ratios[1]).interval(), rel=3e-3)


def test_who_is_first_is_balanced_and_rounds_have_different_orders() -> None:
    prompts = [BenchPrompt("ab"[i % 2], ("one", "two")) for i in range(10)]
    places = list(schedule(prompts, 4))
    assert Counter((place.round, place.prompt) for place in places) == Counter(
        (number, i) for number in range(4) for i in range(10)
    )
    firsts = defaultdict(Counter[str])
    for place in places:
        for turn in range(2):
            firsts[place.prompt, turn][place.first(turn)] += 1
    assert set(map(tuple, map(sorted, (each.items() for each in firsts.values())))) == {
        (("plain", 2), ("speculative", 2))
    }
    assert [place.prompt for place in places[:10]] != [place.prompt for place in places[10:20]]
    assert places == list(schedule(prompts, 4))


# --- coverage ---

NUM_CATEGORIES, NUM_PROMPTS, NUM_ROUNDS, NUM_RUNS = 6, 5, 3, 300
PROMPTS = [BenchPrompt(f"c{i % NUM_CATEGORIES}", ("x",)) for i in range(NUM_CATEGORIES * NUM_PROMPTS)]


LENGTH_S = 1600
SECONDS = np.arange(LENGTH_S + 1)


def work_done(rng: np.random.Generator, num_machines: int) -> np.ndarray:
    """Work by second of machines whose speed goes up and down by a third within minutes, and that stall at times.

    The logarithm of the speed is an Ornstein-Uhlenbeck process of one minute that spreads by 0.15.
    """
    logs = np.empty((LENGTH_S, num_machines))
    logs[0] = rng.normal(0, 1, num_machines)
    for i in range(1, LENGTH_S):
        logs[i] = logs[i - 1] * (1 - 1 / 60) + rng.normal(0, (2 / 60) ** 0.5, num_machines)
    speeds = np.exp(0.15 * logs) * np.where(rng.random(logs.shape) < 0.01, 0.5, 1.0)
    return np.concatenate([np.zeros((1, num_machines)), np.cumsum(speeds, axis=0)]).T


class Machine:
    """A machine that has done so much work by each second."""

    def __init__(self, rng: np.random.Generator, work: np.ndarray) -> None:
        self.work, self.now_s, self.done, self.rng = work, 0.0, 0.0, rng

    def take(self, work_s: float) -> float:
        """The time that this much work takes now."""
        self.done += work_s * exp(self.rng.normal(0, 0.01))
        ended_s = float(np.interp(self.done, self.work, SECONDS))
        taken_s, self.now_s = ended_s - self.now_s, ended_s
        return taken_s


def simulated_run(
    rng: np.random.Generator, machine: Machine, gains: np.ndarray, spreads: np.ndarray
) -> tuple[list[list[list[float]]], dict[int, float]]:
    """Ratios by category, prompt and round, in the order of the benchmark, and the true ones of prompts."""
    logs = {
        i: rng.normal(log(gains[i % NUM_CATEGORIES]), spreads[i % NUM_CATEGORIES]) for i in range(len(PROMPTS))
    }
    ratios: list[list[list[float]]] = [[[] for _ in range(NUM_PROMPTS)] for _ in range(NUM_CATEGORIES)]
    for place in schedule(PROMPTS, NUM_ROUNDS):
        work = {"plain": 6.0, "speculative": 6.0 / exp(logs[place.prompt])}
        first = place.first(0)
        second = "plain" if first == "speculative" else "speculative"
        taken = {way: machine.take(work[way]) for way in (first, second)}
        mine = ratios[place.prompt % NUM_CATEGORIES][place.prompt // NUM_CATEGORIES]
        mine.append(taken["plain"] / taken["speculative"])
    return ratios, {i: exp(each) for i, each in logs.items()}


@pytest.fixture(scope="module")
def covered() -> dict[str, float]:
    """How often intervals hold the truth in simulated runs, by what they are of.

    The quantile of a confidence and of degrees of freedom is found once: most intervals have those of another.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("edgespec.evaluation.intervals.t_quantile", cache(t_quantile))
        return coverage()


def coverage() -> dict[str, float]:
    rng = np.random.default_rng(7)
    gains = np.array([0.96, 1.0, 1.0, 1.05, 1.3, 2.0])
    spreads = np.array([0.01, 0.02, 0.05, 0.05, 0.15, 0.3])
    counts, of = Counter[str](), Counter[str]()

    def note(name: str, mean: Mean, truth: float, confidence: float = 0.95) -> bool:
        low, high = mean.interval(confidence) or (0.0, 0.0)
        of[name] += 1
        counts[name] += low <= truth <= high
        return low <= truth <= high

    for number, work in enumerate(work_done(rng, NUM_RUNS)):
        run, truths = simulated_run(rng, Machine(rng, work), gains, spreads)
        for i, truth in truths.items() if number % 5 == 0 else ():
            note("prompt", mean_of(run[i % NUM_CATEGORIES][i // NUM_CATEGORIES]), truth)
        note("mean", mean_of_categories(run), exp(np.log(gains).mean()))
        categories = list(zip(map(mean_by_prompt, run), gains, strict=True))
        for mean, gain in categories:
            note("category", mean, float(gain))
        worst, gain = min(categories, key=lambda each: each[0].value)
        note("worst", worst, float(gain), simultaneous(NUM_CATEGORIES))
        note("worst without correction", worst, float(gain))
        of["false alarm"] += 2
        for mean, _ in categories[1:3]:
            counts["false alarm"] += (mean.interval() or (0.0, 2.0))[1] < 1.0
    return {name: counts[name] / of[name] for name in of}


def test_intervals_of_categories_hold_the_truth_in_95_of_100_cases(covered: dict[str, float]) -> None:
    assert 0.935 <= covered["category"] <= 0.965  # 1800 intervals: a standard deviation is 0.005


def test_intervals_of_prompts_hold_the_truth_of_the_prompt_in_95_of_100_cases(covered: dict[str, float]) -> None:
    assert 0.93 <= covered["prompt"] <= 0.98  # 1800 intervals of three rounds


def test_intervals_of_means_hold_the_truth_in_95_of_100_runs(covered: dict[str, float]) -> None:
    assert 0.91 <= covered["mean"] <= 0.985  # 300 intervals: a standard deviation is 0.013


def test_interval_of_the_worst_category_is_wide_enough_for_having_been_chosen(covered: dict[str, float]) -> None:
    assert covered["worst"] >= 0.92
    assert covered["worst"] > covered["worst without correction"]


def test_categories_that_are_not_slower_are_seldom_said_to_be(covered: dict[str, float]) -> None:
    assert covered["false alarm"] <= 0.05  # 2.5 in 100 are expected; 600 intervals
