"""Runs functions of a file of Python in a process of their own."""

from pathlib import Path

from edgespec import ToolProcess, UsageError


def open_functions(path: Path) -> ToolProcess:
    """The functions of a file, as tools. Raises UsageError: It cannot be read or run, or has no function."""
    if not path.is_file():
        raise UsageError(f"{path} is no file; wanted a file of Python with functions")
    return ToolProcess(["-m", "edgespec.chat.function_worker", str(path.absolute())], str(path))
