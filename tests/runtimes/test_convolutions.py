"""Models with short convolutions, whose caches hold a row for each token of such a layer."""

from pathlib import Path

import numpy as np
import pytest
import tiny
from calls import decoder
from families import FAMILIES, weights_of

from edgespec import SamplingParams, load
from edgespec.errors import ManifestError
from edgespec.export.convert import export_model
from edgespec.export.options import Trimming
from edgespec.manifest import read_manifest
from edgespec.setup.open_model import self_drafter

TOKENS = np.random.default_rng(3).integers(0, tiny.VOCAB, 600).astype(np.int32)


@pytest.mark.parametrize("kind", ["convolved_model", "recurrent_model", "sharing_model"])
def test_rows_after_going_back_to_any_token_are_those_of_a_new_decoder(
    kind: str, request: pytest.FixtureRequest
) -> None:
    model = request.getfixturevalue(kind)
    used, fresh = decoder(model), decoder(model)
    used.logits(TOKENS[:40], 9)
    for kept in range(0, 41, 3):
        tokens = np.append(TOKENS[:kept], TOKENS[100 : 100 + 1 + kept % 4])
        fresh.forget()
        assert np.array_equal(used.logits(tokens, 1), fresh.logits(tokens, 1)), kept
        used.logits(TOKENS[:40], 1)


def test_rows_stay_as_the_buffers_grow(convolved_model: Path) -> None:
    used, fresh = decoder(convolved_model), decoder(convolved_model)
    for stop in (500, 511, 513, 600):
        used.logits(TOKENS[:stop], 1)
    fresh.logits(TOKENS, 1)
    assert np.array_equal(used.logits(TOKENS[:20], 3), fresh.logits(TOKENS[:20], 3))
    assert np.array_equal(used.logits(TOKENS, 3), fresh.logits(TOKENS, 3))
    used.pretend(TOKENS[:300])
    assert np.array_equal(used.logits(TOKENS[300:], 3), fresh.logits(TOKENS[300:], 3))


def test_what_a_text_left_is_copied_and_taken_out_and_put_back(convolved_model: Path) -> None:
    used = decoder(convolved_model)
    used.logits(TOKENS[:30], 1)
    fork, other = used.fork(), decoder(convolved_model)
    assert fork.copy_prefix(used, TOKENS[:30])
    held, values = used.read_prefix()
    kv = read_manifest(convolved_model).kv_cache
    assert values.shape == (1, 1, 30, kv.numbers_per_token)
    assert kv.numbers_per_token == 2 * 2 * 2 * 16 + 3 * 64
    other.fill_prefix(held, values)
    wanted = used.logits(TOKENS[:40], 2)
    for each in (fork, other):
        assert np.array_equal(each.logits(TOKENS[:40], 2), wanted)
        assert each.num_fed == 10
    assert used.imitate(TOKENS[:60], 40, 1)
    assert np.isfinite(used.logits(TOKENS[:61], 1)).all()


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["source", "int8", "int4"])
def test_rows_do_not_depend_on_the_cut_in_any_precision(tmp_path: Path, precision: str) -> None:
    tiny.write_huggingface(tmp_path / "hf", weights_of("lfm2"), config=FAMILIES["lfm2"]["config"])
    export_model(tmp_path / "hf", tmp_path / "out", precision=precision)
    cut, whole = decoder(tmp_path / "out"), decoder(tmp_path / "out")
    wanted = whole.logits(TOKENS[:60], 60)
    for start, stop in ((0, 1), (1, 8), (8, 9), (9, 11), (11, 43), (43, 60)):
        assert np.array_equal(cut.logits(TOKENS[:stop], stop - start), wanted[start:stop])


@pytest.mark.slow
def test_a_drafter_of_some_layers_has_rows_for_those_among_them(tmp_path: Path) -> None:
    tiny.write_huggingface(tmp_path / "hf", weights_of("lfm2"), config=FAMILIES["lfm2"]["config"])
    export_model(tmp_path / "hf", tmp_path / "out", precision="fp32", trimming=Trimming(keep=frozenset({1, 3})))
    manifest = self_drafter(read_manifest(tmp_path / "out"))
    assert manifest.kv_cache.convolutions.layers == (1,)
    assert manifest.kv_cache.attention_layers == (0,)
    texts = {
        name: load(tmp_path / "out", drafter=name, device="cpu").generate("the", max_tokens=20).token_ids
        for name in ("none", "self")
    }
    assert texts["self"] == texts["none"]


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_every_drafter_and_schedule_gives_the_text_of_plain_decoding(
    convolved_model: Path, tiny_drafter: Path, temperature: float
) -> None:
    sampling = SamplingParams(temperature=temperature, seed=4)

    def text(**options: object) -> list[int]:
        with load(convolved_model, device="cpu", **options) as engine:  # type: ignore[arg-type]
            return engine.generate("the hen in the the hen in", sampling=sampling, max_tokens=60).token_ids

    wanted = text(drafter="none")
    assert text() == wanted
    for drafter in ("ngram", "suffix"):
        assert text(drafter=drafter, draft_length=5) == wanted
    for schedule in ("serial", "pipelined", "hedged"):
        assert text(drafter=str(tiny_drafter), schedule=schedule, draft_length=4) == wanted


def test_a_drafter_that_needs_trees_is_refused(convolved_model: Path) -> None:
    with pytest.raises(ManifestError, match="layers of another kind than attention, which run chains"):
        load(convolved_model, drafter="lookahead", device="cpu")
