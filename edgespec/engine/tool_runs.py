"""Functions of Python that a model has called: run, with what they give as text. Knows nothing of models."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from edgespec.errors import UsageError
from edgespec.tools.tool import ToolCall

REFUSED = "the user does not want this call"  # what the model is told in place of a result

Functions = Mapping[str, Callable[..., Any]]


def functions_among(tools: Sequence[Any]) -> Functions:
    """Tools that are functions, by their names.

    Raises UsageError: One is a dict, which nobody can run.
    """
    for i, tool in enumerate(tools):
        if not callable(tool):
            raise UsageError(
                f"tools[{i}] is no function of Python, so it cannot be run here; give functions, or send the "
                "results of its calls yourself, with give_results"
            )
    return {tool.__name__: tool for tool in tools}


def run_call(functions: Functions, call: ToolCall) -> str:
    """What a called function gives, as text; what was wrong, as the model may then try another call."""
    try:
        given = functions[call.name](**call.parse(functions[call.name]))
        return given if isinstance(given, str) else json.dumps(given, ensure_ascii=False, default=str)
    except Exception as error:
        return f"error: {type(error).__name__}: {error}"
