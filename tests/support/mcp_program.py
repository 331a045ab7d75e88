"""An MCP server on its stdin and stdout, by the package mcp, with tools that work and tools that harm."""

import os
import sys
import time
from pathlib import Path

from mcp.server.mcpserver import MCPServer
from mcp.types import ImageContent, TextContent

server = MCPServer("tiny")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two whole numbers."""
    return a + b


@server.tool(name="read.file")
def read_file(path: str) -> str:
    """Read a file."""
    raise OSError(f"there is no {path}")


@server.tool()
def variable(name: str) -> str:
    """A variable of the environment."""
    return os.environ.get(name, "not set")


@server.tool()
def long_text() -> str:
    return "x" * 50_000


@server.tool()
def picture() -> list[TextContent | ImageContent]:
    return [
        TextContent(type="text", text="a dot"),
        ImageContent(type="image", data="AAAA", mime_type="image/png"),
    ]


@server.tool()
def hang(path: str) -> str:
    Path(path).write_text(str(os.getpid()))
    time.sleep(600)
    return ""


@server.tool()
async def freeze() -> str:
    time.sleep(600)  # so that the server reads nothing more
    return ""


@server.tool()
def die() -> str:
    os._exit(3)


if __name__ == "__main__":
    if "--http" in sys.argv:
        server.run("streamable-http", port=int(sys.argv[-1]))
    else:
        server.run()
