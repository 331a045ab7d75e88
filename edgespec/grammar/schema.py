"""Checks of a JSON schema before it is compiled, and its form for the library that compiles it."""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, unquote

from edgespec.errors import FormatError

MAX_DEPTH = 64
_MAX_ASKED = 200  # schemas that are asked about one value
_MAX_COMPARED = 8  # levels to which two schemas are compared
_TYPES = frozenset({"object", "array", "string", "integer", "number", "boolean", "null"})
SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
SINGLE = (
    *("items", "additionalProperties", "additionalItems", "contains"),
    *("not", "if", "then", "else", "propertyNames"),
)
_KNOWN = frozenset({*SCHEMAS, *LISTS, *SINGLE, "const", "default"})  # keywords with schemas, and those with values
# Formats of texts that llguidance ensures, each with an example, and those that JSON Schema defines beside them.
# Any other is a note.
ENSURED_FORMATS = {
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
_LACKING_FORMATS = frozenset(
    {
        *("idn-email", "idn-hostname", "uri-reference", "iri", "iri-reference", "uri-template"),
        *("json-pointer", "relative-json-pointer", "regex"),
    }
)
_PLAIN_IN_REFERENCES = "/~!$&'()*+,;=:@?"
_IN_GRAMMAR = re.compile(r"%json\s*(?=[{\w])")

Schema = Mapping[str, Any]


def prepare_schema(schema: Any) -> Any:
    """A schema as llguidance takes it.

    Each oneOf whose branches exclude each other is anyOf, which then means the same. References are escaped as in
    URIs, and formats that are mere notes are left out.

    Raises FormatError: It is nested too deep, refers to another document, to nothing or in a circle, has a oneOf
    of which several branches may match, or a format of JSON Schema that cannot be ensured.
    """
    parts = _parts_in_use(schema)
    ending: set[int] = set()  # schemas whose references end, by their identity
    for pointer, part in parts:
        _require_shape(part, pointer)
        _require_ensured(part, pointer)
        if "$ref" in part:
            _require_reference(part["$ref"], pointer, schema)
            _require_end(part, pointer, schema, ending)
    comparison = _Comparison(schema)
    for pointer, part in parts:
        _require_exclusive(part.get("oneOf", ()), comparison, f"{pointer}/oneOf")
    return _translate(schema)


def _parts_in_use(schema: Any) -> list[tuple[str, Schema]]:
    """The objects among its subschemas, and those that references lead to, as to #/components/schemas/A."""
    parts = [each for each in subschemas(schema) if isinstance(each[1], Mapping)]
    known = {id(part) for _, part in parts}
    for _, part in parts:  # also those that are added meanwhile
        reference = part.get("$ref")
        target = resolve(reference, schema) if isinstance(reference, str) and reference.startswith("#/") else None
        if isinstance(target, Mapping) and id(target) not in known:
            more = [each for each in subschemas(target, reference) if isinstance(each[1], Mapping)]
            parts.extend(more)
            known.update(id(each) for _, each in more)
    return parts


def schemas_in(grammar: str) -> Iterator[Any]:
    """The JSON schemas that a grammar holds, each behind %json."""
    for found in _IN_GRAMMAR.finditer(grammar):
        try:
            yield json.JSONDecoder().raw_decode(grammar, found.end())[0]
        except (ValueError, RecursionError):
            continue  # the library refuses it


def subschemas(schema: Any, pointer: str = "#", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """All schemas within a schema and itself, each with its JSON pointer, the outer ones first.

    Raises FormatError: They are nested too deep.
    """
    if depth > MAX_DEPTH:
        raise FormatError(
            f"the schema is nested deeper than {MAX_DEPTH} levels, at {pointer[:200]}; use a flatter one"
        )
    yield pointer, schema
    for name, inner in _children(schema):
        yield from subschemas(inner, f"{pointer}/{name}", depth + 1)


def _children(schema: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(schema, Mapping):
        return
    for key in SCHEMAS:
        if isinstance(inner := schema.get(key), Mapping):
            yield from ((f"{key}/{_escape(str(name))}", each) for name, each in inner.items())
    for key in (*LISTS, "items"):
        if isinstance(inner := schema.get(key), list):
            yield from ((f"{key}/{i}", each) for i, each in enumerate(inner))
    for key in SINGLE:
        if isinstance(inner := schema.get(key), (Mapping, bool)):
            yield key, inner


def with_inner(schema: Schema, change: Callable[[Any], Any]) -> dict[str, Any]:
    """A schema in which the schemas right within it are changed."""
    changed = dict(schema)
    for key in SCHEMAS:
        if isinstance(inner := schema.get(key), Mapping):
            changed[key] = {name: change(each) for name, each in inner.items()}
    for key in (*LISTS, *SINGLE):
        if isinstance(inner := schema.get(key), list):
            changed[key] = [change(each) for each in inner]
        elif key in schema:
            changed[key] = change(inner)
    return changed


def _escape(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _require_shape(schema: Schema, pointer: str) -> None:
    """Refuse keywords whose value has the wrong type, also in parts that nothing refers to."""
    for keys, kind, wanted in ((SCHEMAS, Mapping, "an object"), ((*LISTS, "enum", "required"), list, "a list")):
        for key in keys:
            if key in schema and not isinstance(schema[key], kind):
                raise FormatError(f"the schema has a {key} at {pointer[:200]} that is not {wanted}; give {wanted}")
    types = schema.get("type", "")
    names = [*schema.get("required", ()), *(types if isinstance(types, list) else [types])]
    if not all(isinstance(name, str) for name in names):
        raise FormatError(f"the schema has a required or a type at {pointer[:200]} that is not text; give texts")


def _require_ensured(schema: Schema, pointer: str) -> None:
    stated = schema.get("format")
    if isinstance(stated, str) and stated in _LACKING_FORMATS and "string" in _types_of(schema):
        raise FormatError(
            f"the schema has the format {stated!r} at {pointer[:200]}, which cannot be ensured; state a pattern, "
            f"leave it out, or use one of {', '.join(sorted(ENSURED_FORMATS))}"
        )
    # Names that a schema leaves free may come twice, and are then one property.
    has_free_names = schema.get("additionalProperties", True) is not False or "patternProperties" in schema
    least, ensured = number_of(schema, "minProperties"), max(1, len(schema.get("required", ())))
    if has_free_names and least > ensured and "object" in _types_of(schema):
        raise FormatError(
            f"the schema has minProperties {least} at {pointer[:200]}, which cannot be ensured of names that it "
            "leaves free; name the properties and require them, or leave it out"
        )


def is_note(stated: Any) -> bool:
    """True if a format bounds no text: it is none of JSON Schema's, such as password, binary and int32."""
    return isinstance(stated, str) and not (stated in ENSURED_FORMATS or stated in _LACKING_FORMATS)


def _require_reference(reference: Any, pointer: str, root: Any) -> None:
    if not isinstance(reference, str) or not reference.startswith("#"):
        raise FormatError(
            f'the schema has {{"$ref": {str(reference)[:80]!r}}} at {pointer}; only references within the schema '
            "are followed: put what it refers to under $defs, and refer to it by #/$defs/NAME"
        )
    if (reference.startswith("#/") or reference == "#") and resolve(reference, root) is None:
        raise FormatError(f"the schema refers at {pointer} to {reference[:80]!r}, which it does not hold; add it")


def _require_end(part: Any, pointer: str, root: Any, ending: set[int]) -> None:
    """Refuse references that lead back to themselves and to no value."""
    passed: set[int] = set()
    while isinstance(part, Mapping) and id(part) not in ending:
        if id(part) in passed:
            raise FormatError(
                f"the schema refers at {pointer[:200]} to itself in a circle, so that it says nothing of a value; "
                "refer to a schema with a type"
            )
        passed.add(id(part))
        reference = str(part.get("$ref", ""))
        part = resolve(reference, root) if reference == "#" or reference.startswith("#/") else None
    ending |= passed


def resolve(reference: str, root: Any) -> Any:
    """The schema that a reference such as #/$defs/name names, with the escapes of URIs or without; else None."""
    found = root
    for name in unquote(reference).split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping) and name in found:
            found = found[name]
        elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            return None
    return found


def argument_schema(parameters: Schema, name: str) -> Any:
    """The schema of one property of an object; True where the schema of the object says nothing of it."""
    schema = _followed(parameters, parameters)
    return _property(schema, name) if isinstance(schema, Mapping) else True


def allows(schema: Any, root: Any, value: Any, known: dict[tuple[int, int], bool] | None = None) -> bool:
    """True unless the types, the values, the references or the branches of a schema exclude a value or its parts.

    Args:
        schema: May be wrong; what is no schema allows everything.
        root: The schema in which references are followed.
        known: What is known of schemas and parts of the value, by their identity.
    """
    known = {} if known is None else known
    if not isinstance(schema, Mapping) or len(known) > _MAX_ASKED:
        return schema is not False
    if (asked := (id(schema), id(value))) not in known:
        known[asked] = True  # where it refers to itself
        branches = [
            (enough, schema[key])
            for key, enough in (("anyOf", any), ("oneOf", any), ("allOf", all))
            if isinstance(schema.get(key), list)
        ]
        if "$ref" in schema:
            branches.append((all, [resolve(str(schema["$ref"]), root)]))
        known[asked] = (
            _has_type_and_value(schema, value)
            and all(enough(allows(each, root, value, known) for each in several) for enough, several in branches)
            and all(allows(of_part, root, part, known) for of_part, part in _parts(schema, value))
        )
    return known[asked]


def _parts(schema: Schema, value: Any) -> Iterator[tuple[Any, Any]]:
    """What lies in a value, each with its schema; false is that of what is required and missing."""
    if isinstance(value, dict):
        properties = schema.get("properties")
        named = properties if isinstance(properties, Mapping) else {}
        others = "patternProperties" in schema or schema.get("additionalProperties", True)
        yield from ((named.get(name, others), part) for name, part in value.items())
        required = schema.get("required")
        yield from ((name in value, None) for name in (required if isinstance(required, list) else ()))
    elif isinstance(value, list) and "prefixItems" not in schema:
        yield from ((schema.get("items", True), part) for part in value)


def _has_type_and_value(schema: Schema, value: Any) -> bool:
    stated = schema.get("type")
    types = stated if isinstance(stated, list) else [stated] if isinstance(stated, str) else [*_TYPES]
    kinds = [_type_of(value)]
    if kinds == ["integer"] or (isinstance(value, float) and value.is_integer()):
        kinds = ["integer", "number"]
    values = values_of(schema)
    is_listed = values is None or _comparable(value) in [_comparable(each) for each in values]
    return is_listed and any(kind in types for kind in kinds)


@dataclass(slots=True)
class _Comparison:
    """Tells whether schemas exclude each other, within a bound of work."""

    root: Any
    num_left: int = 60_000
    # The types and values of schemas, by their identity.
    known: dict[int, tuple[frozenset[str], frozenset[Any] | None]] = field(default_factory=dict)

    def exclude(self, one: Any, other: Any, depth: int = 0) -> bool:
        """True if surely no value matches both schemas."""
        self.num_left -= 1
        one, other = _followed(one, self.root), _followed(other, self.root)
        if one is False or other is False:
            return True
        is_plain = isinstance(one, Mapping) and isinstance(other, Mapping)
        if not is_plain or depth > _MAX_COMPARED or self.num_left < 0:
            return False
        (types, values), (other_types, other_values) = self._bounds_of(one), self._bounds_of(other)
        if types.isdisjoint(other_types):
            return True
        if values is not None and other_values is not None and values.isdisjoint(other_values):
            return True
        is_object = types <= {"object"} or other_types <= {"object"}
        return is_object and any(
            self.exclude(_property(one, name), _property(other, name), depth + 1)
            for name in {*one.get("required", ()), *other.get("required", ())}
            if self.num_left > 0
        )

    def _bounds_of(self, schema: Schema) -> tuple[frozenset[str], frozenset[Any] | None]:
        if id(schema) not in self.known:
            values = values_of(schema)
            listed = None if values is None else frozenset(map(_comparable, values))
            self.known[id(schema)] = _types_of(schema), listed
        return self.known[id(schema)]


def _translate(schema: Any) -> Any:
    """A schema that was checked, as llguidance takes it."""
    if not isinstance(schema, Mapping):
        return schema
    changed = with_inner(_with_narrow_bounds(schema), _translate)
    for key, value in schema.items():
        if isinstance(value, Mapping) and key not in _KNOWN:  # which a reference may lead into
            changed[key] = _translate(value)
    if is_note(changed.get("format")):
        del changed["format"]
    if isinstance(reference := changed.get("$ref"), str):
        changed["$ref"] = "#" + quote(unquote(reference[1:]), safe=_PLAIN_IN_REFERENCES, errors="replace")
    if (branches := changed.pop("oneOf", None)) is not None:
        if "anyOf" in changed:
            changed["allOf"] = [*changed.get("allOf", ()), {"anyOf": branches}]
        else:
            changed["anyOf"] = branches
    return changed


def _with_narrow_bounds(schema: Schema) -> Schema:
    """A schema whose numbers surely keep to bounds that are excluded.

    llguidance 1.9 lets a whole number through that is excluded if the other bound is less than 1 further from 0,
    as it does with 0 in {"exclusiveMinimum": 0, "maximum": 0.5}. A bound that is nearer by a millionth is kept.
    """
    low = schema.get("exclusiveMinimum", schema.get("minimum"))
    high = schema.get("exclusiveMaximum", schema.get("maximum"))
    if not (_is_number(low) and _is_number(high) and 1e-9 <= high - low < 1) or schema.get("type") == "integer":
        return schema
    step, changed = 10.0 ** (math.floor(math.log10(high - low)) - 6), dict(schema)
    if "exclusiveMinimum" in changed and low >= 0 and low == int(low):
        changed["minimum"] = max(round(changed.pop("exclusiveMinimum") + step, 15), schema.get("minimum", low))
    if "exclusiveMaximum" in changed and high <= 0 and high == int(high):
        changed["maximum"] = min(round(changed.pop("exclusiveMaximum") - step, 15), schema.get("maximum", high))
    return changed


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _require_exclusive(branches: Sequence[Any], comparison: _Comparison, pointer: str) -> None:
    for second in range(len(branches)):
        for first in range(second):
            if not comparison.exclude(branches[first], branches[second]):
                raise FormatError(
                    f"the schema has a oneOf at {pointer} whose branches {first} and {second} may both match; "
                    "make them exclude each other, by types or by different const values of a required property, "
                    "or use anyOf"
                )


def _followed(schema: Any, root: Any) -> Any:
    for _ in range(_MAX_COMPARED):
        if not isinstance(schema, Mapping) or not isinstance(schema.get("$ref"), str) or len(schema) > 1:
            break
        schema = resolve(schema["$ref"], root)
    return schema


def _property(schema: Schema, name: str) -> Any:
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and name in properties:
        return properties[name]
    return True if schema.get("patternProperties") else schema.get("additionalProperties", True)


def _types_of(schema: Schema) -> frozenset[str]:
    """The types that a value may have; every integer is a number too."""
    if (values := values_of(schema)) is not None:
        found = {_type_of(value) for value in values}
    else:
        stated = schema.get("type", _TYPES)
        found = {stated} if isinstance(stated, str) else {*stated}
    return frozenset(found | ({"integer"} if "number" in found else set()))


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    return kinds.get(type(value), "object")


def values_of(schema: Schema) -> Sequence[Any] | None:
    """The values that a schema lists; None where it lists none."""
    if "const" in schema:
        return (schema["const"],)
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _comparable(value: Any) -> Any:
    """A key that values share exactly if JSON takes them for the same: 1 and 1.0 do, 1 and true do not."""
    if isinstance(value, bool):
        return "boolean", value
    if isinstance(value, Mapping):
        return "object", frozenset((name, _comparable(each)) for name, each in value.items())
    if isinstance(value, (list, tuple)):
        return "array", tuple(map(_comparable, value))
    return value


def number_of(schema: Schema, name: str) -> int:
    """A positive whole number that a schema states; 0 where it states none."""
    value = schema.get(name, 0)
    return value if type(value) is int and value > 0 else 0
