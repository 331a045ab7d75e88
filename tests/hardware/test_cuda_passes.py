"""Passes on NVIDIA's provider in imitation: caches, trees and several GPUs. What is computed is the CPU's."""

import gc
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import growing
import numpy as np
import pytest
from double import branch_logits, tree_logits
from fake_cuda import INT4_MS, PASSES_MS, FakeGpu, install
from row_proofs import FAILS

from edgespec import Message, SamplingParams, load
from edgespec.decoding.decoder import Pass
from edgespec.decoding.tree import Tree
from edgespec.errors import DeviceUnavailable, MemoryExhausted
from edgespec.export.convert import export_model
from edgespec.manifest import Manifest, read_manifest
from edgespec.runtimes.devices import find_device
from edgespec.runtimes.kv_caches import make_cache
from edgespec.runtimes.onnx import OnnxDecoder
from edgespec.runtimes.tree import OnnxBranchDecoder, OnnxTreeDecoder
from edgespec.setup import row_proof
from edgespec.setup.row_proof import RowProof
from edgespec.types import append

slow = pytest.mark.slow
CLOSE = 0.05  # logits in half floats, in passes of other widths


@pytest.fixture(scope="module")
def model(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpu") / "tiny-gpu"
    export_model(tiny_gguf, folder, precision="int4", form="gpu")
    return folder


def test_the_cache_grows_in_steps_and_what_it_has_let_go_is_given_back(
    gpu: FakeGpu, model: Path, manifest: Manifest
) -> None:
    decoder = OnnxDecoder(model, manifest, replace(find_device("cuda"), records_passes=False))
    weights = gpu.used - 512 * manifest.kv_cache.bytes_per_token
    fresh = OnnxDecoder(model, manifest, find_device("cpu"))
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, manifest.vocab_size, 690).astype(np.int32)
    for length in (100, 300, 520, 521, 690, 40):
        found, expected = (each.logits(tokens[:length], 2) for each in (decoder, fresh))
        assert np.abs(found - expected).max() < CLOSE, length
    assert gpu.used - weights == 700 * manifest.kv_cache.bytes_per_token
    assert (gpu.kept, gpu.num_shrunk) == (0, 1)
    decoder.forget()
    assert gpu.used == weights
    del decoder
    gc.collect()
    assert gpu.used == gpu.kept == 0


def test_a_long_text_finds_its_room_at_once(gpu: FakeGpu, model: Path, manifest: Manifest) -> None:
    decoder = OnnxDecoder(model, manifest, find_device("cuda"))
    decoder.forget()
    sizes = list[int]()
    take = gpu.take
    gpu.take = lambda num, arena: (sizes.append(num), take(num, arena))[1]  # type: ignore[method-assign]
    decoder.logits(np.zeros(650, np.int32), 1)
    assert len(sizes) == 2 * manifest.kv_cache.num_layers


def test_trees_are_probed_and_run(gpu: FakeGpu, model: Path, manifest: Manifest) -> None:
    decoder = OnnxTreeDecoder(model, manifest, find_device("cuda"))
    fresh = OnnxDecoder(model, manifest, find_device("cpu"))
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, manifest.vocab_size, 50).astype(np.int32)
    parents = (-1, 0, -1, 2, 2, 0)
    for _ in range(4):
        nodes = rng.integers(0, manifest.vocab_size, len(parents)).astype(np.int32)
        num_fed = decoder.num_fed
        rows = tree_logits(decoder, tokens, nodes, parents)
        assert decoder.num_fed - num_fed <= len(tokens) + len(nodes), "one pass behind the text"
        assert np.abs(rows - branch_logits(fresh, tokens, nodes, parents)).max() < CLOSE
        tokens = append(tokens, nodes[Tree(nodes, parents=tuple(parents)).path(4)])


