"""The command serve: what it refuses before it serves, its address, and how it ends."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from argparse import Namespace
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx2
import pytest

from edgespec import ModelHome
from edgespec.cli import serve
from edgespec.cli.main import main
from edgespec.server.limits import Limits
from edgespec.server.model_names import ModelNames
from edgespec.server.serving import open_socket, within_open_files


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--host", "0.0.0.0"], "--api-key"),
        (["--host", "192.168.1.2", "--api-key", " "], "empty"),
        *(
            (["--host", host], "an address alone")
            for host in ("localhost:8080", "http://localhost", "[::1]:80", "")
        ),
        (["--port", "70000"], "0 to 65535"),
        (["--max-models", "0"], "at least 1"),
        (["--max-parallel", "0"], "1 to 16"),
        (["--max-parallel", "17"], "1 to 16"),
        (["--idle-timeout", "-1"], "seconds"),
        (["--idle-timeout", "nan"], "seconds"),
    ],
)
def test_what_cannot_be_is_refused_before_a_model_is_loaded(
    flags: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve, "load_any_engine", lambda *given, **named: pytest.fail("a model is loaded"))
    assert main(["serve", "tiny", *flags]) == 2
    assert words in capsys.readouterr().err


def test_an_empty_variable_is_no_key_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EDGESPEC_API_KEY", "")
    monkeypatch.setattr(serve, "load_any_engine", lambda *given, **named: pytest.fail("a model is loaded"))
    assert main(["serve", "tiny"]) == 2
    assert "EDGESPEC_API_KEY is empty" in capsys.readouterr().err


def test_a_port_in_use_is_told_before_a_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve, "load_any_engine", lambda *given, **named: pytest.fail("a model is loaded"))
    with open_socket("127.0.0.1", 0) as taken:
        assert main(["serve", "tiny", "--port", str(taken.getsockname()[1])]) == 1
    assert "--port 0" in capsys.readouterr().err


def test_a_drafter_model_without_a_model_to_draft_for_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path))
    with open_socket("127.0.0.1", 0) as taken:
        for drafter, is_told in (("ngran", True), ("ngram", False)):
            assert main(["serve", "--drafter", drafter, "--port", str(taken.getsockname()[1])]) == 1
            assert (f"the drafter '{drafter}' is not used" in capsys.readouterr().err) == is_told


def test_nothing_is_downloaded_for_a_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even the model of the command line, whose folder may be gone when it is loaded once more."""
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(serve, "load_any_engine", lambda options, **settings: asked.append(settings))
    names = ModelNames(ModelHome(tmp_path), own="smollm2-135m")
    for name in ("smollm2-135m", "other"):
        serve._open_engine(Namespace(drafter="auto", offline=False), names, name)
    assert [each["offline"] for each in asked] == [True, True]


def test_packages_that_are_missing_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve, "find_spec", lambda name: None)
    assert main(["serve"]) == 1
    assert 'pip install "edgespec[serve]"' in capsys.readouterr().err


