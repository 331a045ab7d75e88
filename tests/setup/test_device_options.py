"""Options on devices by made-up probes and free memory; the models are tiny folders."""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from made_up import manifest

from edgespec.errors import DeviceUnavailable, SourceError
from edgespec.manifest import read_manifest
from edgespec.memory.free_memory import HOST, FreeMemory
from edgespec.runtimes.devices import Device, find_device
from edgespec.runtimes.probe import DeviceProbe
from edgespec.setup import device_options, memory_fit
from edgespec.setup.device_choice import Placement
from edgespec.setup.device_options import DeviceOptions
from edgespec.setup.device_search import Refusal, Where
from edgespec.setup.foresee import ModelForms, ModelSize
from edgespec.setup.open_model import ModelFolder
from edgespec.setup.profile import FILE_NAME, LearnedStats, Profile, write_learned_stats

CPU = find_device("cpu")
GPU = Device("cuda", "CUDAExecutionProvider", "cuda", kind="gpu")
NPU = Device("qnn", "QNNExecutionProvider", kind="npu")
DEVICES = {device.name: device for device in (CPU, GPU, NPU)}
PROBES = {
    "cpu": DeviceProbe(bytes_per_s=4e10, node_s=0.0, start_s=0.0, rows={1: 1.0, 8: 2.0}),
    "cuda": DeviceProbe(bytes_per_s=4e11, node_s=0.0, start_s=0.0, rows={1: 1.0, 8: 1.1}),
    "qnn": DeviceProbe(bytes_per_s=4e10, node_s=0.0, start_s=0.0),
}
GIB = 1 << 30


def unprepared(name: str, num_bytes: int) -> ModelForms:
    size = ModelSize(manifest=manifest(name), file_bytes=num_bytes)
    return ModelForms(name=name, find=lambda device: None, prepare=pytest.fail, foresee=lambda device: size)


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> Callable[..., DeviceOptions]:
    def make(target: ModelForms, *drafters: ModelForms, gpu_gib: float = 24, **how: object) -> DeviceOptions:
        free = {HOST: FreeMemory(64 * GIB, "a test"), "cuda": FreeMemory(int(gpu_gib * GIB), "a test")}

        class Places:
            def __init__(self, *more: object) -> None: ...

            def place_of(self, kind: str) -> str:
                return kind if kind == "cuda" else HOST

            def __call__(self) -> Mapping[str, FreeMemory]:
                return free

        monkeypatch.setattr(memory_fit, "Places", Places)
        known = {
            "texts": {"auto"},
            "placement": Placement(device=CPU, drafter_device=CPU, num_threads=2),
            "devices": DEVICES,
            "probes": PROBES,
            "named": (),
            "free": lambda: free[HOST],
            "report": print,
        }
        return DeviceOptions(target=target, drafters=drafters, **{**known, **how})  # type: ignore[arg-type]

    return make


def test_speed_on_each_device_follows_from_its_probe(options: Callable[..., DeviceOptions]) -> None:
    found = options(unprepared("target", 4 * 10**9))
    rates = {name: found.foresee(Where(name, "cpu"))[0][1].tokens_per_second for name in ("cpu", "cuda")}
    assert rates == {"cpu": pytest.approx(10, rel=0.01), "cuda": pytest.approx(100, rel=0.01)}


def test_model_that_does_not_fit_a_gpu_is_refused_for_its_memory(options: Callable[..., DeviceOptions]) -> None:
    models = unprepared("target", 4 * 10**9), unprepared("drafter", 4 * 10**8)
    for gpu_gib, fits in ((24, True), (3, False)):
        weighed = options(*models, gpu_gib=gpu_gib).foresee(Where("cuda", "cpu"))
        assert {bool(option.context_length) for _, option in weighed if option.schedule != "hedged"} == {fits}
        if not fits:
            assert all("of cuda memory, and" in case.fit.shortage for case, _ in weighed)


def test_drafter_on_the_targets_device_takes_turns_with_it(options: Callable[..., DeviceOptions]) -> None:
    found = options(unprepared("target", 4 * 10**9), unprepared("drafter", 4 * 10**8))
    best = {}
    for other in ("cpu", "cuda"):
        weighed = found.foresee(Where("cuda", other))
        best[other] = {option.schedule: option.tokens_per_second for _, option in weighed}
    assert best["cuda"]["pipelined"] < best["cuda"]["serial"]
    assert best["cuda"]["serial"] > best["cpu"]["serial"]  # of the two, the GPU drafts ten times as fast


