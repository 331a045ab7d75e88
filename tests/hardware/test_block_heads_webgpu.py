"""Heads that draft a block, and heads of steps, in their gpu form on WebGPU beside forward passes in numpy."""

from pathlib import Path

import numpy as np
import pytest
import tiny
import tiny_steps
from draft_runs import draft_greedily
from head_folders import random_features, store_of, write_head_folder
from tiny_blocks import BlockCase, deepseek, expected_draft, zlab

from edgespec.runtimes.devices import find_device
from edgespec.runtimes.heads import open_head
from edgespec.types import append

pytestmark = pytest.mark.webgpu
TARGET = tiny.random_weights(seed=3, tied=False)
LARGEST_ERRORS = {"fp32": 1e-3, "fp16": 0.2}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target") / "source"
    tiny.write_huggingface(folder, TARGET)
    return folder


@pytest.mark.parametrize("precision", LARGEST_ERRORS)
@pytest.mark.parametrize("case", [deepseek(markov="rnn"), zlab([0, 1], (0, 2))], ids=["DSpark", "DFlash"])
def test_a_block_on_webgpu_is_that_of_numpy(case: BlockCase, precision: str, tmp_path: Path, target: Path) -> None:
    manifest = write_head_folder(tmp_path / "out", case.write(tmp_path / "head"), target, precision, form="gpu")
    text = np.random.default_rng(1).integers(0, tiny.VOCAB, 40).astype(np.int32)
    features = random_features(case.target_layers, tiny.HIDDEN, 100)
    store = store_of(manifest, text, features)
    head = open_head(tmp_path / "out", manifest, find_device("webgpu"), store)
    for num_accepted in (2, 0):
        rows, drafted = draft_greedily(head, text, 2)
        expected, _ = expected_draft(case, TARGET, text, features, 1)
        assert np.abs(rows[:1] - expected).max() < LARGEST_ERRORS[precision]
        text = append(append(text, drafted[:num_accepted]), [9])
        store.put(0, text[:-1], features[: len(text) - 1])


@pytest.mark.parametrize("precision", LARGEST_ERRORS)
def test_steps_on_webgpu_are_those_of_numpy(precision: str, tmp_path: Path, target: Path) -> None:
    tensors = tiny_steps.lstm_tensors()
    head = tiny_steps.write_head(tmp_path / "head", tiny_steps.lstm_config(), tensors)
    manifest = write_head_folder(tmp_path / "out", head, target, precision, form="gpu")
    text, features = np.arange(20, dtype=np.int32), random_features((0,), tiny.HIDDEN, 20)
    store = store_of(manifest, text, features)
    rows, drafted = draft_greedily(open_head(tmp_path / "out", manifest, find_device("webgpu"), store), text, 3)
    token, state = int(text[-1]), features[18].astype(np.float64)
    for step, row in enumerate(rows):
        wanted, state = tiny_steps.lstm_forward(tensors, step, token, state)
        assert np.abs(row - wanted).max() < LARGEST_ERRORS[precision]
        token = int(drafted[step])
