"""The process that speaks with MCP servers, by the package mcp; mcp_servers.py starts it.

It is told the servers, writes their tools, then takes a call a line and writes what it gave, all as JSON. It ends
with the process that started it, and its servers with it.
"""

import asyncio
import json
import os
import re
import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import AsyncExitStack, suppress
from threading import Thread
from time import sleep
from typing import IO, Any, NamedTuple, TextIO

import psutil

from edgespec.engine.tool_process import cut_result
from edgespec.errors import UsageError
from edgespec.tools.tool import parse_tools

_NO_NAME = re.compile(r"[^a-zA-Z0-9_-]")
_LONGEST_NAME = 64
_MOST_TOOLS = 128
_CONNECT_S = 30.0
_MOST_PAGES = 50
_PING_S = 2.0
_WATCH_S = 0.5
_LONGEST_DESCRIPTION = 4_000  # characters
_STDERR_BYTES = 400  # of what a server said that fails

Write = Callable[[Mapping[str, Any]], None]


def _end_in_floods(most_bytes: int) -> None:
    """End this process, and its servers, once what they have sent takes too much memory."""
    own = psutil.Process()
    while own.memory_info().rss <= most_bytes:
        sleep(_WATCH_S)
    for each in own.children(recursive=True):
        with suppress(psutil.Error):
            each.kill()
    os._exit(1)


class _Place(NamedTuple):
    """Where a tool is: the client of its server, and its name there."""

    client: Any
    name: str


def main() -> int:
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)

    def write(document: Mapping[str, Any]) -> None:
        replies.write(json.dumps(document) + "\n")
        replies.flush()

    try:
        import mcp

        if not hasattr(mcp, "Client"):
            raise ImportError("it is older than 2.0")
    except ImportError as error:
        write({"error": f'tools of MCP servers need the package mcp ({error}); run: pip install "edgespec[mcp]"'})
        return 0
    asyncio.run(_work(requests, write))
    return 0


async def _work(requests: IO[bytes], write: Write) -> None:
    lines: asyncio.Queue[bytes] = asyncio.Queue()
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def read() -> None:
        for line in requests:
            loop.call_soon_threadsafe(lines.put_nowait, line)
        loop.call_soon_threadsafe(task.cancel)  # the servers end first

    Thread(target=read, daemon=True).start()
    begin = json.loads(await lines.get())
    Thread(target=_end_in_floods, args=(begin["most_bytes"],), daemon=True).start()
    async with AsyncExitStack() as stack:
        try:
            tools = await _open(stack, begin)
        except _ServerFailed as error:
            write({"error": str(error)})
            return
        write({"tools": tools.stated, "notes": tools.notes})
        while True:
            asked = json.loads(await lines.get())
            result = await _call(tools.places.get(asked["name"]), asked, begin["most_s"])
            write(result)
            if result.get("is_over"):
                return


class _Messages:
    """The end of what a server writes to stderr, which may be without end itself."""

    def __init__(self) -> None:
        reading, writing = os.pipe()
        self.file = os.fdopen(writing, "w")
        self._end = bytearray()
        self._thread = Thread(target=self._read, args=(reading,), daemon=True)
        self._thread.start()

    def _read(self, reading: int) -> None:
        while data := os.read(reading, 1 << 16):
            self._end += data
            del self._end[:-_STDERR_BYTES]
        os.close(reading)

    def last(self) -> str:
        """The end, in one line, once the server has ended or for a second."""
        self.file.close()
        self._thread.join(1.0)
        return " ".join(bytes(self._end).decode(errors="replace").split())


class _ServerFailed(Exception):
    """A server does not start, or offers nothing."""


class _Tools:
    """The tools of all servers, by names that a model may use.

    places: Where each is.
    stated: What models are told of them, as the field tools of a request.
    notes: Why some are left out.
    """

    def __init__(self, taken: Collection[str]) -> None:
        self._taken = set(taken)  # names
        self.places: dict[str, _Place] = {}
        self.stated: list[dict[str, Any]] = []
        self.notes: list[str] = []

    def add(self, server: str, client: Any, offered: Any) -> None:
        """Add a tool that a server offers, or note why it cannot be used."""
        name = _NO_NAME.sub("_", offered.name)[:_LONGEST_NAME]
        if name in self._taken:
            name = f"{_NO_NAME.sub('_', server)}_{name}"[:_LONGEST_NAME]
        description = (offered.description or "")[:_LONGEST_DESCRIPTION]
        function = {"name": name, "description": description, "parameters": offered.input_schema}
        try:
            parse_tools([{"type": "function", "function": function}])
            if name in self._taken:
                raise UsageError(f"another tool is called {name}")
            if len(self.stated) == _MOST_TOOLS:
                raise UsageError(f"there are more than {_MOST_TOOLS}")
        except UsageError as error:
            self.notes.append(f"the tool {offered.name!r} of the MCP server {server} is left out: {error}")
            return
        self._taken.add(name)
        self.places[name] = _Place(client, offered.name)
        self.stated.append({"type": "function", "function": function})


