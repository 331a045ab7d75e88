"""Texts that end a value which a grammar bounds: short matches of patterns and formats, and the names of keys.

Without them nothing tells how a text comes to match, once a model has begun one that does not yet.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple

from edgespec.text.response_format import ResponseFormat
from edgespec.text.schema import schemas_in, subschemas

# Python's own reader of expressions, which its types do not declare.
_codes, _parser = import_module("re._constants"), import_module("re._parser")
_FORMATS = {
    "date-time": "2000-01-01T00:00:00Z",
    "date": "2000-01-01",
    "time": "00:00:00Z",
    "duration": "P1D",
    "email": "a@b.co",
    "hostname": "a.co",
    "ipv4": "0.0.0.0",
    "ipv6": "::",
    "uuid": "00000000-0000-0000-0000-000000000000",
    "uri": "http://a",
}
_MAX_ENDINGS = 1000
_SPECIAL = re.compile(r"<[^<>\s\"]+>")
_PATTERN = re.compile(r"/((?:[^/\\\n]|\\.)+)/")
_LITERAL = re.compile(r'"(?:[^"\\\n]|\\.)+"')


class Endings(NamedTuple):
    """The texts to try where a text or a number has to be ended, in the order in which they are tried."""

    texts: list[str]
    numbers: list[str]


def endings_of(wanted: ResponseFormat) -> Endings:
    """The ends of short matches.

    Of the schema `{"pattern": "^[A-Z]-[0-9]$"}` they are `0"`, `-0"` and `A-0"`.
    """
    match wanted.kind:
        case "json_schema":
            return _endings_in([json.loads(wanted.source)])
        case "regex":
            return Endings(_ends(_matches(wanted.source), min_length=1), [])
    within = _endings_in(list(schemas_in(wanted.source)))
    literals = _ends(dict.fromkeys(_literals(wanted.source)), min_length=1)
    return Endings([*within.texts, *literals][:_MAX_ENDINGS], within.numbers)


def _endings_in(schemas: Sequence[Any]) -> Endings:
    texts = dict.fromkeys(text for schema in schemas for text in _texts_in(schema))
    numbers = dict.fromkeys(text for schema in schemas for text in _numbers_in(schema))
    quoted = [f'{json.dumps(text)[1:-1]}"' for text in texts]
    ended = [number + end for number in numbers for end in (",", "}", "]", "")]
    return Endings(_ends(quoted, min_length=2), _ends(ended, min_length=2))


def _ends(texts: Any, min_length: int) -> list[str]:
    """All ends of texts, each text's from the shortest to the longest."""
    found: dict[str, None] = {}
    for text in texts:
        for start in range(len(text) - min_length, -1, -1):
            if len(found) == _MAX_ENDINGS:  # the ends of a long text are too many to make all of them
                return [*found]
            if not text[start:].isspace():  # which goes on where any amount of it may stand
                found[text[start:]] = None
    return [*found]


def _texts_in(schema: Any) -> Iterator[str]:
    parts = [part for _, part in subschemas(schema) if isinstance(part, Mapping)]
    for part in parts:
        yield from (name for name in part.get("required", ()) if isinstance(name, str))
    for part in parts:
        if isinstance(pattern := part.get("pattern"), str):
            yield from _matches(pattern)
        if (example := _FORMATS.get(str(part.get("format")))) is not None:
            yield example
        values = part.get("enum") or [part.get("const")]
        yield from (value for value in values if isinstance(value, str))
        properties = part.get("patternProperties", {})
        yield from (text for pattern in properties for text in _matches(str(pattern)))


def _numbers_in(schema: Any) -> Iterator[str]:
    """A short number for each schema that bounds numbers, and 0."""
    yield "0"
    for _, part in subschemas(schema):
        if isinstance(part, Mapping) and not _BOUNDS.isdisjoint(part):
            yield f"{_number_in(part):.10g}"


