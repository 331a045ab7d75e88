"""What load() makes of a plan: the schedule that two models are opened for."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgespec import load
from edgespec.draft.lane_drafter import LaneDrafter
from edgespec.manifest import read_manifest
from edgespec.runtimes.devices import find_device, machine_key
from edgespec.setup.device_choice import Placement
from edgespec.setup.measured_placements import choose_schedule, choose_threads
from edgespec.setup.profile import (
    FILE_NAME,
    DrafterProfile,
    LearnedStats,
    Profile,
    read_learned_stats,
    write_learned_stats,
)

CPU = find_device("cpu")
SETTING = Placement(device=CPU, drafter_device=CPU, num_threads=1, deterministic=True)
KEPT = {("tiny-int4", evidence): (8e5, 1e6) for evidence in range(-1, 16)}
ONE_BY_ONE = {1: 1.0, 2: 2.0}


@pytest.fixture
def known(tiny_model: Path, tmp_path: Path) -> Callable[..., Path]:
    """A target that knows of a drafter what it is told to."""
    folder = shutil.copytree(tiny_model, tmp_path / "target", ignore=shutil.ignore_patterns(FILE_NAME))

    def write(slowed: tuple[float, float], branches: dict[int, float], num_threads: int = 1) -> Path:
        drafter = DrafterProfile(step_s=0.006, row_s=0.0, branches=branches, slowed=slowed)
        passes_s = {64: {1: 0.02, 2: 0.0205, 32: 0.03}}
        name = f"tiny-int4 on cpu, {num_threads} thread" + "s" * (num_threads > 1)
        profile = Profile(passes_s=passes_s, prefill_s=0.001, drafters={name: drafter})
        machine = machine_key(CPU, num_threads, deterministic=True)
        write_learned_stats(folder, LearnedStats(chances=KEPT, profiles={machine: profile}))
        return folder

    return write


@pytest.mark.parametrize(
    ("slowed", "branches", "schedule"),
    [
        ((2.5, 2.5), ONE_BY_ONE, "serial"),
        ((1.0, 1.0), ONE_BY_ONE, "pipelined"),
        ((1.0, 1.0), {1: 1.0, 64: 1.0}, "hedged"),
    ],
)
def test_auto_is_what_was_measured_to_be_best(
    known: Callable[..., Path],
    tiny_drafter: Path,
    slowed: tuple[float, float],
    branches: dict[int, float],
    schedule: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = known(slowed, branches)
    target, drafter = map(read_manifest, (folder, tiny_drafter))
    stats = read_learned_stats(folder)
    assert choose_schedule("auto", target, drafter, SETTING, stats) == schedule
    assert choose_schedule("serial", target, drafter, SETTING, stats) == "serial"
    opened: list[LaneDrafter] = []

    def lane_drafter(*arguments: Any) -> LaneDrafter:
        opened.append(LaneDrafter(*arguments))
        return opened[-1]

    monkeypatch.setattr("edgespec.engine.drafter_chain.LaneDrafter", lane_drafter)
    for asked in ("auto", schedule):
        with load(folder, drafter=str(tiny_drafter), num_threads=1, schedule=asked):
            pass
    for lane in opened:
        assert (lane.can.run_ahead, lane.can.num_alternatives > 0) == (schedule != "serial", schedule == "hedged")
    assert len(opened) == 2


def test_unknown_models_may_go_ahead_on_cores_of_their_own_and_those_of_another_number_of_threads_are_unknown(
    known: Callable[..., Path], tiny_drafter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgespec.setup.device_choice.physical_cores", lambda: 2)
    folder = known((2.5, 2.5), ONE_BY_ONE, num_threads=2)
    target, drafter = map(read_manifest, (folder, tiny_drafter))
    stats = read_learned_stats(folder)
    assert choose_schedule("auto", target, drafter, SETTING, stats) == "pipelined"
    assert choose_schedule("auto", target, drafter, replace(SETTING, drafter_threads=2), stats) == "serial"
    assert choose_schedule("auto", target, drafter, replace(SETTING, num_threads=2), stats) == "serial"


@pytest.mark.parametrize("branches", [ONE_BY_ONE, {1: 1.0, 64: 1.0}])
def test_what_is_planned_changes_no_text(
    known: Callable[..., Path], tiny_drafter: Path, branches: dict[int, float]
) -> None:
    folder = known((1.0, 1.0), branches)
    texts = []
    for options in ({"drafter": "none"}, {"drafter": str(tiny_drafter)}):
        with load(folder, num_threads=1, deterministic=True, **options) as engine:
            texts.append(engine.generate("the in the", max_tokens=60).token_ids)
    assert texts[0] == texts[1]


@pytest.mark.parametrize("own_step_s", [0.02, 0.036])
@pytest.mark.parametrize("is_counted", [True, False])
@pytest.mark.parametrize("deterministic", [True, False])
def test_models_have_cores_of_their_own_where_these_were_measured_to_promise_more(
    tiny_model: Path,
    tiny_drafter: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    own_step_s: float,
    is_counted: bool,
    deterministic: bool,
) -> None:
    folder = Path(shutil.copytree(tiny_model, tmp_path / "target", ignore=shutil.ignore_patterns(FILE_NAME)))
    monkeypatch.setattr("edgespec.setup.device_choice.physical_cores", lambda: 2)
    monkeypatch.setattr("edgespec.runtimes.devices.physical_cores", lambda: 2)
    profiles = {}
    for num_threads, step_s, slowed in ((2, 0.02, (2.5, 2.5)), (1, own_step_s, (1.0, 1.0))):
        drafter = DrafterProfile(step_s=0.006, row_s=0.0, branches=ONE_BY_ONE, slowed=slowed)
        passes_s = {64: {1: step_s, 2: 1.02 * step_s, 32: 1.5 * step_s}}
        name = f"tiny-int4 on cpu, {num_threads} thread" + "s" * (num_threads > 1)
        profiles[machine_key(CPU, num_threads, deterministic)] = Profile(
            passes_s=passes_s, prefill_s=0.001, drafters={name: drafter}
        )
    write_learned_stats(folder, LearnedStats(chances=KEPT if is_counted else {}, profiles=profiles))
    target, drafts = map(read_manifest, (folder, tiny_drafter))
    placement = Placement(device=CPU, drafter_device=CPU, deterministic=deterministic)
    found = choose_threads(target, drafts, placement, read_learned_stats(folder))
    pays = own_step_s == 0.02 and is_counted and not deterministic
    assert found == (replace(placement, num_threads=1, drafter_threads=1) if pays else placement)
    if pays:
        with load(folder, drafter=str(tiny_drafter), deterministic=deterministic) as engine:
            sessions = [
                each._passes._session for each in (engine.target, *engine._drafting.pool.decoders.values())
            ]  # type: ignore[attr-defined]
            threads = [session.get_session_options().intra_op_num_threads for session in sessions]
        assert threads == [1, 1]
