"""A target that chooses where it runs gives greedy answers the tokens of its whole rows."""

import shutil
from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import onnx
import pytest
import tiny
from double import Double, branch_logits, tree_pass
from faulty import edit_graph
from table_decoder import TableDecoder

from edgespec import EdgeSpecError, ManifestError, SamplingParams, load
from edgespec.decoding.acceptance import Acceptance, equality, rejection
from edgespec.decoding.decoder import BEST, Argmax, Can, Pass, Rows, rows_by_branch
from edgespec.decoding.greedy import BestRows
from edgespec.decoding.sampling import GumbelSampler
from edgespec.decoding.scheduler import speculative_decode
from edgespec.draft.model_drafter import ModelDrafter
from edgespec.draft.speculation import Speculation
from edgespec.export.convert import export_model
from edgespec.manifest import read_manifest
from edgespec.runtimes import cuda
from edgespec.runtimes.device_checks import DeviceChecks, is_argmax_sound, probe_tokens
from edgespec.runtimes.device_rows import choice_graph, rows_with_ties, to_argmax
from edgespec.runtimes.device_trial import DeviceTrial
from edgespec.runtimes.devices import Device, find_device
from edgespec.runtimes.onnx import OnnxDecoder
from edgespec.runtimes.session import fast_model, load_graph
from edgespec.types import Logits, TokenIds

PROMPT = "the in the an the in"
HALF = tiny.VOCAB // 2
slow = pytest.mark.slow


class Chooser(Double):
    """A table that chooses, and counts the rows that were asked of it."""

    can = Can()

    def __init__(self, *, damaged: float | None = None) -> None:
        self.table = TableDecoder(40, 0)
        self.damaged = damaged
        self.num_rows = 0
        self.can = Can(best=True)
        self.vocab_size, self.context_length, self.num_fed = 40, 500, 0

    def logits(self, tokens: TokenIds, num_last: int) -> Logits:
        self.num_rows += num_last
        return self._rows(tokens, num_last)

    def run(self, given: Pass) -> Rows:
        if given.wants is not BEST:
            return super().run(given)
        rows = self._rows(given.tokens, given.num_rows)
        return Rows(best=Argmax(rows.argmax(1), np.isfinite(rows).all(1)))

    def _rows(self, tokens: TokenIds, num_last: int) -> Logits:
        rows = self.table.logits(tokens, num_last).copy()
        if self.damaged is not None:
            rows[-1, 3] = self.damaged
        return rows


def test_only_the_likeliest_token_has_a_chance_and_rows_cannot_be_written() -> None:
    target = Chooser()
    rows = BestRows(target)
    rng = np.random.default_rng(0)
    for num_last in (1, 5, 2, 5, 1, 8):
        tokens = rng.integers(0, 40, 12).astype(np.int32)
        found = rows.logits(tokens, num_last)
        wanted = target.table.logits(tokens, num_last).argmax(1).tolist()
        assert [row.argmax() for row in found] == np.array(found).argmax(1).tolist() == wanted
        assert np.array(found).shape == (num_last, 40)
        assert np.array(found).max(1).tolist() == [0] * num_last
        assert np.isfinite(found).sum(1).tolist() == [1] * num_last
        with pytest.raises(ValueError, match="read-only"):
            found[0][0] = 0
    assert target.num_rows == 0


@pytest.mark.parametrize("accept", [equality, rejection])
def test_greedy_text_is_that_of_whole_rows_whatever_drafts(accept: Acceptance) -> None:
    prompt, texts = np.arange(6, dtype=np.int32), []
    sampler = GumbelSampler(SamplingParams())
    drafter = ModelDrafter(TableDecoder(40, 1, near=TableDecoder(40, 0)), 40)
    for target in (TableDecoder(40, 0), BestRows(Chooser())):
        policy = Speculation(lambda: [drafter], draft_length=3).policy()
        blocks = islice(speculative_decode(prompt, target, sampler, policy, accept), 40)
        texts.append(np.concatenate([block.tokens for block in blocks]).tolist())
    assert len(texts[0]) > 40, "drafts were kept"
    assert texts[0] == texts[1]


