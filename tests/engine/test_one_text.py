"""Deterministic mode is the default where it is proved, and --exact has plain decoding's text where it is not."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from row_proofs import FAILS

from edgespec import DeviceUnavailable, Engine, Message, SamplingParams, UsageError, load
from edgespec.cli.main import main
from edgespec.decoding.greedy import PlainChoices
from edgespec.setup import row_proof
from edgespec.setup.row_proof import RowProof

PROMPTS = ("the in the an on er in the", "in the an", "an er on the the")


@pytest.fixture
def model(tiny_drafter: Path, tmp_path: Path) -> Path:
    """In four bits, whose rows depend on the width of the pass; nothing is proved yet."""
    folder = Path(shutil.copytree(tiny_drafter, tmp_path / "model"))
    for name in ("row_proofs.json", "experience.json"):
        (folder / name).unlink(missing_ok=True)
    return folder


@pytest.fixture
def fails(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """A machine on which rows depend on the cut; holds a value for each proof that was made."""
    made: list[object] = []

    def prove(*arguments: Any, **options: Any) -> RowProof:
        made.append(arguments)
        return FAILS

    monkeypatch.setattr(row_proof, "prove_rows", prove)
    return made


def texts(engine: Engine, **options: Any) -> list[tuple[int, ...]]:
    return [engine.generate(prompt, max_tokens=60, **options).token_ids for prompt in PROMPTS]


@pytest.mark.slow
def test_by_default_text_and_seed_do_not_depend_on_drafts(model: Path) -> None:
    sampled = SamplingParams(temperature=0.8, seed=5)
    found = []
    for drafter in ("none", "auto", "ngram", "suffix"):
        with load(model, drafter=drafter, draft_length="auto" if drafter == "auto" else 3) as engine:
            assert engine.is_deterministic
            found.append([texts(engine), texts(engine, sampling=sampled), texts(engine)])
    assert found == [found[0]] * 4
    assert found[0][0] == found[0][2]


def test_proof_is_made_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with load(model, drafter="none") as engine:
        assert engine.is_deterministic
    (stored,) = json.loads((model / "row_proofs.json").read_text())["proofs"].values()
    assert stored["holds"]
    monkeypatch.setattr(row_proof, "prove_rows", None)
    for deterministic in (None, True):
        with load(model, drafter="none", deterministic=deterministic) as engine:
            assert engine.is_deterministic
    with load(model, drafter="none", deterministic=False) as engine:
        assert not engine.is_deterministic


def test_a_proof_counts_for_its_context_alone(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        lines: list[str] = []
        with load(model, drafter="none", context=16, report=lines.append) as engine:
            assert not engine.is_deterministic
        assert "(its context of 16 tokens is too short to compare cuts" in lines[-1]
        with load(model, drafter="none") as engine:
            assert engine.is_deterministic
        monkeypatch.setattr(row_proof, "prove_rows", None)


def test_where_the_proof_fails_the_mode_is_off_and_a_line_says_so(model: Path, fails: list[object]) -> None:
    for _ in range(2):
        lines: list[str] = []
        with load(model, drafter="ngram", report=lines.append) as engine:
            assert not engine.is_deterministic
        (line,) = [line for line in lines if "exact=True" in line]
        assert "can differ from that of plain decoding where two tokens are nearly tied" in line
    assert len(fails) == 1
    lines = []
    with load(model, drafter="ngram", deterministic=False, report=lines.append):
        assert not any("exact=True" in line for line in lines)


def test_where_the_proof_fails_asking_for_the_mode_is_refused(
    model: Path, fails: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(
        DeviceUnavailable, match=r"deterministic=True does not hold .* on 'cpu': 3 of 60 rows differ"
    ):
        load(model, deterministic=True)
    code = main(["chat", str(model), "--prompt", "the", "--max-tokens", "2", "--deterministic"])
    assert (code, "--exact gives the greedy text" in capsys.readouterr().err) == (4, True)


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 4, "auto"])
def test_exact_has_the_text_of_plain_decoding(model: Path, fails: list[object], length: int | str) -> None:
    with load(model, drafter="none", deterministic=False) as engine:
        plain = [engine.generate(prompt, max_tokens=60) for prompt in PROMPTS]
    with load(model, drafter="ngram", draft_length=length, exact=True) as engine:
        assert not engine.is_deterministic
        answers = [engine.generate(prompt, max_tokens=60) for prompt in PROMPTS]
    assert [each.token_ids for each in answers] == [each.token_ids for each in plain]
    if length == 4:
        assert sum(each.stats.num_redecided for each in answers) > 0
        assert all(each.stats.num_reruns <= len(each.token_ids) for each in answers)


@pytest.mark.parametrize("options", [{}, {"exact": True, "deterministic": False}], ids=["deterministic", "exact"])
def test_a_second_turn_is_the_same_fresh_and_continued(model: Path, options: dict[str, Any]) -> None:
    with load(model, drafter="ngram", draft_length=3, **options) as engine:
        first = engine.generate("the in the an", max_tokens=40)
        turns = [Message("user", "the in the an"), Message("assistant", first.text), Message("user", "on the")]
        continued = engine.generate(turns, max_tokens=40)
    with load(model, drafter="ngram", draft_length=3, **options) as engine:
        assert engine.generate(turns, max_tokens=40).token_ids == continued.token_ids


def test_exact_is_refused_for_what_it_does_not_cover(model: Path, fails: list[object]) -> None:
    with load(model, drafter="none", exact=True) as engine, pytest.raises(UsageError, match="exact covers greedy"):
        engine.generate("the", sampling=SamplingParams(temperature=0.5))
    with pytest.raises(UsageError, match="lookahead runs the target's other graph"):
        load(model, drafter="lookahead", exact=True)


def test_exact_has_nothing_to_do_where_the_mode_holds(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PlainChoices, "run", None)
    with load(model, drafter="ngram", exact=True) as engine:
        assert engine.is_deterministic
        assert engine.generate("the in", sampling=SamplingParams(temperature=0.5), max_tokens=5).token_ids
