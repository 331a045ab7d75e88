import json
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from real_pace import real_devices

from edgespec.cli.main import main
from edgespec.simulation.machines import Machine
from edgespec.simulation.recording import RecordedRound, Recording
from edgespec.simulation.schedules import (
    SCHEDULES,
    Scenario,
    Speed,
    best_possible,
    simulate,
    virtual_devices,
)
from edgespec.simulation.schedules import run as run_one

pytestmark = pytest.mark.slow  # a module of many models or processes

DESKTOP = ["--target-ms", "82", "--acceptance", "0.54", "--draft-length", "3", "--verify-cost", "1,1.03,1.05,1.08"]


def scenario(step: float, acceptance: float, *, length: int | None = None, num_tokens: int = 1200) -> Scenario:
    machine = Machine(target_s=0.1, draft_s=0.1 * step, ratios=(1, 1.03))
    return Scenario(machine=machine, acceptance=acceptance, draft_length=length, num_tokens=num_tokens)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, dict[str, float]]:
    assert main(["simulate", *arguments, "--json"]) == 0
    document: dict[str, dict[str, float]] = json.loads(capsys.readouterr().out)
    return document


@pytest.mark.parametrize("kind", ["pipelined", "hedged"])
def test_a_small_gain_is_not_given_up_by_chance(kind: str) -> None:
    """One token yields 1.07 of plain decoding at the rows of an A100, and its drafter is unlucky at times."""
    machine = Machine(target_s=0.1, draft_s=0.002, ratios=(1, 1.19, 1.29, 1.39, 1.54))
    each = Scenario(machine=machine, acceptance=0.3, draft_length=1, num_tokens=1500)
    serial, found = (run_one(each, schedule, virtual_devices()).tokens_per_second for schedule in ("serial", kind))
    assert found >= 0.98 * serial


# Core Ultra 258V, 14B int4 on its GPU; three tokens are drafted in sequence by its CPU, then by its NPU.
@pytest.mark.slow
@pytest.mark.parametrize(("draft_s", "wanted", "within"), [(0.0094, 16.5, 0.05), (0.061, 7.1, 0.15)])
def test_a_published_desktop_is_reproduced(draft_s: float, wanted: float, within: float) -> None:
    machine = Machine(target_s=0.082, draft_s=draft_s, ratios=(1, 1.03, 1.05, 1.08))
    each = Scenario(machine=machine, acceptance=0.54, draft_length=3)
    plain, serial = (run_one(each, schedule, virtual_devices()) for schedule in ("plain", "serial"))
    assert plain == (pytest.approx(12.2, rel=0.01), 1.0)
    assert serial.tokens_per_second == pytest.approx(wanted, rel=within)
    assert serial.tokens_per_pass == pytest.approx(1 + 0.54 + 0.54**2 + 0.54**3, rel=0.04)


