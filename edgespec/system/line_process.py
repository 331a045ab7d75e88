"""A process of Python that answers lines: a request is one to its stdin, and a reply one from its stdout."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import inf
from pathlib import Path
from threading import Thread
from time import monotonic

import psutil

from edgespec.errors import EdgeSpecError
from edgespec.system.threads import Owner
from edgespec.system.units import format_bytes

_POLL_S = 0.02
_PATIENCE = 10  # times the processor time that work may take, on a busy machine


class LineProcess(subprocess.Popen[bytes]):
    """owner: The process that started it, whose forks do not end it."""

    owner: Owner


class WorkEnded(Exception):
    """Work was given up; its words say why."""


def python_program() -> str:
    """The Python that runs this program.

    Where another program has Python within it, as uWSGI has, that is the Python of its packages.

    Raises EdgeSpecError: It is frozen, so that its own name starts all of it again, without end; or there is none.
    """
    if getattr(sys, "frozen", False):
        raise EdgeSpecError(
            "this program is frozen, as by PyInstaller, and edgespec has to start processes of Python; deliver "
            "the program with a Python that runs it"
        )
    program = sys.executable or "python3"
    if "py" in Path(program).stem.lower():
        return program
    places = ("python.exe", "Scripts/python.exe") if sys.platform == "win32" else ("bin/python3",)
    found = next((path for path in (Path(sys.prefix, place) for place in places) if path.is_file()), None)
    if found is None:
        raise EdgeSpecError(
            f"this program runs Python within {program}, and edgespec has to start processes of Python; there is "
            f"none in {sys.prefix}, so set sys.executable to one that has edgespec"
        )
    return str(found)


def start_python(*arguments: str) -> LineProcess:
    """Start it; what it writes to stderr is dropped.

    Raises:
        EdgeSpecError: There is no Python to start.
        OSError: It cannot be started.
    """
    process = LineProcess(
        # -P: no module of the folder hides one of Python's.
        [python_program(), "-P", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        # Ctrl-C is for the process that asks, and all that this one starts can be ended with it.
        start_new_session=True,
        creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),  # Windows
    )
    process.owner = Owner()
    return process


def ask(process: LineProcess, request: bytes, wake_s: float, watch: Callable[[], None] = lambda: None) -> bytes:
    """The next line of the process, behind a request unless that is empty; an empty one if the process ends first.

    watch: Called every wake_s seconds meanwhile; what it raises ends the waiting, as Ctrl-C does.
    """
    replies: list[bytes] = []

    def exchange() -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(OSError, ValueError):  # it ended without reading, maybe behind a line that says why
            process.stdin.write(request)
            process.stdin.flush()
        with suppress(OSError, ValueError):  # it was closed from another thread
            replies.append(process.stdout.readline())

    thread = Thread(target=exchange, name="lines", daemon=True)
    thread.start()
    thread.join(wake_s)
    while thread.is_alive():
        watch()
        thread.join(wake_s)
    return replies[0] if replies else b""


def ask_bounded(process: LineProcess, request: bytes, most_s: float, most_bytes: int) -> bytes:
    """The reply to a request that may never end, or take all memory.

    Args:
        most_s: Processor time that it may take; of the clock's time ten times as much.
        most_bytes: Memory that the process may hold.

    Raises WorkEnded: It takes longer or more, or the process has ended.
    """
    started, before_s = monotonic(), inf

    def watch() -> None:
        nonlocal before_s  # found out after some time, since most replies come before that
        spent_s = _processor_s(process)
        before_s = min(before_s, spent_s)
        if max(spent_s - before_s, (monotonic() - started) / _PATIENCE) > most_s:
            raise WorkEnded(f"it does not finish within {most_s:.0f} s")
        with suppress(psutil.Error):
            if psutil.Process(process.pid).memory_info().rss > most_bytes:
                raise WorkEnded(f"it takes more than {format_bytes(most_bytes)}")

    if not (reply := ask(process, request, _POLL_S, watch)):
        raise WorkEnded(f"{sys.executable}, which tried it, ended; was the engine closed, or is memory short?")
    return reply


def ask_once(arguments: Sequence[str], request: bytes, most_s: float, most_bytes: int) -> bytes:
    """The reply of a process that is started for one request, and ended behind it.

    Raises:
        EdgeSpecError, OSError: As start_python does.
        WorkEnded: As ask_bounded does.
    """
    process = start_python(*arguments)
    try:
        return ask_bounded(process, request, most_s, most_bytes)
    finally:
        dispose(process)


def _processor_s(process: LineProcess) -> float:
    with suppress(psutil.Error):
        times = psutil.Process(process.pid).cpu_times()
        return float(times.user + times.system)
    return 0.0


def kill(process: LineProcess) -> None:
    """End the process and those that it has started; from a signal handler too."""
    if process.returncode is not None or not process.owner.is_here:  # its number may be another's by now
        return
    others = []  # also those that have a session of their own
    with suppress(psutil.Error):
        others = psutil.Process(process.pid).children(recursive=True)
    with suppress(OSError):
        if sys.platform == "win32":
            process.terminate()
        else:
            os.killpg(process.pid, signal.SIGKILL)
    for each in others:
        with suppress(psutil.Error):
            each.kill()


def dispose(process: LineProcess) -> None:
    """End the process, wait for that, and close its pipes."""
    kill(process)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with suppress(OSError):  # a request that was not sent whole
            if pipe is not None:
                pipe.close()
