"""The response_format of the OpenAI API, which an answer has to match: read and bounded.

The library would take minutes to compile larger ones: twice as many repetitions in a terminal take four to
eight times as long, twice as many properties four times. Knows neither tokens nor models.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from math import isfinite, lcm
from typing import Any, NamedTuple

from llguidance.gbnf_to_lark import gbnf_to_lark

from edgespec.errors import FormatError
from edgespec.grammar.exact_schema import exact
from edgespec.grammar.schema import prepare_schema, schemas_in, subschemas
from edgespec.system.printable import HALF

# Characters of a schema, a regular expression or a grammar; the largest tool schemas in use have some 50,000.
MAX_CHARACTERS = 1 << 17
_MAX_RULES = 1000  # in GBNF, whose translation takes time with the cube of a chain of them
_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
MAX_SOURCE = 1 << 19  # characters of a grammar that is made of the schemas of tools
MAX_PARTS = 20_000  # of a grammar: texts, expressions, names, repetitions and alternatives
MAX_REPETITIONS = 500  # in one regular expression, or one terminal with those in it
MAX_SCHEMAS = 5_000  # within a schema, and within all of a grammar
# States of the numbers that are multiples of another, about as many as that: 99,991 take 1.1 s and 50 MB.
MAX_STATES = 100_000
_SKIPPED = re.compile(r"(?:\s+|//[^\n]*|#[^\n]*)+")
# No expression here is tried again from each place of what it has passed: what has no end goes to the end.
_DEFINITION = re.compile(r"[?!]*+([A-Za-z_][\w-]*+)(?:\.-?\d++)?[ \t]*+(?:\[[^\]\n]*\]|\{[^}\n]*\})?[ \t]*+:")
_PART = re.compile(
    r'"(?:[^"\\\n]|\\[^\n])*+(?:"i?|\\?)|/(?:[^/\\]|\\[^\n])++(?:/[a-z]*|\\?)|<[^<>\s]*>|[\w%@$.-]+|.', re.DOTALL
)
_SPACE = re.compile(r"\s*")
_REPEATING = frozenset("*+?{~")
# What is escaped, begins a group of a kind, or is a set of characters, repeats nothing.
_IN_EXPRESSION = re.compile(r"\\.|\(\?|\[\^?\]?(?:\\.|[^\]\\])*+(?:\]|\\?\Z)|([*+?{])", re.DOTALL)
_ALTERNATIVES = {"anyOf", "oneOf", "$ref"}
_KINDS = ("text", "json_object", "json_schema", "regex", "grammar")


class ResponseFormat(NamedTuple):
    """A schema, an expression or a grammar that an answer has to match.

    kind: json_schema, regex or grammar.
    source: The schema as JSON, the regular expression, or the grammar in the Lark dialect of llguidance.
    opening: Tokens that a single token may add to what an answer needs to end, at most; None where that is
        unknown.
    """

    kind: str
    source: str
    opening: int | None = None


def read_format(stated: Mapping[str, Any] | None) -> ResponseFormat | None:
    """The format that a caller states; None for any text.

        {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}
        {"type": "json_schema", "schema": {"type": "object"}}  # as the Responses API has it
        {"type": "json_object"}
        {"type": "regex", "regex": "[0-9]{4}"}
        {"type": "grammar", "grammar": 'start: "yes" | "no"'}  # Lark, or GBNF: 'root ::= "yes" | "no"'

    Raises FormatError: It is none of these, or too large.
    """
    if stated is None:
        return None
    if not isinstance(stated, Mapping):
        raise FormatError(
            f"response_format is {stated!r:.60}; wanted an object with a type, or in Python schema=, "
            "which takes a JSON schema alone, or a class"
        )
    match stated.get("type"):
        case "text":
            return None
        case "json_object":
            schema = stated.get("schema", {"type": "object"})
        case "json_schema":
            inner = stated.get("json_schema", stated)
            schema = inner.get("schema") if isinstance(inner, Mapping) else None
        case "regex":
            return ResponseFormat("regex", _text_of(stated, "regex"))
        case "grammar":
            return ResponseFormat("grammar", _lark_of(_text_of(stated, "grammar")))
        case other:
            found = "no type" if other is None else f"the type {str(other)[:40]!r}"
            raise FormatError(f"response_format has {found}; wanted {', '.join(_KINDS)}")
    if schema is False:
        raise FormatError("the schema is false, which no value matches; give one that an answer can match")
    if not isinstance(schema, (Mapping, bool)):
        raise FormatError(
            'response_format has no schema; wanted {"type": "json_schema", "json_schema": {"schema": …}}'
        )
    return ResponseFormat("json_schema", _schema_text(schema))


def _text_of(stated: Mapping[str, Any], kind: str) -> str:
    text = stated.get(kind)
    if not isinstance(text, str) or not text:
        raise FormatError(f'response_format has no text under {kind}; wanted {{"type": "{kind}", "{kind}": …}}')
    return _within_bounds(text, kind)


def _lark_of(grammar: str) -> str:
    """A grammar in Lark; one in GBNF, as llama.cpp has them, is translated."""
    if not _GBNF_RULE.search(grammar):
        return grammar
    if (num_rules := grammar.count("::=")) > _MAX_RULES:
        raise FormatError(
            f"the grammar has {num_rules} rules in GBNF; wanted at most {_MAX_RULES}: write it in Lark or smaller"
        )
    try:
        return str(gbnf_to_lark(grammar))
    except (Exception, RecursionError) as error:  # the library raises Exception itself
        raise FormatError(f"the grammar is not valid GBNF: {' '.join(str(error).split())[:300]}") from None


def _schema_text(schema: Mapping[str, Any] | bool) -> str:
    try:
        # First, as what follows walks through all of it.
        _within_bounds(json.dumps(schema, ensure_ascii=False, allow_nan=False), "schema")
        # The library reads objects alone.
        return json.dumps({} if schema is True else exact(prepare_schema(schema)), ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise FormatError(
            f"the schema is not JSON ({error}); give one of objects, arrays, texts and numbers"
        ) from None


def _within_bounds(text: str, name: str) -> str:
    if len(text) > MAX_CHARACTERS:
        raise FormatError(f"the {name} has {len(text)} characters; wanted at most {MAX_CHARACTERS}")
    if HALF.search(text):
        raise FormatError(f"the {name} has half of a surrogate pair, which is not a character; give both halves")
    return text


def require_bounded(wanted: ResponseFormat) -> int:
    """The number of states for multipleOf. Raises FormatError: It is larger than what is worked on."""
    require_at_most("characters", len(wanted.source), MAX_SOURCE)
    match wanted.kind:
        case "json_schema":
            return _require_small_schemas([json.loads(wanted.source)])
        case "regex":
            _require_few_repetitions(count_repetitions(wanted.source))
            return 0
        case _:
            num_parts, num_repetitions = measure_lark(wanted.source)
            require_at_most("parts (texts, names, repetitions and alternatives)", num_parts, MAX_PARTS)
            _require_few_repetitions(num_repetitions)
            return _require_small_schemas(list(schemas_in(wanted.source)))


def require_at_most(what: str, num: int, most: int) -> None:
    """Raises FormatError: There are more."""
    if num > most:
        raise FormatError(f"the response_format has {num} {what}; wanted at most {most}: make it smaller")


def _require_few_repetitions(num: int) -> None:
    require_at_most("repetitions (*, +, ? and {}) in one regular expression or terminal", num, MAX_REPETITIONS)


def _require_small_schemas(schemas: list[Any]) -> int:
    """The states for all multipleOf in schemas."""
    parts = [part for schema in schemas for _, part in subschemas(schema)]
    require_at_most("schemas within each other", len(parts), MAX_SCHEMAS)
    require_at_most("states for multipleOf", num_states := _num_states(parts), MAX_STATES)
    for part in parts:
        stated = (part.get("pattern"), *part.get("patternProperties", ())) if isinstance(part, Mapping) else ()
        for pattern in stated:
            if isinstance(pattern, str):
                _require_few_repetitions(count_repetitions(pattern))
    return num_states


def _num_states(parts: list[Any]) -> int:
    """States for all multipleOf in schemas; several that one number has to be a multiple of are multiplied."""
    schemas = [part for part in parts if isinstance(part, Mapping)]
    steps = [_digits_of(part["multipleOf"]) for part in schemas if "multipleOf" in part]
    # Whether several bound one number.
    may_meet = any("allOf" in part or (len(part) > 1 and not _ALTERNATIVES.isdisjoint(part)) for part in schemas)
    return lcm(*steps) if may_meet else sum(steps)


def _digits_of(step: Any) -> int:
    """A number without its point; 1 for powers of 10, whose multiples the last digits tell."""
    is_number = isinstance(step, (int, float)) and not isinstance(step, bool) and step
    if not is_number or (isinstance(step, float) and not isfinite(step)):
        return 1  # the library refuses it
    _, digits, exponent = Decimal(repr(step) if isinstance(step, float) else step).as_tuple()
    if digits[0] == 1 and not any(digits[1:]):
        return 1
    return int("".join(map(str, digits[:20]))) * int(10 ** max(0, int(exponent)))


@dataclass(slots=True)
class _Rule:
    """num_repetitions: Its own."""

    num_repetitions: int = 0
    names: Counter[str] = field(default_factory=Counter)


def lark_parts(grammar: str) -> Iterator[tuple[str, str]]:
    """The names that a grammar defines, each as ("", name), and its other parts, each as (part, "")."""
    at, is_line_start = 0, True
    while at < len(grammar):
        if skipped := _SKIPPED.match(grammar, at):
            at, is_line_start = skipped.end(), is_line_start or "\n" in skipped[0]
            continue
        if is_line_start and (defined := _DEFINITION.match(grammar, at)):
            yield "", defined[1]
            at, is_line_start = defined.end(), False
            continue
        found = _PART.match(grammar, at)
        assert found
        yield found[0], ""
        at, is_line_start = found.end(), False
        if found[0] == "%json":
            at = _end_of_json(grammar, at)


def measure_lark(grammar: str) -> tuple[int, int]:
    """The number of parts of a grammar, and the most repetitions in one expression or terminal.

    Parts are texts, expressions, names, schemas, repetitions and alternatives. Repetitions of the terminals in a
    terminal count as its own.
    """
    rules: dict[str, _Rule] = {}
    rule, num_parts, most = _Rule(), 0, 0
    for part, name in lark_parts(grammar):
        if name:
            rule = rules.setdefault(name, _Rule())
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
    return num_parts, max([most, *_in_terminals(rules).values()])


def count_repetitions(expression: str) -> int:
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
