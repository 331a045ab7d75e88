"""Parts of JSON schemas that llguidance 1.9 takes too widely, in a form in which it is exact.

It lets names that a schema leaves free spell a declared one by an escape, knows no leap years, and writes leap
seconds.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from edgespec.grammar.schema import subschemas, with_inner

_PREFIX = re.compile(r"\^([\w -]+)")  # patterns that mean a beginning, and no more
_MAX_LENGTH = 80  # characters of a name; each nests a regular expression deeper
_MAX_NAMES = 500
_NAMING = {"properties", "patternProperties", "$ref", "allOf", "anyOf"}
_SPECIAL = re.compile(r"([\\.+*?()|\[\]{}^$/&~#-])")

_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_DAY = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = f"(?:{_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
_SECOND = r"[0-5][0-9](?:\.[0-9]+)?"
_OFFSET = "(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_TIME = f"(?:[01][0-9]|2[0-3]):[0-5][0-9]:{_SECOND}{_OFFSET}"
# RFC 3339, with leap days in leap years; without leap seconds, which few programs read.
PATTERNS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}


def exact(schema: Any) -> Any:
    """A schema that llguidance takes exactly, of one that prepare_schema gave.

    Where it joins the properties of several objects, as allOf does, free names stay as they are: llguidance takes
    no patterns there that match the same names.
    """
    parts = [part for _, part in subschemas(schema) if isinstance(part, Mapping)]
    return _exact(schema, has_names=not any(map(_joins_objects, parts)))


def _joins_objects(schema: Mapping[str, Any]) -> bool:
    named: list[Mapping[str, Any]] = [
        {key: value for key, value in schema.items() if key in ("properties", "patternProperties")}
    ]
    named += [{"$ref": ""}] if "$ref" in schema else []
    named += [each for each in schema.get("allOf", ()) if isinstance(each, Mapping)]
    branches = [each for each in schema.get("anyOf", ()) if isinstance(each, Mapping)]
    named += [each for each in branches if not _NAMING.isdisjoint(each)][:1]  # one of them counts
    return sum(not _NAMING.isdisjoint(each) for each in named) > 1


def _exact(schema: Any, *, has_names: bool) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    changed = _with_exact_format(with_inner(schema, partial(_exact, has_names=has_names)))
    return _with_exact_names(changed) if has_names else changed


def _with_exact_format(schema: dict[str, Any]) -> dict[str, Any]:
    """A pattern in the place of a format that is a date or a time."""
    if (pattern := PATTERNS.get(str(schema.get("format")))) is None:
        return schema
    others = {key: value for key, value in schema.items() if key != "format"}
    if "pattern" not in schema:
        return {**others, "pattern": pattern}
    return {**others, "allOf": [*schema.get("allOf", ()), {"pattern": pattern}]}


def _with_exact_names(schema: dict[str, Any]) -> dict[str, Any]:
    """Free names of an object that are none of the declared ones, however they are written.

    No name is left free where patterns are no plain beginnings, or where names are very long or many.
    """
    declared, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    free = schema.get("additionalProperties", True)
    if free is False or not (declared or patterns):
        return schema
    prefixes = [_PREFIX.fullmatch(pattern) for pattern in patterns]
    is_large = len(declared) > _MAX_NAMES or max(map(len, declared), default=0) > _MAX_LENGTH
    if is_large or not all(prefixes):
        return {**schema, "additionalProperties": False}
    others = _other_names(declared, [prefix[1] for prefix in prefixes if prefix])
    return {**schema, "patternProperties": {**patterns, others: free}, "additionalProperties": False}


def _other_names(names: Iterable[str], prefixes: Sequence[str]) -> str:
    """A regular expression of the texts that are none of the names, and begin with no prefix.

    It repeats once alone, as repetitions are what makes expressions slow.
    """
    leaving, ending = _branch(frozenset(names), frozenset(prefixes))
    return f"^(?:{leaving}(?s:.*)" + ("" if ending is None else f"|{ending}") + ")$"


def _branch(names: frozenset[str], prefixes: frozenset[str]) -> tuple[str, str | None]:
    """Regular expressions of what may follow the beginning of a name.

    The first leads up to the character by which it becomes another name, the second to the end of one that only
    begins a name; None where there is none.
    """
    heads = sorted({text[0] for text in names | prefixes if text})
    leaving = ["[^" + "".join(map(_literal, heads)) + "]" if heads else "(?s:.)"]
    ending = [] if "" in names else [""]
    for head in heads:
        behind = (frozenset(text[1:] for text in texts if text[:1] == head) for texts in (names, prefixes))
        names_behind, prefixes_behind = behind
        if "" in prefixes_behind:
            continue
        inner_leaving, inner_ending = _branch(names_behind, prefixes_behind)
        leaving.append(_literal(head) + inner_leaving)
        if inner_ending is not None:
            ending.append(_literal(head) + inner_ending)
    return f"(?:{'|'.join(leaving)})", f"(?:{'|'.join(ending)})" if ending else None


def _literal(character: str) -> str:
    return _SPECIAL.sub(r"\\\1", character)
