"""What a training starts from and what it writes, against plain numpy."""

import errno
from dataclasses import replace
from pathlib import Path
from typing import Any

import made_heads
import numpy as np
import pytest
import tiny
from families import write_source
from made_heads import Graphs, MadeHead, Reference, require_rows_of_reference
from safetensors.numpy import load_file

from edgespec.errors import DiskFull, ModelError
from edgespec.export.heads.convert import export_head, plan_head
from edgespec.export.heads.head_source import read_head
from edgespec.export.sources import read_source
from edgespec.training import head_file
from edgespec.training.head_file import CONFIG, read_tensors, read_weights, write_head, write_tensors
from edgespec.training.network import FINAL_NORM, FUSE, INPUT_NORM, JOIN, MARKOV_HEAD, TOKEN_NORM, HeadShape
from edgespec.training.warm_start import (
    FittedRows,
    choose_tokens,
    fit_join,
    head_shape,
    read_layers,
    sample_rows,
    start_weights,
)


def test_tensors_are_those_that_the_safetensors_package_reads(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tensors = {
        "a": rng.normal(size=(3, 5)).astype(np.float32),
        "b": rng.normal(size=7).astype(np.float16),
        "c": np.array([-3, 1 << 40]),
        "d": np.array([True, False, True]),
    }
    write_tensors(tmp_path / "x", tensors, {"steps": "3"})
    found, metadata = read_tensors(tmp_path / "x")
    for read in (found, load_file(tmp_path / "x")):
        assert {*read} == {*tensors}
        assert all(np.array_equal(read[name], each) for name, each in tensors.items())
    assert metadata == {"steps": "3"}
    (tmp_path / "x").write_bytes((tmp_path / "x").read_bytes()[:-20])
    with pytest.raises(ModelError, match="is damaged"):
        read_tensors(tmp_path / "x")


@pytest.mark.parametrize("most", [0, 1])
def test_a_head_whose_writing_is_cut_short_has_no_weights_without_a_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    sizes: dict[str, Any] = dict.fromkeys(HeadShape.__annotations__, 1)
    write = head_file.replace_file

    def write_some(*arguments: Any) -> None:
        if len([*tmp_path.iterdir()]) == most:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(*arguments)

    monkeypatch.setattr(head_file, "replace_file", write_some)
    with pytest.raises(DiskFull):
        write_head(tmp_path, HeadShape(**sizes), {}, np.zeros(1, np.int32), "target")
    assert [path.name for path in tmp_path.iterdir()] == [CONFIG][:most]


def test_the_matrix_to_start_from_is_found_where_there_is_one() -> None:
    rng = np.random.default_rng(0)
    embedded, states = rng.normal(size=(2, 5000, 8)).astype(np.float32)
    true = rng.normal(size=(8, 16)).astype(np.float32)
    normed = embedded / np.sqrt(np.square(embedded).mean(axis=1, keepdims=True) + 1e-5)
    wanted = np.concatenate([normed, states], axis=1) @ true.T
    rows = embedded, states, wanted.astype(np.float32)
    parts = [FittedRows(*(each[part] for each in rows)) for part in sample_rows(5000, 8, 1)]
    assert sum(len(part.wanted) for part in parts) == 5000
    found, fuse = fit_join(parts, 1e-5)
    assert np.allclose(found, fit_join([FittedRows(*rows)], 1e-5)[0], atol=1e-3)
    assert np.abs(found - true).max() < 0.05 * np.abs(true).max()  # what damping takes away
    assert np.abs(fuse - np.eye(8)).max() < 0.05


def test_of_more_rows_than_there_is_time_for_an_even_sample_is_fitted() -> None:
    num_rows, size = 10_000_000, 576
    parts = [range(num_rows)[part] for part in sample_rows(num_rows, size, 3)]
    found = [place for part in parts for place in (part[0], part[-1])]
    assert found == sorted(found)
    assert len({part.step for part in parts}) == 1
    assert sum(map(len, parts)) * 4 * size * 5 * size <= 2e12 < 1.1 * sum(map(len, parts)) * 4 * size * 5 * size
    assert found[-1] > 0.999 * num_rows


def test_several_states_start_as_one_that_tells_more_of_what_is_wanted() -> None:
    rng = np.random.default_rng(0)
    embedded, earlier, last = rng.normal(size=(3, 5000, 8)).astype(np.float32)
    earlier[:, 0] *= 1000  # as one number of a state before any norm may be, beside which the others count too
    token, state, more = rng.normal(size=(3, 8, 8)).astype(np.float32)
    normed = embedded / np.sqrt(np.square(embedded).mean(axis=1, keepdims=True) + 1e-5)
    more[:, 0] /= 1000
    wanted = normed @ token.T + last @ state.T + earlier @ more.T
    states = np.concatenate([earlier, last], axis=1)
    join, fuse = fit_join([FittedRows(embedded, states, wanted)], 1e-5)

    def missing(read: np.ndarray) -> float:
        return float(np.square(np.concatenate([normed, read], axis=1) @ join.T - wanted).mean())

    assert missing(states @ fuse.T) < 0.2 * missing(last)


def test_tokens_that_can_be_drafted_are_the_most_probable_and_those_that_always_count() -> None:
    counts = np.random.default_rng(0).random(40)
    least = int(counts.argmin())
    tokens = choose_tokens(counts, 10, [least])
    assert tokens.tolist() == sorted({least, *np.argsort(-counts)[:9].tolist()})


def written(
    folder: Path, *, bias: bool, extended: bool = False
) -> tuple[HeadShape, dict[str, np.ndarray], np.ndarray]:
    """A head in folder / head that starts from the target in folder / hf.

    extended: It reads three states of the target and has a Markov head.
    """
    weights = made_heads.target_weights(bias=bias)
    tiny.write_huggingface(folder / "hf", weights, config=made_heads.target_config("qwen2" if bias else "llama"))
    source = read_source(folder / "hf")
    rng = np.random.default_rng(3)
    shape = head_shape(source, 100, *((3, 32) if extended else ()))
    tokens = made_heads.trimmed_tokens(rng).astype(np.int32)
    join = rng.normal(size=shape.weights[JOIN]).astype(np.float32) / 10
    fuse = rng.normal(size=(tiny.HIDDEN, 3 * tiny.HIDDEN)).astype(np.float32) / 10
    made = start_weights(shape, source, weights["lm_head.weight"], tokens, join, fuse)
    if extended:  # which says nothing at the start
        made[MARKOV_HEAD] = rng.normal(size=made[MARKOV_HEAD].shape).astype(np.float32)
    made = {name: each.astype(np.float16).astype(np.float32) for name, each in made.items()}
    write_head(folder / "head", shape, made, tokens, "target", (2, 4) if extended else ())
    return shape, made, tokens


def test_the_weights_of_a_head_are_read_again_and_those_of_another_refused(tmp_path: Path) -> None:
    shape, made, _ = written(tmp_path, bias=False)
    found = read_weights(tmp_path / "head", shape)
    assert {*found} == {*made}
    assert all(np.array_equal(found[name], each) for name, each in made.items())
    with pytest.raises(ModelError, match="a head of other sizes; remove it and train again"):
        read_weights(tmp_path / "head", replace(shape, draft_vocab_size=7))


def reference(
    shape: HeadShape, made: dict[str, np.ndarray], tokens: np.ndarray, target: dict[str, np.ndarray]
) -> Reference:
    """The head as one that the references know: multi-token prediction without a norm of the state."""
    names = {TOKEN_NORM: "token_layernorm", FINAL_NORM: "final_layernorm", INPUT_NORM: "input_layernorm"}
    tensors = {name.replace("transformer.", "layers.0."): each for name, each in made.items() if name not in names}
    tensors |= {f"layers.0.{theirs}.weight": made[ours] for ours, theirs in names.items()}
    tensors["layers.0.input_proj.weight"] = np.roll(tensors.pop(JOIN), shape.hidden_size, axis=1)
    tensors["d2t"] = tokens - np.arange(len(tokens))
    head = MadeHead(
        tensors=tensors,
        config={},
        wide=False,
        layers=(made_heads.TARGET_LAYERS,),
        switches=frozenset({"mtp", "fused"} if FUSE in made else {"mtp"}),
    )
    return Reference(
        head,
        target["model.embed_tokens.weight"],
        made["lm_head.weight"],
        eps=shape.rms_eps,
        theta=shape.rope_theta,
    )


def test_layers_whose_states_are_read_lie_apart_and_exist(tmp_path: Path) -> None:
    tiny.write_huggingface(tmp_path / "hf", made_heads.target_weights(), config=made_heads.target_config())
    source = read_source(tmp_path / "hf")  # of six layers, the last of which the head has
    assert [read_layers(source, wanted) for wanted in (1, 2, 3, 4)] == [(4, 6), (4, 6), (3, 4, 6), (2, 3, 4, 6)]
    assert read_layers(source, 9) == (0, 1, 2, 3, 4, 6)


def test_what_a_last_layer_of_other_heads_has_is_not_copied(tmp_path: Path) -> None:
    source = read_source(write_source(tmp_path, "gemma4-shared", "huggingface"))
    shape = head_shape(source, 100)
    zeros = {name: np.zeros(size, np.float32) for name, size in shape.weights.items()}
    made = start_weights(shape, source, np.zeros((269, 64), np.float32), np.arange(100), zeros[JOIN])
    assert {name: each.shape for name, each in made.items()} == {name: each.shape for name, each in zeros.items()}


@pytest.mark.parametrize(("bias", "extended"), [(False, False), (True, False), (False, True)])
def test_a_written_head_computes_in_its_graphs_what_a_plain_forward_does(
    tmp_path: Path, bias: bool, extended: bool
) -> None:
    shape, made, tokens = written(tmp_path, bias=bias, extended=extended)
    assert shape.rope_theta == pytest.approx(tiny.THETA, rel=1e-4)
    assert shape.has_biases == bias
    planned = plan_head(read_source(tmp_path / "hf"), read_head(tmp_path / "head"), "fp32")
    manifest = export_head(planned, tmp_path / "out", "head")
    assert manifest.head is not None
    assert (manifest.head.method, manifest.head.kind) == ("eagle", "recurrent")
    assert manifest.head.target_layers == (*((2, 4) if extended else ()), made_heads.TARGET_LAYERS)
    assert np.array_equal(np.load(tmp_path / "out" / manifest.vocab_subset), tokens)
    target = made_heads.target_weights(bias=bias)
    require_rows_of_reference(Graphs(tmp_path / "out"), reference(shape, made, tokens, target))
