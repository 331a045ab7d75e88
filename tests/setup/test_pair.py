"""Pairs of a target and a drafter: comparing, judging, writing, loading."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_heads

from edgespec import load
from edgespec.cli.main import main
from edgespec.engine.pair_check import best_gain, check_pair, judge
from edgespec.engine.pair_export import PairHalf, export_pair, usual_added_precision
from edgespec.errors import DiskFull, MemoryExhausted, VocabularyMismatch
from edgespec.export.convert import export_model
from edgespec.export.options import ExportOptions
from edgespec.export.output import RESERVE_BYTES
from edgespec.export.plan import plan_model
from edgespec.manifest import read_manifest
from edgespec.memory.free_memory import free_memory, machine_reserve
from edgespec.setup.pair import DRAFTER, FILE_NAME, TARGET, PairCheck, read_pair, write_pair
from edgespec.setup.snapshot import LocalSource
from edgespec.text.tokenizer import Tokenizer, have_same_tokens

pytestmark = pytest.mark.slow  # a module of many models or processes


@pytest.fixture(scope="module")
def pair(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairs") / "pair"
    assert export_pair(half(TARGET, tiny_gguf, "fp32"), half(DRAFTER, tiny_gguf, "int4"), folder) is not None
    return folder


def half(part: str, source: Path, precision: str = "source") -> PairHalf:
    return PairHalf(part=part, source=LocalSource(path=source), precision=precision)


def check_of(folder: Path) -> PairCheck:
    """The check on the CPU."""
    pair = read_pair(folder)
    assert pair is not None
    check = pair.check_on(("cpu", "cpu"), (folder / TARGET, folder / DRAFTER))
    assert check is not None
    return check


def rewrite(folder: Path, **changes: Any) -> None:
    """Change what the check on the CPU says."""
    pair = read_pair(folder)
    assert pair is not None
    (placed,) = pair.checks
    write_pair(folder, [replace(placed, check=replace(placed.check, **changes))])


def test_a_model_keeps_all_of_its_own_drafts(tiny_model: Path) -> None:
    check = check_pair(str(tiny_model), str(tiny_model))
    assert (check.greedy_acceptance, check.sampled_acceptance) == (pytest.approx(1, abs=0.05),) * 2
    assert check.same_special_tokens
    assert check.same_chat_template
    assert check.pays == (check.expected_gain >= 1.05)
    assert check.in_words().startswith(f"{check.verdict}: {check.reason}\n")


@pytest.mark.parametrize(
    ("gains", "begins"),
    [
        ((1.2, 1.4, 1.5), "use this drafter: the target is about 1.40 times as fast with it: 70% of its tokens"),
        ((0.9, 1.1, 1.3), "cannot say whether to use this drafter: the target is 0.90 to 1.30 times as fast"),
        ((0.7, 0.8, 1.0), "do not use this drafter: 70% of its tokens are accepted, but drafting one costs 30%"),
    ],
)
def test_a_check_begins_with_what_to_do(gains: tuple[float, float, float], begins: str) -> None:
    assert ": ".join(judge(0.7, gains, 0.3, is_head=False)).startswith(begins)


def test_a_head_has_its_targets_template_and_is_advised_as_a_head(tiny_with_states: Path, tmp_path: Path) -> None:
    head = tmp_path / "head"
    tiny_heads.write_recurrent(head, tiny_with_states, tiny_heads.recurrent_weights(1), name="eagle")
    check = check_pair(str(tiny_with_states), str(head))
    assert check.same_chat_template
    assert not check.pays
    assert "more likely to pay: a head " in check.reason


def test_a_drafter_that_there_is_no_memory_for_is_not_judged(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it every pair would seem not to pay, and that would be stored."""
    least = free_memory()._replace(free_bytes=260 << 20, reserve=machine_reserve(16 << 30))
    monkeypatch.setattr("edgespec.setup.wish.free_memory", lambda limit_bytes=None: least)
    with pytest.raises(MemoryExhausted, match=r"tiny.* cannot be measured: there was no memory to open it beside"):
        check_pair(str(tiny_model), str(tiny_model))


def test_best_gain_follows_acceptance_and_costs() -> None:
    assert best_gain([0.9] * 8, {0: 1.0, 1: 1.0, 4: 1.0}) == (pytest.approx(sum(0.9**i for i in range(9))), 8)
    assert best_gain([0.5] * 8, {0: 1.0, 1: 2.0, 4: 5.0}) == (1.0, 0)
    assert best_gain([0.6, 0.3], {0: 1.0, 1: 1.2, 4: 3.0}) == (pytest.approx(1.6 / 1.2), 1)


