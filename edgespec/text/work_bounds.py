"""How large a format may be for the library to work on it: beyond, some take minutes to compile.

Twice as many repetitions in a terminal take four to eight times as long, twice as many properties four times.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from edgespec.errors import FormatError
from edgespec.text.endings import schemas_in
from edgespec.text.response_format import ResponseFormat
from edgespec.text.schema import subschemas

MAX_SOURCE = 1 << 19  # characters of a grammar that is made of the schemas of tools
MAX_PARTS = 20_000  # of a grammar: texts, expressions, names, repetitions and alternatives
MAX_REPETITIONS = 500  # in one regular expression, or one terminal with those in it
MAX_SCHEMAS = 5_000  # within a schema, and within all of a grammar
_SKIPPED = re.compile(r"(?:\s+|//[^\n]*|#[^\n]*)+")
_DEFINITION = re.compile(r"[?!]*([A-Za-z_][\w-]*)(?:\.-?\d+)?[ \t]*(?:\[[^\]\n]*\]|\{[^}\n]*\})?[ \t]*:")
_PART = re.compile(r'"(?:[^"\\\n]|\\.)*"i?|/(?:[^/\\\n]|\\.)+/[a-z]*|<[^<>\s]*>|[\w%@$.-]+|.', re.DOTALL)
_SPACE = re.compile(r"\s*")
_REPEATING = frozenset("*+?{~")
# What is escaped, begins a group of a kind, or is a set of characters, repeats nothing.
_IN_EXPRESSION = re.compile(r"\\.|\(\?|\[\^?\]?(?:\\.|[^\]\\])*\]|([*+?{])", re.DOTALL)


def require_bounded(wanted: ResponseFormat) -> None:
    """Raises FormatError: It is larger than what is worked on."""
    require_at_most("characters", len(wanted.source), MAX_SOURCE)
    match wanted.kind:
        case "json_schema":
            _require_small_schemas([json.loads(wanted.source)])
        case "regex":
            _require_few_repetitions(count_repetitions(wanted.source))
        case _:
            size = measure_lark(wanted.source)
            require_at_most("parts (texts, names, repetitions and alternatives)", size.num_parts, MAX_PARTS)
            _require_few_repetitions(size.num_repetitions)
            _require_small_schemas(list(schemas_in(wanted.source)))


def require_at_most(what: str, num: int, most: int) -> None:
    """Raises FormatError: There are more."""
    if num > most:
        raise FormatError(f"the response_format has {num} {what}; wanted at most {most}: make it smaller")


def _require_few_repetitions(num: int) -> None:
    require_at_most("repetitions (*, +, ? and {}) in one regular expression or terminal", num, MAX_REPETITIONS)


def _require_small_schemas(schemas: list[Any]) -> None:
    parts = [part for schema in schemas for _, part in subschemas(schema)]
    require_at_most("schemas within each other", len(parts), MAX_SCHEMAS)
    for part in parts:
        _require_few_repetitions(max(map(count_repetitions, _patterns(part)), default=0))


def _patterns(schema: Any) -> Iterator[str]:
    if isinstance(schema, Mapping):
        yield from (
            text for text in (schema.get("pattern"), *schema.get("patternProperties", ())) if _is_text(text)
        )


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


class LarkSize(NamedTuple):
    """The size of a grammar.

    num_parts: Texts, expressions, names, schemas, repetitions and alternatives.
    num_repetitions: The most in one expression or terminal, with those of the terminals in it.
    """

    num_parts: int
    num_repetitions: int


@dataclass(slots=True)
class _Rule:
    """num_repetitions: Its own."""

    num_repetitions: int = 0
    names: Counter[str] = field(default_factory=Counter)


def measure_lark(grammar: str) -> LarkSize:
    """Count the parts of a grammar; a schema behind %json is one."""
    rules: dict[str, _Rule] = {}
    rule, num_parts, most, at, is_line_start = _Rule(), 0, 0, 0, True
    while at < len(grammar):
        if skipped := _SKIPPED.match(grammar, at):
            at, is_line_start = skipped.end(), is_line_start or "\n" in skipped[0]
            continue
        if is_line_start and (defined := _DEFINITION.match(grammar, at)):
            rule = rules.setdefault(defined[1], _Rule())
            at, num_parts, is_line_start = defined.end(), num_parts + 1, False
            continue
        found = _PART.match(grammar, at)
        assert found
        part, at, is_line_start = found[0], found.end(), False
        if part == "%json":
            at = _end_of_json(grammar, at)
        elif len(part) > 1 and part[0] == "/":
            num = count_repetitions(part)
            rule.num_repetitions += num
            most = max(most, num)
        elif part in _REPEATING:
            rule.num_repetitions += 1
        elif part[0].isalpha() or part[0] == "_":
            rule.names[part] += 1
        elif len(part) == 1 and part != "|" and not part.isalnum():
            continue
        num_parts += 1
    return LarkSize(num_parts, max([most, *_in_terminals(rules).values()]))


def count_repetitions(expression: str) -> int:
    """How often a regular expression repeats something."""
    return sum(found[1] is not None for found in _IN_EXPRESSION.finditer(expression))


def _in_terminals(rules: dict[str, _Rule]) -> dict[str, int]:
    """The repetitions of each terminal, whose names have capital letters, with those of the terminals in it."""
    known: dict[str, int] = {}
    for name in rules:
        waiting = [name] if name.isupper() and name not in known else []
        while waiting:
            current = waiting[-1]
            inner = {each: num for each, num in rules[current].names.items() if each.isupper() and each in rules}
            if current not in known:
                known[current] = 0  # for one that holds itself, which is refused elsewhere
                waiting += [each for each in inner if each not in known]
                continue
            known[current] = rules[current].num_repetitions + sum(known[each] * num for each, num in inner.items())
            waiting.pop()
    return known


def _end_of_json(grammar: str, at: int) -> int:
    """Where a JSON value ends that begins behind white space; at, where there is none."""
    space = _SPACE.match(grammar, at)
    assert space
    try:
        return json.JSONDecoder().raw_decode(grammar, space.end())[1]
    except (ValueError, RecursionError):
        return at
