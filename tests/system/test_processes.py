"""The two processes of a command, on Windows as on POSIX. tests/cli/test_supervisor.py has the signals."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from edgespec import EdgeSpecError
from edgespec.runtimes.driver_check import check_driver
from edgespec.system import processes
from edgespec.system.line_process import ask, dispose, python_program, start_python
from edgespec.system.processes import run_child


def test_windows_waits_for_the_exit_code_and_takes_ctrl_c_for_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    before = signal.getsignal(signal.SIGINT)
    try:
        program = "import os, signal; os.kill(int(os.environ['PARENT']), signal.SIGINT); raise SystemExit(7)"
        environment = {**os.environ, "PARENT": str(os.getpid())}
        assert run_child([sys.executable, "-c", program], environment) == 7
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("platform", [sys.platform, "win32"])
def test_a_parent_that_has_ended_is_noticed(monkeypatch: pytest.MonkeyPatch, platform: str) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    assert processes._has_parent(os.getppid())
    assert not processes._has_parent(2**22 + 1)  # more than Linux gives out


FORKED = """
import os, sys
from edgespec.text.chat_template import TemplateProcess

renderer = TemplateProcess()
renderer.render("{{ x }}", x=1)
started = renderer.start()
if (child := os.fork()) == 0:
    sys.exit()
os.waitpid(child, 0)
assert renderer.render("{{ x }}", x=2) == "2"
assert renderer.start() is started
renderer.close()
print(started.returncode)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork, which Windows lacks")
def test_a_fork_that_ends_leaves_the_process_to_its_parent() -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORKED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("-9\n", "")


def test_a_frozen_program_does_not_start_itself_in_the_place_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    with pytest.raises(EdgeSpecError, match=r"frozen, as by PyInstaller, .* with a Python that runs it"):
        start_python("-c", "")
    assert "frozen" in check_driver("cpu").problem


def test_the_last_line_of_a_process_is_read_though_it_took_no_request() -> None:
    process = start_python("-c", "print('why')")
    try:
        process.wait(60)
        assert ask(process, b"a request\n", 0.02) == b"why\n"
    finally:
        dispose(process)


@pytest.mark.skipif(sys.platform == "win32", reason="needs bin/python3, which environments on Windows lack")
def test_python_within_another_program_is_that_of_its_packages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Within uWSGI sys.executable is uWSGI, which would be started anew in the place of Python."""
    assert python_program() == sys.executable
    monkeypatch.setattr(sys, "executable", "/bin/cat")
    found = python_program()
    assert subprocess.check_output([found, "-c", "import sys; print(sys.prefix)"], text=True).strip() == sys.prefix
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "win32")
    (tmp_path / "Scripts").mkdir()
    (program := tmp_path / "Scripts" / "python.exe").touch()
    assert python_program() == str(program)
    program.unlink()
    with pytest.raises(EdgeSpecError, match=r"within /bin/cat, .* none in .*, so set sys.executable"):
        start_python("-c", "")
