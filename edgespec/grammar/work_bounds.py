"""How large a format may be for the library to work on it: beyond, some take minutes to compile.

Twice as many repetitions in a terminal take four to eight times as long, twice as many properties four times.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from edgespec.errors import FormatError
from edgespec.grammar.endings import schemas_in
from edgespec.grammar.lark_size import count_repetitions, measure_lark
from edgespec.grammar.response_format import ResponseFormat
from edgespec.grammar.schema import subschemas

MAX_SOURCE = 1 << 19  # characters of a grammar that is made of the schemas of tools
MAX_PARTS = 20_000  # of a grammar: texts, expressions, names, repetitions and alternatives
MAX_REPETITIONS = 500  # in one regular expression, or one terminal with those in it
MAX_SCHEMAS = 5_000  # within a schema, and within all of a grammar


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
