"""Tools that a model may call, and its calls, in the shape of OpenAI's API. Knows nothing of models."""

import inspect
import json
import os
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import msgspec

from edgespec.errors import ToolError, UsageError
from edgespec.grammar.schema import resolve
from edgespec.tools.function_arguments import describe_function, schema_of, typed_arguments

MAX_DEPTH = 64  # objects and lists within each other, in a schema or in arguments
_BESIDE_REFERENCES = {"$defs", "definitions", "$schema", "title", "description", "type"}
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_SCHEMA_NAMES = "parameters", "input_schema", "inputSchema"  # of OpenAI, Anthropic and MCP
_TYPES = ("string", "integer", "number", "boolean", "array", "object", "null")
ALL = "all"  # stands for the names of all tools
CHOICES = ("auto", "none", "required")
REFUSED = "the user does not want this call"  # what the model is told in place of a result


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that a model may ask its caller to run.

    parameters: JSON schema of its arguments, an object.
    strict: Calls have to follow the schema.
    place: Where it was given, such as "tools[2].function".
    run: Runs a call and returns its result or what was wrong; None where its caller has to.
    is_allowed: It may be run without asking anybody.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False
    place: str = field(default="tools", compare=False)
    run: "Callable[[ToolCall], str] | None" = field(default=None, compare=False)
    is_allowed: bool = field(default=True, compare=False)

    def as_dict(self, *, describes_all: bool = False) -> dict[str, Any]:
        """The dict that chat templates take, in the form of OpenAI's API.

        describes_all: Give an empty description to each argument that has none, as some templates need one.
        """
        parameters = dict(self.parameters)
        if describes_all:
            properties = parameters.get("properties", {})
            parameters["properties"] = {
                key: {"type": "string", "description": "", **each} if isinstance(each, Mapping) else each
                for key, each in properties.items()
            }
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call that a model asks for.

    id: Names the call in the message with its result.
    arguments: A JSON object, as text.
    """

    id: str
    name: str
    arguments: str

    def parse(self, function: Callable[..., Any] | None = None) -> dict[str, Any]:
        """The arguments by their names; for a function of Python in the types of its signature.

        Raises ValueError: The text is no JSON object, or does not fit the function.
        """
        try:
            found = json.loads(self.arguments)
        except RecursionError:
            raise ValueError(f"the arguments of {self.name} are nested too deep") from None
        if not isinstance(found, dict):
            raise ValueError(f"the arguments of {self.name} are {reprlib.repr(found)}; wanted a JSON object")
        return found if function is None else typed_arguments(function, found)

    def as_dict(self) -> dict[str, Any]:
        """The dict of a call in `tool_calls` of a message of the assistant, in the form of OpenAI's API."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


def schema_refusal(tool: Tool, reason: str) -> ToolError:
    """The error of a tool whose schema no grammar can ensure."""
    what = f"of the tool '{tool.name}' cannot be ensured: {reason}"
    return _wrong(f"{tool.place}.parameters", f"{what}. Change the schema, or leave out strict and tool_choice")


def _wrong(field: str, what: str, part: str = "") -> ToolError:
    """The error of a field in which something is wrong, or in a part of it, such as .name."""
    return ToolError(f"{field} {what}", field=field + part)


def parse_tools(given: Any) -> tuple[Tool, ...]:
    """Tools from functions of Python and from dicts, in the form of chat completions or of responses.

    Raises ToolError: One is no tool, two have one name, or they are no list.
    """
    if given is None:
        return ()
    if not isinstance(given, Sequence) or isinstance(given, (str, bytes)):
        raise _wrong("tools", f"is {reprlib.repr(given)}; wanted a list of tools")
    tools = tuple(_parse_tool(each, f"tools[{i}]") for i, each in enumerate(given))
    known: set[str] = set()
    for tool in tools:
        if tool.name in known:
            said = f"tools has two tools named '{tool.name}'; give each a name of its own"
            raise ToolError(said, field=f"{tool.place}.name")
        known.add(tool.name)
    return tools


def _parse_tool(given: Any, where: str) -> Tool:
    if isinstance(given, Tool):
        return replace(given, place=where) if given.place == "tools" else given
    if callable(given):
        name = _require_name(getattr(given, "__name__", ""), where)
        try:
            parameters = schema_of(given)
        except UsageError as error:
            raise ToolError(str(error), field=where) from None
        return Tool(name=name, description=describe_function(given), parameters=parameters, place=where)
    if not isinstance(given, Mapping):
        raise _wrong(where, f"is {reprlib.repr(given)}; wanted an object with type and function, or a function")
    if given.get("type", "function") != "function":
        kind = reprlib.repr(given["type"])
        raise _wrong(where, f"is of the type {kind}; models call functions alone: leave it out", ".type")
    stated = given.get("function", given)
    if not isinstance(stated, Mapping):
        found = reprlib.repr(stated)
        raise _wrong(f"{where}.function", f"is {found}; wanted an object with name and parameters")
    place = f"{where}.function" if "function" in given else where
    name = _require_name(stated.get("name"), place)
    schema = next((each for each in _SCHEMA_NAMES if each in stated), _SCHEMA_NAMES[0])
    return Tool(
        name=name,
        description=_require_kind(stated.get("description"), str, "a text", name, f"{place}.description") or "",
        parameters=_require_schema(stated.get(schema), name, f"{place}.{schema}"),
        strict=bool(_require_kind(stated.get("strict"), bool, "true or false", name, f"{place}.strict")),
        place=place,
    )


