"""A drafter on QNN's HTP emulator, which its wheel brings along: make test-npu. It shows that the path works."""

import importlib.util
import json
import logging
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny

from edgespec.evaluation.prompts import own_prompts
from edgespec.export.convert import export_model
from edgespec.manifest import COMPILED, read_manifest
from edgespec.runtimes import compiled_graphs
from edgespec.runtimes.devices import find_device
from edgespec.runtimes.node_placement import read_node_placement
from edgespec.runtimes.static import StaticDecoder
from edgespec.setup.open_model import measure_ranges
from edgespec.types import Logits

pytestmark = [
    pytest.mark.npu,
    pytest.mark.skipif(
        importlib.util.find_spec("onnxruntime_qnn") is None,
        reason="needs onnxruntime-qnn: make test-npu",
    ),
]


PRECISIONS = ["fp16", "fp32", "w8a16"]


def write_drafter(source: Path, precision: str) -> Path:
    folder = source.parent / "drafter"
    prompts = [prompt.turns[0] for prompt in own_prompts()]
    measure = partial(measure_ranges, prompts=prompts)
    export_model(source, folder, precision=precision, form="npu", measure_ranges=measure)
    return folder


@pytest.fixture(scope="module", params=PRECISIONS)
def drafter(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    tiny.write_gguf(folder / "tiny.gguf", tiny.random_weights())
    export_model(folder / "tiny.gguf", folder / "target", precision="fp32")
    return write_drafter(folder / "tiny.gguf", request.param)


def test_both_graphs_run_there_whole(drafter: Path) -> None:
    decoder = StaticDecoder(drafter, read_manifest(drafter), find_device("qnn"))
    assert sorted(decoder._sessions) == [1, 64]
    for session in decoder._sessions.values():
        assert read_node_placement(session) == {"QNNExecutionProvider": {"EPContext": 1}}


def test_the_second_load_compiles_nothing_and_gives_the_bits_of_graphs_compiled_at_load(
    drafter: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(drafter, tmp_path / "drafter", ignore=shutil.ignore_patterns(COMPILED))
    caplog.set_level(logging.INFO, logger="edgespec")
    tokens, manifest, taken_s = np.arange(70, dtype=np.int32), read_manifest(drafter), []
    for _ in range(2):
        begun = time.process_time()
        kept = StaticDecoder(tmp_path / "drafter", manifest, find_device("qnn"))
        taken_s.append(time.process_time() - begun)
    assert caplog.text.count("compiling") == 1
    assert taken_s[1] < 0.7 * taken_s[0]
    monkeypatch.setattr(compiled_graphs, "_COMPILERS", frozenset())
    plain = StaticDecoder(drafter, manifest, find_device("qnn"))
    nodes = read_node_placement(plain._sessions[1])
    assert list(nodes) == ["QNNExecutionProvider"]
    assert nodes["QNNExecutionProvider"]["Gemm"] == 15
    assert np.array_equal(plain.logits(tokens, 70), kept.logits(tokens, 70))


@pytest.mark.parametrize("drafter", ["fp16"], indirect=True)
def test_two_graphs_can_be_compiled_over_one_copy_of_the_weights(drafter: Path, tmp_path: Path) -> None:
    """The files hold the weights once instead of twice. The emulator compiles such graphs but cannot load them."""
    manifest, device = read_manifest(drafter), find_device("qnn")
    sizes = []
    for shares in (False, True):
        output = tmp_path / str(shares)
        output.mkdir()
        compiled_graphs._compile_graphs(
            drafter, [manifest.graph, str(manifest.prefill_graph)], output, device, shares
        )
        sizes.append(sum(path.stat().st_size for path in output.glob("*.bin")))
    assert sizes[1] < sizes[0] - 0.5 * manifest.weights_bytes


def expect_like(found: Logits, expected: Logits, precision: str) -> None:
    """Rows of other kernels, which round otherwise: each a little off as a whole, no value far.

    A few times what was seen: 0.008 and 0.026 in floats, 0.035 and 0.14 in w8a16, where a step of a 16-bit value
    goes through all that follows, and the largest of thousands varies most.
    """
    whole, single = (0.1, 0.6) if precision == "w8a16" else (0.03, 0.15)
    apart = np.abs(found - expected) / expected.std()
    assert np.sqrt((apart**2).mean(axis=1)).max() < whole
    assert apart.max() < single


def test_rows_are_those_of_the_cpu_but_for_rounding(drafter: Path) -> None:
    manifest = read_manifest(drafter)
    here, there = (StaticDecoder(drafter, manifest, find_device(name)) for name in ("cpu", "qnn"))
    tokens = np.random.default_rng(0).integers(0, manifest.vocab_size, 80).astype(np.int32)
    for num_tokens, num_last in ((10, 10), (13, 3), (80, 16), (64, 64)):  # 64 at once are the prompt's graph
        expected = here.logits(tokens[:num_tokens], num_last).copy()
        found = there.logits(tokens[:num_tokens], num_last).copy()
        expect_like(found, expected, manifest.precision)
    for faulty in (np.roll(found, 1, axis=0), np.vstack([found[:-1], found[:1]])):  # all rows, and one
        with pytest.raises(AssertionError):
            expect_like(faulty, expected, manifest.precision)
    other = tokens[:64].copy()
    other[:32] = (other[:32] + 1) % manifest.vocab_size
    with pytest.raises(AssertionError):  # as if the cache held other tokens
        expect_like(there.logits(other, 16), expected[-16:], manifest.precision)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_values_of_thousands_in_the_residual_stream_are_borne(tmp_path: Path, precision: str) -> None:
    weights = tiny.random_weights()
    weights["model.layers.0.mlp.down_proj.weight"][5] *= 3000  # SmolLM2-135M has 25,000 at the first token
    tiny.write_gguf(tmp_path / "tiny.gguf", weights)
    folder = write_drafter(tmp_path / "tiny.gguf", precision)
    here, there = (StaticDecoder(folder, read_manifest(folder), find_device(name)) for name in ("cpu", "qnn"))
    tokens = np.random.default_rng(0).integers(0, tiny.VOCAB, 12).astype(np.int32)
    expect_like(there.logits(tokens, 12), here.logits(tokens, 12), precision)


def answer(folder: Path, *more: str) -> dict[str, Any]:
    command = [
        sys.executable,
        "-m",
        "edgespec",
        "chat",
        str(folder / "target"),
        "--prompt",
        "the rain in",
        "--json",
    ]
    done = subprocess.run(
        [*command, "--prompt", "the rain in", "--max-tokens", "16", *more],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)  # what the provider's library prints is no part of it
    return document


def test_it_drafts_for_a_target_on_the_cpu(drafter: Path) -> None:
    plain = answer(drafter.parent, "--drafter", "none")
    drafting = ["--drafter", str(drafter), "--drafter-device", "qnn", "--draft-length", "3"]
    for schedule in ("serial", "pipelined"):
        found = answer(drafter.parent, *drafting, "--schedule", schedule)
        assert found["token_ids"] == plain["token_ids"]
        assert found["stats"]["drafter_device"] == "qnn"
        assert found["stats"]["acceptance_rate"] > 0.8