def test_rows_with_a_logit_that_is_not_finite_come_whole() -> None:
    tokens = np.arange(6, dtype=np.int32)
    for damaged in (np.nan, np.inf, -np.inf):
        target = Chooser(damaged=damaged)
        np.testing.assert_array_equal(BestRows(target).logits(tokens, 2), target.logits(tokens, 2))


@pytest.mark.parametrize(
    ("sampling", "is_enough"),
    [
        (SamplingParams(), True),
        (SamplingParams(seed=3, top_k=5), True),
        (SamplingParams(temperature=0.1), False),
        (SamplingParams(repetition_penalty=1.1), False),
        (SamplingParams(frequency_penalty=0.1), False),
        (SamplingParams(logit_bias={3: 1.0}), False),
    ],
)
def test_rows_are_spared_where_sampling_is_greedy(sampling: SamplingParams, is_enough: bool) -> None:
    assert sampling.is_of_best == is_enough


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For a GPU; each token of the first half has a twin in the second, so that all likeliest tokens are tied."""
    folder, weights = tmp_path_factory.mktemp("chooser"), tiny.random_weights()
    embedding = weights["model.embed_tokens.weight"]
    embedding[HALF : 2 * HALF] = embedding[:HALF]
    tiny.write_gguf(folder / "tiny.gguf", weights)
    export_model(folder / "tiny.gguf", folder / "model", precision="fp32", form="gpu")
    return folder / "model"


@pytest.fixture(scope="module")
def whole(model: Path) -> tuple[int, ...]:
    """The greedy answer by whole rows, which is what the CPU decodes by."""
    with load(model, device="cpu", drafter="none", deterministic=True) as engine:
        return engine.generate(PROMPT, max_tokens=60).token_ids


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Has decoders on the CPU choose too; how many rows each pass chose for."""
    widths: list[int] = []
    run = OnnxDecoder.run

    def counted(self: OnnxDecoder, given: Pass) -> Rows:
        if given.wants is BEST:
            widths.append(given.num_rows)
        return run(self, given)

    monkeypatch.setattr(OnnxDecoder, "can", property(lambda self: Can(best=self._best_name is not None)))
    monkeypatch.setattr(OnnxDecoder, "run", counted)
    return widths


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_graph_chooses_the_first_of_the_likeliest_however_passes_are_cut(
    model: Path, deterministic: bool
) -> None:
    manifest = read_manifest(model)
    decoder = OnnxDecoder(model, manifest, find_device("cpu"), deterministic=deterministic)
    assert not decoder.can.best, "rows of the CPU are the host's already"
    tokens = np.random.default_rng(0).integers(0, manifest.vocab_size, tiny.CONTEXT).astype(np.int32)
    for num_tokens, num_last in ((9, 1), (10, 3), (300, 8), (600, 300), (12, 2), (tiny.CONTEXT, 1)):
        found = decoder.run(Pass(tokens[:num_tokens], num_last=num_last, wants=BEST)).best
        assert found is not None
        rows = decoder.logits(tokens[:num_tokens], num_last)
        assert found.is_sound.all()
        np.testing.assert_array_equal(found.ids, rows.argmax(1))
        assert (found.ids < HALF).any()
        assert not ((found.ids >= HALF) & (found.ids < 2 * HALF)).any(), "of twins the first"


def test_where_rows_begin_is_counted_from_a_shape(model: Path) -> None:
    graph = onnx.load(model / "model.onnx", load_external_data=False).graph
    made_by = {output: node for node in graph.node for output in node.output}
    (rows,) = (node for node in graph.node if node.op_type == "Slice")
    start = made_by[rows.input[1]]
    assert [made_by[name].op_type if name in made_by else name for name in start.input] == [
        "Shape",
        "num_logits_to_keep",
    ], "a device does not compute it and send it back within a pass"


