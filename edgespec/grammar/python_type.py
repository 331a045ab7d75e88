"""A JSON schema as a caller gives it: as a dict, as JSON text, or as a type of Python, whose values it reads too.

Types are those of msgspec (dataclasses, TypedDict, Enum, Literal, unions, lists, numbers, texts, dates), and those
of pydantic, which are known by their own methods. Knows nothing of grammars.
"""

import json
import re
import reprlib
import sys
import typing
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import msgspec

from edgespec.errors import FormatError
from edgespec.grammar.schema import subschemas
from edgespec.system.typed_json import explained

# What msgspec reads of texts that a schema only describes.
_PATTERNS = {
    "base64": "^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$",
    "decimal": "^-?(0|[1-9][0-9]*)(\\.[0-9]+)?$",
    # In days, hours, minutes and seconds; a format has months and years too.
    "duration": "^P(#D|(#D)?T(#[HMS]|#H#[MS]|#M#S|#H#M#S))$".replace("#", "[0-9]{1,6}"),
}
_ANY_OF = "which only a JSON schema with anyOf can say"
# Why msgspec makes no schema of a type, by words of its message; where there are several, the first.
_KINDS = (
    ("containing a custom type", f"a union has a pydantic class beside another type than None, {_ANY_OF}"),
    ("dict-like|dataclass|Struct|one TypedDict", f"a union has two kinds of objects, {_ANY_OF}"),
    ("array-like", f"a union has two kinds of lists, {_ANY_OF}"),
    ("str-like", f"a union has two kinds of texts, as which enums, dates and bytes count, {_ANY_OF}"),
    ("int-like", f"a union has two kinds of whole numbers, as which enums count, {_ANY_OF}"),
    ("Enums must", "an enum has values that are neither all texts nor all whole numbers"),
    ("Literal may", "a Literal has other values than texts, whole numbers, True, False and None"),
    ("[Tt]ype unions?", f"a union has types that JSON writes alike, {_ANY_OF}"),
    ("FieldInfo", "it has a dataclass of pydantic: derive that from pydantic.BaseModel"),
    ("is not supported", "it has a name that stands for no type"),
)
_JSON_PARTS = (Mapping, bool, str)  # of a schema that is no type


def read_schema(stated: Any) -> Mapping[str, Any] | bool:
    """The JSON schema of what a caller gives. Objects of a type have its fields alone.

    Raises FormatError: It is no schema, or a type that JSON cannot express.
    """
    if isinstance(stated, str):
        try:
            stated = json.loads(stated)
        except (ValueError, RecursionError) as error:
            raise FormatError(
                f"the schema is a text that is not JSON ({error}); give a schema, or a type"
            ) from None
    if isinstance(stated, (Mapping, bool)):
        return stated
    try:
        schema = type_schema(stated)
        _require_formed(stated)
    except Exception as error:  # also names that are not defined
        raise FormatError(
            f"the schema is {reprlib.repr(stated)}, which cannot be written as a JSON schema ({error}); wanted a "
            "JSON schema, a dataclass, a TypedDict, a pydantic class, or a type of these, lists, texts and numbers"
        ) from None
    for _, part in subschemas(schema):
        if isinstance(part, dict) and "properties" in part:
            part.setdefault("additionalProperties", False)
    return schema


