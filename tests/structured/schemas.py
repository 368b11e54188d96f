"""JSON schemas of all kinds, a few hundred, by the keyword that they are about."""

from collections.abc import Iterator
from itertools import product
from typing import Any

Schema = dict[str, Any] | bool

TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")
FORMATS = ("date", "time", "date-time", "email", "ipv4", "ipv6", "uuid", "hostname", "duration", "uri")
PATTERNS = (
    "^[a-c]+$",
    "^\\d{3}-\\d{4}$",
    "x",
    "^(red|green|blue)$",
    "^[^a]{2,5}$",
    "^\\w+@\\w+\\.com$",
    "^(a|b)*c$",
    "^é{1,3}$",
    "^[A-Z][a-z]{0,5}( [A-Z][a-z]{0,5})?$",
    "^#[0-9a-f]{6}$",
)
VALUES: tuple[Any, ...] = (
    "a",
    "",
    'quote " and \\ backslash',
    "line\nbreak\ttab",
    "é😀",
    0,
    -1,
    1.5,
    1e10,
    True,
    False,
    None,
    [],
    [1, "a", None],
    {},
    {"a": {"b": [1, 2]}},
)
SMALL = {"type": "integer", "minimum": 0, "maximum": 9}


def schemas() -> Iterator[tuple[str, Schema]]:
    """Yield (keyword, schema)."""
    for function in (_types, _values, _numbers, _strings, _arrays, _objects, _combinations, _references, _documents):
        yield from function()


def _object(properties: dict[str, Any], required: list[str] | None = None, **more: Any) -> Schema:
    wanted = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": wanted, "additionalProperties": False} | more


def _types() -> Iterator[tuple[str, Schema]]:
    for name in TYPES:
        yield "type", {"type": name}
        yield "type", _object({"value": {"type": name}})
    for first, second in product(TYPES, TYPES):
        if first < second:
            yield "type", {"type": [first, second]}
    yield "true", True
    yield "true", {}
    yield "true", _object({"anything": True})


def _values() -> Iterator[tuple[str, Schema]]:
    for value in VALUES:
        yield "const", {"const": value}
        yield "const", _object({"value": {"const": value}})
        yield "enum", {"enum": [value, "other"]}
        yield "enum", {"type": "array", "items": {"enum": [value, "other"]}, "maxItems": 2}
    yield "enum", {"enum": list(VALUES)}
    yield "enum", {"type": "string", "enum": ["a", "b", "ab", "abc"]}
    yield "enum", {"type": "integer", "enum": [1, 10, 100]}


def _numbers() -> Iterator[tuple[str, Schema]]:
    for kind in ("integer", "number"):
        for low, high in ((0, 9), (-5, 5), (10, 1000), (-1000, -10), (99, 101), (0, 0)):
            yield "minimum", {"type": kind, "minimum": low, "maximum": high}
        yield "minimum", {"type": kind, "minimum": 100}
        yield "maximum", {"type": kind, "maximum": -3}
        yield "exclusiveMinimum", {"type": kind, "exclusiveMinimum": 0, "exclusiveMaximum": 10}
        yield "multipleOf", {"type": kind, "multipleOf": 5, "minimum": 0, "maximum": 100}
    yield "minimum", {"type": "number", "minimum": 0.5, "maximum": 0.75}
    yield "minimum", {"type": "number", "minimum": -0.1, "maximum": 0.1}


def _strings() -> Iterator[tuple[str, Schema]]:
    for least, most in ((0, 0), (0, 3), (1, 1), (5, 8), (20, 30)):
        yield "maxLength", {"type": "string", "minLength": least, "maxLength": most}
        yield "maxLength", _object({"text": {"type": "string", "minLength": least, "maxLength": most}})
    for pattern in PATTERNS:
        yield "pattern", {"type": "string", "pattern": pattern}
        yield "pattern", _object({"text": {"type": "string", "pattern": pattern}})
        yield "pattern", {"type": "array", "items": {"type": "string", "pattern": pattern}, "maxItems": 2}
    for name in FORMATS:
        yield "format", {"type": "string", "format": name}
        yield "format", _object({"value": {"type": "string", "format": name}})


def _arrays() -> Iterator[tuple[str, Schema]]:
    for least, most in ((0, 0), (0, 2), (1, 1), (3, 4)):
        yield "maxItems", {"type": "array", "items": SMALL, "minItems": least, "maxItems": most}
    for name in TYPES:
        yield "items", {"type": "array", "items": {"type": name}, "maxItems": 2}
    yield "prefixItems", {"type": "array", "prefixItems": [SMALL, {"const": "a"}], "items": False, "minItems": 2}
    yield "prefixItems", {"type": "array", "prefixItems": [SMALL], "items": {"type": "boolean"}, "maxItems": 3}
    yield "items", {"type": "array", "items": False}
    yield "items", {"type": "array", "items": {"type": "array", "items": SMALL, "maxItems": 2}, "maxItems": 2}
    yield "items", {"type": "array", "items": _object({"a": SMALL}), "minItems": 1, "maxItems": 2}
    yield "uniqueItems", {"type": "array", "items": SMALL, "uniqueItems": True}
    yield "contains", {"type": "array", "contains": SMALL}


