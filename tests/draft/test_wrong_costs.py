"""A policy with wrong costs finds out what passes take, and says what drafting gained; in virtual time."""

from collections.abc import Callable

import pytest
from costed_machine import STEP_S, TABLES, CostedMachine, Ran, gain

from edgespec.draft.costs import Gain, PassCosts, measured_gain

slow = pytest.mark.slow
CLASSES = {"narrow": range(2, 4), "middle": range(4, 9), "wide": range(9, 26), "all": range(2, 26)}
RATIOS = {name: {w: PassCosts(dict(table)).ratio(w) for w in range(1, 26)} for name, table in TABLES.items()}
NUM_ROUNDS, NUM_LOST = 200, 50
KNOWN = 0.95, 0.7, 0.5, 0.3, 0.15, 0.0


def reported(machine: CostedMachine, ran: list[Ran]) -> Gain | None:
    """The gain that an answer of these rounds reports."""
    widths: dict[int, tuple[int, float]] = {}
    for each in ran:
        passes, seconds = widths.get(each.width, (0, 0.0))
        widths[each.width] = passes + 1, seconds + each.taken_s
    num_tokens, taken_s = sum(each.num_tokens for each in ran), sum(each.taken_s for each in ran)
    return measured_gain(machine.speculation.costs(), widths, num_tokens, taken_s)


@pytest.mark.parametrize("factor", [1 / 1.5, 1.5], ids=["too cheap", "too dear"])
@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param("narrow", marks=slow),
        pytest.param("middle", marks=slow),
        pytest.param("wide", marks=slow),
        "all",
    ],
)
@pytest.mark.parametrize(
    ("table", "chance"),
    [
        pytest.param(
            name, chance, marks=() if (name, chance) in {("qwen", 0.3), ("a100", 0.15), ("smollm2", 0.7)} else slow
        )
        for name in TABLES
        for chance in KNOWN
    ],
)
def test_wrong_costs_are_found_out_within_fifty_rounds(
    table: str, chance: float, wrong: str, factor: float
) -> None:
    true = RATIOS[table]
    believed = {w: max(1.0, ratio * factor) if w in CLASSES[wrong] else ratio for w, ratio in true.items()}
    for has_guess in (0.6, 1.0):
        machine = CostedMachine(true, believed, chance, has_guess, noise=0.03, seed=list(RATIOS).index(table))
        ran = machine.answer(NUM_ROUNDS)
        assert gain(ran[NUM_LOST:], chance=chance) > 0.98
        found = reported(machine, ran)
        if has_guess < 1 and any(each.width > 1 for each in ran):
            assert found is not None
        if found is not None:  # within 3 %, or within what it says itself
            assert found.value == pytest.approx(gain(ran), rel=0.09)


Speed = Callable[[int, int], float]


def slower(number: int, width: int) -> float:
    return 1.5 if number >= 150 else 1.0


def stalling(number: int, width: int) -> float:
    return 100.0 if number % 60 == 59 else 1.0


def contended(number: int, width: int) -> float:
    """Another program that comes and goes makes rows dear."""
    return 1.0 + 0.25 * min(width - 1, 3) if 150 <= number < 300 else 1.0


@pytest.mark.parametrize("chance", [0.0, pytest.param(0.3, marks=slow), 0.7])
@pytest.mark.parametrize("table", ["qwen", pytest.param("smollm2", marks=slow), pytest.param("a100", marks=slow)])
@pytest.mark.parametrize("speed", [slower, stalling, contended])
def test_a_machine_that_changes_is_followed(table: str, chance: float, speed: Speed) -> None:
    machine = CostedMachine(RATIOS[table], RATIOS[table], chance, speed=speed, noise=0.03)
    ran = machine.answer(450)
    for start, end in ((NUM_LOST, 150), (150 + NUM_LOST, 300), (300 + NUM_LOST, 450)):
        part = [each for i, each in enumerate(ran[start:end], start) if speed(i, each.width) < 50]
        plain_s = STEP_S * speed(start, 1)
        assert gain(part, plain_s, chance) > 0.98
    if chance > 0.5 and speed is contended:
        assert sum(each.width > 1 for each in ran[-100:]) > 50, "it drafts again once the other program is gone"


def test_a_useless_source_costs_less_than_two_percent_in_the_long_run() -> None:
    machine = CostedMachine(RATIOS["qwen"], RATIOS["qwen"], 0.05, noise=0.05)
    assert gain(machine.answer(1500), chance=0.05) > 0.98


def test_probes_of_plain_decoding_cost_less_than_two_percent_of_what_is_gained() -> None:
    ran = CostedMachine(RATIOS["qwen"], RATIOS["qwen"], 0.9, noise=0.03).answer(1500)
    assert 0 < sum(each.width == 1 for each in ran[50:]) / 1450 < 0.02


def test_no_probe_in_a_short_answer() -> None:
    machine = CostedMachine(RATIOS["qwen"], RATIOS["qwen"], 0.0, noise=0.05, known={("text", -1): (5.0, 100.0)})
    assert all(each.width == 1 for _ in range(12) for each in machine.answer(12))


def test_a_gain_that_nothing_was_compared_with_is_not_reported() -> None:
    costs = PassCosts(dict(RATIOS["qwen"]))
    for _ in range(20):
        costs.observe(4, 0.03)
    assert measured_gain(costs, {4: (20, 0.6)}, 60, 0.6) is None
    for _ in range(20):
        costs.observe(1, 0.02)
        costs.observe(4, 0.03)
    found = measured_gain(costs, {4: (40, 1.2)}, 120, 1.2)
    assert found is not None
    assert found.value == pytest.approx(2.0, rel=0.03)
    assert found.is_shown
