"""Drafters out of a target: fewer layers over the same weights, a head that knows the frequent tokens."""

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import tiny

from edgespec import load
from edgespec.cli.main import main
from edgespec.decoding.sampling import SamplingParams
from edgespec.engine import pair_check
from edgespec.engine.engine import Engine
from edgespec.errors import ManifestError, ModelError, UsageError
from edgespec.export.convert import export_model
from edgespec.export.options import Trimming, frequent_tokens, parse_layers
from edgespec.manifest import read_manifest
from edgespec.runtimes.devices import find_device
from edgespec.setup.open_model import ModelFolder, open_drafter, read_subset, self_drafter
from edgespec.text.tokenizer import open_tokenizer
from edgespec.types import Report

TEXT = "the in the an the on er in the " * 3


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def target(tiny_gguf: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("targets") / "tiny"
    trimming = Trimming(skip=frozenset([1]), num_tokens=40, corpus=corpus)
    export_model(tiny_gguf, folder, precision="int8", trimming=trimming)
    return folder


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=1.0, seed=5)])
def test_drafting_with_a_models_own_layers_changes_nothing(target: Path, sampling: SamplingParams) -> None:
    answers = []
    for drafter in ("none", "self"):
        with load(target, drafter=drafter, draft_length=3, deterministic=True) as engine:
            answers.append(engine.generate("the in", sampling=sampling, max_tokens=60))
    assert answers[0].token_ids == answers[1].token_ids
    assert answers[1].stats.num_drafted > 0


