"""Plans from made-up profiles: no device is known by its name, only by what was measured of it."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from made_up import DRAFTER, FREE_BRANCHES, PLENTY, SERIAL_BRANCHES, TARGET, kept, layout, manifest

from edgespec.draft.acceptance_rates import AcceptanceRates
from edgespec.draft.costs import PassCosts
from edgespec.draft.draft_model import HOPE
from edgespec.draft.limits import MAX_PLANNED_TOKENS
from edgespec.draft.model_rates import alternatives_key
from edgespec.draft.overlap import best_pipelined, best_serial, pipelined_rate, serial_rate
from edgespec.errors import MemoryExhausted
from edgespec.manifest import Head, Manifest
from edgespec.setup.planner import (
    Layout,
    MemoryNeeds,
    Plan,
    PlannedOption,
    branching_cost,
    decide,
    draft_rates,
    is_counted,
    plan_on,
    schedule_of,
    shortage,
    weigh,
)
from edgespec.setup.profile import DrafterProfile, Place, drafter_key
from edgespec.system.units import format_bytes

GPU, CPU = Place("gpu", 2), Place("cpu", 2)


def plan(*layouts: Layout, acceptance: float = 0.8, memory: MemoryNeeds = PLENTY) -> Plan:
    return decide(weigh(TARGET, {"drafter": DRAFTER}, layouts, kept(acceptance), memory))


def refused(found: Plan, schedule: str, target: Place) -> PlannedOption:
    return next(option for option in found.refused if (option.schedule, option.target) == (schedule, target))


def test_drafter_on_a_device_of_its_own_is_overlapped() -> None:
    found = plan(layout(GPU, CPU))
    assert (found.chosen.schedule, found.chosen.target, found.chosen.drafter_place) == ("pipelined", GPU, CPU)
    assert found.chosen.tokens_per_second > 1.15 * refused(found, "serial", GPU).tokens_per_second
    assert found.drafters == ("drafter", "suffix")
    assert schedule_of(found) == "pipelined"


def test_reason_names_the_devices_that_were_compared() -> None:
    alone = [Layout(place, layout(place, CPU, step_ms=ms).profile) for place, ms in ((GPU, 20.0), (CPU, 40.0))]

    def reason(*layouts: Layout, on: Place = GPU, obstacle: str = "") -> str:
        weighed = weigh(TARGET, {}, layouts, {}, PLENTY)
        marked = [(case, replace(each, obstacle=obstacle * (each.target == on))) for case, each in weighed]
        return decide(marked).chosen.reason

    assert reason(*alone) == "gpu is faster than the CPU (25.0 tokens/s, measured)"
    assert reason(alone[0]) == "the speed without a drafter model, as none is named"
    guessed = alone[1]._replace(is_measured=False)
    assert reason(alone[0], guessed) == "gpu is faster than the CPU (about 25.0 tokens/s, estimated)"
    emulated = "gpu is emulated in software"
    assert reason(*alone, obstacle=emulated) == emulated
    slow = reason(alone[0], guessed, on=CPU, obstacle="it does not run here")
    assert slow.endswith("estimated); it does not run here")
    with_drafter = plan(layout(GPU, CPU), layout(CPU, CPU, step_ms=40.0)).chosen.reason
    assert with_drafter.startswith("gpu is faster than the CPU (")
    assert with_drafter.endswith(" times plain decoding")


def test_one_processor_on_which_both_slow_each_other_is_not_overlapped() -> None:
    both = layout(CPU, CPU, slowed=(1.9, 2.0))
    one, other = Place("cpu", 1), Place("cpu", 1)
    split = layout(one, other, step_ms=40.0, draft=0.15, slowed=(1.1, 1.4))
    found = plan(both, split)
    assert (found.chosen.schedule, found.chosen.target) == ("serial", CPU)
    assert "passes take 1.90 and draft steps 2.00 times as long" in refused(found, "pipelined", CPU).reason
    assert re.fullmatch(r"drafts make it 1\.\d\d times as fast", refused(found, "plain", CPU).reason)
    assert "takes the target 40.0 ms there" in refused(found, "pipelined", one).reason


def test_one_processor_on_which_lanes_do_not_disturb_each_other_is_overlapped() -> None:
    """Has the places of the test above: only the measured figures decide."""
    one = Place("cpu", 1)
    both = layout(CPU, CPU, slowed=(1.9, 2.0))
    split = layout(one, one, step_ms=21.0, slowed=(1.0, 1.05))
    found = plan(both, split)
    assert (found.chosen.schedule, found.chosen.target) == ("pipelined", one)


def test_drafter_whose_branches_are_free_hedges() -> None:
    found = plan(layout(GPU, CPU, draft=0.3, branches=FREE_BRANCHES))
    assert found.chosen.schedule == "hedged"
    assert plan(layout(GPU, CPU, draft=0.3)).chosen.schedule == "pipelined"


@pytest.mark.parametrize("unable", [replace(DRAFTER, tree_graph=None), replace(DRAFTER, vocab_sha256="another")])
def test_drafter_that_cannot_run_branches_is_not_made_to_hedge(unable: Manifest) -> None:
    where = layout(GPU, CPU, draft=0.3, branches=FREE_BRANCHES)
    found = decide(weigh(TARGET, {"drafter": unable}, [where], kept(0.8), PLENTY))
    assert found.chosen.schedule == "pipelined"
    assert refused(found, "hedged", GPU).reason.startswith("drafter has ")


@pytest.mark.parametrize("slowed", [(1.0, 1.0), (1.9, 2.0)])
@pytest.mark.parametrize("branches", [SERIAL_BRANCHES, FREE_BRANCHES])
@pytest.mark.parametrize("acceptance", [0.05, 0.8])
def test_schedule_of_models_in_their_places_is_that_of_the_plan(
    slowed: tuple[float, float], branches: dict[int, float], acceptance: float
) -> None:
    where = layout(GPU, CPU, row=0.25, draft=0.3, slowed=slowed, branches=branches)
    found = schedule_of(plan_on([where], TARGET, DRAFTER, kept(acceptance)))
    assert found == schedule_of(plan(where, acceptance=acceptance))


@pytest.mark.parametrize(("draft", "acceptance"), [(0.9, 0.3), (0.3, 0.05), (3.0, 0.7)])
def test_drafter_that_is_of_no_use_leaves_plain_decoding(draft: float, acceptance: float) -> None:
    found = plan(layout(GPU, CPU, row=0.25, draft=draft, slowed=(1.3, 1.3)), acceptance=acceptance)
    assert (found.chosen.schedule, found.chosen.drafter, found.drafters) == ("plain", None, ("suffix",))
    assert found.chosen.tokens_per_second == pytest.approx(50.0)
    assert schedule_of(found) == "serial"  # in which what drafts from the text is heard
    assert "a drafted token takes" in refused(found, "serial", GPU).reason


def test_drafts_are_planned_no_longer_than_a_head_can_give() -> None:
    steps = Head(
        method="medusa",
        kind="steps",
        target_layers=(2,),
        target_hidden_size=64,
        state_size=64,
        step_graphs=("step_0.onnx", "step_1.onnx"),
    )
    head = replace(DRAFTER, head=steps, tree_graph=None)
    lengths = []
    for drafter in (DRAFTER, head):
        found = decide(weigh(TARGET, {"drafter": drafter}, [layout(GPU, CPU, draft=0.01)], kept(0.9), PLENTY))
        options = [found.chosen, *found.refused]
        lengths.append(max(option.draft_length for option in options if option.drafter == "drafter"))
    assert lengths[0] > 2 == lengths[1]


def test_gain_within_the_error_of_measurement_goes_to_the_simpler_schedule() -> None:
    chances = draft_rates(kept(0.8), "drafter").accepted
    ratio = PassCosts({1: 1.0, 2: 1.03, 32: 1.93}).ratio
    serial = best_serial(chances, lambda num_draft: ratio(num_draft + 1), 0.05, MAX_PLANNED_TOKENS).rate
    for slowed in (1.0, 1.02, 1.04, 1.06, 1.08, 1.1):
        found = plan(layout(GPU, CPU, draft=0.05, slowed=(slowed, slowed)))
        overlapped = best_pipelined(
            chances, lambda n: ratio(n + 1), 0.05, MAX_PLANNED_TOKENS, (slowed, slowed)
        ).rate
        assert found.chosen.schedule == ("pipelined" if overlapped > 1.03 * serial else "serial")


def test_rates_are_those_of_the_closed_forms() -> None:
    where = layout(GPU, CPU, slowed=(1.2, 1.3))
    found = plan(where)
    chances = draft_rates(kept(0.8), "drafter").accepted

    def ratio(num_draft: int) -> float:
        return where.profile.pass_s(num_draft + 1, 64) / where.profile.pass_s(1, 64)

    def rate(option: PlannedOption) -> float:
        length = option.draft_length
        match option.schedule:
            case "serial":
                return serial_rate(chances, ratio, 0.2, length)
            case "pipelined":
                return pipelined_rate(chances, ratio, 0.2, option.wait, length, (1.2, 1.3))
            case "hedged":
                cost = branching_cost(where.profile.drafters[drafter_key("drafter", CPU)])
                found = (min(4 / 6, cost.coverage), MAX_PLANNED_TOKENS)
                return pipelined_rate(chances, ratio, 0.2, option.wait, length, (1.2, 1.3 * cost.step), found)
        return 1.0

    options = (found.chosen, *found.refused)
    assert len({option.schedule for option in options}) == 4
    for option in options:
        assert option.tokens_per_second == pytest.approx(50.0 * rate(option)), option


def test_alternatives_are_drafted_as_far_as_their_rows_pay() -> None:
    one_by_one = DrafterProfile(step_s=1.0, row_s=0.0, branches={1: 1.0, 2: 2.0})
    assert branching_cost(one_by_one) == (1.0, 0.0)
    free = branching_cost(replace(one_by_one, branches=FREE_BRANCHES))
    assert free == (1.0, pytest.approx(1.0, abs=0.001))
    cheap = branching_cost(replace(one_by_one, branches={1: 1.0, 2: 1.2}))
    assert 1.0 < cheap.step < 4
    assert 0.3 < cheap.coverage < 0.95


def test_outcomes_that_were_never_prepared_in_time_do_not_pay() -> None:
    where = layout(GPU, CPU, draft=0.3, branches=FREE_BRANCHES)
    past = kept(0.8) | {(alternatives_key("drafter"), 0): (1.0, 1e6)}
    assert decide(weigh(TARGET, {"drafter": DRAFTER}, [where], past, PLENTY)).chosen.schedule == "pipelined"


@pytest.mark.parametrize("free", [280 << 20, (280 << 20) - 1, (279 << 20) + 1, 0, -1])
def test_a_shortage_is_told_in_figures_that_differ(free: int) -> None:
    words = shortage({"cpu": (280 << 20) + 1}, {"cpu": free}, 1280)
    left = format_bytes(max(0, free) // 10**6 * 10**6)
    assert words == f"a context of 1280 tokens needs 294 MB of cpu memory, and {left} are free"
    assert left != "294 MB"


def test_memory_decides_before_speed() -> None:
    few = MemoryNeeds(lambda model, context, device: {device: 1000 + context}, {"gpu": 10**6, "cpu": 3000})
    found = plan(layout(GPU, CPU), memory=few)
    assert found.chosen.schedule == "plain"
    assert "1 MB of cpu memory" in refused(found, "pipelined", GPU).reason
    assert refused(found, "pipelined", GPU).context_length == 0
    assert found.downgrades == (
        "no drafter beside target: a context of 4096 tokens needs 1 MB of cpu memory, and 0 bytes are free",
    )


@pytest.mark.parametrize(
    ("longest", "free", "context"),
    [
        (8192, 9192, 8192), (8192, 9191, 7936), (8192, 2100, 1024), (40960, 41959, 40704), (700, 1700, 700),
        (1, 1001, 1),
    ],
)  # fmt: skip
def test_context_is_the_longest_that_fits(longest: int, free: int, context: int) -> None:
    memory = MemoryNeeds(PLENTY.needed, {"gpu": free, "cpu": 0})
    where = layout(GPU, CPU)._replace(drafter=None)
    found = decide(weigh(replace(TARGET, context_length=longest), {}, [where], {}, memory))
    assert (found.chosen.context_length, found.chosen.memory_bytes) == (context, 1000 + context)
    told = [f"{context} tokens, not {longest}: "] if context < longest else []
    assert [line.split("a context of ")[1] for line in found.downgrades] == told


def test_both_on_one_device_share_its_memory() -> None:
    free = {"gpu": 2 * (1000 + 8192)}
    assert plan(layout(GPU, GPU), memory=MemoryNeeds(PLENTY.needed, free)).chosen.context_length == 8192
    free["gpu"] -= 1
    assert plan(layout(GPU, GPU), memory=MemoryNeeds(PLENTY.needed, free)).chosen.context_length == 7936


def test_target_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(MemoryExhausted, match="target does not fit"):
        plan(layout(GPU, CPU), memory=MemoryNeeds(PLENTY.needed, {"gpu": 1000, "cpu": 10**6}))


def test_draft_rates_a_drafter_that_never_drafted_are_assumed() -> None:
    assert draft_rates({}, "drafter").accepted == pytest.approx([2 / 3] * MAX_PLANNED_TOKENS)
    assert not is_counted({("suffix", 1): (1.0, 2.0)}, "drafter")
    assert is_counted(kept(0.5), "drafter")
    assert draft_rates(kept(0.5), "drafter").accepted == pytest.approx([0.5] * MAX_PLANNED_TOKENS)


def test_what_is_hoped_of_a_drafter_is_not_counted_until_it_has_drafted() -> None:
    chances = AcceptanceRates()
    chances.assume("drafter", HOPE)
    assert chances.rate("drafter", 0) == pytest.approx(2 / 3)
    assert not is_counted(chances.snapshot(), "drafter")
    chances.observe("drafter", 0, is_accepted=True)
    assert is_counted(chances.snapshot(), "drafter")
    assert chances.snapshot()["drafter", -1] == pytest.approx((4 * 0.998 + 1, 6 * 0.998 + 1))


def test_best_of_several_drafters_and_the_order_of_layouts_does_not_matter() -> None:
    first = layout(GPU, CPU)
    small = DrafterProfile(step_s=0.001, row_s=0.0)
    profile = replace(first.profile, drafters={**first.profile.drafters, drafter_key("small", CPU): small})
    layouts = [Layout(GPU, profile, name, CPU) for name in ("drafter", "small")]
    past = {**kept(0.8), **{("small", evidence): counts for (_, evidence), counts in kept(0.75).items()}}
    drafters = {"drafter": DRAFTER, "small": manifest("small")}
    found = decide(weigh(TARGET, drafters, layouts, past, PLENTY))
    assert found.chosen.drafter == "small"
    assert decide(weigh(TARGET, drafters, layouts[::-1], past, PLENTY)) == found


def test_planner_imports_nothing_that_runs() -> None:
    source = (Path(__file__).parents[2] / "edgespec" / "setup" / "planner.py").read_text()
    assert "runtimes" not in source
    assert "perf_counter" not in source
