"""The target in torch: the logits of transformers and of the exported graph, and answers made many at once."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import families
import numpy as np
import pytest
import tiny

from edgespec import SamplingParams
from edgespec.cli.main import main
from edgespec.errors import ContextOverflow, MemoryExhausted
from edgespec.export.convert import export_model
from edgespec.export.heads.convert import plan_head
from edgespec.export.heads.head_source import read_head
from edgespec.export.sources import LoadedSource, read_source
from edgespec.training import state_rows, torch_reader, torch_writer, train
from edgespec.training.packing import Text
from edgespec.training.prompts import Asked, Dialogue, Said
from edgespec.training.state_rows import ComputedRows, StoredRows
from edgespec.training.stored_texts import StatesFile, TextsFile
from edgespec.training.target import StatesReader, write_answers
from edgespec.training.target_run import TargetRun
from edgespec.training.torch_reader import TorchReader
from edgespec.training.torch_target import TorchTarget, why_not
from edgespec.training.torch_writer import TorchWriter
from edgespec.training.warm_start import expected_counts, read_layers

pytestmark = pytest.mark.train
torch = pytest.importorskip("torch", reason="needs PyTorch, which only the extra train installs: make test-train")

RUN = ("llama", "qwen2", "qwen3", "granite", "smollm3", "phi3-partial", "glm4", "ernie4_5")
torch.set_num_threads(1)  # the passes of so small a model are over before a second thread wakes
NOT_RUN = {"mixtral": "experts", "gemma3": "a window", "lfm2": "conv", "ministral3": "another kind"}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> LoadedSource:
    path = tmp_path_factory.mktemp("target") / "tiny.gguf"
    tiny.write_gguf(path, tiny.random_weights())
    return read_source(path)


@pytest.fixture(scope="module")
def target(source: LoadedSource) -> TorchTarget:
    return TorchTarget(source, "cpu")


def writer(target: TorchTarget, folder: Path, *, longest: int = 6, report: list[str] | None = None) -> TorchWriter:
    lines = [] if report is None else report
    return TorchWriter(target, folder, ["a prompt"], longest, lines.append)


@pytest.mark.parametrize("family", RUN)
def test_logits_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    path = families.write_source(tmp_path, family, "gguf")
    made = TorchTarget(read_source(path, families.CONTEXT_LENGTHS.get(family)), "cpu")
    wanted = families.LOGITS[family]
    with torch.no_grad():
        (normed,) = made.read(torch.tensor(families.TOKENS[None].astype(np.int64)), [made.config.num_layers])
        found = made.logits(normed)[0, -len(wanted) :].numpy()
    assert np.abs(found - wanted).max() < 1e-4


@pytest.mark.parametrize(("family", "problem"), NOT_RUN.items())
def test_targets_of_other_kinds_are_named_with_the_reason(family: str, problem: str, tmp_path: Path) -> None:
    assert problem in (why_not(read_source(families.write_source(tmp_path, family, "gguf"))) or "")


def test_states_of_padded_texts_are_those_of_the_exported_graph(
    source: LoadedSource, target: TorchTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_reader, "_CPU_ROWS", 60)  # several batches
    rng, layers = np.random.default_rng(0), (0, 1, tiny.LAYERS)
    texts = [rng.integers(0, tiny.VOCAB, size).astype(np.int32) for size in (17, 1, 30, 9, 23, 40)]
    (tensor, *_) = source.tensors.values()
    export_model(tensor.path, tmp_path / "out", precision="fp32", hidden_layers=layers)
    wanted = StatesReader(tmp_path / "out", layers).read(texts)
    for one, other in zip(TorchReader(target, print).read(texts, layers), wanted, strict=True):
        assert one.shape == other.shape
        assert np.abs(one - other).max() < 2e-3 * max(1.0, np.abs(other).max())  # half floats


def greedy(target: TorchTarget, tokens: np.ndarray, longest: int) -> tuple[tuple[int, ...], bool]:
    """An answer by running the whole text again for each token."""
    made: list[int] = []
    while len(made) < longest:
        whole = torch.tensor([[*tokens.tolist(), *made]])
        with torch.no_grad():
            best = int(target.logits(target.read(whole, [target.config.num_layers])[0][:, -1]).argmax())
        if best in target.source.vocabulary.eos_token_ids:
            return tuple(made), True
        made.append(best)
    return tuple(made), False


def ask(tokens: np.ndarray, longest: int, sampling: SamplingParams | None = None) -> Dialogue[Said]:
    return (yield Asked(tokens, longest, sampling or SamplingParams()))


def dialogues(num: int) -> Iterator[tuple[int, Dialogue[Said]]]:
    rng = np.random.default_rng(1)
    for number in range(num):
        tokens = rng.integers(0, tiny.VOCAB, rng.integers(1, 30)).astype(np.int32)
        yield number, ask(tokens, int(rng.integers(1, 40)))


def test_answers_made_together_are_those_made_alone(target: TorchTarget, tmp_path: Path) -> None:
    asked = [next(dialogue) for _, dialogue in dialogues(30)]
    found = dict(writer(target, tmp_path, longest=40).follow(dialogues(30)))
    assert sorted(found) == list(range(30))
    for number, said in found.items():
        wanted = greedy(target, asked[number].tokens, asked[number].longest)
        assert (said.tokens, said.has_ended) == wanted


def test_tokens_that_the_target_never_writes_are_in_no_answer(
    source: LoadedSource, target: TorchTarget, tmp_path: Path
) -> None:
    def written(by: TorchTarget) -> set[int]:
        warmths = [SamplingParams(temperature=warmth, seed=1) for warmth in (0.0, 1.0)]
        asked = [ask(np.array([5, 9, i], np.int32), 6, warmth) for warmth in warmths for i in range(20)]
        return {token for _, said in writer(by, tmp_path).follow(iter(enumerate(asked))) for token in said.tokens}

    banned = tuple(sorted(written(target))[::2])
    vocabulary = replace(source.vocabulary, suppressed_token_ids=banned)
    assert written(TorchTarget(replace(source, vocabulary=vocabulary), "cpu")).isdisjoint(banned)


def test_a_warm_answer_is_drawn_from_the_nucleus_alone(target: TorchTarget, tmp_path: Path) -> None:
    tokens = np.array([5, 9, 11], np.int32)
    with torch.no_grad():
        rows = target.read(torch.tensor(tokens[None].astype(np.int64)), [target.config.num_layers])
        shares = (target.logits(rows[0][0, -1]) / 0.7).softmax(-1)
    ranked = shares.sort(descending=True)
    nucleus = {
        int(token)
        for token, before in zip(ranked.indices, ranked.values.cumsum(0) - ranked.values, strict=True)
        if before < 0.4
    }
    sampling = SamplingParams(temperature=0.7, top_p=0.4, seed=1)
    asked = ((number, ask(tokens, 1, sampling)) for number in range(60))
    drawn = {said.tokens for _, said in writer(target, tmp_path).follow(asked)}
    ends = {*target.source.vocabulary.eos_token_ids}
    assert {token for made in drawn for token in made} <= nucleus - ends
    assert len(drawn) > len(nucleus) / 5


@pytest.mark.parametrize("where", ["opening", "running"])
def test_without_memory_fewer_answers_are_made_at_once_and_none_is_lost(
    target: TorchTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    lines, failed = list[str](), list[int]()
    opened, stepped, most = torch_writer.AnswerBatch.__init__, torch_writer.AnswerBatch._step, 2

    def fail(num_places: int) -> None:
        if num_places > most:
            failed.append(num_places)
            raise torch.OutOfMemoryError("CUDA out of memory")

    def bounded(
        self: torch_writer.AnswerBatch, of: TorchTarget, num_places: int, *rest: int, **more: bool
    ) -> None:
        fail(num_places)
        opened(self, of, num_places, *rest, **more)

    def step(self: torch_writer.AnswerBatch, window: int) -> None:
        fail(len(self._tokens))
        stepped(self, window)

    name, imitation = ("__init__", bounded) if where == "opening" else ("_step", step)
    monkeypatch.setattr(torch_writer.AnswerBatch, name, imitation)
    wanted = dict(writer(target, tmp_path, longest=40).follow(dialogues(12)))
    assert failed == [8, 4]
    failed.clear()
    assert dict(writer(target, tmp_path, longest=40, report=lines).follow(dialogues(12))) == wanted
    assert lines == [f"cpu has no memory for the answers; going on with {num} at a time" for num in (4, 2)]
    asked = [next(dialogue) for _, dialogue in dialogues(12)]
    assert all(wanted[i].tokens == greedy(target, each.tokens, each.longest)[0] for i, each in enumerate(asked))
    most = 0
    with pytest.raises(MemoryExhausted, match="no memory for an answer") as error:
        [*writer(target, tmp_path).follow(dialogues(3))]
    assert error.value.exit_code == 5


def test_where_cuda_graphs_do_not_work_a_line_says_so_and_no_answer_is_lost(
    target: TorchTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, lines = dict(writer(target, tmp_path, longest=40).follow(dialogues(9))), list[str]()

    def refuse(self: torch_writer.AnswerBatch, window: int) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch_writer.AnswerBatch, "_graph", refuse)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    made = writer(target, tmp_path, longest=40, report=lines)
    made._has_graphs = True
    assert dict(made.follow(dialogues(9))) == wanted
    (line,) = lines
    assert line.startswith("CUDA graphs do not work here (operation not permitted")


def test_without_memory_for_a_pass_texts_are_read_in_smaller_ones(
    target: TorchTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts, lines, read = [np.arange(40, dtype=np.int32) + i for i in range(60)], list[str](), TorchTarget.read
    wanted = TorchReader(target, print).read(texts, (1,))

    def bounded(self: TorchTarget, tokens: torch.Tensor, *rest: object) -> list[torch.Tensor]:
        if tokens.numel() > 1100:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return read(self, tokens, *rest)

    monkeypatch.setattr(TorchTarget, "read", bounded)
    found = TorchReader(target, lines.append).read(texts, (1,))
    assert lines == [f"cpu has no memory for a pass; going on with {num} tokens" for num in (2048, 1024)]
    assert all(np.allclose(one, other, atol=1e-2) for one, other in zip(found, wanted, strict=True))


def test_prompts_without_room_are_counted_and_other_answers_are_the_same(
    target: TorchTarget, tmp_path: Path
) -> None:
    prompts = ["one", "too long " * 1000, "two"]
    texts = TextsFile(tmp_path / "texts", tiny.VOCAB)
    made = TorchWriter(target, tmp_path, prompts, 4, print)
    assert write_answers(made, prompts, texts, longest=4, limit_s=600.0, most_tokens=10_000) == 1
    assert texts.numbers == {0, 2, 3, 5}
    tokens = made.encode("one")
    with pytest.raises(ContextOverflow):
        [*made.follow(iter([(0, ask(np.tile(tokens, 1000), 4))]))]


def test_work_that_was_interrupted_goes_on_with_what_is_missing(
    target: TorchTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(most_tokens: int) -> TextsFile:
        texts = TextsFile(tmp_path / "texts", tiny.VOCAB)
        limits = {"limit_s": 600.0, "most_tokens": most_tokens, "own_share": 0.5}
        write_answers(writer(target, tmp_path), ["one", "two two", "three"], texts, longest=6, **limits)
        return texts

    class Interrupted(Exception): ...

    add = TextsFile.add

    def interrupt(self: TextsFile, *text: object) -> None:
        add(self, *text)
        if len(self.texts) == 3:
            raise Interrupted

    with monkeypatch.context() as patched:
        patched.setattr(TextsFile, "add", interrupt)
        with pytest.raises(Interrupted):
            write(1500)
    first = TextsFile(tmp_path / "texts", tiny.VOCAB)
    assert len(first.texts) == 3
    whole = write(1500)
    assert whole.numbers > first.numbers
    assert {*range(6)} <= whole.numbers
    assert all(
        np.array_equal(one.tokens, other.tokens) for one, other in zip(first.texts, whole.texts, strict=False)
    )
    assert whole.num_tokens == sum(len(text.tokens) for text in whole.texts)


@pytest.mark.parametrize("cap", [None, 2.0])
def test_expected_counts_of_tokens_are_sums_of_probabilities(cap: float | None) -> None:
    rng = np.random.default_rng(0)
    states, head = (rng.normal(size=(size, 16)).astype(np.float32) for size in (600, 90))
    logits = 0.5 * states @ head.T
    if cap is not None:
        logits = cap * np.tanh(logits / cap)
    shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    parts = torch.from_numpy(states).split(400)
    assert expected_counts(parts, head, 0.5, cap, "cpu") == pytest.approx(shares.sum(axis=0), rel=1e-3)


@pytest.mark.parametrize("most_at_hand", [100, 12])
def test_computed_states_are_those_that_would_be_stored(
    target: TorchTarget, monkeypatch: pytest.MonkeyPatch, most_at_hand: int
) -> None:
    monkeypatch.setattr(state_rows, "_MOST_AT_HAND", most_at_hand)
    rng, lengths = np.random.default_rng(3), (5, 1, 9, 2, 30)
    tokens = [rng.integers(0, tiny.VOCAB, length).astype(np.int32) for length in lengths]
    texts = [Text(each, 1, start) for each, start in zip(tokens, (0, 5, 6, 15, 17), strict=True)]
    reader = TorchReader(target, print)
    stored = StoredRows(np.concatenate(reader.read(tokens, (0, 1))), "cpu")
    computed = ComputedRows(reader, texts, (0, 1))
    for places in (
        np.arange(47),
        rng.integers(0, 47, (3, 4)),
        rng.integers(6, 15, 5),
        np.array([16]),
        np.array([46]),
        np.zeros(0, np.int64),  # of a batch in which no draft begins
    ):
        found, wanted = computed.at(places), stored.at(places)
        assert found.shape == (*places.shape, 2 * tiny.HIDDEN)
        assert torch.allclose(found.float(), wanted.float(), atol=2e-2, rtol=1e-2)
    assert computed.sample(texts) == texts == stored.sample(texts)


def test_states_of_few_texts_are_held_at_once_and_are_computed_once_for_a_batch(
    target: TorchTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_rows, "_MOST_AT_HAND", 90)
    read, states = list[int](), TorchReader.states

    def note(self: TorchReader, texts: list[np.ndarray], *rest: object) -> list[torch.Tensor]:
        read.append(sum(map(len, texts)))
        return states(self, texts, *rest)

    monkeypatch.setattr(TorchReader, "states", note)
    texts = [Text(np.arange(20, dtype=np.int32), 1, 20 * i) for i in range(20)]
    rows = ComputedRows(TorchReader(target, print), texts, (0,))
    rows.at(np.arange(80))
    rows.at(np.arange(20, 60))
    assert read == [80]
    rows.at(np.arange(0, 400, 7))
    assert sum(read[1:]) == 400
    assert max(read) == 100


@pytest.mark.slow
def test_the_command_trains_a_head_from_states_that_are_not_stored(
    source: LoadedSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(train, "_LEAST_TRAINING_S", 2.0)
    monkeypatch.setattr(TargetRun, "_is_on_gpu", True)
    (tensor, *_) = source.tensors.values()
    command = ["train", str(tensor.path), "--output", str(tmp_path / "head"), "--minutes", "0.1", "--json"]
    command += ["--draft-vocab", "120", "--train-device", "cpu", "--disk", "1M"]
    num_texts = 0
    for _ in range(2):
        assert main(command) == 0
        said = capsys.readouterr()
        report = json.loads(said.out)
        assert len(report["agreement"]) == 5
        assert report["gain"] is None
        assert "hidden states" not in said.err
        assert report["texts"] > num_texts  # how many more, the speed of the machine says
        num_texts = report["texts"]
    assert {each.name for each in (tmp_path / "head.work").iterdir()} >= {"texts.jsonl", "checkpoint.safetensors"}
    assert not (tmp_path / "head.work" / "states.f16").exists()
    assert plan_head(source, read_head(tmp_path / "head"), "fp32").plan.tokens is not None


@pytest.mark.slow
def test_the_command_trains_a_head_from_texts_and_states_of_torch(
    source: LoadedSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(train, "_LEAST_TRAINING_S", 2.0)
    (tensor, *_) = source.tensors.values()
    command = ["train", str(tensor.path), "--output", str(tmp_path / "head"), "--minutes", "0.3", "--json"]
    (tmp_path / "aside.txt").write_text("one\ntwo two\nthree\n")
    command += ["--draft-vocab", "120", "--train-device", "cpu", "--held-out", str(tmp_path / "aside.txt")]
    for _ in range(2):
        assert main(command) == 0
        said = capsys.readouterr()
        report = json.loads(said.out)
        assert "PyTorch runs tiny.gguf on cpu in " in said.err
        assert len(report["agreement"]) == 5
        assert report["gain"]["draft_cost"] > 0
        assert report["held_out_texts"] == 3
    texts = TextsFile(tmp_path / "head.work" / "texts.jsonl", tiny.VOCAB)
    states = StatesFile(tmp_path / "head.work" / "states.f16", len(read_layers(source, 3)) * tiny.HIDDEN)
    assert states.num_rows == texts.num_tokens
    assert [text.is_held_out for text in texts.texts[:4]] == [True] * 3 + [False]
    first = texts.texts[3]
    (wanted,) = TorchReader(TorchTarget(source, "cpu"), print).read([first.tokens], read_layers(source, 3))
    stored = states.rows()[first.start : first.start + len(first.tokens)]
    assert np.abs(stored - wanted).mean() < 2e-2
    tokens = plan_head(source, read_head(tmp_path / "head"), "fp32").plan.tokens
    assert tokens is not None
    assert len(tokens) == 120
