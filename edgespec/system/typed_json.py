"""JSON values checked against the types that they are to have.

Knows nothing of files. Types may carry bounds: `Annotated[int, msgspec.Meta(ge=1)]`.
"""

import json
import re
import reprlib
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")
_PLACE = re.compile(r" - at (?:`key` in )?`\$\.?(.*)`$")


def read_as(kind: type[T], stated: Any) -> T:
    """A value of a type, such as a dataclass, from what JSON holds; unknown fields are ignored.

    Raises:
        ValueError: Where something else is stated, what, and what was expected, such as
            "kv_cache.head_dim is 0: expected `int` >= 1".
    """
    try:
        return msgspec.convert(stated, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise ValueError(_explain(str(error), stated)) from None


def read_lines_as(kind: type[T], content: str) -> Iterator[T]:
    """A value from each line of JSON Lines that is not blank.

    Raises ValueError: A line is no JSON, or read_as refuses it.
    """
    for number, line in enumerate(content.split("\n"), 1):
        if line.strip():
            try:
                yield read_as(kind, json.loads(line))
            except RecursionError:
                raise ValueError(f"line {number} is nested too deep") from None
            except json.JSONDecodeError as error:
                raise ValueError(f"line {number} is no JSON ({error})") from None
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from None


def require_known_fields(stated: Any, found: object) -> None:
    """Raises ValueError: Something is stated that read_as left out of what it found."""
    if unknown := _unknown_fields(stated, msgspec.to_builtins(found, str_keys=True)):
        raise ValueError(f"unknown fields {', '.join(unknown)}")


def _unknown_fields(stated: Any, known: Any) -> list[str]:
    if not isinstance(stated, dict):
        return []
    below = [name for key in stated.keys() & known.keys() for name in _unknown_fields(stated[key], known[key])]
    return sorted(map(ascii, stated.keys() - known.keys())) + below


def _explain(message: str, stated: Any) -> str:
    place = _PLACE.search(message)
    text = message[: place.start()] if place else message
    text = text[0].lower() + text[1:]
    if not place or not place[1]:
        return text
    # [...] stands for a key that is not known here, so that the value cannot be looked up.
    if "[...]" in place[1] or "`key`" in place[0]:
        return f"{place[1]}: {text}"
    for name, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", place[1]):
        stated = stated[int(index)] if index else stated[name]
    return f"{place[1]} is {reprlib.repr(stated)}: {text}"
