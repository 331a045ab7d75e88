"""From the fields of a request on tools to what an engine is asked, and its calls back into OpenAI's shapes."""

from collections.abc import Iterator, Sequence
from typing import Any

from edgespec.engine.engine import Engine
from edgespec.errors import ToolError, UsageError
from edgespec.server.errors import ApiError
from edgespec.server.protocol import ChatRequest, ResponsesRequest
from edgespec.tools.call_events import CallArguments, CallEvent, CallStart
from edgespec.tools.tool import Tool, ToolUse


def tool_use_of(asked: ChatRequest | ResponsesRequest) -> ToolUse | None:
    """The tools that an answer may call. Raises ApiError: 400, they are wrong."""
    try:
        return ToolUse.parse(asked.tools, asked.tool_choice, is_parallel=asked.parallel_tool_calls is not False)
    except ToolError as error:
        raise ApiError(400, str(error), param=error.field) from None
    except UsageError as error:
        param = "tool_choice" if str(error).startswith("tool_choice") else "tools"
        raise ApiError(400, str(error), param=param) from None


def tool_notes(use: ToolUse | None, engine: Engine) -> dict[str, str]:
    """edgespec's own field of an answer: how its model was told of its tools."""
    return {"tool_format": engine.tool_format} if use else {}


def call_deltas(events: Sequence[CallEvent]) -> Iterator[dict[str, Any]]:
    """What a chunk adds to the calls of a choice of /v1/chat/completions, each in a delta of its own."""
    for event in events:
        if isinstance(event, CallStart):
            function = {"name": event.name, "arguments": ""}
            yield {"index": event.index, "id": event.id, "type": "function", "function": function}
        elif isinstance(event, CallArguments):
            yield {"index": event.index, "function": {"arguments": event.text}}


def flat_tool(tool: Tool) -> dict[str, Any]:
    """A tool as /v1/responses states it."""
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description or None,
        "parameters": dict(tool.parameters),
        "strict": tool.strict,
    }


def flat_choice(use: ToolUse | None) -> str | dict[str, str]:
    """A choice of tools as /v1/responses states it."""
    if use is None or use.choice in ("auto", "required"):
        return "auto" if use is None else use.choice
    return {"type": "function", "name": use.choice}
