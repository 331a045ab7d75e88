"""Arguments of a call as a function of Python takes them: checked, and converted to the types of its signature."""

import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any

import msgspec


def typed_arguments(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments from JSON in the types that a function states: dataclasses, enums, dates, numbers and so on.

    A number that is written as a text is taken for the number. An argument without a type stays as it is.

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
    return {each: _convert(value, hints.get(each, Any), each) for each, value in arguments.items()}


def _convert(value: Any, hint: Any, name: str) -> Any:
    try:
        return msgspec.convert(value, hint, strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(f"the argument '{name}' is wrong: {error}") from None
