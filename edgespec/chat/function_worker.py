"""The process that runs functions of a file of Python; tool_box.py starts it with the path of the file.

It writes what the functions are, then takes a call a line and writes what it gave, all as JSON. What functions
print is no part of that: it is caught, and sent with the result. It ends with the process that started it.
"""

import importlib.util
import inspect
import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from io import TextIOWrapper
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from types import ModuleType
from typing import Any, BinaryIO, TextIO

from edgespec import ToolCall, UsageError, cut_result, parse_tools, result_text

_MODULE = "edgespec_tool_file"  # not the file's own name, which may be that of a module that it imports

Functions = dict[str, Callable[..., Any]]
_MAX_PRINTED = 2_000  # of what it prints, the last ones


def load_functions(path: Path) -> Functions:
    """The functions that __all__ of a file names, or else those that it defines, but for names that begin with _.

    Modules beside the file can be imported by it.

    Raises UsageError: It cannot be read or run, or has no function.
    """
    module = _run(path)
    names = getattr(module, "__all__", None)
    if names is None:
        names = [
            name
            for name, value in vars(module).items()
            if name[0] != "_" and inspect.isfunction(value) and value.__module__ == _MODULE
        ]
    functions = {name: value for name in names if callable(value := getattr(module, name, None))}
    if lacking := [name for name in names if name not in functions]:
        raise UsageError(f"{path} has no function '{lacking[0]}', which its __all__ names")
    if not functions:
        raise UsageError(
            f"{path} has no function; wanted at least one with typed arguments and a name without _ before it"
        )
    return functions


def _run(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(_MODULE, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is not a Python file; its name must end with .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_MODULE] = module  # where types of its functions are looked for
    sys.path.append(str(path.absolute().parent))
    sys.dont_write_bytecode = True
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        raise UsageError(f"{path} cannot be run: {describe_error(error, path)}") from None
    return module


def describe_error(error: BaseException, path: Path) -> str:
    """An error in one line, with the last line of a file that it came through."""
    said = " ".join("".join(traceback.format_exception_only(error)).split())
    here = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == path]
    return f"{said} (line {here[-1]} of {path.name})" if here else said


def main() -> int:
    path = Path(sys.argv[1])
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    printed = _Printed()
    try:
        functions = load_functions(path)
        tools = parse_tools([*functions.values()])
        renamed = [name for name, tool in zip(functions, tools, strict=True) if name != tool.name]
        if renamed:
            raise UsageError(f"{path} has '{renamed[0]}', which is another name of a function; give it one name")
    except UsageError as error:
        _write(replies, {"error": str(error)})
        return 0
    printed.take()
    _write(replies, {"tools": [tool.as_dict() for tool in tools]})
    calls: SimpleQueue[bytes] = SimpleQueue()
    Thread(target=_read, args=(requests, calls), daemon=True).start()
    while True:
        asked = json.loads(calls.get())
        reply = _call(functions, ToolCall(id="", name=asked["name"], arguments=asked["arguments"]), path)
        _write(replies, {**reply, "printed": printed.take()})


def _call(functions: Functions, call: ToolCall, path: Path) -> dict[str, Any]:
    try:
        function = functions[call.name]
        result = function(**call.parse(function))
        if inspect.iscoroutine(result):
            import asyncio  # takes 50 ms

            result = asyncio.run(result)
        return {"text": cut_result(result_text(call.name, result)), "is_error": False}
    except BaseException as error:  # also SystemExit: the model is told, and the next call finds the process
        return {"text": cut_result(f"error: {describe_error(error, path)}"), "is_error": True}


class _Printed:
    """A file in the place of stdout and stderr, also for programs that the functions start."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - it is open as long as the process lives
        for descriptor in (1, 2):
            os.dup2(self._file.fileno(), descriptor)
        for stream in (sys.stdout, sys.stderr):
            assert isinstance(stream, TextIOWrapper)
            stream.reconfigure(encoding="utf-8", errors="replace")  # Windows gives it the code page of the system

    def take(self) -> str:
        """The end of what was printed since the last time."""
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        file = self._file.fileno()
        size = os.fstat(file).st_size
        os.lseek(file, max(0, size - _MAX_PRINTED), os.SEEK_SET)
        text = os.read(file, _MAX_PRINTED).decode(errors="replace")
        os.ftruncate(file, 0)
        os.lseek(file, 0, os.SEEK_SET)
        return f"…{text}" if size > _MAX_PRINTED else text


def _read(requests: BinaryIO, calls: "SimpleQueue[bytes]") -> None:
    """Pass requests on; once nobody can send any, end this process and those that it started, also in a call."""
    for line in requests:
        calls.put(line)
    if sys.platform != "win32" and os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


def _write(replies: TextIO, document: dict[str, Any]) -> None:
    replies.write(json.dumps(document) + "\n")
    replies.flush()


if __name__ == "__main__":
    sys.exit(main())
