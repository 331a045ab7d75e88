"""Devices that were asked for, and the CPU in their place. Devices are fakes but for the CPU."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgespec import load
from edgespec.cli.main import main
from edgespec.errors import DeviceUnavailable
from edgespec.manifest import Manifest
from edgespec.runtimes.devices import Device, find_device
from edgespec.setup import device_choice
from edgespec.setup import open_model as opening
from edgespec.setup.device_choice import DeviceChoice, require_together

CPU = find_device("cpu")
GPU, NPU = Device("webgpu", "WebGpuExecutionProvider", "webgpu"), Device("qnn", "QNNExecutionProvider")
NAMES = {"auto": CPU, "cpu": CPU, "webgpu": GPU, "gpu": GPU, "qnn": NPU}
PLACE = {"num_threads": None, "drafter_threads": None, "deterministic": False}


def found(name: str, option: str = "--device") -> Device:
    if name in NAMES:
        return NAMES[name]
    raise DeviceUnavailable(f"device '{name}': none here", device=name if name == "cuda" else None)


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_choice, "find_device", found)
    monkeypatch.setattr(device_choice, "find_accelerator", {"gpu": GPU, "npu": None}.__getitem__)


def test_a_device_that_cannot_be_used_is_refused_unless_it_may_give_way() -> None:
    with pytest.raises(DeviceUnavailable, match="'cuda': none here"):
        DeviceChoice("cuda", "cpu", print).initial_placement(**PLACE)
    choice = DeviceChoice("cuda", "cuda", print, allow_fallback=True)
    placement = choice.initial_placement(**PLACE)
    assert (placement.device, placement.drafter_device) == (CPU, CPU)
    assert choice.downgrades == ["the CPU is used instead of 'cuda': device 'cuda': none here"]
    with pytest.raises(DeviceUnavailable, match="'typo'"):
        DeviceChoice("typo", "cpu", print, allow_fallback=True).initial_placement(**PLACE)


def test_two_gpus_of_webgpu_are_refused_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NAMES, "webgpu:1", replace(GPU, name="webgpu:1", index=1))
    with pytest.raises(DeviceUnavailable, match="'webgpu' and 'webgpu:1' cannot be used together"):
        DeviceChoice("webgpu", "webgpu:1", print).initial_placement(**PLACE)
    DeviceChoice("webgpu", "webgpu", print).initial_placement(**PLACE)


def test_webgpu_runs_one_model_in_a_process() -> None:
    with pytest.raises(
        DeviceUnavailable, match=r"target and a drafter model at the same time.*drafter_device='cpu'"
    ):
        require_together(GPU, GPU)
    require_together(GPU, GPU, has_drafter_model=False)
    for pair in ((GPU, CPU), (CPU, GPU), (CPU, CPU), (GPU, NPU)):
        require_together(*pair)


@pytest.mark.parametrize(
    ("form", "device", "reported", "downgrades"),
    [
        ("cpu", CPU, [], []),
        ("gpu", GPU, ["tiny was exported for a gpu and runs on 'webgpu'"], []),
        ("npu", CPU, [], ["tiny was exported for an npu and none can be used here: it runs on the CPU"]),
    ],
)
def test_auto_is_of_the_kind_that_a_folder_was_exported_for(
    manifest: Manifest, form: str, device: Device, reported: list[str], downgrades: list[str]
) -> None:
    lines: list[str] = []
    choice = DeviceChoice("auto", "auto", lines.append)
    placement = choice.resolve_auto(choice.initial_placement(**PLACE), replace(manifest, form=form), [])
    assert (placement.device, placement.drafter_device, lines) == (device, CPU, reported)
    assert choice.downgrades == downgrades


def test_figures_say_that_a_form_runs_without_its_device(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(tiny_model, tmp_path / "tiny"))
    stated = json.loads((folder / "edgespec.json").read_text())
    (folder / "edgespec.json").write_text(json.dumps(stated | {"form": "npu"}))
    command = ["chat", str(folder), "--device", "Auto", "--drafter", "none", "--prompt", "hi", "--max-tokens", "2"]
    assert main([*command, "--json"]) == 0
    reported = capsys.readouterr()
    (line,) = json.loads(reported.out)["stats"]["downgrades"]
    assert line.endswith("was exported for an npu and none can be used here: it runs on the CPU")
    assert reported.err.count(line) == 1


def test_auto_looks_at_target_and_drafters_apart_and_at_no_device_that_was_named(manifest: Manifest) -> None:
    gpu = replace(manifest, form="gpu")
    choice = DeviceChoice("cpu", "auto", lambda line: None)
    placement = choice.resolve_auto(choice.initial_placement(**PLACE), gpu, [gpu])
    assert (placement.device, placement.drafter_device) == (CPU, GPU)
    mixed = choice.resolve_auto(choice.initial_placement(**PLACE), manifest, [gpu, manifest])
    assert mixed.drafter_device == CPU


@pytest.mark.parametrize(
    ("asked", "allow_fallback", "fallen"),
    [
        (("webgpu", "cpu"), True, (CPU, CPU)),
        (("webgpu", "webgpu"), True, (CPU, CPU)),
        (("webgpu", "qnn"), True, (CPU, NPU)),
        (("webgpu", "cpu"), False, None),
        (("auto", "webgpu"), False, (CPU, GPU)),
        (("cpu", "qnn"), True, None),
    ],
)
def test_what_would_not_run_a_model_gives_way_where_it_may(
    manifest: Manifest, asked: tuple[str, str], allow_fallback: bool, fallen: tuple[Device, Device] | None
) -> None:
    choice = DeviceChoice(*asked, lambda line: None, allow_fallback=allow_fallback)
    placement = choice.resolve_auto(choice.initial_placement(**PLACE), replace(manifest, form="gpu"), [])
    error = DeviceUnavailable("no kernel", device="webgpu")
    if fallen is None:
        with pytest.raises(DeviceUnavailable, match="no kernel"):
            choice.fall_back(error, placement)
        return
    placement = choice.fall_back(error, placement)
    assert (placement.device, placement.drafter_device) == fallen
    assert choice.downgrades == ["the CPU is used instead of 'webgpu': no kernel"]


class Refusing:
    """A decoder that no device but the CPU opens."""

    def __init__(self, folder: Path, manifest: Manifest, device: Device, **how: Any) -> None:
        raise DeviceUnavailable("no kernel here for 9 FusedMatMul", device=device.name)


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> None:
    real = opening.open_model

    def open_model(model: Any, device: Device, *rest: Any, **how: Any) -> Any:
        if device != CPU:
            return Refusing(*model, device)
        return real(model, device, *rest, **how)

    monkeypatch.setattr("edgespec.engine.load.open_model", open_model)
    monkeypatch.setattr("edgespec.setup.open_model.open_model", open_model)


@pytest.mark.usefixtures("refusing")
@pytest.mark.parametrize("places", [{"device": "webgpu"}, {"drafter_device": "webgpu"}])
def test_the_cpu_answers_where_a_device_would_not_run_the_model(
    tiny_model: Path, tiny_drafter: Path, places: dict[str, str]
) -> None:
    how: dict[str, Any] = {"drafter": str(tiny_drafter), "draft_length": 2, **places}
    with load(tiny_model, drafter="none") as engine:
        expected = engine.generate("the rain", max_tokens=6).token_ids
    with pytest.raises(DeviceUnavailable, match="FusedMatMul"):
        load(tiny_model, **how)
    lines: list[str] = []
    with load(tiny_model, **how, allow_fallback=True, report=lines.append) as engine:
        answer = engine.generate("the rain", max_tokens=6)
        again = engine.generate("the rain", max_tokens=6)
    line = "the CPU is used instead of 'webgpu': no kernel here for 9 FusedMatMul"
    assert answer.token_ids == expected
    assert (answer.stats.target_device, answer.stats.drafter_device) == ("cpu", "cpu")
    assert answer.stats.downgrades == (line,)
    assert again.stats.downgrades == ()
    assert lines.count(line) == 1


@pytest.mark.usefixtures("refusing")
@pytest.mark.parametrize("command", [["chat", "--prompt", "hi", "--max-tokens", "2"], ["score", "--file"]])
def test_commands_say_so_on_stderr_and_refuse_without(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    (tmp_path / "text").write_text("the rain in the hall")
    named = [command[0], str(tiny_model), "--device", "webgpu", "--json", *command[1:]]
    named += [str(tmp_path / "text")] * (command[0] == "score")
    assert main(named) == 4
    assert capsys.readouterr().out == ""
    assert main([*named, "--allow-fallback"]) == 0
    reported = capsys.readouterr()
    assert json.loads(reported.out)
    assert "the CPU is used instead of 'webgpu': no kernel here for 9 FusedMatMul" in reported.err
