"""How far two lanes slow each other down is learned while they work, and decides when they do; in virtual time."""

from math import inf

import numpy as np
import pytest

from edgespec.decoding.sampling import GumbelSampler, SamplingParams
from edgespec.decoding.scheduler import speculative_decode
from edgespec.draft.acceptance_rates import AcceptanceRates
from edgespec.draft.costs import PassCosts
from edgespec.draft.draft_model import DraftCosts, DraftModelStats, split_surprise
from edgespec.draft.lane_drafter import LaneDrafter
from edgespec.draft.measured import MeasuredPolicy
from edgespec.draft.model_drafter import ModelDrafter
from edgespec.simulation.schedules import VirtualLane
from edgespec.simulation.synthetic import VOCAB_SIZE, PacedDecoder, synthetic_drafter, synthetic_target
from edgespec.system.clock import VirtualClock
from edgespec.types import append

WIDTHS = {width: 1 + 0.03 * (width - 1) for width in range(1, 26)}


class SharedMachine:
    """Two devices of which each is slower while the other works; a pass of one token takes a second alone."""

    def __init__(
        self, true: tuple[float, float], known: tuple[float, float], step: float, chance: float = 0.8
    ) -> None:
        self.true, self.clock, own = true, VirtualClock(), VirtualClock()
        self.lane = VirtualLane("drafter", self.clock, own)
        self._pass = (0.0, 0.0)

        def verify_s(num_fed: int, num_rows: int) -> float:
            begun, left = self.clock.now, WIDTHS[num_rows]
            self._pass = (begun, inf)
            while left > 1e-9:  # from the end of a draft step to that of the next one
                if self.lane.is_over:
                    self.clock.now, left = self.clock.now + left, 0.0
                else:
                    span = min(left * self.true[0], own.now - self.clock.now)
                    self.clock.now, left = self.clock.now + span, left - span / self.true[0]
            ended, self.clock.now = self.clock.now, begun
            self._pass = (begun, ended)
            return ended - begun

        def draft_s(num_fed: int, num_rows: int) -> float:
            begun, ended = self._pass
            return step * (self.true[1] if begun <= own.now < ended else 1.0)

        self.target = PacedDecoder(synthetic_target(), verify_s, self.clock)
        decoder = PacedDecoder(synthetic_drafter(chance), draft_s, own)
        self.stats = DraftModelStats(DraftCosts(step, 0.0), known)
        drafter = LaneDrafter(ModelDrafter(decoder, VOCAB_SIZE), self.lane, can_run_ahead=True)
        rates = AcceptanceRates({("model", -1): (50 * chance, 50.0)})
        self.policy = MeasuredPolicy(
            [drafter], PassCosts(dict(WIDTHS), 1.0), rates, {"model": self.stats}, clock=self.clock
        )
        self._tokens = np.zeros(1, np.int32)

    def speed(self, num_tokens: int) -> float:
        """Tokens a second of the next so many; 1 is plain decoding."""
        started, first = self.clock.now, len(self._tokens)
        blocks = speculative_decode(
            self._tokens, self.target, GumbelSampler(SamplingParams()), self.policy, clock=self.clock
        )
        while len(self._tokens) < first + num_tokens:
            self._tokens = append(self._tokens, next(blocks).tokens)
        blocks.close()
        return (len(self._tokens) - first) / (self.clock.now - started)


@pytest.mark.parametrize("true", [(1.15, 1.3), (1.4, 1.1), (1.0, 1.5)])
def test_contention_is_told_from_a_slow_machine(true: tuple[float, float]) -> None:
    machine = SharedMachine(true, (1.0, 1.0), 0.2)
    machine.speed(600)
    verify, draft = machine.stats.contention
    assert (verify, draft) == (pytest.approx(true[0], rel=0.07), pytest.approx(true[1], rel=0.12))
    assert machine.policy.costs.step_s == pytest.approx(1.0, rel=0.05), "alone it is as fast as ever"
    assert machine.stats.costs.step == pytest.approx(0.2, rel=0.1)


@pytest.mark.slow
def test_contention_that_goes_away_is_forgotten() -> None:
    machine = SharedMachine((1.0, 1.0), (1.6, 1.6), 0.2)
    machine.speed(1200)
    assert max(machine.stats.contention) < 1.1
    assert machine.speed(300) > 0.95 * SharedMachine((1.0, 1.0), (1.0, 1.0), 0.2).speed(600)


@pytest.mark.slow
@pytest.mark.parametrize("true", [(2.0, 2.0), (3.0, 1.2), (1.2, 4.0)])
def test_lanes_that_hinder_each_other_soon_work_in_turn(true: tuple[float, float]) -> None:
    """Nobody knew; a machine on which both are known to hinder each other shows what in turn yields."""
    speeds = []
    for known in (true, (1.0, 1.0)):
        machine = SharedMachine(true, known, 0.3)
        machine.speed(300)
        speeds.append(machine.speed(600))
    assert speeds[1] > 0.96 * speeds[0]
    assert speeds[0] > 1.2


@pytest.mark.parametrize("true", [(1.5, 1.5), (3.0, 3.0)])
def test_a_useless_drafter_beside_a_target_that_it_hinders_costs_next_to_nothing(
    true: tuple[float, float],
) -> None:
    assert SharedMachine(true, (1.0, 1.0), 0.3, chance=0.05).speed(600) > 0.97


def test_what_is_seen_alone_and_beside_is_kept_apart() -> None:
    alone, beside = split_surprise(1.2, 0.0, 1.5), split_surprise(1.2, 1.0, 1.5)
    assert alone[0] == pytest.approx(1.2)
    assert alone[1] < 1.5 < beside[1]
    assert beside[0] * beside[1] == pytest.approx(1.2 * 1.5), "a step beside the target took so much"
    assert split_surprise(0.8, 1.0, 1.0) == (pytest.approx(0.8), 1.0), "there is no contention to take away"
