"""What formats need to know about the JSON schemas of tools."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jaxserve.core.errors import RequestError
from jaxserve.core.structured import JSON_WHITESPACE
from jaxserve.parsing.tools import Tool

MAX_REFERENCES = 16  # references to references, which may go round in circles
DEFINITIONS = ("$defs", "definitions")
# What cannot be said about the parameters of a tool as a whole where each is written by itself.
OF_OBJECTS = ("minProperties", "maxProperties", "propertyNames", "dependentRequired", "dependentSchemas")
COMBINATIONS = ("anyOf", "oneOf", "allOf", "not", "if")
VALUES = ("const", "enum", "default", "examples")  # keywords with values instead of schemas
LOOK_AROUND = re.compile(r"\(\?<?[=!]|\\[bB1-9]")
NO_PARAMETERS = {"properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class Parameter:
    """A parameter of a tool. `schema` is that of its values, with the definitions that it may refer to."""

    name: str
    schema: Any
    required: bool

    @property
    def types(self) -> frozenset[str]:
        """The names of the JSON types that values may have; none if they may have any."""
        kinds = [frozenset(_types(schema)) for schema in self.alternatives]
        return frozenset[str]().union(*kinds) if all(kinds) else frozenset()

    @property
    def alternatives(self) -> list[Mapping[str, Any]]:
        """The schemas of which values must follow one, without references."""
        return list(_alternatives(self.schema))


def object_schema(tool: Tool) -> dict[str, Any]:
    """Return the JSON schema of a tool's arguments."""
    return {**(NO_PARAMETERS if tool.parameters is None else tool.parameters), "type": "object"}


def parameters_of(tool: Tool) -> dict[str, Parameter]:
    """Return the parameters of a tool by name."""
    root = object_schema(tool)
    schema = _resolved(root, root)
    required = [name for name in _list(schema.get("required")) if isinstance(name, str)]
    properties = {**_mapping(schema.get("properties"))}
    properties |= {name: True for name in required if name not in properties}
    definitions = {key: root[key] for key in DEFINITIONS if key in root}
    return {
        name: Parameter(
            name, {**_mapping(values), **(definitions if '"$ref"' in json.dumps(values) else {})}, name in required
        )
        for name, values in properties.items()
    }


def json_rule(schema: Any, strict: bool) -> str:
    """Return an expression of Lark for JSON that follows a schema (`guided`)."""
    return f"%json {json.dumps(guided(_mapping(schema), strict))}"


def guided(schema: Mapping[str, Any], strict: bool) -> dict[str, Any]:
    """Return a schema for llguidance.

    Keywords and regular expressions that it does not support are left out of account, unless the schema is meant
    strictly.
    """
    options = {"whitespace_pattern": JSON_WHITESPACE, "lenient": not strict}
    return {**(schema if strict else _without_look_around(schema)), "x-guidance": options}


def _without_look_around(schema: Any) -> Any:
    """Return a schema without the patterns that look around, also for bounds of words, or back: no grammar can."""
    if isinstance(schema, list):
        return [_without_look_around(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        key: value if key in VALUES else _without_look_around(value)
        for key, value in schema.items()
        if not (key == "pattern" and isinstance(value, str) and LOOK_AROUND.search(value))
    }


def listed_values(schema: Mapping[str, Any]) -> list[Any]:
    """Return the values that a schema lists, none if it lists none."""
    return [schema["const"]] if "const" in schema else _list(schema.get("enum"))


def _alternatives(schema: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the schemas of which values must follow one. References may lead back, so each is looked at once."""
    waiting, seen = [schema], set()
    while waiting:
        found = _resolved(waiting.pop(0), schema)
        if id(found) in seen:
            continue
        seen.add(id(found))
        merged = dict(found)
        for part in _list(merged.pop("allOf", None)):
            merged = {**_resolved(part, schema), **merged}
        choices = [*_list(merged.get("anyOf")), *_list(merged.get("oneOf"))]
        if choices and "type" not in merged:
            waiting += choices
        else:
            yield merged


def refuse(schema: Mapping[str, Any], keywords: tuple[str, ...], tool: Tool) -> None:
    """Raise `RequestError` if a strict tool's schema has one of the keywords, which cannot be enforced."""
    found = next((key for key in keywords if key in schema), None)
    if found and tool.strict:
        raise RequestError(
            f"{tool.place}: calls of {tool.name!r} cannot be held to the keyword {found!r} in the format in which the "
            "model writes them: leave it out, or set strict to false",
            field=tool.place,
            value=found,
        )


def _types(schema: Mapping[str, Any]) -> Iterator[str]:
    """Yield the types that a schema names, or those of the values that it lists."""
    named = schema.get("type")
    kinds = [named] if isinstance(named, str) else _list(named) or map(type_name, listed_values(schema))
    yield from (kind for kind in kinds if isinstance(kind, str))


def type_name(value: Any) -> str:
    """Return the name of a JSON value's type, "integer" for whole numbers."""
    if isinstance(value, float):
        return "integer" if value.is_integer() else "number"
    names = {bool: "boolean", int: "integer", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "null")


def _resolved(schema: Any, root: Any) -> Mapping[str, Any]:
    """Return a schema, or the one in the same document that it refers to."""
    for _ in range(MAX_REFERENCES):
        reference = _mapping(schema).get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#"):
            break
        schema = root
        for key in filter(None, reference[1:].split("/")):
            schema = _mapping(schema).get(key.replace("~1", "/").replace("~0", "~"))
    return _mapping(schema)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
