"""The tools of MCP servers that the operator named: GET /v1/tools lists them, POST /v1/tools/call runs one.

Models are not told of them by themselves: a client sends those that it wants with a request, asks its user before
each call, and sends the result on.
"""

import json
from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from edgespec import ToolCall
from edgespec.server.answers import Services
from edgespec.server.client import run_for_client, run_until_closing
from edgespec.server.errors import ApiError
from edgespec.server.model_host import in_daemon
from edgespec.server.protocol import ToolCallRequest
from edgespec.server.request_log import record_of


async def list_tools(services: Services, request: Request) -> Response:
    return JSONResponse({"object": "list", "data": [tool.as_dict() for tool in services.tools]})


async def call_tool(services: Services, request: Request) -> Response:
    """Run a call, as the last message of the model has it; its arguments are an object, or the text of one."""
    asked = await services.bodies.read(ToolCallRequest, request)
    runners = {tool.name: tool.run for tool in services.tools}
    if (run := runners.get(asked.name)) is None:
        there_are = (
            f"there are {', '.join(runners)}" if runners else "none was given on start: edgespec serve --mcp"
        )
        raise ApiError(
            404, f"there is no tool '{asked.name[:100]}'; {there_are}", param="name", code="tool_not_found"
        )
    stated = asked.arguments if isinstance(asked.arguments, str) else json.dumps(asked.arguments)
    call = ToolCall(id=asked.id, name=asked.name, arguments=stated)
    record_of(request.scope).notes.append(asked.name)

    async def answer() -> Response:
        with services.admission.place(1):
            text = await in_daemon(partial(run, call))
        return JSONResponse({"role": "tool", "tool_call_id": call.id, "name": call.name, "content": text})

    return await run_for_client(request.receive, run_until_closing(services.drain.is_closing, answer()))