@pytest.mark.slow
def test_the_command_says_what_a_published_desktop_would_gain(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgespec.simulation.schedules.Scenario", partial(Scenario, num_tokens=1500))
    found = run(capsys, *DESKTOP, "--draft-ms", "9.4")
    plain, serial, pipelined, hedged = (found[name]["tokens_per_second"] for name in SCHEDULES)
    assert plain == pytest.approx(12.2, rel=0.01)
    assert serial == pytest.approx(16.5, rel=0.05)
    assert 1.03 * serial < pipelined
    assert 1.15 * serial < hedged < found["bound"]  # type: ignore[operator]


@pytest.mark.parametrize(("step", "acceptance", "length"), [(0.1, 0.8, 5), (0.3, 0.6, 2), (1.0, 0.9, 1)])
def test_drafts_in_sequence_yield_the_closed_form(step: float, acceptance: float, length: int) -> None:
    found = run_one(scenario(step, acceptance, length=length, num_tokens=4000), "serial", virtual_devices())
    total = sum(acceptance**i for i in range(length + 1))
    assert found.tokens_per_second == pytest.approx(10 * total / (1 + 0.03 * length + length * step), rel=0.04)


@pytest.mark.slow
@pytest.mark.parametrize(("step", "acceptance"), [(0.05, 0.9), (0.3, 0.8), (0.5, 0.6), (1.0, 0.3)])
def test_no_schedule_passes_the_bound(step: float, acceptance: float) -> None:
    each = scenario(step, acceptance)
    assert max(speed.tokens_per_second for speed in simulate(each).values()) <= 1.005 * best_possible(each)


def test_a_drafter_that_takes_no_time_reaches_the_bound_of_its_drafts() -> None:
    each = Scenario(machine=Machine(target_s=1.0, draft_s=1e-6), acceptance=0.5)
    found = run_one(each, "pipelined", virtual_devices())
    assert found.tokens_per_second == pytest.approx(best_possible(each), rel=0.015)  # probes take 1 %


# At the second all schedules do the same: what one then has before another were luck.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "acceptance", "ratios"),
    [(0.006, 0.1, (1, 1.3)), (0.001, 0.9, (1,)), (0.001, 0.5, (1, 1.3)), (0.02, 0.3, (1, 2.0))],
)
def test_ahead_loses_nothing_where_drafts_take_no_time(
    step: float, acceptance: float, ratios: tuple[float, ...]
) -> None:
    machine = Machine(target_s=0.1, draft_s=0.1 * step, ratios=ratios)
    each = Scenario(machine=machine, acceptance=acceptance, num_tokens=1200)
    speeds = {name: speed.tokens_per_second for name, speed in simulate(each).items()}
    assert min(speeds["pipelined"], speeds["hedged"]) > 0.99 * max(speeds["plain"], speeds["serial"])


@pytest.mark.slow
def test_working_ahead_and_preparing_other_outcomes_pay_where_drafts_are_slow() -> None:
    found = simulate(scenario(0.3, 0.8, length=3))
    assert found["pipelined"].tokens_per_second > 1.15 * found["serial"].tokens_per_second
    assert found["hedged"].tokens_per_second > 1.4 * found["serial"].tokens_per_second


def test_real_threads_keep_virtual_time() -> None:
    for schedule in ("serial", "pipelined"):
        for target_s in (
            0.02,
            0.1,
            0.5,
            2.5,
        ):  # where the machine is busy, what it takes more is small beside that
            machine = Machine(target_s=target_s, draft_s=target_s / 5, ratios=(1, 1.03))
            each = Scenario(machine=machine, acceptance=0.8, draft_length=3, num_tokens=60)
            virtual = run_one(each, schedule, virtual_devices()).tokens_per_second
            devices = real_devices()
            share = run_one(each, schedule, devices).tokens_per_second / virtual
            assert share < 1.1
            if share > 0.6:
                break
        assert share > 0.6


def test_no_schedule_is_slower_than_plain_decoding() -> None:
    found = simulate(scenario(2.0, 0.2))
    assert min(speed.tokens_per_second for speed in found.values()) > 0.98 * found["plain"].tokens_per_second


def test_a_simulation_is_the_same_each_time() -> None:
    assert simulate(scenario(0.3, 0.8, num_tokens=100)) == simulate(scenario(0.3, 0.8, num_tokens=100))


def recorded(num_rounds: int = 100, acceptance: float = 0.7) -> list[RecordedRound]:
    rng = np.random.default_rng(5)
    rounds = []
    for number in range(1, num_rounds + 1):
        num_draft = int(rng.integers(0, 5))
        runs = rng.random(num_draft) < acceptance
        num_accepted = int(np.argmin(np.append(runs, False)))
        rounds.append(RecordedRound(num_draft, num_accepted, 3.0 * num_draft, 10.0 + 0.5 * num_draft, number))
    return rounds


