"""What a shell offers at Tab, by the parser and in the shells themselves."""

import io
import os
import shutil
import subprocess
import sys
from pathlib import Path

import argcomplete
import pytest

from edgespec.cli.completion import _SHELLS, answer_shell
from edgespec.cli.main import command_parser, main
from edgespec.runtimes.device_names import device_names
from edgespec.setup.catalog import CATALOG
from edgespec.simulation.machines import read_machines


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model home with a pair, "mine", whose head has learned mail, and a model that is being prepared."""
    (tmp_path / "models" / "mine" / "drafter" / "learned").mkdir(parents=True)
    (tmp_path / "models" / "mine" / "drafter" / "learned" / "mail.npz").touch()
    (tmp_path / "models" / ".mine.partial").mkdir()
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def offered(line: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Words that a shell would show for a command line."""
    output = io.StringIO()
    with monkeypatch.context() as patch:
        patch.setattr(argcomplete.CompletionFinder, "_init_debug_stream", lambda self: None)  # file 9 is pytest's
        bash = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line))}
        for name, value in (bash | {"_ARGCOMPLETE_COMP_WORDBREAKS": " \t\n\"'><=;|&(:"}).items():
            patch.setenv(name, value)
        answer_shell(command_parser(), exit_method=lambda code: None, output_stream=output)
    return sorted(word.strip() for word in output.getvalue().split("\v") if word)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("mod", ["models"]),
        (
            "models ",
            ["forget", "learned", "list", "path", "prune", "ps", "pull", "remove", "rename", "show", "verify"],
        ),
        ("models pull mine", ["mine"]),
        ("models verify mine", ["mine"]),
        ("chat --sched", ["--schedule"]),
        ("chat --schedule p", ["pipelined"]),
        ("chat --schedule=p", ["pipelined"]),
        ("chat mine --drafter s", ["self", *sorted(name for name in CATALOG if name[0] == "s"), "suffix"]),
        ("bench mine --compare n", ["ngram", "none"]),
        ("chat --json mine", ["mine"]),
        ("chat --trace mo", ["models/"]),
        ("config set drafter-d", ["drafter-device"]),
        ("config set overflow ", ["drop-oldest", "error"]),
        ("config set offline t", ["true"]),
        ("config set device c", sorted(name for name in device_names() if name[0] == "c")),
        ("config set model ", sorted({*CATALOG, "mine"})),
        ("config set draft-length ", ["auto"]),
        ("models remove ", ["mine"]),
        ("models forget ", ["mine"]),
        ("models forget mine ", ["mail"]),
        ("models learned ", ["mine"]),
        ("chat --learn ", ["mail"]),
        ("chat --device c", sorted(name for name in device_names() if name[0] == "c")),
        ("export s", sorted(name for name in CATALOG if name[0] == "s")),
        ("export mo", ["models/"]),
        ("export m.gguf --drafter mo", ["models/"]),
        ("preset create poet --from mine", ["mine"]),
        ("pair check mine ", sorted({*CATALOG, "mine"})),
        ("simulate --machine ", sorted(["list", *read_machines()])),
        ("simulate --drafter-device ", ["cpu", "npu"]),
        ("help ch", ["chat"]),
        ("help models r", ["remove", "rename"]),
        ("serve mine", ["mine"]),
        ("serve --ho", ["--host"]),
        ("completion ", ["bash", "fish", "zsh"]),
        ("nonsense --x", []),
    ],
)
def test_words_fit_their_place(line: str, expected: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert offered(f"edgespec {line}", monkeypatch) == expected


def test_every_command_is_offered_where_nothing_is_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    parser = command_parser()
    assert parser.commands is not None
    assert offered("edgespec ", monkeypatch) == sorted(parser.commands.choices)


def test_prepared_models_are_offered_with_those_of_the_catalogue(monkeypatch: pytest.MonkeyPatch) -> None:
    assert offered("edgespec chat ", monkeypatch) == sorted({*CATALOG, "mine"})


@pytest.mark.parametrize("shell", sorted(_SHELLS))
def test_script_completes_in_its_shell(shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = shutil.which(shell)
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "edgespec" in script
    if found is None:
        pytest.skip(f"needs {shell} on the PATH (Debian: {shell})")
    (tmp_path / "edgespec").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m edgespec "$@"\n')
    (tmp_path / "edgespec").chmod(0o755)
    line = "edgespec chat --schedule pi"
    asks = {
        "bash": f"{script}\nCOMP_LINE='{line}' COMP_POINT={len(line)} COMP_TYPE=9; export COMP_LINE COMP_POINT\n"
        "_python_argcomplete edgespec; echo ${COMPREPLY[@]}",
        "zsh": "compdef() { }; _describe() { print -l -- ${(P)2} }\n" + script
        + f"\nBUFFER='{line}' CURSOR={len(line)} words=(edgespec); _python_argcomplete edgespec",
        "fish": f"{script}\ncomplete -C '{line}'",
    }  # fmt: skip
    environment = os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "HOME": str(tmp_path)}
    done = subprocess.run([found, "-c", asks[shell]], capture_output=True, text=True, env=environment, check=False)
    assert "pipelined" in done.stdout, done.stderr
