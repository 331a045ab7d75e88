"""A drafter model that drafts several tokens in one pass, against the transformer written out in numpy."""

import json
from pathlib import Path

import numpy as np
import pytest
import tiny
from double import tree_logits
from draft_runs import draft_greedily

from edgespec.errors import SourceError
from edgespec.export.convert import export_model
from edgespec.export.layout import lay_out, rule_of
from edgespec.export.options import ExportOptions, Trimming
from edgespec.export.sources import read_source
from edgespec.manifest import read_manifest
from edgespec.runtimes.devices import find_device
from edgespec.runtimes.onnx import OnnxDecoder
from edgespec.runtimes.parallel import ParallelDecoder
from edgespec.setup.measure import profile_drafter
from edgespec.setup.open_model import ModelFolder, open_drafter
from edgespec.setup.profile import Profile
from edgespec.types import TokenIds, append

MASK, NUM_TOKENS = 41, 8
WEIGHTS = tiny.random_weights(seed=5, tied=False)


@pytest.fixture(scope="module")
def parallel_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("pard") / "source"
    tiny.write_huggingface(source, WEIGHTS)
    config = source / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"pard_token": MASK}))
    return source


@pytest.fixture(scope="module")
def parallel_model(parallel_source: Path, tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    folder = tmp_path_factory.mktemp("pard-model") / "drafter"
    export_model(parallel_source, folder, precision="fp32")
    return ModelFolder(folder, read_manifest(folder))


def reference_rows(tokens: TokenIds) -> np.ndarray:
    """The rows of a block behind tokens, [NUM_TOKENS, vocab_size]."""
    masked = append(tokens, [MASK] * (NUM_TOKENS - 1))
    return tiny.reference_logits(WEIGHTS, masked)[-NUM_TOKENS:]


def opened(model: ModelFolder, *, deterministic: bool = False, has_trees: bool = False) -> ParallelDecoder:
    decoder = open_drafter(
        model, find_device("cpu"), num_threads=1, deterministic=deterministic, has_trees=has_trees
    )
    assert isinstance(decoder, ParallelDecoder)
    return decoder


def random_text(seed: int, length: int) -> TokenIds:
    return np.random.default_rng(seed).integers(0, tiny.VOCAB, length).astype(np.int32)


@pytest.mark.parametrize("deterministic", [pytest.param(False, marks=pytest.mark.slow), True])
def test_drafts_are_the_rows_of_masks_over_prefill_rejection_and_going_on(
    parallel_model: ModelFolder, deterministic: bool
) -> None:
    decoder = opened(parallel_model, deterministic=deterministic)
    text, num_accepted = random_text(1, 40), [3, 0, 5, 8, 1]
    for accepted in num_accepted:
        expected, num_before = reference_rows(text), decoder.num_fed
        rows, drafted = draft_greedily(decoder, text, 5)
        assert np.abs(rows - expected[:5]).max() < 1e-4
        assert num_before == 0 or decoder.num_fed - num_before < 24  # what was accepted, and the block
        text = append(append(text, drafted[:accepted]), random_text(len(text), 1))


def test_a_draft_beyond_the_block_goes_on_with_another_pass(parallel_model: ModelFolder) -> None:
    decoder, text = opened(parallel_model), random_text(2, 20)
    rows, drafted = draft_greedily(decoder, text, 20)
    for first in (0, 8, 16):
        expected = reference_rows(append(text, drafted[:first]))[: 20 - first]
        assert np.abs(rows[first : first + NUM_TOKENS] - expected).max() < 1e-4


def test_a_pass_runs_no_more_masks_than_tokens_are_wanted(parallel_model: ModelFolder) -> None:
    decoder, text = opened(parallel_model), random_text(3, 20)
    decoder.begin(text, 3)
    decoder.logits(text, 1)
    assert decoder.num_fed == len(text) + 2
    decoder.logits(append(text, [5, 6]), 1)
    assert decoder.num_fed == len(text) + 2
    row = decoder.logits(append(text, [5, 6, 7]), 1)  # one more than was wanted
    assert np.abs(row - reference_rows(text)[3]).max() < 1e-4


def test_the_last_block_ends_with_the_context(parallel_model: ModelFolder) -> None:
    decoder, text = opened(parallel_model), random_text(4, tiny.CONTEXT - 2)
    rows, _ = draft_greedily(decoder, text, 3)
    assert np.abs(rows - reference_rows(text)[:3]).max() < 1e-4


def test_other_rows_are_those_of_the_model(parallel_model: ModelFolder) -> None:
    decoder, text = opened(parallel_model), random_text(5, 30)
    decoder.begin(text, 99)
    decoder.logits(text, 1)
    own = tiny.reference_logits(WEIGHTS, text)
    assert np.abs(decoder.logits(text, 4) - own[-4:]).max() < 1e-4
    assert np.abs(decoder.logits(text[:-3], 1) - own[-4]).max() < 1e-4
    decoder.forget()
    assert np.abs(decoder.logits(text, 1) - own[-1]).max() < 1e-4


def test_trees_run_without_masks(parallel_model: ModelFolder) -> None:
    decoder, text = opened(parallel_model, has_trees=True), random_text(6, 20)
    draft_greedily(decoder, text, 4)
    rows = tree_logits(decoder, text, np.array([7, 9], np.int32), (-1, 0))  # type: ignore[attr-defined]
    assert np.abs(rows - tiny.reference_logits(WEIGHTS, append(text, [7, 9]))[-3:]).max() < 1e-4


def test_a_trimmed_head_is_drafted_with_in_parallel(parallel_source: Path, tmp_path: Path) -> None:
    (tmp_path / "corpus").write_text("the theatre in the other town")
    trimming = Trimming(num_tokens=100, corpus=tmp_path / "corpus")
    manifest = export_model(parallel_source, tmp_path / "out", precision="fp32", trimming=trimming)
    decoder, text = opened(ModelFolder(tmp_path / "out", manifest)), random_text(7, 20)
    rows, _ = draft_greedily(decoder, text, NUM_TOKENS)
    tokens = np.load(tmp_path / "out" / "vocab_subset.npy")
    assert np.abs(rows - reference_rows(text))[:, tokens].max() < 1e-4
    decoder.pretend(text)
    decoder.forget()


def test_a_static_form_drafts_token_by_token(parallel_source: Path) -> None:
    loaded = read_source(parallel_source)
    for form, drafts in (("npu", False), ("cpu", True)):
        options = ExportOptions(precision="fp16", form=form)
        manifest = lay_out("name", loaded, rule_of(loaded, options), options)
        assert (manifest.parallel is not None) == drafts


@pytest.mark.parametrize("token", [-1, tiny.VOCAB, "41", True, 1.5])
def test_a_mask_token_that_is_none_is_refused(parallel_source: Path, tmp_path: Path, token: object) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for file in parallel_source.iterdir():
        (source / file.name).write_bytes(file.read_bytes())
    stated = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(stated | {"pard_token": token}))
    with pytest.raises(SourceError, match="wanted a token id below"):
        read_source(source)


def test_a_measured_draft_is_a_whole_block(
    parallel_model: ModelFolder, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, begun = opened(parallel_model), []
    begin = decoder.begin

    def begin_and_note(tokens: TokenIds, num_tokens: int | None = None) -> bool:
        begun.append(num_tokens)
        return begin(tokens, num_tokens)

    monkeypatch.setattr(decoder, "begin", begin_and_note)
    target = OnnxDecoder(tiny_model, read_manifest(tiny_model), find_device("cpu"))
    profile_drafter(decoder, target, Profile(passes_s={64: {1: 0.002}}, prefill_s=0.001))
    assert set(begun) == {NUM_TOKENS}
    assert parallel_model.manifest.tokens_per_pass == NUM_TOKENS