def _number_in(schema: Mapping[str, Any]) -> float:
    """A number near 0 that the bounds of a schema allow, if their multiples are not far apart."""
    step = _bound(schema, "multipleOf") or 1
    low, high = _bound(schema, "minimum"), _bound(schema, "maximum")
    above, below = _bound(schema, "exclusiveMinimum"), _bound(schema, "exclusiveMaximum")
    if above is not None and math.isfinite(above / step):
        low = (math.floor(above / step) + 1) * step
    if below is not None and math.isfinite(below / step):
        high = (math.ceil(below / step) - 1) * step
    number = max(0.0, low or 0.0) if high is None else min(max(0.0, low or 0.0), high)
    if not math.isfinite(number / step):
        return number
    return math.ceil(number / step) * step if number > 0 else math.floor(number / step) * step


_BOUNDS = {"multipleOf", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}


def _bound(schema: Mapping[str, Any], name: str) -> float | None:
    value = schema.get(name)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not abs(value) < _LARGEST:
        return None
    return float(value)


_LARGEST = 1e9


def _literals(grammar: str) -> Iterator[str]:
    """The quoted texts of a grammar, its special tokens, and short matches of its regular expressions."""
    yield from _SPECIAL.findall(grammar)
    for quoted in _LITERAL.findall(grammar):
        try:
            yield str(json.loads(quoted))
        except ValueError:
            continue
    for pattern in _PATTERN.findall(grammar):
        yield from _matches(pattern)


class _Unmatched(ValueError):
    """No short match of a regular expression is made: it is too long, or of a part that is left out."""


def _matches(pattern: str) -> list[str]:
    """A short text that a regular expression matches; none where it is of a dialect that Python does not read."""
    try:
        return [_match_of(_parser.parse(pattern))]
    except (re.error, RecursionError, OverflowError, ValueError):
        return []


_MAX_MATCH = 200  # characters; longer texts are made of the tokens that fit


def _match_of(parsed: Any) -> str:
    text = "".join(_match_of_part(code, argument) for code, argument in parsed)
    if len(text) > _MAX_MATCH:
        raise _Unmatched("a match is too long to be of use")
    return text


def _match_of_part(code: Any, argument: Any) -> str:
    if code is _codes.LITERAL:
        return chr(argument)
    if code is _codes.NOT_LITERAL:
        return "a" if argument != ord("a") else "b"
    if code is _codes.ANY:
        return "a"
    if code is _codes.IN:
        return _member_of(argument)
    if code in (_codes.MAX_REPEAT, _codes.MIN_REPEAT, _codes.POSSESSIVE_REPEAT):
        least, _, inner = argument
        if least > _MAX_MATCH:
            raise _Unmatched("a match is too long to be of use")
        return _match_of(inner) * least if least else ""
    if code is _codes.SUBPATTERN:
        return _match_of(argument[-1])
    if code is _codes.BRANCH:
        return min((_match_of(branch) for branch in argument[1]), key=len)
    if code is _codes.AT:
        return ""
    raise _Unmatched(str(code))


_CHARACTERS = 'a0 -_.,!Z~"#$%&()*+/:;<=>?@[]^`{|}\n\téßяλ中あ한ا😀'  # one of which most sets have
_CATEGORIES = {_codes.CATEGORY_DIGIT: "0", _codes.CATEGORY_WORD: "a", _codes.CATEGORY_SPACE: " "}


def _member_of(members: Any) -> str:
    """A character of a set; letters and digits rather than others."""
    is_negated = members[0][0] is _codes.NEGATE
    if is_negated:
        pattern = re.compile(_set_text(members))
        if (found := next((each for each in _CHARACTERS if pattern.match(each)), None)) is None:
            raise _Unmatched("a set without any of the characters that are tried")
        return found
    code, argument = members[0]
    if code is _codes.LITERAL:
        return chr(argument)
    if code is _codes.RANGE:
        return chr(argument[0])
    if code is _codes.CATEGORY and argument in _CATEGORIES:
        return _CATEGORIES[argument]
    raise _Unmatched(str(code))


def _set_text(members: Any) -> str:
    """A negated set as a regular expression."""
    parts = []
    for code, argument in members[1:]:
        if code is _codes.LITERAL:
            parts.append(re.escape(chr(argument)))
        elif code is _codes.RANGE:
            parts.append("-".join(re.escape(chr(each)) for each in argument))
        elif code is _codes.CATEGORY and argument in _CATEGORIES:
            parts.append({"0": r"\d", "a": r"\w", " ": r"\s"}[_CATEGORIES[argument]])
        else:
            raise _Unmatched(str(code))
    return f"[^{''.join(parts)}]"
