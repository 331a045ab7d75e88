"""Models and pairs that are prepared for the WebGPU provider by naming it, on a GPU or on one in software."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny

from edgespec.export.convert import export_model
from edgespec.manifest import read_manifest
from edgespec.runtimes.devices import find_device
from edgespec.runtimes.driver_check import lacks_half_floats

pytestmark = pytest.mark.webgpu


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target in single precision, which every adapter runs."""
    folder = tmp_path_factory.mktemp("models")
    tiny.write_gguf(folder / "tiny.gguf", tiny.random_weights())
    export_model(folder / "tiny.gguf", folder / "target", precision="fp32", form="gpu")
    return folder


def run(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "edgespec", *arguments]
    return subprocess.run(
        command, env={**os.environ, "EDGESPEC_HOME": str(home)}, capture_output=True, text=True, timeout=300
    )


def test_a_source_is_prepared_for_the_device_in_a_precision_that_it_computes(models: Path, tmp_path: Path) -> None:
    lacks = lacks_half_floats(find_device("webgpu"))
    chat = ["chat", str(models / "tiny.gguf"), "--drafter", "none", "--prompt", "the rain in", "--max-tokens", "4"]
    done = run(tmp_path, *chat, "--device", "webgpu", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["stats"]["target_device"] == "webgpu"
    assert ("no half floats" in done.stderr) == lacks
    (folder,) = [path for path in (tmp_path / "models").iterdir() if path.is_dir()]
    assert folder.name.endswith("-fp32-gpu") == lacks
    assert read_manifest(folder).form == "gpu"
    again = run(tmp_path, *chat, "--device", "webgpu", "--json")
    assert json.loads(again.stdout)["token_ids"] == json.loads(done.stdout)["token_ids"]
    assert "writing" not in again.stderr


def test_a_pair_is_exported_for_the_device_and_its_speed_is_left_open(models: Path, tmp_path: Path) -> None:
    pair = tmp_path / "pair"
    source = str(models / "tiny.gguf")
    devices = ["--device", "webgpu", "--drafter-device", "cpu"]
    done = run(tmp_path, "export", source, "--drafter", source, *devices, "--no-check", "--output", str(pair))
    assert done.returncode == 0, done.stderr
    if find_device("webgpu").is_software:
        assert "'webgpu' is an emulator" in done.stderr
    done = run(tmp_path, "chat", str(pair), *devices, "--prompt", "the rain in", "--max-tokens", "8", "--json")
    assert done.returncode == 0, done.stderr
    stats = json.loads(done.stdout)["stats"]
    assert (stats["target_device"], stats["drafter_device"]) == ("webgpu", "cpu")


def test_a_software_adapter_is_no_gpu_unless_it_is_named(models: Path, tmp_path: Path) -> None:
    if not find_device("webgpu").is_software:
        pytest.skip("needs a machine without a GPU")
    done = run(tmp_path, "chat", str(models / "target"), "--device", "gpu", "--prompt", "hi")
    assert (done.returncode, done.stdout) == (4, "")
    assert "--device webgpu" in done.stderr
