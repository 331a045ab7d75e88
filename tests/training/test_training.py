"""Training itself: edgespec train on a small random model. It needs its own environment: make test-train."""

import json
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import made_heads
import numpy as np
import pytest
import tiny
from made_heads import Graphs

from edgespec.cli.main import main
from edgespec.errors import DiskFull, EdgeSpecError, IntegrityError, MemoryExhausted, ModelError, UsageError
from edgespec.export.convert import export_model
from edgespec.export.heads.convert import export_head, plan_head
from edgespec.export.heads.head_source import read_head
from edgespec.export.sources import read_source
from edgespec.setup.snapshot import LocalSource
from edgespec.training import fit, stored_texts, target_run
from edgespec.training.fit import Data, Recipe, Trainer
from edgespec.training.head_file import write_head
from edgespec.training.network import HEAD, JOIN, MARKOV_HEAD, HeadShape, Network
from edgespec.training.objective import Agreement, agreement, backward, unroll, visible
from edgespec.training.packing import Batch, Text, even_sample, num_shared, pack
from edgespec.training.state_rows import StoredRows
from edgespec.training.stored_texts import TextsFile
from edgespec.training.target import FIRST_OWN
from edgespec.training.target_run import TargetRun
from edgespec.training.train import _leave_out, train
from edgespec.training.warm_start import head_shape, start_weights
from edgespec.training.work_folder import TrainingOptions, WorkFolder, describe_run, hold_work

pytestmark = pytest.mark.train
torch = pytest.importorskip("torch", reason="needs PyTorch, which only the extra train installs: make test-train")
torch.set_num_threads(1)  # the passes of so small a model are over before a second thread wakes


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    layers = {"llama.block_count": made_heads.TARGET_LAYERS}
    tiny.write_gguf(folder / "tiny.gguf", made_heads.target_weights(), override=layers)
    return folder / "tiny.gguf"


def made_network(target: Path, *extended: int) -> tuple[HeadShape, Network, np.ndarray]:
    """extended: The number of states that it reads, and the rank of its Markov head, for one that has more."""
    source, weights = read_source(target), made_heads.target_weights()
    shape, rng = head_shape(source, 100, *extended), np.random.default_rng(3)
    tokens = made_heads.trimmed_tokens(rng).astype(np.int32)
    join = rng.normal(size=shape.weights[JOIN]).astype(np.float32) / 10
    fuse = rng.normal(size=(tiny.HIDDEN, 3 * tiny.HIDDEN)).astype(np.float32) / 10
    made = start_weights(shape, source, weights["lm_head.weight"], tokens, join, fuse)
    if MARKOV_HEAD in made:  # which says nothing at the start
        made[MARKOV_HEAD] = rng.normal(size=made[MARKOV_HEAD].shape).astype(np.float32)
    tensors = {name: torch.tensor(each.astype(np.float16).astype(np.float32)) for name, each in made.items()}
    return shape, Network(shape, tensors, torch.tensor(weights["model.embed_tokens.weight"])), tokens


def made_batch(num_states: int = 1) -> tuple[Batch, np.ndarray]:
    rng = np.random.default_rng(1)
    texts, start = [], 0
    for num_prompt, num_answer in ((3, 9), (2, 7), (4, 5)):
        tokens = rng.integers(0, tiny.VOCAB, num_prompt + num_answer).astype(np.int32)
        texts.append(Text(tokens, num_prompt, start))
        start += len(tokens)
    (batch,) = pack(texts, 24, 2, None)
    return batch, rng.normal(size=(start, num_states * tiny.HIDDEN)).astype(np.float32)


@pytest.mark.parametrize("extended", [(), (3, 32)])
def test_drafts_in_training_are_those_of_the_exported_graph(
    target: Path, tmp_path: Path, extended: tuple[int, ...]
) -> None:
    """Step by step: the rows of the text, then each draft's own steps behind its first row."""
    shape, network, tokens = made_network(target, *extended)
    weights = {name: each.numpy() for name, each in network.weights.items()}
    write_head(tmp_path / "head", shape, weights, tokens, "tiny", (2, 4) if extended else ())
    export_head(plan_head(read_source(target), read_head(tmp_path / "head"), "fp32"), tmp_path / "out", "head")
    graphs = Graphs(tmp_path / "out")
    batch, states = made_batch(shape.num_states)
    with torch.no_grad():
        steps = list(unroll(network, batch, torch.tensor(states[batch.stored]), 3))
    num_compared = 0
    seen = visible(batch, "cpu").numpy()
    for line, draft in np.argwhere(batch.has_next(2)):
        start = batch.starts[line, draft]
        rows = np.flatnonzero(seen[line, draft])
        assert rows.tolist() == [*range(rows[0], start + 1)]
        assert batch.positions[line, rows[0]] == 0
        graphs.forget(0)
        logits, found = graphs.rows(batch.tokens[line, rows], graphs.fuse(states[batch.stored[line, rows]]))
        for step in range(3):
            made, token = steps[step][line, draft], batch.tokens[line, start + step]
            assert np.abs(found[-1] - made.numpy()).max() < 1e-4
            assert np.abs(logits[-1] - network.logits(made, torch.tensor(token)).numpy()).max() < 1e-3
            logits, found = graphs.rows(batch.tokens[line, start + step + 1 : start + step + 2], found[-1:])
            num_compared += 1
    assert num_compared > 30


