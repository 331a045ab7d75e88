"""Heads with a graph for each token of a draft: the graphs against forward passes written out in numpy."""

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import tiny_steps
from draft_runs import draft_greedily
from head_folders import random_features, read_subset_of, store_of, write_head_folder

from edgespec.errors import SourceError, VocabularyMismatch
from edgespec.export.heads.dialects import is_head
from edgespec.export.heads.head_source import read_head
from edgespec.export.options import Trimming
from edgespec.manifest import Manifest
from edgespec.runtimes.devices import find_device
from edgespec.runtimes.heads import open_head
from edgespec.types import TokenIds, append

TARGET = tiny.random_weights(seed=3, tied=False)


@dataclass(frozen=True)
class Case:
    config: dict[str, Any]
    tensors: dict[str, Any]
    forward: tiny_steps.Forward
    num_steps: int
    method: str
    file: str = field(default="model.safetensors")


def _medusa(*, is_vllm: bool, num_blocks: int = 2) -> Case:
    # The number of heads that a published config.json states is another than the file's.
    config = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "some/model"}
    if is_vllm:
        config = {"model_type": "medusa", "architectures": ["MedusaModel"], "num_heads": 3}
    tensors = tiny_steps.medusa_tensors(num_blocks=num_blocks, is_vllm=is_vllm)
    return Case(config, tensors, tiny_steps.medusa_forward, 3, "medusa", "medusa_lm_head.safetensors")


def _mlp(*, tied: bool, scaled: bool = False, nested: bool = False) -> Case:
    config = tiny_steps.mlp_config(tied=tied, scaled=scaled)
    tensors = tiny_steps.mlp_tensors(tied=tied, nested=nested)
    return Case(config, tensors, tiny_steps.mlp_forward(config), 4, "mlp_speculator")


CASES = {
    "Medusa": _medusa(is_vllm=False),
    "Medusa of one block": _medusa(is_vllm=False, num_blocks=1),
    "Medusa of vLLM": _medusa(is_vllm=True),
    "Hydra": Case(
        {"hydra_num_heads": 3, "grounded_heads": True, "hydra_head_arch": "mlp"},
        tiny_steps.hydra_tensors(),
        tiny_steps.hydra_forward(TARGET["model.embed_tokens.weight"]),
        3,
        "hydra",
    ),
    "MLP": _mlp(tied=False),
    "MLP tied": _mlp(tied=True, scaled=True),
    "MLP of Arctic": _mlp(tied=True, scaled=True, nested=True),
    "LSTM": Case(
        tiny_steps.lstm_config(), tiny_steps.lstm_tensors(), tiny_steps.lstm_forward, 5, "mlp_speculator"
    ),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target") / "source"
    tiny.write_huggingface(folder, TARGET)
    return folder


def exported(case: Case, folder: Path, target: Path, precision: str = "fp32") -> Manifest:
    head = tiny_steps.write_head(folder / "head", case.config, case.tensors, case.file)
    return write_head_folder(folder / "out", head, target, precision)


def expected_rows(case: Case, text: TokenIds, feature: np.ndarray, num_tokens: int) -> np.ndarray:
    token, state = int(text[-1]), feature.astype(np.float64)
    rows = []
    for step in range(num_tokens):
        logits, state = case.forward(case.tensors, step, token, state)
        rows.append(logits)
        token = int(logits.argmax())
    return np.stack(rows)


@pytest.mark.parametrize("name", CASES)
def test_rows_are_those_of_numpy_over_drafts_rejection_and_going_on(
    name: str, tmp_path: Path, target: Path
) -> None:
    case = CASES[name]
    manifest = exported(case, tmp_path, target)
    assert manifest.head is not None
    assert (manifest.head.method, len(manifest.head.step_graphs)) == (case.method, case.num_steps)
    assert manifest.head.target_layers == (tiny.LAYERS,)  # the state behind the final norm
    features = random_features((0,), tiny.HIDDEN, 60)
    text = np.random.default_rng(1).integers(0, tiny.VOCAB, 20).astype(np.int32)
    store = store_of(manifest, text, features)
    head = open_head(tmp_path / "out", manifest, find_device("cpu"), store)
    for num_accepted in (0, 2, case.num_steps, 1):
        rows, drafted = draft_greedily(head, text, case.num_steps)
        assert np.abs(rows - expected_rows(case, text, features[len(text) - 2], case.num_steps)).max() < 1e-4
        text = append(append(text, drafted[:num_accepted]), [7])
        store.put(0, text[:-1], features[: len(text) - 1])


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["int8", "int4", "source"])
@pytest.mark.parametrize("name", ["Hydra", "MLP tied", "LSTM"])
def test_rounded_weights_give_rows_close_to_those_of_numpy(
    name: str, precision: str, tmp_path: Path, target: Path
) -> None:
    case = CASES[name]
    manifest = exported(case, tmp_path, target, precision)
    features = random_features((0,), tiny.HIDDEN, 20)
    text = np.arange(20, dtype=np.int32)
    head = open_head(tmp_path / "out", manifest, find_device("cpu"), store_of(manifest, text, features))
    assert head.begin(text, 99)
    row, wanted = head.logits(text, 1)[0], expected_rows(case, text, features[18], 1)[0]
    assert np.corrcoef(row, wanted)[0, 1] > (0.9 if precision == "int4" else 0.999)


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_list_of_tokens_trims_medusa_heads(is_whole: bool, tmp_path: Path, target: Path) -> None:
    case = CASES["Medusa of vLLM"]
    tokens = np.random.default_rng(2).permutation(tiny.VOCAB)[:90]
    heads = [name for name in case.tensors if "lm_heads" in name]
    trimmed = {name: np.ascontiguousarray(case.tensors[name][tokens]) for name in heads if not is_whole}
    tensors = {**case.tensors, **trimmed, "medusa_heads.token_map": tokens}
    manifest = exported(Case(case.config, tensors, case.forward, 3, "medusa"), tmp_path, target)
    features, text = random_features((0,), tiny.HIDDEN, 20), np.arange(20, dtype=np.int32)
    subset = read_subset_of(tmp_path / "out", manifest)
    store = store_of(manifest, text, features)
    head = open_head(tmp_path / "out", manifest, find_device("cpu"), store, subset)
    assert head.begin(text, 99)
    row, wanted = head.logits(text, 1)[0], expected_rows(case, text, features[18], 1)[0]
    assert np.abs(row - wanted)[tokens].max() < 1e-4
    assert (np.delete(row, tokens) < -1e29).all()


