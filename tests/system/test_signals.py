"""Ctrl-C within what is to be done whole: heard once, behind it."""

import argparse
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import edgespec
from edgespec.cli import worker
from edgespec.export.output import atomic_folder
from edgespec.system.signals import defer_signals

pytestmark = pytest.mark.usefixtures("heeds_ctrl_c")
Importing = tuple[Callable[[str], ModuleType], list[str]]


@pytest.fixture
def importing() -> Importing:
    """Imports a module while Ctrl-C is pressed, and notes that it has."""
    imported: list[str] = []

    def imports(name: str) -> ModuleType:
        signal.raise_signal(signal.SIGINT)
        imported.append(name)
        return import_module(name)

    return imports, imported


def test_it_is_heard_behind_it_and_once() -> None:
    done: list[str] = []

    def work() -> None:
        with defer_signals():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            done.append("whole")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["whole"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_is_told_where_nothing_was_pressed_and_else_ctrl_c() -> None:
    def work(is_pressed: bool) -> None:
        with defer_signals():
            if is_pressed:
                signal.raise_signal(signal.SIGINT)
            raise ImportError("broken")

    with pytest.raises(ImportError, match="broken"):
        work(is_pressed=False)
    with pytest.raises(KeyboardInterrupt):
        work(is_pressed=True)


def test_what_is_ignored_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with defer_signals():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_other_threads_leave_the_handlers_alone() -> None:
    found: list[object] = []

    def work() -> None:
        with defer_signals():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [signal.default_int_handler]


def test_a_public_name_is_imported_whole(importing: Importing, monkeypatch: pytest.MonkeyPatch) -> None:
    imports, imported = importing
    monkeypatch.setattr(edgespec, "import_module", imports)
    with pytest.raises(KeyboardInterrupt):
        edgespec.__getattr__("load")
    assert imported == ["edgespec.engine.load"]


def test_a_worker_has_numpy_whole(importing: Importing, monkeypatch: pytest.MonkeyPatch) -> None:
    imports, imported = importing
    monkeypatch.setattr(worker, "import_module", imports)
    options = argparse.Namespace()
    with pytest.raises(KeyboardInterrupt):
        worker.prepare(options, lambda name, value: None, "")
    assert (imported, options) == (["numpy"], argparse.Namespace())


@pytest.mark.parametrize("begins", ["rmtree", "rmdir", "unlink"])
def test_a_second_ctrl_c_leaves_nothing_of_an_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begins: str
) -> None:
    """A process group is sent one Ctrl-C, and the supervisor passes another on."""
    place = shutil if begins == "rmtree" else Path
    remove = getattr(place, begins)

    def removes(*arguments: Any, **options: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        remove(*arguments, **options)

    def export() -> None:
        with atomic_folder(tmp_path / "deep" / "out") as folder:
            (folder / "model.onnx.data").write_bytes(b"much")
            monkeypatch.setattr(place, begins, removes)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        export()
    assert list(tmp_path.iterdir()) == []


# A thread that does not end stands for one within native code, which Python's own end makes a crash.
PROGRAM = """
import atexit, sys, threading, time
from edgespec import __main__
from edgespec.cli import main as cli

def stopped():
    print("printed")
    {how}

cli.main = stopped
threading.Thread(target=time.sleep, args=(600,)).start()
atexit.register(print, "cleaned up")
sys.exit(__main__.main())
"""


@pytest.mark.parametrize(
    ("how", "code"), [("return 130", 130), ("raise KeyboardInterrupt", 130), ("sys.exit(143)", 143)]
)
def test_a_command_that_was_stopped_waits_for_no_thread(how: str, code: int) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(how=how)], capture_output=True, text=True, timeout=120, check=False
    )
    assert (ended.returncode, ended.stdout) == (code, "printed\ncleaned up\n")
    assert "Traceback" not in ended.stderr
