"""Gemma 4's assistants through the exporter, against a plain numpy forward."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from draft_runs import draft_greedily
from families import write_source
from head_folders import random_features, write_head_folder
from made_assistants import MadeAssistant

from edgespec.decoding.hidden_states import HiddenStates
from edgespec.errors import SourceError
from edgespec.export.heads.convert import plan_head
from edgespec.export.heads.head_source import read_head
from edgespec.export.sources import LoadedSource, read_source
from edgespec.runtimes.devices import find_device
from edgespec.runtimes.heads import open_head


@pytest.mark.parametrize(("family", "ordered"), [("gemma4", False), ("gemma4-shared", True)])
@pytest.mark.parametrize("precision", ["fp32", pytest.param("int8", marks=pytest.mark.slow)])
def test_an_assistant_drafts_what_a_plain_forward_gives(
    family: str, ordered: bool, precision: str, tmp_path: Path
) -> None:
    """Behind a text, behind a part of its draft, and behind a text that is longer by more than a window."""
    made = MadeAssistant(family=family, ordered=ordered)
    target = write_source(tmp_path, family, "huggingface")
    manifest = write_head_folder(tmp_path / "out", made.write(tmp_path / "head"), target, precision)
    assert manifest.head is not None
    layers = manifest.head.target_layers
    assert layers == (made.source("sliding_attention") - 1, made.source("full_attention") - 1, layers[-1])
    features = random_features(layers, tiny.HIDDEN, 120)
    store = HiddenStates(layers, tiny.HIDDEN)
    head = open_head(tmp_path / "out", manifest, find_device("cpu"), store)
    tokens = np.random.default_rng(0).integers(0, tiny.VOCAB, 120).astype(np.int32)
    text = tokens[:90]
    for num_kept, following in ((2, tokens[90:91]), (0, tokens[91:112]), (0, tokens[:0])):
        store.put(0, text[:-1], features[: len(text) - 1])
        rows, drafted = draft_greedily(head, text, 4)
        expected = made.expected(text, features, drafted)
        shown = expected > -1e4
        assert np.array_equal(rows > -1e4, shown) or precision != "fp32"
        if precision == "fp32":
            assert np.abs(rows - expected)[shown].max() < 1e-4
        elif not ordered:
            assert np.corrcoef(rows[0], expected[0])[0, 1] > 0.99
        text = np.concatenate([text, drafted[:num_kept], following])


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LoadedSource:
    return read_source(write_source(tmp_path_factory.mktemp("target"), "gemma4", "huggingface"))


def refusal(made: MadeAssistant, target: LoadedSource, folder: Path) -> str:
    with pytest.raises(SourceError) as raised:
        plan_head(target, read_head(made.write(folder)))
    return str(raised.value)


def test_damaged_assistants_and_those_of_other_models_are_refused(target: LoadedSource, tmp_path: Path) -> None:
    made = MadeAssistant(family="gemma4", ordered=True)

    def changed(name: str, value: Any) -> str:
        return refusal(replace(made, change={name: value}), target, tmp_path / str(np.size(value)))

    name = "masked_embedding.token_ordering"
    ordering = made.tensors()[name]
    assert "268 entries, wanted the 269 tokens" in changed(name, ordering[:-1])
    assert "names a token twice" in changed(name, 0 * ordering)
    wrong = np.zeros((8, 8), np.float32)
    assert "o_proj.weight is 8×8, wanted 32×64" in changed("model.layers.1.self_attn.o_proj.weight", wrong)
    assert "which no Gemma 4 assistant head uses" in changed("extra.weight", wrong[:4])
    tiny.write_huggingface(tmp_path / "llama", tiny.random_weights())
    other = refusal(made, read_source(tmp_path / "llama"), tmp_path / "other")
    assert "reads the keys of a layer with sliding_attention" in other
