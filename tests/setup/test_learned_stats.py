import errno
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from table_decoder import TableDecoder

from edgespec import load
from edgespec.cli.main import main
from edgespec.draft.costs import pass_costs
from edgespec.setup.measure import measure_passes
from edgespec.setup.profile import (
    FILE_NAME,
    DrafterProfile,
    LearnedStats,
    Profile,
    read_learned_stats,
    write_learned_stats,
)

PROFILE = Profile(
    passes_s={64: {1: 0.02, 4: 0.04}, 1000: {1: 0.025}},
    prefill_s=0.005,
    transfer_s=0.0001,
    drafters={"a-model": DrafterProfile(step_s=0.004, row_s=0.0, branches={1: 1.0, 4: 1.2}, slowed=(1.1, 1.4))},
)
KNOWN = LearnedStats(
    {"a machine": {1: 1.0, 4: 1.6}},
    {"a machine": {"a-model": (0.2, 0.03)}},
    {("ngram", 2): (3.5, 4.0), ("suffix", -1): (0.0, 2.0)},
    {"a machine": PROFILE},
    {"a machine": {"a-model": (1.2, 1.4)}},
)


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    write_learned_stats(tmp_path, KNOWN)
    assert read_learned_stats(tmp_path, pytest.fail) == KNOWN
    assert os.listdir(tmp_path) == [FILE_NAME]


@pytest.mark.parametrize(
    "damaged",
    [
        "",
        "[]",
        '{"version": 2, "ratios": {}, "chances": []}',
        '{"version": 1, "ratios": {"m": {"2": 1.5}}, "chances": []}',
        '{"version": 1, "ratios": {"m": {"1": 1, "2": NaN}}, "chances": []}',
        '{"version": 1, "ratios": {"m": {"1": 1, "2": 0.5}}, "chances": []}',
        '{"version": 1, "ratios": {}, "chances": [["ngram", 1, 5, 4]]}',
        '{"version": 1, "ratios": {}, "chances": [["ngram", 1]]}',
        '{"version": 1, "ratios": {}, "chances": [["ngram", Infinity, 1, 2]]}',
        '{"version": 1, "ratios": {"m": {"1": 1, "2": 1' + 400 * "0" + '}}, "chances": []}',
        '{"version": 1, "ratios": {}, "drafts": {"m": {"a-model": [0, 0.1]}}, "chances": []}',
        '{"version": 1, "ratios": {}, "drafts": {"m": {"a-model": [0.1]}}, "chances": []}',
        '{"version": 1, "ratios": {}, "chances": [], "profiles": {"m": {}}}',
        '{"version": 1, "ratios": {}, "chances": [], "profiles": []}',
        200_000 * "[",
    ],
)
def test_damage_is_reported_and_forgotten(tmp_path: Path, damaged: str) -> None:
    (tmp_path / FILE_NAME).write_text(damaged)
    lines: list[str] = []
    assert read_learned_stats(tmp_path, lines.append) == LearnedStats()
    assert "measuring again" in lines[0]


