"""The decoder on graphs with growing caches: what it says does not depend on what it kept."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny
from calls import random_calls
from growing import HEADS, write_growing

from edgespec.engine.load import load
from edgespec.errors import ContextOverflow, EdgeSpecError, ManifestError
from edgespec.manifest import read_manifest
from edgespec.runtimes.devices import find_device
from edgespec.runtimes.onnx import OnnxDecoder

pytestmark = pytest.mark.slow  # a module of many models or processes


@pytest.fixture(scope="module", params=[(True, True), (True, False), (False, True), (False, False)], ids=str)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With and without position_ids and attention_mask."""
    position_ids, attention_mask = request.param
    place = tmp_path_factory.mktemp("growing") / "model"
    return write_growing(place, position_ids=position_ids, attention_mask=attention_mask)


def decoder(folder: Path, *, deterministic: bool = True) -> OnnxDecoder:
    manifest = read_manifest(folder)
    return OnnxDecoder(folder, manifest, find_device("cpu"), num_threads=1, deterministic=deterministic)


@pytest.mark.parametrize(("count", "longest"), [(400, 60), (40, tiny.CONTEXT)])
def test_cached_equals_uncached_to_the_bit_over_random_calls(folder: Path, count: int, longest: int) -> None:
    cached, fresh = decoder(folder), decoder(folder)
    for tokens, num_last in random_calls(seed=7, count=count, longest=longest):
        fresh._held = np.zeros(0, np.int32)  # forget everything
        assert np.array_equal(cached.logits(tokens, num_last), fresh.logits(tokens, num_last))
    assert cached.num_fed < 0.7 * fresh.num_fed


@pytest.mark.parametrize(("deterministic", "largest"), [(True, 0), (False, 2e-5)])
def test_any_cut_gives_the_logits_of_one_pass(folder: Path, deterministic: bool, largest: float) -> None:
    tokens = np.random.default_rng(1).integers(0, tiny.VOCAB, 40).astype(np.int32)
    whole = decoder(folder).logits(tokens, 40).copy()
    cutting = decoder(folder, deterministic=deterministic)
    for cut in range(1, 40):
        cutting._held = tokens[:0]
        assert np.abs(cutting.logits(tokens[:cut], cut) - whole[:cut]).max() <= largest
        assert np.abs(cutting.logits(tokens, 40 - cut) - whole[cut:]).max() <= largest


def test_rewind_leaves_no_trace(folder: Path) -> None:
    tokens = np.random.default_rng(2).integers(0, tiny.VOCAB, 30).astype(np.int32)
    wanted = decoder(folder).logits(tokens, 3).copy()
    turning = decoder(folder)
    for kept in range(30):
        turning._held, fed = tokens[:0], turning.num_fed
        turning.logits(np.concatenate([tokens[:kept], tokens[:13]]), 1)
        assert np.array_equal(turning.logits(tokens, 3), wanted)
        assert turning.num_fed - fed == kept + 13 + 30 - min(kept + _same(tokens, kept), 27)


def _same(tokens: np.ndarray, kept: int) -> int:
    """How many tokens of the wrong turn happen to be the right ones."""
    differs = tokens[:13][: 30 - kept] != tokens[kept : kept + 13]
    return int(differs.argmax()) if differs.any() else len(differs)


def test_half_precision_gives_the_same_within_its_rounding(tmp_path: Path) -> None:
    half, single = write_growing(tmp_path / "half", dtype="float16"), write_growing(tmp_path / "single")
    cached, fresh, exact = decoder(half), decoder(half), decoder(single)
    for tokens, num_last in random_calls(seed=4, count=60, longest=60):
        fresh._held = np.zeros(0, np.int32)
        rows = cached.logits(tokens, num_last)
        assert rows.dtype == np.float32
        assert np.abs(rows - fresh.logits(tokens, num_last)).max() < 0.05
        assert np.abs(rows - exact.logits(tokens, num_last)).max() < 0.1


