"""Compiled graphs are kept, made again where they no longer fit, and deleted with the model (no compiler runs)."""

import json
import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edgespec.cli.main import main
from edgespec.errors import DeviceUnavailable, IntegrityError, MemoryExhausted
from edgespec.export.convert import export_model
from edgespec.manifest import COMPILED, Manifest, read_manifest
from edgespec.runtimes import compiled_graphs
from edgespec.runtimes.compiled_graphs import RECORD, load_graphs
from edgespec.runtimes.devices import Device
from edgespec.runtimes.plugins import QNN_SHARED_MEMORY
from edgespec.setup.home import ModelHome
from edgespec.setup.inventory import Inventory

GRAPHS = ("model.onnx", "model_prefill.onnx")


def device(kind: str = "NPU", *, provider: str = "OpenVINOExecutionProvider", **facts: str) -> Device:
    hardware = SimpleNamespace(type=f"OrtHardwareDeviceType.{kind}", vendor_id=32902, device_id=7)
    handle = SimpleNamespace(device=hardware, ep_metadata={"version": "1", "library_path": "/lib", **facts})
    return Device("npu", provider, handles=(handle,), kind="npu")


class Compiler:
    """Stands in for ONNX Runtime: counts what it compiles, and loads what a device does not refuse."""

    def __init__(self) -> None:
        self.compiled: list[tuple[str, bool]] = []
        self.loaded: list[tuple[Path, Device]] = []
        self.refuses: Callable[[Path, Device], bool] = lambda graph, device: False
        self.error: Exception | None = None

    def compile(
        self, folder: Path, graphs: list[str], output: Path, device: Device, shares_weights: bool, **_: Any
    ) -> None:
        if self.error:
            raise self.error
        for graph in graphs:
            self.compiled.append((graph, shares_weights))
            (output / graph).write_text(f"{graph} for {device.name}")
            (output / graph).with_suffix(".bin").write_bytes(b"compiled" * 100)

    def load(self, graph: Path, device: Device, **_: Any) -> tuple[Path, Device]:
        if self.refuses(graph, device):
            raise DeviceUnavailable("refused", device=device.name)
        self.loaded.append((graph, device))
        return graph, device


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Compiler:
    caplog.set_level(logging.INFO, logger="edgespec")
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))
    compiler = Compiler()
    monkeypatch.setattr(compiled_graphs, "_compile_graphs", compiler.compile)
    monkeypatch.setattr(compiled_graphs, "load_graph", compiler.load)
    return compiler


