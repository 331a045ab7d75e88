"""Models with recurrent states, which go back to the accepted token without running others again."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from calls import decoder
from families import FAMILIES, weights_of

from edgespec import SamplingParams, load
from edgespec.decoding.decoder import Pass
from edgespec.decoding.tree import Tree
from edgespec.errors import DeviceUnavailable, ManifestError, UsageError
from edgespec.export.convert import export_model
from edgespec.manifest import read_manifest
from edgespec.manifest.caches import KEPT_STATES
from edgespec.memory.estimate import cache_bytes
from edgespec.runtimes.pass_shapes import PassShapes
from edgespec.runtimes.passes import Passes
from edgespec.runtimes.session import RECURRENT_OPERATOR
from edgespec.types import TokenIds

RNG = np.random.default_rng(3)
TOKENS = RNG.integers(0, tiny.VOCAB, 1000).astype(np.int32)


def chain(tokens: TokenIds) -> Tree:
    return Tree(tokens, (0,) * len(tokens))


@pytest.mark.slow
def test_no_token_runs_twice_whatever_of_200_drafts_is_rejected(stateful_model: Path) -> None:
    used, fresh = decoder(stateful_model), decoder(stateful_model)
    whole = fresh.logits(TOKENS, len(TOKENS)).copy()
    text, num_run, rejected = TOKENS[:40], 40, list[int]()
    used.run(Pass(text, num_last=1))
    for number in range(200):
        num_draft = number % 10
        num_right = int(RNG.integers(0, num_draft + 1)) if len(text) < 980 else 0
        draft = TOKENS[len(text) : len(text) + num_draft].copy()
        draft[num_right:] = (draft[num_right:] + 1) % tiny.VOCAB
        rows = used.run(Pass(text, chain(draft), num_last=num_draft + 1)).logits
        wanted = whole[len(text) - 1 : len(text) + num_right]
        assert np.array_equal(rows[: num_right + 1], wanted)
        rejected.append(num_draft - num_right)
        num_run += num_draft + 1
        text = TOKENS[: len(text) + num_right + 1]
    assert used.num_fed == num_run
    assert {*rejected} == {*range(10)}


def test_a_text_goes_on_behind_a_prompt_that_was_read_before(stateful_model: Path) -> None:
    used, fresh = decoder(stateful_model), decoder(stateful_model)
    used.logits(TOKENS[:60], 1)
    for stop in range(61, 80):
        used.logits(TOKENS[:stop], 1)
    run = used.num_fed
    other = np.append(TOKENS[:60], TOKENS[200:210])
    assert np.array_equal(used.logits(other, 1), fresh.logits(other, 1))
    assert used.num_fed == run + 10
    run = used.num_fed
    assert np.array_equal(used.logits(TOKENS[:60], 1), fresh.logits(TOKENS[:60], 1))
    assert used.num_fed == run + 1
    used.pretend(TOKENS[:500])
    assert np.isfinite(used.logits(TOKENS[:501], 1)).all()


@pytest.mark.parametrize("shapes", [None, PassShapes((4,), (16,))])
def test_padding_within_a_text_goes_into_no_state(stateful_model: Path, shapes: PassShapes | None) -> None:
    used, fresh = (decoder(stateful_model, deterministic=shapes is None) for _ in range(2))
    used.shapes, used.chunk_tokens = shapes, 256 if shapes else 21
    for num_tokens in (50, 75):
        rows, wanted = (each.logits(TOKENS[:num_tokens], 3) for each in (used, fresh))
        np.testing.assert_allclose(rows, wanted, rtol=0, atol=1e-5 if shapes else 0)


def test_a_pass_that_repeats_a_token_and_finds_no_memory_is_made_narrower(
    recurrent_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used, fresh, run = decoder(recurrent_model), decoder(recurrent_model), Passes.run
    tokens, starts = np.append(TOKENS, TOKENS)[: used.context_length], list[int]()
    used.chunk_tokens = 89  # the last one begins with an odd token

    def scarce(self: Passes, given: TokenIds, num_past: int, *arguments: Any, **named: Any) -> Any:
        if self is used._passes:
            starts.append(num_past)
            self.cache.prepare(num_past, len(given) + named["num_padded"])
            if num_past + len(given) == len(tokens) and len(given) > 32:
                raise MemoryError
        return run(self, given, num_past, *arguments, **named)

    monkeypatch.setattr(Passes, "run", scarce)
    assert np.array_equal(used.logits(tokens, 200), fresh.logits(tokens, 200))
    assert starts.count(978) == 2


def test_what_cannot_be_copied_is_not_offered(recurrent_model: Path) -> None:
    used = decoder(recurrent_model)
    used.logits(TOKENS[:30], 1)
    assert used.prefix_key is None
    assert not used.fork().copy_prefix(used, TOKENS[:30])
    assert not used.imitate(TOKENS[:60], 30, 1)
    used.share(2, lambda: nullcontext(True))
    assert used._passes.queue is not None
    assert used._passes.queue._joiner is None


def test_states_count_as_memory(recurrent_model: Path) -> None:
    kv = read_manifest(recurrent_model).kv_cache
    assert kv.recurrent_bytes == KEPT_STATES * 3 * 4 * 16 * 24 * 4
    assert cache_bytes(kv, 10, 512) == kv.bytes_per_token * 512 + kv.recurrent_bytes


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["source", "int8", "int4"])
@pytest.mark.parametrize("family", ["qwen3_5", "granitemoehybrid-mamba"])
def test_rows_do_not_depend_on_the_cut_in_any_precision(tmp_path: Path, family: str, precision: str) -> None:
    tiny.write_huggingface(tmp_path / "hf", weights_of(family), config=FAMILIES[family]["config"])
    export_model(tmp_path / "hf", tmp_path / "out", precision=precision)
    cut, whole = decoder(tmp_path / "out"), decoder(tmp_path / "out")
    wanted = whole.logits(TOKENS[:60], 60)
    for start, stop in ((0, 1), (1, 8), (8, 9), (9, 11), (11, 43), (43, 60)):
        assert np.array_equal(cut.logits(TOKENS[:stop], stop - start), wanted[start:stop])


def test_an_onnxruntime_without_the_operator_is_named(
    recurrent_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from onnxruntime.capi import _pybind_state

    others = [each for each in _pybind_state.get_all_operator_schema() if each.name != RECURRENT_OPERATOR]
    monkeypatch.setattr(_pybind_state, "get_all_operator_schema", lambda: others)
    with pytest.raises(DeviceUnavailable, match=r"operator LinearAttention, as 1\.28 and newer") as raised:
        decoder(recurrent_model)
    assert raised.value.exit_code == 4


def test_a_drafter_that_needs_trees_is_refused(recurrent_model: Path) -> None:
    with pytest.raises(ManifestError, match="layers of another kind than attention, which run chains"):
        load(recurrent_model, drafter="lookahead", device="cpu")
    with pytest.raises(UsageError, match="which run chains of guesses, not trees; for 'hedged' use another"):
        load(recurrent_model, drafter=str(recurrent_model), schedule="hedged", device="cpu")


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_every_drafter_and_schedule_gives_the_text_of_plain_decoding(
    stateful_model: Path, tiny_drafter: Path, temperature: float
) -> None:
    sampling = SamplingParams(temperature=temperature, seed=4)

    def text(model: Path = stateful_model, **options: Any) -> list[int]:
        with load(model, device="cpu", **options) as engine:
            answer = engine.generate("the hen in the the hen in", sampling=sampling, max_tokens=60)
        return [*answer.token_ids]

    wanted = text(drafter="none")
    assert text() == wanted
    for drafter in ("ngram", "suffix"):
        assert text(drafter=drafter, draft_length=5) == wanted
    for schedule in ("serial", "pipelined", "hedged"):
        assert text(drafter=str(tiny_drafter), schedule=schedule, draft_length=4) == wanted
    wanted = text(tiny_drafter, drafter="none")
    assert text(tiny_drafter, drafter=str(stateful_model), schedule="pipelined", draft_length=4) == wanted
