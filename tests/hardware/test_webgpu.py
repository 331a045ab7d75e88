"""A target on the WebGPU provider and a drafter on the CPU, in one process.

Where there is no GPU a software adapter runs it: SwiftShader, as Debian's chromium has it. It shows that the path
works, not how fast it is.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny

from edgespec.export.convert import export_model
from edgespec.manifest import read_manifest
from edgespec.runtimes.devices import find_device
from edgespec.runtimes.half_floats import lacks_half_floats
from edgespec.runtimes.node_placement import read_node_placement
from edgespec.runtimes.onnx import OnnxDecoder

ADAPTER = Path("/usr/lib/chromium/vk_swiftshader_icd.json")
pytestmark = [
    pytest.mark.webgpu,
    pytest.mark.skipif(
        not os.environ.get("EDGESPEC_TEST_WEBGPU"), reason="wants its provider; run make test-webgpu"
    ),
]


@pytest.fixture(scope="module", autouse=True)
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A driver missing on Linux fails the tests: they are there to run."""
    with pytest.MonkeyPatch.context() as patch:
        if sys.platform == "linux" and "VK_ICD_FILENAMES" not in os.environ:
            assert ADAPTER.exists(), f"{ADAPTER} is missing; run: apt-get install libvulkan1 chromium"
            patch.setenv("VK_ICD_FILENAMES", str(ADAPTER))
            patch.setenv("ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER", "1")
        patch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime")))
        yield


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target in single precision, which both providers round alike but in the last bits; a drafter in 4 bits."""
    folder = tmp_path_factory.mktemp("models")
    tiny.write_gguf(folder / "tiny.gguf", tiny.random_weights())
    export_model(folder / "tiny.gguf", folder / "target", precision="fp32", form="gpu")
    export_model(folder / "tiny.gguf", folder / "drafter", precision="int4")
    return folder


def answer(models: Path, device: str, *more: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "edgespec", "chat", str(models / "target"), "--device", device]
    command += ["--prompt", "the rain in", "--max-tokens", "24", "--json", *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def test_rows_are_those_of_the_cpu_however_passes_are_cut(models: Path) -> None:
    folder = models / "target"
    manifest = read_manifest(folder)
    here, there = (OnnxDecoder(folder, manifest, find_device(name)) for name in ("cpu", "webgpu"))
    tokens = np.random.default_rng(0).integers(0, manifest.vocab_size, 300).astype(np.int32)
    for num_tokens, num_last in ((10, 10), (13, 3), (14, 1), (11, 1), (290, 2), (300, 5), (40, 4)):
        expected = here.logits(tokens[:num_tokens], num_last)
        np.testing.assert_allclose(there.logits(tokens[:num_tokens], num_last), expected, atol=1e-3)


def test_tokens_are_chosen_where_rows_are_made(models: Path) -> None:
    folder = models / "target"
    decoder = OnnxDecoder(folder, read_manifest(folder), find_device("webgpu"))
    nodes = read_node_placement(decoder._passes._session)["WebGpuExecutionProvider"]
    assert {"ReduceMax", "Equal", "Where", "ReduceMin", "ReduceSum", "Concat"} <= nodes.keys()
    assert decoder.has_argmax
    tokens = np.random.default_rng(1).integers(0, decoder.vocab_size, 300).astype(np.int32)
    for num_tokens, num_last in ((10, 10), (13, 3), (14, 1), (290, 2), (300, 5), (40, 4)):
        found = decoder.argmax(tokens[:num_tokens], num_last)
        rows = decoder.logits(tokens[:num_tokens], num_last)
        assert found.is_sound.all()
        assert found.ids.tolist() == rows.argmax(1).tolist()


def test_text_is_that_of_the_cpu_with_a_drafter_at_work_meanwhile(models: Path, tmp_path: Path) -> None:
    plain = answer(models, "cpu", "--drafter", "none")
    drafting = ["--drafter", str(models / "drafter"), "--draft-length", "3"]
    for schedule in ("serial", "pipelined"):
        trace = tmp_path / f"{schedule}.json"
        found = answer(models, "webgpu", *drafting, "--schedule", schedule, "--trace", str(trace))
        assert found["token_ids"] == plain["token_ids"]
        assert (found["stats"]["target_device"], found["stats"]["drafter_device"]) == ("webgpu", "cpu")
        assert found["stats"]["num_accepted"] > 0
        assert (found["stats"]["overlap"] > 0) == (schedule == "pipelined")


def test_graph_that_would_run_there_in_part_is_refused(models: Path, tmp_path: Path) -> None:
    export_model(models / "tiny.gguf", tmp_path / "cpu-form", precision="fp32")
    command = [sys.executable, "-m", "edgespec", "chat", str(tmp_path / "cpu-form"), "--device", "webgpu"]
    done = subprocess.run([*command, "--prompt", "hi"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 4
    assert "no kernel here for 9 FusedMatMul" in done.stderr
    assert done.stdout == ""


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
        pytest.skip("this machine has a GPU")
    done = run(tmp_path, "chat", str(models / "target"), "--device", "gpu", "--prompt", "hi")
    assert (done.returncode, done.stdout) == (4, "")
    assert "--device webgpu" in done.stderr
