"""What the tools of an answer ask of its grammar and of its reader."""

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from edgespec.engine.request import CallReading
from edgespec.errors import FormatError, UsageError
from edgespec.tools.formats import CallFormat
from edgespec.tools.tool import ToolUse, schema_refusal

if TYPE_CHECKING:
    from edgespec.grammar.compile import GrammarCompiler
    from edgespec.grammar.response_format import ResponseFormat


def call_reading(use: ToolUse, format: CallFormat, *, whole: bool) -> CallReading:
    """How the calls of an answer are found; whole: given once they are whole."""
    if use.is_ensured:
        from edgespec.grammar.call_grammar import constrained_format

        format = constrained_format(format)
    return CallReading(use, format, whole)


def format_with_calls(
    calls: CallReading, response_format: Mapping[str, Any] | None, find_special: Callable[[], Mapping[str, int]]
) -> "ResponseFormat | None":
    """What an answer has to match that may have calls, or else has to match a response_format.

    Args:
        find_special: Gives the tokens that grammars have to name, by their spelling.

    Raises:
        FormatError: The response_format is wrong.
        ToolError: No grammar can hold the schema of a tool.
        UsageError: The response_format is of another kind, or no grammar can hold calls of this form.
    """
    if not (calls.use.is_ensured or response_format):
        return None
    from edgespec.grammar.call_grammar import call_grammar, constrained_format
    from edgespec.grammar.response_format import read_format

    wanted = read_format(response_format)
    if wanted is None and not calls.use.is_ensured:
        return None
    if wanted is not None and wanted.kind != "json_schema":
        raise UsageError(
            f"tools are given with a response_format of the type {wanted.kind}; leave one of them out, or give a "
            "JSON schema"
        )
    schema = None if wanted is None else json.loads(wanted.source)
    return call_grammar(calls.use, constrained_format(calls.format), find_special(), schema)


def explain_refusal(use: ToolUse, refused: FormatError, compiler: "GrammarCompiler") -> UsageError:
    """The error of a grammar of calls that cannot be compiled: it names the tool whose schema is the reason."""
    from edgespec.grammar.response_format import read_format

    for tool in use.possible:
        try:
            alone = read_format({"type": "json_schema", "schema": tool.parameters})
            fault = compiler.find_fault(alone) if alone else None
        except FormatError as error:
            fault = str(error)
        if fault is not None:
            return schema_refusal(tool, fault)
    return cannot_be_ensured(refused)


def cannot_be_ensured(refused: FormatError) -> UsageError:
    """The error of a grammar of calls that no single tool is the reason of."""
    return UsageError(f"tools cannot be ensured as they are asked for: {refused}")
