"""The search over devices, on made-up rates: what is measured, and that the best that was measured is chosen."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up import DRAFTER, PLENTY, TARGET, kept, layout

from edgespec.errors import MemoryExhausted
from edgespec.memory.estimate import MemoryNeeds
from edgespec.setup.device_search import Refusal, Where, search
from edgespec.setup.planner import Plan, Weighed, weigh
from edgespec.setup.profile import Place

CPU, GPU, NPU = Where("cpu", "cpu"), Where("gpu", "cpu"), Where("npu", "cpu")
EMULATOR = "no real one"


@dataclass
class Machine:
    """Milliseconds of a pass where the target runs: as foreseen, and as they will be measured."""

    foreseen_ms: Mapping[Where, float]
    measured_ms: Mapping[Where, float | Refusal]
    emulators: Sequence[Where] = ()
    memory: MemoryNeeds = PLENTY
    measured: list[Where] = field(default_factory=list)

    def foresee(self, where: Where) -> list[Weighed]:
        return self._weigh(where, self.foreseen_ms[where], is_measured=False)

    def measure(self, where: Where) -> list[Weighed] | Refusal:
        self.measured.append(where)
        found = self.measured_ms[where]
        return found if isinstance(found, Refusal) else self._weigh(where, found, is_measured=True)

    def _weigh(self, where: Where, step_ms: float, *, is_measured: bool) -> list[Weighed]:
        made = layout(Place(where.device, 2), Place(where.drafter_device, 2), step_ms=step_ms, draft=4 / step_ms)
        made = made._replace(is_measured=is_measured)
        found = weigh(TARGET, {"drafter": DRAFTER}, [made], kept(0.8), self.memory)
        if where not in self.emulators:
            return found
        return [(case, replace(option, obstacle=EMULATOR)) for case, option in found]

    def search(self, *wanted: Where) -> Plan:
        plan = search(list(self.foreseen_ms), self.foresee, self.measure, wanted.__contains__)
        assert plan is not None
        return plan


def test_only_what_is_within_reach_of_the_best_is_measured() -> None:
    machine = Machine({CPU: 40, GPU: 5, NPU: 6}, {GPU: 6, NPU: 9})
    plan = machine.search()
    assert machine.measured == [GPU, NPU]
    assert (plan.chosen.target.device, plan.chosen.is_measured) == ("gpu", True)
    assert plan.chosen.schedule in ("pipelined", "hedged")
    (cpu,) = [option for option in plan.refused if (option.target.device, option.schedule) == ("cpu", "plain")]
    assert not cpu.is_measured


def test_device_that_disappoints_makes_the_next_one_worth_measuring() -> None:
    machine = Machine({CPU: 40, GPU: 5}, {GPU: 100, CPU: 38})
    assert machine.search().chosen.target.device == "cpu"
    assert machine.measured == [GPU, CPU]


@pytest.mark.slow
@given(
    foreseen=st.lists(st.floats(1, 100), min_size=3, max_size=3),
    measured=st.lists(st.floats(1, 100), min_size=3, max_size=3),
)
def test_chosen_is_the_best_that_was_measured_and_nothing_in_reach_is_left(
    foreseen: list[float], measured: list[float]
) -> None:
    names = [CPU, GPU, NPU]
    machine = Machine(dict(zip(names, foreseen, strict=True)), dict(zip(names, measured, strict=True)))
    plan = machine.search()
    assert plan.chosen.is_measured
    rates = {option.target.device: 0.0 for option in plan.options}
    for option in plan.options:
        rates[option.target.device] = max(rates[option.target.device], option.tokens_per_second)
    chosen = plan.chosen.tokens_per_second
    for where in names:
        bound = 1.031 if where in machine.measured else 0.7
        assert rates[where.device] <= bound * chosen


def test_emulator_is_measured_where_that_is_wanted_and_never_chosen() -> None:
    machine = Machine({CPU: 40, GPU: 5}, {CPU: 41, GPU: 4}, emulators=[GPU])
    assert machine.search().chosen.target.device == "cpu"
    assert machine.measured == [CPU]
    plan = machine.search(GPU)
    assert machine.measured == [CPU, CPU, GPU]
    assert plan.chosen.target.device == "cpu"
    there = [option for option in plan.refused if option.target.device == "gpu"]
    assert all(option.reason.startswith(EMULATOR) and option.is_measured for option in there)


def test_what_becomes_wanted_while_another_placement_is_measured_is_measured_too() -> None:
    """A drafter that is prepared for one placement is there for others."""
    machine = Machine({CPU: 5, GPU: 40}, {CPU: 5, GPU: 30})

    def is_wanted(where: Where) -> bool:
        return where == GPU and CPU in machine.measured

    plan = search([CPU, GPU], machine.foresee, machine.measure, is_wanted)
    assert plan is not None
    assert all(option.is_measured for option in plan.options)
    assert machine.measured == [CPU, GPU]


def test_device_that_does_not_run_the_model_gives_way_with_its_reason() -> None:
    refusal = Refusal("gpu", None, "no kernel here")
    machine = Machine({CPU: 40, GPU: 5, Where("gpu", "gpu"): 5}, {GPU: refusal, CPU: 38})
    plan = machine.search()
    assert (plan.chosen.target.device, machine.measured) == ("cpu", [GPU, CPU])
    there = [option for option in plan.refused if option.target.device == "gpu"]
    assert {option.reason.split(";")[0] for option in there} == {"no kernel here"}


def test_drafters_device_that_fails_leaves_the_targets() -> None:
    both = Where("gpu", "gpu")
    refusal = Refusal(None, "gpu", "no kernel here")
    machine = Machine({both: 5, GPU: 6}, {both: refusal, GPU: 6})
    plan = machine.search()
    assert machine.measured == [both, GPU]
    assert plan.chosen.drafter_place is not None
    assert (plan.chosen.target.device, plan.chosen.drafter_place.device) == ("gpu", "cpu")


def test_drafters_device_that_promises_little_is_left_alone_though_its_target_is_the_best() -> None:
    """Plain decoding is the same beside a drafter on any device: it was measured once."""
    beside = Where("gpu", "npu")
    plain = Machine({GPU: 5, beside: 5}, {GPU: 5})

    def foresee(where: Where) -> list[Weighed]:
        found = plain.foresee(where)
        if where not in plain.measured and GPU not in plain.measured:
            return found
        measured = plain._weigh(GPU, 5, is_measured=True)[:1]
        rate = measured[0][1].tokens_per_second
        slow = [(case, replace(option, tokens_per_second=1.01 * rate)) for case, option in found[1:]]
        return [*measured, *slow]

    plan = search([GPU, beside], foresee, plain.measure)
    assert plan is not None
    assert (plan.chosen.target.device, plain.measured) == ("gpu", [GPU])


def test_no_placement_that_runs_the_models_gives_no_plan() -> None:
    both = Where("gpu", "gpu")
    machine = Machine({both: 5, GPU: 6}, dict.fromkeys((both, GPU), Refusal("gpu", None, "no kernel here")))
    assert search([both, GPU], machine.foresee, machine.measure) is None
    assert search([], machine.foresee, machine.measure) is None


def test_shortage_is_told_of_the_device_that_has_it() -> None:
    refusal = Refusal("gpu", None, "no kernel here")
    machine = Machine({GPU: 5, CPU: 40}, {GPU: refusal}, memory=PLENTY._replace(free_bytes={"cpu": 100}))
    with pytest.raises(MemoryExhausted, match="of cpu memory"):
        machine.search()


def test_device_without_room_for_the_model_is_refused_for_its_memory() -> None:
    small = PLENTY._replace(free_bytes={"gpu": 100, "cpu": 10**6})
    machine = Machine({CPU: 40, GPU: 5}, {CPU: 41}, memory=small)
    plan = machine.search()
    assert (plan.chosen.target.device, machine.measured) == ("cpu", [CPU])
    reasons = {option.reason for option in plan.refused if option.target.device == "gpu"}
    assert all("of gpu memory" in reason for reason in reasons)


def test_model_for_which_no_device_has_room_is_an_error() -> None:
    none = PLENTY._replace(free_bytes={"gpu": 100, "cpu": 100})
    with pytest.raises(MemoryExhausted):
        Machine({CPU: 40, GPU: 5}, {}, memory=none).search()
