"""The command line as a script meets it: stdout, stderr, exit code."""

import errno
import io
import json
import logging
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from commands import run
from row_proofs import FAILS
from scripted import scripted_engine

from edgespec import load
from edgespec.chat.plain import PlainPrinter
from edgespec.cli.arguments import model_home
from edgespec.cli.main import _keep_stdout_for_data, _prepare_streams, main
from edgespec.config.drafter_names import TARGET, TEXT
from edgespec.config.options import DEFAULT_MODEL
from edgespec.decoding.decoder import Pass, Rows
from edgespec.engine.answer_stream import AnswerStream, Reply
from edgespec.engine.answers import Chunk
from edgespec.manifest import SuggestedSampling, read_manifest, write_manifest
from edgespec.runtimes.devices import import_onnxruntime
from edgespec.runtimes.onnx import OnnxDecoder
from edgespec.system import signals
from edgespec.system.command_line import quote

# Since Python 3.14 a name that is too long for a file counts as that of none.
_TOO_LONG = (
    ("cannot be opened (File name too long)", "give a name, a folder or a file")
    if sys.version_info < (3, 14)
    else ("no model 'xxx", "no model 'xxx")
)


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))


def test_one_answer_goes_to_stdout_and_nothing_else(capsys: pytest.CaptureFixture[str], tiny_model: Path) -> None:
    code, out, err = run(capsys, "chat", tiny_model, "--prompt", "the", "--max-tokens", 5)
    assert code == 0
    assert out.endswith("\n")
    assert "token limit" in err


def test_model_without_a_chat_template_says_so(
    capsys: pytest.CaptureFixture[str], tiny_model: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "raw")
    manifest = read_manifest(folder)
    write_manifest(folder, replace(manifest, chat_template=None))
    for model, is_said in ((tiny_model, False), (folder, True)):
        code, _, err = run(capsys, "chat", model, "--prompt", "the", "--max-tokens", 2)
        assert (code, "has no chat template" in err) == (0, is_said)

    said: list[str] = []
    load(folder, report=said.append).close()
    assert "tiny has no chat template: it only continues your text, and may not answer it" in "\n".join(said)


def test_an_empty_prompt_is_answered_as_in_python(capsys: pytest.CaptureFixture[str], tiny_model: Path) -> None:
    code, out, err = run(capsys, "chat", tiny_model, "", "--max-tokens", 4, "--json", "--drafter", "none")
    with load(tiny_model, drafter="none") as engine:
        assert (code, json.loads(out)["text"]) == (0, engine.generate("", max_tokens=4).text)
    assert "the prompt is empty, so the answer is to nothing" in err


@pytest.mark.parametrize("arguments", [["-p", "Summarise this:", "-p", "-"], [], ["--system", "be brief"]])
def test_a_pipe_that_is_empty_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    for text, came in (("", "nothing"), (" \n", "only white space")):
        reading, writing = os.pipe()
        os.write(writing, text.encode())
        os.close(writing)
        with open(reading) as pipe:
            monkeypatch.setattr("sys.stdin", pipe)
            code, out, err = run(capsys, "chat", *arguments)
        assert (code, out) == (2, "")
        assert f"{came} came on stdin. The command before the pipe wrote nothing, or failed" in err


def test_a_prompt_that_is_missing_without_a_pipe_is_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open(os.devnull) as nothing:
        monkeypatch.setattr("sys.stdin", nothing)
        for word, found in (
            ("   ", "the prompt is only white space, and nothing came on stdin"),
            ("smollm2-135m", "nothing came on stdin; give one with --prompt, or run it in a terminal"),
        ):
            code, out, err = run(capsys, "chat", word)
            assert (code, out, "pipe" in err, found in err) == (2, "", False, True)


