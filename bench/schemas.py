"""JSON schemas of many kinds from a seeded generator, with realistic names: as in JSONSchemaBench, but our own.

for case in make_schemas(200, seed=0):
    print(case.kind, case.schema)
"""

import random
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

Schema = dict[str, Any]


class Case(NamedTuple):
    """A schema, the kind that it is of, and what a user asks for."""

    kind: str
    schema: Schema
    prompt: str


_THINGS = (
    "customer", "order", "invoice", "sensor reading", "recipe", "flight", "library book", "support ticket",
    "weather report", "employee", "product review", "calendar event", "bank transfer", "city", "movie",
)  # fmt: skip
_TEXTS = ("name", "title", "description", "city", "comment", "author", "street", "summary", "company", "notes")
_NUMBERS = (
    "age",
    "price",
    "quantity",
    "rating",
    "latitude",
    "year",
    "duration_minutes",
    "total",
    "score",
    "weight_kg",
)
_FLAGS = ("is_active", "in_stock", "verified", "has_parking", "paid")
_ENUMS = {
    "status": ["open", "in_progress", "closed"],
    "priority": ["low", "medium", "high", "urgent"],
    "currency": ["EUR", "USD", "GBP", "JPY"],
    "size": ["S", "M", "L", "XL"],
    "language": ["de", "en", "fr", None],
    "level": [1, 2, 3, 5, 8],
}
_PATTERNS = {
    "postal_code": "^[0-9]{5}$",
    "sku": "^[A-Z]{3}-[0-9]{4}$",
    "phone": "^\\+[0-9]{2} [0-9]{6,10}$",
    "version": "^[0-9]+\\.[0-9]+\\.[0-9]+$",
    "color": "^#[0-9a-f]{6}$",
    "slug": "^[a-z]+(-[a-z]+)*$",
    "reference": "INV[0-9]+",
}
_FORMATS = {
    "created_at": "date-time",
    "birthday": "date",
    "opens_at": "time",
    "email": "email",
    "id": "uuid",
    "website": "uri",
    "ip_address": "ipv4",
    "timeout": "duration",
}