@pytest.mark.parametrize(
    "how", [pytest.param("none", marks=slow), "ngram", pytest.param("model", marks=slow), "ahead"]
)
def test_answers_are_those_of_whole_rows(
    model: Path, whole: tuple[int, ...], tiny_drafter: Path, chosen: list[int], how: str
) -> None:
    drafter = str(tiny_drafter) if how in ("model", "ahead") else how
    schedule = "pipelined" if how == "ahead" else "serial"
    length = 0 if how == "none" else 3
    with load(
        model, device="cpu", drafter=drafter, draft_length=length, schedule=schedule, deterministic=True
    ) as engine:
        answer = engine.generate(PROMPT, max_tokens=60)
        num_passes = len(chosen)
        sampled = engine.generate(PROMPT, sampling=SamplingParams(temperature=0.8), max_tokens=4)
    assert answer.token_ids == whole
    assert len(chosen) == num_passes == answer.stats.passes
    assert (max(chosen) > 1) == (how != "none")
    assert len(sampled.token_ids) == 4


@pytest.mark.parametrize("damage", [np.nan, pytest.param(np.inf, marks=slow), -np.inf])
def test_damaged_rows_are_judged_whole(model: Path, tmp_path: Path, chosen: list[int], damage: float) -> None:
    def change(graph: onnx.GraphProto) -> None:
        at = next(i for i, node in enumerate(graph.node) if "logits" in node.output)
        graph.node[at].output[0] = "sound"
        added = np.zeros(tiny.VOCAB, np.float32)
        added[7] = damage
        graph.initializer.append(onnx.numpy_helper.from_array(added, "damage"))
        graph.node.insert(at + 1, onnx.helper.make_node("Add", ["sound", "damage"], ["logits"], name="damaged"))

    folder = Path(shutil.copytree(model, tmp_path / "model"))
    edit_graph(folder, lambda proto: change(proto.graph))
    with load(folder, device="cpu", drafter="none") as engine:
        if damage == -np.inf:  # a token that never comes, and no fault
            assert len(engine.generate(PROMPT, max_tokens=5).token_ids) == 5
        else:
            with pytest.raises(EdgeSpecError, match="its weights or the run are damaged"):
                engine.generate(PROMPT, max_tokens=5)
    assert chosen


def test_folder_that_states_a_choice_must_have_it_and_may_do_without(model: Path, tiny_model: Path) -> None:
    with pytest.raises(ManifestError, match=r"best is missing, wanted float \[1, rows, 2\]"):
        OnnxDecoder(
            tiny_model,
            replace(read_manifest(tiny_model), signature=read_manifest(model).signature),
            find_device("cpu"),
        )
    manifest = read_manifest(model)
    assert manifest.signature.best == "best"
    assert read_manifest(tiny_model).signature.best is None
    older = OnnxDecoder(
        model, replace(manifest, signature=replace(manifest.signature, best=None)), find_device("cpu")
    )
    assert not older.can.best
    assert older.logits(np.arange(5, dtype=np.int32), 2).shape == (2, tiny.VOCAB)