def _objects() -> Iterator[tuple[str, Schema]]:
    for count in range(1, 6):
        names = [f"key {number}" for number in range(count)]
        for wanted in {0, 1, count}:
            yield "required", _object(dict.fromkeys(names, SMALL), names[:wanted])
    for name in ("", "é", 'a"b', "a\\b", "a.b", "$ref", "type", "😀"):
        yield "properties", _object({name: SMALL})
    yield "additionalProperties", {"type": "object", "additionalProperties": SMALL, "maxProperties": 2}
    yield (
        "additionalProperties",
        {"type": "object", "properties": {"a": SMALL}, "additionalProperties": {"type": "null"}},
    )
    yield "additionalProperties", {"type": "object", "additionalProperties": False}
    yield (
        "patternProperties",
        {
            "type": "object",
            "patternProperties": {"^[ab]$": SMALL},
            "additionalProperties": False,
        },
    )
    yield "minProperties", {"type": "object", "additionalProperties": SMALL, "minProperties": 1}
    yield "propertyNames", {"type": "object", "propertyNames": {"pattern": "^a"}}
    yield "dependentRequired", _object({"a": SMALL, "b": SMALL}, [], dependentRequired={"a": ["b"]})
    yield "if", {"if": {"type": "string"}, "then": {"maxLength": 3}}


def _combinations() -> Iterator[tuple[str, Schema]]:
    some: tuple[Schema, ...] = (SMALL, {"type": "boolean"}, {"const": "a"}, _object({"x": SMALL}), {"type": "null"})
    for first, second in product(some, some):
        if first is not second:
            yield "anyOf", {"anyOf": [first, second]}
    for first in some:
        yield "allOf", {"allOf": [first]}
        yield "oneOf", {"oneOf": [first, {"const": "other"}]}
        yield "anyOf", _object({"value": {"anyOf": [first, {"type": "null"}]}})
    yield "allOf", {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 7}]}
    yield "allOf", {"allOf": [_object({"a": SMALL}, additionalProperties=True), {"required": ["a"]}]}
    yield "not", {"not": {"type": "string"}}


def _references() -> Iterator[tuple[str, Schema]]:
    yield "$ref", {"$defs": {"small": SMALL}, "$ref": "#/$defs/small"}
    yield (
        "$ref",
        {"definitions": {"small": SMALL}, "type": "array", "items": {"$ref": "#/definitions/small"}, "maxItems": 2},
    )
    tree = _object({"value": SMALL, "left": {"$ref": "#/$defs/tree"}, "right": {"$ref": "#/$defs/tree"}}, ["value"])
    yield "$ref", {"$defs": {"tree": tree}, "$ref": "#/$defs/tree"}
    linked = _object({"next": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}})
    yield "$ref", linked
    yield "$ref", {"$defs": {"a/b": SMALL, "c~d": {"$ref": "#/$defs/a~1b"}}, "$ref": "#/$defs/c~0d"}


def _documents() -> Iterator[tuple[str, Schema]]:
    """Yield schemas as applications have them."""
    address = _object({"street": {"type": "string", "maxLength": 20}, "zip": {"type": "string", "pattern": "^\\d{5}$"}})
    person = _object(
        {
            "name": {"type": "string", "minLength": 1, "maxLength": 16},
            "email": {"type": "string", "format": "email"},
            "age": {"type": ["integer", "null"], "minimum": 0},
            "address": address,
            "roles": {"type": "array", "items": {"enum": ["admin", "user"]}, "maxItems": 2},
        }
    )
    yield "document", person
    for name in person["properties"]:  # type: ignore[index]
        yield "document", _object({name: person["properties"][name], "ok": {"type": "boolean"}})  # type: ignore[index]
    call = {
        "anyOf": [
            _object({"name": {"const": name}, "arguments": arguments})
            for name, arguments in (("search", _object({"query": {"type": "string"}})), ("stop", _object({})))
        ]
    }
    yield "document", call
    yield "document", {"type": "array", "items": call, "minItems": 1, "maxItems": 2}
    for depth in range(1, 12):
        schema: Schema = SMALL
        for level in range(depth):
            schema = _object({f"level {level}": schema})
        yield "document", schema
    for width in (10, 30):
        yield "document", _object({f"field_{number}": {"type": "boolean"} for number in range(width)})
    yield (
        "document",
        {
            "title": "a chart",
            "description": "with annotations, which demand nothing",
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "examples": [1],
            "default": 1,
            **SMALL,
        },
    )
