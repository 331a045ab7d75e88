"""Runs functions of a file in a process of their own, so that one that hangs, crashes or prints harms nothing.

The process is no sandbox: the functions may do what the user may. Their state lasts from call to call, until a
call is ended.
"""

import json
import os
import signal
import subprocess
import sys
import weakref
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

from edgespec import EdgeSpecError, Tool, ToolCall, UsageError, parse_tools

_WAKE_S = 0.02  # how often Ctrl-C is noticed where the system does not wake a waiting thread for it


class CallResult(NamedTuple):
    """The result of a call.

    text: For the model.
    printed: What the function has printed, or the end of that.
    """

    text: str
    is_error: bool = False
    printed: str = ""


class FunctionProcess:
    """The functions of a file of Python, which are run one at a time, in one process until a call is ended.

    Raises UsageError: The file cannot be read or run, or has no function that a model can call.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise UsageError(f"{path} is no file; wanted a file of Python with functions")
        self.path = path
        self.tools: tuple[Tool, ...] = ()
        self._process: subprocess.Popen[bytes] | None = None
        self._start()

    def run(self, call: ToolCall) -> CallResult:
        """Run a function; its errors are part of the result."""
        try:
            process = self._process or self._start()
            reply = _ask(process, {"name": call.name, "arguments": call.arguments})
        except EdgeSpecError as error:  # the file was changed or deleted meanwhile
            return CallResult(f"error: {error}", is_error=True)
        if reply is None:
            self.close()
            return CallResult(f"error: {call.name} was ended, or has ended its process", is_error=True)
        return CallResult(reply["text"], reply["is_error"], reply["printed"])

    def end_call(self) -> None:
        """End a call that is being run, and the programs that it has started; from a signal handler too.

        The next call runs the file anew.
        """
        if self._process is not None:
            _kill(self._process)

    def close(self) -> None:
        """End the process; it must not be running a call."""
        if self._process is not None:
            self._finalizer()
            self._process = None

    def _start(self) -> "subprocess.Popen[bytes]":
        self._process = process = _start_python(self.path)
        self._finalizer = weakref.finalize(self, _dispose, process)
        said = _ask(process, None)
        if said is None or "error" in said:
            self.close()
            raise UsageError(said["error"] if said else f"{self.path} ends the process that runs it")
        self.tools = parse_tools(said["tools"])
        return process


def _start_python(path: Path) -> "subprocess.Popen[bytes]":
    # -P: no module of the current folder hides one of Python's.
    command = [sys.executable or "python3", "-P", "-m", "edgespec.chat.function_worker", str(path.absolute())]
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # Ctrl-C is for the chat, and all that the functions start can be ended with them.
            start_new_session=True,
            creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),  # Windows
        )
    except OSError as error:
        raise EdgeSpecError(f"cannot start Python to run {path} ({error})") from None


def _ask(process: "subprocess.Popen[bytes]", request: Any) -> dict[str, Any] | None:
    """The next line of the process, behind a request if there is one; None if it ends first."""
    replies: list[bytes] = []
    exchange = Thread(target=_exchange, args=(process, request, replies), name="tool call", daemon=True)
    exchange.start()
    while exchange.is_alive():
        exchange.join(_WAKE_S)
    try:
        return dict(json.loads(replies[0]))
    except (IndexError, ValueError):  # it was ended before or within its reply
        return None


def _exchange(process: "subprocess.Popen[bytes]", request: Any, replies: list[bytes]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(OSError, ValueError):  # the process has ended
        if request is not None:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
        replies.append(process.stdout.readline())


def _kill(process: "subprocess.Popen[bytes]") -> None:
    if process.returncode is not None:  # its number may be another's by now
        return
    with suppress(OSError):
        if sys.platform == "win32":
            process.terminate()
        else:
            os.killpg(process.pid, signal.SIGKILL)


def _dispose(process: "subprocess.Popen[bytes]") -> None:
    _kill(process)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with suppress(OSError):  # a request that was not sent whole
            if pipe is not None:
                pipe.close()
