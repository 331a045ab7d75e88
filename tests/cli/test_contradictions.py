"""Options that contradict each other are refused before anything is loaded."""

import io
import sys
from pathlib import Path

import pytest
from commands import run

from edgespec.cli.main import main


def refused(capsys: pytest.CaptureFixture[str], line: str) -> str:
    """What a command line is refused with; no model has this name, which would be exit code 3."""
    code, out, err = run(capsys, *line.split())
    assert (code, out) == (2, "")
    return err


@pytest.mark.parametrize(
    ("line", "first", "second"),
    [
        ("chat m --deterministic --no-deterministic", "--deterministic", "--no-deterministic"),
        ("chat m --no-deterministic --deterministic", "--no-deterministic", "--deterministic"),
        ("chat m --think --no-think", "--think", "--no-think"),
        ("chat m --offline --no-offline", "--offline", "--no-offline"),
        ("export m --output o --check --no-check", "--check", "--no-check"),
        ("chat m --exact --no-deterministic", "--exact", "--no-deterministic"),
        ("bench m --exact --no-deterministic", "--exact", "--no-deterministic"),
        ("chat m --exact --temperature 0.7", "--exact", "--temperature 0.7"),
        ("bench m --both-modes --no-deterministic", "--both-modes", "--no-deterministic"),
        ("chat m --deterministic --acceptance rejection", "--deterministic", "--acceptance rejection"),
        ("chat m --learn mail --acceptance rejection", "--learn mail", "--acceptance rejection"),
        ("chat m --learn mail --no-history", "--learn mail", "--no-history"),
        ("chat m --keep-prefix --no-history", "--keep-prefix", "--no-history"),
        ("chat m --learn mail --drafter suffix", "--learn mail", "--drafter suffix"),
        ("chat m --schedule hedged --drafter ngram", "--schedule hedged", "--drafter ngram"),
        ("bench m --schedule pipelined --drafter suffix+lookahead", "--schedule pipelined", "suffix+lookahead"),
        ("chat m --schedule serial --drafter none", "--schedule serial", "--drafter none"),
        ("chat m --draft-length 4 --drafter none", "--draft-length 4", "--drafter none"),
        ("bench --report a --resume b", "--report", "--resume"),
        ("bench --report a --prompts b", "--report", "--prompts"),
        ("bench --report a --rounds 5", "--report", "--rounds"),
        ("bench --report a --compare b", "--report", "--compare"),
    ],
)
def test_contradictory_options_are_refused_by_their_names(
    capsys: pytest.CaptureFixture[str], line: str, first: str, second: str
) -> None:
    message = refused(capsys, line)
    assert f"{first} and " in message
    assert second in message
    assert "contradict each other" in message
    assert "leave out" in message or "leave one of them out" in message


@pytest.mark.parametrize(
    "line",
    [
        "chat m --exact",
        "chat m --deterministic --acceptance rejection --draft-length 4",
        "chat m --schedule hedged --drafter ngram+other",
        "chat m --schedule hedged",
        "chat m --learn mail",
        "chat m --deterministic --deterministic",
        "chat m --draft-length 0 --drafter none",
        "bench m --both-modes --deterministic",
    ],
)
def test_options_that_go_together_are_taken(
    capsys: pytest.CaptureFixture[str], line: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "stdin", io.StringIO("a prompt"))
    assert main([*line.split(), "--device", "cpu"]) == 3  # only the model is missing
    assert "contradict" not in capsys.readouterr().err


def test_an_option_of_the_configuration_is_named_with_its_place(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "config.toml"
    file.write_text('exact = true\nschedule = "hedged"\n')
    monkeypatch.setenv("EDGESPEC_CONFIG", str(file))
    message = refused(capsys, "chat m --temperature 0.7")
    assert f"--exact (set in {file}:1) and --temperature 0.7 contradict" in message
    assert "hedged" not in refused(capsys, "chat m --no-exact --drafter ngram --max-tokens 0 --prompt x")


def test_what_deterministic_promises_with_rejection_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path))
    asked = ["chat", "m", "--prompt", "x", "--acceptance", "rejection", "--draft-length", "4"]
    main([*asked, "--deterministic"])
    assert "only for the same seed, drafter and draft length" in capsys.readouterr().err
    main(asked)
    assert "same seed" not in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--attach", "--schema", "--trace"])
def test_an_empty_name_is_no_file(capsys: pytest.CaptureFixture[str], flag: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["chat", "m", flag, ""])
    error = capsys.readouterr().err
    assert flag in error
    assert "the name of the file is empty" in error
