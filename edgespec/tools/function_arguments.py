"""The arguments of a Python function: their JSON schema, and JSON values in the types of its signature."""

import inspect
import re
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime, time
from typing import Any

from edgespec.errors import UsageError
from edgespec.grammar.python_type import convert_value, type_schema

_SECTION = re.compile(r"(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?|Notes?):\s*")
_ENTRY = re.compile(r"\*{0,2}(\w+)\s*(?:\([^)]*\))?:\s*(.*)")
_FORMATS: dict[type[datetime | time], str] = {datetime: "date-time", time: "time"}
_FIELD = re.compile(r":param\s+(?:[^:]*\s)?(\w+):\s*(.*)")


def describe_function(function: Callable[..., Any]) -> str:
    """The docstring up to its sections."""
    lines = []
    for line in inspect.cleandoc(function.__doc__ or "").splitlines():
        if _SECTION.fullmatch(line) or line.startswith(":"):
            break
        lines.append(line)
    return "\n".join(lines).strip()


def schema_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The JSON schema of a function's arguments.

    Types become schemas as msgspec makes them: numbers, texts, lists, dicts, Literal, Enum, Optional, TypedDict,
    dataclasses; and classes of pydantic. What the docstring says of an argument, under "Args:" or as
    ":param name:", describes it. An argument without a default is required; one without a type may be anything.

    Raises UsageError: An argument cannot be given by name, its type has no JSON schema, or two have one name.
    """
    name = getattr(function, "__name__", "the function")
    try:
        hints = typing.get_type_hints(function, include_extras=True)
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError, NameError) as error:
        raise UsageError(f"the signature of {name} cannot be read ({error}); give its tool as a dict") from None
    for each in parameters:
        if each.kind not in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY):
            raise UsageError(f"{name} has the argument {each}; wanted arguments that can be given by name")
    described = _described(function)
    properties, shared = {}, dict[str, Any]()
    for each in parameters:
        schema, parts = _schema(hints.get(each.name, Any), f"{name} has the argument '{each.name}'")
        if clash := next((key for key in parts if shared.get(key, parts[key]) != parts[key]), None):
            raise UsageError(
                f"{name} has arguments of two types called '{clash.rpartition('.')[2]}'; give one another name"
            )
        shared.update(parts)
        said = described.get(each.name)
        properties[each.name] = {**schema, "description": said} if said else schema
    found: dict[str, Any] = {"type": "object", "properties": properties}
    if required := [each.name for each in parameters if each.default is each.empty]:
        found["required"] = required
    return found | ({"$defs": shared} if shared else {})


def _schema(hint: Any, where: str) -> tuple[dict[str, Any], dict[str, Any]]:
    try:
        schema = type_schema(hint)
    except TypeError as error:
        raise UsageError(f"{where} of the type {hint}, which has no JSON schema ({error}); use another") from None
    parts: dict[str, Any] = schema.pop("$defs", {})
    waiting, classes = [(schema, hint)], set[type]()
    while waiting:
        stated, inner = waiting.pop()
        for kind in _times_in(inner):  # msgspec writes the format of those that must have a zone alone
            for part in (stated, stated.get("items"), *stated.get("anyOf", ())):
                if isinstance(part, dict) and part.get("type") == "string":
                    part.setdefault("format", _FORMATS[kind])
        for each in (inner, *typing.get_args(inner)):
            fields = parts.get(getattr(each, "__name__", ""), {}).get("properties", {})
            if fields and each not in classes:
                classes.add(each)
                hints = typing.get_type_hints(each, include_extras=True)
                waiting += [(fields[name], hints[name]) for name in fields.keys() & hints.keys()]
    return schema, parts


def _times_in(hint: Any) -> Iterator[type[datetime | time]]:
    """The types of times that a type is, or is made of, as in datetime | None."""
    return (kind for kind in _FORMATS if kind in (hint, *typing.get_args(hint)))


def _described(function: Callable[..., Any]) -> dict[str, str]:
    """The text of a docstring on each argument; lines that are indented deeper continue one."""
    found: dict[str, list[str]] = {}
    lines = inspect.cleandoc(function.__doc__ or "").splitlines()
    in_section, width, current = False, 0, ""
    for line in lines:
        indent = len(line) - len(line.lstrip())
        if field := _FIELD.fullmatch(line.strip()):
            current, width = field[1], indent
            found[current] = [field[2]]
        elif section := _SECTION.fullmatch(line):
            in_section, width, current = section[1] in ("Args", "Arguments", "Parameters"), 0, ""
        elif current and line.strip() and indent > width:
            found[current].append(line.strip())
        elif in_section and indent and (entry := _ENTRY.fullmatch(line.strip())):
            current, width = entry[1], indent
            found[current] = [entry[2]]
        else:
            current = ""
    return {name: " ".join(parts).strip() for name, parts in found.items()}


def typed_arguments(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments from JSON in the types that a function states: dataclasses, enums, dates, numbers and so on.

    A number that is written as a text is taken for the number. An argument without a type stays as it is, and so
    does None where it is the default.

    Raises ValueError: One is missing or unknown, or does not fit its type.
    """
    name = getattr(function, "__name__", "the function")
    parameters = inspect.signature(function).parameters
    hints = typing.get_type_hints(function, include_extras=True)
    if unknown := [each for each in arguments if each not in parameters]:
        raise ValueError(f"{name} has no argument '{unknown[0]}'; it takes {', '.join(parameters) or 'none'}")
    needed = [each.name for each in parameters.values() if each.default is each.empty]
    if missing := [each for each in needed if each not in arguments]:
        raise ValueError(f"{name} needs the argument '{missing[0]}'")
    return {
        each: value if value is parameters[each].default is None else _convert(value, hints.get(each, Any), each)
        for each, value in arguments.items()
    }


def _convert(value: Any, hint: Any, name: str) -> Any:
    for kind in _times_in(hint) if isinstance(value, str) else ():
        with suppress(ValueError):
            value = kind.fromisoformat(value)  # also without seconds, which msgspec refuses
    try:
        return convert_value(hint, value)
    except ValueError as error:
        raise ValueError(f"the argument '{name}' is wrong: {error}") from None
