"""Bounds of what is still needed to end a value, once a single token has begun it: by schema or by expression."""

import json
import re
from collections.abc import Mapping
from decimal import Decimal
from importlib import import_module
from typing import Any

from edgespec.text.schema import Schema, number_of, resolve, subschemas, values_of

# Python's own reader of expressions, which its types do not declare.
_codes, _parser = import_module("re._constants"), import_module("re._parser")
_ENDLESS = 1 << 16  # bytes, of values that cannot end
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_BRANCHING = {"enum", "pattern", "format", "minProperties", *_BOUNDS}
_UNKNOWN = 40  # bytes, of an expression in a dialect that Python does not read
_REPEATS = (_codes.MAX_REPEAT, _codes.MIN_REPEAT, _codes.POSSESSIVE_REPEAT)
_CHARACTERS = (_codes.LITERAL, _codes.RANGE)


def largest_opening(schema: Any, *, is_part: bool = False) -> int:
    """A bound of the bytes that the shortest value of any schema within a schema has.

    As much more may be wanted to end an answer once a single token has begun such a value.

    Args:
        is_part: The whole schema may come in the middle of an answer, too.
    """
    root, known = schema, dict[int, int]()
    # The shortest answer is known, and one of several values or matches may be longer.
    parts = [part for _, part in subschemas(schema)]
    holds_itself = any(isinstance(part, Mapping) and part.get("$ref") == "#" for part in parts)
    may_branch = isinstance(schema, Mapping) and not _BRANCHING.isdisjoint(schema)
    has_whole = is_part or holds_itself or may_branch
    try:
        least = [_least_bytes(part, root, known) for part in parts[0 if has_whole else 1 :]]
        return max([2, *least, *(_least_pair(part, root, known) for part in parts)])
    except RecursionError:  # references through hundreds of levels
        return _ENDLESS


def _least_bytes(schema: Any, root: Any, known: dict[int, int]) -> int:
    """Bytes of the longest of the shortest values of a schema's branches."""
    if not isinstance(schema, Mapping):
        return 2
    key = id(schema)
    if key not in known:
        known[key] = 2  # where a schema holds itself, it need not
        known[key] = _count_least(schema, root, known)
    return known[key]


def _count_least(schema: Schema, root: Any, known: dict[int, int]) -> int:
    if (values := values_of(schema)) is not None:
        return max((_bytes_of(value) for value in values), default=2)
    total = 2
    if isinstance(reference := schema.get("$ref"), str) and reference.startswith("#"):
        total = max(total, _least_bytes(resolve(reference, root), root, known))
    for key in ("anyOf", "oneOf"):
        if isinstance(branches := schema.get(key), list):
            total = max([total, *(_least_bytes(each, root, known) for each in branches)])
    if isinstance(branches := schema.get("allOf"), list):
        total += sum(_least_bytes(each, root, known) for each in branches)
    properties = schema.get("properties", {})
    for name in schema.get("required", ()):
        inner = properties.get(name, True) if isinstance(properties, Mapping) else True
        total += _bytes_of(name) + 2 + _least_bytes(inner, root, known)
    total += number_of(schema, "minLength") + (_UNKNOWN if "format" in schema else 0)
    total += max((_bytes_of(schema[name]) for name in _BOUNDS if name in schema), default=0)
    if isinstance(pattern := schema.get("pattern"), str):
        total += longest_way(pattern)
    if (least := number_of(schema, "minProperties")) > (num := len(schema.get("required", ()))):
        total += (least - num) * (_UNKNOWN + _least_bytes(schema.get("additionalProperties", True), root, known))
    if least := number_of(schema, "minItems"):
        items = schema.get("prefixItems", ())
        parts = [_least_bytes(each, root, known) + 1 for each in items[:least]]
        rest = _least_bytes(schema.get("items", True), root, known) + 1
        total += sum(parts) + rest * max(0, least - len(parts))
    return min(total, _ENDLESS)


def _least_pair(schema: Any, root: Any, known: dict[int, int]) -> int:
    """Bytes of the longest name of a property with its shortest value."""
    if not isinstance(schema, Mapping):
        return 0
    found = [0]
    for key, length_of in (("properties", _bytes_of), ("patternProperties", longest_way)):
        if isinstance(inner := schema.get(key), Mapping):
            found += (length_of(name) + 4 + _least_bytes(each, root, known) for name, each in inner.items())
    return max(found)


def _bytes_of(value: Any) -> int:
    """Bytes of a value as a grammar has it: numbers have no exponent."""
    if isinstance(value, Mapping):
        return 2 + sum(_bytes_of(name) + 2 + _bytes_of(each) for name, each in value.items())
    if isinstance(value, (list, tuple)):
        return 2 + sum(_bytes_of(each) + 1 for each in value)
    if isinstance(value, float):
        return len(format(Decimal(repr(value)), "f"))
    return len(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))


def longest_way(pattern: str) -> int:
    """A bound of the bytes that the shortest match has, whichever branch and optional part was begun.

    Of `b|a{30}` it is 30, and of `x(abc)?` 4.
    """
    try:
        return min(_length(_parser.parse(pattern)), _ENDLESS)
    except (re.error, RecursionError, OverflowError, ValueError):
        return _UNKNOWN


def _length(parsed: Any) -> int:
    return sum(_length_of_part(code, argument) for code, argument in parsed)


def _length_of_part(code: Any, argument: Any) -> int:
    if code is _codes.LITERAL:
        return _bytes_of_character(argument)
    if code is _codes.IN:
        return max(_bytes_of_character(each[0] if kind is _codes.RANGE else each) if kind in _CHARACTERS else 1
                   for kind, each in argument)  # fmt: skip
    if code in _REPEATS:
        least, _, inner = argument
        return min(max(int(least), 1), _ENDLESS) * _length(inner)
    if code is _codes.SUBPATTERN:
        return _length(argument[-1])
    if code is _codes.BRANCH:
        return max(map(_length, argument[1]))
    return 0 if code is _codes.AT else 1


def _bytes_of_character(character: int) -> int:
    return len(chr(character).encode("utf-8", "replace"))
