"""Tools of MCP servers: programs that offer tools to any model, in the Model Context Protocol.

The servers and the package mcp, which speaks with them, run in other processes. What they offer may be called only
after a yes. Knows nothing of the protocol.
"""

import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from threading import RLock
from urllib.parse import urlsplit

from edgespec.engine.tool_process import ToolProcess
from edgespec.errors import EdgeSpecError, UsageError
from edgespec.system.arguments import explains_arguments, require_function, require_kind
from edgespec.system.command_line import split_words
from edgespec.system.printable import one_line
from edgespec.system.progress import TERMINAL, silent
from edgespec.system.text_files import explain_unreadable
from edgespec.system.typed_json import read_as, read_json
from edgespec.tools.tool import ALL, Tool, ToolCall
from edgespec.types import Report

TIMEOUT_S = 60.0
_MOST_BYTES = 1 << 29  # that the process may hold that speaks with the servers
_SPARE_S = 10.0  # for this process to notice what the other one found


@dataclass(frozen=True)
class McpServer:
    """A server as a file states it: a command to start, or an address."""

    command: str | None = None
    args: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    cwd: str | None = None
    url: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    disabled: bool = False
    type: str | None = None


@explains_arguments
class McpServers:
    """Running MCP servers, whose tools a conversation can call. Close it, or use it in a with statement.

        with McpServers("uvx mcp-server-time") as servers:
            talk = engine.chat(tools=servers.tools)
            print(talk.run("What time is it?", may_call=lambda call: input(call.name) == "yes").text)

    tools: For Engine.stream, generate and chat. Conversation.run calls them only where may_call says yes, or where
        allow has their names.
    """

    def __init__(
        self,
        *servers: str | Path,
        allow: Collection[str] = (),
        timeout_s: float = TIMEOUT_S,
        report: Callable[[str], None] | None = TERMINAL.report,
    ) -> None:
        """Start the servers, and ask for their tools.

        Args:
            servers: Each a command, such as "npx -y some-server /folder", the address of a server over HTTP, or a
                file ending with .json that has "mcpServers" as other programs write it.
            allow: Names of tools that are called without a question, or "all".
            timeout_s: The longest that a server may take to start, and for a call.
            report: Takes a line for each tool that cannot be used, and one where a start takes long; None shows
                nothing.

        Raises:
            EdgeSpecError: The package mcp is not installed, or a server does not start.
            UsageError: An argument makes no sense.
        """
        is_list = isinstance(allow, Collection) and not isinstance(allow, Mapping)
        if not is_list or not all(isinstance(name, str) for name in allow):
            raise UsageError(f"allow is {allow!r:.60}; wanted names of tools, or {ALL}")
        if report is not None:
            require_function("report", report, "a function, or None")
        report = report or silent
        self._lock, self._is_closed = RLock(), False
        self._process = open_servers(servers, timeout_s=timeout_s, report=report)
        with ExitStack() as opened:
            opened.callback(self._process.close)
            allowed = require_allowed([allow] if isinstance(allow, str) else allow, self._process.tools)
            for note in self._process.notes:
                report(note)
            opened.pop_all()
        self.tools = tuple(
            replace(tool, run=self._run, is_allowed=tool.name in allowed) for tool in self._process.tools
        )

    def __enter__(self) -> "McpServers":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End the servers, and a call that is being run."""
        self._is_closed = True
        self._process.end_call()
        with self._lock:  # until that call has ended
            self._process.close()

    def _run(self, call: ToolCall) -> str:
        with self._lock:  # one call at a time
            if self._is_closed:
                raise EdgeSpecError(
                    f"{call.name} cannot be run: its MCP servers are closed; start McpServers again"
                )
            return self._process.run(call).text


def open_servers(
    given: Sequence[str | Path],
    taken: Collection[str] = (),
    *,
    timeout_s: float = TIMEOUT_S,
    report: Report = silent,
) -> ToolProcess:
    """Start servers, each as McpServers takes one; no tool gets a name that is taken.

    report: Takes a line where they take long.

    Raises as McpServers does.
    """
    if type(timeout_s) not in (int, float) or not (isfinite(timeout_s) and timeout_s > 0):
        raise UsageError(f"timeout_s is {timeout_s!r}; wanted seconds above 0")
    servers: dict[str, McpServer] = {}
    for each in given:
        for name, server in _read(each).items():
            number = next(
                n for n in range(1, len(servers) + 2) if (name if n == 1 else f"{name}{n}") not in servers
            )
            servers[name if number == 1 else f"{name}{number}"] = server
    if not servers:
        raise UsageError("there is no MCP server; give a command, an address, or a file with mcpServers")
    if find_spec("mcp") is None:
        raise EdgeSpecError(
            'tools of MCP servers need the package mcp, which is missing; pip install "edgespec[mcp]"'
        )
    begin = {
        "servers": {name: asdict(server) for name, server in servers.items()},
        "taken": sorted(taken),
        "most_s": timeout_s,
        "most_bytes": 2 * _MOST_BYTES,  # between calls, in which this process sees to it
    }
    return ToolProcess(
        ["-m", "edgespec.engine.mcp_worker"],
        f"the MCP server {', '.join(servers)}",
        begin,
        most_s=timeout_s * len(servers) + _SPARE_S,
        most_bytes=_MOST_BYTES,
        report=report,
    )


def require_allowed(allow: Collection[str], tools: Sequence[Tool]) -> set[str]:
    """The names of tools that need no question. Raises UsageError: One is allowed that there is not."""
    names = [tool.name for tool in tools]
    if unknown := [name for name in allow if name not in (*names, ALL)]:
        raise UsageError(
            f"'{one_line(unknown[0], 60)}' is allowed, but there is no such tool; there are {', '.join(names)} "
            f"(or {ALL})"
        )
    return {*names} if ALL in allow else {*allow}


def _read(given: str | Path) -> dict[str, McpServer]:
    """The servers of a file, or the one that an address or a command is, by their names."""
    require_kind("an MCP server", given, (str, Path), "a command, an address, or a file with mcpServers")
    text = str(given)
    if text.startswith(("http://", "https://")):
        return {urlsplit(text).hostname or "server": McpServer(url=text)}
    path = Path(os.path.expanduser(text))
    if isinstance(given, Path) or text.endswith(".json"):
        return _read_file(path)
    try:
        words = split_words(text)
    except ValueError as error:
        raise UsageError(f"the MCP server '{one_line(text, 80)}' is not a command ({error})") from None
    if not words:
        raise UsageError("the command of an MCP server is empty; give one, such as: uvx mcp-server-time")
    return {Path(words[0]).stem: McpServer(words[0], tuple(words[1:]))}


def _read_file(path: Path) -> dict[str, McpServer]:
    with explain_unreadable(path, 'a file of MCP servers, {"mcpServers": {"NAME": {"command": …, "args": […]}}}'):
        document = read_json(path)
        stated = document.get("mcpServers", document.get("servers")) if isinstance(document, dict) else None
        if not isinstance(stated, dict):
            raise ValueError("it has no object mcpServers")
        servers = {name: _parse(name, each) for name, each in stated.items()}
    return {name: server for name, server in servers.items() if not server.disabled}


def _parse(name: str, stated: object) -> McpServer:
    """Raises ValueError: It is no server."""
    try:
        server = read_as(McpServer, stated)
    except ValueError as error:
        raise ValueError(f"its server {json.dumps(name)} is wrong: {error}") from None
    if server.type == "sse":
        raise ValueError(f"its server {json.dumps(name)} is of the old type sse; use http")
    if bool(server.command) == bool(server.url):
        raise ValueError(f"its server {json.dumps(name)} needs either a command or a url")
    return server
