"""How large a grammar in Lark is, by how it is spelled. Knows nothing of what it means."""

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

_SKIPPED = re.compile(r"(?:\s+|//[^\n]*|#[^\n]*)+")
_DEFINITION = re.compile(r"[?!]*([A-Za-z_][\w-]*)(?:\.-?\d+)?[ \t]*(?:\[[^\]\n]*\]|\{[^}\n]*\})?[ \t]*:")
_PART = re.compile(r'"(?:[^"\\\n]|\\.)*"i?|/(?:[^/\\\n]|\\.)+/[a-z]*|<[^<>\s]*>|[\w%@$.-]+|.', re.DOTALL)
_SPACE = re.compile(r"\s*")
_REPEATING = frozenset("*+?{~")
# What is escaped, begins a group of a kind, or is a set of characters, repeats nothing.
_IN_EXPRESSION = re.compile(r"\\.|\(\?|\[\^?\]?(?:\\.|[^\]\\])*\]|([*+?{])", re.DOTALL)


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