def test_a_round_measured_as_cheaper_than_plain_promises_no_gain_where_nothing_is_accepted() -> None:
    assert best_gain([0.0] * 8, {0: 1.0, 1: 0.9, 4: 0.55}) == (1.0, 0)


def test_the_gain_is_that_of_a_draft_which_the_drafter_can_give() -> None:
    assert best_gain([0.9] * 8, {0: 1.0, 4: 1.0}, longest=3) == (pytest.approx(3.439), 3)
    gain, num_draft = best_gain([0.7] * 8, {0: 1.0, 4: 2.2})
    assert gain == pytest.approx(sum(0.7**i for i in range(num_draft + 1)) / (1 + num_draft * 0.3))


def test_pair_folder_drafts_with_its_drafter_where_that_pays(pair: Path) -> None:
    for pays, drafter in ((True, "suffix+tiny"), (False, "suffix")):
        rewrite(pair, pays=pays)
        lines: list[str] = []
        with load(pair, report=lines.append) as engine:
            assert engine.speculation.name.replace("lookahead+", "").replace("+lookahead", "") == drafter
            assert engine.generate("the", max_tokens=5).text
        assert bool(lines) != pays
    with load(pair, drafter="none") as engine:
        assert engine.speculation.name == "none"


def test_check_of_other_models_does_not_count(pair: Path, tiny_gguf: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(pair, tmp_path / "pair"))
    rewrite(folder, pays=True)
    shutil.rmtree(folder / "drafter")
    export_model(tiny_gguf, folder / "drafter", precision="int8")
    lines: list[str] = []
    with load(folder, report=lines.append) as engine:
        assert "drafter" in engine.speculation.name
    assert "this pair as it is was not measured on cpu" in lines[0]


def test_other_tokens_are_told_apart_and_missing_ones_are_not(tiny_model: Path, tmp_path: Path) -> None:
    document = json.loads((tiny_model / "tokenizer.json").read_text())
    last = max(document["model"]["vocab"], key=document["model"]["vocab"].get)
    document["model"]["merges"] = []
    number = document["model"]["vocab"].pop(last)
    (tmp_path / "short.json").write_text(json.dumps(document))
    document["model"]["vocab"]["other"] = number
    (tmp_path / "other.json").write_text(json.dumps(document))
    whole, short, other = (
        Tokenizer(path)
        for path in (tiny_model / "tokenizer.json", tmp_path / "short.json", tmp_path / "other.json")
    )
    assert have_same_tokens(whole, short)
    assert have_same_tokens(short, whole)
    assert not have_same_tokens(whole, other)


def test_pair_that_cannot_be_made_leaves_nothing(tiny_gguf: Path, tmp_path: Path) -> None:
    tiny.write_gguf(tmp_path / "other.gguf", tiny.random_weights(), override=tiny.FOREIGN)
    said: list[str] = []
    with pytest.raises(VocabularyMismatch):
        export_pair(
            half(TARGET, tiny_gguf), half(DRAFTER, tmp_path / "other.gguf"), tmp_path / "pair", report=said.append
        )
    assert said == []  # before any work
    arguments = ["export", str(tiny_gguf), "--drafter", str(tmp_path / "other.gguf"), "--dry-run"]
    assert main([*arguments, "--output", str(tmp_path / "pair")]) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["other.gguf"]


@pytest.mark.slow
def test_pair_of_two_vocabularies_is_judged_as_such(tiny_model: Path, tmp_path: Path) -> None:
    tiny.write_gguf(tmp_path / "a.gguf", tiny.random_weights(), override={"tokenizer.ggml.tokens": tiny.SWAPPED})
    export_model(tmp_path / "a.gguf", tmp_path / "other", precision="fp32")
    check = check_pair(str(tiny_model), str(tmp_path / "other"))
    assert check.greedy_acceptance > 0.2
    assert check.verdict.endswith("translated between two vocabularies")


def test_missing_or_damaged_pair_file_is_written_again_by_pair_check(
    pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path))
    folder = Path(shutil.copytree(pair, tmp_path / "models" / "pair"))
    for content in (None, "{", '{"schema_version": 1}'):
        (folder / FILE_NAME).unlink()
        if content is not None:
            (folder / FILE_NAME).write_text(content)
        problem = "" if content is None else "pair.json cannot be used"
        said: list[str] = []
        with load(folder, report=said.append) as engine:
            assert engine.speculation.name == "suffix+tiny"
            assert engine.generate("the", max_tokens=2).text
        assert any(problem in line and f"edgespec pair check {folder}" in line for line in said)
        assert usual_added_precision(folder, TARGET, "gpu") == "fp32"
        assert main(["models", "verify", str(folder)]) == (3 if problem else 0)
        assert not problem or f"run: edgespec pair check {folder}" in capsys.readouterr().out
        assert main(["pair", "check", str(folder)]) == 0
        assert problem in capsys.readouterr().err
        assert check_of(folder).target == "tiny (fp32)"
    assert main(["pair", "check", "pair"]) == 0, "by its name in the home"