@pytest.mark.parametrize(
    ("form", "fix"),
    [
        ("cpu", "export it again with device='cuda', or use device='cpu'"),
        ("gpu", r"\(Gemma\) runs with device='webgpu'"),
    ],
)
def test_a_model_in_single_floats_is_refused_before_it_is_opened(
    form: str, fix: str, gpu: FakeGpu, model: Path, manifest: Manifest
) -> None:
    single = replace(manifest, form=form, kv_cache=replace(manifest.kv_cache, dtype="float32"))
    with pytest.raises(DeviceUnavailable, match=fix) as refused:
        OnnxDecoder(model, single, find_device("cuda"))
    assert refused.value.exit_code == 4
    assert not gpu.devices


def test_a_cache_that_is_copied_each_pass_is_refused(gpu: FakeGpu, tmp_path: Path) -> None:
    growing.write_growing(tmp_path / "growing")
    manifest = read_manifest(tmp_path / "growing")
    half = replace(manifest, kv_cache=replace(manifest.kv_cache, dtype="float16"))
    with pytest.raises(DeviceUnavailable, match="copied each pass, which 'cuda' does not run: export"):
        make_cache(None, None, None, half, find_device("cuda"))


def test_a_second_gpu_holds_what_it_is_given(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    gpu = install(monkeypatch, FakeGpu(), FakeGpu())
    decoder = OnnxDecoder(model, read_manifest(model), find_device("cuda:1"))
    assert decoder.logits(np.arange(5, dtype=np.int32), 1).shape == (1, decoder.vocab_size)
    assert set(gpu.devices) == {1}


def test_passes_have_the_widths_that_ran_as_the_model_was_opened(
    gpu: FakeGpu, model: Path, manifest: Manifest
) -> None:
    decoder = OnnxDecoder(model, manifest, find_device("cuda"))
    fresh = OnnxDecoder(model, manifest, find_device("cpu"))
    assert decoder.can.widths == (8, 32, 64)
    opened = set(gpu.widths)
    gpu.widths.clear()
    rng = np.random.default_rng(2)
    length = 0
    for _ in range(3):
        tokens = rng.integers(0, manifest.vocab_size, manifest.context_length).astype(np.int32)
        for _ in range(6):
            length = min(length + int(rng.integers(1, 300)), manifest.context_length)
            num_last = int(rng.integers(1, min(12, length) + 1))
            text = tokens[:length]
            assert np.abs(decoder.logits(text, num_last) - fresh.logits(text, num_last)).max() < CLOSE
            length = 0 if length == manifest.context_length else max(1, length - int(rng.integers(0, 12)))
    assert set(gpu.widths) <= opened
    again = OnnxDecoder(model, manifest, find_device("cuda"))
    assert again.can.widths == (8, 32, 64), "as an earlier check has found"


def test_a_shorter_context_has_widths_of_its_own(gpu: FakeGpu, model: Path, manifest: Manifest) -> None:
    OnnxDecoder(model, manifest, find_device("cuda"))
    gpu.widths.clear()
    decoder = OnnxDecoder(model, replace(manifest, context_length=60), find_device("cuda"))
    assert max(gpu.widths) <= 60
    opened = {*gpu.widths}
    tokens = np.random.default_rng(0).integers(0, manifest.vocab_size, 60).astype(np.int32)
    for length in (1, 40, 59, 60):
        decoder.logits(tokens[:length], 1)
    assert {*gpu.widths} <= opened


def test_rows_of_a_padded_tree_are_those_of_its_branches(gpu: FakeGpu, model: Path, manifest: Manifest) -> None:
    """Also behind a text that goes on by as many tokens as the widest pass has, and up to the context's end."""
    decoder = OnnxTreeDecoder(model, manifest, find_device("cuda"))
    fresh = OnnxDecoder(model, manifest, find_device("cpu"))
    opened, widest, end = set(gpu.widths), decoder.can.widths[-1], manifest.context_length
    rng = np.random.default_rng(3)
    text = rng.integers(0, manifest.vocab_size, end).astype(np.int32)
    lengths = [40, 41, 42, 43 + widest, 44 + widest, 200, end - 30, end - 29, end - 5, end - 3]
    for length, num_nodes in zip(lengths, (2, 3, 7, 9, 20, widest, 7, 20, 5, 2), strict=True):
        parents = tuple(int(rng.integers(-1, node)) if node else -1 for node in range(num_nodes))
        nodes = rng.integers(0, manifest.vocab_size, num_nodes).astype(np.int32)
        rows = tree_logits(decoder, text[:length], nodes, parents)
        assert np.abs(rows - branch_logits(fresh, text[:length], nodes, parents)).max() < CLOSE
        # Of nodes that hang on those that lie in the cache only the last ones run.
        grown = Tree(append(nodes, text[:1]), parents=(*parents, num_nodes - 1))
        if length + num_nodes < end:
            last = tree_logits(decoder, text[:length], grown.tokens, grown.parents, num_last=1)
            expected = branch_logits(fresh, text[:length], grown.tokens, grown.parents)
            assert np.abs(last - expected[-1:]).max() < CLOSE
    assert set(gpu.widths) <= opened


@pytest.mark.parametrize(
    ("how", "deterministic"),
    [
        ("ngram", True),
        ("lookahead", False),
        *(pytest.param(how, False, marks=slow) for how in ("none", "ngram", "pipelined")),
        *(pytest.param(how, True, marks=slow) for how in ("none", "lookahead", "pipelined")),
    ],
)
def test_an_answer_runs_no_width_that_did_not_run_before_it(
    gpu: FakeGpu, model: Path, tiny_drafter: Path, how: str, deterministic: bool
) -> None:
    expect_no_new_width(gpu, model, tiny_drafter, how, deterministic, (16,) if deterministic else (8, 32, 64))


@slow
@pytest.mark.parametrize(("how", "deterministic"), [("auto", True), ("auto", False), ("hedged", False)])
def test_nor_does_one_where_rows_cost_something(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: Path, tiny_drafter: Path, how: str, deterministic: bool
) -> None:
    gpu = install(monkeypatch, FakeGpu(), passes_ms=INT4_MS)
    # Without what was found to pay on the other card.
    copy = shutil.copytree(model, tmp_path / "copy", ignore=shutil.ignore_patterns("device_checks.json"))
    widths = (4,) if deterministic else (1, 4, 8, 32, 64)
    expect_no_new_width(gpu, copy, tiny_drafter, how, deterministic, widths)


def test_a_proof_counts_for_the_width_of_its_passes_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: Path
) -> None:
    skipped = shutil.ignore_patterns("device_checks.json", "row_proofs.json")
    copy = shutil.copytree(model, tmp_path / "copy", ignore=skipped)
    holds, proved = replace(FAILS, holds=True, num_different=0), list[int]()

    def prove(decoder: OnnxDecoder, *about: object, **how: object) -> RowProof:
        proved.append(decoder.can.widths[0])
        assert decoder.can.read_width == 256
        return holds

    monkeypatch.setattr(row_proof, "prove_rows", prove)
    for passes_ms in (PASSES_MS, INT4_MS, PASSES_MS, PASSES_MS):
        install(monkeypatch, FakeGpu(), passes_ms=passes_ms)
        with load(copy, device="cuda", drafter="none", deterministic=True):
            pass
        if len(proved) < 2 or passes_ms is INT4_MS:
            (copy / "device_checks.json").unlink()
    assert proved == [16, 4]


