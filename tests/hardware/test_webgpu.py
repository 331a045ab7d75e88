"""A target on the WebGPU provider and a drafter on the CPU, in one process.

Where there is no GPU a software adapter runs it (scripts/software_gpu.py): Mesa's lavapipe, which has half floats,
or SwiftShader, which has none. They show that the path works, not how fast it is.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny
from double import branch_logits, tree_logits

from edgespec import SamplingParams, load
from edgespec.decoding.decoder import BEST, Pass
from edgespec.decoding.tree import Tree
from edgespec.draft.timeline import Interval
from edgespec.engine.answers import Completion
from edgespec.export.convert import export_model
from edgespec.manifest import Manifest, read_manifest
from edgespec.runtimes.device_checks import are_close
from edgespec.runtimes.devices import find_device
from edgespec.runtimes.driver_check import check_driver, lacks_half_floats
from edgespec.runtimes.kv_caches import SharedCache
from edgespec.runtimes.node_placement import read_node_placement
from edgespec.runtimes.onnx import OnnxDecoder
from edgespec.runtimes.pass_shapes import PassShapes
from edgespec.runtimes.passes import Passes
from edgespec.runtimes.tree import OnnxTreeDecoder
from edgespec.types import Logits, TokenIds, append

pytestmark = pytest.mark.webgpu
SAMPLED = SamplingParams(temperature=0.8, top_k=40, seed=3)
# Activations are in single precision, in half precision, and on the CPU in 8 bits beside weights in 4.
LARGEST_ERRORS = {"fp32": 1e-3, "fp16": 0.2, "int4": 0.2}
PROMPT, NUM_TOKENS = "the rain in", 40


@pytest.fixture(scope="module", autouse=True)
def has_half_floats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[bool]:
    """A driver missing fails the tests: they are there to run."""
    with pytest.MonkeyPatch.context() as patch:
        if "XDG_RUNTIME_DIR" not in os.environ:
            patch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime")))
        found = check_driver("webgpu")
        assert found is None, found
        yield not lacks_half_floats(find_device("webgpu"))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    tiny.write_gguf(folder / "tiny.gguf", tiny.random_weights())
    return folder


@pytest.fixture(scope="module")
def folder_of(has_half_floats: bool, home: Path) -> Callable[[str], Path]:
    """The tiny model in the gpu form of a precision; best is the least that this adapter takes."""

    def make(precision: str, form: str = "gpu") -> Path:
        if precision == "best":
            precision = "fp16" if has_half_floats else "fp32"
        if form == "gpu" and precision != "fp32" and not has_half_floats:
            pytest.skip("needs half floats, which SwiftShader lacks: run it on lavapipe")
        folder = home / f"{precision}-{form}"
        if not folder.exists():
            export_model(home / "tiny.gguf", folder, precision=precision, form=form)
        return folder

    return make


def open_on(device: str, folder: Path) -> OnnxDecoder:
    return OnnxDecoder(folder, read_manifest(folder), find_device(device))


def random_tokens(manifest: Manifest, num_tokens: int, seed: int = 0) -> TokenIds:
    return np.random.default_rng(seed).integers(0, manifest.vocab_size, num_tokens).astype(np.int32)


@pytest.mark.parametrize("precision", LARGEST_ERRORS)
def test_rows_are_those_of_the_cpu_however_passes_are_cut(
    folder_of: Callable[[str], Path], precision: str
) -> None:
    folder = folder_of(precision)
    here, there = (open_on(name, folder) for name in ("cpu", "webgpu"))
    tokens = random_tokens(read_manifest(folder), 300)
    for num_tokens, num_last in ((10, 10), (13, 3), (14, 1), (11, 1), (290, 2), (300, 5), (40, 4)):
        expected = here.logits(tokens[:num_tokens], num_last)
        found = there.logits(tokens[:num_tokens], num_last)
        np.testing.assert_allclose(found, expected, atol=LARGEST_ERRORS[precision])


def test_cache_stays_on_the_device_in_one_place(folder_of: Callable[[str], Path]) -> None:
    decoder = open_on("webgpu", folder_of("best"))
    cache = decoder._passes.cache
    assert isinstance(cache, SharedCache)
    tokens = random_tokens(read_manifest(folder_of("best")), 60)
    decoder.logits(tokens[:20], 1)
    places = {name: (value.device_name(), value.data_ptr()) for name, value in cache._buffers.items()}
    assert len(places) == 2 * tiny.LAYERS
    assert {device for device, _ in places.values()} == {"webgpu"}
    for num_tokens in (21, 25, 15, 60):
        decoder.logits(tokens[:num_tokens], 1)
        assert {name: (value.device_name(), value.data_ptr()) for name, value in cache._buffers.items()} == places
        outputs = {value.data_ptr() for value in decoder._passes._binding.get_outputs()}
        assert {place for _, place in places.values()} <= outputs


def test_tokens_are_chosen_where_rows_are_made(folder_of: Callable[[str], Path]) -> None:
    folder = folder_of("fp32")
    decoder = open_on("webgpu", folder)
    nodes = read_node_placement(decoder._passes._session)["WebGpuExecutionProvider"]
    assert {"ReduceMax", "Equal", "Where", "ReduceMin", "ReduceSum", "Concat"} <= nodes.keys()
    assert decoder.can.best
    tokens = random_tokens(read_manifest(folder), 300, seed=1)
    for num_tokens, num_last in ((10, 10), (13, 3), (14, 1), (290, 2), (300, 5), (40, 4)):
        found = decoder.run(Pass(tokens[:num_tokens], num_last=num_last, wants=BEST)).best
        assert found is not None
        rows = decoder.logits(tokens[:num_tokens], num_last)
        assert found.is_sound.all()
        assert found.ids.tolist() == rows.argmax(1).tolist()


@pytest.mark.parametrize("drafter", ["suffix", "lookahead"])
def test_of_a_greedy_answer_eight_bytes_a_row_cross(
    folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, drafter: str
) -> None:
    """The device sends an id and a sum for each row, and logits stay in its memory."""
    crossed: list[tuple[int, int]] = []
    run = Passes.run

    def counting(passes: Passes, *arguments: object, **options: object) -> Logits:
        rows = run(passes, *arguments, **options)  # type: ignore[arg-type]
        if passes._memory[0] == "webgpu":
            outputs = passes._binding.get_outputs()
            on_host = [np.prod(each.shape()) * 4 for each in outputs if each.device_name().lower() == "cpu"]
            crossed.append((len(rows), int(sum(on_host))))
        return rows

    with load(folder_of("best"), device="webgpu", drafter=drafter) as engine:
        monkeypatch.setattr(Passes, "run", counting)
        engine.generate(PROMPT, max_tokens=NUM_TOKENS)
    assert len(crossed) > 1
    assert [num_bytes for _, num_bytes in crossed] == [8 * num_rows for num_rows, _ in crossed]


@pytest.mark.parametrize("acceptance", ["equality", "rejection"])
def test_text_is_that_of_the_serial_run_with_both_at_work(folder_of: Callable[..., Path], acceptance: str) -> None:
    """Greedy and sampled, in sequence, ahead and hedged. What rejection accepts depends on the draft, if sampled.

    Deterministic, since the kernel of one row rounds half floats otherwise than that of several.
    """
    found: dict[str, list[Completion]] = {}
    for schedule in ("serial", "pipelined", "hedged"):
        with load(
            folder_of("best"),
            device="webgpu",
            drafter=str(folder_of("int4", "cpu")),
            draft_length=3,
            schedule=schedule,
            acceptance=acceptance,
            deterministic=True,
        ) as engine:
            found[schedule] = [
                engine.generate(PROMPT, sampling=sampling, max_tokens=NUM_TOKENS)
                for sampling in (SamplingParams(), SAMPLED)
            ]
    for schedule, answers in found.items():
        for answer, serial in zip(answers, found["serial"], strict=True):
            is_sampled = answer is answers[1]
            if acceptance == "equality" or not is_sampled:
                assert answer.token_ids == serial.token_ids
            stats = answer.stats
            assert (stats.target_device, stats.drafter_device) == ("webgpu", "cpu")
            assert stats.num_accepted > 0
            assert stats.downgrades == ()
            assert are_at_work_at_once(answer.timeline) == (stats.overlap > 0)
        # A tiny drafter may be done with a block before the next pass begins, and so with all of one answer.
        assert any(answer.stats.overlap > 0 for answer in answers) == (schedule != "serial")


def are_at_work_at_once(timeline: tuple[Interval, ...]) -> bool:
    targets = [each for each in timeline if each.lane == "target"]
    drafters = [each for each in timeline if each.lane != "target"]
    assert targets
    assert drafters
    return any(one.start_s < other.end_s and other.start_s < one.end_s for one in targets for other in drafters)


@pytest.mark.parametrize("precision", LARGEST_ERRORS)
def test_rows_of_a_tree_are_those_of_the_cpus_branches(folder_of: Callable[[str], Path], precision: str) -> None:
    """Trees behind any branch of the one before: what lies in another slot than its own is run again."""
    folder = folder_of(precision)
    manifest = read_manifest(folder)
    there, here = OnnxTreeDecoder(folder, manifest, find_device("webgpu")), open_on("cpu", folder)
    assert there._runs_trees
    rng, tokens = np.random.default_rng(0), random_tokens(manifest, 30)
    fed: list[tuple[int, int]] = []
    for _ in range(12):
        parents = tuple(int(rng.integers(-1, node)) if node else -1 for node in range(rng.integers(1, 12)))
        nodes = rng.choice(manifest.vocab_size, len(parents), replace=False).astype(np.int32)
        before = there.num_fed
        found = tree_logits(there, tokens, nodes, parents)
        fed.append((there.num_fed - before, len(nodes) + 1))
        expected = branch_logits(here, tokens, nodes, parents)
        np.testing.assert_allclose(found, expected, atol=LARGEST_ERRORS[precision])
        tokens = append(
            append(tokens, nodes[Tree(nodes, parents=tuple(parents)).path(int(rng.integers(-1, len(nodes))))]), [1]
        )
    assert any(num_fed == num_new for num_fed, num_new in fed)
    assert sum(num_fed for num_fed, _ in fed[1:]) < 1.3 * sum(num_new for _, num_new in fed[1:])


def test_lookahead_runs_on_the_device(folder_of: Callable[[str], Path]) -> None:
    answers = []
    for drafter in ("none", "lookahead"):
        with load(folder_of("fp32"), device="webgpu", drafter=drafter) as engine:
            answers.append(engine.generate(PROMPT, max_tokens=NUM_TOKENS))
    plain, drafted = answers
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.sources["lookahead"]["drafted"] > 0


def test_hedging_drafter_runs_on_the_device(folder_of: Callable[..., Path]) -> None:
    answers = []
    for schedule in ("serial", "hedged"):
        with load(
            folder_of("fp32", "cpu"),
            drafter=str(folder_of("best")),
            drafter_device="webgpu",
            draft_length=2,
            schedule=schedule,
            deterministic=True,
        ) as engine:
            answers.append(engine.generate(PROMPT, max_tokens=NUM_TOKENS))
    assert answers[0].token_ids == answers[1].token_ids
    assert [answer.stats.drafter_device for answer in answers] == ["webgpu", "webgpu"]
    assert all(answer.stats.num_accepted > 0 for answer in answers)


def test_graph_that_would_run_there_in_part_is_refused(folder_of: Callable[..., Path]) -> None:
    command = [sys.executable, "-m", "edgespec", "chat", str(folder_of("fp32", "cpu")), "--device", "webgpu"]
    done = subprocess.run([*command, "--prompt", "hi"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 4
    assert "no kernel here for 9 FusedMatMul" in done.stderr
    assert done.stdout == ""


@pytest.mark.skipif(sys.platform != "linux", reason="hides the driver by a variable of Vulkan's loader, on Linux")
def test_gpu_without_a_driver_costs_a_line(folder_of: Callable[[str], Path]) -> None:
    """The folder runs on the CPU where no device was named."""
    without = {**os.environ, "VK_DRIVER_FILES": os.devnull, "VK_ICD_FILENAMES": os.devnull}

    def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "edgespec", *arguments]
        return subprocess.run(command, env=without, capture_output=True, text=True, timeout=300)

    chat = ("chat", str(folder_of("fp32")), "--prompt", "hi", "--max-tokens", "2")
    named, allowed, listed = run(*chat, "--device", "webgpu"), run(*chat), run("devices")
    assert (named.returncode, named.stdout) == (4, "")
    assert "'webgpu': it finds no GPU with a driver that it can use. To fix that: install a driver" in named.stderr
    assert "onnxruntime_src" not in named.stderr
    assert allowed.returncode == 0, allowed.stderr
    assert "it finds no GPU with a driver that it can use" in listed.stdout


def test_smollm2_in_the_source_precision_says_what_the_cpu_says(
    has_half_floats: bool, smollm2_gguf: Path, tmp_path: Path
) -> None:
    """A pass of four tokens and more takes half a minute in software, so there are few, and a short context."""
    if not has_half_floats:
        pytest.skip("needs half floats, which SwiftShader lacks: run it on lavapipe")
    export_model(smollm2_gguf, tmp_path / "smollm2", form="gpu")
    manifest = replace(read_manifest(tmp_path / "smollm2"), context_length=11)
    there, here = (OnnxDecoder(tmp_path / "smollm2", manifest, find_device(name)) for name in ("webgpu", "cpu"))
    tokens = np.array([504, 3575, 282, 4649, 314, 260], np.int32)
    for _ in range(3):
        chosen, rows = there.run(Pass(tokens, num_last=1, wants=BEST)).best, here.logits(tokens, 1)
        assert chosen is not None
        assert chosen.is_sound.all()
        assert rows.max() - rows[0, chosen.ids[0]] < 0.1
        tokens = append(tokens, chosen.ids)
    assert are_close(there.logits(tokens, 3), here.logits(tokens, 3))
    there.shapes = PassShapes((4,), (4,))  # a GPU that is none in software pads passes
    there.forget()
    for length in range(6, 9):
        chosen = there.run(Pass(tokens[:length], num_last=1, wants=BEST)).best
        assert chosen is not None
        assert chosen.ids[0] == tokens[length]
    assert are_close(there.logits(tokens, 3), here.logits(tokens, 3))


def test_conversations_that_go_on_by_turns_are_not_read_again(folder_of: Callable[[str], Path]) -> None:
    with load(folder_of("fp32"), drafter="none", device="webgpu") as engine:
        conversations = [engine.chat(system=topic * 30, max_tokens=4) for topic in ("the in ", "an on ")]
        num_read = []
        for conversation in [*conversations, *conversations]:
            decoders = engine._caches.decoders
            before = sum(decoder.num_fed for decoder in decoders)
            told = conversation.say("the")
            num_read.append(sum(decoder.num_fed for decoder in decoders) - before)
        assert max(num_read[2:]) < min(num_read[:2]) / 2
        engine.forget_prompts()
        sent = conversation.messages[:-1]
        assert engine.generate(sent, max_tokens=4).text == told.text
