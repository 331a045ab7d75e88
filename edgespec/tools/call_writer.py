"""Calls and tools as text for models whose chat template does not write them."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from edgespec.tools.formats import Body, CallFormat, JsonBody, NamedBody, PairsBody, PythonBody, TagBody
from edgespec.tools.notations import WrittenCall
from edgespec.tools.tool import Tool


def write_calls(format: CallFormat, calls: Sequence[WrittenCall]) -> str:
    """Calls as a model of the family writes them."""
    begin, end = format.frames[0]
    body = format.body
    if isinstance(body, PythonBody):
        written = ["[" + ", ".join(map(_python, calls)) + "]"]
    elif isinstance(body, JsonBody) and body.is_list:
        written = [_json([_json_call(body, call) for call in calls])]
    else:
        written = [_write(body, call) for call in calls]
    before, behind = format.outer
    return before + format.joint.join(begin + each + end for each in written) + behind


def describe_tools(format: CallFormat, tools: Iterable[Tool]) -> str:
    """A system message that tells a model of its tools, and how to call them."""
    described = "\n".join(_json(tool.as_dict()["function"]) for tool in tools)
    example = write_calls(format, [WrittenCall("NAME", {"ARGUMENT": "VALUE"})])
    return (
        f"You can call these functions:\n{described}\n\nTo call one, write nothing but its name and its arguments "
        f"in exactly this form:\n{example}\nYou are then told its result. If none helps, answer in words."
    )


def _write(body: Body, call: WrittenCall) -> str:
    match body:
        case JsonBody():
            return _json(_json_call(body, call))
        case NamedBody():
            before = body.before[0] if body.before else ""
            return before + call.name + body.between[0] + _json(dict(call.arguments)) + body.after
        case TagBody():
            return _tags(body, call)
        case PairsBody():
            return f"call:{call.name}{_pairs(dict(call.arguments), body.quote)}"
        case PythonBody():
            return _python(call)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _json_call(body: JsonBody, call: WrittenCall) -> dict[str, Any]:
    if body.is_keyed:
        return {call.name: dict(call.arguments)}
    return {body.names[0]: call.name, body.arguments[0]: dict(call.arguments)}


def _tags(body: TagBody, call: WrittenCall) -> str:
    parts = [body.begin + call.name + body.name_end]
    for key, value in call.arguments.items():
        is_text = isinstance(value, str)
        text = value if is_text else _json(value)
        parts.append(body.opening(key, is_text=is_text) + text + body.space + body.value_end)
    return "\n".join([*parts, body.end] if body.end else [*parts, ""])


def _python(call: WrittenCall) -> str:
    return f"{call.name}({', '.join(f'{key}={value!r}' for key, value in call.arguments.items())})"


def _pairs(value: Any, quote: str) -> str:
    if isinstance(value, str):
        return quote + value + quote
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_pairs(each, quote)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_pairs(each, quote) for each in value) + "]"
    return _json(value)