def _require_name(name: Any, where: str) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        wanted = "wanted 1 to 64 letters, digits, underscores and hyphens"
        raise _wrong(where, f"has the name {reprlib.repr(name)}; {wanted}", ".name")
    return name


def _require_kind(value: Any, kind: type, wanted: str, name: str, where: str) -> Any:
    if value is not None and not isinstance(value, kind):
        raise _wrong(where, f"of the tool '{name}' is {reprlib.repr(value)}; wanted {wanted}")
    return value


def _require_schema(schema: Any, name: str, where: str) -> dict[str, Any]:
    if schema is None:
        return {"type": "object", "properties": {}}
    whose, found = f"of the tool '{name}'", reprlib.repr(schema)
    schema = _followed(schema) if isinstance(schema, Mapping) else schema
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        raise _wrong(where, f"{whose} is {found}; wanted a JSON schema of the type object")
    if is_too_deep(schema):
        raise _wrong(where, f"{whose} is nested deeper than {MAX_DEPTH} levels; use a flatter schema")
    nulls = (("properties", None), ("required", None))  # as clients in Go write none
    schema = {key: each for key, each in schema.items() if (key, each) not in nulls}
    inner = schema.get("properties", {})
    if not isinstance(inner, Mapping) or not all(isinstance(each, (Mapping, bool)) for each in inner.values()):
        raise _wrong(where, f"{whose} has the properties {reprlib.repr(inner)}; wanted an object of JSON schemas")
    return {"type": "object", "properties": {}, **schema}


def _followed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a schema refers to, where it says little more, as those of types that hold themselves do."""
    own = {key: value for key, value in schema.items() if key != "$ref"}
    if "$ref" not in schema or not own.keys() <= _BESIDE_REFERENCES:
        return schema
    target = resolve(str(schema["$ref"]), schema)
    is_object = isinstance(target, Mapping) and target.get("type", "object") == "object"
    return {**target, **own} if is_object else schema


def parts_of(schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The schemas of which a schema is made, beside what it states itself."""
    lists = [each for key in ("anyOf", "oneOf", "allOf") if isinstance(each := schema.get(key), list)]
    return [part for parts in lists for part in parts if isinstance(part, Mapping)]