def test_the_mode_has_to_be_asked_for_where_it_costs_more_than_drafts_give(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: Path
) -> None:
    """A 7B in four bits on an H200, where one kind of text would be slower with drafts than plain without."""
    skipped = shutil.ignore_patterns("device_checks.json", "row_proofs.json")
    copy = shutil.copytree(model, tmp_path / "copy", ignore=skipped)
    install(monkeypatch, FakeGpu(), passes_ms={**INT4_MS, 1: 3.87, 2: 6.46, 4: 5.22, 8: 9.71})
    for _ in range(2):
        lines: list[str] = []
        with load(copy, device="cuda", drafter="none", report=lines.append) as engine:
            assert not engine.is_deterministic
            assert engine.target.can.widths[0] == 1
        (line,) = (line for line in lines if "nearly tied" in line)
        assert "deterministic=True rules that out; passes without a draft then take 1.35 times as long" in line
    monkeypatch.setattr(row_proof, "prove_rows", lambda *about, **how: replace(FAILS, holds=True))
    with load(copy, device="cuda", drafter="none", deterministic=True) as engine:
        assert engine.target.can.widths == (4,)


def other_bits(width: int, place: int) -> float:
    """Passes that only read compute otherwise than those that give rows, as CUDA's do."""
    return 1.2 if width > 64 else 1.0


