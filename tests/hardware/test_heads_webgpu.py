"""A drafting head and its target on different devices: hidden states cross through the host's memory."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import tiny_heads
from double import tree_logits

from edgespec import load
from edgespec.decoding.decoder import BEST, Pass
from edgespec.export.convert import export_model
from edgespec.manifest import read_manifest
from edgespec.runtimes.devices import find_device
from edgespec.runtimes.heads import open_head
from edgespec.runtimes.onnx import OnnxDecoder
from edgespec.runtimes.tree import OnnxTreeDecoder
from edgespec.types import TokenIds, append

pytestmark = pytest.mark.webgpu
WEIGHTS, TARGET = tiny_heads.recurrent_weights(1), tiny.random_weights()
LARGEST_ERROR = 2e-3


@pytest.fixture(scope="module")
def target(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny-gpu"
    export_model(tiny_gguf, folder, precision="fp32", form="gpu", hidden_layers=tiny_heads.LAYERS)
    return folder


def decoder(folder: Path, device: str, kind: type = OnnxDecoder) -> Any:
    return kind(folder, read_manifest(folder), find_device(device), hidden_layers=tiny_heads.LAYERS)


def random_text(size: int) -> TokenIds:
    return np.random.default_rng(size).integers(0, tiny.VOCAB, size).astype(np.int32)


@pytest.mark.parametrize("kind", [OnnxDecoder, OnnxTreeDecoder])
def test_states_of_a_gpu_are_those_of_the_tokens_that_it_holds(target: Path, kind: type) -> None:
    found, text = decoder(target, "webgpu", kind), random_text(40)
    store = found.hidden_states
    assert store.known(text) == 0  # nothing of the device's check is left
    for size in (10, 13, 12, 300 % 41, 40):
        found.logits(text[:size], 1)
        assert store.known(text) == size
        wanted = tiny_heads.features(TARGET, text[:size])
        np.testing.assert_allclose(store.read(text[:size], 0), wanted, atol=LARGEST_ERROR)
    found.run(Pass(append(text, [5, 6]), num_last=2, wants=BEST))
    assert store.known(append(text, [5, 6])) == 42
    if kind is OnnxTreeDecoder:
        nodes = np.array([7, 8, 9], np.int32)
        tree_logits(found, text, nodes, (-1, 0, -1))
        assert store.known(append(text, nodes)) == 40
        text = append(text, [7, 8, 3])
        found.logits(text, 1)
        assert store.known(text) == 43
        np.testing.assert_allclose(store.read(text, 0), tiny_heads.features(TARGET, text), atol=LARGEST_ERROR)


@pytest.mark.parametrize("devices", [("webgpu", "cpu"), ("cpu", "webgpu")])
def test_head_gives_its_rows_wherever_it_and_its_target_run(
    target: Path, tmp_path: Path, devices: tuple[str, str]
) -> None:
    manifest = tiny_heads.write_recurrent(tmp_path / "head", target, WEIGHTS)
    found, text = decoder(target, devices[0]), random_text(30)
    head = open_head(tmp_path / "head", manifest, find_device(devices[1]), found.hidden_states)
    states = tiny_heads.recurrent_states(WEIGHTS, text, tiny_heads.features(TARGET, text[:20]))
    wanted = tiny_heads.recurrent_rows(WEIGHTS, states)
    found.logits(text[:20], 1)
    assert head.begin(text[:21], 99)
    for size in range(21, 26):
        np.testing.assert_allclose(head.logits(text[:size], 1)[0], wanted[size - 2], atol=LARGEST_ERROR)


def test_an_answer_is_drafted_by_a_head_on_the_other_device(target: Path, tmp_path: Path) -> None:
    prompts = ("the in the an on er in the", "in the an")
    with load(target, drafter="none", device="webgpu") as engine:
        texts = [engine.generate(prompt, max_tokens=30).token_ids for prompt in prompts]
        known = [append(engine._encoder.encode(prompt), text) for prompt, text in zip(prompts, texts, strict=True)]
    tiny_heads.write_recurrent(tmp_path / "eagle", target, tiny_heads.fit_recurrent(TARGET, WEIGHTS, known))
    for devices in (("webgpu", "cpu"), ("cpu", "webgpu")):  # two models on WebGPU disturb each other
        options: dict[str, Any] = {"device": devices[0], "drafter_device": devices[1], "draft_length": 3}
        with load(target, drafter=str(tmp_path / "eagle"), **options) as engine:
            answers = [engine.generate(each, max_tokens=30) for each in prompts]
        assert [answer.token_ids for answer in answers] == texts
        assert sum(answer.stats.num_accepted for answer in answers) > 15
        assert (answers[0].stats.target_device, answers[0].stats.drafter_device) == devices
