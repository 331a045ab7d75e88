"""The check of a device: its verdicts as values, and a run of it on the CPU."""

import gc
import json
import signal
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import asdict
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from compare_with_cpu import compare_rows, compare_texts, compare_with_cpu
from device_figures.answers import answer_plainly, answer_with_recordings
from device_figures.models import Checked
from device_figures.page import Figure, format_machine, format_memory
from device_figures.parts import PARTS, Part, find_parts, run_apart, run_here
from device_figures.passes import compare_rows_by_width, find_placement, time_passes, time_prompts
from fake_cuda import FakeGpu, install
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize
from gpu_check import advise, main
from random_model import DRAFTER_LAYERS, NUM_KNOWN, SHAPES, drafter_of, write_model
from table_decoder import TableDecoder

from edgespec.types import Logits


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


def test_a_drafter_has_the_first_layers_and_rows_of_its_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("random_model._POOL", 10_007)
    shape = SHAPES["tiny"]._replace(vocab_size=NUM_KNOWN + 32, num_layers=3)
    write_model(tmp_path / "target.gguf", shape)
    write_model(tmp_path / "drafter.gguf", drafter_of(shape))
    target, drafter = (
        {t.name: t for t in GGUFReader(tmp_path / f"{n}.gguf").tensors} for n in ("target", "drafter")
    )
    assert {name for name in target if name not in drafter} == {
        name for name in target if any(f"blk.{i}." in name for i in range(DRAFTER_LAYERS, shape.num_layers))
    }
    assert sum(tensor.n_elements for tensor in target.values()) == shape.num_weights
    for name, tensor in drafter.items():
        rows = slice(0, NUM_KNOWN) if "embd" in name else slice(None)
        np.testing.assert_array_equal(target[name].data[rows], tensor.data)
    values = dequantize(target["blk.0.attn_q.weight"].data, GGMLQuantizationType.Q4_0)
    assert values.std() == pytest.approx(shape.hidden**-0.5, rel=0.05)


def as_process(monkeypatch: pytest.MonkeyPatch, folder: Path, lines: str) -> None:
    """Have parts run a shell script in place of themselves."""
    (folder / "part").write_text(f"#!/bin/sh\n{lines}\n")
    (folder / "part").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(folder / "part"))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="starts a shell script, which Windows cannot")
def test_a_part_that_is_cut_off_has_said_what_it_knew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # A process that it has begun keeps its output open.
    as_process(monkeypatch, tmp_path, 'echo \'{"text": "one row: 2 ms"}\'; echo noise; sleep 60')
    part = PARTS[0]._replace(limit_s=2.0)
    first, last = run_apart(part, [], left_s=60)
    assert (first.text, last.text, last.is_wrong) == ("one row: 2 ms", "cut off after 2 s", True)
    assert last.advice == "prepare source was cut off after 2 s"


@pytest.mark.skipif(sys.platform == "win32", reason="starts a shell script, which Windows cannot")
def test_a_part_whose_process_crashes_is_said_and_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    as_process(monkeypatch, tmp_path, "kill -SEGV $$")
    (found,) = run_apart(PARTS[0], [], left_s=60)
    assert "ended with SIGSEGV" in found.text
    assert found.is_wrong


def test_parts_without_time_are_left_out_and_counted_in_one_line() -> None:
    figures = [asdict(found) for part in PARTS[:3] for found in run_apart(part, [], left_s=1)]
    parts = [{"model": "7b", "part": "any", "figures": figures}]
    assert list(advise(parts)) == ["- 7b: 3 parts were left out: raise --minutes"]
    assert not any(each["is_wrong"] for each in figures)


def test_a_form_that_was_not_prepared_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (part,) = (each for each in PARTS if each.name == "passes, fp16")
    assert run_here(part, Checked("tiny", tmp_path, "cpu", 12, None)) == 0
    found = Figure(**json.loads(capsys.readouterr().out))
    assert (found.text, found.is_wrong) == ("left out: fp16 was not prepared", False)


def test_a_form_is_prepared_before_its_parts_and_design_comes_first() -> None:
    names = [part.name for part in PARTS]
    for name in names:
        if name.partition(", ")[2] in ("source", "fp16", "int4"):
            assert names.index(f"prepare {name.partition(', ')[2]}") < names.index(name)
    assert names.index("rows in a second session, fp16") < names.index("plain, source")
    assert [part.name for part in find_parts("prompts")] == [
        "prepare source", "prepare fp16", "prepare drafter", "prompts, source", "prepare int4",
    ]  # fmt: skip
    assert find_parts("no such part") == []


def test_each_bad_figure_has_a_line_and_the_fastest_form_is_named_by_rows() -> None:
    figures = [
        Figure("int4", {"form": "int4", "passes_s": {"1": 0.002, "4": 0.003, "8": 0.005, "64": 0.009}}),
        Figure("fp16", {"form": "fp16", "passes_s": dict.fromkeys(("1", "4", "8", "64"), 0.0028)}),
        Figure("hedged is slow", advice="use --schedule pipelined"),
    ]
    bad, form = advise([{"model": "7b", "part": "any", "figures": [asdict(each) for each in figures]}])
    assert bad == "- 7b: use --schedule pipelined"
    assert form.endswith("at the rows of its passes: 1: int4, 4: fp16, 8: fp16, 64: fp16")


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Checked:
    found = Checked("tiny", tmp_path_factory.mktemp("check"), "cuda", 12, None)
    found.prepare("source")
    return found


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    gc.collect()
    return install(monkeypatch, FakeGpu())


