import json
from dataclasses import asdict, replace
from threading import current_thread, get_ident, main_thread
from threading import enumerate as enumerate_threads
from time import sleep
from typing import Any

import numpy as np
import pytest
from msgspec import ValidationError, convert
from table_decoder import TableDecoder

from edgespec.decoding.decoder import Cache
from edgespec.setup import measure
from edgespec.setup.measure import complete_profile, measure_contention, profile_drafter, profile_target
from edgespec.setup.profile import DrafterProfile, LearnedStats, Profile
from edgespec.simulation.synthetic import HeldTokens
from edgespec.types import Logits, TokenIds

PROFILE = Profile(
    passes_s={64: {1: 0.02, 3: 0.04}, 1064: {1: 0.03, 3: 0.06}},
    prefill_s=0.005,
    drafters={"d": DrafterProfile(step_s=0.004, row_s=0.001, branches={1: 1.0, 2: 1.5}, slowed=(1.5, 2.0))},
)


class LaneClock:
    """A clock that only sleep() moves on, for all threads or for each alone, as if none slowed another."""

    def __init__(self) -> None:
        self.is_shared = True
        self._now: dict[int, float] = {}

    def __call__(self) -> float:
        return self._now.get(self._thread, 0.0)

    def sleep(self, seconds: float) -> None:
        self._now[self._thread] = self() + seconds

    @property
    def _thread(self) -> int:
        return 0 if self.is_shared else get_ident()


clock = LaneClock()


@pytest.fixture
def virtual_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured does not depend on how busy the machine is."""
    monkeypatch.setattr(measure, "perf_counter", clock)
    monkeypatch.setattr(clock, "is_shared", True)


@pytest.fixture
def one_lane(virtual_time: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Virtual time, in which two models at once slow each other by nothing: one clock cannot time both."""
    monkeypatch.setattr(measure, "measure_contention", lambda drafter, target: (1.0, 1.0))


class Slow(TableDecoder):
    """Takes as long for each new token as step_s says, whatever else runs."""

    step_s = 0.002
    error: Exception | None = None

    def logits(self, tokens: TokenIds, num_last: int) -> Logits:
        fed = self.num_fed
        rows = super().logits(tokens, num_last)
        if self.error is not None and current_thread() is not main_thread():
            raise self.error
        clock.sleep(min(self.num_fed - fed, 8) * self.step_s)
        return rows


class Timed(TableDecoder, Cache):
    """Takes 1 ms, 0.2 ms for each token of a pass and 0.5 µs for each that is held before it; can pretend."""

    def logits(self, tokens: TokenIds, num_last: int) -> Logits:
        fed = self.num_fed
        rows = super().logits(tokens, num_last)
        width = self.num_fed - fed
        clock.sleep(1e-3 + width * (2e-4 + 5e-7 * (len(tokens) - width)))
        return rows

    @property
    def cache(self) -> Cache:
        return self

    def pretend(self, tokens: TokenIds) -> None:
        self._held = HeldTokens(self.num_fed, tokens)

    def forget(self) -> None:
        self._held = HeldTokens(self.num_fed)


@pytest.mark.usefixtures("virtual_time")
def test_passes_are_measured_behind_a_short_and_a_long_text_and_nothing_is_held_afterwards() -> None:
    decoder = Timed(97, seed=0, context_length=3000)
    found = profile_target(decoder)
    assert {past: list(taken) for past, taken in found.passes_s.items()} == {
        128: [1, 2, 4, 8, 16, 32], 2968: [1, 2, 4, 16, 32],
    }  # fmt: skip
    assert found.pass_s(16, 2968) - found.pass_s(16, 128) == pytest.approx(16 * 2840 * 5e-7)
    assert found.pass_s(8, 1548) - found.pass_s(8, 128) == pytest.approx(8 * 1420 * 5e-7)
    assert decoder.num_fed < 1000
    before = decoder.num_fed
    decoder.logits(np.arange(50, dtype=np.int32), 1)
    assert decoder.num_fed - before == 50


class Mixed(Timed):
    """Takes 1 ms for each expert that a pass reads: by its token, every token has one of 64."""

    def logits(self, tokens: TokenIds, num_last: int) -> Logits:
        fed = self.num_fed
        rows = TableDecoder.logits(self, tokens, num_last)
        clock.sleep(
            1e-3 * len({token * 37 % 64 for token in tokens[len(tokens) - (self.num_fed - fed) :].tolist()})
        )
        return rows


@pytest.mark.usefixtures("virtual_time")
def test_rows_of_a_mixture_cost_what_their_experts_cost_together() -> None:
    found = profile_target(Mixed(997, seed=0, context_length=3000))
    taken = [found.pass_s(width, 128) / found.pass_s(1, 128) for width in (1, 2, 4, 8, 16, 32)]
    assert taken == pytest.approx([1, 2, 4, 8, 16, 32])


def test_passes_between_and_beyond_what_was_measured_lie_on_a_line() -> None:
    taken = [PROFILE.pass_s(width, past) for width, past in ((1, 0), (1, 64), (2, 64), (1, 564), (3, 2064))]
    assert taken == pytest.approx([0.02, 0.02, 0.03, 0.025, 0.08])


