"""Texts that end a value which a grammar bounds, and bounds of what is needed to end one that a token has begun.

The texts are short matches of patterns and formats, and the names of keys. Without them nothing tells how a text
comes to match, once a model has begun one that does not yet.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from importlib import import_module
from typing import Any, NamedTuple

from edgespec.grammar.response_format import ResponseFormat, lark_parts
from edgespec.grammar.schema import ENSURED_FORMATS, Schema, number_of, resolve, schemas_in, subschemas, values_of

# Python's own reader of expressions, which its types do not declare.
_codes, _parser = import_module("re._constants"), import_module("re._parser")
_BOUNDS = {"multipleOf", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
_ENDLESS = 1 << 16  # bytes, of values that cannot end
_BRANCHING = {"enum", "pattern", "format", "minProperties", *_BOUNDS}
_UNKNOWN = 40  # bytes, of an expression in a dialect that Python does not read
_REPEATS = (_codes.MAX_REPEAT, _codes.MIN_REPEAT, _codes.POSSESSIVE_REPEAT)
_LARGEST = 1e9  # of the bounds of numbers that are looked at
_MAX_MATCH = 200  # characters; longer texts are made of the tokens that fit
_CHARACTERS = 'a0 -_.,!Z~"#$%&()*+/:;<=>?@[]^`{|}\n\téßяλ中あ한ا😀'  # one of which most sets have
_CATEGORIES = {_codes.CATEGORY_DIGIT: "0", _codes.CATEGORY_WORD: "a", _codes.CATEGORY_SPACE: " "}
_MAX_ENDINGS = 1000
_NAMED = re.compile(r"<\[(\d+)\]>")
_SPECIAL = re.compile(r"<[^<>\s\"]+>")


class Endings(NamedTuple):
    """The texts to try where a text or a number has to be ended, in the order in which they are tried.

    tokens: Special tokens that the grammar names, which may end a text too.
    """

    texts: list[str]
    numbers: list[str]
    tokens: Sequence[int] = ()


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
    named = dict.fromkeys(map(int, _NAMED.findall(wanted.source)))
    return Endings([*within.texts, *literals][:_MAX_ENDINGS], within.numbers, [*named])


def _endings_in(schemas: Sequence[Any]) -> Endings:
    texts = dict.fromkeys(text for schema in schemas for text in _texts_in(schema))
    numbers = dict.fromkeys(text for schema in schemas for text in _numbers_in(schema))
    quoted = [f'{json.dumps(text, ensure_ascii=False)[1:-1]}"' for text in texts]
    ended = [number + end for number in numbers for end in ("}", "]", ",", "")]
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
        if (example := ENSURED_FORMATS.get(str(part.get("format")))) is not None:
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


def _bound(schema: Mapping[str, Any], name: str) -> float | None:
    value = schema.get(name)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not abs(value) < _LARGEST:
        return None
    return float(value)


def _literals(grammar: str) -> Iterator[str]:
    """The quoted texts of a grammar, its special tokens, and short matches of its regular expressions."""
    parts = [part for part, _ in lark_parts(grammar)]
    yield from _SPECIAL.findall(grammar)
    for quoted in parts:
        if quoted.startswith('"') and quoted != '""':
            with suppress(ValueError):
                yield str(json.loads(quoted.removesuffix("i")))
    for pattern in parts:
        if pattern.startswith("/"):
            yield from _matches(pattern[1 : pattern.rindex("/")])


class _Unmatched(ValueError):
    """No short match of a regular expression is made: it is too long, or of a part that is left out."""


def _matches(pattern: str) -> list[str]:
    """A short text that a regular expression matches; none where it is of a dialect that Python does not read."""
    try:
        return [_match_of(_parser.parse(pattern))]
    except (re.error, RecursionError, OverflowError, ValueError):
        return []


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
    if code in _REPEATS:
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


def _member_of(members: Any) -> str:
    """A character of a set; letters and digits rather than others."""
    if members[0][0] is _codes.NEGATE:
        pattern = re.compile(_set_text(members))
        if (found := next((each for each in _CHARACTERS if pattern.match(each)), None)) is None:
            raise _Unmatched("a set without any of the characters that are tried")
        return found
    code, argument = members[0]
    if code in (_codes.LITERAL, _codes.RANGE):
        return chr(argument if code is _codes.LITERAL else argument[0])
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


def largest_opening(schema: Any, *, is_part: bool = False) -> int:
    """A bound of the bytes that the shortest value of any schema within a schema has.

    As much more may be wanted to end an answer once a single token has begun such a value.

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
        return max(
            _bytes_of_character(each[0] if kind is _codes.RANGE else each)
            if kind in (_codes.LITERAL, _codes.RANGE)
            else 1
            for kind, each in argument
        )
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