def test_a_key_is_never_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EDGESPEC_API_KEY", "s3cret")
    monkeypatch.setattr(serve, "find_spec", lambda name: name)
    for arguments in (["config"], ["config", "--json"], ["serve", "--port", "70000", "--verbose"]):
        main(arguments)
    captured = capsys.readouterr()
    assert "api-key" in captured.out
    assert "api-key" in captured.err
    assert "s3cret" not in captured.out + captured.err


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals, which Windows lacks")
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)],
    ids=["SIGTERM", "Ctrl-C"],
)
def test_a_server_tells_its_address_answers_and_ends_with_a_signal(
    tiny_model: Path, tiny_gguf: Path, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    """S13, in a process of its own."""
    (tmp_path / "presets").mkdir()
    (tmp_path / "models" / "broken").mkdir(parents=True)
    of_tiny, gguf = f"model = {json.dumps(str(tiny_model))}\n", json.dumps(str(tiny_gguf))
    for name, text in {
        "damaged": "model = [",
        "hot": f"{of_tiny}temperature = -1.0",
        "later": f"model = {gguf}",
        "helper": f'{of_tiny}tools = "/tools.py"',
        "fine": of_tiny,
    }.items():
        (tmp_path / "presets" / f"{name}.toml").write_text(text)
    command = [sys.executable, "-m", "edgespec", "serve", str(tiny_model), "--port", "0", "--json"]
    command.append("--keep-prefix")
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "EDGESPEC_HOME": str(tmp_path)},
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        told = json.loads(process.stdout.readline())
        assert {tiny_model.name, "fine", "helper"} <= {*told["models"]}
        asked = {"messages": [{"role": "user", "content": "the in " * 20}], "max_tokens": 4}
        answer = httpx2.post(f"{told['url']}/chat/completions", json=asked, timeout=60)
        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] == 4
        process.send_signal(number)
        said = process.stderr.read()
        assert process.wait(60) == code
        assert re.search(r"^\d{4}-\d\d-\d\d [\d:]{8} edgespec: POST /v1/chat/completions 200 ", said, re.MULTILINE)
        assert "saved the KV cache of " in said
        assert str(tmp_path / "prefixes") in said
        assert "Traceback" not in said
        assert "the model 'broken' cannot be used: broken has no edgespec.json" in said
        assert f"the preset 'damaged' cannot be used: {tmp_path / 'presets' / 'damaged.toml'}: " in said
        assert "the preset 'hot' cannot be used: temperature is -1.0" in said
        assert (
            "the model of the preset 'later' is prepared at its first request; to prepare it now: edgespec" in said
        )
        assert "the preset 'helper' is served without its tools (/tools.py), which only edgespec chat" in said
        assert "'fine'" not in said


@pytest.mark.skipif(sys.platform == "win32", reason="needs named pipes, which Windows lacks")
def test_a_log_that_is_a_pipe_which_nobody_reads_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "log")
    command = [sys.executable, "-m", "edgespec", "serve", "--no-supervisor", "--log", str(tmp_path / "log")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, "it is a pipe that nobody reads" in done.stderr) == (2, True)


UNLIMITED = -1


@pytest.mark.parametrize(
    ("limits", "raised", "num_connections"),
    [
        ((256, UNLIMITED), (2048, UNLIMITED), 512),
        ((1024, 4096), (2048, 4096), 512),
        ((64, 64), (64, 64), 16),
        ((UNLIMITED, UNLIMITED), None, 512),
    ],
)
def test_a_server_has_the_files_that_its_connections_need(
    monkeypatch: pytest.MonkeyPatch,
    limits: tuple[int, int],
    raised: tuple[int, int] | None,
    num_connections: int,
) -> None:
    resource = pytest.importorskip("resource", reason="needs limits of POSIX, which Windows lacks")
    monkeypatch.setattr(resource, "RLIM_INFINITY", UNLIMITED)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits)
    monkeypatch.setattr(resource, "setrlimit", asked := Mock())
    assert within_open_files(Limits()).num_connections == num_connections
    assert [call.args[1] for call in asked.call_args_list] == ([raised] if raised else [])


def test_more_clients_than_files_leave_the_server_answering(tiny_model: Path, tmp_path: Path) -> None:
    resource = pytest.importorskip("resource", reason="needs limits of POSIX, which Windows lacks")
    with subprocess.Popen(
        [sys.executable, "-m", "edgespec", "serve", str(tiny_model), "--port", "0", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "EDGESPEC_HOME": str(tmp_path)},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)),
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        url = json.loads(process.stdout.readline())["url"]
        port = int(url.rpartition(":")[2].removesuffix("/v1"))
        with ExitStack() as opened:
            opened.callback(process.terminate)
            for _ in range(70):
                opened.enter_context(socket.create_connection(("127.0.0.1", port)))
            asked = {"messages": [{"role": "user", "content": "the in"}], "max_tokens": 2}
            answer = httpx2.post(f"{url}/chat/completions", json=asked, timeout=120)
        said = process.stderr.read()
    assert answer.status_code == 200, said
    assert "Too many open files" not in said
