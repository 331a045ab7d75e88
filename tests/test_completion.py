"""What a shell offers, by the parser and in the shells themselves."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from edgespec.catalog import CATALOG
from edgespec.cli import command_parser, main
from edgespec.completion import SCRIPTS, completions


def offered(*words: str) -> list[str]:
    return completions(
        command_parser(), words, lambda: ["mine", "smollm2-135m"], lambda: ["mine"], lambda: ["cpu", "cuda"]
    )


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["mod"], ["models"]),
        (["models", ""], ["list", "path", "pull", "remove", "verify"]),
        (["models", "pull", "m"], ["mine"]),
        (["chat", "--sched"], ["--schedule"]),
        (["chat", "--schedule", "p"], ["pipelined"]),
        (["chat", "--schedule", "=", "p"], ["pipelined"]),
        (["chat", "mine", "--drafter", "s"], ["self", "smollm2-135m", "suffix"]),
        (["chat", "--json", "m"], ["mine"]),
        (["chat", "--trace", "m"], []),
        (["config", "set", "drafter-d"], ["drafter-device"]),
        (["config", "set", "overflow", ""], ["drop-oldest", "error"]),
        (["config", "set", "offline", "t"], ["true"]),
        (["config", "set", "device", "c"], ["cpu", "cuda"]),
        (["config", "set", "model", ""], ["mine", "smollm2-135m"]),
        (["models", "remove", ""], ["mine"]),
        (["chat", "--device", "c"], ["cpu", "cuda"]),
        (["help", "ch"], ["chat"]),
        (["help", "models", "r"], ["remove"]),
        (["completion", ""], ["bash", "fish", "words", "zsh"]),
        (["nonsense", "--x"], []),
    ],
)
def test_words_fit_their_place(words: list[str], expected: list[str]) -> None:
    assert offered(*words) == expected


def test_every_command_is_offered_where_nothing_is_typed() -> None:
    parser = command_parser()
    assert parser.inner is not None
    assert offered("") == offered() == sorted(parser.inner.choices)


def test_prepared_models_are_offered_with_those_of_the_catalogue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "models" / "mine").mkdir(parents=True)
    (tmp_path / "models" / ".mine.partial").mkdir()
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path))
    assert main(["completion", "words", "--", "chat", ""]) == 0
    assert capsys.readouterr().out.split() == sorted({*CATALOG, "mine"})


@pytest.mark.parametrize("shell", sorted(SCRIPTS))
def test_script_completes_in_its_shell(shell: str, tmp_path: Path) -> None:
    found = shutil.which(shell)
    if found is None:
        pytest.skip(f"{shell} is not installed")
    (tmp_path / "edgespec").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m edgespec "$@"\n')
    (tmp_path / "edgespec").chmod(0o755)
    asks = {
        "bash": SCRIPTS["bash"]
        + 'COMP_WORDS=(edgespec chat --schedule p); COMP_CWORD=3; _edgespec; echo "${COMPREPLY[@]}"',
        "zsh": "compdef() { }; compadd() { shift; print -l -- $@ }\n"
        + SCRIPTS["zsh"]
        + "words=(edgespec chat --schedule p); CURRENT=4; _edgespec",
        "fish": SCRIPTS["fish"] + "complete -C 'edgespec chat --schedule pi'",
    }
    environment = os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "HOME": str(tmp_path)}
    done = subprocess.run([found, "-c", asks[shell]], capture_output=True, text=True, env=environment, check=False)
    assert "pipelined" in done.stdout.split(), done.stderr
