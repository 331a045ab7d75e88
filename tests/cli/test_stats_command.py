"""edgespec stats: what answers of the commands have counted."""

import io
import json
import shutil
import sys
from datetime import date, timedelta
from pathlib import Path

import pytest

from edgespec import Usage, UsageFile, UsageKey, load
from edgespec.cli.main import main
from edgespec.draft.costs import Gain


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main([*map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_stats_count_the_answers_of_a_chat_and_no_text(
    capsys: pytest.CaptureFixture[str], tiny_model: Path, home: Path
) -> None:
    asked = ["chat", tiny_model, "--prompt", "the in the an", "--max-tokens", 7, "--drafter", "none", "--json"]
    assert "nothing was counted yet; answers of chat and serve are" in (none := run(capsys, "stats"))
    assert "usage=True" in none
    run(capsys, *asked, "--no-usage")
    run(capsys, *asked, "--no-history")
    assert not (home / "usage.json").exists()
    answer = json.loads(run(capsys, *asked))
    document = json.loads(run(capsys, "stats", "--json"))
    assert (document["total"]["answers"], document["total"]["tokens"]) == (1, len(answer["token_ids"]))
    (row,) = document["counts"]
    assert (row["model"], row["device"], row["day"]) == ("tiny", "cpu", str(date.today()))
    assert "the in" not in (home / "usage.json").read_text()
    assert "7 tokens in 1 answer since" in run(capsys, "stats")
    run(capsys, "stats", "--delete")
    assert not (home / "usage.json").exists()


def test_an_engine_counts_where_its_program_asks_for_it(tiny_model: Path, home: Path) -> None:
    for usage in (False, True):
        with load(tiny_model, drafter="none", usage=usage) as engine:
            engine.generate("the", max_tokens=3)
            engine.plain().generate("the", max_tokens=3)  # to compare with
        assert (home / "usage.json").exists() == usage
    assert [each.answers for each in UsageFile(home).read().values()] == [1]


def test_an_answer_that_repeats_itself_does_not_judge_drafting(
    tiny_model: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgespec.engine.answers.Tally.gain", lambda tally, costs: Gain(3.0))
    monkeypatch.setattr("edgespec.decoding.repetition._LIMITS", ((1, 8, 64),))
    monkeypatch.setattr("edgespec.engine.generation.SHORTEST_LOOP", 64)
    with load(tiny_model, drafter="ngram", draft_length=2, usage=True) as engine:
        found = [engine.generate("the", max_tokens=length, logit_bias={5: 100}).stats.gain for length in (20, 80)]
    (counted,) = UsageFile(home).read().values()
    assert (found, counted.answers, counted.measured) == ([Gain(3.0), None], 2, 1)


def test_stats_are_told_by_model_device_and_day(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    def key(days: int, model: str, device: str) -> UsageKey:
        return UsageKey(str(date.today() - timedelta(days)), model, device)

    UsageFile(home).add(
        {
            key(0, "small", "cpu"): Usage(2, 2, 1000, 250, 100.0, 200.0),
            key(6, "big", "cuda"): Usage(3, 0, 500, 0, 0.0, 0.0),
            key(7, "big", "cpu"): Usage(1, 1, 100, 10, 10.0, -2.0),
        },
        date.today(),
    )
    lines = run(capsys, "stats", "--since", "7d").splitlines()
    assert lines[0].startswith("1,500 tokens in 5 answers since ")
    assert lines[0].endswith("17% of them drafted correctly")
    assert lines[1] == "drafting saved about 3 min 20 s of 5 min 0 s (measured in 2 of the answers)"
    assert "big    3        500     0%         not measured" in lines
    assert "cpu     2        1,000   25%        3 min 20 s" in lines
    assert json.loads(run(capsys, "stats", "--since", "1w", "--json"))["total"]["answers"] == 5
    assert json.loads(run(capsys, "stats", "--json"))["total"]["answers"] == 6


def test_a_renamed_model_is_one_in_the_stats(
    capsys: pytest.CaptureFixture[str], home: Path, tiny_model: Path
) -> None:
    shutil.copytree(tiny_model, home / "models" / "tiny")
    for name in ("tiny", "small"):
        UsageFile(home).add({UsageKey(str(date.today()), name, "cpu"): Usage(1, 0, 10)}, date.today())
        if name == "tiny":
            run(capsys, "models", "rename", "tiny", "small")
    assert [(row["model"], row["answers"]) for row in json.loads(run(capsys, "stats", "--json"))["counts"]] == [
        ("small", 2)
    ]


def test_a_loss_of_less_than_is_shown_is_none(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    key = UsageKey(str(date.today()), "small", "cpu")
    UsageFile(home).add({key: Usage(2, 2, 1000, 250, 9.0, -0.04)}, date.today())
    shown = run(capsys, "stats")
    assert "drafting saved about 0.0 s of 9.0 s" in shown
    assert "-0.0" not in shown


@pytest.mark.parametrize("since", ["7", "d", "2026-13-01", "99999d0", "soon"])
def test_a_day_that_is_none_is_refused(capsys: pytest.CaptureFixture[str], since: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["stats", "--since", since])
    assert f"'{since}' is not a day; wanted 7d" in capsys.readouterr().err


@pytest.mark.parametrize("since", ["0d", "0w", "2999-01-01"])
def test_a_period_that_has_not_begun_is_refused(capsys: pytest.CaptureFixture[str], since: str) -> None:
    with pytest.raises(SystemExit):
        main(["stats", "--since", since])
    assert f"'{since}' begins after today; today alone is 1d" in capsys.readouterr().err