@pytest.mark.parametrize(("variation", "num_compared"), [(0.0, 0), (0.3, 0), (1.0, 0), (0.3, 40)])
def test_gradients_in_parts_are_those_of_the_whole_loss(
    target: Path, monkeypatch: pytest.MonkeyPatch, variation: float, num_compared: int
) -> None:
    _, network, _ = made_network(target, 3, 32)
    batch, states = made_batch(3)
    features = torch.tensor(states[batch.stored])
    number = batch.starts >= 0
    after = torch.softmax(torch.randn(int(number.sum()), 100, generator=torch.manual_seed(0)), -1)
    place = np.full(batch.tokens.shape, -1)
    line, draft = np.nonzero(number)
    place[line, batch.starts[line, draft]] = np.arange(len(line))

    def gradients(chunk: int) -> list[np.ndarray]:
        monkeypatch.setattr("edgespec.training.objective._CHUNK_DRAFTS", chunk)
        for each in network.weights.values():
            each.requires_grad_().grad = None
        backward(network, batch, features, after, 3, variation, num_compared)
        return [each.grad.numpy().copy() for each in network.weights.values()]

    total, likeliest = 0.0, after.sum(0).argsort(descending=True)[: num_compared or 100]
    for each in network.weights.values():
        each.requires_grad_().grad = None
    for i, states_of_step in enumerate(unroll(network, batch, features, 3)):
        goes_on = batch.has_next(i)
        wanted = after[batch.at(place, i)[goes_on]][:, likeliest]
        wanted = wanted / wanted.sum(-1, keepdim=True)
        tokens = torch.tensor(batch.at(batch.tokens, i)[goes_on])
        logs = network.logits(states_of_step[torch.tensor(goes_on)], tokens)[:, likeliest].log_softmax(-1)
        apart = (wanted - logs.exp()).clamp_min(0).sum(-1)  # what is accepted less often than the target's own
        losses = variation * apart - (1 - variation) * (wanted * logs).sum(-1)
        total = total + 0.8**i * losses.mean()
    (total / (1 + 0.8 + 0.64)).backward()
    whole = [each.grad.numpy().copy() for each in network.weights.values()]
    for found in (gradients(4), gradients(1000)):
        for one, other in zip(found, whole, strict=True):
            assert np.abs(one - other).max() < 1e-5 * max(1.0, np.abs(other).max())


def test_agreement_counts_drafts_until_their_first_wrong_token(target: Path) -> None:
    _, network, tokens = made_network(target)
    batch, states = made_batch()
    features, ids = torch.tensor(states[batch.stored]), torch.tensor(tokens.astype(np.int64))
    network.weights[HEAD].zero_()
    network.weights[HEAD][7] = 1e-3  # every draft is of one token, or where that is less likely of the first
    first = np.random.default_rng(4).random(batch.tokens.shape) < 0.3
    batch = replace(batch, tokens=np.where(first, tokens[7], tokens[0]).astype(np.int64))
    found, reached, right = agreement(network, batch, features, 3, ids), [0, 0, 0], [0, 0, 0]
    with torch.no_grad():
        steps = list(unroll(network, batch, features, 3))
    for line, draft in np.argwhere(batch.has_next(2)):
        for i, states_of_step in enumerate(steps):
            reached[i] += 1
            drafted = tokens[7 if states_of_step[line, draft].sum() > 0 else 0]
            if batch.tokens[line, batch.starts[line, draft] + i + 1] != drafted:
                break
            right[i] += 1
    assert found.reached.tolist() == reached
    assert found.right.tolist() == right
    assert found.rates == pytest.approx(np.array(right) / reached)
    assert 0 < right[1] < reached[1]


def test_a_draft_learns_from_the_targets_probabilities_behind_its_first_token(
    target: Path, tmp_path: Path
) -> None:
    trainer = small_trainer(target, tmp_path, Recipe(sharpness=1.5))
    trainer._data = data = trainer._data._replace(logit_scale=0.5, logit_cap=2.0)
    (batch,) = trainer._pack(data.texts, None)
    wanted = []
    for text in data.texts:
        for place in range(text.num_prompt, len(text.tokens) - 1):
            logits = data.rows.at(np.array(text.start + place)).float().numpy() @ data.head.T * 0.5
            shares = np.exp(1.5 * 2.0 * np.tanh(logits / 2.0))
            wanted.append(shares / shares.sum())
    assert np.abs(trainer._after(batch).numpy() - np.array(wanted)).max() < 1e-5


