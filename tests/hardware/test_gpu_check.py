"""The check of a device: its verdicts as values, and a run of it on the CPU."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compare_with_cpu import compare_rows, compare_texts, compare_with_cpu
from device_figures.budget import Budget, LeftOut
from device_figures.page import format_machine, format_memory
from device_figures.passes import bytes_of_pass
from random_model import DRAFTER_LAYERS, NUM_KNOWN, SHAPES, drafter_of, write_model
from safetensors.numpy import load_file
from table_decoder import TableDecoder

from edgespec.manifest import Signature, read_manifest
from edgespec.types import Logits

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_check.py"


def spread_rows(seed: int = 0) -> Logits:
    return np.random.default_rng(seed).normal(0, 2, (24, 300)).astype(np.float32)


def test_rounding_is_right_and_says_how_far_rows_are_apart() -> None:
    rows = spread_rows()
    found = compare_rows(rows + np.float32(0.02), rows)
    assert (found["verdict"], found["near_ties"], found["wrong"]) == ("right", 0, 0)
    assert found["largest_difference"] == pytest.approx(0.01, rel=0.05)


def test_near_ties_are_distinguished_from_wrong_tokens() -> None:
    expected = spread_rows()
    expected[3, :2] = [20.0, 19.97]  # nearly tied; and far apart:
    expected[5, :2] = [20.0, 15.0]
    rows = expected + np.random.default_rng(1).normal(0, 0.02, expected.shape).astype(np.float32)
    rows[3, :2] = [19.98, 19.99]
    found = compare_rows(rows, expected)
    assert (found["verdict"], found["near_ties"], found["wrong"]) == ("right", 1, 0)
    rows[5, :2] = [15.0, 15.2]
    found = compare_rows(rows, expected)
    assert (found["verdict"], found["near_ties"], found["wrong"]) == ("wrong", 1, 1)


@pytest.mark.parametrize("spoilt", [np.nan, np.inf, 300.0])
def test_a_spoilt_row_is_wrong(spoilt: float) -> None:
    rows = spread_rows()
    rows[7, 11] = spoilt
    assert compare_rows(rows, spread_rows())["verdict"] == "wrong"


def test_a_decoder_is_right_beside_itself_and_wrong_beside_another() -> None:
    one, other = (TableDecoder(300, seed) for seed in (0, 1))
    itself, another = compare_with_cpu(one, one), compare_with_cpu(one, other)
    assert (itself["verdict"], itself["greedy"]["first_difference"]) == ("right", None)
    assert (another["verdict"], another["greedy"]["first_difference"]) == ("wrong", 0)


def test_texts_are_the_same_or_differ_at_a_token() -> None:
    target = TableDecoder(300, 0)
    prompt = np.arange(5, dtype=np.int32)
    assert compare_texts(prompt, [1, 2, 3], [1, 2, 3], target, 4) == "same"
    assert compare_texts(prompt, [1, 2, 3], [1, 9, 3], target, 4) == "different at token 1"


def test_bytes_of_a_pass_are_those_of_the_arrays_that_are_bound(tiny_model: Path) -> None:
    manifest = replace(read_manifest(tiny_model), vocab_size=152_064)
    # 8 bytes for each of 4 ids, of 104 places of the mask, and for the number of rows.
    out = 4 * 152_064 * 2
    carried = {"to_device": 8 * (4 + 104 + 1), "to_host": out, "to_host_greedy": out}
    assert bytes_of_pass(manifest, 100, 4, 2) == carried
    chooses = replace(manifest, signature=Signature(best="best"))
    assert bytes_of_pass(chooses, 100, 4, 2) == carried | {"to_host_greedy": 4 * 8}


def test_a_drafter_has_the_first_layers_and_rows_of_its_model(tmp_path: Path) -> None:
    shape = SHAPES["tiny"]
    write_model(tmp_path / "target", shape)
    write_model(tmp_path / "drafter", drafter_of(shape))
    target, drafter = (load_file(tmp_path / name / "model.safetensors") for name in ("target", "drafter"))
    assert {name for name in target if name not in drafter} == {
        name for name in target if any(f"layers.{i}." in name for i in range(DRAFTER_LAYERS, shape.num_layers))
    }
    assert sum(tensor.size for tensor in target.values()) == shape.num_weights
    for name, tensor in drafter.items():
        rows = slice(0, NUM_KNOWN) if "embed" in name else slice(None)
        np.testing.assert_array_equal(target[name][rows], tensor)


def test_a_model_that_would_end_after_the_budget_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = iter([0.0, 0.0, 60.0, 60.0, 60.0])
    monkeypatch.setattr("device_figures.budget.perf_counter", lambda: next(now_s))
    budget = Budget(600)
    budget.begin(1_000_000)  # nothing is known of the first
    budget.end(1_000_000)
    budget.begin(9_000_000)
    with pytest.raises(LeftOut, match="about 600 s, and 540 s are left; raise --minutes"):
        budget.begin(10_000_000)


def test_the_page_begins_with_the_device_its_driver_and_all_versions() -> None:
    document = {
        "date": "2026-11-22",
        "device": "cuda",
        "provider": "CUDAExecutionProvider",
        "hardware": "NVIDIA Test",
        "drivers": ["NVRM version: 580"],
        "nvidia": {"driver": "580.65.06", "cuda": "13.0", "gpus": [["NVIDIA Test", 24 << 30, 20 << 30]]},
        "options": {"device_id": "0"},
        "host": {"python": "3.11", "onnxruntime-gpu": "1.31.1"},
    }
    page = "\n".join(format_machine(document))
    for part in ("cuda (CUDAExecutionProvider), NVIDIA Test", "580.65.06, CUDA up to 13.0", "24.0 GiB, 20.0 free"):
        assert part in page
    assert "onnxruntime-gpu 1.31.1" in page
    assert format_memory(None, None) == "no memory of its own"


def test_a_model_that_cannot_be_had_is_left_out_and_is_no_failure(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--shapes", "smollm2", "--offline"]
    done = subprocess.run(
        [*command, "--workplace", str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "smollm2 in int4: left out:" in done.stdout
    assert "name its file with --gguf" in done.stdout


@pytest.mark.slow
def test_the_check_runs_on_the_cpu_and_leaves_nothing_behind(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--shapes", "tiny", "--tokens", "12", "--json"]
    done = subprocess.run(
        [*command, "--workplace", str(tmp_path)], capture_output=True, text=True, timeout=300, check=True
    )
    (found,) = json.loads(done.stdout)["models"]
    assert found["verdict"] == "right"
    assert all(rows["wrong"] == 0 for rows in found["rows"].values())
    assert {"1", "2", "4", "8"} <= set(found["passes_s"]["128"])
    assert (found["max_pass_tokens"], found["trees"], found["other_kernels_s"]) == (256, "right", None)
    assert found["device_bytes"] > found["weights_bytes"]  # its embedding is its head
    assert found["bytes"]["8"]["to_host"] == 8 * SHAPES["tiny"].vocab_size * 4
    schedules: dict[str, dict[str, Any]] = found["schedules"]
    assert set(schedules) == {"serial", "pipelined", "hedged"}
    for each in schedules.values():
        assert each["acceptance_rate"] > 0
        assert min(each["tokens_per_second"], each["plain_tokens_per_second"]) > 0
        assert not each["text"].startswith("different")
    assert list(tmp_path.iterdir()) == []