class _Maker:
    """Makes schemas with one stream of random numbers."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def text(self) -> tuple[str, Schema]:
        rng, schema = self.rng, Schema(type="string")
        if rng.random() < 0.4:
            schema |= {"minLength": rng.randint(1, 8), "maxLength": rng.randint(10, 60)}
        return rng.choice(_TEXTS), schema

    def number(self) -> tuple[str, Schema]:
        rng = self.rng
        schema: Schema = {"type": rng.choice(["integer", "number"])}
        kind = rng.randrange(4)
        if kind == 1:
            schema |= {"minimum": rng.choice([0, 1, -90, 18]), "maximum": rng.choice([99, 100, 250, 10_000])}
        elif kind == 2:
            schema |= {"exclusiveMinimum": 0}
        elif kind == 3 and schema["type"] == "integer":
            schema |= {"multipleOf": rng.choice([2, 5, 10])}
        return rng.choice(_NUMBERS), schema

    def choice(self) -> tuple[str, Schema]:
        name = self.rng.choice([*_ENUMS])
        return name, {"enum": _ENUMS[name]}

    def pattern(self) -> tuple[str, Schema]:
        name = self.rng.choice([*_PATTERNS])
        return name, {"type": "string", "pattern": _PATTERNS[name]}

    def format(self) -> tuple[str, Schema]:
        name = self.rng.choice([*_FORMATS])
        return name, {"type": "string", "format": _FORMATS[name]}

    def flag(self) -> tuple[str, Schema]:
        return self.rng.choice(_FLAGS), {"type": "boolean"}

    def field(self) -> tuple[str, Schema]:
        makers = [self.text, self.text, self.number, self.choice, self.pattern, self.format, self.flag]
        return self.rng.choice(makers)()

    def object(self, num_fields: int = 4, **more: Any) -> Schema:
        properties = dict(self.field() for _ in range(num_fields))
        required = [name for name in properties if self.rng.random() < 0.7] or [*properties][:1]
        return {"type": "object", "properties": properties, "required": required, **more}

    def flat(self) -> Schema:
        return self.object(self.rng.randint(3, 7), additionalProperties=False)

    def nested(self) -> Schema:
        schema = self.object(2, additionalProperties=False)
        schema["properties"] |= {"address": self.object(3), "contact": self.object(2, additionalProperties=False)}
        schema["properties"]["address"]["properties"]["position"] = self.object(2)
        schema["required"] += ["address"]
        return schema

    def array(self) -> Schema:
        least = self.rng.randint(0, 3)
        bounds = {"minItems": least, "maxItems": least + self.rng.randint(0, 5)}
        items = self.rng.choice([self.field()[1], self.object(3, additionalProperties=False)])
        schema = self.object(1, additionalProperties=False)
        schema["properties"]["items"] = {"type": "array", "items": items, **bounds}
        schema["required"] += ["items"]
        return schema

    def tuple(self) -> Schema:
        parts = [self.field()[1] for _ in range(self.rng.randint(2, 4))]
        whole = {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}
        return {"type": "object", "properties": {"entry": whole, **dict([self.text()])}, "required": ["entry"]}

    def union(self) -> Schema:
        branches = [self.field()[1], {"type": "null"}, self.object(2, additionalProperties=False)]
        schema = self.object(2, additionalProperties=False)
        schema["properties"]["details"] = {"anyOf": branches}
        schema["required"] += ["details"]
        return schema

    def tagged(self) -> Schema:
        branches = []
        for kind in ("card", "transfer", "cash"):
            branch = self.object(2, additionalProperties=False)
            branch["properties"] = {"type": {"const": kind}, **branch["properties"]}
            branch["required"] = ["type", *branch["required"]]
            branches.append(branch)
        return {
            "type": "object",
            "properties": {"amount": {"type": "number"}, "payment": {"oneOf": branches}},
            "required": ["payment"],
        }

    def definitions(self) -> Schema:
        return {
            "type": "object",
            "properties": {"sender": {"$ref": "#/$defs/person"}, "receiver": {"$ref": "#/$defs/person"}},
            "required": ["sender", "receiver"],
            "additionalProperties": False,
            "$defs": {"person": self.object(3, additionalProperties=False)},
        }

    def recursive(self) -> Schema:
        node = self.object(1, additionalProperties=False)
        node["properties"]["children"] = {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 3}
        node["required"] += ["children"]
        return {"$ref": "#/$defs/node", "$defs": {"node": node}}

    def linked(self) -> Schema:
        node = self.object(1)
        node["properties"]["next"] = {"anyOf": [{"$ref": "#"}, {"type": "null"}]}
        node["required"] += ["next"]
        return node

    def constant(self) -> Schema:
        schema = self.object(2, additionalProperties=False)
        constants = {"version": {"const": 2}, "kind": {"const": "report"}, "options": {"const": {"a": [1, None]}}}
        schema["properties"] |= constants
        schema["required"] = [*constants, *schema["required"]]
        return schema

    def map(self) -> Schema:
        values = self.rng.choice([self.field()[1], self.object(2, additionalProperties=False)])
        return {"type": "object", "additionalProperties": values, **self.rng.choice([{}, {"minProperties": 1}])}

    def patterned(self) -> Schema:
        patterns = {"^x-[a-z]+$": {"type": "string"}, "^n_[a-z]{2,8}$": {"type": "integer"}}
        return self.object(2, patternProperties=patterns, additionalProperties=False)

    def open(self) -> Schema:
        return self.object(2, additionalProperties=self.rng.choice([True, {"type": "number"}]))

    def joined(self) -> Schema:
        return {"allOf": [self.object(2), self.object(2)]}

    def listing(self) -> Schema:
        return {"type": "array", "items": self.object(3, additionalProperties=False), "minItems": 1, "maxItems": 4}

    def several_types(self) -> Schema:
        schema = self.object(2, additionalProperties=False)
        schema["properties"] |= {"value": {"type": ["string", "number", "null"]}, "extra": {}}
        schema["required"] += ["value", "extra"]
        return schema

    def scalar(self) -> Schema:
        return self.field()[1]


def make_schemas(num: int, seed: int = 0) -> list[Case]:
    """Schemas of all kinds in turn; the same ones for a seed."""
    maker, cases = _Maker(seed), list[Case]()
    kinds: Mapping[str, Callable[[], Schema]] = {
        "flat": maker.flat,
        "nested": maker.nested,
        "array": maker.array,
        "union": maker.union,
        "tagged": maker.tagged,
        "definitions": maker.definitions,
        "recursive": maker.recursive,
        "tuple": maker.tuple,
        "constant": maker.constant,
        "map": maker.map,
        "patterned": maker.patterned,
        "open": maker.open,
        "linked": maker.linked,
        "joined": maker.joined,
        "listing": maker.listing,
        "several types": maker.several_types,
        "scalar": maker.scalar,
    }
    names = [*kinds]
    for i in range(num):
        kind = names[i % len(names)]
        thing = maker.rng.choice(_THINGS)
        prompt = f"Make up a {thing} and describe it as JSON, with all that belongs to it."
        cases.append(Case(kind, kinds[kind](), prompt))
    return cases
