"""Drafting heads give the rows of their references, whatever was drafted, accepted and refused before."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import tiny_heads
from double import tree_logits

from edgespec.decoding.head_rows import UNKNOWN, Correction, contexts_in, contexts_of, correct
from edgespec.decoding.hidden_states import HiddenStates
from edgespec.manifest import read_manifest
from edgespec.runtimes.devices import find_device
from edgespec.runtimes.heads import open_head
from edgespec.runtimes.onnx import OnnxDecoder
from edgespec.types import TokenIds, append

WEIGHTS, STEPS = tiny_heads.recurrent_weights(1), tiny_heads.step_weights(2, num_steps=5)
TARGET = tiny.random_weights()


@pytest.fixture(scope="module")
def target(tiny_with_states: Path) -> OnnxDecoder:
    return OnnxDecoder(
        tiny_with_states, read_manifest(tiny_with_states), find_device("cpu"), hidden_layers=tiny_heads.LAYERS
    )


@pytest.fixture(scope="module")
def recurrent(tiny_with_states: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("heads") / "eagle"
    tiny_heads.write_recurrent(folder, tiny_with_states, WEIGHTS)
    return folder


@pytest.fixture(scope="module")
def older(tiny_with_states: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("heads") / "older"
    tiny_heads.write_recurrent(folder, tiny_with_states, WEIGHTS, gives_all=True)
    return folder


@pytest.fixture(scope="module")
def steps(tiny_with_states: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("heads") / "steps"
    tiny_heads.write_steps(folder, tiny_with_states, STEPS)
    return folder


def open_for(target: OnnxDecoder, folder: Path, **options: Any) -> Any:
    assert target.hidden_states is not None
    return open_head(folder, read_manifest(folder), find_device("cpu"), target.hidden_states, **options)


def features(tokens: TokenIds) -> np.ndarray:
    states = tiny.reference_states(TARGET, tokens)
    return np.concatenate([states[layer] for layer in tiny_heads.LAYERS], axis=1)


def random_text(seed: int, size: int) -> TokenIds:
    return np.random.default_rng(seed).integers(0, tiny.VOCAB, size).astype(np.int32)


def recurrent_rows(tokens: TokenIds, num_known: int, start: int = 0) -> np.ndarray:
    """Rows of the tokens from `start` on."""
    states = tiny_heads.recurrent_states(WEIGHTS, tokens[start:], features(tokens[:num_known])[start:])
    return tiny_heads.recurrent_rows(WEIGHTS, states)


def step_rows(tokens: TokenIds, num_known: int) -> np.ndarray:
    """The rows behind the last known token's successor and behind the tokens that are drafted from there."""
    return tiny_heads.step_rows(STEPS, tokens[num_known:], features(tokens[:num_known])[-1])


@pytest.mark.parametrize(
    ("kind", "has_trees"), [("recurrent", False), ("recurrent", True), ("older", True), ("steps", False)]
)
def test_rows_are_the_references_over_prefill_draft_rejection_and_going_on(
    target: OnnxDecoder, kind: str, has_trees: bool, request: pytest.FixtureRequest
) -> None:
    head = open_for(target, request.getfixturevalue(kind), has_trees=has_trees)
    reference: Callable[[TokenIds, int], np.ndarray] = recurrent_rows if kind != "steps" else step_rows
    text = random_text(0, 21)
    for num_accepted in (0, 2, 5, 1, 5):
        target.logits(text[:-1], 1)
        draft = random_text(len(text), 5)
        assert head.begin(text, 99)
        for place in range(5):
            tokens = append(text, draft[:place])
            wanted = reference(tokens, len(text) - 1)[-1]
            assert np.allclose(head.logits(tokens, 1)[0], wanted, rtol=0, atol=1e-4)
        text = append(text, [*draft[:num_accepted], 7 + num_accepted])