def test_device_that_chooses_otherwise_than_its_rows_say_is_not_asked_to(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = np.random.default_rng(0).normal(0, 2, (4, 50)).astype(np.float32)
    best, sound = rows.argmax(1), np.ones(4, bool)
    assert is_argmax_sound(rows, Argmax(best, sound))
    assert not is_argmax_sound(rows, Argmax((best + 1) % 50, sound))
    assert not is_argmax_sound(rows, Argmax(best, ~sound))
    manifest, device = read_manifest(model), Device("gpu", "GpuExecutionProvider", "gpu")
    decoder = OnnxDecoder(model, manifest, find_device("cpu"))
    tokens = probe_tokens(decoder.vocab_size, 16)
    right = decoder.logits(tokens, 16).copy()
    trial = DeviceTrial(decoder, decoder._passes, device, DeviceChecks(model, manifest, device), is_exact=False)
    assert trial.can_choose(right)
    assert caplog.messages == []
    assert not trial.can_choose(-right)
    assert "'gpu' chooses other tokens than its rows say" in caplog.text


@pytest.mark.parametrize("precision", ["fp32", "int4"])
def test_cuda_chooses_by_argmax_and_gives_what_the_graph_in_the_file_gives(
    tiny_gguf: Path, tmp_path: Path, precision: str
) -> None:
    """On the CPU provider, whose kernels stand for those of CUDA: which operators run, and what they give."""
    export_model(tiny_gguf, tmp_path / "model", precision=precision, form="gpu")
    manifest = read_manifest(tmp_path / "model")
    for name in (manifest.graph, manifest.tree_graph):
        assert name is not None
        graph, device = tmp_path / "model" / name, Device("cuda", cuda.PROVIDER, "gpu")
        content = fast_model(graph, manifest, device)
        assert content is not None
        operators = Counter(node.op_type for node in onnx.load_from_string(content).graph.node)
        assert operators["ArgMax"] == 1
        assert not operators.keys() & {"ReduceMax", "ReduceMin", "Equal", "Where"}
        assert fast_model(graph, manifest, find_device("cpu")) is None
        for choice in (
            choice_graph(content, manifest.signature),
            choice_graph(graph.read_bytes(), manifest.signature),
        ):
            session = load_graph(graph, find_device("cpu"), choice)
            for rows in rows_with_ties(manifest.vocab_size):
                found = to_argmax(session.run(["best"], {"logits": rows[None]})[0][0], manifest.vocab_size)
                assert found.ids.tolist() == rows.argmax(1).tolist()
                assert found.is_sound.all()


def test_a_graph_that_chooses_in_another_way_is_opened_as_it_is_with_a_word(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "model"))

    def change(proto: onnx.ModelProto) -> None:
        (last,) = (node for node in proto.graph.node if "best" in node.output)
        last.output[0] = "as_given"
        proto.graph.node.append(onnx.helper.make_node("Identity", ["as_given"], ["best"]))

    edit_graph(folder, change)
    assert fast_model(folder / "model.onnx", read_manifest(folder), Device("cuda", cuda.PROVIDER, "gpu")) is None
    assert "ends in a way that 'cuda' may run slowly; export the model again" in caplog.text


def test_a_device_that_chooses_the_last_of_equal_tokens_is_not_asked_to(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    device, manifest = find_device("cpu"), read_manifest(model)
    assert DeviceChecks(model, manifest, device).chooses_the_first()
    assert caplog.messages == []
    folder = Path(shutil.copytree(model, tmp_path / "model"))

    def change(proto: onnx.ModelProto) -> None:
        (least,) = (node for node in proto.graph.node if node.op_type == "ReduceMin")
        least.op_type = "ReduceMax"
        none = next(each for each in proto.graph.initializer if each.name == "no_token")
        none.CopyFrom(onnx.numpy_helper.from_array(np.array(-1, np.float32), "no_token"))

    edit_graph(folder, change)
    assert not DeviceChecks(folder, manifest, device).chooses_the_first()
    assert "'cpu' does not choose the first of equally likely tokens" in caplog.text


class TreeChooser(Chooser):
    """A Chooser that runs trees, branch by branch."""

    def run(self, given: Pass) -> Rows:
        if given.wants is not BEST:
            return Rows(rows_by_branch(self.logits, given))
        rows = rows_by_branch(self.table.logits, given)
        return Rows(best=Argmax(rows.argmax(1), np.full(len(rows), self.damaged is None)))


def test_tokens_of_a_tree_are_chosen_too_and_damaged_rows_are_fetched() -> None:
    tokens, nodes, parents = np.arange(5, dtype=np.int32), np.arange(9, 13, dtype=np.int32), (-1, 0, -1, 2)
    wanted = branch_logits(TableDecoder(40, 0), tokens, nodes, parents).argmax(1).tolist()
    target = TreeChooser()
    rows = BestRows(target)
    for num_last in (None, 2):
        found = rows.run(tree_pass(tokens, nodes, parents, num_last)).logits
        assert [int(row.argmax()) for row in found] == (wanted if num_last is None else wanted[-num_last:])
    assert target.num_rows == 0
    target.damaged = np.nan
    assert np.isnan(rows.run(tree_pass(tokens, nodes, parents)).logits).any()
