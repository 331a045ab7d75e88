"""A display for the programs that have a window."""

import gc
import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def display_name() -> Iterator[str | None]:
    """A display that exists in memory only; None where the desktop has one.

    It lasts as long as all tests: Tk ends a process whose display goes away.
    """
    pytest.importorskip("tkinter", reason="needs Tk, which this Python was built without (Debian: python3-tk)")
    if os.environ.get("DISPLAY") or os.name == "nt":
        yield None
        return
    if shutil.which("Xvfb") is None:
        pytest.skip("needs a display, and there is neither one nor Xvfb (Debian: xvfb)")
    ours, theirs = os.pipe()
    command = ["Xvfb", "-displayfd", str(theirs), "-screen", "0", "800x600x24", "-nolisten", "tcp"]
    server = subprocess.Popen(command, pass_fds=[theirs], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    os.close(theirs)
    with os.fdopen(ours) as numbers:
        yield f":{numbers.readline().strip()}"
    server.terminate()
    server.wait(10)


@pytest.fixture
def display(display_name: str | None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The desktop's display, or one in memory."""
    if display_name is not None:
        monkeypatch.setenv("DISPLAY", display_name)
    yield
    gc.collect()  # Tk ends a process where another thread frees a window, as one of the next test would
