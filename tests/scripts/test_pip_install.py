"""What make chat shows while pip installs, and the chat while a model is downloaded."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pip_install import PipProgress

LINES = """Obtaining file:///home/me/edgespec
  Installing build dependencies: started
Collecting onnxruntime>=1.30
  Downloading onnxruntime-1.30.0-cp311-cp311-manylinux_2_28_x86_64.whl (17.2 MB)
Collecting numpy
  Using cached numpy-2.4.6-cp311-cp311-manylinux_2_28_x86_64.whl (16.8 MB)
WARNING: nothing that matters
Installing collected packages: numpy, onnxruntime, edgespec
"""


def test_the_line_says_what_is_fetched_how_much_and_for_how_long() -> None:
    progress = PipProgress()
    texts = [progress.text(12.3) for line in LINES.splitlines() if progress.read(line)]
    assert texts[2] == "installing, 12 s: looking for onnxruntime · 1 packages, 0 MB so far"
    assert texts[3] == "installing, 12 s: fetching onnxruntime (17.2 MB) · 1 packages, 17 MB so far"
    assert texts[5] == "installing, 12 s: taking from the cache numpy (16.8 MB) · 2 packages, 34 MB so far"
    assert texts[6] == "installing, 12 s: writing 3 packages to disk · 2 packages, 34 MB so far"
    assert not progress.read("WARNING: nothing that matters")


@pytest.mark.slow
def test_what_pip_wrote_is_shown_where_it_fails(tmp_path: Path) -> None:
    program = Path(__file__).parents[2] / "scripts" / "pip_install.py"
    command = [sys.executable, str(program), "--no-index", str(tmp_path / "nothing-1.0-py3-none-any.whl")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "nothing-1.0-py3-none-any.whl" in done.stderr


@pytest.mark.slow
def test_a_terminal_shows_it_in_one_line_that_goes(tmp_path: Path) -> None:
    pytest.importorskip("pexpect", reason="needs a pseudo-terminal, which Windows lacks")
    from terminal import Terminal

    package = tmp_path / "tiny"
    package.mkdir()
    (package / "setup.py").write_text("from setuptools import setup; setup(name='tiny')")
    program = Path(__file__).parents[2] / "scripts" / "pip_install.py"
    arguments = (
        "--no-index",
        "--no-deps",
        "--dry-run",
        "--no-build-isolation",
        "--target",
        tmp_path / "x",
        package,
    )
    terminal = Terminal(program, *arguments, home=tmp_path, program=(sys.executable,))
    terminal.exit_code()
    assert "installing, " in terminal.written
    assert "\n" not in terminal.written[: terminal.written.index("installing, ") + 20]


@pytest.mark.slow
def test_a_terminal_shows_how_far_a_download_is(tiny_gguf: Path, tmp_path: Path) -> None:
    pytest.importorskip("pexpect", reason="needs a pseudo-terminal, which Windows lacks")
    from fake_hub import FakeHub
    from terminal import Terminal

    hub = FakeHub()
    try:
        model = tiny_gguf.read_bytes()
        hub.commit("someone/model", {"model.gguf": model + bytes((4 << 20) - len(model))})
        settings = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "EDGESPEC_OFFLINE": ""}
        terminal = Terminal("chat", "someone/model", "hello", home=tmp_path, environment=settings)
        terminal.wait_for("model.gguf:")
        terminal.exit_code()
    finally:
        hub.close()
    assert "/4.19M" in terminal.written


_PIP = """
import os, sys, time
lines = ["Collecting onnxruntime>=1.30", "  Downloading onnxruntime-1.30.0-cp311-linux.whl (17.2 MB)"]
if not {"-q", "--quiet"} & {*sys.argv}:
    print(*lines, sep="\\n", flush=True)
while not os.path.exists(os.environ["PIP_MAY_END"]):
    time.sleep(0.01)
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("make") is None, reason="needs make on the PATH")
def test_make_chat_shows_what_is_fetched_and_begins_the_chat(tmp_path: Path) -> None:
    pytest.importorskip("pexpect", reason="needs a pseudo-terminal, which Windows lacks")
    from terminal import Terminal

    programs, packages, end = tmp_path / "venv" / "bin", tmp_path / "packages" / "pip", tmp_path / "end"
    programs.mkdir(parents=True)
    packages.mkdir(parents=True)
    (packages / "__init__.py").touch()
    (packages / "__main__.py").write_text(_PIP)
    for name, line in {"python": f'exec {sys.executable} "$@"', "edgespec": "echo the $1 begins"}.items():
        (programs / name).write_text(f"#!/bin/sh\n{line}\n")
        (programs / name).chmod(0o755)
    settings = {"PYTHONPATH": str(packages.parent), "PIP_MAY_END": str(end)}
    program = ("make", "-C", str(Path(__file__).parents[2]))
    terminal = Terminal("chat", f"VENV={programs.parent}", home=tmp_path, environment=settings, program=program)
    terminal.wait_for("fetching onnxruntime (17.2 MB) · 1 packages, 17 MB so far")
    end.touch()
    terminal.wait_for("the chat begins")
    assert terminal.exit_code() == 0
    assert "fetching" not in terminal.screen()
