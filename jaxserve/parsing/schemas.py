"""What formats need to know about the JSON schemas of tools."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from jaxserve.core.errors import RequestError
from jaxserve.core.structured import JSON_WHITESPACE
from jaxserve.parsing.keyword_values import TYPES
from jaxserve.parsing.tools import Tool

MAX_REFERENCES = 16  # references to references, which may go round in circles
DEFINITIONS = ("$defs", "definitions")
# What cannot be said about the parameters of a tool as a whole where each is written by itself.
OF_OBJECTS = ("minProperties", "maxProperties", "propertyNames", "dependentRequired", "dependentSchemas")
COMBINATIONS = ("anyOf", "oneOf", "allOf", "not", "if")


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
    """Return the JSON schema to which a tool's arguments can be held."""
    return tool.schema


def types_of(tool: Tool) -> dict[str, frozenset[str]]:
    """Return the types of the values of a tool's parameters by name (`Parameter.types`)."""
    return {name: parameter.types for name, parameter in parameters_of(tool).items()}


def may_be_text(types: frozenset[str]) -> bool:
    """Return whether values of one of the types may be strings: none are named if a schema allows any."""
    return not types or "string" in types


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

    Unless it is meant `strict`ly, what the compiler cannot hold is left out of account (`structured/schemas.py`).
    """
    return {**schema, "x-guidance": {"whitespace_pattern": JSON_WHITESPACE, "lenient": not strict}}


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
    """Yield the types that a schema names, or those of the values that it lists; none for names that JSON lacks."""
    named = schema.get("type")
    kinds = [named] if isinstance(named, str) else _list(named) or list(map(type_name, listed_values(schema)))
    if all(isinstance(kind, str) and kind in TYPES for kind in kinds):
        yield from kinds


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
            schema = _mapping(schema).get(unquote(key).replace("~1", "/").replace("~0", "~"))
    return _mapping(schema)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