def test_damaged_pair_file_counts_as_no_measurement(tmp_path: Path) -> None:
    for text in (
        "{",
        '{"schema_version": 1, "check": {"x": 1}}',
        "[]",
        '{"schema_version": 2, "checks": {}}',
        '{"schema_version": 2, "checks": [{"target_device": "cpu"}]}',
        "{}",
    ):
        (tmp_path / FILE_NAME).write_text(text)
        found = read_pair(tmp_path)
        assert found is not None
        assert not found.checks
        assert f"{tmp_path / FILE_NAME} cannot be used (" in found.problem


def test_a_pair_file_of_a_later_version_is_not_written_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / TARGET).mkdir()
    for path in (tmp_path / FILE_NAME, tmp_path / TARGET / "edgespec.json"):
        path.write_text('{"schema_version": 9}')
    for arguments in (["pair", "check"], ["models", "verify"]):
        assert main([*arguments, str(tmp_path)]) == 3
        out, err = capsys.readouterr()
        assert "has schema version 9, and this edgespec reads 2; use a newer edgespec" in out + err
    assert (tmp_path / FILE_NAME).read_text() == '{"schema_version": 9}'


def test_pair_folder_is_a_model_to_every_command(pair: Path, tiny_model: Path) -> None:
    for arguments in (["models", "verify", str(pair)], ["pair", "check", str(pair), str(pair)]):
        assert main(arguments) == 0
    with load(tiny_model, drafter=str(pair), draft_length=2) as engine:
        assert engine.speculation.name == "tiny"


@pytest.mark.slow
def test_commands(pair: Path, tiny_gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pair", "check", str(pair / "target"), str(pair / "drafter"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert 0 < document["greedy_acceptance"] < 1
    arguments = ["export", str(tiny_gguf), "--drafter", str(tiny_gguf), "--output", str(tmp_path / "p")]
    assert main([*arguments, "--drafter-precision", "int4"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^(use|do not use|cannot say whether to use) this drafter: ", shown, re.MULTILINE)
    assert "drafter, target   tiny (int4), tiny (source)\n" in shown
    assert main(["chat", str(tmp_path / "p"), "--prompt", "the", "--max-tokens", "3"]) == 0


def test_room_for_both_models_is_checked_before_either_is_written(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = plan_model(tiny_gguf, ExportOptions(precision="fp32")).cost.write_bytes
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=RESERVE_BYTES + 3 * one // 2))
    said: list[str] = []
    halves = half(TARGET, tiny_gguf, "fp32"), half(DRAFTER, tiny_gguf, "fp32")
    with pytest.raises(DiskFull, match=r"67 MB more must stay free") as raised:
        export_pair(*halves, tmp_path / "p", report=said.append)
    assert raised.value.needed_bytes == 2 * one
    assert said == []


@pytest.mark.parametrize(
    "change", [{"pays": "no"}, {"pays": 1}, {"num_draft": 1.5}, {"num_draft": True}, {"expected_gain": "2"}]
)
def test_values_of_other_kinds_in_a_pair_file_are_refused(
    pair: Path, tmp_path: Path, change: dict[str, object]
) -> None:
    folder = Path(shutil.copytree(pair, tmp_path / "pair"))
    document = json.loads((folder / FILE_NAME).read_text())
    document["checks"][0]["check"] |= change
    (folder / FILE_NAME).write_text(json.dumps(document))
    found = read_pair(folder)
    assert found is not None
    assert next(iter(change)) in found.problem
    assert main(["models", "verify", str(folder)]) == 3


def test_pair_without_its_drafter_still_answers_and_says_what_is_missing(pair: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(pair, tmp_path / "pair"))
    shutil.rmtree(folder / "drafter")
    said: list[str] = []
    for drafter in ("none", "auto"):
        with load(folder, drafter=drafter, report=said.append) as engine:
            assert engine.generate("the", max_tokens=2).text
    assert str(folder / "drafter") in said[0]
    assert main(["models", "verify", str(folder)]) == 3


def test_parts_of_a_pair_are_called_by_their_sources(pair: Path) -> None:
    assert [read_manifest(pair / part).name for part in ("target", "drafter")] == ["tiny", "tiny"]
    check = check_of(pair)
    assert (check.target, check.drafter) == ("tiny (fp32)", "tiny (int4)")
