"""The functions of a file of Python that a model may call. Runs the file: for a process of its own."""

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from edgespec.errors import UsageError

_MODULE = "edgespec_tool_file"  # not the file's own name, which may be that of a module that it imports

Functions = dict[str, Callable[..., Any]]


def load_functions(path: Path) -> Functions:
    """What __all__ of a file names, or else the functions that it defines, but for names that begin with _.

    Modules beside the file can be imported by it.

    Raises UsageError: It cannot be read or run, or has no function.
    """
    module = _run(path)
    names = getattr(module, "__all__", None)
    if names is None:
        names = [name for name, value in vars(module).items() if name[0] != "_" and _is_own(value)]
    functions = {name: getattr(module, name, None) for name in names}
    if lacking := [name for name, value in functions.items() if not callable(value)]:
        raise UsageError(f"{path} has no function '{lacking[0]}', which its __all__ names")
    if not functions:
        raise UsageError(
            f"{path} has no function; wanted at least one with typed arguments and a name without _ before it"
        )
    return functions  # type: ignore[return-value]


def _run(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(_MODULE, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is no file of Python; wanted a name that ends with .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_MODULE] = module  # where types of its functions are looked for
    sys.path.append(str(path.absolute().parent))
    sys.dont_write_bytecode = True
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        raise UsageError(f"{path} cannot be run: {describe_error(error, path)}") from None
    return module


def _is_own(value: object) -> bool:
    return inspect.isfunction(value) and value.__module__ == _MODULE


def describe_error(error: BaseException, path: Path) -> str:
    """An error in one line, with the last line of a file that it came through."""
    said = " ".join("".join(traceback.format_exception_only(error)).split())
    here = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == path]
    return f"{said} (line {here[-1]} of {path.name})" if here else said
