"""NVIDIA cards by what passes took on them (docs/log/devices.md): drafting never loses there; in virtual time."""

from dataclasses import replace

import pytest

from edgespec.draft.costs import PassCosts
from edgespec.draft.draft_model import DraftCosts, DraftModelStats, RowCosts
from edgespec.draft.drafter import Drafter
from edgespec.draft.limits import MAX_BRANCHES
from edgespec.draft.measured import FixedLength
from edgespec.runtimes.pass_shapes import choose_shapes
from edgespec.simulation.machines import Machine, find_machine
from edgespec.simulation.schedules import Scenario, run, virtual_devices

MODELS = {"h100": "1.5B int4", "h200": "7B int4"}
CARDS = tuple(MODELS)
LENGTH = 3


def with_drafter(card: str, step: float, row: float) -> Machine:
    """A card whose drafter's step takes that part of a pass of one row, and so much more for each further row."""
    machine = find_machine(card).devices()
    rows = [1 + row * more for more in range(MAX_BRANCHES)]
    return replace(machine, draft_s=machine.target_s * step, draft_ratios=rows)


def fixed_speed(schedule: str, machine: Machine, chance: float, num_tokens: int) -> float:
    """The speed over plain decoding with drafts of one length."""
    rows = {num_rows: machine.draft_ratio(num_rows) for num_rows in range(1, MAX_BRANCHES + 1)}
    ratios = {num_rows: machine.ratio(num_rows - 1) for num_rows in range(1, MAX_BRANCHES + 2)}

    def policy_of(drafter: Drafter) -> FixedLength:
        stats = DraftModelStats(DraftCosts(machine.step, 0.0), rows=RowCosts(rows))
        return FixedLength([drafter], LENGTH, costs=PassCosts(ratios), models={drafter.name: stats})

    each = Scenario(machine=machine, acceptance=chance, num_tokens=num_tokens)
    return run(each, schedule, virtual_devices(), policy_of).tokens_per_second * machine.target_s


@pytest.mark.parametrize(("step", "chance"), [(0.62, 1.0), (0.3, 0.8)])
def test_a_drafter_whose_rows_are_dear_prepares_no_other_outcomes(step: float, chance: float) -> None:
    """On the card hedging was 0.58 of the sequence: a step of the CPU ran 25 rows, as though they cost nothing."""
    machine = with_drafter("h100", step, row=0.18)
    speeds = [fixed_speed(schedule, machine, chance, 200) for schedule in ("serial", "pipelined", "hedged")]
    assert speeds[2] >= 0.98 * speeds[1] > speeds[0]


@pytest.mark.slow
@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("row", [0.0, 0.18])
def test_overlap_pays_on_a_card_and_alternatives_never_cost(card: str, row: float) -> None:
    """Drafts in a chain that are right with 0.8 gain a quarter at most; see docs/log/devices.md."""
    scenario = Scenario(machine=with_drafter(card, 0.3, row), acceptance=0.8, num_tokens=400)
    plain, serial, pipelined, hedged = (
        run(scenario, each, virtual_devices()).tokens_per_second
        for each in ("plain", "serial", "pipelined", "hedged")
    )
    assert serial >= 1.2 * plain
    assert pipelined >= 1.2 * serial
    assert hedged >= 0.999 * pipelined  # the last pass of a run may be another
    if not row:
        assert hedged >= 1.4 * serial


@pytest.mark.parametrize("card", CARDS)
def test_what_a_pass_costs_by_its_rows_is_what_padded_passes_of_its_model_take(card: str) -> None:
    machine = find_machine(card)
    assert machine.card
    passes_ms = machine.card.forms[MODELS[card]].passes_ms
    shapes = choose_shapes(lambda width, num_rows: passes_ms[width] / 1e3, max(passes_ms))
    assert shapes
    assert passes_ms[1] == machine.target_ms.value
    for num_rows, ratio in enumerate(machine.verify_cost.value, 1):
        width = min(each for each in shapes.rows if each >= num_rows)
        assert ratio == pytest.approx(passes_ms[width] / passes_ms[1], abs=0.01)


def test_a_card_says_which_of_its_passes_were_measured() -> None:
    for card in CARDS:
        known = find_machine(card).card
        assert known
        for form in known.forms.values():
            passes = [rows for each in (form.measured, form.derived, form.assumed) for rows, _ in each]
            assert len(passes) == len(set(passes)) == len(form.passes_ms)
            assert {1, 2, 4, 8, 16, 32, 64, 256} <= form.passes_ms.keys()
