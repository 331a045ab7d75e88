"""What auto takes on a machine with a GPU that is imitated at a given pace."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from imitated import EMULATOR, Machine

from edgespec import DeviceUnavailable, Engine, load
from edgespec.config.presets import Preset
from edgespec.export.options import ExportOptions
from edgespec.export.plan import plan_model
from edgespec.memory.estimate import MemoryNeeds
from edgespec.runtimes.probe import FILE_NAME, DeviceProbe
from edgespec.setup import auto_devices, device_options, resolve
from edgespec.setup.auto_devices import find_candidates
from edgespec.setup.device_search import FILE_NAME as DECISIONS
from edgespec.setup.device_search import decisions_in
from edgespec.setup.home import ModelHome
from edgespec.setup.resolve import compare_devices
from edgespec.setup.wish import Wish

# Seconds of a pass; the drafter is the target in 4 bits.
GPU_S, CPU_S = 0.024, 0.06
PACE_S = {("fp32", "webgpu"): GPU_S, ("fp32", "cpu"): CPU_S, ("int4", "webgpu"): 0.08, ("int4", "cpu"): 0.006}


@pytest.fixture
def machine(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_gguf: Path
) -> Machine:
    """Probes foresee what is measured then, but for the drafter on the GPU, which disappoints.

    The parameter says whether passes are really timed.
    """
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path))
    num_bytes = plan_model(tiny_gguf, ExportOptions(precision="fp32")).cost.write_bytes
    probes = {
        name: DeviceProbe(bytes_per_s=num_bytes / step_s, node_s=0.0, start_s=0.0, rows={1: 1.0, 8: 1.0})
        for name, step_s in (("cpu", CPU_S), ("webgpu", GPU_S))
    }
    found = Machine(PACE_S, probes, is_measured=getattr(request, "param", False))
    found.use(monkeypatch)
    return found


@pytest.fixture
def open_auto(tiny_gguf: Path) -> Callable[..., tuple[Engine, list[str]]]:
    def open_it(**how: Any) -> tuple[Engine, list[str]]:
        said: list[str] = []
        how = {"drafter": f"{tiny_gguf}:int4", **how}
        return load(f"{tiny_gguf}:fp32", offline=True, report=said.append, **how), said

    return open_it


@pytest.mark.parametrize("machine", [False, pytest.param(True, marks=pytest.mark.slow)], indirect=True)
def test_fast_gpu_runs_the_target_beside_a_drafter_on_the_cpu(
    machine: Machine, open_auto: Callable[..., tuple[Engine, list[str]]], tmp_path: Path
) -> None:
    engine, said = open_auto()
    with engine:
        stats = engine.generate("the rain", max_tokens=12).stats
        assert (stats.target_device, stats.drafter_device) == ("webgpu", "cpu")
    (line,) = [line for line in said if " runs on " in line]
    assert line.startswith("tiny.gguf:fp32 runs on webgpu (an imitation): ")
    assert "on the CPU; drafter on the CPU, " in line
    assert line.endswith(("pipelined", "hedged"))
    assert machine.probed == ["cpu", "webgpu"]
    # A CPU that is foreseen to be so much slower is never opened, and nothing is exported for it. Where passes are
    # timed, a busy machine may bring it within reach.
    if not machine.is_measured:
        assert ("fp32", "cpu") not in machine.opened
        assert not [path for path in (tmp_path / "models").iterdir() if path.name.endswith("-fp32")]

    machine.probed.clear()
    machine.opened.clear()
    engine, again = open_auto()
    engine.close()
    assert (again, machine.probed) == ([line], [])
    assert machine.opened == [("fp32", "webgpu"), ("int4", "cpu")]


def test_the_decision_for_a_preset_is_that_for_its_model(
    machine: Machine, tiny_gguf: Path, tmp_path: Path
) -> None:
    models, model = ModelHome(tmp_path, offline=True), f"{tiny_gguf}:fp32"
    models.presets.write(Preset(name="poet", model=model))
    of_preset, of_model = (resolve.auto_devices(Wish(model=name), models) for name in ("poet", model))
    assert of_preset is not None
    assert of_model is not None
    assert of_preset._made_for == of_model._made_for


def test_another_driver_asks_for_another_decision(
    machine: Machine, open_auto: Callable[..., tuple[Engine, list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    open_auto(drafter="none")[0].close()
    machine.probed.clear()
    monkeypatch.setattr("edgespec.runtimes.devices.driver_versions", lambda device: (f"{device.name} driver 2",))
    machine.pace_s = {**PACE_S, ("fp32", "webgpu"): 0.4}
    _, said = open_auto(drafter="none")
    assert machine.probed == ["cpu", "webgpu"]
    assert said[-1].startswith("tiny.gguf:fp32 runs on the CPU: ")


def test_device_that_opens_no_model_gives_way_and_is_not_tried_again(
    machine: Machine, open_auto: Callable[..., tuple[Engine, list[str]]]
) -> None:
    open_auto(drafter="none")[0].close()
    machine.broken.add("webgpu")
    engine, _ = open_auto(drafter="none")
    with engine:
        stats = engine.generate("the rain", max_tokens=3).stats
    assert stats.target_device == "cpu"
    assert stats.downgrades == ("the CPU is used instead of 'webgpu': 'webgpu' is broken",)
    machine.broken.clear()
    machine.opened.clear()
    open_auto(drafter="none")[0].close()
    assert machine.opened == [("fp32", "cpu")]


def test_driver_that_crashes_costs_a_line_and_not_the_start(
    machine: Machine, open_auto: Callable[..., tuple[Engine, list[str]]]
) -> None:
    machine.crashing.add("webgpu")
    engine, said = open_auto(drafter="none")
    engine.close()
    (line,) = [line for line in said if "crashed" in line]
    assert line.startswith("'webgpu' is left out: ")
    assert said[-1].startswith("tiny.gguf:fp32 runs on the CPU: ")
    assert machine.opened[-1] == ("fp32", "cpu")
    _, again = open_auto(drafter="none")
    assert again == [said[-1]]


@pytest.mark.parametrize("crashes", [False, True])
@pytest.mark.parametrize("named", ["device", "drafter_device"])
def test_named_device_that_runs_no_model_is_told_or_replaced(
    machine: Machine, open_auto: Callable[..., tuple[Engine, list[str]]], named: str, *, crashes: bool
) -> None:
    machine.devices[1] = replace(machine.devices[1], name="cuda", provider="CUDAExecutionProvider", memory="cuda")
    machine.probes = {**machine.probes, "cuda": machine.probes["webgpu"]}
    machine.broken.add("cuda")
    machine.crashing |= {"cuda"} if crashes else set()
    with pytest.raises(DeviceUnavailable, match="'cuda' is broken"):
        open_auto(**{named: "cuda"})
    engine, _ = open_auto(**{named: "cuda"}, allow_fallback=True)
    with engine:
        stats = engine.generate("the rain", max_tokens=3).stats
    assert (stats.target_device, stats.drafter_device) == ("cpu", "cpu")
    assert stats.downgrades == ("the CPU is used instead of 'cuda': 'cuda' is broken",)


def test_emulator_is_never_taken_and_costs_nothing(
    machine: Machine, open_auto: Callable[..., tuple[Engine, list[str]]], tmp_path: Path
) -> None:
    machine.devices[1] = EMULATOR
    engine, said = open_auto(drafter="none")
    with engine:
        assert engine.generate("the rain", max_tokens=3).stats.target_device == "cpu"
    assert machine.probed == []
    assert not [line for line in said if " runs on " in line]
    assert not (tmp_path / DECISIONS).exists()
    assert not (tmp_path / FILE_NAME).exists()


def test_machine_without_an_accelerator_looks_for_no_device(
    machine: Machine, open_auto: Callable[..., tuple[Engine, list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgespec.setup.resolve.may_have_accelerator", lambda: False)
    monkeypatch.setattr(auto_devices, "usable_devices", pytest.fail)
    open_auto(drafter="none")[0].close()
    assert (machine.probed, machine.opened) == ([], [("fp32", "cpu")])


def test_cpu_can_always_be_named(machine: Machine, open_auto: Callable[..., tuple[Engine, list[str]]]) -> None:
    engine, _ = open_auto(device="cpu", drafter="none")
    engine.close()
    assert (machine.probed, machine.opened) == ([], [("fp32", "cpu")])


def test_folder_in_one_form_has_nothing_to_choose(machine: Machine, tiny_model: Path) -> None:
    with load(tiny_model, drafter="none") as engine:
        assert engine.generate("the rain", max_tokens=3).stats.target_device == "cpu"
    assert machine.probed == []


def test_device_that_is_named_is_the_only_candidate(machine: Machine) -> None:
    found = find_candidates("webgpu", "auto")
    assert found is not None
    assert (list(found.targets), list(found.drafters)) == (["webgpu"], ["cpu", "webgpu"])
    assert found.named == {"webgpu"}
    assert find_candidates("cpu", "auto") is None
    assert find_candidates("webgpu", "cpu") is None
    assert find_candidates("toaster", "auto") is None


def test_two_models_are_never_put_on_webgpu_which_computes_wrongly_then(
    machine: Machine, open_auto: Callable[..., tuple[Engine, list[str]]]
) -> None:
    machine.devices[1] = replace(machine.devices[1], memory="webgpu")
    machine.pace_s = {**PACE_S, ("int4", "webgpu"): 0.001}
    engine, _ = open_auto()
    with engine:
        stats = engine.generate("the rain", max_tokens=3).stats
    assert (stats.target_device, stats.drafter_device) == ("webgpu", "cpu")
    assert ("int4", "webgpu") not in machine.opened


@pytest.mark.slow
def test_two_gpus_of_two_providers_which_may_be_one_are_not_put_beside_each_other(
    machine: Machine, tiny_gguf: Path
) -> None:
    gpu = machine.devices[1]
    machine.devices.append(replace(gpu, name="cuda", provider="CUDAExecutionProvider"))
    machine.probes = {**machine.probes, "cuda": machine.probes["webgpu"]}
    machine.pace_s = {**PACE_S, ("fp32", "cuda"): GPU_S, ("int4", "cuda"): CPU_S}
    wish = Wish(model=f"{tiny_gguf}:fp32", drafter=f"{tiny_gguf}:int4", offline=True, report=print)
    found = compare_devices(wish, remeasure=False)
    assert found is not None
    places = {(each.target.device, each.drafter_place.device) for each in found.plan.options if each.drafter_place}
    assert places == {
        ("cpu", "cpu"), ("cpu", "webgpu"), ("cpu", "cuda"),
        ("webgpu", "cpu"), ("webgpu", "webgpu"),
        ("cuda", "cpu"), ("cuda", "cuda"),
    }  # fmt: skip


def test_decision_for_want_of_memory_is_made_again(
    machine: Machine,
    open_auto: Callable[..., tuple[Engine, list[str]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    needs = MemoryNeeds(lambda model, context, device: {device: 1000}, {"webgpu": 100})
    monkeypatch.setattr(device_options, "memory_needs", lambda *asked: needs)
    engine, said = open_auto(drafter="none")
    engine.close()
    assert said[-1].startswith("tiny.gguf:fp32 runs on the CPU: ")
    assert not (tmp_path / DECISIONS).exists()


def test_damaged_decision_is_made_again(
    machine: Machine, open_auto: Callable[..., tuple[Engine, list[str]]], tmp_path: Path
) -> None:
    open_auto(drafter="none")[0].close()
    (saved,) = decisions_in(tmp_path).read().values()
    (tmp_path / DECISIONS).write_text("{")
    open_auto(drafter="none")[0].close()
    (again,) = decisions_in(tmp_path).read().values()
    assert again.where == saved.where
