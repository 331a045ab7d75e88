"""The command line as a script meets it: stdout, stderr, exit code."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from edgespec.cli import main


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    try:
        code = main([str(argument) for argument in arguments])
    except SystemExit as exit_:
        code = int(exit_.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_one_answer_goes_to_stdout_and_nothing_else(capsys: pytest.CaptureFixture[str], tiny_model: Path) -> None:
    code, out, err = run(capsys, "chat", tiny_model, "--prompt", "the", "--max-tokens", 5)
    assert code == 0
    assert out.endswith("\n")
    assert "token limit" in err


def test_json_answer_is_the_documented_document(capsys: pytest.CaptureFixture[str], tiny_model: Path) -> None:
    options = ["--prompt", "the", "--max-tokens", 9, "--json", "--temperature", 0.7, "--seed", 3]
    code, out, err = run(capsys, "chat", tiny_model, *options)
    document = json.loads(out)
    assert (code, err) == (0, "")
    assert list(document) == ["text", "token_ids", "finish_reason", "prompt_tokens", "stats"]
    assert set(document["stats"]) >= {
        "decode_tokens_per_second",
        "prefill_tokens_per_second",
        "time_to_first_token_s",
        "tokens_per_pass",
        "acceptance_rate",
        "acceptance_by_position",
        "passes",
        "drafter",
        "draft_length",
        "schedule",
        "overlap",
        "target_device",
        "drafter_device",
        "downgrades",
    }
    assert len(document["token_ids"]) == 9


def test_piped_text_is_the_prompt(
    capsys: pytest.CaptureFixture[str], tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--max-tokens", 8, "--json"]
    _, given, _ = run(capsys, "chat", tiny_model, "--prompt", "the in", *options)
    monkeypatch.setattr(sys, "stdin", io.StringIO("the in"))
    _, piped, _ = run(capsys, "chat", tiny_model, *options)
    assert json.loads(piped)["token_ids"] == json.loads(given)["token_ids"]


def test_drafter_can_be_a_model(capsys: pytest.CaptureFixture[str], tiny_model: Path, tiny_drafter: Path) -> None:
    options = ["--prompt", "the", "--max-tokens", 20, "--deterministic", "--json"]
    _, plain, _ = run(capsys, "chat", tiny_model, *options, "--drafter", "none")
    _, drafted, _ = run(capsys, "chat", tiny_model, *options, "--drafter", tiny_drafter, "--draft-length", 4)
    assert json.loads(drafted)["token_ids"] == json.loads(plain)["token_ids"]
    assert json.loads(drafted)["stats"]["drafter"] == "tiny-int4"


def test_export_then_score(capsys: pytest.CaptureFixture[str], tiny_gguf: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the in the an on " * 30)
    code, out, err = run(capsys, "export", tiny_gguf, "--output", tmp_path / "m", "--precision", "int8")
    assert (code, out) == (0, "")
    assert f"edgespec chat {tmp_path / 'm'}" in err
    code, out, _ = run(capsys, "score", tmp_path / "m", "--file", text, "--json")
    document = json.loads(out)
    assert code == 0
    assert document["tokens"] > 50
    assert 0 < document["nll"] < 60


def test_export_json_is_the_manifest(capsys: pytest.CaptureFixture[str], tiny_gguf: Path, tmp_path: Path) -> None:
    _, out, _ = run(capsys, "export", tiny_gguf, "--output", tmp_path / "m", "--json")
    assert json.loads(out) == json.loads((tmp_path / "m" / "edgespec.json").read_text())


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["chat", "smollm-135m", "--prompt", "x"], 3, "did you mean smollm2-135m"),
        (["chat", "{model}", "--prompt", "x", "--device", "cuda"], 4, "cuda"),
        (["chat", "{model}", "--prompt", "x", "--device", "tpu"], 4, "tpu"),
        (["chat", "{model}", "--prompt", "the in " * 3000], 7, "do not fit the context of 700"),
        (["chat", "{model}", "--prompt", " "], 2, "empty"),
        (["chat", "{model}"], 2, "empty"),
        (["chat", "{model}", "--prompt", "x", "--temperature", "-1"], 2, "temperature"),
        (["chat", "{model}", "--prompt", "x", "--max-tokens", "0"], 2, "max-tokens"),
        (["chat", "{model}", "--prompt", "x", "--draft-length", "x"], 2, "draft length"),
        (["chat", "{model}", "--prompt", "x", "--drafter", "suffix"], 2, "suffix"),
        (["chat", "{model}", "--prompt", "x", "--drafter", "nothing-known"], 3, "nothing-known"),
        (["chat", "{model}", "--prompt", "x", "--threads", "0"], 2, "threads"),
        (["chat", "smollm2-135m", "--prompt", "x", "--offline"], 3, "--offline"),
        (["export", "/nowhere.gguf", "--output", "{out}"], 3, "/nowhere.gguf"),
        (["export", "{gguf}", "--output", "{model}"], 2, "already exists"),
        (["score", "{model}", "--file", "/nowhere.txt"], 2, "/nowhere.txt"),
        (["score", "{model}", "--file", "{empty}"], 2, "at least 2"),
        (["frobnicate"], 2, "invalid choice"),
        ([], 2, "required"),
    ],
)
def test_bad_input_gets_one_message_and_its_exit_code(
    capsys: pytest.CaptureFixture[str],
    tiny_model: Path,
    tiny_gguf: Path,
    tmp_path: Path,
    arguments: list[str],
    code: int,
    words: str,
) -> None:
    (tmp_path / "empty.txt").write_text("")
    places = {"model": tiny_model, "gguf": tiny_gguf, "out": tmp_path / "out", "empty": tmp_path / "empty.txt"}
    found, out, err = run(capsys, *(argument.format(**places) for argument in arguments))
    assert (found, out) == (code, "")
    assert words in err
    assert "Traceback" not in err
    assert not (tmp_path / "out").exists()


def test_reader_that_leaves_early_ends_the_command_quietly(tiny_model: Path) -> None:
    command = [sys.executable, "-m", "edgespec", "chat", str(tiny_model), "--prompt", "the"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=environment, **pipes) as process:  # type: ignore[call-overload]
        process.stdout.read(1)
        process.stdout.close()
        assert b"Traceback" not in process.stderr.read()
    assert process.returncode == 0


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--help")
    assert code == 0
    assert all(command in out for command in ("chat", "export", "score"))