def test_draft_costs_are_in_steps_of_the_target() -> None:
    costs = PROFILE.draft_costs("d")
    assert (costs.step, costs.row) == pytest.approx((0.2, 0.05))


def test_a_session_that_ends_later_keeps_the_drafters_that_another_has_measured() -> None:
    stats = LearnedStats().with_profile("machine", PROFILE, {}, None)
    assert stats.with_profile("machine", replace(PROFILE, drafters={}), {}, None).profiles["machine"] == PROFILE


def test_what_is_written_as_json_is_read_again() -> None:
    assert convert(json.loads(json.dumps(asdict(PROFILE))), Profile, strict=False) == PROFILE


@pytest.mark.parametrize(
    "damage",
    [
        {"passes_s": {}},
        {"passes_s": {"64": {"2": 0.1}}},
        {"passes_s": {"64": {"1": -1}}},
        {"passes_s": {"64": {"1": float("nan")}}},
        {"passes_s": {"-1": {"1": 0.1}}},
        {"passes_s": {"64": {str(width): 0.1 for width in range(1, 100)}}},
        {"passes_s": {"64": {"1": 0.1, "1e400": 0.1}}},
        {"passes_s": [1]},
        {"prefill_s": "fast"},
        {"prefill_s": 0},
        {"prefill_s": float("inf")},
        {"transfer_s": -1.0},
        {"drafters": {"d": {}}},
        {"drafters": {"d": {"step_s": 0, "row_s": 0, "branches": {"1": 1}, "slowed": [1, 1]}}},
        {"drafters": {"d": {"step_s": 1, "row_s": 0, "branches": {"2": 1}, "slowed": [1, 1]}}},
        {"drafters": {"d": {"step_s": 1, "row_s": 0, "branches": {"1": 1}, "slowed": [0.5, 1]}}},
        {"drafters": {"d": {"step_s": 1, "row_s": 0, "branches": {"1": 1}, "slowed": [1]}}},
    ],
)
def test_damage_is_refused(damage: dict[str, Any]) -> None:
    stated = json.loads(json.dumps({**asdict(PROFILE), **damage}))
    with pytest.raises(ValidationError):
        convert(stated, Profile, strict=False)


@pytest.mark.parametrize("context_length", [1, 2, 9, 150])
def test_any_context_can_be_profiled(context_length: int) -> None:
    target, drafter = (TableDecoder(5, seed=i, context_length=context_length) for i in range(2))
    profile = complete_profile(None, target, {"d": drafter})
    assert convert(json.loads(json.dumps(asdict(profile))), Profile, strict=False) == profile
    assert all(list(taken) == sorted(taken) and taken[1] > 0 for taken in profile.passes_s.values())


@pytest.mark.usefixtures("virtual_time")
def test_lanes_that_sleep_do_not_slow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "is_shared", False)
    assert measure_contention(Slow(7, seed=0), Slow(7, seed=1)) == pytest.approx((1.0, 1.0))


def test_lanes_that_share_one_worker_slow_each_other() -> None:
    """One lock that both hold while they work, as two models on one core would."""
    from threading import Lock

    lock = Lock()

    class Shared(Slow):
        def logits(self, tokens: TokenIds, num_last: int) -> Logits:
            with lock:
                rows = super().logits(tokens, num_last)
                sleep(0.004)
            sleep(0)
            return rows

    verify, draft = measure_contention(Shared(7, seed=0), Shared(7, seed=1))
    assert verify * draft > 1.2


def test_drafter_that_fails_beside_the_target_raises_and_leaves_no_thread() -> None:
    target, drafter = Slow(7, seed=0), Slow(7, seed=1)
    drafter.error = RuntimeError("gone")
    before = set(enumerate_threads())
    with pytest.raises(RuntimeError, match="gone"):
        measure_contention(drafter, target)
    assert set(enumerate_threads()) <= before


@pytest.mark.usefixtures("one_lane")
def test_drafter_is_measured_in_the_same_unit_as_its_target() -> None:
    target, drafter = Slow(7, seed=0), Slow(7, seed=1)
    target.step_s, drafter.step_s = 0.016, 0.008
    profile = Profile(passes_s={64: {1: 0.016}}, prefill_s=0.001)
    found = profile_drafter(drafter, target, profile)
    assert found.step_s == pytest.approx(0.008)
    assert found.branches[2] == pytest.approx(2.0)
    assert np.isfinite(found.row_s)
    assert replace(profile, drafters={"d": found}).draft_costs("d").step == pytest.approx(0.5)


@pytest.mark.usefixtures("one_lane")
def test_reading_is_measured_on_texts_of_which_nothing_is_held() -> None:
    target, drafter = Slow(97, seed=0), Slow(97, seed=1)
    found = profile_drafter(drafter, target, Profile(passes_s={64: {1: 0.002}}, prefill_s=0.001))
    # Slow takes as long for 8 tokens as for more: 7 steps more for the 31 that are read before the last.
    assert found.row_s == pytest.approx(7 * 0.002 / 31)
