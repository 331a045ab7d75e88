"""Tools of MCP servers, with real servers in processes of their own: what they give, and how they fail."""

import asyncio
import json
import re
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from rule_chat import RuleEngine
from until import until

from edgespec import Conversation, EdgeSpecError, McpServers, ToolCall, UsageError
from edgespec.engine import mcp_servers, tool_process
from edgespec.engine.mcp_servers import McpServer, open_servers
from edgespec.engine.mcp_worker import _call, _Place, _text_of, _Tools
from edgespec.system.command_line import join_words
from edgespec.tools.tool import REFUSED

SUPPORT = Path(__file__).parents[1] / "support"
TINY = join_words([sys.executable, SUPPORT / "mcp_program.py"])
needs_mcp = pytest.mark.skipif(find_spec("mcp") is None, reason="needs the package mcp")


def raw(behaviour: str) -> str:
    return join_words([sys.executable, SUPPORT / "raw_mcp_program.py", behaviour])


def call(name: str, /, **arguments: Any) -> ToolCall:
    return ToolCall(id="1", name=name, arguments=json.dumps(arguments))


@pytest.fixture(scope="module")
def servers() -> Iterator[McpServers]:
    with McpServers(TINY, allow=["add"]) as servers:
        yield servers


def run(servers: McpServers, asked: ToolCall) -> str:
    (tool,) = [tool for tool in servers.tools if tool.name == asked.name]
    assert tool.run
    return tool.run(asked)


@needs_mcp
@pytest.mark.slow
def test_tools_are_listed_and_give_texts(servers: McpServers) -> None:
    tools = {tool.name: tool for tool in servers.tools}
    assert tools["add"].description == "Add two whole numbers."
    assert tools["add"].parameters["required"] == ["a", "b"]
    assert run(servers, call("add", a=1, b=2)) == "3"
    assert run(servers, call("picture")) == "a dot\n(image, which is not text, is left out)"
    assert run(servers, call("long_text")).endswith("… (cut: it has 50000 characters)")
    assert run(servers, call("add", a="x", b=2)).startswith("error: ")
    assert run(servers, call("read_file", path="/x")).startswith("error: ")
    assert run(servers, ToolCall(id="1", name="add", arguments="[1]")).startswith(
        "error: the arguments are not a JSON object"
    )


@needs_mcp
@pytest.mark.slow
def test_a_server_that_ends_is_started_anew(servers: McpServers) -> None:
    assert run(servers, call("die")) == "error: its MCP server has ended"
    assert run(servers, call("add", a=2, b=2)) == "4"


@needs_mcp
@pytest.mark.slow
def test_a_call_that_hangs_is_ended_with_its_server(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    process = open_servers([TINY])

    def end_once_it_hangs() -> None:
        while not (pid_file.exists() and pid_file.read_text()):
            time.sleep(0.01)
        process.end_call()

    Thread(target=end_once_it_hangs).start()
    assert "was ended" in process.run(call("hang", path=str(pid_file))).text
    server = int(pid_file.read_text())
    until(lambda: not psutil.pid_exists(server) or psutil.Process(server).status() == psutil.STATUS_ZOMBIE)
    process.close()


@needs_mcp
@pytest.mark.slow
def test_a_slow_call_is_an_error_and_the_server_goes_on_or_is_started_anew_if_it_is_stuck(tmp_path: Path) -> None:
    path = tmp_path / "servers.json"
    program = {"command": sys.executable, "args": [str(SUPPORT / "mcp_program.py")], "env": {"COLOUR": "red"}}
    path.write_text(json.dumps({"mcpServers": {"tiny": program, "other": {**program, "disabled": True}}}))
    # On an idle machine the server starts within 2 s, for which it has the same time.
    process = open_servers([path], taken={"add"}, timeout_s=15)
    assert process.run(call("hang", path=str(tmp_path / "pid"))).text == "error: it took longer than 15 s"
    assert process.run(call("tiny_add", a=1, b=1)).text == "2"  # the name is taken
    assert process.run(call("variable", name="COLOUR")).text == "red"
    assert process.run(call("freeze")).text == "error: it took longer than 15 s"
    assert process.run(call("tiny_add", a=1, b=1)).text == "2"
    process.close()


@needs_mcp
@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "timeout_s", "said"),
    [
        (raw("broken"), 60, "no such folder: /nowhere"),
        (raw("noise"), 3, "it took longer than 3 s"),
        (raw("silent"), 3, "it took longer than 3 s"),
        (raw("flood"), 3, "it took more than 134 MB of memory|it took longer than"),
        ("no-such-command", 60, r"does not start: No such file or directory: no-such-command"),
        ("http://127.0.0.1:9", 60, "does not start"),
    ],
)
def test_a_server_that_does_not_start_is_told(
    command: str, timeout_s: float, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mcp_servers, "_MOST_BYTES", 1 << 27)
    before = len(psutil.Process().children(recursive=True))
    monkeypatch.setattr(tool_process, "_SLOW_S", 1.0)
    lines: list[str] = []
    with pytest.raises(UsageError, match=said) as raised:
        open_servers([command], timeout_s=timeout_s, report=lines.append)
    if "it took longer" in str(raised.value):
        assert len(lines) == 1
        assert re.fullmatch("waiting for the tools of the MCP server .*; Ctrl-C stops it", lines[0])
    assert len(psutil.Process().children(recursive=True)) == before


