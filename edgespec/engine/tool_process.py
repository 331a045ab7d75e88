"""Runs calls of tools in a process of their own, so that one that hangs, crashes or prints harms nothing.

The process is no sandbox: what it runs may do what the user may. Its state lasts from call to call, until a call
is ended. It writes its tools first, and then takes a call a line and writes what that gave, as JSON.
"""

import json
import weakref
from collections.abc import Sequence
from contextlib import suppress
from math import inf
from time import monotonic
from typing import Any, NamedTuple

import psutil

from edgespec.errors import EdgeSpecError, UsageError
from edgespec.system.line_process import LineProcess, WorkEnded, ask, dispose, kill, start_python
from edgespec.system.progress import silent
from edgespec.system.units import format_bytes
from edgespec.tools.tool import Tool, ToolCall, parse_tools
from edgespec.types import Report

MAX_RESULT = 8_000  # characters of what a call gives; some 2,000 tokens
_SLOW_S = 3.0  # of a start, beyond which the user is told what is waited for
_WAKE_S = 0.02  # how often Ctrl-C is noticed where the system does not wake a waiting thread for it


class CallResult(NamedTuple):
    """The result of a call.

    text: For the model.
    printed: What the function has printed, or the end of that.
    """

    text: str
    is_error: bool = False
    printed: str = ""


def cut_result(text: str) -> str:
    """A result that is no longer than a model should read."""
    text = text.encode(errors="replace").decode()  # halves of surrogate pairs are no text
    return text if len(text) <= MAX_RESULT else f"{text[:MAX_RESULT]}… (cut: it has {len(text)} characters)"


class ToolProcess:
    """Tools that are run one at a time, in one process until a call is ended."""

    def __init__(
        self,
        words: Sequence[str],
        source: str,
        begin: object = None,
        *,
        most_s: float = inf,
        most_bytes: float = inf,
        report: Report = silent,
    ) -> None:
        """Start it.

        Args:
            words: Arguments of Python.
            source: What has the tools, for messages.
            begin: What the process is told first, as JSON; None for nothing.
            most_s, most_bytes: The longest time of a start or a call, and the most memory; then it is ended.
            report: Takes a line once this start takes long.

        Raises:
            EdgeSpecError: It cannot be started.
            UsageError: What has the tools cannot be used, as it says.
        """
        self._words, self._source, self._begin = words, source, begin
        self._most_s, self._most_bytes = most_s, most_bytes
        self.tools: tuple[Tool, ...] = ()
        self.notes: list[str] = []  # what the process said of its tools
        self._process: LineProcess | None = None
        self._start(report)

    def run(self, call: ToolCall) -> CallResult:
        """Run a tool; its errors are part of the result."""
        if self._process is not None and self._process.poll() is not None:  # it has ended since the call before
            self.close()
        try:
            process = self._process or self._start()
            reply = self._ask(process, {"name": call.name, "arguments": call.arguments})
        except EdgeSpecError as error:  # what has the tools was changed or deleted meanwhile
            return CallResult(f"error: {error}", is_error=True)
        except WorkEnded as error:
            self.close()
            return CallResult(f"error: {call.name} was ended: {error}", is_error=True)
        except BaseException:  # Ctrl-C: the reply would be taken for that of the next call
            self.close()
            raise
        if reply is None or reply.get("is_over"):
            self.close()
        if reply is None:
            return CallResult(f"error: {call.name} was ended, or has ended its process", is_error=True)
        return CallResult(reply["text"], reply["is_error"], reply["printed"])

    def end_call(self) -> None:
        """End a call that is being run, and the programs that it has started; from a signal handler too.

        The next call starts the process anew.
        """
        if self._process is not None:
            kill(self._process)

    def close(self) -> None:
        """End the process; it must not be running a call."""
        if self._process is not None:
            self._finalizer()
            self._process = None

    def _start(self, report: Report = silent) -> LineProcess:
        try:
            process = start_python(*self._words)
        except OSError as error:
            raise EdgeSpecError(f"cannot start Python to run {self._source} ({error})") from None
        self._process, self._finalizer = process, weakref.finalize(self, dispose, process)
        try:
            said = self._ask(process, self._begin, report)
        except WorkEnded as error:
            said = {"error": f"{self._source} cannot be used: {error}"}
        except BaseException:
            self.close()
            raise
        if said is None or "error" in said:
            self.close()
            raise UsageError(said["error"] if said else f"{self._source} ends the process that runs it")
        self.tools, self.notes = parse_tools(said["tools"]), said.get("notes", [])
        return process

    def _ask(self, process: LineProcess, request: object, report: Report = silent) -> dict[str, Any] | None:
        """The next line of the process, behind a request if there is one; None if it ends first.

        Raises WorkEnded: It takes longer, or more memory, than it may.
        """
        started, is_slow = monotonic(), False

        def watch() -> None:
            nonlocal is_slow
            waited_s = monotonic() - started
            if waited_s > _SLOW_S and not is_slow:
                is_slow = True
                report(f"waiting for the tools of {self._source}; Ctrl-C stops it")
            if waited_s > self._most_s:
                raise WorkEnded(f"it took longer than {self._most_s:g} s")
            with suppress(psutil.Error):
                if self._most_bytes < inf and psutil.Process(process.pid).memory_info().rss > self._most_bytes:
                    raise WorkEnded(f"it took more than {format_bytes(self._most_bytes)} of memory")

        line = b"" if request is None else json.dumps(request).encode() + b"\n"
        try:
            return dict(json.loads(ask(process, line, _WAKE_S, watch)))
        except ValueError:  # it was ended before or within its reply
            return None