def uneven_bits(width: int, place: int) -> float:
    """What passes that only read compute depends on where they begin."""
    return 1.0 + 0.01 * (place % 3) if width > 4 else 1.0


def test_rows_follow_from_a_pass_and_not_from_what_the_cache_holds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: Path, manifest: Manifest
) -> None:
    """Prompts that grow, shrink and become others, up to the end of the context, in caches that are exchanged."""
    copy = shutil.copytree(model, tmp_path / "copy", ignore=shutil.ignore_patterns("device_checks.json"))
    gpu = install(monkeypatch, FakeGpu(), passes_ms=INT4_MS)
    decoder = OnnxDecoder(copy, manifest, find_device("cuda"), deterministic=True)
    assert decoder.can.read_width == 256
    gpu.rounding = other_bits  # not before: opening tries passes, and leaves out a width whose rows come out wrong
    fork, fresh, rng = decoder.fork(), decoder.fork(), np.random.default_rng(0)
    texts = rng.integers(0, manifest.vocab_size, (2, manifest.context_length)).astype(np.int32)
    texts[1, :200] = texts[0, :200]
    for _ in range(25):
        end = int(rng.choice([*rng.integers(2, manifest.context_length, 3), manifest.context_length]))
        num_prompt = max(1, end - int(rng.choice([0, 1, 5, 30, end // 2])))
        num_last = int(rng.integers(1, min(8, end - num_prompt + 1) + 1))
        given = Pass(texts[rng.integers(0, 2), :end], num_last=num_last, num_prompt=num_prompt)
        fresh.forget()
        expected = fresh.run(given).logits.copy()
        assert np.array_equal(decoder.run(given).logits, expected), (end, num_prompt, num_last)
        if rng.random() < 0.3:
            decoder.exchange(fork)


def test_a_prompt_is_read_alike_before_branches_of_a_tree(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: Path, manifest: Manifest
) -> None:
    copy = shutil.copytree(model, tmp_path / "copy", ignore=shutil.ignore_patterns("device_checks.json"))
    gpu = install(monkeypatch, FakeGpu(), passes_ms=INT4_MS)
    decoder = OnnxBranchDecoder(copy, manifest, find_device("cuda"), deterministic=True)
    gpu.rounding = other_bits
    text = np.random.default_rng(2).integers(0, manifest.vocab_size, 300).astype(np.int32)
    nodes = np.array([5, 6, 7], np.int32)
    rows = decoder.run(Pass(text, Tree(nodes, parents=(-1, -1, 0)), num_prompt=300)).logits.copy()
    decoder.forget()
    assert np.array_equal(rows[:2], decoder.run(Pass(text, Tree(nodes[:1]), num_prompt=300)).logits)


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_pass_that_is_refused_its_padding_changes_no_pass_behind_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: Path, manifest: Manifest, deterministic: bool
) -> None:
    copy = shutil.copytree(model, tmp_path / "copy", ignore=shutil.ignore_patterns("device_checks.json"))
    gpu = install(monkeypatch, FakeGpu(), passes_ms=INT4_MS)
    gpu.rounding = other_bits
    device = replace(find_device("cuda"), records_passes=False)
    decoder = OnnxDecoder(copy, manifest, device, deterministic=deterministic)
    known = {*gpu.widths}
    text = np.random.default_rng(1).integers(0, manifest.vocab_size, 451).astype(np.int32)
    prompt, more = Pass(text[:450], num_prompt=450), Pass(text, num_prompt=450)
    expected = [decoder.run(each).logits.copy() for each in (prompt, more)]
    decoder.cache.forget()
    gpu.widths.clear()
    gpu.passes = iter([None, "Failed to allocate memory for requested buffer of size 65536"])
    found = [decoder.run(each).logits.copy() for each in (prompt, more)]
    assert {*gpu.widths} <= known
    if deterministic:
        assert np.array_equal(found, expected)
        decoder.cache.forget()
        # In the place of the padding of a pass of rows no tokens can stand that are read in wide passes.
        gpu.passes = iter([None, None, "Failed to allocate memory for requested buffer of size 65536"])
        with pytest.raises(MemoryExhausted):
            decoder.run(prompt)


@pytest.mark.parametrize(("rounding", "reads"), [(other_bits, 256), pytest.param(uneven_bits, 0, marks=slow)])
def test_a_prompt_is_read_in_wide_passes_and_its_text_stays_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: Path, rounding: Callable[[int, int], float], reads: int
) -> None:
    """Whatever drafts, fresh and continued, in one answer and in two that follow each other."""
    copy = shutil.copytree(model, tmp_path / "copy", ignore=shutil.ignore_patterns("device_checks.json"))
    gpu = install(monkeypatch, FakeGpu(), passes_ms=INT4_MS)
    gpu.rounding = rounding
    first, second, num = "the in the an " * 20, "an er on the the", 80
    found = []
    for drafter in ("ngram", "none"):
        with load(copy, device="cuda", drafter=drafter, draft_length=3, deterministic=True) as engine:
            assert (engine.target.can.widths, engine.target.can.read_width) == ((4,), reads)
            gpu.widths.clear()
            answer = engine.generate(first, max_tokens=num)
            assert (256 in gpu.widths) == bool(reads)
            turns = [Message("user", first), Message("assistant", answer.text), Message("user", second)]
            begun = engine.generate(turns, max_tokens=num // 2)
            whole = engine.generate(turns, max_tokens=num)
            rest = engine.generate(turns, max_tokens=num // 2, prefill=begun.token_ids)
            assert begun.token_ids + rest.token_ids == whole.token_ids
        with load(copy, device="cuda", drafter=drafter, draft_length=3, deterministic=True) as engine:
            assert engine.generate(turns, max_tokens=num).token_ids == whole.token_ids, "fresh"
        found.append((answer.token_ids, whole.token_ids))
    assert found[0] == found[1]


def expect_no_new_width(
    gpu: FakeGpu, model: Path, drafter: Path, how: str, deterministic: bool, widths: tuple[int, ...]
) -> None:
    is_model = how in ("pipelined", "hedged")
    named = {"drafter": str(drafter), "schedule": how} if is_model else {"drafter": how}
    length = "auto" if how in ("none", "auto") else 3
    with load(model, device="cuda", draft_length=length, deterministic=deterministic, **named) as engine:
        assert engine.target.can.widths == widths
        opened = set(gpu.widths)
        gpu.widths.clear()
        answers = [engine.generate(prompt, max_tokens=20) for prompt in ("the", "the in the an the in " * 9)]
        sampled = engine.generate("the", sampling=SamplingParams(temperature=0.7, seed=3), max_tokens=15)
        assert set(gpu.widths) <= opened
        plain = engine.plain()
        greedy = plain.generate("the", max_tokens=20)
        again = plain.generate("the", sampling=SamplingParams(temperature=0.7, seed=3), max_tokens=15)
        if widths[0] > 3:  # else a pass with a draft has other kernels than one without
            assert (greedy.token_ids, again.token_ids) == (answers[0].token_ids, sampled.token_ids)
        assert set(gpu.widths) <= opened
