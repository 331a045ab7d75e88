"""Runs functions of a file in a process of their own, so that one that hangs, crashes or prints harms nothing.

The process is no sandbox: the functions may do what the user may. Their state lasts from call to call, until a
call is ended.
"""

import json
import weakref
from pathlib import Path
from typing import Any, NamedTuple

from edgespec import EdgeSpecError, Tool, ToolCall, UsageError, parse_tools
from edgespec.system.line_process import LineProcess, ask, dispose, kill, start_python

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
        self._process: LineProcess | None = None
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
            kill(self._process)

    def close(self) -> None:
        """End the process; it must not be running a call."""
        if self._process is not None:
            self._finalizer()
            self._process = None

    def _start(self) -> LineProcess:
        try:
            process = start_python("-m", "edgespec.chat.function_worker", str(self.path.absolute()))
        except OSError as error:
            raise EdgeSpecError(f"cannot start Python to run {self.path} ({error})") from None
        self._process, self._finalizer = process, weakref.finalize(self, dispose, process)
        said = _ask(process, None)
        if said is None or "error" in said:
            self.close()
            raise UsageError(said["error"] if said else f"{self.path} ends the process that runs it")
        self.tools = parse_tools(said["tools"])
        return process


def _ask(process: LineProcess, request: Any) -> dict[str, Any] | None:
    """The next line of the process, behind a request if there is one; None if it ends first."""
    try:
        return dict(
            json.loads(ask(process, b"" if request is None else json.dumps(request).encode() + b"\n", _WAKE_S))
        )
    except ValueError:  # it was ended before or within its reply
        return None
