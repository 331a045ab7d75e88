"""A folder that an NVIDIA GPU runs only slowly, and a driver that is too old; the GPU is imitated."""

import shutil
from pathlib import Path

import onnx
import pytest
from fake_cuda import FakeGpu
from faulty import edit_graph

from edgespec.cli.main import main
from edgespec.memory.device_memory import Nvidia, NvidiaGpu
from edgespec.runtimes import devices

COMMAND = ["--device", "cuda", "--drafter", "none", "--prompt", "in the an", "--max-tokens", "12"]


def test_a_folder_that_ends_in_another_form_answers_alike_with_a_line_that_says_what_to_do(
    gpu: FakeGpu, gpu_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def end_otherwise(proto: onnx.ModelProto) -> None:
        (last,) = (node for node in proto.graph.node if "best" in node.output)
        last.output[0] = "as_given"
        proto.graph.node.append(onnx.helper.make_node("Identity", ["as_given"], ["best"]))

    assert main(["chat", str(gpu_model), *COMMAND]) == 0
    wanted = capsys.readouterr()
    assert "may run slowly" not in wanted.err
    older = Path(shutil.copytree(gpu_model, tmp_path / "older"))
    edit_graph(older, end_otherwise)
    assert main(["chat", str(older), *COMMAND]) == 0
    found = capsys.readouterr()
    assert found.out == wanted.out
    assert "model.onnx ends in a way that 'cuda' may run slowly; export the model again" in found.err


def test_a_driver_that_is_too_old_ends_with_exit_code_4_and_the_version_that_is_needed(
    gpu_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    driver = Nvidia("550.54", (12, 4), (NvidiaGpu("NVIDIA Imitation", 24 << 30, 20 << 30),))
    monkeypatch.setattr(devices, "read_nvidia_driver", lambda: driver)
    assert main(["chat", str(gpu_model), *COMMAND]) == 4
    found = capsys.readouterr()
    assert "NVIDIA driver 550.54 supports CUDA 12.4, and onnxruntime-gpu needs 13.0" in found.err
    assert "update the NVIDIA driver to 580 or newer" in found.err
    assert found.out == ""
    assert "Traceback" not in found.err
