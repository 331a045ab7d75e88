"""Tools of MCP servers over HTTP: what is listed can be called, and nothing else."""

import json
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from threading import Event

import psutil
import pytest
from served import WAIT_S, Served, home_with, serving, table_engine
from until import until

from edgespec import McpServers, Tool, ToolCall
from edgespec.server.limits import Limits
from edgespec.server.model_names import ModelNames
from edgespec.system.command_line import join_words


def weather(call: ToolCall) -> str:
    return f"sunny in {json.loads(call.arguments)['city']}"


TOOL = Tool(name="weather", description="Tell the weather.", parameters={"type": "object"}, run=weather)


@pytest.fixture(scope="module")
def served(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    names = ModelNames(home_with(tmp_path_factory.mktemp("home"), tiny=tiny_model), None)
    with serving(names, lambda name: table_engine(tiny_model), tools=[TOOL]) as found:
        yield found


def test_tools_are_listed_as_requests_take_them(served: Served) -> None:
    listed = served.client.get("/v1/tools").json()["data"]
    assert [each["function"]["name"] for each in listed] == ["weather"]
    assert served.chat(tools=listed, max_tokens=2)["choices"]


@pytest.mark.parametrize("arguments", [{"city": "Rome"}, '{"city": "Rome"}'])
def test_a_call_gives_the_message_that_goes_on(served: Served, arguments: object) -> None:
    answer = served.post("/v1/tools/call", {"name": "weather", "arguments": arguments, "id": "call_1"})
    message = {"role": "tool", "tool_call_id": "call_1", "name": "weather", "content": "sunny in Rome"}
    assert (answer.status_code, answer.json()) == (200, message)


def test_what_is_no_tool_is_refused(served: Served) -> None:
    answer = served.post("/v1/tools/call", {"name": "remove", "arguments": {}})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "tool_not_found")
    assert "there are weather" in answer.json()["error"]["message"]
    assert served.post("/v1/tools/call", {"arguments": {}}).status_code == 400
    assert served.post("/v1/tools/call", {"name": "weather", "arguments": 1}).status_code == 400


def test_a_page_of_another_site_calls_nothing(served: Served) -> None:
    asked = {"name": "weather", "arguments": {"city": "Rome"}}
    answer = served.post("/v1/tools/call", asked, headers={"Origin": "http://other.example"})
    assert answer.status_code == 403


@pytest.mark.slow
@pytest.mark.skipif(find_spec("mcp") is None, reason="needs the package mcp")
def test_tools_of_a_real_mcp_server_are_served_and_one_that_hangs_ends_with_the_server(
    tiny_model: Path, tmp_path: Path
) -> None:
    program = join_words([sys.executable, Path(__file__).parents[1] / "support" / "mcp_program.py"])
    names, pid = ModelNames(home_with(tmp_path / "home", tiny=tiny_model), None), tmp_path / "pid"
    with (
        McpServers(program, allow="all") as servers,
        ThreadPoolExecutor(1) as pool,
        serving(
            names, lambda name: table_engine(tiny_model), limits=Limits(drain_s=0.1), tools=servers.tools
        ) as served,
    ):
        listed = served.client.get("/v1/tools").json()["data"]
        assert {"add", "hang"} <= {each["function"]["name"] for each in listed}
        given = served.post("/v1/tools/call", {"name": "add", "arguments": {"a": 2, "b": 40}, "id": "call_1"})
        assert given.json() == {"role": "tool", "tool_call_id": "call_1", "name": "add", "content": "42"}
        wrong = served.post("/v1/tools/call", {"name": "add", "arguments": {"a": "x"}})
        assert wrong.json()["content"].startswith("error: ")
        hangs = pool.submit(served.post, "/v1/tools/call", {"name": "hang", "arguments": {"path": str(pid)}})
        while not (pid.exists() and pid.read_text()):
            time.sleep(0.02)
        process = psutil.Process(int(pid.read_text()))
        served.server.should_exit = True
        assert hangs.result(WAIT_S).status_code == 503
        servers.close()
    assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def waiting_tool() -> tuple[Tool, Event, Event]:
    """A tool whose call sets the first event, and ends with the second."""
    begun, ends = Event(), Event()

    def wait(call: ToolCall) -> str:
        begun.set()
        ends.wait(WAIT_S)
        return ""

    return replace(TOOL, run=wait), begun, ends


def test_a_call_that_runs_does_not_hold_the_server_up(tiny_model: Path, tmp_path: Path) -> None:
    slow, begun, ends = waiting_tool()
    names = ModelNames(home_with(tmp_path, tiny=tiny_model), None)
    with (
        serving(names, lambda name: table_engine(tiny_model), limits=Limits(drain_s=0.1), tools=[slow]) as served,
        ThreadPoolExecutor(1) as pool,
    ):
        answer = pool.submit(served.post, "/v1/tools/call", {"name": "weather", "arguments": {}})
        begun.wait(WAIT_S)
        assert served.client.get("/health").status_code == 200
        served.server.should_exit = True
        assert answer.result(WAIT_S).status_code == 503
        ends.set()


def test_a_call_that_its_client_has_left_keeps_its_place_until_it_ends(tiny_model: Path, tmp_path: Path) -> None:
    slow, begun, ends = waiting_tool()
    names = ModelNames(home_with(tmp_path, tiny=tiny_model), None)
    body = b'{"name": "weather"}'
    head = "POST /v1/tools/call HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with serving(names, lambda name: table_engine(tiny_model), tools=[slow]) as served:
        with served.raw() as connection:
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            assert begun.wait(WAIT_S)
        left = '{path="/v1/tools/call",status="499"}'
        until(lambda: left in served.client.get("/metrics").text)
        assert served.services.admission.num_taken == 1
        ends.set()
        until(lambda: served.services.admission.num_taken == 0)