def test_head_runs_only_what_is_new(target: OnnxDecoder, recurrent: Path) -> None:
    head, text = open_for(target, recurrent), random_text(1, 30)
    target.logits(text[:-1], 1)
    for size, num_new in ((20, 19), (21, 1), (24, 3), (24, 1), (30, 6)):
        before = head.num_fed
        assert head.begin(text[:size], 99)
        head.logits(text[:size], 1)
        assert head.num_fed - before == num_new


@pytest.mark.slow
@pytest.mark.parametrize("has_trees", [False, True])
def test_of_a_long_text_that_is_unread_the_head_reads_the_end_alone(
    target: OnnxDecoder, recurrent: Path, has_trees: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgespec.runtimes.recurrent_head.MAX_UNREAD", max_unread := 64)
    head, text = open_for(target, recurrent, has_trees=has_trees), random_text(11, 300)
    # The second text goes on in the first; with the third there is a gap again, and the last is a shorter one.
    for size, start in ((150, 149 - max_unread), (180, 149 - max_unread), (290, 289 - max_unread), (80, 15)):
        before = head.num_fed
        target.logits(text[: size - 1], 1)
        assert head.begin(text[:size], 99)
        for tokens in (text[:size], append(text[:size], [3])):  # the second one after a state of its own
            row = recurrent_rows(tokens, size - 1, start)[-1]
            assert np.allclose(head.logits(tokens, 1)[0], row, rtol=0, atol=1e-4)
        if has_trees:
            rows = tree_logits(head, text[:size], np.array([3, 4], np.int32), (-1, -1))
            assert np.allclose(rows[1], row, rtol=0, atol=1e-4)
        assert head.num_fed - before <= max_unread + 5
    target.logits(text, 1)
    start = 199 - 120 - max_unread  # rows before those that were read last
    wanted = recurrent_rows(text[:199], 199, start)[-120:]
    assert np.allclose(head.known_rows(text[:199], 120), wanted, rtol=0, atol=1e-4)


def test_a_head_that_has_read_the_end_of_a_text_reads_the_rest_once_it_may(
    target: OnnxDecoder, recurrent: Path
) -> None:
    head, text = open_for(target, recurrent), random_text(12, 100)
    target.logits(text, 1)
    for size, limit, start, num_new in ((80, 16, 63, 16), (90, 16, 63, 10), (92, None, 0, 91), (95, 16, 0, 3)):
        before = head.num_fed
        assert head.begin(text[:size], 99, limit)
        row = recurrent_rows(text[:size], size - 1, start)[-1]
        assert np.allclose(head.logits(text[:size], 1)[0], row, rtol=0, atol=1e-4)
        assert head.num_fed - before == num_new


@pytest.mark.parametrize("kind", ["recurrent", "steps"])
def test_a_head_begins_behind_tokens_whose_states_were_not_asked_for(
    target: OnnxDecoder, kind: str, request: pytest.FixtureRequest
) -> None:
    head, text = open_for(target, request.getfixturevalue(kind)), random_text(21, 60)
    target.forget()
    target.logits(text[:9], 1)
    assert head.begin(text[:10], 4)
    head.logits(text[:10], 1)
    assert head.expect_drafts(False)
    for size in (10, 20, 30):
        target.logits(text[:size], 1)
        assert not head.begin(text[: size + 1], 4), "there is no state before the last token"
    assert not head.expect_drafts(True), "a pass has to run first"
    for size in (31, 40):
        target.logits(text[:size], 1)
        drafted = text[: size + 1]
        assert head.begin(drafted, 4)
        assert head.expect_drafts(True)
        wanted = recurrent_rows(drafted, size, 30)[-1] if kind == "recurrent" else step_rows(drafted, size)[0]
        assert np.allclose(head.logits(drafted, 1)[0], wanted, rtol=0, atol=1e-4)
    target.logits(append(text[:20], [1, 2, 3]), 1)  # goes back to before them
    again = append(text[:20], [1, 2, 3, 4])
    assert head.begin(again, 4)
    wanted = recurrent_rows(again, 23, 20)[-1] if kind == "recurrent" else step_rows(again, 23)[0]
    assert np.allclose(head.logits(again, 1)[0], wanted, rtol=0, atol=1e-4)


def test_rows_of_states_that_the_head_gave_itself_are_run_again_once_those_of_the_target_are_known(
    target: OnnxDecoder, recurrent: Path
) -> None:
    head, text = open_for(target, recurrent), random_text(2, 20)
    target.logits(text[:9], 1)
    assert head.begin(text[:10], 99)
    for size in range(10, 16):  # a lane that drafts ahead
        head.logits(text[:size], 1)
    assert head.begin(text[:15], 99)  # whose path is still good, though the target has not run it
    before = head.num_fed
    assert np.allclose(head.logits(text[:15], 1)[0], recurrent_rows(text[:15], 9)[-1], rtol=0, atol=1e-4)
    assert head.num_fed - before == 1
    target.logits(text[:14], 1)
    assert head.begin(text[:15], 99)
    before = head.num_fed
    assert np.allclose(head.logits(text[:15], 1)[0], recurrent_rows(text[:15], 14)[-1], rtol=0, atol=1e-4)
    assert head.num_fed - before == 5


def test_no_draft_goes_on_from_the_state_of_a_token_that_was_refused(target: OnnxDecoder, recurrent: Path) -> None:
    head, text = open_for(target, recurrent), random_text(2, 16)
    target.logits(text[:9], 1)
    assert head.begin(text[:10], 99)
    for size in range(10, 17):
        head.logits(text[:size], 1)
    text = append(text[:11], random_text(3, 5))
    target.logits(text[:15], 1)
    assert head.begin(text, 99)
    head.logits(text, 1)  # one pass reads the tokens in place of those
    target.logits(append(text[:12], [1]), 1)  # which the target forgets
    assert head.begin(text[:15], 99)
    wanted = recurrent_rows(text[:15], 12)[-1]
    assert np.allclose(head.logits(text[:15], 1)[0], wanted, rtol=0, atol=1e-4)


def test_no_draft_begins_where_too_few_hidden_states_are_known(target: OnnxDecoder, recurrent: Path) -> None:
    head, text = open_for(target, recurrent), random_text(3, 80)
    target.forget()
    assert not head.begin(text, 99)
    target.logits(text[:40], 1)
    assert not head.begin(text, 99)
    assert head.begin(text[:50], 99)  # a few it guesses
    assert not head.begin(text[:1], 99)
    assert np.allclose(head.logits(text[:50], 3), recurrent_rows(text[:50], 40)[-3:], rtol=0, atol=1e-4)


def test_cached_rows_are_those_that_are_not(target: OnnxDecoder, recurrent: Path) -> None:
    head, text, rng = open_for(target, recurrent), random_text(4, 60), np.random.default_rng(4)
    target.logits(text, 1)
    wanted = recurrent_rows(text, len(text))
    for _ in range(20):
        size = int(rng.integers(3, len(text)))
        num_last = int(rng.integers(1, size))
        if rng.random() < 0.2:
            head.forget()
        rows = head.logits(text[:size], num_last)
        assert np.allclose(rows, wanted[size - 1 - num_last : size - 1], rtol=0, atol=1e-4)


def test_rows_are_equal_to_the_bit_in_deterministic_mode(tiny_with_states: Path, recurrent: Path) -> None:
    target = OnnxDecoder(
        tiny_with_states,
        read_manifest(tiny_with_states),
        find_device("cpu"),
        hidden_layers=tiny_heads.LAYERS,
        deterministic=True,
    )
    text, rng = random_text(8, 90), np.random.default_rng(8)
    target.logits(text, 1)
    whole = open_for(target, recurrent, deterministic=True).logits(text, 80).copy()
    head, size = open_for(target, recurrent, deterministic=True), 12
    while size < len(text):
        assert head.begin(text[:size], 99)
        assert np.array_equal(head.logits(text[:size], 1)[0], whole[size - 11])
        size += int(rng.integers(1, 9))


def test_head_with_a_trimmed_vocabulary_gives_whole_rows(
    target: OnnxDecoder, tiny_with_states: Path, tmp_path: Path
) -> None:
    subset = np.sort(np.random.default_rng(0).permutation(tiny.VOCAB)[:100]).astype(np.int32)
    weights = {**WEIGHTS, "head": np.ascontiguousarray(WEIGHTS["head"][:, subset])}
    tiny_heads.write_recurrent(tmp_path / "trimmed", tiny_with_states, weights, subset=subset)
    head, text = open_for(target, tmp_path / "trimmed", subset=subset), random_text(5, 12)
    target.logits(text, 1)
    rows = head.logits(text, 4)
    assert rows.shape == (4, tiny.VOCAB)
    assert np.allclose(rows[:, subset], recurrent_rows(text, 12)[-4:, subset], rtol=0, atol=1e-4)
    assert (np.delete(rows, subset, axis=1) == UNKNOWN).all()


@pytest.mark.parametrize("seed", range(6))
def test_rows_of_a_tree_are_those_of_its_branches(target: OnnxDecoder, recurrent: Path, seed: int) -> None:
    head, rng = open_for(target, recurrent, has_trees=True), np.random.default_rng(seed)
    head.correction = random_correction() if seed % 2 else None
    text = random_text(seed, 10)
    for _ in range(4):
        target.logits(text[:-1], 1)
        num_nodes = int(rng.integers(1, 10))
        parents = tuple(int(rng.integers(-1, node)) for node in range(num_nodes))
        nodes = rng.integers(0, tiny.VOCAB, num_nodes).astype(np.int32)
        assert head.begin(text, 99)
        whole = append(text, nodes)
        places = [*range(-1, len(text) - 1), *(len(text) + parent for parent in parents)]
        states = tiny_heads.recurrent_states(WEIGHTS, whole, features(text[:-1]), places)
        wanted = tiny_heads.recurrent_rows(WEIGHTS, states)[len(text) - 2 :]
        before_each = np.append(text[-2], append(text[-1:], nodes)[np.array(parents) + 1]).astype(np.int32)
        wanted = correct(head.correction, wanted, contexts_of(before_each, append(text[-1:], nodes)))
        for size in range(1, num_nodes + 1):  # it grows, and what lies in the cache is not run again
            before = head.num_fed
            rows = tree_logits(head, text, nodes[:size], parents[:size], 1 if size > 1 else None)
            assert head.num_fed - before == 1 or size == 1
            assert np.allclose(rows, wanted[size : size + 1] if size > 1 else wanted[:2], rtol=0, atol=1e-4)
        rows = tree_logits(head, text, nodes, parents)
        assert np.allclose(rows, wanted, rtol=0, atol=1e-4)
        path = [num_nodes - 1]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        ahead = append(text, nodes[path])  # the target has not run it
        before = head.num_fed
        assert np.allclose(head.logits(ahead, 1)[0], wanted[-1], rtol=0, atol=1e-4)
        assert head.num_fed - before == 1  # the branch was adopted
        text = append(ahead, [int(rng.integers(0, tiny.VOCAB))])


def test_pretended_text_costs_passes_over_many_rows_and_no_states(target: OnnxDecoder, recurrent: Path) -> None:
    head = open_for(target, recurrent)
    target.forget()
    text = random_text(6, 40)
    head.pretend(text[:30])
    num_runs, run = [], head._passes.run
    head._passes.run = lambda *arguments, **named: num_runs.append(1) or run(*arguments, **named)
    before = head.num_fed
    assert head.logits(text, 10).shape == (10, tiny.VOCAB)
    assert (len(num_runs), head.num_fed - before) == (1, 10)


def test_interrupted_pass_leaves_the_cache_as_it_was(
    target: OnnxDecoder, recurrent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, text = open_for(target, recurrent, has_trees=True), random_text(7, 40)
    target.logits(text, 1)
    wanted, run, number = recurrent_rows(text, 40), head._passes.run, iter(range(1000))

    def failing(*arguments: Any, **named: Any) -> Any:
        if (at := next(number)) % 3 == 1:
            raise KeyboardInterrupt
        rows = run(*arguments, **named)
        if at % 3 == 2:
            raise KeyboardInterrupt
        return rows

    monkeypatch.setattr(head._passes, "run", failing)
    for size in range(2, 40):
        try:
            assert head.begin(text[:size], 99)
            rows = head.logits(text[:size], 1)
        except KeyboardInterrupt:
            continue
        assert np.allclose(rows[0], wanted[size - 2], rtol=0, atol=1e-4)


def test_store_says_how_much_of_a_text_it_knows() -> None:
    store = HiddenStates((3, 1), 2)
    store.put(0, np.array([5, 6, 7], np.int32), np.arange(12, dtype=np.float32).reshape(3, 4))
    assert [store.known(np.array(text, np.int32)) for text in ([5, 6, 7, 8], [5, 6], [5, 9, 7], [1], [])] == [
        3, 2, 1, 0, 0,
    ]  # fmt: skip
    assert store.read(np.array([5, 6, 9], np.int32), 1).tolist() == [[4, 5, 6, 7]]
    assert store.read(np.array([5, 6, 9], np.int32), 1, (1, 3)).tolist() == [[6, 7, 4, 5]]
    assert store.read(np.array([5], np.int32), 3).shape == (0, 4)


def random_correction() -> Correction:
    """Biases of a fifth of all pairs of tokens, and of one column behind each two tokens."""
    before, tokens = np.divmod(np.arange(tiny.VOCAB**2, dtype=np.int32), tiny.VOCAB)
    pairs = contexts_of(before, tokens)[:, 1] * tiny.VOCAB + 7
    places = np.concatenate([np.arange(0, tiny.VOCAB**2, 5, dtype=np.int64), np.sort(pairs)])
    biases = np.random.default_rng(9).normal(size=len(places)).astype(np.float32)
    return Correction(places=places, biases=biases, num_columns=tiny.VOCAB)


@pytest.mark.parametrize(
    ("kind", "options"),
    [("recurrent", {}), ("recurrent", {"deterministic": True}), ("recurrent", {"has_trees": True}), ("steps", {})],
)
def test_known_rows_are_the_references_whatever_was_drafted_before(
    target: OnnxDecoder, kind: str, options: dict[str, bool], request: pytest.FixtureRequest
) -> None:
    """Also where the head has a correction, which drafts have and known rows have not."""
    head, text = open_for(target, request.getfixturevalue(kind), **options), random_text(10, 40)
    assert head.correctable is head
    target.logits(text[:20], 1)
    assert head.known_rows(text[:22], 3) is None
    assert head.begin(text[:21], 99)
    for size in range(21, 25):  # behind states of its own
        head.logits(text[:size], 1)
    target.logits(text[:-1], 1)
    head.correction = random_correction()
    for stop, num_last in ((24, 8), (40, 16), (40, 1)):
        found = head.known_rows(text[:stop], num_last)
        assert found is not None
        tokens = text[stop - num_last : stop]
        if kind == "recurrent":
            states = tiny_heads.recurrent_states(WEIGHTS, text[:stop], features(text[: stop - 1]))[-num_last:]
            rows = tiny_heads.recurrent_rows(WEIGHTS, states)
        else:
            before = features(text)[stop - num_last - 1 :]
            pairs = zip(before, tokens.tolist(), strict=False)
            rows = np.stack([tiny_heads.step_rows(STEPS, [token], state)[0] for state, token in pairs])
        assert np.allclose(found, rows, rtol=0, atol=1e-4)
        assert head.begin(text[:stop], 99)
        wanted = head.correction(rows.astype(np.float32), contexts_in(text[:stop], num_last))[-1]
        assert np.allclose(head.logits(text[:stop], 1)[0], wanted, rtol=0, atol=1e-4)
