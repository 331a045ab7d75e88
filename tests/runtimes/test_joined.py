"""Several texts through one model: each has the rows that it has alone, by turns and in passes that run as one."""

import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from threading import Barrier, Thread

import numpy as np
import pytest
import tiny
from calls import decoder, random_calls
from double import tree_logits
from families import FAMILIES, weights_of

from edgespec.decoding.pass_queue import Caller
from edgespec.errors import Cancelled, EdgeSpecError, ManifestError
from edgespec.export.convert import export_model
from edgespec.manifest import read_manifest
from edgespec.runtimes.devices import find_device
from edgespec.runtimes.joined import JoinedPasses, JoinedSession
from edgespec.runtimes.joined_graph import join_graph
from edgespec.runtimes.kv_caches import SharedCache
from edgespec.runtimes.onnx import OnnxDecoder
from edgespec.runtimes.passes import Part, PassRows
from edgespec.runtimes.tree import OnnxTreeDecoder
from edgespec.system.cancel import Cancel
from edgespec.types import Logits, TokenIds

Call = tuple[TokenIds, int]


def forks_of(root: OnnxDecoder, num: int = 4, *, is_joined: bool = True) -> list[OnnxDecoder]:
    root.share(num, lambda: nullcontext(is_joined))
    queue = root._passes.queue
    assert queue is not None
    assert queue._joiner is not None
    assert queue._joiner.wait() == is_joined  # type: ignore[attr-defined]
    return [root, *(root.fork() for _ in range(num - 1))]