def test_the_held_out_texts_that_are_compared_are_an_even_sample_of_all() -> None:
    texts = [Text(np.full(100, i, np.int32), 4) for i in range(70)]
    found = [int(text.tokens[0]) for text in even_sample(texts, 2000)]
    assert len(found) == 20
    assert found[0] == 0
    assert {b - a for a, b in pairwise(found)} == {3, 4}
    assert 70 - found[-1] <= 4
    assert even_sample(texts, 7000) == texts
    assert even_sample(texts[:3], 50) == texts[:1]
    assert even_sample([], 50) == []


def run(*arguments: object) -> int:
    return main([str(each) for each in arguments])


def small_trainer(target: Path, folder: Path, recipe: Recipe | None = None, *, broken: bool = False) -> Trainer:
    shape, network, tokens = made_network(target)
    weights = {name: each.numpy() for name, each in network.weights.items()}
    rng = np.random.default_rng(5)
    texts = [Text(rng.integers(0, tiny.VOCAB, 40).astype(np.int32), 4, 40 * i) for i in range(12)]
    states = rng.normal(size=(480, tiny.HIDDEN)).astype(np.float16)
    states[:440] *= np.nan if broken else 1.0
    embedding = made_heads.target_weights()["model.embed_tokens.weight"]
    data = Data(StoredRows(states, "cpu"), texts[:11], texts[11:], embedding, weights[HEAD], tokens)
    given = folder / "checkpoint", lambda best: None, "cpu"
    return Trainer(shape, data, weights, *given, saved=weights, recipe=recipe)


def test_a_loss_that_is_no_number_ends_the_training_and_changes_no_weights(target: Path, tmp_path: Path) -> None:
    trainer = small_trainer(target, tmp_path, broken=True)
    before = trainer._network.arrays()
    with pytest.raises(EdgeSpecError, match="9 batches in a row is not a number; what was trained before is kept"):
        trainer.run(60.0)
    assert all(
        np.array_equal(one, before[name])
        for name, one in small_trainer(target, tmp_path)._network.arrays().items()
    )


def test_a_checkpoint_of_weights_that_are_no_numbers_is_refused(target: Path, tmp_path: Path) -> None:
    trainer = small_trainer(target, tmp_path)
    with torch.no_grad():
        trainer._network.weights[JOIN][0, 0] = float("nan")
    trainer.save()
    with pytest.raises(ModelError, match="not numbers; remove it and train again"):
        small_trainer(target, tmp_path)


def test_what_is_compared_and_goes_on_is_the_mean_of_the_weights(target: Path, tmp_path: Path) -> None:
    trainer, ran, saved = small_trainer(target, tmp_path, Recipe(epochs=2.0, rate=0.01)), [], []
    trainer._num_rows = 80
    step, trainer._save_best = trainer._step, lambda weights: saved.append(dict(weights))

    def noted(*arguments: object) -> None:
        step(*arguments)  # type: ignore[arg-type]
        ran.append(trainer._network.arrays()[JOIN].copy())

    trainer._step = noted  # type: ignore[method-assign]
    mean = trainer._network.arrays()[JOIN].copy()
    progress = trainer.run(600.0)
    trainer.progress = replace(progress, best=())
    trainer.compare()
    assert progress.num_batches == len(ran) > 10
    for i, each in enumerate(ran):
        mean = mean + max(0.005, 9 / (10 + i)) * (each - mean)
    assert np.abs(saved[-1][JOIN] - mean).max() < 1e-6 < np.abs(mean - ran[-1]).max()
    after = small_trainer(target, tmp_path)
    assert after.progress == replace(progress, best=(), num_since_best=0)
    assert np.array_equal(after._network.arrays()[JOIN], ran[-1])
    assert np.abs(after._mean.arrays()[JOIN] - mean).max() < 1e-6


def test_the_head_that_is_compared_at_last_is_the_one_that_was_written(target: Path, tmp_path: Path) -> None:
    trainer, written = small_trainer(target, tmp_path), list[np.ndarray]()
    trainer._save_best = lambda weights: written.append(weights[JOIN].copy())
    trainer.compare()
    trainer._step(next(trainer._batches()), 99, 0.0)
    assert trainer._saved is not None
    assert np.array_equal(trainer._saved[JOIN], written[0])


def test_prompts_are_trained_on_behind_what_all_begin_with() -> None:
    texts = [Text(np.array([1, 2, 3, *each], np.int32), 5) for each in ((4, 5, 6), (4, 6, 6), (4, 5, 9))]
    assert num_shared(texts) == 4
    assert num_shared([text._replace(num_prompt=2) for text in texts]) == 2
    assert num_shared(texts[:1]) == 5
    assert num_shared([]) == 0