@pytest.mark.parametrize("name", ["Hydra", "MLP", "LSTM"])
def test_all_vocabulary_heads_are_trimmed_together(name: str, tmp_path: Path, target: Path) -> None:
    case = CASES[name]
    (tmp_path / "corpus").write_text("the theatre in the other town")
    head = tiny_steps.write_head(tmp_path / "head", case.config, case.tensors)
    trimming = Trimming(num_tokens=100, corpus=tmp_path / "corpus")
    manifest = write_head_folder(tmp_path / "out", head, target, trimming=trimming)
    tokens = read_subset_of(tmp_path / "out", manifest)
    assert tokens is not None
    features, text = random_features((0,), tiny.HIDDEN, 20), np.arange(20, dtype=np.int32)
    opened = open_head(tmp_path / "out", manifest, find_device("cpu"), store_of(manifest, text, features), tokens)
    assert opened.begin(text, 99)
    row, wanted = opened.logits(text, 1)[0], expected_rows(case, text, features[18], 1)[0]
    assert np.abs(row - wanted)[tokens].max() < 1e-4


def refusal(case: Case, tmp_path: Path, target: Path, change: dict[str, Any], leave_out: str = "") -> str:
    tensors = {name: each for name, each in (case.tensors | change).items() if name != leave_out}
    with pytest.raises((SourceError, VocabularyMismatch)) as raised:
        exported(Case(case.config, tensors, case.forward, 0, ""), tmp_path, target)
    return str(raised.value)


def test_heads_of_other_targets_are_refused(tmp_path: Path, target: Path) -> None:
    wide = {"0.0.linear.weight": np.ones((128, 128), np.float32)}
    assert "hidden states of 128" in refusal(CASES["Medusa of one block"], tmp_path / "a", target, wide)
    long = {"head.0.weight": np.ones((5000, tiny_steps.INNER), np.float32)}
    assert "5000 tokens" in refusal(CASES["LSTM"], tmp_path / "b", target, long)
    projection = {"projs.0.weight": np.ones((4 * tiny_steps.INNER, 32), np.float32)}
    assert "hidden states of 32" in refusal(CASES["LSTM"], tmp_path / "c", target, projection)


def test_hydra_counts_layers_back_from_the_final_norm(tmp_path: Path, target: Path) -> None:
    """The last of the hidden states of transformers is normed; the one before is behind layer n - 2."""
    case = CASES["Hydra"]
    stated = replace(case, config={**case.config, "hidden_state_offset": 1})
    head = exported(stated, tmp_path / "a", target).head
    assert head is not None
    assert head.target_layers == (tiny.LAYERS - 2,)
    stated = replace(case, config={**case.config, "hidden_state_offset": tiny.LAYERS})
    with pytest.raises(SourceError, match="hidden_state_offset is 2, wanted 0 to 1"):
        exported(stated, tmp_path / "b", target)