def run_at_once(forks: Sequence[OnnxDecoder], calls: Sequence[Sequence[Call]]) -> list[list[Logits]]:
    """What each fork gives for its calls, all in threads of their own."""
    found: list[list[Logits]] = [[] for _ in forks]
    together = Barrier(len(forks))

    def run(i: int) -> None:
        caller = Caller()
        forks[i].serve(caller)
        together.wait()
        caller.work()
        try:
            for tokens, num_last in calls[i]:
                found[i].append(forks[i].logits(tokens, num_last).copy())
        finally:
            caller.rest()

    threads = [Thread(target=run, args=[i]) for i in range(len(forks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("is_joined", [True, False])
@pytest.mark.parametrize("precision_fixture", ["tiny_model", "tiny_drafter"])
def test_rows_of_texts_at_once_are_those_of_each_alone_to_the_bit(
    precision_fixture: str, is_joined: bool, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(precision_fixture)
    alone = decoder(folder)
    calls = [random_calls(seed, 40, 150) for seed in range(4)]
    found = run_at_once(forks_of(root := decoder(folder), is_joined=is_joined), calls)
    for own, rows in zip(calls, found, strict=True):
        for (tokens, num_last), row in zip(own, rows, strict=True):
            assert np.array_equal(row, alone.logits(tokens, num_last))
    assert root._passes.queue is not None
    has_joined = root._passes.queue.num_passes < sum(map(len, calls))
    assert has_joined == is_joined or not is_joined


def test_rows_are_those_of_each_alone_within_rounding_without_deterministic_mode(tiny_model: Path) -> None:
    alone = decoder(tiny_model)
    calls = [random_calls(seed, 25, 60) for seed in range(3)]
    found = run_at_once(forks_of(decoder(tiny_model, deterministic=False), 3), calls)
    for own, rows in zip(calls, found, strict=True):
        for (tokens, num_last), row in zip(own, rows, strict=True):
            assert np.allclose(row, alone.logits(tokens, num_last), rtol=0, atol=2e-4)


@pytest.mark.parametrize("family", ["gemma3", "qwen3", "mistral", "lfm2", "gemma4-shared"])
def test_families_with_other_attention_run_several_texts(tmp_path: Path, family: str) -> None:
    """Norms of heads, windows, caps, heads of more than 128 channels, layers without attention, shared keys."""
    tiny.write_huggingface(tmp_path / "hf", weights_of(family), config=FAMILIES[family]["config"])
    export_model(tmp_path / "hf", tmp_path / "out", precision="fp32")
    alone = decoder(tmp_path / "out")
    calls = [random_calls(seed, 12, 30) for seed in range(2)]
    found = run_at_once(forks_of(decoder(tmp_path / "out"), 2), calls)
    for own, rows in zip(calls, found, strict=True):
        for (tokens, num_last), row in zip(own, rows, strict=True):
            assert np.array_equal(row, alone.logits(tokens, num_last))


def test_hidden_states_of_the_first_are_those_that_it_has_alone(tiny_with_states: Path) -> None:
    manifest, device = read_manifest(tiny_with_states), find_device("cpu")
    kept, alone = (
        OnnxDecoder(tiny_with_states, manifest, device, deterministic=True, hidden_layers=(0, 2)) for _ in range(2)
    )
    text = np.arange(40, dtype=np.int32)
    run_at_once(forks_of(kept, 2), [[(text[:stop], 1) for stop in range(4, 41)]] * 2)
    alone.logits(text, 1)
    assert kept.hidden_states is not None
    assert alone.hidden_states is not None
    assert np.array_equal(kept.hidden_states.read(text, 0), alone.hidden_states.read(text, 0))


@pytest.mark.parametrize("num_texts", [2, 3, 4])
def test_only_attention_runs_the_rows_that_pad_passes_to_even_width(tiny_model: Path, num_texts: int) -> None:
    """Texts with a token each run as many rows as there are texts, or one more where these are odd."""
    alone, forks = decoder(tiny_model), forks_of(decoder(tiny_model))
    texts = [np.arange(first, first + 8, dtype=np.int32) for first in range(num_texts)]
    parts = []
    for text, fork in zip(texts, forks, strict=False):
        fork.logits(text[:7], 1)
        parts.append(fork._passes.part(text[7:], 7, 1, 1))
    session = forks[0]._passes.queue._joiner._session  # type: ignore[union-attr]
    made = session.run(parts)
    assert session._bound["input_ids"].shape == (1, num_texts + num_texts % 2)
    for text, rows in zip(texts, made, strict=True):
        assert np.array_equal(rows.logits, alone.logits(text, 1))


def test_a_pass_of_others_leaves_the_hidden_states_of_the_one_before(tiny_with_states: Path) -> None:
    manifest, device = read_manifest(tiny_with_states), find_device("cpu")
    kept = OnnxDecoder(tiny_with_states, manifest, device, deterministic=True, hidden_layers=(0, 2))
    root, fork = forks_of(kept, 2)
    session = root._passes.queue._joiner._session  # type: ignore[union-attr]
    first, second = np.arange(6, dtype=np.int32), np.arange(40, 46, dtype=np.int32)
    (made,) = session.run([root._passes.part(first, 0, 1)])
    before = {name: rows.copy() for name, rows in made.token_rows.items()}
    assert before
    session.run([fork._passes.part(second, 0, 1)])
    assert all(np.array_equal(made.token_rows[name], rows) for name, rows in before.items())


def test_a_prefix_is_copied_and_not_read_again(tiny_model: Path) -> None:
    alone = decoder(tiny_model)
    root, fork = forks_of(decoder(tiny_model), 2, is_joined=False)
    text = np.arange(100, dtype=np.int32) % 90
    root.logits(text, 1)
    other = np.append(text[:80], np.arange(9, dtype=np.int32)).astype(np.int32)
    assert fork.copy_prefix(root, other[:80])
    fed = fork.num_fed
    assert np.array_equal(fork.logits(other, 3), alone.logits(other, 3))
    assert fork.num_fed - fed == 9
    assert np.array_equal(
        root.logits(np.append(text, np.int32(1)), 1), alone.logits(np.append(text, np.int32(1)), 1)
    )


def test_a_prefix_is_read_where_its_cache_is_cleared_while_it_is_copied(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = decoder(tiny_model)
    root, fork = forks_of(decoder(tiny_model), 2, is_joined=False)
    text, prepare = np.arange(100, dtype=np.int32) % 90, SharedCache.prepare
    root.logits(text, 1)

    def prepare_slowly(self: SharedCache, num_past: int, num_new: int) -> None:
        prepare(self, num_past, num_new)
        root.forget()

    with monkeypatch.context() as patched:
        patched.setattr(SharedCache, "prepare", prepare_slowly)
        assert not fork.copy_prefix(root, text[:80])
    assert np.array_equal(fork.logits(text, 1), alone.logits(text, 1))


def test_an_opening_that_fails_in_any_way_is_the_last_one() -> None:
    def open_session(num_parts: int, cancel: Cancel) -> JoinedSession:
        raise ZeroDivisionError

    passes = JoinedPasses(4, open_session, lambda: nullcontext(True))
    with pytest.raises(ZeroDivisionError):
        passes._open(open_session, 2, Cancel())
    assert not passes.is_ready(2)
    assert passes._thread is None


def test_passes_take_turns_where_the_graph_cannot_be_read_again(caplog: pytest.LogCaptureFixture) -> None:
    def open_session(num_parts: int, cancel: Cancel) -> JoinedSession:
        raise FileNotFoundError(2, "No such file or directory", "model.onnx")

    passes = JoinedPasses(4, open_session, lambda: nullcontext(True))
    with caplog.at_level("INFO"):
        assert [passes.is_ready(2), passes.wait(), passes.is_ready(2)] == [False, False, False]
    assert caplog.text.count("answers take turns: [Errno 2] No such file or directory: 'model.onnx'") == 1


def test_passes_take_turns_where_no_thread_can_be_started(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(thread: Thread) -> None:
        raise RuntimeError("can't start new thread")

    def open_session(num_parts: int, cancel: Cancel) -> JoinedSession: ...  # type: ignore[empty-body]

    monkeypatch.setattr(Thread, "start", refuse)
    passes = JoinedPasses(4, open_session, lambda: nullcontext(True))
    with caplog.at_level("INFO"):
        assert [passes.is_ready(2), passes.wait()] == [False, False]
    assert caplog.text.count("answers take turns: no thread can be started (can't start new thread)") == 1


def test_prompts_are_read_in_pieces_while_others_wait(tiny_model: Path) -> None:
    root, fork = forks_of(decoder(tiny_model), 2, is_joined=False)
    text = np.arange(300, dtype=np.int32) % 200
    run_at_once([root, fork], [[(text, 1)], [(text[:stop], 1) for stop in range(1, 30)]])
    assert root._passes.queue is not None
    assert root._passes.queue.num_passes >= 29 + 2
    assert np.array_equal(root.logits(text, 1), decoder(tiny_model).logits(text, 1))


def test_an_interrupt_ends_a_pass_that_waits_and_no_other(tiny_model: Path) -> None:
    root, fork = forks_of(decoder(tiny_model), 2, is_joined=False)
    queue, errors = root._passes.queue, list[Exception]()
    assert queue is not None
    person = Caller(priority=1)
    person.work()
    root.serve(person)
    root.logits(np.arange(5, dtype=np.int32), 1)  # and another pass of it is expected

    def ask() -> None:
        try:
            fork.logits(np.arange(9, dtype=np.int32), 1)
        except EdgeSpecError as error:
            errors.append(error)

    thread = Thread(target=ask)
    thread.start()
    while not queue._waiting:
        pass
    fork.interrupt()
    thread.join()
    assert [type(each) for each in errors] == [Cancelled]
    root.logits(np.arange(7, dtype=np.int32), 1)
    person.rest()
    fork.logits(np.arange(9, dtype=np.int32), 1)


def test_an_interrupt_ends_a_prompt_within_a_pass_that_is_joined(tiny_model: Path) -> None:
    """The passes of a prompt that wait are few: it has to end though none of them does."""
    root, fork = forks_of(decoder(tiny_model), 2)
    queue = root._passes.queue
    assert queue is not None
    other = Caller()
    other.work()
    root.serve(other)
    root.logits(np.arange(5, dtype=np.int32), 1)  # and another pass of it is expected
    session = queue._joiner._session  # type: ignore[union-attr]
    run, widths = session.run, list[int]()

    def interrupted(parts: Sequence[Part]) -> list[PassRows | Exception]:
        widths.append(sum(len(part.tokens) for part in parts))
        fork.interrupt()
        return list(run(parts))

    session.run = interrupted  # type: ignore[method-assign]
    with pytest.raises(Cancelled):
        fork.logits(np.arange(200, dtype=np.int32) % 90, 1)
    assert widths == [64]
    assert len(fork.held_tokens) == 0
    other.rest()
    text = np.arange(9, dtype=np.int32)
    assert np.array_equal(fork.logits(text, 1), decoder(tiny_model).logits(text, 1))


def test_trees_take_turns(tiny_model: Path) -> None:
    root = OnnxTreeDecoder(tiny_model, read_manifest(tiny_model), find_device("cpu"))
    root.share(3, lambda: nullcontext(True))
    fork, alone = root.fork(), decoder(tiny_model)
    text, nodes, parents = np.arange(20, dtype=np.int32), np.array([30, 31, 32], np.int32), (-1, 0, -1)
    other = text[::-1].copy()
    root.logits(text, 1)
    wanted = [alone.logits(np.append(other, nodes[:2]).astype(np.int32), 3), alone.logits(text, 1).copy()]
    assert np.allclose(tree_logits(fork, other, nodes, parents)[:3], wanted[0], rtol=0, atol=2e-4)
    assert np.allclose(root.logits(text, 1), wanted[1], rtol=0, atol=2e-4)
    assert root.num_fed == 20 + 1


def test_a_session_for_more_texts_takes_the_place_of_one_for_few_when_they_come(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgespec.runtimes.joined._FEW_PARTS", 2)
    root = decoder(tiny_model)
    root.share(5, lambda: nullcontext(True))
    joiner = root._passes.queue._joiner  # type: ignore[union-attr]
    found = list[int]()
    for num_texts in (2, 3, 2, 9):
        joiner.is_ready(num_texts)
        joiner._thread.join()
        found.append(joiner.max_parts)
    assert found == [2, 4, 4, 5]
    calls = [random_calls(seed, 10, 40) for seed in range(5)]
    rows = run_at_once([root, *(root.fork() for _ in range(4))], calls)
    alone = decoder(tiny_model)
    for own, made in zip(calls, rows, strict=True):
        for (tokens, num_last), row in zip(own, made, strict=True):
            assert np.array_equal(row, alone.logits(tokens, num_last))


def test_without_memory_for_more_texts_the_session_for_few_stays(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("edgespec.runtimes.joined._FEW_PARTS", 2)
    may_open = iter([True, False])
    root = decoder(tiny_model)
    root.share(4, lambda: nullcontext(next(may_open)))
    joiner = root._passes.queue._joiner  # type: ignore[union-attr]
    joiner.is_ready(2)
    joiner._thread.join()
    with caplog.at_level("INFO"):
        assert joiner.wait()
    assert joiner.wait()
    assert joiner.max_parts == 2
    assert "at most 2 answers share a pass: there is no memory" in caplog.text


def test_graphs_that_cannot_be_taken_apart_are_refused(tiny_model: Path) -> None:
    manifest = read_manifest(tiny_model)
    assert manifest.tree_graph is not None
    with pytest.raises(ManifestError, match="a graph for trees"):
        join_graph(tiny_model / manifest.tree_graph, manifest.signature, manifest.kv_cache, 2)
    unnamed = replace(manifest.signature, num_logits_to_keep="another")
    with pytest.raises(ManifestError, match="see logit_rows"):
        join_graph(tiny_model / manifest.graph, unnamed, manifest.kv_cache, 2)


def test_a_program_ends_while_a_session_is_opened(tiny_model: Path) -> None:
    """Its thread ends before Python does, which would abort within ONNX Runtime."""
    program = f"""
import sys
from contextlib import nullcontext
from edgespec.manifest import read_manifest
from edgespec.runtimes import joined
from edgespec.runtimes.devices import find_device
from edgespec.runtimes.onnx import OnnxDecoder
from pathlib import Path

folder, load, begun = Path({str(tiny_model)!r}), joined.load_graph, []

def load_for_ever(*arguments, cancel, **options):
    begun.append(True)
    while not cancel.is_set:
        load(*arguments, cancel=None, **options)
    print("ended", flush=True)
    cancel.require_unset()

joined.load_graph = load_for_ever
root = OnnxDecoder(folder, read_manifest(folder), find_device("cpu"), deterministic=True)
root.share(2, lambda: nullcontext(True))
root._passes.queue._joiner.is_ready(2)
while not begun:
    pass
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "ended\n", "")


def test_a_session_whose_rows_are_wrong_is_not_used(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("edgespec.runtimes.joined.np.array_equal", lambda *rows: False)
    root = decoder(tiny_model)
    root.share(2, lambda: nullcontext(True))
    assert root._passes.queue is not None
    with caplog.at_level("INFO"):
        assert not root._passes.queue._joiner.wait()  # type: ignore[union-attr]
    assert "answers take turns: passes of several answers give other logits" in caplog.text