@pytest.mark.parametrize("error", ["gpu", "cpu"])
def test_batches_are_halved_until_there_is_memory_for_them(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str
) -> None:
    most, widths, said = 160, list[int](), list[str]()
    monkeypatch.setattr(fit, "info", said.append)

    def bounded(network: Network, batch: Batch, *arguments: object) -> float:
        widths.append(batch.tokens.shape[1])
        if widths[-1] <= most:
            return backward(network, batch, *arguments)  # type: ignore[arg-type]
        if error == "gpu":
            raise torch.OutOfMemoryError("CUDA out of memory")
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    monkeypatch.setattr(fit, "backward", bounded)
    trainer = small_trainer(target, tmp_path, Recipe(epochs=1.0))
    assert trainer.run(60.0).num_drafts > 0
    assert widths[:3] == [640, 320, 160]
    assert {*widths[2:]} == {160}
    assert said[1:] == ["cpu has no memory for a batch; going on with 160 tokens at a time"]
    most = 0
    with pytest.raises(MemoryExhausted, match="batches of 80 tokens; end other programs") as found:
        small_trainer(target, tmp_path, Recipe(epochs=1.0)).run(60.0)
    assert found.value.exit_code == 5


def test_comparisons_too_are_halved_until_there_is_memory_for_them(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, widths = (trainer := small_trainer(target, tmp_path)).compare(), list[int]()
    assert wanted.reached[0] == trainer.compared_drafts == 31  # of 36 tokens of an answer, those that five follow

    def bounded(network: Network, batch: Batch, *arguments: Any) -> Agreement:
        widths.append(batch.tokens.shape[1])
        if widths[-1] > 160:
            raise RuntimeError("CUDA error: out of memory")
        return agreement(network, batch, *arguments)

    monkeypatch.setattr(fit, "agreement", bounded)
    found = small_trainer(target, tmp_path).compare()
    assert widths == [640, 320, 160]
    assert np.array_equal(found.reached, wanted.reached)


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("CUDA"), RuntimeError("another one")])
def test_too_little_memory_in_any_stage_ends_the_command_in_words(
    target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))

    def fail(*arguments: object) -> None:
        raise error

    monkeypatch.setattr(TargetRun, "run", fail)
    if "another" in str(error):
        with pytest.raises(RuntimeError, match="another one"):
            run("train", target, "--output", tmp_path / "head")
        return
    assert run("train", target, "--output", tmp_path / "head") == 5
    assert "there is no memory for the training (" in capsys.readouterr().err


def test_a_target_whose_weights_a_gpu_has_no_room_for_is_not_read(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, free = WorkFolder(tmp_path, read_source(target), TrainingOptions()), 0
    monkeypatch.setattr(WorkFolder, "device", "cuda")
    monkeypatch.setattr(target_run, "faster_precision", lambda device: "bf16")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 1 << 40))
    assert "would need " in (TargetRun(folder, LocalSource(path=target), print)._why_not_torch or "")
    free = 1 << 30
    assert TargetRun(folder, LocalSource(path=target), print)._why_not_torch is None


@pytest.mark.parametrize(("epochs", "whole"), [(1.0, False), (3.0, False), (1.0, True)])
def test_a_training_ends_when_each_token_was_seen_so_often(
    target: Path, tmp_path: Path, epochs: float, whole: bool
) -> None:
    trainer = small_trainer(target, tmp_path, Recipe(epochs=epochs, whole_texts=whole))
    trainer._num_rows = 80
    # Answers of 36 tokens behind prompts of four, after each of which but the last a draft begins.
    once = 11 * (38 if whole else 35)
    assert trainer.num_a_round == once
    seen = trainer.run(600.0).num_drafts
    assert epochs * once <= seen <= epochs * once + 2 * 40
    rate = trainer._optimizer.param_groups[0]["lr"]
    assert rate < 0.2 * trainer._rate(99, 0.0), "the learning rate has fallen by then"
    again = small_trainer(target, tmp_path, Recipe(epochs=epochs, whole_texts=whole))
    assert again.run(600.0).num_batches == trainer.progress.num_batches + 1, "runs count together"


def test_of_long_texts_the_drafts_that_fit_into_a_line_count(target: Path, tmp_path: Path) -> None:
    trainer = small_trainer(target, tmp_path)
    trainer._data.texts[0] = Text(np.zeros(200, np.int32), 4)  # type: ignore[index]
    trainer._num_rows = 160
    trainer._halve(MemoryError())
    assert (
        trainer.num_a_round
        == 10 * 38 + 79
        == sum((each.starts >= 0).sum() for each in trainer._pack(trainer._data.texts, None))
    )


def test_the_rate_of_learning_grows_with_the_root_of_the_rows_of_a_batch(target: Path, tmp_path: Path) -> None:
    trainer = small_trainer(target, tmp_path, Recipe(rate=0.01))
    assert trainer._rate(99, 0.0) == pytest.approx(0.01)
    trainer._num_rows *= 4
    assert trainer._rate(99, 0.0) == pytest.approx(0.02)


def test_a_head_that_is_there_is_replaced_only_by_a_better_one(target: Path, tmp_path: Path) -> None:
    trainer = small_trainer(target, tmp_path, Recipe(epochs=0.01))
    trainer._saved, written = trainer._network.arrays(), []
    trainer._save_best = written.append  # type: ignore[assignment]
    agreements = iter([(0.5, 0.5), (0.4, 0.4)])

    def agreement(network: Network) -> Agreement:
        measured.append(network.arrays()[JOIN])
        return Agreement(np.full(2, 10), np.array([10 * rate for rate in next(agreements)]))

    measured, means = [], trainer._mean.arrays()[JOIN]
    trainer._saved[JOIN] = trainer._saved[JOIN] + 1.0
    trainer._agreement = agreement  # type: ignore[method-assign]
    progress = trainer.run(600.0)
    assert np.abs(measured[0] - means - 1.0).max() < 1e-5, "the head in its place was measured"
    assert not written
    assert progress.best == (0.5, 0.5)