def test_drafter_shares_the_weights_file(tiny_gguf: Path, target: Path, tmp_path: Path) -> None:
    alone = export_model(tiny_gguf, tmp_path / "alone", precision="int8")
    rows = 40 * (tiny.HIDDEN + tiny.HIDDEN // 32 * 4)
    added = read_manifest(target).weights_bytes - alone.weights_bytes
    assert rows <= added <= rows + 2 * 4096  # the rows of the trimmed head, and alignment


def test_trimmed_head_gives_the_logits_of_its_tokens(tiny_gguf: Path, target: Path, tmp_path: Path) -> None:
    export_model(tiny_gguf, tmp_path / "whole", precision="int8", trimming=Trimming(keep=frozenset([0])))
    tokens = np.arange(7, dtype=np.int32)
    whole, trimmed = (
        open_drafter(ModelFolder(folder, self_drafter(read_manifest(folder))), find_device("cpu")).logits(
            tokens, 3
        )
        for folder in (tmp_path / "whole", target)
    )
    subset = read_subset(target / "vocab_subset.npy", tiny.VOCAB)
    assert len(subset) == 40
    assert np.array_equal(trimmed[:, subset], whole[:, subset])
    assert set(trimmed.argmax(axis=1)) <= set(subset.tolist())


def test_model_with_a_trimmed_head_drafts_and_is_no_target(
    tiny_gguf: Path, tiny_model: Path, corpus: Path, tmp_path: Path
) -> None:
    options = ["--vocab-subset", "50", "--vocab-corpus", str(corpus), "--precision", "int4"]
    assert main(["export", str(tiny_gguf), "--output", str(tmp_path / "d"), *options]) == 0
    with load(tiny_model, drafter=str(tmp_path / "d"), draft_length=2) as engine:
        assert engine.generate("the", max_tokens=20).stats.num_drafted > 0
    with pytest.raises(ModelError, match="trimmed"):
        load(tmp_path / "d")


def test_frequent_tokens_are_those_of_the_text_then_low_ids(target: Path, corpus: Path) -> None:
    text = (target / "tokenizer.json").read_text(encoding="utf-8")
    ids = open_tokenizer(target / "tokenizer.json", ModelError, "").encode(TEXT).ids
    wanted = Trimming(num_tokens=len(set(ids)) + 3, corpus=corpus)
    found = frequent_tokens(text, wanted, [2], tiny.VOCAB)
    rest = sorted(set(found) - set(ids))
    assert set(ids) < set(found)
    assert rest == [0, 1, 2]
    with pytest.raises(UsageError, match="wanted 2 to"):
        frequent_tokens(text, replace(wanted, num_tokens=1), [2], tiny.VOCAB)


def test_layers_are_numbers_and_ranges() -> None:
    assert parse_layers("0-2, 5", "") == {0, 1, 2, 5}
    assert Trimming(skip=frozenset([1, 2])).layers(4) == (0, 3)
    assert Trimming().layers(4) is None
    for text in ("", "a", "3-1", "1--2", "-1", "1,,2"):
        with pytest.raises(UsageError, match="--keep-layers"):
            parse_layers(text, "--keep-layers")
    for trimming in (
        Trimming(keep=frozenset([4])),
        Trimming(skip=frozenset(range(4))),
        Trimming(skip=frozenset([9])),
    ):
        with pytest.raises(UsageError, match="0 to 3"):
            trimming.layers(4)


def test_what_cannot_be_made_is_told(tiny_gguf: Path, tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="vocab-corpus"):
        export_model(tiny_gguf, tmp_path / "a", trimming=Trimming(num_tokens=50))
    with pytest.raises(UsageError, match="no layer 7 in a model"):
        export_model(tiny_gguf, tmp_path / "a", hidden_layers=(7,))
    with pytest.raises(UsageError, match="--keep-layers"):
        load(tiny_model, drafter="self")
    assert not list(tmp_path.iterdir())


def test_subset_that_is_no_list_of_tokens_is_refused(tmp_path: Path) -> None:
    for tokens in (np.array([3, 2], np.int32), np.array([1, 999], np.int32), np.array([[1]]), np.array([1.0])):
        np.save(tmp_path / "s.npy", tokens)
        with pytest.raises(ManifestError, match="export the model again"):
            read_subset(tmp_path / "s.npy", 300)
    np.save(tmp_path / "s.npy", np.array([object()]), allow_pickle=True)
    with pytest.raises(ManifestError, match=r"s\.npy is not a list of tokens; export"):
        read_subset(tmp_path / "s.npy", 300)


def test_corpus_that_is_no_file_is_refused_before_any_work(
    tiny_gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "pipe")
    arguments = ["export", str(tiny_gguf), "--output", str(tmp_path / "new" / "out"), "--vocab-subset", "50"]
    for corpus in (tmp_path / "pipe", tmp_path, tmp_path / "none", "/dev/zero", "x" * 5000):
        assert main([*arguments, "--vocab-corpus", str(corpus)]) == 2
        assert "not a regular file" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_head_of_too_few_tokens_is_refused_before_any_work(tiny_gguf: Path, corpus: Path, tmp_path: Path) -> None:
    for number in (1, tiny.VOCAB):
        said: list[str] = []
        trimming = Trimming(num_tokens=number, corpus=corpus)
        with pytest.raises(UsageError, match=f"the head would keep {number} tokens; wanted"):
            export_model(tiny_gguf, tmp_path / "new" / "out", trimming=trimming, report=said.append)
        assert said == [f"reading {tiny_gguf}"]
    assert not (tmp_path / "new").exists()


def test_layers_are_written_in_ascii_digits_and_must_exist() -> None:
    with pytest.raises(UsageError, match="wanted numbers"):
        parse_layers("\N{ARABIC-INDIC DIGIT THREE}", "--hidden-states")
    with pytest.raises(UsageError, match="no layer 30 in a model that has 0 to 29"):
        Trimming(keep=frozenset([30])).layers(30)


def test_hidden_states_are_in_the_tree_graph_too_and_in_no_drafter(tiny_gguf: Path, tmp_path: Path) -> None:
    export_model(
        tiny_gguf, tmp_path / "m", precision="fp32", hidden_layers=(1,), trimming=Trimming(keep=frozenset([0]))
    )
    outputs = {
        name: {value.name for value in onnx.load(tmp_path / "m" / name, load_external_data=False).graph.output}
        for name in ("model.onnx", "model_tree.onnx", "model_draft.onnx")
    }
    assert ["hidden_states.1" in names for names in outputs.values()] == [True, True, False]
    with load(tmp_path / "m", drafter="self", draft_length=2) as engine:
        assert engine.generate("the", max_tokens=3).text


def test_drafter_of_a_models_own_layers_is_not_hedged_and_a_plan_knows_it(
    target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError, match=r"has no tree graph .* use another drafter, or schedule='pipelined'$"):
        load(target, drafter="self", schedule="hedged", draft_length=2)
    assert main(["plan", str(target), "--drafter", "self", "--json"]) == 0
    (hedged,) = [each for each in json.loads(capsys.readouterr().out)["refused"] if each["schedule"] == "hedged"]
    assert hedged["context_length"] == 0
    assert hedged["reason"].endswith("has no graph for several branches in a pass")


def test_a_check_of_a_models_own_layers_measures_these(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[tuple[str, str]] = []

    def measure(engine: Engine, own: ModelFolder, other: ModelFolder, report: Report) -> None:
        measured.extend((each.name, other.manifest.name) for each in engine.speculation.drafters())

    monkeypatch.setattr(pair_check, "measure_pair", measure)
    for drafter, found in (("self", self_drafter(read_manifest(target))), (str(target), read_manifest(target))):
        pair_check.check_pair(str(target), drafter)
        assert measured.pop() == (found.name, found.name)


def test_a_check_of_several_drafters_is_refused(target: Path, tiny_model: Path) -> None:
    for names in (f"{tiny_model},self", f"{tiny_model}+self"):
        with pytest.raises(UsageError, match=r"names 2 models; .* name one"):
            pair_check.check_pair(str(target), names)
