"""Published machines, the recording that comes with edgespec, and the picture of both lanes."""

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from edgespec.cli.main import main
from edgespec.cli.plan import RECORDING
from edgespec.errors import UsageError
from edgespec.simulation.lane_picture import (
    COLOURS,
    OWN,
    PREFETCHED,
    WAITED,
    ObservedPass,
    ObservedRun,
    draw,
    observe,
)
from edgespec.simulation.machines import Machine, find_machine, read_machines
from edgespec.simulation.recording import read_recording
from edgespec.simulation.schedules import Scenario, run, virtual_devices


def test_each_figure_says_where_it_comes_from_and_each_machine_has_a_source() -> None:
    machines = read_machines()
    assert {"core-ultra-258v", "strix-halo", "desktop-12gb", "h100", "h200"} <= machines.keys()
    for machine in machines.values():
        assert machine.sources
        figures = [machine.target_ms, machine.acceptance, machine.verify_cost, *machine.drafters.values()]
        assert all(figure.how for figure in figures)
        assert machine.verify_cost.value[0] == 1
        assert list(machine.verify_cost.value) == sorted(machine.verify_cost.value)
        assert 0 < machine.acceptance.value < 1


def test_what_is_derived_of_tokens_a_second_is_their_inverse() -> None:
    for machine in read_machines().values():
        for figure in (machine.target_ms, *machine.drafters.values()):
            if match := re.match(r"1000 / ([\d.]+) tokens/s", figure.how):
                assert figure.origin == "derived"
                assert figure.value == pytest.approx(1000 / float(match[1]), rel=0.01)


@pytest.mark.slow
def test_the_published_speed_of_core_ultra_is_met_and_overlap_is_faster() -> None:
    machine = find_machine("core-ultra-258v")
    scenario = Scenario(
        machine=machine.devices(), acceptance=machine.acceptance.value, draft_length=3, num_tokens=1500
    )
    plain, serial, pipelined = (
        run(scenario, schedule, virtual_devices()).tokens_per_second
        for schedule in ("plain", "serial", "pipelined")
    )
    assert plain == pytest.approx(12.2, rel=0.01)
    assert serial == pytest.approx(16.5, rel=0.05)
    assert pipelined > serial


def test_a_machine_drafts_on_its_fastest_device_unless_another_is_named() -> None:
    machine = find_machine("core-ultra-258v")
    assert machine.devices().draft_s == pytest.approx(0.0094)
    assert machine.devices("npu").draft_s == pytest.approx(0.0343)
    with pytest.raises(UsageError, match="'gpu'; that machine drafts on: cpu, npu"):
        machine.devices("gpu")
    with pytest.raises(UsageError, match="did you mean strix-halo"):
        find_machine("strix-hallo")