def test_the_head_that_is_kept_is_compared_with_all_held_out_texts_at_last(target: Path, tmp_path: Path) -> None:
    trainer = small_trainer(target, tmp_path, Recipe(epochs=0.01))
    held_out = trainer._data.texts[:4]
    trainer._data = trainer._data._replace(held_out=held_out)
    trainer.compared = held_out[:1]
    trainer.run(600.0)
    assert trainer.compared == held_out
    assert trainer.compared_drafts == 4 * 34  # in answers of 36 tokens


def test_comparisons_at_the_end_are_within_the_time(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, now = small_trainer(target, tmp_path), 0.0
    trainer._data = trainer._data._replace(held_out=trainer._data.texts[:8])
    trainer.compared = trainer._data.texts[:2]

    def compare(network: Network, batch: Batch, *arguments: object) -> Agreement:
        nonlocal now
        now += 0.05 * (batch.text >= 0).sum()  # 2 s a text
        return Agreement(np.full(5, 10), np.full(5, 5))

    def step(*arguments: object) -> None:
        nonlocal now
        now += 1.0

    monkeypatch.setattr(fit, "monotonic", lambda: now)
    monkeypatch.setattr(fit, "agreement", compare)
    trainer._step = step  # type: ignore[method-assign]
    trainer.run(100.0)
    assert len(trainer.compared) == 3, "as many as a sixteenth of the time is enough for"
    assert 98.0 <= now <= 102.0


def test_the_head_at_the_start_is_written_before_the_first_step(target: Path, tmp_path: Path) -> None:
    trainer, written = small_trainer(target, tmp_path, broken=True), []
    trainer._saved, trainer._save_best = None, written.append  # type: ignore[assignment]
    with pytest.raises(EdgeSpecError, match="is not a number"):
        trainer.run(60.0)
    assert len(written) == 1


def test_a_head_that_could_not_be_written_is_not_the_best(target: Path, tmp_path: Path) -> None:
    trainer = small_trainer(target, tmp_path)

    def full(weights: object) -> None:
        raise DiskFull("no room", 2, 1)

    trainer._save_best = full  # type: ignore[assignment]
    with pytest.raises(DiskFull):
        trainer.compare()
    assert trainer.progress.best == ()


@pytest.mark.parametrize("output", [".", "/", "..", "corpus.txt/head"])
def test_outputs_that_can_be_no_new_folder_are_refused(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], output: str
) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus.txt").write_text("a\nb\n")
    assert run("train", target, "--corpus", "corpus.txt", "--output", output) == 2
    assert "--output" in capsys.readouterr().err
    assert run("train", target, "--output", tmp_path / "head", "--disk", "1K") == 2
    assert "--disk is '1K'" in capsys.readouterr().err


def test_a_model_that_was_made_of_other_weights_is_refused(target: Path, tmp_path: Path) -> None:
    options = {"prompts": ["a"], "stored": [], "open_engine": nullcontext, "report": print}
    with pytest.raises(UsageError, match=r"made of other weights than .*tiny\.gguf has, such as with an adapter"):
        train(LocalSource(path=target), tmp_path / "head", TrainingOptions(), **options, sha256="of,both")
    assert not (tmp_path / "head.work").exists()


def test_a_device_that_is_not_there_is_refused_before_anything_is_made(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))
    device = "mps" if torch.xpu.is_available() else "xpu"
    assert run("train", target, "--output", tmp_path / "head", "--train-device", device) == 4
    assert f"PyTorch does not run on {device} here (" in capsys.readouterr().err
    assert not (tmp_path / "head.work").exists()


