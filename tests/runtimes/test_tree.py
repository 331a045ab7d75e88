"""A tree of drafts in one pass says what its branches say one by one, and what it ran is not run again."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from double import branch_logits, tree_logits, tree_pass
from families import FAMILIES, weights_of
from hypothesis import given, settings
from hypothesis import strategies as st
from table_decoder import TableDecoder

from edgespec.decoding.decoder import BEST, Rows
from edgespec.decoding.tree import Tree
from edgespec.draft.option import expected_of_tree
from edgespec.errors import ContextOverflow, DeviceUnavailable, ManifestError
from edgespec.export.convert import export_model
from edgespec.manifest import read_manifest
from edgespec.runtimes.devices import Device, find_device
from edgespec.runtimes.onnx import OnnxDecoder
from edgespec.runtimes.tree import OnnxBranchDecoder, OnnxTreeDecoder, tree_manifest
from edgespec.types import TokenIds, append


def decoder(folder: Path) -> OnnxTreeDecoder:
    return OnnxTreeDecoder(folder, read_manifest(folder), find_device("cpu"))


def chain_decoder(folder: Path) -> OnnxDecoder:
    return OnnxDecoder(folder, read_manifest(folder), find_device("cpu"), deterministic=True)


@pytest.fixture(scope="module")
def trunk(tiny_model: Path) -> OnnxTreeDecoder:
    return decoder(tiny_model)


@pytest.fixture(scope="module")
def oracle(tiny_model: Path) -> OnnxDecoder:
    return chain_decoder(tiny_model)


shapes = st.lists(st.integers(0, 10**6), max_size=24).map(
    lambda numbers: tuple(number % (node + 1) - 1 for node, number in enumerate(numbers))
)


def random_tokens(rng: np.random.Generator, size: int) -> TokenIds:
    return rng.integers(0, tiny.VOCAB, size).astype(np.int32)


@given(parents=shapes, num_tokens=st.integers(1, 40), seed=st.integers(0, 10**6))
def test_rows_of_a_tree_are_those_of_its_branches(
    trunk: OnnxTreeDecoder, oracle: OnnxDecoder, parents: tuple[int, ...], num_tokens: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    tokens, nodes = random_tokens(rng, num_tokens), random_tokens(rng, len(parents))
    wanted = branch_logits(oracle, tokens, nodes, parents)
    assert np.allclose(tree_logits(trunk, tokens, nodes, parents), wanted, rtol=0, atol=2e-4)


@settings(max_examples=15)
@given(data=st.data(), seed=st.integers(0, 10**6))
def test_a_branch_that_is_kept_is_not_run_again(
    trunk: OnnxTreeDecoder, oracle: OnnxDecoder, data: st.DataObject, seed: int
) -> None:
    """Trees and chains in alternation, each behind a path of the tree before it and one token more."""
    rng = np.random.default_rng(seed)
    tokens = random_tokens(rng, 5)
    trunk.logits(tokens, 1)
    for _ in range(6):
        tokens = append(tokens, random_tokens(rng, 1))
        parents = data.draw(shapes)
        nodes = rng.choice(tiny.VOCAB, len(parents), replace=False).astype(np.int32)
        fed = trunk.num_fed
        found = tree_logits(trunk, tokens, nodes, parents).copy()
        assert trunk.num_fed - fed == len(nodes) + 1
        assert np.allclose(found, branch_logits(oracle, tokens, nodes, parents), rtol=0, atol=2e-4)
        tokens = append(
            tokens, nodes[Tree(nodes, parents=parents).path(data.draw(st.integers(-1, len(parents) - 1)))]
        )
        if data.draw(st.booleans()):
            tokens, fed = append(tokens, random_tokens(rng, 1)), trunk.num_fed
            assert np.allclose(trunk.logits(tokens, 1), oracle.logits(tokens, 1), rtol=0, atol=2e-4)
            assert trunk.num_fed - fed == 1


@settings(max_examples=15)
@given(data=st.data(), seed=st.integers(0, 10**6))
def test_of_a_tree_that_grows_only_what_is_new_is_run(
    trunk: OnnxTreeDecoder, oracle: OnnxDecoder, data: st.DataObject, seed: int
) -> None:
    """Behind a chain that was drafted token by token, whose last was not run; then behind a branch of it."""
    rng = np.random.default_rng(seed)
    tokens = random_tokens(rng, data.draw(st.integers(1, 6)))
    for _ in range(2):
        order = rng.permutation(tiny.VOCAB).astype(np.int32)  # siblings differ, or it is not clear which is meant
        nodes = order[:3]
        parents: tuple[int, ...] = (-1, 0, 1)
        trunk.logits(append(tokens, nodes[:2]), 1)
        for _ in range(4):
            num_new = data.draw(st.integers(1, 5))
            old, fed = len(nodes), trunk.num_fed
            parents += tuple(data.draw(st.integers(-1, old + i - 1)) for i in range(num_new))
            nodes = order[: old + num_new]
            found = tree_logits(trunk, tokens, nodes, parents, num_new)
            wanted = branch_logits(oracle, tokens, nodes, parents)[-num_new:]
            assert np.allclose(found, wanted, rtol=0, atol=2e-4)
            assert trunk.num_fed - fed == num_new + (old == 3), "and the last of the chain"
        tokens = append(tokens, [*nodes[Tree(nodes, parents=tuple(parents)).path(len(nodes) - 1)], 1])
        fed = trunk.num_fed
        assert np.allclose(trunk.logits(tokens, 1), oracle.logits(tokens, 1), rtol=0, atol=2e-4)
        assert trunk.num_fed - fed == 1


def test_trees_go_with_the_caches_that_forks_exchange(trunk: OnnxTreeDecoder, oracle: OnnxDecoder) -> None:
    """One text and another tree in each: only in the cache that has its nodes a tree goes on without them."""
    forks, parents = (trunk.fork(), trunk.fork()), (-1, 0, 1, 2)
    tokens, trees = np.arange(5, dtype=np.int32), (np.arange(4, dtype=np.int32), np.arange(6, 10, dtype=np.int32))
    for fork, nodes in zip(forks, trees, strict=True):
        tree_logits(fork, tokens, nodes[:3], parents[:3])
    forks[0].exchange(forks[1])
    for fork, nodes in zip(forks, trees, strict=True):
        fed = fork.num_fed
        found = tree_logits(fork, tokens, nodes, parents, 1)
        assert fork.num_fed - fed > 1, "the nodes before it lie in the other cache now"
        assert np.allclose(found, branch_logits(oracle, tokens, nodes, parents)[-1:], rtol=0, atol=2e-4)


@pytest.mark.parametrize("num_last", [1, 3, 4])
def test_last_rows_are_those_of_all(trunk: OnnxTreeDecoder, num_last: int) -> None:
    tokens, nodes, parents = np.arange(5, dtype=np.int32), np.array([8, 9, 10, 11], np.int32), (-1, 0, 0, 1)
    for decoder in (trunk, TableDecoder(30, 1)):
        wanted = tree_logits(decoder, tokens, nodes, parents).copy()[-num_last:]
        assert np.allclose(tree_logits(decoder, tokens, nodes, parents, num_last), wanted, rtol=0, atol=2e-4)


def test_nodes_lie_in_their_places_as_far_as_tree_and_cache_agree() -> None:
    text, chain = np.array([1, 2], np.int32), np.array([1, 2, 3, 4], np.int32)
    behind = Tree(np.array([5, 6], np.int32), parents=(-1, 0))
    nodes = np.array([3, 4, 5, 6, 7], np.int32)
    given = tree_pass(text, nodes, (-1, 0, 1, 2, 2), num_last=0)
    assert given.num_held(chain, behind) == 4
    assert given._replace(num_last=2).num_held(chain, behind) == 3, "rows of these are wanted"
    assert given._replace(num_last=None).num_held(chain, behind) == 0
    assert tree_pass(text, nodes, (-1, 0, 0, 2, 2), 0).num_held(chain, behind) == 2, "another parent"
    assert tree_pass(text, nodes[:3], (-1, 0, 1), 0).num_held(chain, behind) == 3
    assert given.num_held(chain[:1], behind) == 0
    assert given.num_held(chain[1:], behind) == 0


def test_another_text_forgets_the_tree(trunk: OnnxTreeDecoder, oracle: OnnxDecoder) -> None:
    rng = np.random.default_rng(1)
    for _ in range(20):
        tokens = random_tokens(rng, int(rng.integers(2, 30)))
        tree_logits(trunk, tokens, tokens[:2], (-1, -1))
        other = append(tokens[: rng.integers(0, len(tokens))], random_tokens(rng, 3))
        assert np.allclose(trunk.logits(other, 2), oracle.logits(other, 2), rtol=0, atol=2e-4)


def test_an_interrupted_move_leaves_no_trace(
    trunk: OnnxTreeDecoder, oracle: OnnxDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, nodes = np.arange(9, dtype=np.int32), np.array([30, 40, 31, 41], np.int32)
    tree_logits(trunk, tokens, nodes, (-1, -1, 0, 1))
    cache = trunk._passes.cache
    longer = append(tokens, [40, 41, 50])

    def interrupting(slots: list[int], start: int) -> None:
        next(iter(cache._buffers.values())).numpy()[:, :, start] = 7.0  # type: ignore[attr-defined]
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(cache, "move", interrupting)
        with pytest.raises(KeyboardInterrupt):
            trunk.logits(longer, 1)
    assert np.allclose(trunk.logits(longer, 1), oracle.logits(longer, 1), rtol=0, atol=2e-4)


@pytest.mark.parametrize("precision_fixture", ["tiny_model", "tiny_drafter"])
def test_deterministic_rows_are_those_of_the_plain_graph_to_the_bit(
    precision_fixture: str, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(precision_fixture)
    exact = OnnxBranchDecoder(folder, read_manifest(folder), find_device("cpu"), deterministic=True)
    plain = chain_decoder(folder)
    rng = np.random.default_rng(5)
    tokens = random_tokens(rng, 3)
    for _ in range(60):
        parents = tuple(int(rng.integers(-1, node)) for node in range(int(rng.integers(0, 12))))
        nodes = random_tokens(rng, len(parents))
        rows = tree_logits(exact, tokens, nodes, parents).copy()
        for node in range(-1, len(nodes)):
            path = Tree(nodes, parents=parents).path(node)
            assert np.array_equal(rows[node + 1], plain.logits(append(tokens, nodes[path]), 1)[0])
        tokens = append(tokens, [*nodes[Tree(nodes, parents=parents).path(len(parents) - 1)], 1])
        assert np.array_equal(exact.logits(tokens, 2), plain.logits(tokens, 2))


def test_tree_at_the_end_of_the_context(trunk: OnnxTreeDecoder, oracle: OnnxDecoder) -> None:
    """Where branches have positions left and the cache no slots."""
    tokens = random_tokens(np.random.default_rng(3), tiny.CONTEXT - 2)
    nodes = np.array([5, 6, 7, 8], np.int32)
    wanted = branch_logits(oracle, tokens, nodes, (-1, -1, 0, 1))
    assert np.allclose(tree_logits(trunk, tokens, nodes, (-1, -1, 0, 1)), wanted, rtol=0, atol=2e-4)
    with pytest.raises(ContextOverflow):
        tree_logits(trunk, tokens, nodes, (-1, 0, 1, 2))


@pytest.mark.parametrize("family", ["mistral", "gemma3", "gemma4-shared"])
def test_windows_of_local_layers_hold_in_trees(tmp_path: Path, family: str) -> None:
    tiny.write_huggingface(tmp_path / "hf", weights_of(family), config=FAMILIES[family]["config"])
    export_model(tmp_path / "hf", tmp_path / "out", precision="fp32")
    windowed, plain = decoder(tmp_path / "out"), chain_decoder(tmp_path / "out")
    rng = np.random.default_rng(2)
    for num_tokens in (3, 9, 30):
        tokens, nodes = random_tokens(rng, num_tokens), random_tokens(rng, 9)
        parents = (-1, 0, 1, 2, -1, 4, 5, 0, 7)
        wanted = branch_logits(plain, tokens, nodes, parents)
        assert np.allclose(tree_logits(windowed, tokens, nodes, parents), wanted, rtol=0, atol=2e-4)


def test_folder_without_a_tree_graph_is_refused(tiny_model: Path) -> None:
    manifest = read_manifest(tiny_model)
    with pytest.raises(ManifestError, match="export it again"):
        tree_manifest(replace(manifest, tree_graph=None), find_device("cpu"))
    with pytest.raises(DeviceUnavailable, match="on the CPU, WebGPU and CUDA, not on 'qnn'"):
        tree_manifest(manifest, Device("qnn", "QNNExecutionProvider"))


def test_the_children_of_emitted_tokens_are_judged() -> None:
    tree = Tree(np.array([5, 6, 7, 8, 9], np.int32), parents=(-1, 0, -1, 2, 2))
    assert tree.judged(np.array([7, 9, 1])) == [(0, False), (2, True), (3, False), (4, True)]
    assert tree.judged(np.array([4])) == [(0, False), (2, False)]


def test_a_tree_yields_the_sum_of_what_is_reached() -> None:
    assert expected_of_tree((-1, 0, -1), (0.5, 0.5, 0.25)) == pytest.approx(1 + 0.5 + 0.25 + 0.25)
    assert expected_of_tree((), ()) == 1.0


def test_table_runs_trees_and_keeps_what_they_left() -> None:
    table = TableDecoder(tiny.VOCAB, seed=1)
    assert table.can.trees
    tokens, nodes, parents = np.array([1, 2], np.int32), np.array([5, 6, 7, 8], np.int32), (-1, 0, -1, 2)
    rows = tree_logits(table, tokens, nodes, parents)
    assert np.array_equal(rows, branch_logits(TableDecoder(tiny.VOCAB, seed=1), tokens, nodes, parents))
    fed = table.num_fed
    table.logits(append(tokens, [7, 8, 9]), 1)
    assert table.num_fed - fed == 1


@pytest.fixture(scope="module")
def gpu_form(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model in single precision, whose tree graph rotates apart from attention."""
    folder = tmp_path_factory.mktemp("gpu")
    tiny.write_gguf(folder / "tiny.gguf", tiny.random_weights())
    export_model(folder / "tiny.gguf", folder / "model", precision="fp32", form="gpu")
    return folder / "model"