@pytest.mark.slow
def test_passes_of_all_widths_are_timed_on_a_gpu(gpu: FakeGpu, checked: Checked) -> None:
    widest, first, far = time_passes(checked, "source")
    assert {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64} <= set(gpu.widths)
    assert set(widest.values["passes_s"]) == set(first.values["first_s"])
    assert set(far.values["far_s"]) == {1, 8}
    (other, *_) = time_passes(checked, "source", has_other_kernels=True)
    assert other.values["form"] == "source, fpA_intB"


@pytest.mark.slow
def test_prompts_are_read_in_the_mode_of_users_and_without_it(
    gpu: FakeGpu, checked: Checked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("device_figures.passes._PROMPTS", (200,))
    own, other = time_prompts(checked, "source")
    assert (own.values["mode"], other.values["mode"]) == ("deterministic", "not deterministic")
    assert own.text.startswith("deterministic, a prompt of 200: ")
    assert gpu.widths.count(256) >= 3


@pytest.mark.slow
def test_rows_are_compared_by_width_and_with_another_session(gpu: FakeGpu, checked: Checked) -> None:
    groups, changed = compare_rows_by_width(checked, "source")
    assert {width for group in groups.values["groups"] for width in group} == {1, 2, 4, 8, 16, 32, 64}
    assert (changed.values["changed"], changed.advice) == ([], None)
    *_, again = compare_rows_by_width(checked, "source")
    assert set(again.values["differing"].values()) == {0}
    kept = checked.folder / "rows-source.json"
    before = json.loads(kept.read_text())
    before["8"][3] ^= 1
    kept.write_text(json.dumps(before))
    *_, again = compare_rows_by_width(checked, "source")
    assert again.values["differing"][8] == 1
    assert "in passes of 8: kernels" in str(again.advice)


@pytest.mark.slow
def test_the_choice_of_tokens_is_tried_with_ties(gpu: FakeGpu, checked: Checked) -> None:
    opened, mode, choice = find_placement(checked, "source")
    assert opened.values["widths"] == (8, 32, 64)
    assert (mode.values["widths"], mode.values["reads"], mode.values["mode"]) == ((16,), (256,), "deterministic")
    assert choice.values["is_first"]
    assert set(choice.values["taken_s"]) == {1, 2, 4, 8}


@pytest.mark.slow
def test_an_answer_says_its_widths_and_what_lies_between_passes(gpu: FakeGpu, checked: Checked) -> None:
    widths, speed, memory = answer_plainly(checked, "source")
    assert set(widths.values["ran"]) <= {16, 256}, "of deterministic mode"
    assert (widths.values["new"], widths.advice) == ({}, None)
    assert 0 < speed.values["gap_s"] < speed.values["pass_s"] * 100
    assert memory.values["weights_bytes"] > 0


@pytest.mark.slow
def test_passes_that_are_replayed_stand_beside_those_that_are_started_anew(gpu: FakeGpu, checked: Checked) -> None:
    *found, between = answer_with_recordings(checked, "source")
    for mode, (plain, replayed, both) in zip(
        ("deterministic", "not deterministic"), (found[:3], found[3:]), strict=True
    ):
        assert {each.values["mode"] for each in (plain, replayed, both)} == {mode}
        assert (plain.values["is_recording"], replayed.values["is_recording"]) == (False, True)
        assert both.values["text"] == "same"
    assert gpu.num_replayed > 24
    assert between.values["ratio"] > 0
    gpu.recordings = iter(["CUDA failure 901: operation failed due to a previous error during capture"] * 99)
    (checked.folder / "source" / "device_checks.json").unlink()
    *_, both, _ = answer_with_recordings(checked, "source")
    assert "passes in source (not deterministic) are not replayed" in str(both.advice)


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
    for part in (
        "cuda (CUDAExecutionProvider), NVIDIA Test",
        "580.65.06, CUDA up to 13.0",
        "25.8 GB, 21.5 GB free",
    ):
        assert part in page
    assert "onnxruntime-gpu 1.31.1" in page
    assert format_memory(None, None) == "no memory of its own"


@pytest.fixture
def ends_on_sigterm() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.slow
@pytest.mark.usefixtures("ends_on_sigterm")
def test_the_check_runs_on_the_cpu_and_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def run(part: Part, command: list[str], left_s: float) -> Iterator[Figure]:
        """Only parts that prepare forms have a process, which takes a second to begin."""
        if part.name.startswith("prepare"):
            yield from run_apart(part, command, left_s)
            return
        folder = Path(command[command.index("--workplace") + 1])
        with redirect_stdout(StringIO()) as printed:
            assert run_here(part, Checked("tiny", folder, "cpu", 12, None)) == 0
        yield from (Figure(**json.loads(line)) for line in printed.getvalue().splitlines())

    monkeypatch.setattr("gpu_check.run_apart", run)
    options = ["--device", "cpu", "--shapes", "tiny", "--tokens", "12", "--json", "--minutes", "9"]
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", *options, "--workplace", str(tmp_path)])
    assert main() == 0
    document = json.loads(capsys.readouterr().out)
    assert [found["part"] for found in document["parts"]] == [part.name for part in PARTS]
    figures = [figure for found in document["parts"] for figure in found["figures"]]
    assert all(found["figures"] for found in document["parts"])
    assert not any(figure["is_wrong"] for figure in figures)
    assert {each["text"] for each in figures if "left out" in each["text"]} == {
        "left out: only CUDA has these kernels",
        "left out: only CUDA records passes",
    }
    schedules = [found["figures"] for found in document["parts"] if found["part"].startswith("schedules")]
    for figure in (each for found in schedules for each in found[:3]):
        assert figure["values"]["acceptance_rate"] > 0
        assert min(figure["values"][name] for name in ("tokens_per_second", "plain_tokens_per_second")) > 0
    assert any("the form that is fastest" in line for line in document["advice"])
    assert list(tmp_path.iterdir()) == []