@needs_mcp
@pytest.mark.slow
def test_run_calls_what_is_allowed_or_what_somebody_says_yes_to(servers: McpServers) -> None:
    def talk(tool_name: str, **arguments: Any) -> Conversation:
        engine: Any = RuleEngine({"go": [{"call": tool_name, "arguments": arguments}]})
        return Conversation(engine, tools=[tool for tool in servers.tools if tool.name == tool_name])

    def told(conversation: Conversation) -> list[str]:
        return [step.content for step in conversation.rounds[-1].steps if step.role == "tool"]

    conversation = talk("add", a=2, b=5)
    conversation.run("go")
    assert told(conversation) == ["7"]
    conversation = talk("variable", name="nowhere")
    with pytest.raises(UsageError, match=r"variable is a tool of an MCP server.*may_call"):
        conversation.run("go")
    conversation.run("go", may_call=lambda call: False)
    assert told(conversation) == [REFUSED]
    conversation.run("go", may_call=lambda call: call.name == "variable")
    assert told(conversation) == ["not set"]


@needs_mcp
@pytest.mark.slow
def test_closed_servers_are_not_started_again() -> None:
    before = len(psutil.Process().children(recursive=True))
    with McpServers(TINY) as closed:
        pass
    with pytest.raises(EdgeSpecError, match="add cannot be run: its MCP servers are closed"):
        run(closed, call("add", a=1, b=2))
    assert len(psutil.Process().children(recursive=True)) == before


@needs_mcp
@pytest.mark.slow
def test_only_tools_that_are_there_are_allowed() -> None:
    before = len(psutil.Process().children(recursive=True))
    with pytest.raises(
        UsageError, match=r"'nap' is allowed, but there is no such tool; there are add, "
    ) as raised:
        McpServers(TINY, allow=["nap"])
    assert raised  # which holds all that was made until then
    assert len(psutil.Process().children(recursive=True)) == before


def test_names_are_made_usable_and_tools_that_are_not_are_left_out() -> None:
    def offer(name: str, schema: object) -> None:
        tools.add("my server", None, SimpleNamespace(name=name, description=None, input_schema=schema))

    tools, deep = _Tools(["taken"]), dict[str, Any]()
    for _ in range(100):
        deep = {"type": "object", "properties": {"a": deep}}
    for name in ("read.file", "taken", "read/file", "read file", "ünï"):
        offer(name, {"type": "object"})
    offer("deep", deep)
    offer("wrong", [])
    assert [*tools.places] == ["read_file", "my_server_taken", "my_server_read_file", "_n_"]
    assert [each["function"]["name"] for each in tools.stated] == [*tools.places]
    reasons = ["another tool is called my_server_read_file", "nested deeper", "wanted a JSON schema"]
    for note, (name, reason) in zip(
        tools.notes, zip(("read file", "deep", "wrong"), reasons, strict=True), strict=True
    ):
        assert note.startswith(f"the tool '{name}' of the MCP server my server is left out: ")
        assert reason in note


