"""The requests of bench/tools.py, and how calls of them are counted."""

import json

import pytest
import tools

from edgespec import ToolCall


def call(name: str, **arguments: object) -> ToolCall:
    return ToolCall(id="", name=name, arguments=json.dumps(arguments))


@pytest.mark.parametrize("task", tools.TASKS)
def test_the_call_that_a_request_wants_is_valid_and_right(task: tools.Task) -> None:
    wanted = call(task.name, **task.arguments)
    assert tools.is_valid(wanted)
    assert tools.is_right(wanted, task)
    other = next(each for each in tools.TASKS if each.name != task.name)
    assert not tools.is_right(call(other.name, **other.arguments), task)


@pytest.mark.parametrize(
    "wrong",
    [
        call("get_rain", city="Oslo"),
        call("get_weather"),
        call("get_weather", city=3),
        call("get_weather", city="Oslo", hours=3),
        call("set_light", room="hall", state="dim"),
        ToolCall(id="", name="get_weather", arguments='{"city": "Os'),
    ],
)
def test_other_calls_are_not_valid(wrong: ToolCall) -> None:
    assert not tools.is_valid(wrong)