def test_the_list_names_machines_with_their_sources(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--machine", "list"]) == 0
    text = capsys.readouterr().out
    assert all(source in text for machine in read_machines().values() for source in machine.sources)
    assert main(["simulate", "--machine", "list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out).keys() == read_machines().keys()


def test_the_recording_that_comes_with_edgespec_is_of_drafts_and_of_no_times() -> None:
    recording = read_recording(RECORDING)
    assert recording.acceptance is not None
    assert 0.3 < recording.acceptance < 0.9
    assert recording.num_tokens > 200
    assert recording.draft_ms is None  # a machine gives the times
    assert recording.verify_ms == {}


@pytest.mark.slow
def test_a_real_pair_is_replayed_on_a_published_machine_and_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["simulate", "--machine", "core-ultra-258v", "--replay", "--json"]
    assert main([*arguments, "--trace", str(tmp_path / "lanes.svg")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found.keys() == {"plain", "serial", "pipelined", "hedged", "bound", "acceptance", "machine"}
    recording = read_recording(RECORDING)
    assert found["acceptance"] == recording.acceptance
    rounds = len(recording.rounds)
    assert found["serial"]["tokens_per_pass"] == pytest.approx(recording.num_tokens / rounds, rel=0.01)
    assert found["plain"]["tokens_per_second"] == pytest.approx(12.2, rel=0.01)
    assert found["machine"]["sources"]
    svg = ElementTree.parse(tmp_path / "lanes.svg").getroot()
    text = "".join(svg.itertext())
    for shown in ("plain: ", "serial: ", "pipelined: ", "hedged: ", "accepted", "rejected", "prefetched"):
        assert shown in text


MACHINE = Machine(target_s=0.1, draft_s=0.02, ratios=(1, 1.03))


@pytest.mark.parametrize("schedule", ["plain", "serial", "pipelined"])
def test_an_observed_run_is_what_its_schedule_does(schedule: str) -> None:
    found = observe(Scenario(machine=MACHINE, acceptance=0.7, draft_length=2, num_tokens=400), schedule)
    assert all(
        one.end_s <= other.start_s + 1e-9 for one, other in zip(found.passes, found.passes[1:], strict=False)
    )
    assert found.passes[-1].end_s >= found.length_s > found.passes[-1].start_s
    beside = sum(
        max(0.0, min(end, each.end_s) - max(start, each.start_s))
        for start, end in found.drafts
        for each in found.passes
    )
    drafted = sum(end - start for start, end in found.drafts)
    if schedule == "plain":
        assert not found.drafts
        assert found.num_tokens == len(found.passes) - 1 or found.num_tokens == len(found.passes)
    elif schedule == "serial":
        assert beside == pytest.approx(0, abs=1e-9)
        assert drafted > 0.1 * found.length_s
    else:
        assert beside > 0.5 * drafted


@pytest.mark.parametrize("schedule", ["serial", "pipelined", "hedged"])
def test_a_slower_machine_does_the_work_of_a_faster_one(schedule: str) -> None:
    """Also where a drafted token takes longer than a real drafter may."""
    slow = Machine(target_s=1e6 * MACHINE.target_s, draft_s=1e6 * MACHINE.draft_s, ratios=MACHINE.ratios)
    scenarios = (Scenario(machine=machine, acceptance=0.7, num_tokens=200) for machine in (MACHINE, slow))
    fast, found = (run(each, schedule, virtual_devices()) for each in scenarios)
    assert (1e6 * found.tokens_per_second, found.tokens_per_pass) == pytest.approx(fast, rel=0.02)


def test_a_picture_shows_when_drafts_lay_beside_passes() -> None:
    observed = ObservedRun(
        "pipelined", 1.0, (ObservedPass(0.1, 0.5, 1, 1), ObservedPass(0.5, 0.9, 2, 0)), ((0.0, 0.4), (0.92, 1.0))
    )
    svg = ElementTree.fromstring(draw([observed], {"plain": 10.0, "pipelined": 15.0}, "a <title> & more"))
    space = "{http://www.w3.org/2000/svg}"
    shown = [rect for rect in svg.iter(f"{space}rect") if rect.find(f"{space}title") is not None]
    widths = {
        kind: [float(each.get("width", "0")) for each in shown if each.get("fill") == COLOURS[kind]]
        for kind in (OWN, WAITED, PREFETCHED)
    }
    assert len(widths[OWN]) == 2
    second = sum(widths[PREFETCHED]) / 0.3
    assert sum(widths[WAITED]) == pytest.approx((0.1 + 0.08) * second, rel=0.01)
    text = list(svg.itertext())
    assert "pipelined: 15.0 tokens/s, 1.50 × plain; 5 tokens here" in text
    assert "a <title> & more" in text


@pytest.mark.parametrize("ending", [".html", ".json"])
def test_pictures_come_as_a_page_or_a_trace_too(
    tmp_path: Path, ending: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rounds = tmp_path / "rounds"
    line = {"num_draft": 3, "num_accepted": 2, "draft_ms": 6.0, "verify_ms": 20.0, "round": 2}
    rounds.write_text("".join(json.dumps(line) + "\n" for _ in range(20)))
    path = tmp_path / f"lanes{ending}"
    assert main(["simulate", "--replay", str(rounds), "--target-ms", "20", "--trace", str(path)]) == 0
    if ending == ".json":
        lanes = {event["args"].get("name") for event in json.loads(path.read_text())["traceEvents"]}
        assert {"serial: target", "serial: drafter", "hedged: drafter"} <= lanes
    else:
        assert path.read_text().startswith("<!doctype html>")
        assert "<svg" in path.read_text()
        assert capsys.readouterr().out.splitlines()[1] in path.read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--machine", "core"], "--machine is 'core'; the machines are core-ultra-258v"),
        (["--machine", "strix-halo", "--drafter-device", "cpu"], "that machine drafts on: npu"),
        (["--drafter-device", "cpu"], "--drafter-device belongs to --machine"),
        (["--replay"], "does not record --target-ms, --draft-ms; give --target-ms and --draft-ms, or --machine"),
        (["--machine", "strix-halo", "--trace", "rounds.jsonl"], "--replay rounds.jsonl"),
        (["--machine", "strix-halo", "--replay", "/nowhere/rounds"], "cannot read /nowhere/rounds"),
    ],
)
def test_what_cannot_be_simulated_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert main(["simulate", *arguments]) == 2
    assert said in capsys.readouterr().err