@pytest.mark.parametrize(
    ("damaged", "why"),
    [
        ("5", "it is not valid JSON: it holds no JSON object"),
        ("{}", "it is of version unknown, wanted 1"),
        ('{"version": 1, "ratios": 5}', "it does not state what edgespec writes there"),
        ('{"version": 2}', "it is of version 2, wanted 1"),
        ("{", "it is not valid JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
    ],
)
def test_damage_is_explained(tmp_path: Path, damaged: str, why: str) -> None:
    (tmp_path / FILE_NAME).write_text(damaged)
    lines: list[str] = []
    read_learned_stats(tmp_path, lines.append)
    assert lines == [f"{tmp_path / FILE_NAME} cannot be used ({why}); measuring again"]


@pytest.mark.parametrize("kind", ["pipe", "huge"])
def test_what_edgespec_does_not_write_is_not_read(tmp_path: Path, kind: str) -> None:
    if kind == "pipe":
        os.mkfifo(tmp_path / FILE_NAME)
    else:
        (tmp_path / FILE_NAME).touch()
        os.truncate(tmp_path / FILE_NAME, 1 << 40)  # a hole
    lines: list[str] = []
    assert read_learned_stats(tmp_path, lines.append) == LearnedStats()
    assert "measuring again" in lines[0]


@pytest.mark.parametrize("command", ["load", "plan"])
def test_damage_is_reported_once(
    tiny_drafter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    folder = shutil.copytree(tiny_drafter, tmp_path / "model")
    (folder / FILE_NAME).write_text("{}")
    assert len([line for line in used(folder, command, capsys) if "cannot be used" in line]) == 1


def used(folder: Path, command: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Lines that are reported when a model is loaded, or planned for."""
    lines: list[str] = []
    if command == "plan":
        assert main(["plan", str(folder), "--threads", "1"]) == 0
        return capsys.readouterr().err.splitlines()
    with load(folder, report=lines.append) as engine:
        engine.generate("the in", max_tokens=3)
    return lines


def test_file_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text('{"version": 1, "ratios": {"m": {"1": 1}}, "chances": [["ngram", 1, 1, 2]]}')
    assert read_learned_stats(tmp_path, pytest.fail) == LearnedStats(
        {"m": {1: 1.0}}, {}, {("ngram", 1): (1.0, 2.0)}
    )


def test_costs_are_measured_once_and_chances_are_kept(tiny_drafter: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_drafter, tmp_path / "model", ignore=shutil.ignore_patterns(FILE_NAME))
    lines: list[str] = []
    for _ in range(2):
        with load(folder, report=lines.append) as engine:
            engine.generate("the in the in the in", max_tokens=30)
        assert len([line for line in lines if "measuring how long passes" in line]) == 1
    known = json.loads((folder / FILE_NAME).read_text())
    assert {source for source, *_ in known["chances"]} >= {"suffix"}
    assert "the" not in json.dumps(known["chances"])


def test_what_another_session_learns_while_a_model_is_opened_and_measured_stays(
    tiny_drafter: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_drafter, tmp_path / "model", ignore=shutil.ignore_patterns(FILE_NAME))

    def learn_elsewhere(line: str) -> None:
        if "measuring how long passes" in line:
            write_learned_stats(folder, KNOWN, pytest.fail)

    with load(folder, report=learn_elsewhere):
        known = read_learned_stats(folder, pytest.fail)
    assert len(known.profiles) == 2
    assert known.profiles["a machine"] == PROFILE
    assert known.chances == KNOWN.chances


def test_folder_that_cannot_be_written_is_measured_each_time(tmp_path: Path) -> None:
    lines: list[str] = []
    write_learned_stats(tmp_path / "missing", KNOWN, lines.append)
    assert lines == [
        f"{tmp_path / 'missing'} cannot be written (No such file or directory): measurements of "
        "its model on this machine are not saved for the next time"
    ]
    assert read_learned_stats(tmp_path / "missing", pytest.fail) == LearnedStats()


@pytest.mark.parametrize("command", ["load", "plan"])
def test_folder_that_cannot_be_written_is_reported_once(
    tiny_drafter: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
) -> None:
    def forbidden(*arguments: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("edgespec.setup.profile.replace_file", forbidden)
    folder = shutil.copytree(tiny_drafter, tmp_path / "model", ignore=shutil.ignore_patterns(FILE_NAME))
    lines = [line for line in used(folder, command, capsys) if "cannot be written (Permission denied)" in line]
    assert len(lines) == 1


def test_fixed_draft_length_and_plain_decoding_measure_nothing(tiny_drafter: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_drafter, tmp_path / "model", ignore=shutil.ignore_patterns(FILE_NAME))
    with load(folder, draft_length=2, report=pytest.fail) as fixed, load(folder, drafter="none") as plain:
        assert fixed.generate("the", max_tokens=9).token_ids
        assert plain.generate("the", max_tokens=9).token_ids
    assert not (folder / FILE_NAME).exists()


def test_measured_ratios_start_at_one_and_never_fall() -> None:
    costs = pass_costs({1: 0.02, 2: 0.018, 4: 0.05})
    assert (costs.ratio(1), costs.ratio(2), costs.ratio(4), costs.ratio(3)) == (1.0, 1.0, 2.5, 1.75)


@pytest.mark.parametrize("context_length", [1, 2, 9, 1000])
def test_any_context_can_be_measured(context_length: int) -> None:
    costs = measure_passes(TableDecoder(5, seed=1, context_length=context_length))
    assert costs.ratio(1) == 1.0
    assert (costs.step_s or 0) > 0


def test_profile_of_a_drafter_is_taken_once_when_it_drafts(
    tiny_model: Path, tiny_drafter: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "model", ignore=shutil.ignore_patterns(FILE_NAME))
    with load(folder, num_threads=1):
        assert [profile.drafters for profile in read_learned_stats(folder, pytest.fail).profiles.values()] == [{}]
    known = read_learned_stats(folder, pytest.fail)
    (machine,) = known.ratios
    write_learned_stats(folder, replace(known, drafts={machine: {"tiny-int4 on cpu, 1 thread": (0.5, 0.25)}}))
    lines: list[str] = []
    for _ in range(2):
        with load(folder, drafter=str(tiny_drafter), num_threads=1, report=lines.append) as engine:
            costs = engine.speculation.models["tiny-int4"].costs
            assert (costs.step, costs.row) == (0.5, 0.25)  # what use has shown counts for more
    assert len([line for line in lines if "measuring how long drafts take" in line]) == 1
    (profile,) = read_learned_stats(folder, pytest.fail).profiles.values()
    assert list(profile.drafters) == ["tiny-int4 on cpu, 1 thread"]
