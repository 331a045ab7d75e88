"""Which window lookahead gets: by whether the device runs trees and by what its rows cost, not by its name."""

from dataclasses import replace

import pytest
from made_up import manifest

from edgespec.config.drafter_names import parse
from edgespec.draft.lookahead import SMALLEST, Window, window_bucket
from edgespec.runtimes.devices import Device
from edgespec.setup import setup
from edgespec.setup.device_choice import Placement
from edgespec.setup.profile import LearnedStats
from edgespec.setup.setup import lookahead_window

GPU = Device("a-gpu", "AGpuExecutionProvider")
PLACEMENT = Placement(device=GPU, drafter_device=GPU, num_threads=2)
CHEAP = {width: 1 + 0.03 * (width - 1) for width in (1, 2, 4, 8, 16)}
DEAR = {width: 1 + 0.25 * (width - 1) for width in (1, 2, 4, 8, 16)}
MANIFEST = replace(manifest("a model", 1024), tree_graph="model_tree.onnx")


def window(learned: LearnedStats | None = None, length: int | None = None) -> Window | None:
    return lookahead_window(parse("auto"), length, MANIFEST, PLACEMENT, learned or LearnedStats())


@pytest.fixture
def with_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "can_run_trees", lambda manifest, device: device.name == GPU.name)


@pytest.mark.usefixtures("with_trees")
def test_a_device_that_runs_trees_gets_a_window_where_its_rows_are_cheap() -> None:
    machine = PLACEMENT.machine
    assert window() is None, "nothing is measured yet"
    assert window(LearnedStats({machine: CHEAP})) == SMALLEST
    assert window(length=4) is None, "drafts of a fixed length are those that were asked for"
    assert window(LearnedStats({machine: DEAR})) is None
    assert window(LearnedStats({"another machine": CHEAP})) is None


@pytest.mark.usefixtures("with_trees")
def test_what_a_window_has_yielded_here_is_read_with_what_its_rows_cost() -> None:
    wide = Window(7, 4, 7)
    learned = LearnedStats(
        {PLACEMENT.machine: CHEAP}, chances={("lookahead, run", window_bucket(wide)): (320.0, 500.0)}
    )
    assert window(learned) == wide


def test_a_device_that_cannot_run_trees_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "can_run_trees", lambda manifest, device: False)
    assert window(LearnedStats({PLACEMENT.machine: CHEAP})) is None