@pytest.mark.parametrize("when", [0, 1, 2, 5, 9, 20])
@pytest.mark.parametrize("where", ["_value", "_copy", "_view", "collect"])
def test_interrupt_at_any_moment_leaves_no_trace(folder: Path, when: int, where: str) -> None:
    calls = random_calls(seed=when, count=12, longest=60)
    interrupted = decoder(folder)
    cache = interrupted._passes.cache
    whole, count = getattr(cache, where), 0

    def interrupting(*arguments: object) -> object:
        nonlocal count
        count += 1
        if count == when + 1:
            raise KeyboardInterrupt
        return whole(*arguments)

    setattr(cache, where, interrupting)
    fresh = decoder(folder)
    for tokens, num_last in calls:
        try:
            rows = interrupted.logits(tokens, num_last)
        except KeyboardInterrupt:
            rows = interrupted.logits(tokens, num_last)
        fresh._held = np.zeros(0, np.int32)
        assert np.array_equal(rows, fresh.logits(tokens, num_last))
    assert count > when or where in ("_copy", "collect")


def test_context_is_usable_to_its_last_token(folder: Path) -> None:
    tokens = np.random.default_rng(0).integers(0, tiny.VOCAB, tiny.CONTEXT).astype(np.int32)
    stepped = decoder(folder)
    stepped.logits(tokens[:-1], 1)
    assert np.abs(stepped.logits(tokens, 1) - decoder(folder).logits(tokens, 1)).max() < 2e-5
    with pytest.raises(ContextOverflow):
        stepped.logits(np.append(tokens, np.int32(1)), 1)


def test_speculation_gives_the_tokens_of_plain_decoding(folder: Path, tiny_model: Path) -> None:
    answers = []
    for drafter, length in (("none", 0), ("ngram", 7), (str(tiny_model), 4)):
        with load(folder, drafter=drafter, draft_length=length, deterministic=True) as engine:
            answer = engine.generate("the in the an on the in the", max_tokens=80)
            answers.append(answer.token_ids)
    assert len(answers[0]) > 20
    assert answers == [answers[0]] * 3


def test_same_model_as_drafter_is_always_right(folder: Path) -> None:
    with load(folder, drafter=str(folder), draft_length=4) as engine:
        stats = engine.generate("the in the an on", max_tokens=60).stats
    assert stats.acceptance_rate == pytest.approx(1, abs=0.05)


def test_graph_of_another_signature_lists_found_and_wanted(folder: Path, tmp_path: Path) -> None:
    manifest = read_manifest(folder)
    wrong = replace(manifest, signature=replace(manifest.signature, past_key="cache.%d.k"))
    with pytest.raises(ManifestError) as raised:
        OnnxDecoder(folder, wrong, find_device("cpu"))
    assert "past_key_values.0.key is not expected" in str(raised.value)
    wrong = replace(
        manifest, signature=replace(manifest.signature, past_key="cache.%d.k", past_value="cache.%d.v")
    )
    wrong = replace(wrong, kv_cache=replace(wrong.kv_cache, num_layers=1))
    with pytest.raises(ManifestError, match="and 2 more"):
        OnnxDecoder(folder, wrong, find_device("cpu"))
    heads = replace(manifest, kv_cache=replace(manifest.kv_cache, num_kv_heads=3))
    with pytest.raises(
        ManifestError, match=rf"is float \[1, {HEADS}, past, 16\], wanted float \[1, 3, past, 16\]"
    ):
        OnnxDecoder(folder, heads, find_device("cpu"))
    half = replace(manifest, kv_cache=replace(manifest.kv_cache, dtype="float16"))
    with pytest.raises(ManifestError, match="wanted float16"):
        OnnxDecoder(folder, half, find_device("cpu"))


def test_damaged_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    (copy / "model.onnx").write_bytes((copy / "model.onnx").read_bytes()[:-9])
    with pytest.raises(EdgeSpecError, match=r"model\.onnx"):
        load(copy)