def without_bounds(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema of the names and types that another one and its parts state; an object may have others, too."""
    parts = [resolve(str(part["$ref"]), schema) if "$ref" in part else part for part in parts_of(schema)]
    stated = [each.get("properties") for each in (*parts, schema) if isinstance(each, Mapping)]
    properties: dict[str, Any] = {}
    for key, inner in chain.from_iterable(each.items() for each in stated if isinstance(each, Mapping)):
        kind = inner.get("type") if isinstance(inner, Mapping) else None
        properties[key] = {"type": kind} if kind in _TYPES else {}
    return {"type": "object", "properties": properties, "additionalProperties": True}


def is_too_deep(value: Any) -> bool:
    """True if objects and lists lie within each other more than MAX_DEPTH times."""
    level = [value] if isinstance(value, (Mapping, list, tuple)) else []
    for _ in range(MAX_DEPTH + 1):
        parts = chain.from_iterable(each.values() if isinstance(each, Mapping) else each for each in level)
        level = [part for part in parts if isinstance(part, (Mapping, list, tuple))]
        if not level:
            return False
    return True


def parse_choice(given: Any, tools: Sequence[Tool]) -> str:
    """Which tool to call: one of CHOICES, or the name of the one that must be.

    Raises UsageError: It is none of these.
    """
    if given is None:
        return "auto"
    if isinstance(given, Mapping):
        given = _name_in(given)
    elif given in CHOICES:
        if given == "required" and not tools:
            raise UsageError("tool_choice is 'required', and there are no tools; give tools, or leave it out")
        return str(given)
    names = [tool.name for tool in tools]
    if not isinstance(given, str) or given not in names:
        raise UsageError(
            f"tool_choice is {reprlib.repr(given)}; wanted {', '.join(CHOICES)} or the name of a tool, of which "
            f"there are: {', '.join(names) or 'none'}"
        )
    return given


def demands_call(choice: object) -> bool:
    """True if an answer has to begin with a call, by the choice of a tool that a caller gives."""
    return choice not in (None, "auto", "none")


def _name_in(given: Mapping[str, Any]) -> Any:
    """The name in a choice of one function, in the form of chat completions or of responses."""
    stated = given.get("function", given)
    if given.get("type") != "function" or not isinstance(stated, Mapping) or "name" not in stated:
        raise UsageError(
            f"tool_choice is {reprlib.repr(dict(given))}; wanted a type 'function' with the name of a tool"
        )
    if stated["name"] in CHOICES:
        raise UsageError(
            f"tool_choice names the tool '{stated['name']}', which is a word of tool_choice itself, so that this "
            "tool cannot be demanded; give it another name"
        )
    return stated["name"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The tools of an answer.

    choice: auto, required, or the name of the tool that must be called.
    is_parallel: The answer may call several; otherwise it ends with its first call.
    """

    tools: tuple[Tool, ...]
    choice: str = "auto"
    is_parallel: bool = True

    @classmethod
    def parse(cls, tools: Any, choice: Any = None, *, is_parallel: bool = True) -> "ToolUse | None":
        """From what a caller gives as tools and tool_choice; None where no tool may be called.

        A tool that is named is called once, as in OpenAI's API.

        Raises UsageError: The tools or the choice are wrong.
        """
        parsed = parse_tools(tools)
        chosen = parse_choice(choice, parsed)
        if not parsed or chosen == "none":
            return None
        return cls(tools=parsed, choice=chosen, is_parallel=is_parallel and chosen in CHOICES)

    @property
    def possible(self) -> tuple[Tool, ...]:
        """The tools that may be called: all, or the one that must be."""
        return tuple(tool for tool in self.tools if self.choice in (tool.name, "auto", "required"))

    @property
    def is_ensured(self) -> bool:
        """True if a grammar has to ensure calls: one is demanded, or a tool is strict."""
        return any(map(self.binds, self.tools))

    def binds(self, tool: Tool) -> bool:
        """True if calls of a tool have to follow its schema."""
        return tool.strict or demands_call(self.choice)

    def without_loose_bounds(self) -> "ToolUse":
        """The tools with the whole schema of those alone whose calls have to follow it."""
        tools = [
            tool if self.binds(tool) else replace(tool, parameters=without_bounds(tool.parameters))
            for tool in self.tools
        ]
        return replace(self, tools=tuple(tools))


Runner = Callable[[ToolCall], str]


def runners_among(tools: Sequence[Any], *, is_asked: bool) -> Mapping[str, Runner]:
    """What runs the calls of tools, by their names; what goes wrong is their result.

    is_asked: Somebody says before each call whether it may be run.

    Raises UsageError: One is a dict or no plain function, which nobody can run, or needs a yes that nobody gives.
    """
    runners: dict[str, Runner] = {}
    for i, tool in enumerate(tools):
        if isinstance(tool, Tool) and tool.run:
            if not (is_asked or tool.is_allowed):
                raise UsageError(
                    f"{tool.name} is a tool of an MCP server, which needs permission to run: give may_call, or "
                    "name it in allow of McpServers"
                )
            runners[tool.name] = tool.run
        elif callable(tool):
            _require_plain(tool, f"tools[{i}]")
            runners[tool.__name__] = partial(_run_function, tool)
        else:
            raise UsageError(
                f"tools[{i}] is not a Python function, so it cannot be run here; give functions, or send the "
                "results of its calls yourself, with give_results"
            )
    return runners


def _require_plain(function: Callable[..., Any], where: str) -> None:
    """Raises ToolError: A call of it gives what has to be awaited or iterated over."""
    name = function.__name__
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise _wrong(
            where,
            f"is the async function {name}, which is not awaited here; wanted a plain function, such as one that "
            f"returns asyncio.run({name}(…))",
        )
    if inspect.isgeneratorfunction(function):
        raise _wrong(
            where, f"is the generator {name}; wanted a function that returns all at once, such as list({name}(…))"
        )


def is_yes(answer: object, name: str) -> bool:
    """Whether a call may be run, by what may_call gave. Raises UsageError: That is no True, False or None."""
    if answer is None or isinstance(answer, bool):
        return answer is True
    _close(answer)
    raise UsageError(f"may_call gave {answer!r:.60} for {name}, which was not run; wanted True or False")


def result_text(name: str, result: object) -> str:
    """What a function gave as text: JSON, where it is none. Raises TypeError: It cannot be written as JSON."""
    if isinstance(result, str):
        return result
    try:
        return msgspec.json.encode(result, enc_hook=_plain_value).decode()
    except Exception as error:
        _close(result)
        raise TypeError(f"{name} gave a {type(result).__name__}, which is not JSON ({error})") from None


def _plain_value(value: Any) -> Any:
    """Paths, arrays and numbers of numpy, and values of pydantic, as JSON has them. Raises TypeError: Others."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"JSON has no {type(value).__name__}")


def _close(answer: object) -> None:
    """End a coroutine, of which Python would say that nobody awaited it."""
    if inspect.iscoroutine(answer):
        answer.close()


def _run_function(function: Callable[..., Any], call: ToolCall) -> str:
    """The result of a called function, as text; what was wrong, as the model may then try another call."""
    try:
        return result_text(call.name, function(**call.parse(function)))
    except Exception as error:
        return f"error: {type(error).__name__}: {error}"
