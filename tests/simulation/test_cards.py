"""NVIDIA cards by what passes took on them (docs/log/devices.md): drafting never loses there; in virtual time."""

import pytest

from edgespec.draft.costs import PassCosts
from edgespec.draft.draft_model import DraftCosts, DraftModelStats, RowCosts
from edgespec.draft.drafter import Drafter
from edgespec.draft.limits import MAX_BRANCHES
from edgespec.draft.measured import FixedLength
from edgespec.simulation.machines import Machine
from edgespec.simulation.schedules import Scenario, run, virtual_devices

# A 1.5B model in 4 bits on an H100, whose passes are padded to 4, 8 and 32 rows.
H100 = (1.0, *[1.12] * 3, *[1.53] * 4, *[2.46] * 24)
LENGTH = 3


def fixed_speed(schedule: str, *, step: float, row: float, chance: float, num_tokens: int) -> float:
    """The speed over plain decoding with drafts of one length, whose drafter takes so much more for each row."""
    rows = {num_rows: 1 + row * (num_rows - 1) for num_rows in range(1, MAX_BRANCHES + 1)}
    machine = Machine(target_s=0.0025, draft_s=0.0025 * step, ratios=H100, draft_ratios=list(rows.values()))

    def policy_of(drafter: Drafter) -> FixedLength:
        costs = PassCosts(dict(enumerate(H100[: MAX_BRANCHES + 1], 1)))
        stats = DraftModelStats(DraftCosts(step, 0.0), rows=RowCosts(rows))
        return FixedLength([drafter], LENGTH, costs=costs, models={drafter.name: stats})

    each = Scenario(machine=machine, acceptance=chance, num_tokens=num_tokens)
    return run(each, schedule, virtual_devices(), policy_of).tokens_per_second * machine.target_s


@pytest.mark.parametrize(("step", "chance"), [(0.62, 1.0), (0.3, 0.8)])
def test_a_drafter_whose_rows_are_dear_prepares_no_other_outcomes(step: float, chance: float) -> None:
    """On the card hedging was 0.58 of the sequence: a step of the CPU ran 25 rows, as though they cost nothing."""
    speeds = [
        fixed_speed(schedule, step=step, row=0.18, chance=chance, num_tokens=200)
        for schedule in ("serial", "pipelined", "hedged")
    ]
    assert speeds[2] >= 0.98 * speeds[1] > speeds[0]


@pytest.mark.slow
def test_a_drafter_whose_rows_cost_nothing_prepares_other_outcomes() -> None:
    pipelined, hedged = (
        fixed_speed(schedule, step=0.3, row=0.0, chance=0.8, num_tokens=300)
        for schedule in ("pipelined", "hedged")
    )
    assert hedged >= 1.2 * pipelined