def type_schema(kind: Any) -> dict[str, Any]:
    """The JSON schema of a type, with all that it refers to under $defs. Raises TypeError: It has none."""
    shared: dict[str, Any] = {}

    def of_pydantic(inner: type) -> dict[str, Any]:
        if not hasattr(inner, "model_json_schema"):
            raise TypeError(f"JSON has no {inner.__name__}")
        prefix = f"{inner.__name__}{len(shared)}."  # of names that several classes may have
        schema: dict[str, Any] = inner.model_json_schema(ref_template=f"#/$defs/{prefix}{{model}}")
        shared.update({prefix + name: part for name, part in schema.pop("$defs", {}).items()})
        return schema

    try:
        if adapter := _adapter_of(kind):
            schema: dict[str, Any] = adapter.json_schema(ref_template="#/$defs/pydantic.{model}")
            shared.update({f"pydantic.{name}": part for name, part in schema.pop("$defs", {}).items()})
            return schema | ({"$defs": shared} if shared else {})
        found = msgspec.json.schema(kind, schema_hook=of_pydantic)
    except Exception as error:  # pydantic has errors of its own
        said = (str(error) or type(error).__name__).splitlines()[0]
        raise TypeError(next((plain for words, plain in _KINDS if re.search(words, said)), said)) from None
    found = {**found, "$defs": found.get("$defs", {}) | shared} if shared else found
    for _, part in subschemas(found):
        if isinstance(part, dict):
            part.pop("uniqueItems", None)  # of a set, which takes what comes twice once
            if pattern := _PATTERNS.get(str(part.get("contentEncoding") or part.get("format"))):
                part["pattern"] = pattern
    return found


def _adapter_of(kind: Any) -> Any:
    """What pydantic reads a type by of which its Field says more, as in Annotated[int, Field(ge=1)]; or None."""
    waiting = [kind]
    for each in waiting:
        if any(type(part).__module__ == "pydantic.fields" for part in getattr(each, "__metadata__", ())):
            with suppress(RuntimeError):  # it does not read all types that msgspec does
                return sys.modules["pydantic"].TypeAdapter(kind)
        waiting += typing.get_args(each)
    return None


def typed_value(kind: Any, value: Any) -> Any:
    """A value of JSON in a type that only pydantic knows. Raises TypeError or ValueError: It does not fit it."""
    if not hasattr(kind, "model_validate_json"):
        raise TypeError(f"JSON has no {kind.__name__}")
    return kind.model_validate_json(msgspec.json.encode(value))


def _require_formed(stated: Any) -> None:
    """Raises ValueError: A type has times without a zone or keys of a kind, as which a schema takes any text."""
    from msgspec import inspect  # 10 ms

    waiting, seen = [inspect.type_info(stated)], set[int]()
    while waiting:
        info = waiting.pop()
        if isinstance(info, (tuple, list)):
            waiting.extend(info)
        elif isinstance(info, (inspect.Type, inspect.Field)) and id(info) not in seen:
            seen.add(id(info))
            if getattr(info, "tz", True) is not True:
                raise ValueError("a time in it has no zone: write Annotated[datetime, msgspec.Meta(tz=True)]")
            key = getattr(info, "key_type", None)
            if key is not None and not isinstance(key, (inspect.StrType, inspect.AnyType)):
                raise ValueError("a dict in it has keys that are no texts: write dict[str, …], or a dataclass")
            waiting.extend(getattr(info, name) for name in info.__struct_fields__)


def read_value(stated: Any, text: str) -> Any:
    """The value of JSON text, in the type that stated is.

    Raises:
        ValueError: It is none.
        FormatError: No JSON can be of this type.
    """
    try:
        return _read_value(stated, text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _read_value(stated: Any, text: str) -> Any:
    if stated is None or isinstance(stated, _JSON_PARTS):
        return json.loads(text)
    if hasattr(stated, "model_validate_json"):
        return stated.model_validate_json(text)
    if adapter := _adapter_of(stated):
        return adapter.validate_json(text)
    try:
        return msgspec.json.decode(text, type=stated, dec_hook=typed_value)
    except msgspec.ValidationError as error:
        raise ValueError(explained(str(error), json.loads(text))) from None
    except TypeError:
        read_schema(stated)  # says why in plain words
        raise


def convert_value(stated: Any, value: Any) -> Any:
    """A value of JSON, or its text, in the type that stated is; raises ValueError: It is none."""
    if adapter := _adapter_of(stated):
        return adapter.validate_json(msgspec.json.encode(value))
    try:
        return msgspec.convert(value, stated, strict=False, dec_hook=typed_value)
    except msgspec.ValidationError as error:
        raise ValueError(explained(str(error), value)) from None
