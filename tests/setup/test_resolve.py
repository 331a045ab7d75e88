"""Models prepared for the devices that a user names. A GPU and an NPU are imitated by the CPU's provider."""

import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from time import sleep

import pytest
import tiny

import edgespec.engine.pair_export
import edgespec.runtimes.devices
import edgespec.setup.auto_devices
import edgespec.setup.device_choice
from edgespec import load
from edgespec.cli.main import main
from edgespec.engine.pair_export import PairHalf, add_forms
from edgespec.errors import DeviceUnavailable, MemoryExhausted, ModelError, UsageError
from edgespec.manifest import read_manifest
from edgespec.runtimes.devices import Device, device_key, find_device
from edgespec.setup.home import ModelHome
from edgespec.setup.pair import Pair, PairCheck, read_pair, record_check
from edgespec.setup.resolve import Resolved, resolve
from edgespec.setup.snapshot import LocalSource
from edgespec.setup.wish import Wish

CPU = find_device("cpu")
GPU = Device("cuda:1", CPU.provider, kind="gpu", index=1, hardware="RTX")
NPU = Device("qnn", CPU.provider, kind="npu")


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a second CUDA device, which is the only GPU that works, and an NPU."""
    there = {"auto": CPU, "cpu": CPU, "cuda:1": GPU, "gpu": GPU, "qnn": NPU, "npu": NPU}

    def find(name: str, option: str = "--device") -> Device:
        if name.lower() not in there:
            raise DeviceUnavailable(f"there is no device '{name}' here", device=name)
        return there[name.lower()]

    for module in (edgespec.setup.device_choice, edgespec.engine.pair_check, edgespec.runtimes.devices):
        monkeypatch.setattr(module, "find_device", find)


@pytest.fixture
def named(tmp_path: Path, devices: None) -> Callable[..., Resolved]:
    def find(model: Path, drafter: Path | str, device: str, drafter_device: str, **more: object) -> Resolved:
        names = {"drafter": str(drafter), "device": device, "drafter_device": drafter_device}
        return resolve(Wish(model=str(model), **names, home=tmp_path / "home", **more))  # type: ignore[arg-type]

    return find


def test_each_half_is_prepared_in_the_form_of_its_device_and_once(
    named: Callable[..., Resolved], tiny_gguf: Path, tmp_path: Path
) -> None:
    small = Path(shutil.copy(tiny_gguf, tmp_path / "small.gguf"))
    said: list[str] = []
    found = named(tiny_gguf, small, "cuda:1", "npu", report=said.append)
    assert (found.target.manifest.form, found.drafters[0].models[0].manifest.form) == ("gpu", "npu")
    assert (found.placement.device, found.placement.drafter_device) == (GPU, NPU)
    assert sum("writing" in line for line in said) == 2
    said.clear()
    assert named(tiny_gguf, small, "gpu", "qnn", report=said.append).target.folder == found.target.folder
    assert said == [], "another name of a device of the same kind"
    swapped = named(tiny_gguf, small, "cpu", "gpu", report=said.append)
    assert (swapped.target.manifest.form, swapped.drafters[0].models[0].manifest.form) == ("cpu", "gpu")


def test_devices_that_cannot_run_two_models_are_refused_before_one_is_prepared(
    named: Callable[..., Resolved], tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    webgpu = Device("webgpu", CPU.provider, "webgpu", kind="gpu")
    monkeypatch.setattr(edgespec.setup.device_choice, "find_device", lambda *name: webgpu)
    said: list[str] = []
    with pytest.raises(DeviceUnavailable, match="use drafter_device='cpu'"):
        named(tiny_gguf, tiny_gguf, "webgpu", "webgpu", report=said.append)
    assert said == []
    assert not (tmp_path / "home").exists()
    assert named(tiny_gguf, "suffix", "webgpu", "webgpu").target.manifest.form == "gpu"


@pytest.mark.usefixtures("devices")
def test_the_api_prepares_for_a_device_as_the_command_line_does(
    tiny_gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))
    with load(tiny_gguf, drafter="none", device="gpu") as engine:
        answer = engine.generate("the rain", max_tokens=4)
        assert engine.manifest.form == "gpu"
    command = ["chat", str(tiny_gguf), "--drafter", "none", "--device", "cuda:1", "--prompt", "the rain"]
    assert main([*command, "--max-tokens", "4", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["token_ids"] == list(answer.token_ids)
    assert document["stats"]["target_device"] == answer.stats.target_device == "cuda:1"
    assert [path.name[-4:] for path in (tmp_path / "home" / "models").iterdir() if path.is_dir()] == ["-gpu"]


@pytest.mark.usefixtures("devices")
def test_a_folder_whose_form_a_device_cannot_run_names_the_command_that_exports_the_right_one(
    tiny_model: Path, tiny_drafter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    how = ["chat", str(tiny_model), "--drafter", str(tiny_drafter), "--drafter-device", "npu", "--prompt", "the"]
    assert main([*how, "--max-tokens", "2"]) == 4
    (line,) = capsys.readouterr().err.splitlines()
    assert "in the cpu form, which runs on the CPU; for the npu form run: edgespec export tiny.gguf" in line
    assert "--device qnn --output DIR" in line
    assert main([*how, "--max-tokens", "2", "--allow-fallback"]) == 0
    assert "the CPU is used instead of 'qnn'" in capsys.readouterr().err


CHECK = PairCheck(
    target="tiny",
    drafter="tiny-int4",
    same_special_tokens=True,
    same_chat_template=True,
    greedy_acceptance=0.9,
    sampled_acceptance=0.9,
    draft_cost=0.1,
    expected_gain=2.0,
    num_draft=2,
    pays=True,
    verdict="it pays",
    reason="",
)


@pytest.fixture
def pair(tiny_model: Path, tiny_drafter: Path, tmp_path: Path) -> Path:
    """A pair that was measured on the CPU, with good result."""
    folder = tmp_path / "pair"
    for name, model in (("target", tiny_model), ("drafter", tiny_drafter)):
        shutil.copytree(model, folder / name)
    return measured(folder, CPU, CPU, pays=True)


def measured(folder: Path, device: Device, drafter_device: Device, *, pays: bool, target: str = "target") -> Path:
    keys = device_key(device), device_key(drafter_device)
    check = replace(CHECK, pays=pays, reason="" if pays else "it costs")
    record_check(folder, check, keys, (folder / target, folder / "drafter"))
    return folder


def test_checks_of_one_pair_that_end_at_once_are_all_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = ["cpu", "cuda", "qnn"]
    monkeypatch.setattr("edgespec.setup.pair.read_pair", lambda folder: (read_pair(folder), sleep(0.02))[0])
    parts = (tmp_path / "target", tmp_path / "drafter")
    with ThreadPoolExecutor() as pool:
        for device in devices:
            pool.submit(record_check, tmp_path, CHECK, (device, "cpu"), parts)
    found = read_pair(tmp_path)
    assert found is not None
    assert sorted(each.target_device for each in found.checks) == devices
    assert [path.name for path in tmp_path.iterdir()] == ["pair.json"]


def add_form(pair: Path, part: str, form: str) -> None:
    """A copy that states another form."""
    restate(Path(shutil.copytree(pair / part, pair / f"{part}-{form}")), form)


def restate(folder: Path, form: str) -> None:
    stated = json.loads((folder / "edgespec.json").read_text())
    (folder / "edgespec.json").write_text(json.dumps(stated | {"form": form}))


def test_a_pair_is_judged_by_its_check_on_the_devices_at_hand(named: Callable[..., Resolved], pair: Path) -> None:
    add_form(pair, "target", "gpu")
    said: list[str] = []
    assert len(named(pair, "auto", "cpu", "cpu", report=said.append).drafters) == 1
    assert said == []
    found = named(pair, "auto", "gpu", "cpu", report=said.append)
    assert found.target.folder == pair / "target-gpu"
    assert len(found.drafters) == 1, "what was not measured may be tried"
    assert said == [
        "this pair as it is was not measured on cuda:1 with its drafter on cpu; to measure it: "
        f"edgespec pair check {pair} --device cuda:1 --drafter-device cpu"
    ]
    said.clear()
    measured(pair, GPU, CPU, pays=False, target="target-gpu")
    assert named(pair, "auto", "gpu", "cpu", report=said.append).drafters == []
    assert said == ["drafting without the pair's drafter: it costs"]
    assert len(named(pair, "auto", "cpu", "cpu").drafters) == 1, "where it pays still"
    assert len(named(pair, str(pair), "gpu", "cpu").drafters) == 1, "and where it is named"


def test_auto_takes_the_form_of_a_pair_whose_device_is_there_and_its_check(
    named: Callable[..., Resolved], pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there: list[Device] = []
    for module in (edgespec.setup.device_choice, edgespec.setup.device_choice):
        monkeypatch.setattr(module, "find_accelerator", lambda kind: next(iter(there), None))
    monkeypatch.setattr("edgespec.setup.resolve.may_have_accelerator", lambda: False)
    measured(pair, CPU, CPU, pays=False)
    add_form(pair, "target", "cpu")
    restate(pair / "target", "gpu")
    said: list[str] = []
    found = named(pair, "auto", "auto", "auto", report=said.append)
    assert found.target.folder == pair / "target-cpu"
    assert found.devices.downgrades == []
    assert len(found.drafters) == 1, "it was measured with another target"
    assert said == [
        "this pair as it is was not measured on cpu with its drafter on cpu; to measure it: "
        f"edgespec pair check {pair} --device cpu --drafter-device cpu"
    ]
    assert named(pair, "auto", "cpu", "cpu").target.folder == found.target.folder, "which the command measures"
    there.append(GPU)
    on_gpu = named(pair, "auto", "auto", "cpu")
    assert (on_gpu.target.folder, on_gpu.placement.device) == (pair / "target", GPU)
    there.clear()
    shutil.rmtree(pair / "target-cpu")
    alone = named(pair, "auto", "auto", "auto")
    assert alone.target.folder == pair / "target"
    assert len(alone.devices.downgrades) == 1


def test_a_pair_without_the_form_of_a_device_names_the_command_that_adds_it(
    named: Callable[..., Resolved], pair: Path
) -> None:
    with pytest.raises(
        DeviceUnavailable, match=r"has its target in the cpu form, .* needs the gpu form"
    ) as refused:
        named(pair, "auto", "gpu", "cpu")
    command = f"edgespec export tiny.gguf --drafter tiny.gguf --device gpu --add-to {pair}"
    assert str(refused.value).endswith(command)
    assert refused.value.exit_code == 4
    with pytest.raises(DeviceUnavailable, match="--drafter-device npu --add-to"):
        named(pair, "auto", "cpu", "npu")
    add_form(pair, "drafter", "npu")
    assert named(pair, "auto", "cpu", "npu").drafters[0].models[0].folder == pair / "drafter-npu"
    assert named(pair, "auto", "gpu", "cpu", allow_fallback=True).target.folder == pair / "target"


def export(pair: Path, *options: str) -> list[str]:
    source = str(pair.parent / "t.gguf")
    return ["export", source, "--drafter", str(pair.parent / "d.gguf"), "--no-check", *options]


@pytest.fixture
def sources(tiny_gguf: Path, tmp_path: Path) -> Path:
    shutil.copy(tiny_gguf, tmp_path / "t.gguf")
    tiny.write_gguf(tmp_path / "d.gguf", tiny.random_weights(1))
    return tmp_path / "new"


def forms(pair: Path) -> dict[str, str]:
    return {path.name: read_manifest(path).form for path in sorted(pair.iterdir()) if path.is_dir()}


@pytest.mark.usefixtures("devices")
def test_a_pair_is_exported_for_devices_that_are_not_here_and_its_speed_is_unknown(
    sources: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for_devices = ["--device", "cuda", "--drafter-device", "openvino:npu"]
    assert main(export(sources, *for_devices, "--output", str(sources), "--dry-run", "--json")) == 0
    assert [plan["form"] for plan in json.loads(capsys.readouterr().out)] == ["gpu", "npu"]
    assert not sources.exists()
    assert main(export(sources, *for_devices, "--output", str(sources), "--json")) == 0
    reported = capsys.readouterr()
    assert json.loads(reported.out) is None
    assert "was not measured: there is no device 'cuda' here" in reported.err
    assert f"pair check {sources} --device cuda --drafter-device openvino:npu" in reported.err
    assert f"edgespec chat {sources} --device cuda --drafter-device openvino:npu" in reported.err
    assert forms(sources) == {"target": "gpu", "drafter": "npu"}
    assert read_pair(sources) == Pair(sources, ())


@pytest.mark.usefixtures("devices")
def test_a_pair_stays_where_memory_is_too_short_to_measure_it(
    sources: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object, **settings: object) -> None:
        raise MemoryExhausted("4 GB are needed and 2 GB are free")

    monkeypatch.setattr(edgespec.engine.pair_check, "measure_pair", refuse)
    named = ["--device", "gpu", "--drafter-device", "cpu"]
    assert main(export(sources, *named, "--output", str(sources))) == 0
    reported = capsys.readouterr()
    assert "whether its drafter saves time" in reported.out
    assert "was not measured: 4 GB are needed and 2 GB are free. To measure it once more memory" in reported.err
    assert reported.err.endswith(f"edgespec chat {sources} {' '.join(named)}\n"), (
        "both devices, as they were named"
    )
    assert read_pair(sources) == Pair(sources, ())


@pytest.mark.slow
@pytest.mark.usefixtures("devices")
def test_forms_are_added_to_a_pair_and_measured_there(sources: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(export(sources, "--output", str(sources))) == 0
    assert forms(sources) == {"target": "cpu", "drafter": "cpu"}
    added = ["--device", "gpu", "--add-to", str(sources)]
    assert main(export(sources, *added, "--dry-run", "--json")) == 0
    capsys.readouterr()
    assert main(export(sources, *added, "--json")) == 0
    assert json.loads(capsys.readouterr().out) == {"added": [str(sources / "target-gpu")]}
    assert main(export(sources, "--drafter-device", "npu", "--drafter-precision", "w8a16", *added)) == 0
    assert forms(sources) == {"target": "cpu", "target-gpu": "gpu", "drafter": "cpu", "drafter-npu": "npu"}
    assert read_manifest(sources / "drafter-npu").precision == "w8a16"
    assert {read_manifest(sources / part).name for part in ("target", "target-gpu")} == {"t"}
    capsys.readouterr()
    assert main(export(sources, *added)) == 0
    assert capsys.readouterr().out == f"{sources} has these forms already\n"
    assert main(["pair", "check", str(sources), "--device", "gpu", "--drafter-device", "npu", "--json"]) == 0
    check = json.loads(capsys.readouterr().out)
    found = read_pair(sources)
    assert found is not None
    assert [(each.target_device, each.drafter_device) for each in found.checks] == [
        ("cpu", "cpu"), ("cuda:1, RTX", "qnn"),
    ]  # fmt: skip
    assert found.checks[1].check.greedy_acceptance == check["greedy_acceptance"]
    assert sorted(found.checks[1].manifests) == ["drafter-npu", "target-gpu"]
    assert main(["models", "verify", str(sources)]) == 0


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize(
    ("options", "code", "problem"),
    [
        (
            ["--form", "npu", "--device", "gpu", "--output"],
            2,
            "--form npu contradicts --device gpu, which needs the",
        ),
        (["--drafter-form", "cpu", "--drafter-device", "qnn", "--output"], 2, "contradicts --drafter-device qnn"),
        (["--device", "cdua", "--output"], 2, "did you mean cuda?"),
        (["--device", "webgpu", "--drafter-device", "webgpu", "--output"], 4, "use --drafter-device cpu, or"),
        (
            ["--device", "webgpu", "--drafter-device", "webgpu:1", "--output"],
            4,
            "'webgpu:1' cannot be used together",
        ),
        (["--device", "openvino", "--output"], 4, "name one: openvino:gpu or openvino:npu"),
        (["--add-to"], 2, "give --device, --form, --drafter-device or --drafter-form"),
        (["--drafter", "none", "--output"], 2, "--drafter none is not a pair; leave --drafter out"),
        (["--drafter", "none", "--device", "gpu", "--add-to"], 2, "name the source of the pair's drafter"),
        (["--device", "gpu", "--add-to"], 3, "is not a pair folder"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_read(
    sources: Path, capsys: pytest.CaptureFixture[str], options: list[str], code: int, problem: str
) -> None:
    assert main(export(sources, *options, str(sources))) == code
    assert problem in capsys.readouterr().err
    assert not sources.exists()


def test_options_of_a_pair_are_refused_without_one(tiny_gguf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for option in (["--drafter-form", "npu"], ["--drafter-device", "npu"], ["--drafter-precision", "int4"]):
        assert main(["export", str(tiny_gguf), *option, "--output", "x"]) == 2
        assert f"{option[0]} is for a pair; give --drafter too" in capsys.readouterr().err


def test_only_the_sources_of_a_pair_are_added_to_it(
    pair: Path, sources: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [
        "export",
        str(sources.parent / "d.gguf"),
        "--drafter",
        "x",
        "--device",
        "gpu",
        "--add-to",
        str(pair),
    ]
    assert main(command) == 2
    assert "is not the source of the pair's target, which was exported from tiny.gguf" in capsys.readouterr().err
    assert forms(pair) == {"target": "cpu", "drafter": "cpu"}


def test_form_that_another_process_adds_meanwhile_is_no_error(
    pair: Path, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export_model = edgespec.engine.pair_export.export_model

    def export_second(source: Path, output: Path, **how: object) -> object:
        if output.name == "target-gpu":
            add_form(pair, "target", "gpu")
        return export_model(source, output, **how)  # type: ignore[arg-type]

    monkeypatch.setattr(edgespec.engine.pair_export, "export_model", export_second)
    source = LocalSource(path=tiny_gguf)
    said: list[str] = []
    halves = [PairHalf(part=part, source=source, form="gpu", device="webgpu") for part in ("target", "drafter")]
    target = PairHalf(part="target", source=source)
    assert add_forms(pair, target, halves, report=said.append) == [pair / "drafter-gpu"]
    assert f"another process has added {pair / 'target-gpu'} in the meantime" in said
    assert {"target-gpu": "gpu", "drafter-gpu": "gpu"}.items() <= forms(pair).items()
    (pair / "target-npu").write_text("")
    npu = PairHalf(part="target", source=source, form="npu", device="npu", precision="fp16")
    with pytest.raises(UsageError, match="already exists"):
        add_forms(pair, target, [npu])


@pytest.mark.usefixtures("devices")
def test_models_are_pulled_for_a_device_and_listed_with_their_forms(
    tiny_gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))
    assert main(["models", "pull", str(tiny_gguf), "--device", "cuda"]) == 0
    folder = Path(capsys.readouterr().out.strip())
    assert folder.name.endswith("-gpu")
    assert main(["models", "list", "--json"]) == 0
    (listed,) = json.loads(capsys.readouterr().out)["prepared"]
    assert (listed["path"], listed["form"]) == (str(folder), "gpu")
    assert main(["models", "list"]) == 0
    assert capsys.readouterr().out.split("\n")[1].split()[5] == "gpu"


def test_an_unknown_drafter_is_refused_before_a_model_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelHome, "resolve", lambda *names, **settings: pytest.fail("a model is prepared"))
    with pytest.raises(ModelError, match="no model 'sufix': did you mean the drafter suffix"):
        load("smollm2-135m", drafter="ngram+sufix", home=tmp_path, offline=True)
    assert not any(tmp_path.iterdir())
