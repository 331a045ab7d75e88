"""Two installations beside each other: the interval of a median, the ratios, and a worker of one version."""

import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
from versions import PROMPTS, Installation, Measure, Speeds, Worker, compare, median_interval


def test_the_interval_of_a_median_lies_around_it_and_within_the_values() -> None:
    assert median_interval([0.9, 1.1]) == (1.0, 0.9, 1.1)
    middle, low, high = median_interval([float(value) for value in range(20)])
    assert (middle, low, high) == (9.5, 5.0, 14.0)  # at least 95 % by the binomial distribution


def test_ratios_are_of_neighbours_in_time_and_both_orders_count_alike(capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[int] = []
    ours = [2.0, 8.0] * 5 + [2.0, 32.0]  # every second pair of processes loads the other version first

    def opened(pair: int) -> AbstractContextManager[dict[str, Measure]]:
        def measure(number: int) -> list[Speeds]:
            asked.append(number)
            return [[ours[pair] * (number + 1), 5.0]]

        return nullcontext({"this": measure, "other": lambda number: [[number + 1.0, 10.0]]})

    compare(opened, 12, 3, ["decoding", "first token"], warm_up=2)
    compare(opened, 4, 1, ["decoding", "first token"])
    assert asked == [*range(5)] * 12 + [0] * 4
    assert [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()] == [
        "decoding 4.000 (4.000 to 8.000; 12 pairs)",
        "first token 0.500 (0.500 to 0.500; 12 pairs)",
        "decoding 4.000 (too few for an interval; 4 pairs)",
        "first token 0.500 (too few for an interval; 4 pairs)",
    ]


@pytest.mark.slow
def test_a_worker_answers_with_both_of_its_speeds(tiny_model: Path) -> None:
    worker = Worker(Installation(sys.executable, str(tiny_model)), "suffix")
    try:
        [first, *more] = worker.answer_all(4, 0)
        assert len(more) == len(PROMPTS) - 1
        assert len(first) == 2
        assert min(first) > 0.0
    finally:
        worker.close()
