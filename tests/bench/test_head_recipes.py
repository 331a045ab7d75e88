"""Recipes of the command line of bench/head_recipes.py."""

import json
from pathlib import Path

import head_recipes as bench
import numpy as np
import pytest
import tiny

from edgespec.errors import UsageError
from edgespec.training.fit import Recipe, Trainer
from edgespec.training.network import JOIN, Network
from edgespec.training.objective import Agreement
from edgespec.training.stored_texts import StatesFile, TextsFile


def test_a_recipe_is_told_by_its_fields() -> None:
    assert bench.parse_recipe("", 2.0) == Recipe(epochs=2.0)
    found = bench.parse_recipe("variation=0.5 num_steps=5", 1.0)
    assert found == Recipe(variation=0.5, num_steps=5, epochs=1.0)
    assert isinstance(found.num_steps, int)


@pytest.mark.parametrize("text", ["steps=5", "num_steps=x", "num_steps"])
def test_what_is_no_field_is_refused_with_those_that_are(text: str) -> None:
    with pytest.raises(UsageError, match="wanted some of variation=NUMBER"):
        bench.parse_recipe(text, 1.0)


def test_the_texts_of_a_head_with_prompts_kept_aside_are_split_as_in_its_training(
    tiny_gguf: Path, tmp_path: Path
) -> None:
    work = tmp_path / "head.work"
    work.mkdir()
    (work / "run.json").write_text(json.dumps({"layers": [0, 1]}))
    texts, states = TextsFile(work / "texts.jsonl", tiny.VOCAB), StatesFile(work / "states.f16", 2 * tiny.HIDDEN)
    for number in (-1, 0, 1):
        texts.add(number, np.array([number + 3], np.int32), (4, 5))
    states.fill(texts.texts, lambda each: [np.zeros((len(tokens), states.width)) for tokens in each])
    folder, found = bench.open_folder(tmp_path / "head", tiny_gguf, tmp_path / "first", 9)
    held_out, trained = folder.split(found)
    assert [text.tokens[0] for text in held_out] == [2]
    assert [text.tokens[0] for text in trained] == [3, 4]
    states.path.with_suffix(".texts").write_bytes(b"other")
    with pytest.raises(UsageError, match="has no texts with hidden states"):
        bench.open_folder(tmp_path / "head", tiny_gguf, tmp_path / "second", 9)


@pytest.mark.train
def test_all_rows_are_of_all_held_out_texts_and_a_recipe_has_its_own_agreement(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch", reason="needs PyTorch: make test-train")
    work, rng = tmp_path / "head.work", np.random.default_rng(0)
    work.mkdir()
    (work / "run.json").write_text(json.dumps({"layers": [0, 1, 2]}))
    texts, states = TextsFile(work / "texts.jsonl", tiny.VOCAB), StatesFile(work / "states.f16", 3 * tiny.HIDDEN)
    for number in range(-6, 6):
        texts.add(number, np.array([number + 9], np.int32), tuple(rng.integers(0, tiny.VOCAB, 30).tolist()))
    states.fill(texts.texts, lambda each: [rng.normal(size=(len(tokens), states.width)) for tokens in each])
    compared, start = list[int](), list[np.ndarray]()

    def worse(trainer: Trainer, network: Network) -> Agreement:
        compared.append(len(trainer.compared))
        means = network.arrays()[JOIN]
        start[:] = start or [means]
        return Agreement(np.full(5, 100), np.full(5, 50 if np.array_equal(means, start[0]) else 30))

    monkeypatch.setattr(Trainer, "_agreement", worse)
    monkeypatch.setattr("edgespec.training.fit._COMPARED_TOKENS", 60)
    bench.main([str(tiny_gguf), str(tmp_path / "head"), "--train-device", "cpu", "--draft-vocab", "50"])
    first, defaults = capsys.readouterr().out.splitlines()[2:]
    assert first.startswith("| at the start | 0.500 | 0.500")
    assert defaults.startswith("| defaults | 0.300 | 0.300")
    assert {*compared} == {6}