def test_damaged_and_unknown_parts_are_refused(tmp_path: Path, target: Path) -> None:
    medusa, lstm = CASES["Medusa"], CASES["LSTM"]
    assert "no tensor 2.2.weight" in refusal(medusa, tmp_path / "a", target, {}, "2.2.weight")
    assert "no tensor state_ln.0.bias" in refusal(lstm, tmp_path / "b", target, {}, "state_ln.0.bias")
    gates = {"input_emb.0.weight": np.ones((4, 4), np.float32)}
    assert "an embedding for each gate" in refusal(lstm, tmp_path / "c", target, gates)
    prefix = {"prefix_embeding_layer.norm.weight": np.ones(4, np.float32)}
    assert "Hydra++" in refusal(CASES["Hydra"], tmp_path / "d", target, prefix)
    deep = {"speculator.proj.0.3.weight": np.ones((4, 4), np.float32)}
    assert "several layers" in refusal(CASES["MLP of Arctic"], tmp_path / "e", target, deep)
    twice = {"medusa_heads.token_map": np.array([1, 1, 2])}
    assert "token_map" in refusal(CASES["Medusa of vLLM"], tmp_path / "f", target, twice)


HOLES = {
    "Medusa": ["1.0.linear.weight", "0.1.linear.weight", "2.1.linear.bias"],
    "Medusa of vLLM": ["medusa_heads.blocks.1.layers.1.weight", "medusa_heads.blocks.1.layers.0.weight"],
    "Hydra": ["hydra_mlp.0.1.linear.weight", "hydra_mlp.1.0.linear.weight", "hydra_lm_head.1.bias"],
}


@pytest.mark.parametrize(("name", "missing"), [(name, each) for name, holes in HOLES.items() for each in holes])
def test_a_head_with_a_hole_is_not_read_as_a_smaller_one(
    name: str, missing: str, tmp_path: Path, target: Path
) -> None:
    """The check at import runs the first step alone."""
    assert re.search("has tensor|has no tensor", refusal(CASES[name], tmp_path, target, {}, missing))


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("Medusa", "1.2.weight"),
        ("Medusa of vLLM", "medusa_heads.lm_heads.2.weight"),
        ("Hydra", "hydra_lm_head.1.weight"),
        ("Hydra", "hydra_lm_head.1.bias"),
        ("MLP", "speculator.head.2.weight"),
    ],
)
def test_vocabulary_heads_of_different_sizes_are_refused(
    name: str, short: str, tmp_path: Path, target: Path
) -> None:
    said = refusal(CASES[name], tmp_path, target, {short: CASES[name].tensors[short][:200]})
    assert "is damaged" in said
    assert "200" in said


@pytest.mark.parametrize("precision", ["fp32", "int8"])
@pytest.mark.parametrize(
    ("name", "embedding"), [("MLP", "speculator.emb.0.weight"), ("LSTM", "forget_emb.0.weight")]
)
def test_a_token_beyond_a_speculators_embedding_is_read_as_its_last(
    name: str, embedding: str, precision: str, tmp_path: Path, target: Path
) -> None:
    """Targets have tokens that were added behind those that a head was made for."""
    case, last = CASES[name], 250
    case = replace(case, tensors=case.tensors | {embedding: case.tensors[embedding][: last + 1]})
    manifest = exported(case, tmp_path, target, precision)
    assert manifest.head is not None
    text = np.array([5, 6, 7], np.int32)
    store = store_of(manifest, text, random_features(manifest.head.target_layers, tiny.HIDDEN, len(text)))
    head = open_head(tmp_path / "out", manifest, find_device("cpu"), store)
    rows = []
    for token in (last, last + 1, tiny.VOCAB - 1):
        head.forget()
        text[-1] = token
        rows.append(head.logits(text, 1))
    assert np.array_equal(rows[0], rows[1])
    assert np.array_equal(rows[0], rows[2])


def test_an_embedding_of_another_vocabulary_is_refused(tmp_path: Path, target: Path) -> None:
    large = {"speculator.emb.1.weight": np.ones((5000, tiny_steps.INNER), np.float32)}
    assert "5000 tokens" in refusal(CASES["MLP"], tmp_path, target, large)


@pytest.mark.parametrize("stated", ["medusa_num_heads", "hydra_num_heads", "n_predict"])
def test_published_pickles_are_refused_with_the_way_to_convert(tmp_path: Path, stated: str) -> None:
    (tmp_path / "config.json").write_text(f'{{"{stated}": 3}}')
    (tmp_path / "lm_head.pt").write_bytes(b"\x80\x04.")
    assert is_head(tmp_path)  # so that it is not read as a model
    with pytest.raises(SourceError, match=r"lm_head\.pt is a pickle, which is never opened.*safetensors"):
        read_head(tmp_path)
