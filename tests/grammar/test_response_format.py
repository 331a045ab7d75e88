"""What callers state, read and bounded; and what is worked out from schemas."""

import re
import tracemalloc
from typing import Any

import pytest

from edgespec.errors import FormatError
from edgespec.grammar.endings import endings_of, largest_opening
from edgespec.grammar.response_format import MAX_CHARACTERS, ResponseFormat, read_format
from edgespec.grammar.schema import ENSURED_FORMATS, prepare_schema

OBJECT = {"type": "object"}


def tagged(kind: str, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"], **more}


@pytest.mark.parametrize(
    "stated",
    [
        {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": OBJECT}},
        {"type": "json_schema", "name": "x", "schema": OBJECT},
        {"type": "json_object"},
        {"type": "json_object", "schema": OBJECT},
    ],
)
def test_a_schema_may_be_stated_in_several_ways(stated: dict[str, Any]) -> None:
    assert read_format(stated) == ResponseFormat("json_schema", '{"type": "object"}')


@pytest.mark.parametrize("stated", [None, {"type": "text"}])
def test_any_text_needs_no_format(stated: dict[str, Any] | None) -> None:
    assert read_format(stated) is None


@pytest.mark.parametrize(
    ("stated", "reason"),
    [
        ({}, "type"),
        ({"type": "xml"}, "'xml'"),
        ("json", "an object"),
        ({"type": "json_schema"}, "no schema"),
        ({"type": "json_schema", "json_schema": []}, "no schema"),
        ({"type": "json_schema", "schema": {"enum": [object()]}}, "not JSON"),
        ({"type": "regex"}, "under regex"),
        ({"type": "regex", "regex": ""}, "under regex"),
        ({"type": "grammar", "grammar": 3}, "under grammar"),
        ({"type": "regex", "regex": "a" * (MAX_CHARACTERS + 1)}, "characters"),
        ({"type": "json_schema", "schema": {"enum": ["a" * MAX_CHARACTERS]}}, "characters"),
        ({"type": "json_schema", "schema": {"enum": ["\ud800"]}}, "surrogate"),
        ({"type": "regex", "regex": "\ud800"}, "surrogate"),
        ({"type": "json_schema", "schema": {"const": float("inf")}}, "not JSON"),
        ({"type": "json_schema", "schema": {"$defs": {"x": {"required": 5}}}}, "required at #/[$]defs/x"),
        ({"type": "json_schema", "schema": {"$defs": {"x": {"required": [5]}}}}, "not text"),
        ({"type": "json_schema", "schema": {"$defs": {"x": {"patternProperties": None}}}}, "an object"),
        ({"type": "json_schema", "schema": {"$defs": {"x": {"prefixItems": 5}}}}, "a list"),
        ({"type": "json_schema", "schema": {"$ref": "#"}}, "at # to itself in a circle"),
        (
            {
                "type": "json_schema",
                "schema": {
                    "properties": {"x": {"$ref": "#/$defs/a"}},
                    "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
                },
            },
            "#/properties/x to itself in a circle",
        ),
    ],
)
def test_what_is_no_format_is_refused(stated: Any, reason: str) -> None:
    with pytest.raises(FormatError, match=reason):
        read_format(stated)


def test_a_schema_may_hold_itself() -> None:
    item = {"type": "object", "properties": {"next": {"$ref": "#/$defs/item"}, "whole": {"$ref": "#"}}}
    stated = {"$ref": "#/$defs/item", "$defs": {"item": item}}
    assert prepare_schema(stated) == stated


def test_references_may_lead_to_schemas_in_a_place_of_ones_own() -> None:
    either = {"oneOf": [{"type": "string", "format": "password"}, {"type": "integer"}]}
    stated: dict[str, Any] = {
        "$ref": "#/components/schemas/A",
        "components": {"schemas": {"A": {"items": either}}},
    }
    wanted = {"items": {"anyOf": [{"type": "string"}, {"type": "integer"}]}}
    assert prepare_schema(stated)["components"]["schemas"]["A"] == wanted
    either["oneOf"].append({"type": "string"})
    with pytest.raises(FormatError, match="at #/components/schemas/A/items/oneOf"):
        prepare_schema(stated)


def test_gbnf_is_translated() -> None:
    found = read_format({"type": "grammar", "grammar": 'root ::= "yes" | "no"'})
    assert found
    assert "start:" in found.source


@pytest.mark.parametrize("grammar", ['start: ":=" | "::="', "// root ::= a\nstart: /a/"])
def test_lark_may_hold_the_sign_of_gbnf(grammar: str) -> None:
    assert read_format({"type": "grammar", "grammar": grammar}) == ("grammar", grammar, None)


@pytest.mark.parametrize(
    "branches",
    [
        [{"type": "string"}, {"type": "integer"}, {"type": "null"}],
        [{"const": "a"}, {"enum": ["b", 3]}],
        [{"const": 1}, {"const": True}],
        [tagged("a"), tagged("b"), {"type": "array"}],
        [{"$ref": "#/$defs/a"}, tagged("b")],
        [tagged("a"), {"type": "object", "properties": {"other": OBJECT}, "additionalProperties": False}],
    ],
)
def test_branches_that_exclude_each_other_are_alternatives(branches: list[Any]) -> None:
    definitions = {"a": tagged("a")}
    assert prepare_schema({"oneOf": branches, "$defs": definitions}) == {"anyOf": branches, "$defs": definitions}


@pytest.mark.parametrize(
    "branches",
    [
        [{"type": "string"}, {"type": "string", "maxLength": 3}],
        [{"type": "integer"}, {"type": "number"}],
        [OBJECT, tagged("a")],
        [{}, {"type": "null"}],
        [{"const": 1}, {"const": 1.0}],
    ],
)
def test_branches_that_may_both_match_are_refused(branches: list[Any]) -> None:
    with pytest.raises(FormatError, match="#/properties/x/oneOf"):
        prepare_schema({"properties": {"x": {"oneOf": branches}}})


def test_names_of_keywords_in_values_stay_as_they_are() -> None:
    schema = {"const": {"oneOf": [1, 1]}, "properties": {"oneOf": {"type": "string"}}}
    assert prepare_schema(schema) == schema


@pytest.mark.parametrize("note", ["password", "binary", "int32", "double", "path", "uuid4", "unknown"])
def test_formats_that_json_schema_does_not_define_are_notes(note: str) -> None:
    text = {"type": "string", "maxLength": 3}
    schema = {"properties": {"format": {**text, "format": note}}, "const": {"format": note}}
    assert prepare_schema(schema) == {"properties": {"format": text}, "const": {"format": note}}


def test_formats_that_json_schema_defines_are_kept_or_refused() -> None:
    for each in sorted(ENSURED_FORMATS):
        assert prepare_schema({"format": each}) == {"format": each}
    assert prepare_schema({"type": "integer", "format": "regex"})
    for each in ("regex", "idn-email", "uri-reference", "json-pointer"):
        with pytest.raises(FormatError, match=f"'{each}' at #/items, which cannot be ensured"):
            prepare_schema({"items": {"type": ["string", "null"], "format": each}})


def test_a_count_of_properties_is_refused_where_names_may_come_twice() -> None:
    integers = {"type": "object", "additionalProperties": {"type": "integer"}}
    for schema in ({**integers, "minProperties": 2}, {"minProperties": 3, "required": ["a", "b"]}):
        with pytest.raises(FormatError, match=r"minProperties \d at #/items, which cannot be ensured"):
            prepare_schema({"type": "array", "items": schema})
    for schema in ({**integers, "minProperties": 1}, {**integers, "minProperties": 2, "required": ["a", "b"]}):
        assert prepare_schema(schema) == schema


def test_the_largest_opening_counts_what_a_value_requires() -> None:
    item = {
        "type": "object",
        "properties": {"street": {"type": "string", "minLength": 20}},
        "required": ["street"],
    }
    small, large = {"type": "string"}, {"type": "array", "items": item}
    assert largest_opening({"properties": {"a": small}}) < 10
    assert 30 < largest_opening({"properties": {"a": large}}) < 60
    node = {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}
    assert largest_opening(node) > 8


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("^[A-Z]{2}-[0-9]+$", 'A'),
        ("a|bcd", "a"),
        ("ä|ößé", "ä"),
        ("(foo)?[^a0]x{3}", " xxx"),
        (r"\d\w\s", "0a "),
    ],
)  # fmt: skip
def test_short_matches_end_values(pattern: str, text: str) -> None:
    texts = endings_of(
        ResponseFormat("json_schema", f'{{"pattern": {pattern!r}}}'.replace("'", '"').replace("\\\\", "\\\\"))
    )
    assert any(each.startswith(text) and each.endswith('"') for each in texts.texts)