def test_hedging_is_left_to_devices_that_run_trees(options: Callable[..., DeviceOptions]) -> None:
    size = ModelSize(manifest=replace(manifest("drafter"), tree_graph="model_tree.onnx"), file_bytes=4 * 10**8)
    drafter = replace(unprepared("drafter", 1), foresee=lambda device: size)
    found = options(unprepared("target", 4 * 10**9), drafter)
    hedged = {
        other: [option for _, option in found.foresee(Where("cuda", other)) if option.schedule == "hedged"]
        for other in ("cpu", "qnn")
    }
    assert hedged["cpu"][0].context_length > 0
    assert hedged["qnn"][0].context_length == 0


def test_what_a_drafter_has_drafted_in_one_form_counts_for_the_others(
    options: Callable[..., DeviceOptions], tiny_model: Path, tiny_drafter: Path, tmp_path: Path
) -> None:
    target = Path(shutil.copytree(tiny_model, tmp_path / "target", ignore=shutil.ignore_patterns(FILE_NAME)))
    write_learned_stats(target, LearnedStats(chances={("one", 0): (3.0, 4.0), ("other", 0): (1.0, 4.0)}))
    here = ModelFolder(target, read_manifest(target))
    forms = {
        "cpu": ModelFolder(tiny_drafter, replace(read_manifest(tiny_drafter), name="one")),
        "cuda": ModelFolder(tmp_path / "elsewhere", replace(read_manifest(tiny_drafter), name="other")),
    }
    drafter = replace(unprepared("drafter", 1), find=lambda device: forms.get(device.name))
    past = options(replace(unprepared("target", 1), find=lambda device: here), drafter).past()
    assert past["one", 0] == past["other", 0] == (4.0, 8.0)


def test_a_target_that_was_measured_earlier_is_foreseen_by_that_and_not_by_a_probe(
    options: Callable[..., DeviceOptions], tiny_model: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_model, tmp_path / "target", ignore=shutil.ignore_patterns(FILE_NAME)))
    here = ModelFolder(folder, read_manifest(folder))
    target, where = replace(unprepared("target", 1), find=lambda device: here), Where("cuda", "cpu")
    profile = Profile(passes_s={64: {1: 0.25, 2: 0.25, 32: 0.5}}, prefill_s=0.001)
    machine = options(target).place(where).machine
    write_learned_stats(folder, LearnedStats().with_profile(machine, profile, {}, None))
    ((case, option),) = options(target).foresee(where)
    assert (case.step_s, option.tokens_per_second) == (0.25, 4.0)
    assert not option.is_measured, "what may be chosen is measured with its drafters first"
    assert options(target, remeasure=True).foresee(where)[0][0].step_s < 0.01


@pytest.mark.parametrize("is_drafter", [False, True])
def test_form_that_cannot_be_exported_refuses_its_device_alone(
    options: Callable[..., DeviceOptions], tiny_model: Path, is_drafter: bool
) -> None:
    def fail(device: Device) -> ModelFolder:
        raise SourceError(f"no {device.form} form")

    here = ModelFolder(tiny_model, read_manifest(tiny_model))
    whole = replace(unprepared("whole", 1), find=lambda device: here)
    partial = replace(unprepared("partial", 1), prepare=fail)
    found = options(*((whole, partial) if is_drafter else (partial, whole)))
    refusal = found.measure(Where("cuda", "qnn"))
    expected = (None, "qnn", "no npu form") if is_drafter else ("cuda", None, "no gpu form")
    assert refusal == Refusal(*expected)
    with pytest.raises(SourceError):  # what the CPU cannot have, no device can
        found.measure(Where("cpu", "cpu"))


def test_device_that_does_not_open_a_model_is_refused_by_its_name(
    options: Callable[..., DeviceOptions], tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = ModelFolder(tiny_model, read_manifest(tiny_model))
    found = options(replace(unprepared("target", 1), find=lambda device: here))
    for device, expected in (("cuda", Refusal("cuda", None, "broken")), ("toaster", None)):

        def weigh_models(*models: object, device: str = device, **how: object) -> None:
            raise DeviceUnavailable("broken", device=device)

        monkeypatch.setattr(device_options, "weigh_models", weigh_models)
        if expected is None:
            with pytest.raises(DeviceUnavailable):
                found.measure(Where("cuda", "cpu"))
        else:
            assert found.measure(Where("cuda", "cpu")) == expected