def test_an_interruption_says_where_all_lies_in_every_stage(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))

    def interrupted(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(target_run, "write_answers", interrupted)
    assert run("train", target, "--output", tmp_path / "head", "--minutes", 0.3) == 130
    said = capsys.readouterr().err
    assert "there is no head yet" in said
    assert f"{tmp_path / 'head.work'}, and the same command goes on" in said


@pytest.mark.parametrize(
    ("prompts", "advice"),
    [(["a"], r"give more prompts or more time \(--minutes\)"), ([], "chat with the model first")],
)
def test_too_few_texts_are_refused_with_what_would_give_more(
    target: Path, tmp_path: Path, prompts: list[str], advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target_run, "write_answers", lambda *arguments, **options: 0)
    folder = WorkFolder(tmp_path, read_source(target), TrainingOptions())
    stored = [] if prompts else [(np.arange(5, dtype=np.int32), np.arange(4, dtype=np.int32))]
    run = TargetRun(folder, LocalSource(path=target), print)
    run.write_texts(prompts, stored, nullcontext, 1.0, 0.0)  # type: ignore[arg-type]
    said = f"texts to train on: {len(stored)}, wanted 4 at least; {advice}"
    with pytest.raises(UsageError, match=rf"{said}$"):
        folder.require_enough(folder.read_texts().texts, prompts)
    folder.read_texts().add(7, np.array([1], np.int32), (2,))
    with pytest.raises(UsageError, match=rf"{said}, or give more room for hidden states \(--disk\)$"):
        folder.require_enough(folder.read_texts().texts[:-1], prompts)


@pytest.mark.parametrize("share", [1.0, 0.25, 0.0])
def test_held_out_answers_have_half_of_the_time_and_the_others_a_share_of_the_rest(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    limits, now = list[float](), iter([0.0, 5.0, 20.0])

    def answer(writer: None, prompts: list[str], texts: TextsFile, *, limit_s: float, **options: object) -> int:
        limits.append(limit_s)
        texts.add(-1 if "is_held_out" in options else 0, np.array([1], np.int32), (2,))
        return 0

    monkeypatch.setattr(target_run, "write_answers", answer)
    monkeypatch.setattr(target_run, "monotonic", lambda: next(now))
    folder = WorkFolder(tmp_path, read_source(target), TrainingOptions(minutes=1.0, held_out=("a",)))
    run = TargetRun(folder, LocalSource(path=target), print)
    assert run.write_texts(["b"], [], nullcontext, share, 0.0) == 19.0  # type: ignore[arg-type]
    assert limits == [12.0, *([19.0 * share] if share else [])]
    now, said = iter([0.0, 0.0, 9.0]), list[str]()
    assert replace(run, report=said.append).write_texts(["c", "d"], [], nullcontext, 1.0, 0.0) == 24.0  # type: ignore[arg-type]
    assert limits[-1] == 24.0
    assert said[0] == "the target answers 2 prompts, for at most 24 s", "and none that is held out, again"


def test_a_training_says_of_nothing_that_it_does_not_do(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(writer: None, prompts: list[str], texts: TextsFile, **options: object) -> int:
        texts.add(-1, np.array([1], np.int32), (2,))
        return 0

    said = list[str]()
    folder = WorkFolder(tmp_path, read_source(target), TrainingOptions(held_out=("a",)))
    run = TargetRun(folder, LocalSource(path=target), said.append)
    monkeypatch.setattr(target_run, "write_answers", answer)
    run.write_texts([], [], nullcontext, 1.0, 0.0)  # type: ignore[arg-type]
    assert [line.partition(",")[0] for line in said if "target answers" in line] == [
        "the target answers 1 held-out prompts"
    ]
    said.clear()
    monkeypatch.setattr(TargetRun, "_why_not_torch", "would need more")
    assert run._open_in_torch([]) is run._open_in_torch([]) is None
    assert said == ["PyTorch would need more: ONNX Runtime runs it, which takes longer"]


@pytest.mark.parametrize("can", [False, True])
def test_a_target_that_can_write_no_prompts_is_not_opened_to_write_some(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can: bool
) -> None:
    folder = WorkFolder(tmp_path, read_source(target), TrainingOptions(own_share=0.5, device="cpu"))
    texts, opened = folder.read_texts(), list[None]()
    for number in range(8):
        texts.add(number, np.array([number], np.int32), (2, 3))
    monkeypatch.setattr(TargetRun, "_can_write_prompts", can)
    monkeypatch.setattr(TargetRun, "_writes_in_step", False)
    monkeypatch.setattr(TargetRun, "_store_states", lambda *given: None)
    monkeypatch.setattr(TargetRun, "_open_target", Mock(side_effect=KeyboardInterrupt))
    monkeypatch.setattr(target_run, "open_engine_writer", lambda open_engine: nullcontext(opened.append(None)))
    monkeypatch.setattr(target_run, "write_answers", lambda *given, **options: 0)
    monkeypatch.setattr(TargetRun, "_open_in_torch", lambda *given: None)
    with suppress(KeyboardInterrupt):
        TargetRun(folder, LocalSource(path=target), print).run([*"abcd"], [], lambda: None)  # type: ignore[arg-type,return-value]
    assert len(opened) == can


def test_held_out_prompts_that_get_no_answer_are_refused_before_others_are_answered(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target_run, "write_answers", lambda *arguments, is_held_out, **options: 1)
    folder = WorkFolder(tmp_path, read_source(target), TrainingOptions(held_out=("a", "b")))
    run = TargetRun(folder, LocalSource(path=target), print)
    with pytest.raises(UsageError, match="answers to the 2 prompts of --held-out: 0, wanted 1 at least; give"):
        run.write_texts(["c"], [], nullcontext, 1.0, 0.0)  # type: ignore[arg-type]
    texts = folder.read_texts()
    for number in range(4):
        texts.add(number, np.array([number], np.int32), (2,))
    with pytest.raises(UsageError, match="prompts of --held-out: 0"):
        folder.require_enough(folder.read_texts().texts, ["c"])


def test_no_text_of_a_prompt_that_is_held_out_is_trained_on(target: Path, tmp_path: Path) -> None:
    folder = WorkFolder(tmp_path, read_source(target), TrainingOptions())
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, tiny.VOCAB, (300, 3)).astype(np.int32)
    greedy = [Text(np.append(prompt, np.int32(1)), 3) for prompt in prompts]
    sampled = [Text(np.append(prompt, np.int32(2)), 3) for prompt in prompts]
    held_out, trained = folder.split([*greedy, *sampled])
    assert len(held_out) + len(trained) == 600
    assert 30 <= len(held_out) <= 70
    assert len({each.prompt for each in held_out}) == len(held_out) / 2
    assert not {each.prompt for each in held_out} & {each.prompt for each in trained}
    assert [[text.prompt for text in found] for found in folder.split(greedy[:250])] == [
        [text.prompt for text in found if any(text is each for each in greedy[:250])]
        for found in (held_out, trained)
    ], "more texts change nothing"
    assert [len(found) for found in folder.split([greedy[1], sampled[1], greedy[2]])] in ([1, 2], [2, 1])
    aside = greedy[7]._replace(is_held_out=True)
    held_out, trained = folder.split([*greedy[:20], aside, *sampled[:20]])
    assert held_out == [aside]
    assert len(trained) == 38


def test_texts_of_held_out_prompts_alone_are_refused(target: Path, tmp_path: Path) -> None:
    folder = WorkFolder(tmp_path, read_source(target), TrainingOptions())
    texts = folder.read_texts()
    for number in range(5):
        texts.add(number, np.array([1, 2], np.int32), (number,))
    with pytest.raises(UsageError, match="texts to train on: 5, all of prompts that are held out, wanted 4 at"):
        folder.require_enough(folder.read_texts().texts, ["a"])


def test_empty_answers_alone_are_refused(target: Path, tmp_path: Path) -> None:
    folder = WorkFolder(tmp_path, read_source(target), TrainingOptions())
    texts = folder.read_texts()
    for number in range(30):
        texts.add(number, np.array([1, 2, number], np.int32), (7,) * (number % 2))
    with pytest.raises(UsageError, match="no answer to train on has two tokens"):
        folder.require_enough(folder.read_texts().texts, ["a"])
    texts.add(31, np.array([1, 2, 3], np.int32), (7, 8))
    texts.add(32, np.array([1, 2, 4], np.int32), (7, 8))
    folder.require_enough(folder.read_texts().texts, ["a"])


def test_prompts_of_a_corpus_that_are_held_out_are_left_out() -> None:
    said = list[str]()
    assert _leave_out(["a", "b", "c"], {"b", "d"}, said.append) == ["a", "c"]
    assert said == ["left out 1 prompts that are held out"]
    assert _leave_out([], {"b"}, said.append) == []
    with pytest.raises(UsageError, match="all prompts of --corpus are held out"):
        _leave_out(["b"], {"b"}, said.append)


def test_answers_that_were_stored_since_are_taken_beside_those_of_the_run_before(
    target: Path, tmp_path: Path
) -> None:
    folder = WorkFolder(tmp_path, read_source(target), TrainingOptions(own_share=0.5))
    run = TargetRun(folder, LocalSource(path=target), print)
    stored = [(np.array([i, 1], np.int32), np.array([i, 2], np.int32)) for i in range(4)]
    run.write_texts([], stored[1:3], nullcontext, 0.0, 0.0)  # type: ignore[arg-type]
    folder.read_texts().add(FIRST_OWN, np.array([7], np.int32), (8,))
    before = folder.read_texts().texts
    run.write_texts([], stored, nullcontext, 0.0, 0.0)  # type: ignore[arg-type]
    texts = folder.read_texts()
    assert [text.tokens.tolist() for text in texts.texts[:3]] == [text.tokens.tolist() for text in before]
    assert [text.tokens.tolist() for text in texts.texts[3:]] == [[0, 1, 0, 2], [3, 1, 3, 2]]
    assert texts.numbers == {0, 1, 2, 3, FIRST_OWN}


def test_prompts_without_an_answer_are_answered_though_the_target_wrote_many_texts_itself(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[list[str]]()

    def answer(writer: None, prompts: list[str], **options: object) -> int:
        asked.append(prompts)
        return 0

    monkeypatch.setattr(target_run, "write_answers", answer)
    folder = WorkFolder(tmp_path, read_source(target), TrainingOptions())
    run, texts = TargetRun(folder, LocalSource(path=target), print), folder.read_texts()
    for number in (0, 1, 2, *range(4, 9)):
        texts.add(number, np.array([number], np.int32), (2,))
    run.write_texts(["a", "b"], [], nullcontext, 0.5, 0.0)  # type: ignore[arg-type]
    assert asked == [["a", "b"]]
    folder.read_texts().add(3, np.array([3], np.int32), (2,))
    run.write_texts(["a", "b"], [], nullcontext, 0.5, 0.0)  # type: ignore[arg-type]
    assert len(asked) == 1


def test_a_folder_of_an_earlier_version_or_with_other_held_out_prompts_is_refused(
    target: Path, tmp_path: Path
) -> None:
    def take_up(**options: Any) -> None:
        kind = describe_run(read_source(target), TrainingOptions(**options), ["a"])
        with hold_work(tmp_path / "head.work", tmp_path / "head", kind):
            pass

    take_up(held_out=("b",))
    take_up(held_out=("b",))
    with pytest.raises(UsageError, match=r"of a training with other settings \(held-out prompts\); remove it"):
        take_up()
    run = tmp_path / "head.work" / "run.json"
    run.write_text(json.dumps({key: each for key, each in json.loads(run.read_text()).items() if key != "format"}))
    with pytest.raises(UsageError, match="is of another version of edgespec; remove it"):
        take_up(held_out=("b",))


def test_a_training_of_stored_answers_whose_other_prompts_were_held_out_does_not_go_on(
    target: Path, tmp_path: Path
) -> None:
    for prompts, is_refused in ((["a"], False), ([], True)):
        kind = describe_run(read_source(target), TrainingOptions(), prompts)
        work = tmp_path / f"{is_refused}.work"
        work.mkdir()
        (work / "run.json").write_text(json.dumps({**kind, "format": 2}))
        with ExitStack() as held:
            if is_refused:
                held.enter_context(pytest.raises(UsageError, match="is of another version of edgespec; remove it"))
            held.enter_context(hold_work(work, tmp_path / "head", kind))


def test_tokens_that_are_damaged_are_refused_in_words(tmp_path: Path) -> None:
    path = tmp_path / "tokens.i32"
    for content in (
        b"",
        np.array([1, 2], "<i4").tobytes() + b"x",
        *(np.array(each, "<i4").tobytes() for each in ([-1, 2], [2, 1], [1, 99])),
    ):
        path.write_bytes(content)
        with pytest.raises(ModelError, match="is damaged; remove"):
            stored_texts.read_tokens(path, 50)
    path.write_bytes(np.array([0, 7, 49], "<i4").tobytes())
    assert stored_texts.read_tokens(path, 50).tolist() == [0, 7, 49]


def test_a_damaged_target_of_the_work_folder_is_to_be_removed(target: Path, tmp_path: Path) -> None:
    folder = WorkFolder(tmp_path, read_source(target), TrainingOptions())
    run = TargetRun(folder, LocalSource(path=target), print)
    export_model(target, tmp_path / "target", hidden_layers=folder.layers)
    run._open_target()
    for name, content in (("model.onnx.data", b"short"), ("edgespec.json", b"{}")):
        (tmp_path / "target" / name).write_bytes(content)
        with pytest.raises((ModelError, IntegrityError)) as error:
            run._open_target()
        assert str(error.value).endswith(f"; remove {tmp_path / 'target'} and train again")
        assert "export" not in str(error.value)


@pytest.mark.slow
def test_a_head_is_trained_and_trained_further_and_exported(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a target that PyTorch does not run, so that ONNX Runtime makes its states too."""
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(target_run, "_WEIGHTS_SHARE", 0.0)
    monkeypatch.setattr("edgespec.training.train._LEAST_TRAINING_S", 2.0)
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("".join(f"prompt {number} of a few\n" for number in range(8)))
    command = ("train", target, "--corpus", corpus, "--output", tmp_path / "head", "--minutes", 0.3, "--json")
    command = (*command, "--draft-vocab", 120, "--no-offline")
    reports = []
    for _ in range(2):
        assert run(*command) == 0
        said = capsys.readouterr()
        reports.append(json.loads(said.out))
        assert "of memory for tiny.gguf: ONNX Runtime runs it" in said.err or reports[1:]
        pays = reports[-1]["gain"]["draft_length"] > 0
        assert (
            "use it with" if pays else "trains it further; to try it as it is"
        ) + ": edgespec export" in said.err
    first, second = reports
    for report in reports:  # an answer to a prompt greedily, and another sampled, as far as there was time
        assert 4 <= report["texts"] + report["held_out_texts"] <= 16
        assert report["held_out_texts"] >= 1
    assert first["answer_tokens"] <= second["answer_tokens"]
    assert second["trained_drafts"] > first["trained_drafts"] > 0
    assert second["training_s"] > first["training_s"]
    assert len(first["agreement"]) == 5
    assert second["gain"]["draft_cost"] > 0
    planned = plan_head(read_source(target), read_head(tmp_path / "head"), "fp32")
    assert planned.plan.tokens is not None
    assert len(planned.plan.tokens) == 120

    assert run(*command, "--disk", "4M", "--draft-vocab", 60) == 2
    assert "is of a training with other settings (draft_vocab_size)" in capsys.readouterr().err
    (tmp_path / "taken").mkdir()
    assert run("train", target, "--output", tmp_path / "taken") == 2
    assert "already exists" in capsys.readouterr().err
    assert run("train", target, "--from-answers", "--output", tmp_path / "other") == 2
    assert "no answers of" in capsys.readouterr().err