@pytest.mark.parametrize("pattern", [r"[^a0 \-_.,!Z~]", r"[^\x00-\x7f]", "[^a-zA-Z0-9_. ,!~-]"])
def test_a_set_that_leaves_most_characters_out_has_a_short_match(pattern: str) -> None:
    (text,) = endings_of(ResponseFormat("regex", pattern)).texts
    assert re.fullmatch(pattern, text)


def test_the_ends_of_a_long_text_take_little_memory() -> None:
    tracemalloc.start()
    try:
        texts = endings_of(read_format({"type": "json_schema", "schema": {"enum": ["x" * 20_000]}})).texts
        assert len(texts) == 1000
        assert tracemalloc.get_traced_memory()[1] < 20_000_000  # all ends together have 200 million characters
    finally:
        tracemalloc.stop()


def test_multiples_too_fine_to_count_give_no_error() -> None:
    stated = '{"multipleOf": 1e-308, "exclusiveMinimum": 10000000, "maximum": 100000000}'
    assert "0," in endings_of(ResponseFormat("json_schema", stated)).numbers


@pytest.mark.parametrize("pattern", ["(?=a)b", "[", r"\p{L}+", "a{100000}"])
def test_patterns_that_python_does_not_read_give_none(pattern: str) -> None:
    assert endings_of(ResponseFormat("regex", pattern)).texts == []


def test_bounds_of_numbers_give_numbers() -> None:
    numbers = endings_of(ResponseFormat("json_schema", '{"exclusiveMinimum": 17, "multipleOf": 5}')).numbers
    assert "20," in numbers
    assert "0}" in numbers


def test_large_enums_that_exclude_each_other_are_told_by_little_work() -> None:
    one, other = [f"a{i}" for i in range(8000)], [*range(8000), True, [1, {"x": 2}]]
    alike = [1.0, "b"]
    assert "anyOf" in prepare_schema({"oneOf": [{"enum": one}, {"enum": other}]})
    assert "anyOf" in prepare_schema({"oneOf": [{"enum": [1]}, {"enum": [True, "1", [1]]}]})
    with pytest.raises(FormatError, match="both match"):
        prepare_schema({"oneOf": [{"enum": other}, {"enum": alike}]})


def test_many_branches_that_exclude_each_other_are_taken() -> None:
    found = prepare_schema({"oneOf": [tagged(f"v{i}") for i in range(200)]})
    assert len(found["anyOf"]) == 200


def test_references_through_many_levels_have_a_bound() -> None:
    levels = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(2000)}
    assert largest_opening({"$defs": {**levels, "d2000": {"type": "string"}}, "$ref": "#/$defs/d0"}) > 1000
