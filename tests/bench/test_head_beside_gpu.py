"""Drafters beside a replayed target in virtual time: one text, nothing known before its time, and bounds."""

import json
import shutil
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import head_beside_gpu
import numpy as np
import pytest
import tiny
import tiny_heads
from double import Double
from head_beside_gpu import Pair, Place, decode_all
from paced_pair import RecordedAnswer, ReplayedTarget, acceptance_by_position, drafted_right, least_steps

from edgespec import load
from edgespec.decoding.decoder import Pass, Rows
from edgespec.setup.pair import write_pair
from edgespec.simulation.machines import Machine
from edgespec.system.clock import VirtualClock
from edgespec.types import Logits, TokenIds, append

pytestmark = pytest.mark.slow  # exports and opens models

PROMPTS = ("the in the an on er in the", "an er on the the")
FLAT = (1.0, 1.03)
FEW = ("--rows", "a100", "--places", "cpu")


@pytest.fixture(scope="module")
def pair(tiny_with_states: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair whose head knows the target's answers to some prompts."""
    folder = tmp_path_factory.mktemp("pair") / "pair"
    with load(tiny_with_states, drafter="none") as engine:
        texts = [
            append(engine.encode(prompt), engine.generate(prompt, max_tokens=40).token_ids) for prompt in PROMPTS
        ]
    shutil.copytree(tiny_with_states, folder / "target")
    weights = tiny_heads.fit_recurrent(tiny.random_weights(), tiny_heads.recurrent_weights(1), texts)
    tiny_heads.write_recurrent(folder / "drafter", tiny_with_states, weights, name="eagle")
    write_pair(folder)
    return folder


@pytest.fixture(scope="module")
def answers(pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target's answers, which the first run writes."""
    folder = tmp_path_factory.mktemp("answers")
    lines = [json.dumps({"category": "ab"[i % 2], "turns": [text]}) for i, text in enumerate(PROMPTS)]
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    file = folder / "answers.jsonl"
    assert run(pair, file, "--prompts", folder / "prompts.jsonl", "--tokens", "20", *FEW) == 0
    return file


def run(*arguments: object) -> int:
    return head_beside_gpu.main([*(str(each) for each in arguments), "--threads", "1"])


def test_each_schedule_gives_the_text_of_the_target_within_the_bounds(
    pair: Path, answers: Path, tmp_path: Path
) -> None:
    assert run(pair, answers, "--json", tmp_path / "found.json") == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["drafter"] == "eagle"
    assert found["by_position"][0] > 0.3
    rows = found["rows"]
    assert len(rows) == 2 * 2 * 4
    for row in rows:
        assert row["num_equal"] == row["num_answers"] == len(PROMPTS)
        assert row["tokens_per_second"] == pytest.approx(row["over_plain"] * 1000 / 30)
        assert row["free_bound"] >= 1
    assert all(row["over_plain"] <= row["free_bound"] + 1e-9 for row in rows if row["schedule"] == "serial")
    assert any(row["tokens_per_pass"] > 1.3 for row in rows)


def test_a_run_repeats_to_the_bit(pair: Path, answers: Path, tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("one", "other")]
    for file in files:
        assert run(pair, answers, *FEW, "--text", "--json", file) == 0
    assert files[0].read_text() == files[1].read_text()


def test_a_model_that_drafts_for_itself_is_always_right(
    pair: Path, answers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--rows", "flat", "--places", "cpu", "--steps", "cpu=0.02", "--json", tmp_path / "found")
    assert run(pair, answers, "--drafter", pair / "target", *options) == 0
    found = json.loads((tmp_path / "found").read_text())
    assert found["by_position"] == [1.0] * head_beside_gpu.LONGEST
    assert all(row["tokens_per_pass"] > 2 for row in found["rows"])
    assert found["rows"][0]["free_bound"] > 7


def test_a_cascade_repeats_and_is_as_right_as_its_model(pair: Path, answers: Path, tmp_path: Path) -> None:
    files, drafters = [tmp_path / str(i) for i in range(3)], ("", ",suffix", ",suffix")
    for file, text in zip(files, drafters, strict=True):
        assert run(pair, answers, *FEW, "--drafter", f"{pair / 'target'}{text}", "--json", file) == 0
    alone, cascade, again = (json.loads(file.read_text()) for file in files)
    assert cascade == again
    assert cascade["by_position"] == alone["by_position"]
    assert cascade["rows"] != alone["rows"]
    assert all(row["num_equal"] == len(PROMPTS) for row in cascade["rows"])


def test_answers_of_another_model_are_refused(
    pair: Path, answers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [json.loads(line) for line in answers.read_text().splitlines()]
    strange = [{**line, "answer": [(token + 1) % tiny.VOCAB for token in line["answer"]]} for line in lines]
    (tmp_path / "strange").write_text("\n".join(map(json.dumps, strange)))
    assert run(pair, tmp_path / "strange") == 2
    assert "name another file, which is then written" in capsys.readouterr().err
    assert run(pair / "target", answers, "--drafter", "suffix") == 2
    assert "is no drafter model" in capsys.readouterr().err
    assert run(pair, answers, "--drafter", f"{pair / 'target'},{pair / 'target'}") == 2
    assert "a cascade of 2 models" in capsys.readouterr().err


def test_the_fastest_passes_are_those_of_a_search_through_all() -> None:
    def ratio(num_draft: int) -> float:
        return 1 + 0.3 * num_draft

    rng = np.random.default_rng(0)
    for _ in range(20):
        num_right = [min(int(rng.integers(0, 5)), 8 - place) for place in range(9)]

        @cache
        def least(place: int, num_right: tuple[int, ...] = tuple(num_right)) -> float:
            if place == len(num_right):
                return 0.0
            return min(ratio(n) + least(place + n + 1) for n in range(num_right[place] + 1))

        assert least_steps(num_right, ratio) == pytest.approx(least(0))
    assert least_steps([0] * 9, ratio) == 9


class Guesser(Double):
    """A drafter that knows a text, but for every so-manieth token, and notes when it is asked."""

    def __init__(self, target: "CountingTarget", text: TokenIds, wrong_every: int) -> None:
        self.vocab_size, self.context_length, self.num_fed = target.vocab_size, target.context_length, 0
        self._target, self._text, self._wrong_every = target, text, wrong_every
        self.asked: list[tuple[float, int]] = []  # when, and how many passes of the target had ended
        self.now: Callable[[], float] = lambda: 0.0

    def logits(self, tokens: TokenIds, num_last: int) -> Logits:
        assert num_last == 1
        self.num_fed += 1
        self.asked.append((self.now(), len(self._target.ends_s)))
        place = min(len(tokens), len(self._text) - 1)
        row = np.zeros((1, self.vocab_size), np.float32)
        row[0, (self._text[place] + (place % self._wrong_every == 0)) % self.vocab_size] = 9.0
        return row


class CountingTarget(ReplayedTarget):
    """A target that notes when its passes end."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.ends_s: list[float] = []
        self.now: Callable[[], float] = lambda: 0.0

    def run(self, given: Pass) -> Rows:
        self.ends_s.append(self.now())
        return super().run(given)


def decoded(
    monkeypatch: pytest.MonkeyPatch, place: str, step: float, wrong_every: int
) -> tuple[Guesser, CountingTarget, VirtualClock, Machine]:
    """A pipelined answer of 200 tokens."""
    text = np.random.default_rng(0).integers(0, 50, 210).astype(np.int32)
    target = CountingTarget(50, 400)
    guesser = Guesser(target, text, wrong_every)
    clocks: list[VirtualClock] = []

    def clock() -> VirtualClock:
        clocks.append(VirtualClock())
        target.now, guesser.now = clocks[0], clocks[-1]
        return clocks[-1]

    monkeypatch.setattr(head_beside_gpu, "VirtualClock", clock)
    machine = Machine(target_s=1.0, draft_s=step, ratios=FLAT)
    answer = RecordedAnswer("a", text, 10)
    pair = Pair("guesser", target, [answer], [], guesser, None)
    (found,) = decode_all(pair, Place("flat", place, machine), "pipelined")
    assert found.is_equal
    return guesser, target, clocks[0], machine


def test_a_drafter_knows_nothing_of_a_pass_before_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    guesser, target, _, _ = decoded(monkeypatch, "cpu", 0.3, 5)
    ends = np.array(target.ends_s)
    assert len(guesser.asked) > 50
    for asked_s, num_known in guesser.asked:
        assert (ends < asked_s - 1e-9).sum() <= num_known <= (ends <= asked_s + 1e-9).sum()


def test_a_shared_device_does_no_more_than_one_device_can(monkeypatch: pytest.MonkeyPatch) -> None:
    work: dict[str, float] = {}
    for place in ("cpu", "gpu"):
        guesser, target, clock, machine = decoded(monkeypatch, place, 0.3, 1000)
        work[place] = (len(target.ends_s) * machine.target_s + len(guesser.asked) * machine.draft_s) / clock.now
    assert work["cpu"] > 1.1
    assert work["gpu"] < 1.01


def test_acceptance_by_position_is_that_of_the_guesses() -> None:
    text = np.random.default_rng(1).integers(0, 50, 110).astype(np.int32)
    target, answer = ReplayedTarget(50, 400), RecordedAnswer("a", text, 10)

    def guess(tokens: TokenIds, num_tokens: int) -> Sequence[int]:
        """Right but for the third token of each draft."""
        found: list[Any] = text[len(tokens) : len(tokens) + num_tokens].tolist()
        return [token + (place == 2) for place, token in enumerate(found)]

    right = drafted_right(target, answer, guess, 6)
    assert len(right) == answer.num_answered - 1
    assert right[:3] == [2, 2, 2]
    assert right[-3:] == [2, 1, 0]
    assert acceptance_by_position([right], 6) == [1.0, 1.0, 0.0]
