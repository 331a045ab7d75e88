"""Calls of tools and what they gave, as people read them."""

import json
from collections.abc import Iterable

from edgespec import CallMessage, ResultMessage, ToolCall, Turn

_WIDTH = 60  # characters of a call that is written in one line
_MAX_LINES, _MAX_CHARACTERS = 3, 300  # of a result that is shown in short


def format_call(call: ToolCall) -> str:
    """A call with all its arguments, each in a line of its own where one line is too long for them."""
    try:
        arguments = call.parse()
    except ValueError:
        return f"{call.name}({call.arguments})"
    parts = [f"{name}={_format_value(value)}" for name, value in arguments.items()]
    line = f"{call.name}({', '.join(parts)})"
    if len(line) <= _WIDTH and "\n" not in line:
        return line
    return "\n".join([f"{call.name}(", *(f"    {part}," for part in parts), ")"])


def _format_value(value: object) -> str:
    """A readable form of an argument: JSON, but a text of several lines goes indented between three quotes."""
    if isinstance(value, str) and "\n" in value and '"""' not in value:
        return '"""' + value.replace("\n", "\n        ") + '"""'
    return json.dumps(value, ensure_ascii=False)


def brief_result(text: str) -> str:
    lines = text.strip().splitlines()
    short = "\n".join(lines[:_MAX_LINES])[:_MAX_CHARACTERS]
    return short if short == "\n".join(lines) else f"{short} … ({len(text)} characters)"


def format_turn(turn: Turn) -> str:
    if not isinstance(turn, CallMessage):
        return turn.content
    calls = "\n".join(f"calls {format_call(call)}" for call in turn.calls)
    return f"{turn.content}\n\n{calls}" if turn.content.strip() else calls


def describe_steps(steps: Iterable[Turn]) -> list[str]:
    """Texts for what comes between a message and its answer: what was said, calls, and results in short."""
    found = []
    for step in steps:
        if isinstance(step, CallMessage):
            found += [step.content] if step.content.strip() else []
            found += [f"called {format_call(call)}" for call in step.calls]
        elif isinstance(step, ResultMessage):
            found.append(f"{step.name or 'it'} gave: {brief_result(step.content)}")
    return found


def describe_calls(steps: Iterable[Turn]) -> list[dict[str, str]]:
    """Calls with what they gave, for programs."""
    steps = tuple(steps)
    results = {step.call_id: step.content for step in steps if isinstance(step, ResultMessage)}
    calls = [call for step in steps if isinstance(step, CallMessage) for call in step.calls]
    return [
        {"name": call.name, "arguments": call.arguments, "result": results[call.id]}
        for call in calls
        if call.id in results
    ]
