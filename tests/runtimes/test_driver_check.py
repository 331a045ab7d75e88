"""A driver that is missing, wrong or crashes is found out in a process of its own, and costs a line."""

import json
import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from edgespec.runtimes.driver_check import check_driver
from edgespec.runtimes.plugins import Missing

DRIVER = "install a driver with Vulkan, Direct3D 12 or Metal for your GPU"


def result(**found: Any) -> str:
    return json.dumps({"problem": None, **found})


def ending(monkeypatch: pytest.MonkeyPatch, code: int, stdout: str = "", stderr: str = "") -> Any:
    done = SimpleNamespace(returncode=code, stdout=stdout, stderr=stderr)
    monkeypatch.setattr(subprocess, "run", lambda *arguments, **options: done)
    return check_driver("webgpu")


def test_device_that_computes_has_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ending(monkeypatch, 0, "a library's line\n" + result()) is None


@pytest.mark.skipif(sys.platform == "win32", reason="ends a process by a signal, which Windows cannot")
def test_crash_ends_the_process_that_checks_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    run, crash = subprocess.run, f"import os; os.kill(os.getpid(), {int(signal.SIGSEGV)})"

    def crashing(command: list[str], **options: Any) -> Any:
        assert command[-2:] == ["edgespec.runtimes.driver_check", "webgpu:1"]
        return run([sys.executable, "-c", crash], **options)

    monkeypatch.setattr(subprocess, "run", crashing)
    assert check_driver("webgpu:1") == Missing("its driver crashed (SIGSEGV)", DRIVER)


@pytest.mark.parametrize("printed", ["", "no document", "[]", "{}"])
def test_process_that_tells_nothing_counts_as_a_crash(monkeypatch: pytest.MonkeyPatch, printed: str) -> None:
    assert ending(monkeypatch, 3, printed) == Missing("its driver crashed (exit code 3)", DRIVER)


def test_missing_loader_is_named_by_what_the_library_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "Warning: Couldn't load Vulkan: libvulkan.so.1: cannot open shared object file"
    found = ending(monkeypatch, 1, result(problem="it finds no GPU"), lines)
    assert isinstance(found, Missing)
    assert found.problem == "it finds no GPU"
    assert "apt install libvulkan1" in str(found.fix)


def test_driver_that_hangs_is_left() -> None:
    assert check_driver("cpu", timeout_s=0.001) == Missing("its driver gave no result within 0 s", None)


def test_check_computes_on_the_cpu_for_real() -> None:
    assert check_driver("cpu") is None


def test_name_of_no_device_is_a_problem_with_a_reason() -> None:
    found = check_driver("no-such-device")
    assert isinstance(found, Missing)
    assert "unknown device 'no-such-device'" in found.problem
