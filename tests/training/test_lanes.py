"""Prompts and answers that a target writes itself, many in step."""

from pathlib import Path

import numpy as np
import pytest
import tiny

from edgespec import LocalSource
from edgespec.errors import MemoryExhausted
from edgespec.export.sources import read_source
from edgespec.training import lanes, target_run
from edgespec.training.lanes import Lanes, OwnText
from edgespec.training.prompts import PromptWriter
from edgespec.training.stored_texts import TextsFile
from edgespec.training.target_run import TargetRun
from edgespec.training.torch_reader import TorchReader
from edgespec.training.torch_target import TorchTarget
from edgespec.training.torch_writer import TorchWriter
from edgespec.training.work_folder import TrainingOptions, WorkFolder

pytestmark = pytest.mark.train
torch = pytest.importorskip("torch", reason="needs PyTorch, which only the extra train installs: make test-train")
torch.set_num_threads(1)

LAYERS = (0, tiny.LAYERS)


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> TorchWriter:
    folder = tmp_path_factory.mktemp("target")
    tiny.write_gguf(folder / "tiny.gguf", tiny.random_weights())
    return TorchWriter(TorchTarget(read_source(folder / "tiny.gguf"), "cpu"), folder, [], 4, print)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "_MOST_LANES", 12)
    monkeypatch.setattr(lanes, "_CAPACITY", 96)
    monkeypatch.setattr(lanes, "_MOST", 5)
    monkeypatch.setattr(lanes, "_SAMPLED", 0.0)


def opened(writer: TorchWriter, report: list[str] | None = None) -> Lanes:
    lines = [] if report is None else report
    prompter = PromptWriter(writer.encode)
    return Lanes(writer.target, LAYERS, prompter, 7, seed=3, report=lines.append)


def written(writer: TorchWriter, num: int) -> list[OwnText]:
    texts = opened(writer).write(600.0)
    return [next(texts) for _ in range(num)]


def test_a_text_has_the_template_the_targets_own_answer_and_the_states_of_both(writer: TorchWriter) -> None:
    prompter, ends = PromptWriter(writer.encode), {*writer.target.source.vocabulary.eos_token_ids}
    begins, middle = prompter.begins, prompter.middle
    texts = written(writer, 40)  # more than the lanes, so that texts begin behind others
    for prompt, answer, states in texts:
        assert any(np.array_equal(prompt[: len(each)], each) for each in begins)
        assert np.array_equal(prompt[-len(middle) :], middle)
        assert 1 <= len(answer) <= 7
        assert not ends & {*answer}
        tokens = torch.tensor([[*prompt.tolist(), *answer]])
        with torch.no_grad():
            first, normed = writer.target.read(tokens, LAYERS)
            best = writer.target.logits(normed)[0, len(prompt) - 1 : -1].argmax(-1)
        assert answer == tuple(best.tolist())  # greedy, as it would be alone
        assert np.abs(states - torch.cat([first, normed], -1)[0].numpy()).max() < 2e-2
    assert len({text.prompt.tobytes() for text in texts}) > 10


def test_where_time_is_short_fewer_are_written_at_once_and_what_is_there_counts(
    writer: TorchWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter(np.arange(0.0, 1000.0, 1.0))
    monkeypatch.setattr(lanes, "monotonic", lambda: float(next(now)))
    made = opened(writer)
    texts = [*made.write(80.0)]
    assert 8 <= made.num_lanes < 12
    assert texts


def test_texts_are_awaited_beyond_the_time_for_as_long_again(
    writer: TorchWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = list[str]()

    def texts(limit_s: float, fewest: int) -> list[OwnText]:
        now = iter(np.arange(0.0, 1000.0, 1.0))  # a pass takes a second
        monkeypatch.setattr(lanes, "monotonic", lambda: float(next(now)))
        lines.clear()
        return [*opened(writer, lines).write(limit_s, fewest)]

    shortest = next(limit for limit in range(10, 90) if texts(limit, 0))
    assert texts(shortest - 1, 0) == lines == []
    assert len(texts(shortest - 1, 6)) >= 6
    assert lines == [
        f"the time for writing is over, and 6 more texts are wanted; going on for {shortest - 1} s at most"
    ]
    assert texts(10, 6) == []
    assert len(lines) == 1


def test_without_memory_fewer_are_written_at_once(writer: TorchWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    run, lines, most = Lanes._pass, list[str](), 4

    def bounded(self: Lanes, of: list[lanes._Lane], keys: object, values: object, at: int) -> object:
        if len(of) > most:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return run(self, of, keys, values, at)

    monkeypatch.setattr(Lanes, "_pass", bounded)
    texts = opened(writer, lines).write(600.0)
    assert len(next(texts).answer) > 0
    assert lines == [f"cpu has no memory for the answers; going on with {num} at a time" for num in (6, 3)]
    most = 0
    with pytest.raises(MemoryExhausted, match="no memory for an answer") as error:
        [*opened(writer).write(600.0)]
    assert error.value.exit_code == 5


def test_what_was_written_is_stored_with_its_states_and_goes_on_after_an_interruption(
    writer: TorchWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = writer.target.source
    options = TrainingOptions(own_share=1.0, longest_answer=7)
    folder = WorkFolder(tmp_path, source, options)
    run = TargetRun(folder, LocalSource(path=tmp_path), print)
    monkeypatch.setattr(target_run, "_STORED_AT_ONCE", 5)

    def interrupt(line: str) -> None:
        if line:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(target_run, "show_progress", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run._write_in_step(writer, 3, 1.2)
    first = TextsFile(tmp_path / "texts.jsonl", tiny.VOCAB)
    assert first.numbers == {*range(6, 11)}  # behind two answers to each of three prompts
    run._write_in_step(writer, 3, 1.2)
    texts = TextsFile(tmp_path / "texts.jsonl", tiny.VOCAB).texts
    assert len(texts) > 5
    assert len({text.tokens[: text.num_prompt].tobytes() for text in texts}) == len(texts)
    assert not folder.states.missing(texts)
    last, rows = texts[-1], folder.states.rows()
    (wanted,) = TorchReader(writer.target, print).read([last.tokens], folder.layers)
    assert np.abs(rows[last.start : last.start + len(last.tokens)] - wanted).max() < 2e-2


@pytest.mark.parametrize(("template", "can"), [(tiny.TEMPLATE, True), ("{{ messages[0].content }}", False)])
def test_whether_the_target_writes_in_step_is_decided_once_by_its_template_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str, can: bool
) -> None:
    override = {"tokenizer.chat_template": template}
    tiny.write_gguf(tmp_path / "tiny.gguf", tiny.random_weights(), override=override)
    folder = WorkFolder(tmp_path, read_source(tmp_path / "tiny.gguf"), TrainingOptions(device="cpu"))
    run, precisions, free = TargetRun(folder, LocalSource(path=tmp_path), print), iter(["bf16", "fp32"]), 1 << 40
    monkeypatch.setattr(target_run, "faster_precision", lambda device: next(precisions))
    monkeypatch.setattr(target_run, "free_bytes", lambda device: free)
    assert run._writes_in_step is can
    free = 0
    reader = run._open_in_torch([])
    assert reader is not None
    reader.close()
