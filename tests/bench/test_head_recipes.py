"""Recipes of the command line of bench/head_recipes.py."""

import json
from pathlib import Path

import head_recipes as bench
import numpy as np
import pytest
import tiny

from edgespec.errors import UsageError
from edgespec.training.fit import Recipe
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
