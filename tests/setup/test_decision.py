"""The decision for a model: its line, its file, and for which machine it holds."""

import json
import os
from pathlib import Path

import pytest
from made_up import DRAFTER, PLENTY, TARGET, kept, layout

from edgespec.runtimes.devices import Device
from edgespec.setup.device_search import (
    FOLDER,
    Decision,
    Where,
    in_one_line,
    read_decision,
    where_of,
    write_decision,
)
from edgespec.setup.planner import Layout, Plan, decide, weigh
from edgespec.setup.profile import Place

CPU, GPU = Place("cpu", 2), Place("webgpu", 2)
DEVICES = {
    "cpu": Device("cpu", "CPUExecutionProvider"),
    "webgpu": Device("webgpu", "WebGpuExecutionProvider", "webgpu", kind="gpu", hardware="AMD Radeon 780M"),
}
MODELS, MADE_FOR = ("model", "drafter"), ("cpu", "webgpu, driver 1")
DECISION = Decision(
    made_for=MADE_FOR,
    device="webgpu",
    drafter_device="cpu",
    line="…",
)


def plan(*layouts: Layout, acceptance: float = 0.8) -> Plan:
    room = PLENTY._replace(free_bytes={})
    return decide(weigh(TARGET, {"drafter": DRAFTER}, layouts, kept(acceptance), room))


def test_line_tells_devices_schedule_and_what_the_others_promise() -> None:
    slow = Layout(CPU, layout(CPU, CPU, step_ms=55).profile, is_measured=False)
    found = plan(layout(GPU, CPU, step_ms=40, draft=0.2), slow)
    line = in_one_line("target", found, DEVICES)
    rate = f"{found.chosen.tokens_per_second:.0f}"
    assert line == (
        f"target runs on webgpu (AMD Radeon 780M): {rate} tokens/s expected, about 18 on the CPU; "
        "drafter on the CPU, pipelined"
    )
    assert where_of(found) == Where("webgpu", "cpu")


def test_drafter_that_does_not_pay_is_placed_all_the_same() -> None:
    found = plan(layout(GPU, CPU, draft=0.9), acceptance=0.05)
    assert in_one_line("target", found, DEVICES).endswith("; no drafter model is expected to save time")
    assert where_of(found) == Where("webgpu", "cpu")


def test_decision_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert read_decision(tmp_path, MODELS, MADE_FOR) is None
    write_decision(tmp_path, MODELS, DECISION)
    assert read_decision(tmp_path, MODELS, MADE_FOR) == DECISION


@pytest.mark.parametrize("now", [("cpu", "webgpu, driver 2"), ("cpu",), (*MADE_FOR, "cuda")])
def test_another_driver_or_device_asks_for_another_decision(tmp_path: Path, now: tuple[str, ...]) -> None:
    write_decision(tmp_path, MODELS, DECISION)
    assert read_decision(tmp_path, MODELS, now) is None
    assert read_decision(tmp_path, ("model",), MADE_FOR) is None


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"version": 1, "decision": {"device": 3}}', "\0"])
def test_damaged_decision_is_made_again(tmp_path: Path, content: str) -> None:
    write_decision(tmp_path, MODELS, DECISION)
    (name,) = os.listdir(tmp_path / FOLDER)
    (tmp_path / FOLDER / name).write_text(content)
    assert read_decision(tmp_path, MODELS, MADE_FOR) is None


def test_decision_of_a_version_that_stated_more_is_read(tmp_path: Path) -> None:
    write_decision(tmp_path, MODELS, DECISION)
    (path,) = (tmp_path / FOLDER).iterdir()
    written = json.loads(path.read_text())
    written["decision"] |= {"schedule": "pipelined", "refused": {"cuda": "no"}}
    path.write_text(json.dumps(written))
    assert read_decision(tmp_path, MODELS, MADE_FOR) == DECISION
