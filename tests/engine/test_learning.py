"""A head learns from answers while none is made; no text changes, and nothing that goes wrong ends an answer."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_heads

from edgespec import Engine, load
from edgespec.cli.main import main
from edgespec.draft import verified_rows
from edgespec.engine import idle_learner
from edgespec.engine.idle_learner import IdleLearner
from edgespec.errors import UsageError
from edgespec.setup import resolve
from edgespec.setup.learned_file import LearnedFile
from edgespec.setup.pair import write_pair
from edgespec.system.cancel import Flag

PROMPTS = ("the in the an on er in the", "in the an", "an er on the the", "on on in", "er the an in the on")
LENGTH = 40


@pytest.fixture(scope="module")
def pair(tiny_with_states: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and a head that knows nothing of it."""
    folder = tmp_path_factory.mktemp("learning") / "pair"
    shutil.copytree(tiny_with_states, folder / "target")
    tiny_heads.write_recurrent(folder / "drafter", tiny_with_states, tiny_heads.recurrent_weights(1), name="eagle")
    write_pair(folder)
    return folder


@pytest.fixture(scope="module")
def plain(pair: Path) -> list[tuple[int, ...]]:
    with load(pair / "target", drafter="none", deterministic=True) as engine:
        return [engine.generate(prompt, max_tokens=LENGTH).token_ids for prompt in PROMPTS]


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle_learner, "_FEWEST_NEW", 100)
    monkeypatch.setattr(verified_rows, "_RATE", 1.0)
    monkeypatch.setattr(verified_rows, "_NUM_EPOCHS", 8)


def learning(pair: Path, tmp_path: Path, **options: Any) -> Callable[..., Engine]:
    """Opens a copy of the pair whose head learns; each time the same copy."""
    copy = tmp_path / "pair"
    if not copy.exists():
        shutil.copytree(pair, copy)
    chosen: dict[str, Any] = {"drafter": str(copy), "draft_length": 3, "deterministic": True, "learn": "mail"}
    return lambda **more: load(copy, **{**chosen, **options, **more})


def learner_of(engine: Engine) -> IdleLearner:
    assert engine._drafting.learner is not None
    return engine._drafting.learner


def answer_all(engine: Engine) -> tuple[list[tuple[int, ...]], float]:
    """Answers with a rest behind each, and the share of drafted tokens that were accepted."""
    found, drafted, accepted = [], 0, 0
    for prompt in PROMPTS:
        answer = engine.generate(prompt, max_tokens=LENGTH)
        found.append(answer.token_ids)
        drafted, accepted = drafted + answer.stats.num_drafted, accepted + answer.stats.num_accepted
        learner_of(engine).wait()
    return found, accepted / drafted


@pytest.mark.parametrize("schedule", ["serial", pytest.param("pipelined", marks=pytest.mark.slow)])
def test_a_head_that_knows_nothing_learns_to_draft_and_the_text_stays(
    pair: Path, plain: list[tuple[int, ...]], tmp_path: Path, schedule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    opened = learning(pair, tmp_path, schedule=schedule)
    with opened() as engine:
        first, before = answer_all(engine)
        for _ in range(2):
            assert answer_all(engine)[0] == first == plain
        learned = learner_of(engine).learner.learned
        assert learned is not None
        assert learned.active is not None
        assert learned.tally.num_used > learned.tally.num_plain
    with opened() as engine:
        again, after = answer_all(engine)
    assert again == plain
    assert after > before + 0.1
    capsys.readouterr()
    assert main(["models", "learned", str(tmp_path / "pair"), "--json"]) == 0
    (listed,) = json.loads(capsys.readouterr().out)
    assert (listed["name"], listed["is_on_trial"], listed["problem"]) == ("mail", listed["is_on_trial"], None)
    assert listed["right_with"] > listed["right_without"]
    assert main(["models", "forget", str(tmp_path / "pair"), "other"]) == 2
    assert "it has learned: mail" in capsys.readouterr().err
    assert main(["models", "forget", str(tmp_path / "pair"), "mail"]) == 0
    assert not (tmp_path / "pair" / "drafter" / "learned").exists()
    with opened() as engine:
        assert learner_of(engine).learner.learned is None


def test_a_pair_outside_of_the_home_is_to_be_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path))
    assert main(["models", "learned"]) == 0
    said = capsys.readouterr().out
    assert str(tmp_path) in said.replace("\n", "")
    assert "edgespec models learned PAIR" in said.replace("\n", " ")


def test_rows_of_one_answer_are_kept_though_the_program_ends_with_it(pair: Path, tmp_path: Path) -> None:
    opened = learning(pair, tmp_path)
    for num_answers in (1, 2):
        with opened() as engine:
            engine.generate(PROMPTS[0], max_tokens=LENGTH)
        learned = LearnedFile(tmp_path / "pair" / "drafter", "mail").read(pytest.fail)
        assert learned is not None
        assert len(learned.rows) == learned.tally.num_rows
        assert num_answers * (LENGTH - 1) <= len(learned.rows) <= num_answers * LENGTH