@pytest.mark.parametrize("is_on_host", [True, False])
def test_trees_of_the_gpu_form_hold_where_the_cache_can_be_moved_and_where_not(
    gpu_form: Path, is_on_host: bool
) -> None:
    """What lies in another slot than its own is moved, or run again in the same pass."""
    grown, plain = decoder(gpu_form), chain_decoder(gpu_form)
    grown._is_on_host = is_on_host
    rng = np.random.default_rng(4)
    tokens, num_again = random_tokens(rng, 9), 0
    grown.logits(tokens[:-1], 1)
    for kept in ((0, 1), (2,), (), (0,), (4, 5), (4,)):
        parents = (-1, 0, -1, 2, -1, 4)
        nodes = rng.choice(tiny.VOCAB, len(parents), replace=False).astype(np.int32)
        before = grown.num_fed
        wanted = branch_logits(plain, tokens, nodes, parents)
        assert np.allclose(tree_logits(grown, tokens, nodes, parents), wanted, rtol=0, atol=2e-4)
        num_again += grown.num_fed - before - len(nodes) - 1
        tokens = append(append(tokens, nodes[list(kept)]), random_tokens(rng, 1))
    assert num_again == (0 if is_on_host else 1 + 2)  # behind (2,) and (4, 5)


def test_device_that_computes_trees_wrongly_runs_each_branch(
    gpu_form: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def wrong(self: OnnxTreeDecoder, *arguments: Any) -> Rows:
        return Rows(np.roll(run_tree(self, *arguments).logits, 1, axis=0))

    found, plain, run_tree = decoder(gpu_form), chain_decoder(gpu_form), OnnxTreeDecoder._run_tree
    assert found._is_sound(Device("webgpu", "WebGpuExecutionProvider"), 0.005)
    monkeypatch.setattr(OnnxTreeDecoder, "_run_tree", wrong)
    found._runs_trees = found._is_sound(Device("webgpu", "WebGpuExecutionProvider"), 0.005)
    assert "'webgpu' computes trees of drafts wrongly" in caplog.text
    rng = np.random.default_rng(5)
    tokens, nodes, parents = random_tokens(rng, 9), random_tokens(rng, 4), (-1, -1, 0, 2)
    wanted = branch_logits(plain, tokens, nodes, parents)
    assert np.allclose(tree_logits(found, tokens, nodes, parents), wanted, rtol=0, atol=2e-4)
    best = found.run(tree_pass(tokens, nodes, parents)._replace(wants=BEST))
    assert best.logits.argmax(1).tolist() == wanted.argmax(1).tolist()