@pytest.fixture(scope="module")
def exported(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compiled") / "tiny"
    export_model(tiny_gguf, folder, precision="fp32", form="npu")
    return folder


@pytest.fixture
def model(exported: Path, tmp_path: Path) -> Path:
    shutil.copytree(exported, tmp_path / "home" / "models" / "tiny")
    return tmp_path / "home" / "models" / "tiny"


def load(model: Path, on: Device, manifest: Manifest | None = None) -> list[Path]:
    """The files that were loaded."""
    return [path for path, _ in load_graphs(model, manifest or read_manifest(model), GRAPHS, on)]


def kept(model: Path) -> list[Path]:
    return sorted((model / COMPILED).iterdir())


def test_only_the_first_load_compiles(model: Path, compiler: Compiler, caplog: pytest.LogCaptureFixture) -> None:
    first = load(model, device())
    assert "can take minutes" in caplog.text
    assert load(model, device()) == first == [kept(model)[0] / graph for graph in GRAPHS]
    assert len(compiler.compiled) == 2
    assert len(kept(model)) == 1


def test_another_provider_loads_graphs_as_they_are(model: Path, compiler: Compiler) -> None:
    assert load(model, replace(device(), provider="CPUExecutionProvider")) == [model / graph for graph in GRAPHS]
    assert not compiler.compiled
    assert not (model / COMPILED).exists()


def test_other_versions_compile_again_and_delete_what_was_outdated(model: Path, compiler: Compiler) -> None:
    load(model, device())
    load(model, device(ov_device="NPU.1"))  # another device: both are kept
    assert len(kept(model)) == 2
    (newer,) = {path.parent for path in load(model, device(version="2"))}
    assert len(compiler.compiled) == 6
    assert newer in kept(model)
    assert len(kept(model)) == 2
    load(model, device(ov_device="NPU.1"))
    assert len(compiler.compiled) == 6


def test_options_and_the_files_of_the_model_are_part_of_the_key(model: Path, compiler: Compiler) -> None:
    load(model, device())
    load(model, replace(device(), options=(("load_config", "{}"),)))
    assert len(compiler.compiled) == 4
    manifest = read_manifest(model)
    with (model / "model.onnx.data").open("ab") as weights:
        weights.write(b"\0")
    record = compiled_graphs.file_record(model / "model.onnx.data")
    load(model, device(), replace(manifest, files={**manifest.files, "model.onnx.data": record}))
    assert len(compiler.compiled) == 6


@pytest.mark.parametrize("damage", ["flip", "cut", "delete", "no record", "bad record", "foreign name"])
def test_what_is_damaged_is_reported_and_compiled_again(
    model: Path, compiler: Compiler, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    path = load(model, device())[0].with_suffix(".bin")
    record = path.parent / RECORD
    if damage == "flip":
        path.write_bytes(b"c0mpiled" * 100)
    elif damage == "cut":
        path.write_bytes(b"compiled")
    elif damage == "delete":
        path.unlink()
    elif damage == "no record":
        record.unlink()
    elif damage == "bad record":
        record.write_text("{}")
    else:
        document = json.loads(record.read_text())
        document["files"]["../../model.onnx"] = document["files"].pop("model.onnx")
        record.write_text(json.dumps(document))
    caplog.clear()
    assert load(model, device())[0].parent != path.parent
    (warning,) = [each.message for each in caplog.records if each.levelno == logging.WARNING]
    assert "cannot be used" in warning
    assert len(compiler.compiled) == 4
    assert len(kept(model)) == 1


def test_what_a_device_refuses_is_compiled_again_and_then_loaded_as_it_is(
    model: Path, compiler: Compiler, caplog: pytest.LogCaptureFixture
) -> None:
    load(model, device())
    compiler.refuses = lambda graph, device: COMPILED in graph.parts
    assert load(model, device()) == [model / graph for graph in GRAPHS]
    assert "refused" in caplog.text
    assert not kept(model)


def test_a_compiler_that_fails_is_reported_and_graphs_are_loaded_as_they_are(
    model: Path, compiler: Compiler, caplog: pytest.LogCaptureFixture
) -> None:
    compiler.error = DeviceUnavailable("no kernel for Gemm")
    assert load(model, device()) == [model / graph for graph in GRAPHS]
    assert "no kernel for Gemm" in caplog.text
    assert not kept(model)
    compiler.error = MemoryExhausted("too large")
    with pytest.raises(MemoryExhausted):
        load(model, device())
    assert not kept(model)


def test_a_folder_that_cannot_be_written_leaves_it_to_the_model_home(
    model: Path, compiler: Compiler, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    (model / COMPILED).write_text("a file where the folder would be")
    place = load(model, device())[0].parent
    assert place.is_relative_to(tmp_path / "home" / COMPILED)
    assert load(model, device())[0].parent == place
    assert len(compiler.compiled) == 2
    shutil.rmtree(tmp_path / "home" / COMPILED)
    (tmp_path / "home" / COMPILED).write_text("and here")
    assert load(model, device()) == [model / graph for graph in GRAPHS]
    assert "compiled at each load" in caplog.text


def test_prompt_graph_and_step_graph_share_weights_where_the_device_loads_that(
    model: Path, compiler: Compiler, caplog: pytest.LogCaptureFixture
) -> None:
    paths = load(model, device())
    assert compiler.compiled == [(graph, True) for graph in GRAPHS]
    assert os.path.samefile(paths[0].parent / "model.onnx.data", model / "model.onnx.data")
    assert all(("ep.share_ep_contexts", "1") in each.entries for _, each in compiler.loaded)
    # One that does not: compiled apart, and loaded without that.
    compiler.refuses = lambda graph, device: bool(device.entries)
    shutil.rmtree(model / COMPILED)
    apart = load(model, device())
    assert compiler.compiled[2:] == [(graph, shares) for shares in (True, False) for graph in GRAPHS]
    assert not (apart[0].parent / "model.onnx.data").exists()
    assert "cannot be used" in caplog.text
    compiler.loaded.clear()
    assert load(model, device()) == apart
    assert not any(each.entries for _, each in compiler.loaded)
    # The emulator, which is known not to.
    load(model, device("CPU", provider="QNNExecutionProvider"))
    assert compiler.compiled[-2:] == [(graph, False) for graph in GRAPHS]


def test_memory_shared_with_the_device_is_asked_for_and_done_without(model: Path, compiler: Compiler) -> None:
    asking = replace(device(), options=(("htp_performance_mode", "burst"), QNN_SHARED_MEMORY))
    place = load(model, asking)[0].parent
    assert all(QNN_SHARED_MEMORY in each.options for _, each in compiler.loaded)
    compiler.refuses = lambda graph, device: QNN_SHARED_MEMORY in device.options
    compiler.loaded.clear()
    assert load(model, asking)[0].parent == place  # the driver's library is gone; what was compiled still fits
    assert all(each.options == (("htp_performance_mode", "burst"),) for _, each in compiler.loaded)


def test_nothing_is_compiled_of_a_damaged_model(model: Path, compiler: Compiler) -> None:
    data = bytearray((model / "model.onnx.data").read_bytes())
    data[100] ^= 1
    (model / "model.onnx.data").write_bytes(data)
    with pytest.raises(IntegrityError, match=r"model\.onnx\.data was changed"):
        load(model, device())
    assert not (model / COMPILED).exists()


@pytest.mark.parametrize("is_writable", [True, False])
def test_models_list_verify_and_remove_know_compiled_graphs(
    model: Path, compiler: Compiler, tmp_path: Path, capsys: pytest.CaptureFixture[str], is_writable: bool
) -> None:
    home = ModelHome(tmp_path / "home", offline=True)
    (before,) = Inventory(home).models()
    if not is_writable:
        (model / COMPILED).write_text("")
    place = load(model, device())[0].parent
    (after,) = Inventory(home).models()
    files = [path for path in place.iterdir() if path.name != "model.onnx.data"]
    assert after.bytes - before.bytes == sum(path.stat().st_size for path in files)
    num_files = len(read_manifest(model).files) + len(files)
    assert Inventory(home).verify("tiny") == (num_files, [])
    (place / "model.bin").write_bytes(b"")
    assert main(["models", "verify", "tiny"]) == 6
    assert "compiles it again" in capsys.readouterr().out
    assert main(["models", "pull", "tiny"]) == 0
    said = capsys.readouterr().err
    assert "deleted; the next load compiles it again" in said
    assert "preparing" not in said
    assert Inventory(home).verify("tiny") == (len(read_manifest(model).files), [])
    place = load(model, device())[0].parent
    Inventory(home).remove("tiny")
    assert not place.exists()