def test_the_next_answer_ends_what_is_being_learned(
    pair: Path, plain: list[tuple[int, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every reading of rows is cancelled just as it begins, and no answer changes or waits."""
    flags: list[Flag] = []
    read = idle_learner.HeadLearner.read

    def noting(self: Any, log: Any, cancel: Flag) -> None:
        flags.append(cancel)
        read(self, log, cancel)

    monkeypatch.setattr(idle_learner.HeadLearner, "read", noting)
    with learning(pair, tmp_path)() as engine:
        learner = learner_of(engine)
        found = [engine.generate(prompt, max_tokens=LENGTH).token_ids for prompt in PROMPTS]
        with learner.answering():
            assert all(flag.is_set() for flag in flags)
        assert found == plain


def test_a_file_that_cannot_be_used_is_reported_and_replaced(pair: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    opened = learning(pair, tmp_path, report=lines.append)
    file = LearnedFile(tmp_path / "pair" / "drafter", "mail")
    file.path.parent.mkdir()
    file.path.write_bytes(b"nothing that numpy writes")
    with opened() as engine:
        engine.generate(PROMPTS[0], max_tokens=LENGTH)
    assert [line for line in lines if "learning starts again" in line] == [
        f"{file.path} cannot be used (it is damaged); learning starts again from nothing"
    ]
    assert file.read(pytest.fail) is not None


def test_an_error_of_learning_ends_learning_alone(
    pair: Path, plain: list[tuple[int, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []

    def fail(*arguments: Any) -> None:
        raise np.linalg.LinAlgError("no luck")

    with learning(pair, tmp_path, report=lines.append)() as engine:
        monkeypatch.setattr(idle_learner.HeadLearner, "read", fail)
        assert answer_all(engine)[0] == plain
    assert [line for line in lines if "nothing more is learned" in line] == [
        "nothing more is learned in this session: LinAlgError: no luck"
    ]


def test_what_cannot_learn_is_said(pair: Path, tiny_model: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    for drafter in (None, "none", "suffix+ngram"):
        with pytest.raises(UsageError, match="learn is 'mail', and a drafting head learns, but drafter is '"):
            load(tiny_model, drafter=drafter, learn="mail")
    with load(tiny_model, learn="mail", report=lines.append) as engine:
        assert engine._drafting.learner is None
    assert "nothing is learned for mail: no drafting head drafts here; edgespec train makes one" in lines
    with pytest.raises(UsageError, match="learn changes what a head drafts"):
        learning(pair, tmp_path)(acceptance="rejection")
    with pytest.raises(UsageError, match="cannot be a name to learn under"):
        learning(pair, tmp_path)(learn="../mail")


@pytest.mark.slow
def test_of_two_sessions_one_learns_and_no_row_is_lost(
    pair: Path, plain: list[tuple[int, ...]], tmp_path: Path
) -> None:
    lines: list[str] = []
    opened = learning(pair, tmp_path, report=lines.append)
    file = LearnedFile(tmp_path / "pair" / "drafter", "mail")
    with opened() as engine:
        answer_all(engine)
    stored = file.read(pytest.fail)
    assert stored is not None
    lines.clear()
    with opened() as first:
        with opened() as second:
            assert lines == [
                f"nothing is learned for mail here: its file is held by process {os.getpid()}, which learns for "
                "it; the head drafts with what is stored"
            ]
            learned = learner_of(second).learner.learned
            assert learned is not None
            assert learned.tally == stored.tally
            assert answer_all(first)[0] == answer_all(second)[0] == plain
            assert main(["models", "forget", str(tmp_path / "pair")]) == 1
        with opened(learn="code") as other:
            assert len(lines) == 1
            other.generate(PROMPTS[0], max_tokens=LENGTH)
    found = file.read(pytest.fail)
    assert found is not None
    num_rows = len(PROMPTS) * (LENGTH - 1)
    assert found.tally.num_rows >= stored.tally.num_rows + num_rows
    assert not [*(tmp_path / "pair" / "drafter").glob("*.lock")]
    with opened() as again:
        again.generate(PROMPTS[0], max_tokens=LENGTH)
    assert len(lines) == 1
    after = file.read(pytest.fail)
    assert after is not None
    assert after.tally.num_rows > found.tally.num_rows


def test_a_session_that_fails_to_open_lets_the_next_one_learn(
    pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, lines = learning(pair, tmp_path), list[str]()

    def fail(*arguments: Any) -> None:
        raise UsageError("no luck")

    with monkeypatch.context() as patched:
        patched.setattr("edgespec.engine.load._loaded", fail)
        with pytest.raises(UsageError, match="no luck") as kept:  # with all that its frames hold
            opened()
    with opened(report=lines.append):
        assert lines == []
    assert kept.type is UsageError


def test_of_a_head_that_its_check_keeps_from_drafting_it_is_said_how_it_drafts(
    pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(resolve, "_pays", lambda *arguments, **options: False)
    with learning(pair, tmp_path, report=lines.append, drafter="auto")() as engine:
        assert engine._drafting.learner is None
    assert [line for line in lines if "learned" in line] == [
        f"nothing is learned for mail: eagle does not draft here; drafter='{tmp_path / 'pair'}' lets it draft all "
        "the same"
    ]
    with learning(pair, tmp_path)() as engine:
        learner_of(engine)
