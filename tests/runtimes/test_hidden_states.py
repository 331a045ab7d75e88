"""Hidden states that a decoder keeps are those of the tokens in its cache, whatever was run or failed."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from double import tree_logits

from edgespec.decoding.hidden_states import HiddenStates
from edgespec.errors import MemoryExhausted
from edgespec.manifest import read_manifest
from edgespec.runtimes.devices import find_device
from edgespec.runtimes.onnx import OnnxDecoder
from edgespec.runtimes.tree import OnnxTreeDecoder
from edgespec.types import TokenIds, append

LAYERS = (2, 0, 1)
WEIGHTS = tiny.random_weights()
_DECODERS = (OnnxDecoder, OnnxTreeDecoder)


def decoder(folder: Path, kind: type = OnnxDecoder, **options: Any) -> Any:
    return kind(folder, read_manifest(folder), find_device("cpu"), hidden_layers=LAYERS, **options)


def reference(tokens: TokenIds) -> np.ndarray:
    states = tiny.reference_states(WEIGHTS, tokens)
    return np.concatenate([states[layer] for layer in LAYERS], axis=1)


def require_mirrored(found: Any) -> int:
    """The store holds the tokens of the cache, with the states of the reference; returns how many."""
    store, held = found.hidden_states, found.held_tokens
    assert np.array_equal(store._held, held)
    if len(held):
        assert store.known(append(held, [0])) == len(held)
        assert np.allclose(store.read(held, 0), reference(held), rtol=0, atol=1e-4)
    return len(held)


def texts(rng: np.random.Generator) -> Iterator[TokenIds]:
    """Texts that go on, go back and begin anew."""
    text = rng.integers(0, tiny.VOCAB, 5).astype(np.int32)
    while True:
        cut = len(text) if rng.random() < 0.6 else int(rng.integers(0, len(text) + 1))
        text = append(text[:cut][:60], rng.integers(0, tiny.VOCAB, int(rng.integers(1, 9))))
        yield text


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("chunk", [256, 3])
def test_states_are_those_of_the_tokens_that_are_held(
    tiny_with_states: Path, deterministic: bool, chunk: int
) -> None:
    found, rng = decoder(tiny_with_states, deterministic=deterministic), np.random.default_rng(0)
    found.chunk_tokens = chunk
    for text, _ in zip(texts(rng), range(20), strict=False):
        found.logits(text, int(rng.integers(1, len(text) + 1)))
        assert require_mirrored(found) == len(text)


def test_states_of_a_tree_follow_the_branch_that_is_adopted(tiny_with_states: Path) -> None:
    found, rng = decoder(tiny_with_states, OnnxTreeDecoder), np.random.default_rng(1)
    text = rng.integers(0, tiny.VOCAB, 6).astype(np.int32)
    parents = (-1, -1, 1, 1, 3, 0)
    for branch in ([1, 3, 4], [0, 5], [1, 2], [], [1]):
        nodes = rng.permutation(tiny.VOCAB)[: len(parents)].astype(np.int32)
        tree_logits(found, text, nodes, parents)
        assert require_mirrored(found) == len(text)  # nodes are not held yet
        text = append(text, [*nodes[branch], int(rng.integers(0, tiny.VOCAB))])
        before = found.num_fed
        found.logits(text, 1)
        assert found.num_fed - before == 1  # the branch was adopted, not run again
        assert require_mirrored(found) == len(text)


@pytest.mark.parametrize("kind", _DECODERS)
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryExhausted("none")])
def test_states_mirror_the_cache_after_a_pass_that_failed(
    tiny_with_states: Path, kind: type, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, rng = decoder(tiny_with_states, kind), np.random.default_rng(2)
    found.chunk_tokens = 4
    run, num_run = found._passes.run, iter(range(10**6))

    def failing(*arguments: Any, **named: Any) -> Any:
        number = next(num_run)
        if number % 5 == 3:
            raise error
        rows = run(*arguments, **named)
        if number % 5 == 1:
            raise error
        return rows

    monkeypatch.setattr(found._passes, "run", failing)
    num_failed = 0
    for text, _ in zip(texts(rng), range(40), strict=False):
        try:
            found.logits(text, 1)
        except (KeyboardInterrupt, MemoryExhausted):
            num_failed += 1
        require_mirrored(found)
    assert num_failed > 5


@pytest.mark.parametrize("kind", _DECODERS)
def test_what_is_forgotten_or_pretended_has_no_states_of_its_own(tiny_with_states: Path, kind: type) -> None:
    found = decoder(tiny_with_states, kind)
    store, text = found.hidden_states, np.arange(30, dtype=np.int32)
    found.logits(text, 1)
    assert store._rows.nbytes >= 30 * store.width * 4
    found.forget()
    assert store.known(text) == 0
    assert store._rows.nbytes == 0
    found.pretend(text)
    assert store.known(text) == 30
    assert not store.read(text, 0).any()
    found.logits(text[:10] + 1, 1)
    assert store.known(text) == 0
    assert require_mirrored(found) == 10


@pytest.mark.parametrize("kind", _DECODERS)
@pytest.mark.parametrize("deterministic", [False, True])
def test_states_that_nobody_wanted_are_not_known_and_the_others_are_right(
    tiny_with_states: Path, kind: type, deterministic: bool
) -> None:
    found, rng = decoder(tiny_with_states, kind, deterministic=deterministic), np.random.default_rng(3)
    store, plain = found.hidden_states, decoder(tiny_with_states, kind, deterministic=deterministic)
    num_fetched, bind, num_known = 0, found._passes._bind_new, 0

    def counting(*arguments: Any) -> Any:
        nonlocal num_fetched
        num_fetched += 1
        return bind(*arguments)

    found._passes._bind_new = counting
    for text, number in zip(texts(rng), range(60), strict=False):
        store.want(found, is_wanted := rng.random() < 0.5)
        before = num_fetched
        if kind is OnnxTreeDecoder and number % 2 and len(text) > 1:
            nodes = rng.integers(0, tiny.VOCAB, 3).astype(np.int32)
            rows = tree_logits(found, text, nodes, (-1, 0, -1))
            assert np.array_equal(rows, tree_logits(plain, text, nodes, (-1, 0, -1)))
        else:
            assert np.array_equal(found.logits(text, 1), plain.logits(text, 1))
        assert (num_fetched > before) == is_wanted
        assert store.known(text) in (0, len(text))
        if store.known(text):
            num_known += 1
            assert np.allclose(store.read(text, store.first), reference(text)[store.first :], rtol=0, atol=1e-4)
            assert not store.first or not len(store.read(text, store.first - 1))
    assert num_known > 15


def test_states_are_left_out_while_none_of_several_readers_wants_them() -> None:
    class Reader:
        pass

    store, one, other = HiddenStates((0,), 2), Reader(), Reader()
    assert store.is_wanted
    assert [store.want(each, is_wanted) for each, is_wanted in ((one, True), (other, True), (one, False))] == [
        True, True, True,
    ]  # fmt: skip
    assert store.is_wanted, "by the other one"
    store.want(other, False)
    assert not store.is_wanted
    assert not store.want(one, True), "the passes so far left no states"
    assert store.want(one, True)


def test_layers_are_read_in_the_order_that_is_wanted(tiny_with_states: Path) -> None:
    found, text = decoder(tiny_with_states), np.arange(9, dtype=np.int32)
    found.logits(text, 1)
    states = tiny.reference_states(WEIGHTS, text)
    read = found.hidden_states.read(text, 4, (1, 2))
    assert np.allclose(read, np.concatenate([states[1], states[2]], axis=1)[4:], rtol=0, atol=1e-4)


def test_decoder_keeps_no_states_that_nobody_reads(tiny_with_states: Path) -> None:
    found = OnnxDecoder(tiny_with_states, read_manifest(tiny_with_states), find_device("cpu"))
    found.logits(np.arange(9, dtype=np.int32), 1)
    assert found.hidden_states is None
    assert found._passes.token_rows == {}
