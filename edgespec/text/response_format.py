"""The response_format of the OpenAI API, which an answer has to match: read and bounded.

Knows neither tokens nor models.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from llguidance.gbnf_to_lark import gbnf_to_lark

from edgespec.errors import FormatError
from edgespec.text.schema import prepare_schema

# Characters of a schema, a regular expression or a grammar; the largest tool schemas in use have some 50,000.
MAX_CHARACTERS = 1 << 17
_MAX_RULES = 1000  # in GBNF, whose translation takes time with the cube of a chain of them
_HALF = re.compile("[\ud800-\udfff]")
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
        raise FormatError(f"response_format is a {type(stated).__name__}; wanted an object with a type")
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
            raise FormatError(f"response_format has the type {str(other)[:40]!r}; wanted {', '.join(_KINDS)}")
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
    if (num_rules := grammar.count("::=")) == 0:
        return grammar
    if num_rules > _MAX_RULES:
        raise FormatError(
            f"the grammar has {num_rules} rules in GBNF; wanted at most {_MAX_RULES}: write it in Lark or smaller"
        )
    try:
        return str(gbnf_to_lark(grammar))
    except (Exception, RecursionError) as error:  # the library raises Exception itself
        raise FormatError(f"the grammar is no valid GBNF: {' '.join(str(error).split())[:300]}") from None


def _schema_text(schema: Mapping[str, Any] | bool) -> str:
    try:
        # First, as what follows walks through all of it.
        _within_bounds(json.dumps(schema, ensure_ascii=False, allow_nan=False), "schema")
        # The library reads objects alone.
        return json.dumps({} if schema is True else prepare_schema(schema), ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise FormatError(
            f"the schema is no JSON ({error}); give one of objects, arrays, texts and numbers"
        ) from None


def _within_bounds(text: str, name: str) -> str:
    if len(text) > MAX_CHARACTERS:
        raise FormatError(f"the {name} has {len(text)} characters; wanted at most {MAX_CHARACTERS}")
    if _HALF.search(text):
        raise FormatError(f"the {name} has half of a surrogate pair, which is no character; give both halves")
    return text