def test_a_word_before_an_empty_pipe_is_told_from_a_model(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    code, _, err = run(capsys, "chat", "hello")
    assert (code, err.rstrip().endswith("if 'hello' is your prompt: edgespec chat -p hello")) == (2, True)
    code, _, err = run(capsys, "chat", "smol")
    assert (code, "-p smol" in err) == (2, False), "it begins the name of a model"


def test_a_chat_that_is_not_there_is_told_before_the_pipe_is_read(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    code, _, err = run(capsys, "chat", "--continue", "nosuch", "hi")
    assert (code, "there is no chat 'nosuch'" in err, "stdin" in err) == (2, True, False)


def test_one_answer_at_the_command_line_names_no_commands_of_the_chat(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tiny_model: Path, tmp_path: Path
) -> None:
    engine = scripted_engine(tiny_model, tmp_path, lambda prompt: " ".join(["the in a"] * 300))
    monkeypatch.setattr("edgespec.cli.chat.load_engine", lambda options, **settings: engine)
    code, _, err = run(capsys, "chat", "m", "-p", "go")
    assert (code, "it repeated itself (--loops keep lets such answers continue)" in err) == (0, True)


def test_the_last_line_end_of_a_pipe_is_no_part_of_the_prompt(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tiny_model: Path
) -> None:
    counts = []
    for text in ("the\n", "the", "the\n\n"):
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        _, out, _ = run(capsys, "chat", tiny_model, "--json", "--max-tokens", 1)
        counts.append(json.loads(out)["prompt_tokens"])
    assert counts[0] == counts[1] < counts[2]


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


def test_model_sampling_is_that_of_the_models_files_but_for_what_is_stated(
    capsys: pytest.CaptureFixture[str], tiny_model: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    suggested = SuggestedSampling(temperature=0.9, top_k=20)
    write_manifest(folder, replace(read_manifest(folder), sampling=suggested))
    options = ["--prompt", "the", "--max-tokens", 20, "--drafter", "none", "--json", "--seed", 5]

    def tokens(*more: object) -> list[int]:
        code, out, err = run(capsys, "chat", folder, *options, *more)
        assert (code, "sampling as tiny suggests: " in err) == (0, "--model-sampling" in more)
        found: list[int] = json.loads(out)["token_ids"]
        return found

    assert tokens("--model-sampling") == tokens("--temperature", 0.9, "--top-k", 20) == tokens()
    assert tokens("--model-sampling", "--temperature", 0) == tokens("--no-model-sampling") != tokens()
    assert tokens("--exact") == tokens("--no-model-sampling")
    assert tokens("--model-sampling", "--top-k", 2) == tokens("--temperature", 0.9, "--top-k", 2)


def test_a_model_that_suggests_no_sampling_is_said_to(
    capsys: pytest.CaptureFixture[str], tiny_model: Path
) -> None:
    code, _, err = run(capsys, "chat", tiny_model, "--prompt", "the", "--max-tokens", 2, "--model-sampling")
    assert (code, "the files of tiny suggest no sampling" in err) == (0, True)


def test_a_prompt_needs_no_flag(
    capsys: pytest.CaptureFixture[str], tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--max-tokens", 8, "--drafter", "none", "--json"]

    def tokens(*words: object) -> list[int]:
        code, out, err = run(capsys, "chat", *words, *options)
        assert code == 0, err
        found: list[int] = json.loads(out)["token_ids"]
        return found

    wanted = tokens(tiny_model, "--prompt", "the in")
    assert tokens(tiny_model, "the in") == tokens(tiny_model, "-p", "the in") == wanted
    assert tokens("the in", "--model", tiny_model) == tokens("-m", tiny_model, "the in") == wanted
    assert tokens(tiny_model, "-q", "the in") == wanted
    monkeypatch.setenv("EDGESPEC_MODEL", str(tiny_model))
    assert tokens("the in") == wanted
    code, _, err = run(capsys, "chat", tiny_model, "the in", "--model", "another")
    assert (code, f"two models are given, '{str(tiny_model)[:20]}" in err) == (2, True)


def test_words_that_are_neither_model_nor_prompt_are_refused(
    capsys: pytest.CaptureFixture[str], tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, err = run(capsys, "chat", "no model", "a prompt")
    assert (code, "there is no model 'no model'" in err) == (2, True)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    for word in ("hello", "why?", "日本の首都はどこですか。", "日" * 90):  # Japanese and Chinese have no spaces
        code, _, err = run(capsys, "chat", word, "--offline")
        assert (code, f"to send it to the default model: edgespec chat -p {quote(word)}" in err) == (3, True)
    code, _, err = run(capsys, "chat", "--continue", "And why?")
    assert (code, "a prompt goes after --prompt" in err) == (2, True)
    code, _, err = run(capsys, "chat", tiny_model, "a prompt", "--drafter", "sufix")
    assert (code, "did you mean the drafter suffix?" in err) == (3, True)


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="Python 3.14 says of such a file that it is missing")
def test_a_file_that_nothing_can_have_as_a_name_is_named_in_words(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGESPEC_CONFIG", "x" * 300)
    code, _, err = run(capsys, "models", "list")
    assert (code, "Errno" in err, "x cannot be used (File name too long); name another" in err) == (1, False, True)


def test_piped_text_is_the_prompt(
    capsys: pytest.CaptureFixture[str], tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--max-tokens", 8, "--json"]
    _, given, _ = run(capsys, "chat", tiny_model, "--prompt", "the in", *options)
    monkeypatch.setattr(sys, "stdin", io.StringIO("the in"))
    _, piped, _ = run(capsys, "chat", tiny_model, *options)
    assert json.loads(piped)["token_ids"] == json.loads(given)["token_ids"]


def test_piped_text_is_a_part_of_the_prompt_where_a_dash_says_so(
    capsys: pytest.CaptureFixture[str], tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--max-tokens", 8, "--json"]
    _, given, _ = run(capsys, "chat", tiny_model, "--prompt", "the in\n\nan on", *options)
    monkeypatch.setattr(sys, "stdin", io.StringIO("an on"))
    _, joined, _ = run(capsys, "chat", tiny_model, "--prompt", "the in", "--prompt", "-", *options)
    assert json.loads(joined)["token_ids"] == json.loads(given)["token_ids"]
    code, _, err = run(capsys, "chat", tiny_model, "--prompt", "-", "--prompt", "-")
    assert (code, "stdin can be read once" in err) == (2, True)


def test_piped_text_that_is_not_read_is_reported(
    capsys: pytest.CaptureFixture[str], tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text").write_text("an on")
    with (tmp_path / "text").open() as file:
        monkeypatch.setattr(sys, "stdin", file)
        _, _, err = run(capsys, "chat", tiny_model, "--prompt", "the in", "--max-tokens", 2)
        assert "stdin is not read because --prompt is given" in err
        assert file.read() == "an on"
        _, _, err = run(capsys, "chat", tiny_model, "--prompt", "the in", "--max-tokens", 2)
    assert "stdin is not read" not in err


def test_drafter_can_be_a_model(capsys: pytest.CaptureFixture[str], tiny_model: Path, tiny_drafter: Path) -> None:
    options = ["--prompt", "the", "--max-tokens", 20, "--deterministic", "--json"]
    _, plain, _ = run(capsys, "chat", tiny_model, *options, "--drafter", "none")
    _, drafted, _ = run(capsys, "chat", tiny_model, *options, "--drafter", tiny_drafter, "--draft-length", 4)
    assert json.loads(drafted)["token_ids"] == json.loads(plain)["token_ids"]
    assert json.loads(drafted)["stats"]["drafter"] == "tiny-int4"


def test_a_target_that_drafts_for_itself_is_said_to_gain_nothing(
    capsys: pytest.CaptureFixture[str], tiny_model: Path
) -> None:
    code, _, err = run(capsys, "chat", tiny_model, "the", "--max-tokens", 2, "--drafter", tiny_model)
    assert (code, "the drafter is the target itself, which saves no time" in err) == (0, True)


def test_chat_stores_answers_unless_a_flag_forbids_it(
    capsys: pytest.CaptureFixture[str], tiny_model: Path, tmp_path: Path
) -> None:
    asked = ["chat", tiny_model, "--prompt", "the", "--max-tokens", "40", "--deterministic"]
    first = run(capsys, *asked, "--no-answer-cache")
    assert run(capsys, *asked, "--no-history")[:2] == first[:2]
    assert not (tmp_path / "home" / "memory").exists()
    assert run(capsys, *asked)[:2] == first[:2]
    assert len(list((tmp_path / "home" / "memory").iterdir())) == 1
    assert run(capsys, *asked)[:2] == first[:2]


def test_export_then_score(capsys: pytest.CaptureFixture[str], tiny_gguf: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the in the an on " * 30)
    code, out, err = run(capsys, "export", tiny_gguf, "--output", tmp_path / "m", "--precision", "int8", "--check")
    assert "checked: the likeliest next token" in err
    assert (code, out) == (0, "")
    assert f"edgespec chat {tmp_path / 'm'}" in err
    code, out, _ = run(capsys, "score", tmp_path / "m", "--file", text, "--json")
    document = json.loads(out)
    assert code == 0
    assert document["tokens"] > 50
    assert 0 < document["nll"] < 60


def test_minus_one_is_no_limit_whatever_a_preset_says(
    capsys: pytest.CaptureFixture[str], tiny_model: Path
) -> None:
    run(capsys, "preset", "create", "short", "--from", tiny_model, "--max-tokens", 3)
    asked = ("chat", "short", "the in", "--json", "--drafter", "none", "--context", 64, "--max-tokens", -1)
    document = json.loads(run(capsys, *asked)[1])
    assert (len(document["token_ids"]) > 3, document["finish_reason"]) != (False, "length")
    document = json.loads(run(capsys, *asked[:-2])[1])
    assert (len(document["token_ids"]), document["finish_reason"]) == (3, "length")


def test_a_dry_run_needs_no_place_to_write_to(
    capsys: pytest.CaptureFixture[str], tiny_gguf: Path, tmp_path: Path
) -> None:
    code, out, err = run(capsys, "export", tiny_gguf, "--dry-run")
    assert (code, "peak memory about" in out, err, [*tmp_path.iterdir()]) == (0, True, "", [])


def test_export_json_is_the_manifest(capsys: pytest.CaptureFixture[str], tiny_gguf: Path, tmp_path: Path) -> None:
    _, out, _ = run(capsys, "export", tiny_gguf, "--output", tmp_path / "m", "--json")
    assert json.loads(out) == json.loads((tmp_path / "m" / "edgespec.json").read_text())


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["chat", "smollm-135m", "--prompt", "x"], 3, "did you mean smollm2-135m"),
        (["chat", "smollm2-135m:latest", "x"], 3, "did you mean smollm2-135m? names here have no tags"),
        (["chat", "llama3.2:latest", "x"], 3, "did you mean llama-3.2-1b? names here have no tags"),
        (["chat", "", "--prompt", "x"], 3, "the name of the model is empty"),
        (["chat", ":int4", "--prompt", "x"], 3, "the name of the model is empty"),
        (["chat", "nothing-like-it", "--prompt", "x"], 3, "'nothing-like-it': edgespec models list has the names"),
        (["models", "path", "/"], 3, "is a folder without edgespec.json"),
        (["chat", "{model}", "--prompt", "x", "--memory", "2M"], 5, "too low for tiny: give at least --memory "),
        (["chat", "{model}", "--prompt", "x", "--drafter", ""], 2, "the drafter is empty"),
        (["chat", "{model}", "--prompt", "x", "--stop", ""], 2, "--stop is empty"),
        (["score", "{model}", "--file", "/"], 2, "cannot read /"),
        (["score", "{model}", "--file", "{latin}"], 2, "it is not text in UTF-8"),
        (["chat", "{model}", "--prompt", "x", "--device", "cuda"], 4, "cuda"),
        (["chat", "{model}", "--prompt", "x", "--device", "tpu"], 2, "the devices are auto, cpu, cuda"),
        (["chat", "{model}", "--prompt", "the in " * 3000], 7, "do not fit the context of 700"),
        (["chat", "{model}"], 2, "empty"),
        (["chat", "{model}", "--prompt", "x", "--temperature", "-1"], 2, "temperature"),
        (
            ["chat", "{model}", "-p", "x", "--max-tokens", "none"],
            2,
            "--max-tokens is 'none'; wanted a whole number from 1",
        ),
        (["config", "set", "max-tokens", "0"], 2, "wanted a whole number from 1, or -1 for no limit"),
        (["chat", "{model}", "--prompt", "x", "--draft-length", "x"], 2, "draft length"),
        (["chat", "{model}", "--prompt", "x", "--drafter", "nothing-known"], 3, "nothing-known"),
        (["chat", "{model}", "--prompt", "x", "--drafter", "x" * 300], 3, _TOO_LONG[0]),
        (["chat", "x" * 300, "--prompt", "x"], 3, _TOO_LONG[1]),
        (["chat", "{model}", "--prompt", "x", "--drafter", "{model}+{model},suffix"], 2, "are called 'tiny'"),
        (["chat", "{model}", "--prompt", "x", "--drafter", "none+{model}"], 2, "the drafter 'none+"),
        (["chat", "{model}", "--prompt", "x", "--threads", "0"], 2, "threads"),
        (["chat", "smollm2-135m", "--prompt", "x", "--offline"], 3, "--offline"),
        (["export", "/nowhere.gguf", "--output", "{out}"], 3, "/nowhere.gguf"),
        (["export", "smollm-135m", "--output", "{out}"], 3, "did you mean the model smollm2-135m"),
        (["export", "{gguf}"], 2, "give --name NAME or --output DIR"),
        (["export", "{gguf}", "--output", "{model}"], 2, "already exists"),
        (
            ["export", "{gguf}", "--output", "{out}", "--drafter", "{gguf}", "--skip-layers", "1"],
            2,
            "--skip-layers",
        ),
        (["export", "{gguf}", "--output", "{out}", "--exporter", "optimum", "--form", "npu"], 2, "--form"),
        (["export", "{gguf}", "--output", "{out}", "--drafter-precision", "int4"], 2, "give --drafter"),
        (["export", "{gguf}", "--output", "{out}", "--vocab-corpus", "{empty}"], 2, "--vocab-subset"),
        (
            ["export", "{gguf}", "--output", "{out}", "--vocab-subset", "0", "--vocab-corpus", "{empty}"],
            2,
            "at least one",
        ),
        (["export", "{gguf}", "--output", "{out}", "--drafter", "/nowhere.gguf"], 3, "/nowhere.gguf"),
        (["export", "{gguf}", "--output", "{out}", "--dry-run", "--skip-layers", "0-1"], 2, "keep at least one"),
        (["export", "{gguf}", "--output", "{out}", "--context-length", "63"], 2, "wanted 64 or more tokens"),
        (
            ["export", "{gguf}", "--output", "{out}", "--context-length", "701"],
            2,
            "up to 700 tokens; give 700 or less",
        ),
        (["export", "{gguf}", "--output", "{model}", "--dry-run"], 2, "already exists"),
        (["bench", "no-such-model", "--temperature", "-1"], 2, "temperature is -1"),
        (["score", "{model}", "--file", "/nowhere.txt"], 2, "/nowhere.txt"),
        (["score", "{model}", "--file", "{empty}"], 2, "at least 2"),
        (["frobnicate"], 2, "no command 'frobnicate'"),
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
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 " * 9)
    files = {name: tmp_path / f"{name}.txt" for name in ("empty", "latin")}
    places = {"model": tiny_model, "gguf": tiny_gguf, "out": tmp_path / "out", **files}
    found, out, err = run(capsys, *(argument.format(**places) for argument in arguments))
    assert (found, out) == (code, "")
    assert words in err
    assert "Traceback" not in err
    assert not (tmp_path / "out").exists()


def shell(line: str, **environment: str) -> subprocess.CompletedProcess[str]:
    settings = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"} | environment
    edgespec = f"{sys.executable} -m edgespec"
    return subprocess.run(
        ["bash", "-c", line.replace("edgespec", edgespec)],
        capture_output=True,
        text=True,
        env=settings,
        check=False,
    )


@pytest.mark.parametrize("unbuffered", ["", pytest.param("1", marks=pytest.mark.slow)])
@pytest.mark.parametrize("options", ["", pytest.param("--json --max-tokens 3", marks=pytest.mark.slow)])
def test_reader_that_leaves_early_ends_the_command_quietly(
    tiny_model: Path, options: str, unbuffered: str
) -> None:
    line = f"edgespec chat {tiny_model} --prompt the {options} | true; exit ${{PIPESTATUS[0]}}"
    done = shell(line, PYTHONUNBUFFERED=unbuffered)
    assert done.returncode == 0
    assert "rror" not in done.stderr


@pytest.mark.parametrize(("platform", "ended"), [("win32", 0), ("linux", 1)])
def test_reader_that_leaves_early_on_windows(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, platform: str, ended: int
) -> None:
    """C makes an invalid argument of the pipe that is closed there (CPython's issue 79935)."""

    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(sys, "stdout", Closed())
    monkeypatch.setattr(sys, "platform", platform)
    assert main(["config", "path"]) == ended
    assert capsys.readouterr().err == "edgespec: cannot write to stdout (Invalid argument)\n" * ended


@pytest.mark.parametrize("unbuffered", ["", pytest.param("1", marks=pytest.mark.slow)])
def test_full_output_device_is_an_error_in_one_line(tiny_model: Path, unbuffered: str) -> None:
    line = f"edgespec chat {tiny_model} --prompt the --max-tokens 3 --json > /dev/full"
    done = shell(line, PYTHONUNBUFFERED=unbuffered)
    measured = "edgespec: measuring how long passes take: tiny\n"  # of whoever loads the model first
    assert (done.returncode, done.stderr.removeprefix(measured).count("\n")) == (1, 1)
    assert "No space left" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-"])
def test_an_answer_is_not_lost_in_silence_where_a_stream_is_closed(tiny_model: Path, closed: str) -> None:
    done = shell(f"edgespec chat {tiny_model} --prompt the --max-tokens 3 {closed}")
    assert (done.returncode, "it is closed" in done.stderr) == ((1, True) if closed == ">&-" else (0, False))
    assert "Traceback" not in done.stderr
    assert "edgespec:" not in done.stdout


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("edgespec models list >&-", 1, "edgespec: cannot write to stdout (it is closed)\n"),
        ("edgespec --version <&- >&- 2>&-", 1, ""),
        ("edgespec nope 2>/dev/full", 2, ""),
    ],
)
def test_a_command_that_cannot_write_tells_by_its_code(line: str, code: int, said: str) -> None:
    done = shell(line)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", said)


def test_no_file_takes_the_place_of_a_closed_stream() -> None:
    program = "import os, sys, edgespec.__main__ as m; m._run = lambda: os.open(os.devnull, 0); sys.exit(m.main())"
    line = 'exec "$0" -c "$1" <&- >&- 2>&-'
    assert subprocess.run(["bash", "-c", line, sys.executable, program], check=False).returncode > 2


# Ctrl-C is pressed when the package begins to be imported.
INTERRUPTED = """
import signal, sys

signal.signal(signal.SIGINT, signal.default_int_handler)  # that of a program behind & is ignored
from edgespec_command import main

class Finder:
    def find_spec(name, path=None, target=None):
        signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Finder)
main()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals, which Windows lacks")
def test_ctrl_c_before_the_package_is_imported_says_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, b"")


@pytest.mark.slow
def test_piped_bytes_that_are_no_text_are_refused(tiny_model: Path) -> None:
    line = f"printf 'caf\\xe9' | edgespec chat {tiny_model} --max-tokens 3 --drafter none --json"
    done = shell(line, PYTHONIOENCODING="utf-8:strict")
    assert done.returncode == 2
    assert "stdin is not text in UTF-8 (the byte 0xe9 at 3 is not)" in done.stderr


@pytest.mark.parametrize(("platform", "shown"), [("win32", "→ 世界"), ("linux", "? ??")])
def test_what_windows_pipes_loses_no_character(monkeypatch: pytest.MonkeyPatch, platform: str, shown: str) -> None:
    """The code page of the system is cp1252 there; on other systems the encoding is what the user has set."""
    written = {name: io.TextIOWrapper(io.BytesIO(), "cp1252") for name in ("stdout", "stderr")}
    for name, stream in written.items():
        monkeypatch.setattr(sys, name, stream)
    monkeypatch.setattr(sys, "platform", platform)
    _prepare_streams()
    for stream in written.values():
        stream.write("→ 世界")
        stream.flush()
    monkeypatch.undo()
    assert {stream.buffer.getvalue().decode() for stream in written.values()} == {shown}  # type: ignore[attr-defined]


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal, which Windows lacks")
@pytest.mark.parametrize(("platform", "is_console"), [("win32", True), ("linux", False)])
def test_a_chat_on_windows_finds_its_console_where_stderr_is_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, platform: str, is_console: bool
) -> None:
    main_end, terminal = os.openpty()
    with open(main_end, "rb"), open(terminal, "w") as stdout, open(tmp_path / "log", "w") as stderr:
        monkeypatch.setattr(sys, "stdout", stdout)
        monkeypatch.setattr(sys, "stderr", stderr)
        monkeypatch.setattr(sys, "platform", platform)
        _keep_stdout_for_data()
        assert sys.stdout.isatty()
        assert os.isatty(terminal) == is_console
        if sys.stdout is not stdout:
            sys.stdout.close()


def test_home_that_is_a_file_is_an_error_in_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "file"))
    code, _, err = run(capsys, "chat", "--prompt", "x")
    assert (code, err.count("\n")) == (1, 1)


@pytest.mark.parametrize(
    ("number", "code"),
    [("INT", 130), *(pytest.param(*each, marks=pytest.mark.slow) for each in (("TERM", 143), ("HUP", 129)))],
)
def test_export_that_is_stopped_leaves_nothing(tiny_gguf: Path, tmp_path: Path, number: str, code: int) -> None:
    """Stopped at its first line of talk, in the midst of the work."""
    import signal

    program = (
        "import signal, sys; from edgespec.cli.main import main; import edgespec.export.convert as convert, time;"
        # Which a shell has ignored for what runs in the background, and nohup.
        "signal.signal(signal.SIGINT, signal.default_int_handler);"
        "hasattr(signal, 'SIGHUP') and signal.signal(signal.SIGHUP, signal.SIG_DFL);"
        "convert.build_graphs = lambda *arguments: (print('busy', flush=True), time.sleep(60));"
        "sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", program, "export", str(tiny_gguf), "--output", str(tmp_path / "new" / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"busy\n"
        assert {path.name for path in (tmp_path / "new").iterdir()} == {".out.partial", ".out.lock"}
        process.send_signal(getattr(signal, f"SIG{number}"))
        _, err = process.communicate(timeout=120)
    assert (process.returncode, [*(tmp_path / "new").glob("*")]) == (code, [])
    assert b"Traceback" not in err


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--help")
    assert code == 0
    assert all(command in out for command in ("chat", "export", "score", "bench"))


NO_UTF8 = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}


@pytest.mark.slow
def test_everything_works_in_a_locale_without_utf8(
    tiny_gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    source = shutil.copy(tiny_gguf, tmp_path / "naïve 你好.gguf")
    (tmp_path / "text.txt").write_text("naïve 你好", encoding="utf-8")
    lines = [
        f"edgespec export {tiny_gguf} --output {out}",
        f"edgespec chat '{source}' --prompt 'Say 你好' --max-tokens 3 --json",
        f"edgespec score {out} --file {tmp_path / 'text.txt'} --json",
    ]
    elsewhere = shell(" && ".join(lines), **NO_UTF8)
    assert elsewhere.returncode == 0, elsewhere.stderr
    here = [run(capsys, *shlex.split(line)[1:])[1] for line in lines[1:]]
    assert [json.loads(line).get("token_ids") for line in elsewhere.stdout.splitlines()] == [
        json.loads(line).get("token_ids") for line in here
    ]


@pytest.mark.slow
def test_stderr_that_is_full_changes_no_exit_code(tiny_model: Path) -> None:
    done = shell(f"edgespec chat {tiny_model} --prompt the --max-tokens 3 2>/dev/full")
    assert (done.returncode, bool(done.stdout)) == (0, True)
    assert shell("edgespec models path nothing-known 2>/dev/full").returncode == 3


@pytest.mark.slow
def test_no_device_id_is_left_by_the_runtime(tiny_model: Path, tmp_path: Path) -> None:
    done = shell(
        f"edgespec chat {tiny_model} --prompt the --max-tokens 3 --offline --no-answer-cache",
        HOME=str(tmp_path),
        CI="",
    )
    assert done.returncode == 0
    assert {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")} == {
        "home",
        "home/tokenizers.json",
        "home/usage.json",
    }


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with suppress(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out.startswith("edgespec 0.")


@pytest.mark.parametrize("step", ["edgespec.export.sources.read_gguf", "edgespec.export.convert.build_graphs"])
@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.ENOMEM, "Cannot allocate memory")])
def test_export_that_runs_out_of_memory_says_so_and_leaves_nothing(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tiny_gguf: Path,
    tmp_path: Path,
    step: str,
    error: Exception,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(step, fail)
    code, _, err = run(capsys, "export", tiny_gguf, "--output", tmp_path / "new" / "out")
    assert (code, [*(tmp_path / "new").glob("*")]) == (5, [])
    assert "out of memory" in err


def test_a_machine_without_a_thread_left_is_told_in_words(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tiny_model: Path
) -> None:
    def start(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")  # as Python does at ulimit -u

    for name in ("_start_new_thread", "_start_joinable_thread"):  # before Python 3.13, and since
        monkeypatch.setattr(f"threading.{name}", start, raising=False)
    code, out, err = run(capsys, "chat", tiny_model, "--prompt", "the")
    assert (code, out) == (1, "")
    assert "no further thread can be started; close other programs, or raise ulimit -u" in err


def test_an_answer_matches_the_schema_of_a_file(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "schema.json"
    path.write_text('{"type": "object", "properties": {"x": {"enum": [1, 22]}}, "required": ["x"]}')
    options = ["--prompt", "the in the in", "--max-tokens", "30", "--schema", path]
    code, out, _ = run(capsys, "chat", tiny_model, *options)
    assert code == 0
    assert json.loads(out)["x"] in (1, 22)
    code, out, err = run(capsys, "chat", tiny_model, *options, "--stop", "x")
    assert (code, out.strip()) == (1, '{"')
    assert "the answer is not complete JSON: a stop string (--stop) ended it" in err


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "cannot read"),
        ("{", "is not a JSON schema: "),
        ("[]", "is not a JSON schema: one is an object"),
        ('{"$ref": "https://a.b/c"}', "within the schema"),
        (
            '{"properties": {"x": {"type": "strin"}}}',
            ": the schema cannot be used: Invalid type: strin (at #/properties/x",
        ),
    ],
)
def test_a_schema_that_cannot_be_used_is_refused_with_the_reason(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, reason: str
) -> None:
    path = tmp_path / "schema.json"
    if text is not None:
        path.write_text(text)
    code, out, err = run(capsys, "chat", tiny_model, "--prompt", "the in", "--schema", path)
    assert (code, out) == (2, "")
    assert reason in err
    assert str(path) in err


def test_a_schema_without_an_end_is_refused(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if not Path("/dev/zero").exists():
        pytest.skip("needs /dev/zero, a device without an end, which Windows lacks")
    code, out, err = run(capsys, "chat", tiny_model, "--prompt", "the in", "--schema", "/dev/zero")
    assert (code, out) == (2, "")
    assert "/dev/zero is not a JSON schema: it has more than 4 MB" in err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--tools", "{folder}/nowhere.py"], 2, "nowhere.py is not a file; wanted a Python file"),
        (["--tools", "{folder}/broken.py"], 2, "broken.py cannot be run: ZeroDivisionError"),
        (["--tools", "{folder}/tools.py", "--allow", "nap"], 2, "'nap' is allowed, but there is no such tool"),
        (["--allow", "rest"], 2, "--allow rest has no tools to allow; give --tools FILE.py or --mcp COMMAND"),
        (["--tools", "{folder}/tools.py"], 3, "tiny cannot call tools: its chat template has no place for them"),
    ],
)
def test_tools_that_cannot_be_used_are_refused(
    tiny_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    words: str,
) -> None:
    (tmp_path / "tools.py").write_text("def rest() -> None: pass\n")
    (tmp_path / "broken.py").write_text("1 / 0\n")
    given = [argument.format(folder=tmp_path) for argument in arguments]
    found, out, err = run(capsys, "chat", tiny_model, "--prompt", "the in", *given)
    assert (found, out) == (code, "")
    assert words in err
    assert "Traceback" not in err


def test_a_model_calls_a_tool_that_is_allowed(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a decoder that calls by rule in the place of the model."""
    text = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    (tmp_path / "tools.py").write_text("def weather(city: str) -> str: return f'sunny in {city}'\n")

    def answer(prompt: str) -> str:
        return "No rain." if "sunny in Rome" in prompt else "Refused." if "was not run" in prompt else text

    engine = partial(scripted_engine, tiny_model, tmp_path / "model", answer)
    monkeypatch.setattr("edgespec.cli.chat.load_engine", lambda options, **settings: engine())
    asked = ["chat", tiny_model, "--prompt", "Rain?", "--tools", tmp_path / "tools.py"]
    code, out, err = run(capsys, *asked, "--allow", "weather")
    assert (code, out) == (0, "No rain.\n")
    assert 'the model calls weather(city="Rome")\nresult: sunny in Rome' in err
    code, out, err = run(capsys, *asked, "--json")
    assert json.loads(out)["text"] == "Refused."
    assert json.loads(out)["tool_calls"][0]["result"].startswith("This call was not run")
    assert "weather was not run: there is no terminal to ask in; --allow weather allows it" in err


@contextmanager
def rounds_logged() -> Iterator[None]:
    """What --log-rounds leaves in this process is taken away."""
    try:
        yield
    finally:
        rounds = logging.getLogger("edgespec.rounds")
        for handler in rounds.handlers[:]:
            rounds.removeHandler(handler)
            handler.close()
        rounds.setLevel(logging.NOTSET)


def test_rounds_are_logged_with_what_was_expected(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    options = ["--prompt", "the in the in", "--max-tokens", "20", "--json", "--log-rounds", str(path)]
    with rounds_logged():
        assert main(["chat", str(tiny_model), *options]) == 0
    rounds = [json.loads(line) for line in path.read_text().splitlines()]
    assert [each["round"] for each in rounds] == list(range(1, len(rounds) + 1))
    assert sum(each["num_accepted"] + 1 for each in rounds) >= 20
    assert rounds[0]["expected"]["none"] == {"num_draft": 0, "speed_over_plain": 1.0}


@pytest.mark.parametrize("flag", ["--log-rounds", "--trace"])
def test_a_file_that_is_there_is_not_written_over_unasked(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    path = tmp_path / "mine"
    path.write_text("mine")
    options = ["--prompt", "the", "--max-tokens", "2", flag, str(path)]
    code, out, err = run(capsys, "chat", str(tiny_model), *options)
    assert (code, out, path.read_text()) == (2, "", "mine")
    assert "--overwrite" in err
    with rounds_logged():
        assert main(["chat", str(tiny_model), *options, "--overwrite"]) == 0
    assert path.read_text() != "mine"


def test_a_real_run_is_replayed_with_its_tokens_a_pass(
    tiny_model: Path, tiny_drafter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rounds.jsonl"
    options = ["--drafter", str(tiny_drafter), "--draft-length", "3", "--schedule", "serial"]
    options += ["--prompt", "the in the in", "--max-tokens", "60", "--json", "--log-rounds", str(path)]
    with rounds_logged():
        code, out, _ = run(capsys, "chat", str(tiny_model), *options)
    stats = json.loads(out)["stats"]
    assert (code, stats["num_emitted"]) == (0, 60)
    figures = ["--target-ms", "80", "--draft-ms", "9", "--json"]
    code, out, _ = run(capsys, "simulate", "--replay", str(path), *figures)
    assert code == 0
    assert json.loads(out)["serial"]["tokens_per_pass"] == pytest.approx(stats["tokens_per_pass"])


def test_log_that_cannot_be_written_is_refused(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", str(tiny_model), "--prompt", "the", "--log-rounds", "/no/such/folder/x"]) == 2
    assert "cannot write /no/such/folder/x" in capsys.readouterr().err


def test_trace_holds_the_work_of_both_lanes(
    tiny_model: Path, tiny_drafter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.json"
    options = [
        "--prompt",
        "the in the",
        "--max-tokens",
        "12",
        "--drafter",
        str(tiny_drafter),
        "--draft-length",
        "3",
    ]
    code, _, err = run(capsys, "chat", str(tiny_model), *options, "--schedule", "pipelined", "--trace", str(path))
    assert code == 0
    events = json.loads(path.read_text())["traceEvents"]
    assert {event["args"]["name"] for event in events if event["ph"] == "M"} == {"target", "drafter"}
    assert sum(event["args"].get("num_tokens", 0) for event in events if event["name"] == "verify") >= 12
    target, drafter, whole, legend = err.splitlines()[-4:]
    assert target.startswith("target  ")
    assert drafter.startswith("drafter ")
    assert "in both lanes at once" in whole
    assert legend.endswith("· waiting")


@pytest.mark.usefixtures("heeds_ctrl_c")
@pytest.mark.parametrize("num_presses", [1, 2])
def test_trace_holds_an_answer_that_was_stopped(
    tiny_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    num_presses: int,
) -> None:
    def push(self: PlainPrinter, chunk: Chunk) -> None:
        for _ in range(num_presses * (not chunk.finish_reason)):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(PlainPrinter, "push", push)
    path = tmp_path / "trace.json"
    code, _, err = run(capsys, "chat", tiny_model, "--prompt", "the", "--drafter", "none", "--trace", path)
    assert code == 130
    events = json.loads(path.read_text())["traceEvents"]
    assert [event["name"] for event in events] == ["thread_name", "verify"]
    assert "in both lanes at once" in err


@pytest.mark.usefixtures("heeds_ctrl_c")
def test_json_has_what_was_made_before_ctrl_c(
    tiny_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ("chat", tiny_model, "--prompt", "the", "--drafter", "none", "--json")
    whole = json.loads(run(capsys, *asked, "--max-tokens", 40)[1])
    read = Reply.__next__

    def read_and_press(self: Reply) -> Chunk:
        chunk = read(self)
        if chunk.finish_reason is None:
            signal.raise_signal(signal.SIGINT)
        return chunk

    monkeypatch.setattr(Reply, "__next__", read_and_press)
    code, out, err = run(capsys, *asked, "--max-tokens", 400)
    stopped = json.loads(out)
    assert (code, stopped["finish_reason"]) == (130, "cancelled")
    assert 0 < len(stopped["token_ids"]) < 400
    num_both = min(40, len(stopped["token_ids"]))
    assert stopped["token_ids"][:num_both] == whole["token_ids"][:num_both]
    assert err == "edgespec: interrupted\n"


@pytest.mark.usefixtures("heeds_ctrl_c")
@pytest.mark.parametrize("hangs", [False, True])
def test_an_answer_that_was_left_is_in_the_trace_or_reported(
    tiny_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    hangs: bool,
) -> None:
    def push(self: PlainPrinter, chunk: Chunk) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(PlainPrinter, "push", push)
    monkeypatch.setattr(signals, "_ONE_PRESS_S", -1.0)
    if hangs:  # its thread has not ended, so that there is no last chunk
        monkeypatch.setattr(AnswerStream, "last", None)
    path = tmp_path / "trace.json"
    code, _, err = run(capsys, "chat", tiny_model, "--prompt", "the", "--drafter", "none", "--trace", path)
    events = [event["name"] for event in json.loads(path.read_text())["traceEvents"]]
    assert (code, events) == (130, [] if hangs else ["thread_name", "verify"])
    assert ("the trace lacks the last answer" in err) == hangs


def test_trace_that_cannot_be_written_is_refused(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", str(tiny_model), "--prompt", "the", "--trace", "/no/such/folder/x"]) == 2
    assert "cannot write /no/such/folder/x" in capsys.readouterr().err


def test_hint_names_a_folder_that_begins_with_a_dash_as_one() -> None:
    assert quote(Path("-dash"), "linux") == "./-dash"
    assert quote(Path("a b"), "linux") == "'a b'"


def test_doctor_tells_what_is_here(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, err = run(capsys, "doctor", "--json")
    document = json.loads(out)
    assert (code, err) == (0, "")
    assert document["home"]["path"] == str(tmp_path / "home")
    assert "CPUExecutionProvider" in document["onnxruntime"]["providers"]
    assert document["memory"]["total_bytes"] >= document["memory"]["available_bytes"] > 0
    assert document["memory"]["reserve_bytes"] >= 96 << 20
    assert document["memory"]["pressure"] in ("none", "some", "high")
    assert document["self_test"] is None
    assert next(device["device"] for device in document["devices"] if device["is_usable"]) == "cpu"
    code, out, _ = run(capsys, "doctor")
    assert code == 0
    assert document["onnxruntime"]["version"] in out
    assert "self-test: skipped" in out
    assert not (tmp_path / "home").exists()


def test_doctor_says_why_it_tests_no_model(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert f"self-test: skipped; {DEFAULT_MODEL} is not prepared (" in run(capsys, "doctor")[1]
    code, out, _ = run(capsys, "doctor", tiny_model, "--no-self-test")
    assert (code, out.splitlines()[-1]) == (0, "self-test: skipped; --no-self-test was given")
    (tmp_path / "config.toml").write_text("sead = 4\n")
    monkeypatch.setenv("EDGESPEC_CONFIG", str(tmp_path / "config.toml"))
    code, out, _ = run(capsys, "doctor", tiny_model)
    assert (code, "sead" in out, "is not prepared" in out) == (2, True, False)
    assert "self-test: skipped; the configuration is invalid; correct what its line above names" in out
    monkeypatch.setattr("edgespec.runtimes.devices.installed_builds", list)
    import_onnxruntime.cache_clear()
    code, out, _ = run(capsys, "doctor", tiny_model)
    import_onnxruntime.cache_clear()
    assert (code, out.splitlines()[-1]) == (4, "self-test: skipped; no model runs without ONNX Runtime")


def test_a_home_that_is_no_folder_is_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (file := tmp_path / "file").touch()
    for home in (file, file / "home"):
        monkeypatch.setenv("EDGESPEC_HOME", str(home))
        code, out, _ = run(capsys, "doctor")
        assert (code, "self-test: skipped; the configuration is invalid" in out) == (2, True)
        assert f"the model home is {home}, and {file} is not a folder; set EDGESPEC_HOME to one" in out
    monkeypatch.setenv("EDGESPEC_HOME", str(file))
    code, _, err = run(capsys, "models", "list")
    assert (code, err.split("; ")[1]) == (1, "set EDGESPEC_HOME to one, or in Python the argument home\n")


def test_doctor_runs_a_short_test_of_what_is_prepared(
    capsys: pytest.CaptureFixture[str], tiny_model: Path
) -> None:
    code, out, _ = run(capsys, "doctor", tiny_model, "--json")
    tested = json.loads(out)["self_test"]
    assert (code, tested["num_defects"], tested["problem"]) == (0, 0, None)
    assert tested["num_tokens"] > 0
    assert tested["plain_tokens_per_second"] > 0
    assert run(capsys, "doctor", "nothing-prepared")[0] == 3


def test_doctor_tests_the_model_that_chat_would_open(
    capsys: pytest.CaptureFixture[str], tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGESPEC_MODEL", str(tiny_model))
    assert f"self-test of {tiny_model}: " in run(capsys, "doctor")[1]
    assert run(capsys, "preset", "create", "mine", "--from", tiny_model)[0] == 0
    monkeypatch.setenv("EDGESPEC_MODEL", "mine")
    assert f"self-test of {tiny_model}: " in run(capsys, "doctor")[1]
    monkeypatch.setenv("EDGESPEC_MODEL", "other")
    assert "self-test: skipped; other is not prepared" in run(capsys, "doctor")[1]
    (model_home().presets.path / "other.toml").write_text("model =")
    code, out, err = run(capsys, "doctor")
    assert (code, err, "cores (" in out) == (3, "", True)
    assert "self-test of other: " in out
    assert "correct it, or remove it: edgespec preset rm other" in out


def mistaken_run(run: Callable[[OnnxDecoder, Pass], Rows]) -> Callable[[OnnxDecoder, Pass], Rows]:
    """OnnxDecoder.run with the rows of some passes in the wrong order."""

    def mistaken(self: OnnxDecoder, given: Pass) -> Rows:
        rows = run(self, given)
        return rows._replace(logits=rows.logits[::-1]) if given.num_rows == 5 else rows

    return mistaken


@pytest.mark.slow
def test_doctor_tells_of_drafted_text_that_is_another(
    capsys: pytest.CaptureFixture[str], tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(tiny_model, drafter="none").close()  # proves that rows are equal
    monkeypatch.setattr(OnnxDecoder, "run", mistaken_run(OnnxDecoder.run))
    code, out, _ = run(capsys, "doctor", tiny_model)
    assert code == 1
    assert "drafting CHANGES the text" in out


def test_doctor_says_where_deterministic_mode_does_not_hold(
    capsys: pytest.CaptureFixture[str], tiny_drafter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(tiny_drafter, tmp_path / "model"))
    (folder / "row_proofs.json").unlink(missing_ok=True)
    monkeypatch.setattr("edgespec.setup.row_proof.prove_rows", lambda *arguments, **options: FAILS)
    code, out, _ = run(capsys, "doctor", folder)
    assert (code, "can depend on the drafter where two tokens are nearly tied" in out) == (0, True)
    code, out, _ = run(capsys, "doctor", "--exactness", folder, "--max-tokens", 5)
    assert (code, "in deterministic mode: off by default for this model on this device" in out) == (0, True)


def test_doctor_reports_an_invalid_configuration(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.toml").write_text("threads = false")
    monkeypatch.setenv("EDGESPEC_CONFIG", str(tmp_path / "config.toml"))
    code, out, _ = run(capsys, "doctor")
    assert code == 2
    assert "config.toml:1: threads is 'False'" in out


def test_doctor_tells_variables_from_options_of_the_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.toml").write_text('memory = "2G"\nthreads = 1\n', "utf-8")
    monkeypatch.setenv("EDGESPEC_CONFIG", str(tmp_path / "config.toml"))
    monkeypatch.setenv("EDGESPEC_THREADS", "2")
    _, out, _ = run(capsys, "doctor", "--no-self-test")
    (line,) = [line for line in out.splitlines() if line.startswith("configuration: ")]
    named = line.removeprefix("configuration: ").partition(" (")[0].split(", ")
    assert [name for name in named if name != "EDGESPEC_HOME"] == ["EDGESPEC_THREADS", "memory"]


def test_doctor_says_what_is_wrong_with_the_runtime(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgespec.runtimes.devices.installed_builds", list)
    import_onnxruntime.cache_clear()
    code, out, _ = run(capsys, "doctor")
    assert code == 4
    assert "not installed" in out


@pytest.mark.parametrize("command", ["chat", "bench", "doctor"])
def test_help_names_every_drafter(capsys: pytest.CaptureFixture[str], command: str) -> None:
    words = run(capsys, command, "--help")[1].replace(",", " ").split()
    assert {"auto", "self", *TEXT, *TARGET} <= set(words)


@pytest.mark.slow
def test_doctor_finds_speculation_exact(
    capsys: pytest.CaptureFixture[str], tiny_model: Path, tiny_drafter: Path, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "the in the an"}\n{"turns": ["on the", "x"]}\n')
    arguments = ["doctor", "--exactness", tiny_model, "--drafter", tiny_drafter, "--prompts", prompts]
    code, out, _ = run(capsys, *arguments, "--max-tokens", 20, "--json")
    document = json.loads(out)
    assert (code, document["is_exact"], document["drafter"]) == (0, True, "tiny-int4")
    assert document["deterministic"] == {"holds": True, "tokens": 2 * 2 * 4 * 20, "differences": []}
    assert document["normal"]["tokens"] == 2 * 4 * 20
    code, out, _ = run(capsys, *arguments, "--max-tokens", 5)
    assert (code, "exact: " in out) == (0, True)


def test_doctor_leaves_out_what_does_not_fit(
    capsys: pytest.CaptureFixture[str], tiny_model: Path, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "the in " * 3000}) + '\n{"prompt": "the"}\n')
    arguments = ["doctor", "--exactness", tiny_model, "--prompts", prompts, "--max-tokens", 5]
    code, out, err = run(capsys, *arguments, "--json")
    assert (code, json.loads(out)["prompts"]) == (0, 1)
    assert "in deterministic mode: comparing the text of 1 prompt with and without drafts" in err
    assert "skipped 'the in the in" in err
    prompts.write_text(json.dumps({"prompt": "the in " * 3000}))
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert "every prompt was skipped" in err


def test_doctor_reports_a_defect(
    capsys: pytest.CaptureFixture[str],
    tiny_model: Path,
    tiny_drafter: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(OnnxDecoder, "run", mistaken_run(OnnxDecoder.run))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "the in the an"}')
    arguments = ["doctor", "--exactness", tiny_model, "--drafter", tiny_drafter, "--prompts", prompts]
    code, out, _ = run(capsys, *arguments, "--max-tokens", 12)
    assert code == 1
    assert "NOT exact" in out
    assert "defect: token" in out


@pytest.mark.parametrize("bad", [["--drafter", "none"], ["--max-tokens", "0"], ["--prompts", "nowhere.jsonl"]])
def test_doctor_refuses_invalid_options(
    capsys: pytest.CaptureFixture[str], tiny_model: Path, bad: list[str]
) -> None:
    assert run(capsys, "doctor", "--exactness", tiny_model, *bad)[0] == 2
    code, out, err = run(capsys, "doctor", *bad)  # which would test nothing of it
    assert (code, out) == (2, "")
    assert f"{bad[0]} is for --exactness MODEL" in err


@pytest.mark.skipif(
    not Path("/dev/full").exists(), reason="needs /dev/full, a device of Linux that is always full"
)
@pytest.mark.parametrize("command", [["--help"], ["models", "list"], ["simulate", "--machine", "list"]])
def test_full_stdout_is_reported_in_one_line(command: list[str]) -> None:
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "edgespec", *command],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (ended.returncode, ended.stderr) == (1, "edgespec: cannot write to stdout (No space left on device)\n")


def test_an_error_names_the_variable_that_set_a_number(
    capsys: pytest.CaptureFixture[str], tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGESPEC_THREADS", "0")
    assert run(capsys, "chat", tiny_model, "x")[2].endswith("(threads is set in EDGESPEC_THREADS)\n")


def test_misspelt_variable_is_reported_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGESPEC_TREADS", "2")
    monkeypatch.setenv("EDGESPEC_TEST_ANYTHING", "2")
    code, _, err = run(capsys, "models", "list", "--json")
    message = "the variable EDGESPEC_TREADS is unknown and has no effect; did you mean EDGESPEC_THREADS?"
    assert (code, err) == (0, f"edgespec: {message}\n")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"prompt": "x"}\n{"text": "y"}', "line 2: it has neither prompt nor turns"),
        ('\n{"prompt": "x"', "line 2 is not JSON (Expecting"),
        ("[1]", "line 1: wanted an object"),
        ('{"turns": []}', "line 1: turns is []: wanted a list of length >= 1"),
        ('{"prompt": " "}', "line 1: a prompt is empty"),
        ('{"prompt": 3}', "line 1: prompt is 3: wanted a text"),
        ("\xff", "it is not text in UTF-8"),
    ],
)
def test_invalid_prompts_are_reported_with_their_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, words: str
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(text.encode("latin-1"))
    code, _, err = run(capsys, "bench", "no-such-model", "--drafter", "none", "--prompts", path)
    assert code == 2
    assert "so plain decoding is compared with itself" in err
    assert f"{path} is not a prompts file (JSON Lines with turns or prompt): {words}" in err


@pytest.mark.parametrize("text", ["{}", "[1]", "{", "\xff", '{"model": NaN}'])
def test_report_of_another_shape_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.json"
    path.write_bytes(text.encode("latin-1"))
    code, _, err = run(capsys, "bench", "--report", path, "--json")
    assert code == 2
    assert f"{path} is not a document of edgespec bench --json: " in err
    assert "Error" not in err