@needs_mcp
@pytest.mark.parametrize(("code_of_ping", "is_over"), [(None, False), (-32601, False), (-32600, True)])
@pytest.mark.parametrize("code", [-32600, -32001])
def test_a_server_that_has_forgotten_the_session_is_started_anew(
    code: int, code_of_ping: int | None, is_over: bool
) -> None:
    from mcp import MCPError

    async def call_tool(*given: object, **more: object) -> None:
        raise MCPError(code, "Session not found")

    async def send_ping() -> None:
        if code_of_ping is not None:
            raise MCPError(code_of_ping, "no")

    place = _Place(SimpleNamespace(call_tool=call_tool, send_ping=send_ping), "add")
    result = asyncio.run(_call(place, {"name": "add", "arguments": "{}"}, 1.0))
    assert (result["text"], result["is_over"]) == ("error: Session not found", is_over)


@needs_mcp
def test_wrong_arguments_start_nothing_anew_and_a_server_that_is_gone_does() -> None:
    from mcp import MCPError

    def result_of(error: BaseException, error_of_ping: BaseException | None = None) -> tuple[str, bool]:
        async def fail(*given: object, **more: object) -> None:
            raise error

        async def fail_to_ping() -> None:
            raise error_of_ping or error

        place = _Place(SimpleNamespace(call_tool=fail, send_ping=fail_to_ping), "add")
        result = asyncio.run(_call(place, {"name": "add", "arguments": "{}"}, 1.0))
        return result["text"], result["is_over"]

    assert result_of(MCPError(-32602, "a is missing")) == ("error: a is missing", False)
    assert result_of(MCPError(-32603, "no")) == ("error: no", True)
    assert result_of(MCPError(-32603, "no"), asyncio.CancelledError()) == ("error: no", True)
    assert result_of(asyncio.CancelledError()) == ("error: its MCP server has ended", True)


def test_an_empty_text_is_a_text() -> None:
    parts = [SimpleNamespace(type="text", text=""), SimpleNamespace(type="image")]
    parts += [SimpleNamespace(type="resource", resource=SimpleNamespace(text="")) for _ in range(2)]
    assert _text_of(SimpleNamespace(content=parts)) == "\n(image, which is not text, is left out)\n\n"


def test_a_call_of_a_tool_that_is_not_offered_any_more_is_an_error() -> None:
    result = asyncio.run(_call(None, {"name": "add", "arguments": "{}"}, 1.0))
    assert (result["text"], result["is_error"]) == ("error: there is no tool add any more", True)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[]", "no object mcpServers"),
        ('{"mcpServers": {"a": {}}}', 'its server "a" needs either a command or a url'),
        ('{"mcpServers": {"a": {"command": 1}}}', 'its server "a" is wrong: command is 1'),
        ('{"mcpServers": {"a": {"type": "sse", "url": "http://x"}}}', 'its server "a" is of the old type sse'),
        ('{"mcpServers": {}}', "there is no MCP server"),
        ("{", "is not a file of MCP servers"),
    ],
)
def test_a_file_that_names_no_servers_is_refused(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "servers.json"
    path.write_text(content)
    with pytest.raises(UsageError, match=said):
        open_servers([str(path)])


def test_a_missing_package_is_no_wrong_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_servers, "find_spec", lambda name: None)
    with pytest.raises(EdgeSpecError, match="need the package mcp") as raised:
        open_servers(["server"])
    assert raised.value.exit_code == 1, "as for other packages"


def test_words_that_are_no_server_are_refused() -> None:
    for wrong in ("", "it's"):
        with pytest.raises(UsageError):
            open_servers([wrong])
    with pytest.raises(UsageError, match="timeout_s is 0"):
        open_servers(["x"], timeout_s=0)
    allow: Any = {"add": False}
    with pytest.raises(UsageError, match=r"allow is .*wanted names of tools"):
        McpServers("x", allow=allow)
    assert mcp_servers._read("https://tools.example/mcp?a=1") == {
        "tools.example": McpServer(url="https://tools.example/mcp?a=1")
    }