async def _open(stack: AsyncExitStack, begin: Mapping[str, Any]) -> _Tools:
    """Start the servers, and ask for their tools. Raises _ServerFailed: One does not start, or none has any."""
    tools = _Tools(begin["taken"])
    for server, stated in begin["servers"].items():
        messages = _Messages()
        try:
            async with asyncio.timeout(begin["most_s"]):
                client = await stack.enter_async_context(_client(stated, messages.file, begin["most_s"]))
                offered = await _offered(client)
        except Exception as error:
            said = f"; it said: {text}" if (text := messages.last()) else ""
            why = _words(error, begin["most_s"])
            raise _ServerFailed(f"the MCP server {server} does not start: {why}{said}") from None
        messages.file.close()  # the server has it
        for each in offered:
            tools.add(server, client, each)
    if not tools.stated:
        servers = ", ".join(begin["servers"])
        raise _ServerFailed("; ".join(tools.notes) or f"the MCP server {servers} offers no tools")
    return tools


def _client(stated: Mapping[str, Any], messages: TextIO, most_s: float) -> Any:
    """A client of a server, whose stderr goes to a file."""
    from mcp import Client, StdioServerParameters
    from mcp.client.stdio import stdio_client
    from mcp.client.streamable_http import streamable_http_client

    if stated["url"]:
        import httpx2

        http = httpx2.AsyncClient(headers=stated["headers"], timeout=httpx2.Timeout(_CONNECT_S, read=most_s))
        return Client(streamable_http_client(stated["url"], http_client=http), read_timeout_seconds=most_s)
    parameters = StdioServerParameters(
        command=stated["command"],
        args=stated["args"],
        env=stated["env"],
        cwd=stated["cwd"],
        encoding_error_handler="replace",
    )
    return Client(stdio_client(parameters, errlog=messages), read_timeout_seconds=most_s)


async def _offered(client: Any) -> list[Any]:
    """The tools that a server has, as far as it lists them in a bounded number of parts."""
    found: list[Any] = []
    cursor = None
    for _ in range(_MOST_PAGES):
        part = await client.list_tools(cursor=cursor)
        found += part.tools
        if not (cursor := part.next_cursor):
            break
    return found


async def _call(place: _Place | None, asked: Mapping[str, str], most_s: float) -> dict[str, Any]:
    """The result of a call.

    is_over: The server has ended, hangs or has forgotten this session; all are started anew for the next call.
    """
    if place is None:  # the servers were started anew, and one offers less than before
        return {"text": f"error: there is no tool {asked['name']} any more", "is_error": True, "printed": ""}
    from mcp_types import CONNECTION_CLOSED, INVALID_PARAMS

    try:
        arguments = json.loads(asked["arguments"])
        if not isinstance(arguments, dict):
            raise ValueError("the arguments are not a JSON object")
        result = await place.client.call_tool(place.name, arguments, read_timeout_seconds=most_s)
    except (Exception, asyncio.CancelledError) as error:  # an HTTP server that is gone cancels the task
        code = getattr(error, "code", None)
        has_ended = code == CONNECTION_CLOSED or isinstance(error, asyncio.CancelledError)
        said = "its MCP server has ended" if has_ended else _words(error, most_s)
        is_over = has_ended or (code not in (None, INVALID_PARAMS) and not await _answers(place.client))
        return {"text": cut_result(f"error: {said}"), "is_error": True, "printed": "", "is_over": is_over}
    text = _text_of(result)
    return {
        "text": cut_result(f"error: {text}" if result.is_error else text),
        "is_error": bool(result.is_error),
        "printed": "",
    }


async def _answers(client: Any) -> bool:
    """True if a server answers a ping, or says that it knows none; one that has forgotten the session does not."""
    from mcp_types import METHOD_NOT_FOUND

    try:
        async with asyncio.timeout(_PING_S):
            await client.send_ping()
    except (Exception, asyncio.CancelledError) as error:  # as in _call
        return getattr(error, "code", None) == METHOD_NOT_FOUND
    return True


def _text_of(result: Any) -> str:
    parts = []
    for part in result.content:
        text = getattr(getattr(part, "resource", part), "text", None)
        parts.append(text if isinstance(text, str) else f"({part.type}, which is not text, is left out)")
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(parts)


def _words(error: BaseException, most_s: float) -> str:
    """The first error of a group, in a line."""
    from mcp_types import REQUEST_TIMEOUT

    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    is_timeout = getattr(error, "code", None) == REQUEST_TIMEOUT and "timed out" in str(error)
    if isinstance(error, TimeoutError) or is_timeout:  # servers have this code for forgotten sessions too
        return f"it took longer than {most_s:g} s"
    if isinstance(error, OSError) and error.filename:
        return f"{error.strerror}: {error.filename}"
    return " ".join(str(getattr(error, "message", "") or error).split()) or type(error).__name__


if __name__ == "__main__":
    sys.exit(main())