def test_a_replayed_trace_yields_the_tokens_a_pass_of_the_real_run() -> None:
    rounds = recorded()
    recording = Recording(rounds)
    machine = Machine(target_s=0.01, draft_s=0.003, ratios=(1, 1.05))
    found = simulate(Scenario(machine=machine, acceptance=0.7, recording=recording))
    assert found["serial"].tokens_per_pass == recording.num_tokens / len(rounds)
    # And its time, for paces are the recorded ones; the first pass reads a token, not a prompt.
    real_s = sum(each.draft_ms + each.verify_ms for each in rounds) / 1e3
    assert found["serial"].tokens_per_second == pytest.approx(recording.num_tokens / real_s)
    assert found["plain"] == Speed(pytest.approx(100.0), 1.0)


@pytest.mark.slow
def test_the_command_takes_from_a_trace_what_is_not_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rounds, path = recorded(), tmp_path / "rounds"
    path.write_text("".join(json.dumps(asdict(each)) + "\n" for each in rounds))
    found = run(capsys, "--replay", str(path))
    per_pass = Recording(rounds).num_tokens / len(rounds)
    assert found["serial"]["tokens_per_pass"] == pytest.approx(per_pass)
    assert found["plain"]["tokens_per_second"] == pytest.approx(100.0)
    faster = run(capsys, "--replay", str(path), "--target-ms", "5", "--draft-ms", "1")
    assert faster["plain"]["tokens_per_second"] == pytest.approx(200.0)
    assert faster["serial"]["tokens_per_pass"] == pytest.approx(per_pass)


def test_the_command_prints_a_line_for_each_schedule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rounds"
    path.write_text("".join(json.dumps(asdict(each)) + "\n" for each in recorded(20)))
    assert main(["simulate", "--replay", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["plain", "serial", "pipelined", "hedged", "bound"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--target-ms, --draft-ms, --acceptance; give"),
        (["--target-ms", "80", "--acceptance", "0.5"], "missing: --draft-ms; give --draft-ms"),
        (
            ["--target-ms", "0", "--draft-ms", "9", "--acceptance", "0.5"],
            "--target-ms is 0.0; wanted a number from 1e-06",
        ),
        (["--target-ms", "80", "--draft-ms", "nan", "--acceptance", "0.5"], "--draft-ms is nan; wanted"),
        (["--target-ms", "80", "--draft-ms", "9", "--acceptance", "1.5"], "--acceptance is 1.5; wanted"),
        ([*DESKTOP, "--draft-ms", "9", "--draft-length", "0"], "--draft-length is 0; wanted a number from 1"),
        ([*DESKTOP, "--draft-ms", "9", "--verify-cost", "2,3"], "--verify-cost is '2,3'; wanted numbers such as"),
        (
            [*DESKTOP, "--draft-ms", "9", "--verify-cost", "1,,2"],
            "--verify-cost is '1,,2'; wanted numbers such as",
        ),
        ([*DESKTOP, "--draft-ms", "9", "--verify-cost", "1,inf"], "--verify-cost is '1,inf'; wanted"),
        ([*DESKTOP, "--draft-ms", "9", "--verify-cost", "1,1e308,1.7e308"], "--verify-cost is '1,1e308,1.7e308'"),
        ([*DESKTOP, "--draft-ms", "1e-300"], "--draft-ms is 1e-300; wanted a number from 1e-06 to 1e+09"),
        ([*DESKTOP, "--draft-ms", "9", "--replay", "/nowhere/rounds"], "cannot read /nowhere/rounds"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert main(["simulate", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_trace_and_a_chance_beside_it_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rounds"
    path.write_text("".join(json.dumps(asdict(each)) + "\n" for each in recorded(20)))
    assert main(["simulate", "--replay", str(path), "--acceptance", "0.5"]) == 2
    assert f"--acceptance is 0.5, but {path} records which drafts were kept" in capsys.readouterr().err


def test_a_trace_that_says_too_little_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rounds"
    path.write_text(json.dumps(asdict(RecordedRound(2, 1, 0.0, 10.0, 2))) + "\n")
    assert main(["simulate", "--replay", str(path)]) == 2
    assert f"{path} does not record --target-ms, --draft-ms; give" in capsys.readouterr().err
