"""JSON schemas in the form in which grammars can hold answers to them.

What has an equal form that a grammar can hold gets it, and what constrains nothing is left out. What no grammar can
hold, or is malformed, is left out as well, unless the schema is meant strictly: then the compiler of grammars refuses
it.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import quote

from jaxserve.parsing.keyword_values import (
    COUNTS,
    LOOK_AROUND,
    LOWER,
    MALFORMED,
    UPPER,
    VALUES,
    is_number,
    required_names,
)

# The formats that llguidance knows. All others are annotations, as JSON Schema says.
FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown")
ANNOTATIONS = ("default", "examples", "example", "title", "description", "$comment")  # their values may be large
BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
SINGLE = ("items", "additionalProperties", "additionalItems")
LISTS = ("prefixItems", "anyOf", "oneOf", "allOf")
# Keywords that no grammar holds, and what makes them demand nothing.
UNSUPPORTED: Mapping[str, Callable[[Any], bool]] = {
    "not": lambda value: value is False,
    "uniqueItems": lambda value: value is False,
    "contains": lambda value: False,
    "minContains": lambda value: False,
    "maxContains": lambda value: False,
    "unevaluatedItems": lambda value: value in (True, {}),
    "unevaluatedProperties": lambda value: value in (True, {}),
    "propertyNames": lambda value: value in (True, {}, {"type": "string"}),
    "dependentRequired": lambda value: value == {},
    "dependentSchemas": lambda value: value == {},
    "dependencies": lambda value: value == {},
    "if": lambda value: False,
    "then": lambda value: False,
    "else": lambda value: False,
    "$dynamicRef": lambda value: False,
    "$dynamicAnchor": lambda value: True,
    "$recursiveRef": lambda value: False,
    "$recursiveAnchor": lambda value: True,
}
MAX_NAMES = 256  # properties that stand for the enum of `propertyNames`
MAX_DEPTH = 60  # of schemas in schemas, since llguidance reads 128 levels of JSON; what lies deeper is left out
# The largest bounds of integers and of numbers to which llguidance counts.
MAX_INTEGER, MAX_NUMBER = 10**18 - 1, 10**17
VACUOUS = 1.797e308  # no number of 64 bits is beyond it


def holdable(schema: Any, *, strict: bool) -> tuple[Any, list[str]]:
    """Return a schema in a form that grammars can hold, and JSON pointers to what is left out of it.

    Nothing that constrains answers is left out of a `strict` schema.
    """
    reader = _Reader(schema, strict)
    return reader.schema(schema, "#"), reader.dropped


def pointer(place: str, key: str) -> str:
    """Return the JSON pointer to a member of the object at `place`, cut to a bounded length."""
    return f"{place}/{key[:64].replace('~', '~0').replace('/', '~1')}"


class _Reader:
    """A reader of one document. `dropped`: JSON pointers to what it has left out."""

    def __init__(self, root: Any, strict: bool):
        self._root, self._strict = root, strict
        self.dropped: list[str] = []

    def schema(self, given: Any, place: str, depth: int = 0) -> Any:
        if isinstance(given, bool):
            return given
        if not isinstance(given, Mapping) or (depth > MAX_DEPTH and not self._strict):
            return given if self._strict else self._drop(place)
        found: dict[str, Any] = {}
        for keyword, value in given.items():
            if keyword not in ANNOTATIONS:
                found |= self._keyword(keyword, value, pointer(place, keyword), depth + 1)
        if found.get("not") in ({}, True):
            return False
        _exclusive_bounds_of_draft_4(found)
        self._bounds(found, place)
        self._property_names(found)
        self._number_of_properties(found, place)
        self._implied(found)
        self._conditions(found)
        self._closed(found)
        for keyword in found.keys() & UNSUPPORTED.keys():
            if not self._strict:
                del found[keyword]
                self._drop(pointer(place, keyword))
        return found

    def _drop(self, place: str) -> dict[str, Any]:
        """Note what is left out, and return the schema that stands for it: that of any value."""
        self.dropped.append(place)
        return {}

    def _keyword(self, keyword: str, value: Any, place: str, depth: int) -> dict[str, Any]:
        """Return a keyword with its value, nothing if it is left out."""
        if keyword == "x-guidance" or UNSUPPORTED.get(keyword, lambda _: False)(value):
            return {}  # llguidance's options are not for clients
        if keyword in BY_NAME:
            kept = self._by_name(keyword, value, place, depth)
        elif keyword in LISTS or (keyword == "items" and isinstance(value, list)):
            kept = self._list(keyword, value, place, depth)
        elif keyword in SINGLE:
            kept = self.schema(value, place, depth)
        elif keyword == "$ref":
            kept = _as_uri(value) if self._leads_somewhere(value) else MALFORMED
        elif keyword == "format" and isinstance(value, str):
            return {keyword: value} if value in FORMATS else {}
        elif keyword == "$schema":
            return {keyword: value} if isinstance(value, str) and "json-schema.org/" in value else {}
        else:
            kept = VALUES[keyword](value) if keyword in VALUES else value
        if kept is not MALFORMED:
            return {keyword: kept}
        if self._strict:
            return {keyword: value}
        self._drop(place)
        return {}

    def _by_name(self, keyword: str, value: Any, place: str, depth: int) -> Any:
        if not isinstance(value, Mapping):
            return MALFORMED
        found = {}
        for name, part in value.items():
            here = pointer(place, name)
            if keyword == "patternProperties" and LOOK_AROUND.search(name) and not self._strict:
                self._drop(here)
            else:
                found[name] = self.schema(part, here, depth)
        return found

    def _list(self, keyword: str, value: Any, place: str, depth: int) -> Any:
        if not isinstance(value, list) or (keyword in ("anyOf", "oneOf") and not value):
            return MALFORMED
        return [self.schema(part, f"{place}/{index}", depth) for index, part in enumerate(value)]

    def _leads_somewhere(self, reference: Any) -> bool:
        """Return whether a reference may be followed. Anchors and ids are left to the compiler."""
        if not isinstance(reference, str):
            return False
        if not reference.startswith("#/"):
            return True
        found = self._root
        for key in reference[2:].split("/"):
            key = key.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and key.isdigit() and int(key) < len(found):
                found = found[int(key)]
            elif isinstance(found, Mapping) and key in found:
                found = found[key]
            else:
                return "%" in reference  # the compiler reads what is escaped as in a URL
        return isinstance(found, Mapping | bool)

    def _bounds(self, found: dict[str, Any], place: str) -> None:
        """Narrow or leave out bounds beyond the numbers to which llguidance counts, as typed languages write them."""
        kinds = found.get("type")
        kinds = [kinds] if isinstance(kinds, str) else kinds or ()
        whole = "integer" in kinds and "number" not in kinds
        limit = MAX_INTEGER if whole else MAX_NUMBER
        for sign, keywords in ((-1, LOWER), (1, UPPER)):
            for keyword in keywords:
                value = found.get(keyword)
                if value is None or not is_number(value) or sign * value <= limit:
                    continue
                if sign * value >= VACUOUS:
                    del found[keyword]
                elif whole and sign > 0 and value >= 2**63 - 1:
                    found[keyword] = 2**63 - 1
                elif whole or self._strict:
                    found[keyword] = sign * limit
                else:
                    del found[keyword]
                    self._drop(pointer(place, keyword))

    def _property_names(self, found: dict[str, Any]) -> None:
        """Write the names that an object's properties may have as its properties, or as a pattern of their names."""
        if "propertyNames" not in found or "patternProperties" in found:
            return
        given, values = found.get("properties", {}), found.get("additionalProperties", True)
        names = self._names(found["propertyNames"])
        if isinstance(names, list) and isinstance(given, Mapping):
            found["properties"] = {name: given.get(name, values) for name in names}
        elif isinstance(names, str) and not given:
            found["patternProperties"] = {names: values}
        else:
            return
        found["additionalProperties"] = False
        del found["propertyNames"]

    def _names(self, given: Any) -> list[str] | str | None:
        """Return the names that a schema of names allows, or a pattern for them, None if it has neither."""
        names = self._followed(given) if isinstance(given, Mapping) else {"enum": []} if given is False else {}
        rest = names.keys() - {"type", *ANNOTATIONS}
        if "type" in names and VALUES["type"](names["type"]) is not MALFORMED and "string" not in names["type"]:
            return []
        if rest in ({"enum"}, {"const"}):
            listed = [names["const"]] if "const" in names else names["enum"]
            known = isinstance(listed, list) and len(listed) <= MAX_NAMES
            return [name for name in listed if isinstance(name, str)] if known else None
        if rest == {"pattern"}:
            return names["pattern"] if VALUES["pattern"](names["pattern"]) is not MALFORMED else None
        if rest and rest <= {"minLength", "maxLength"}:
            least, most = (VALUES[key](names.get(key, 0)) for key in ("minLength", "maxLength"))
            if least is not MALFORMED and most is not MALFORMED:
                return rf"^[\s\S]{{{least},{most if 'maxLength' in names else ''}}}$"
        return None

    def _followed(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the definition to which a schema refers, or the schema."""
        match str(schema.get("$ref")).split("/"):
            case ["#", ("$defs" | "definitions") as key, name] if isinstance(self._root, Mapping):
                definitions = self._root.get(key)
                found = definitions.get(name) if isinstance(definitions, Mapping) else None
                return found if isinstance(found, Mapping) else schema
        return schema

    def _number_of_properties(self, found: dict[str, Any], place: str) -> None:
        """Leave out limits that other keywords imply, and those that cannot be held where properties are optional."""
        properties, required = found.get("properties"), found.get("required")
        names = properties.keys() if isinstance(properties, Mapping) else set()
        needed = set(required) if isinstance(required, list) and required_names(required) is required else set()
        closed = found.get("additionalProperties") is False and not found.get("patternProperties")
        if _at_most(found.get("minProperties"), len(needed)):
            del found["minProperties"]
        if closed and _at_most(len(names), found.get("maxProperties")):
            del found["maxProperties"]
        for keyword in found.keys() & {"minProperties", "maxProperties"}:
            if not names <= needed and not self._strict:
                del found[keyword]
                self._drop(pointer(place, keyword))

    def _conditions(self, found: dict[str, Any]) -> None:
        """Leave out what demands nothing without another keyword, such as `then` without `if`."""
        if "contains" not in found:
            found.pop("minContains", None)
            found.pop("maxContains", None)
        if "if" not in found:
            found.pop("then", None)
            found.pop("else", None)
        elif not found.keys() & {"then", "else"}:
            del found["if"]

    def _implied(self, found: dict[str, Any]) -> None:
        """Leave out demands on items that any array meets that the schema allows."""
        if _at_most(found.get("maxItems"), 1):
            found.pop("uniqueItems", None)
        if _at_most(found.get("minContains"), 0) and "maxContains" not in found:
            found.pop("contains", None)

    def _closed(self, found: dict[str, Any]) -> None:
        """Write `unevaluatedProperties` as `additionalProperties` where both mean the same."""
        combined = {"anyOf", "oneOf", "allOf", "$ref", "if", "dependentSchemas", "additionalProperties", "$dynamicRef"}
        if found.get("unevaluatedProperties") is False and not found.keys() & combined:
            del found["unevaluatedProperties"]
            found["additionalProperties"] = False


def _as_uri(reference: str) -> str:
    """Return a reference with the characters escaped that URIs do not have, as in `#/$defs/List[int]`."""
    return quote(reference, safe="/:?#@!$&'()*+,;=~%") if reference.startswith("#/") else reference


def _exclusive_bounds_of_draft_4(found: dict[str, Any]) -> None:
    """Write exclusive bounds as later drafts have them: as numbers, and not as true beside the bound."""
    for keyword, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(found.get(keyword), bool):
            exclusive = found.pop(keyword)
            if exclusive and bound in found:
                found[keyword] = found.pop(bound)


def _at_most(low: Any, high: Any) -> bool:
    return is_number(low) and is_number(high) and low <= high


def droppable(schema: Mapping[str, Any]) -> Iterator[str]:
    """Yield the keywords of a schema, those first whose loss changes least."""
    known = (*ORDER, *(key for key in schema if key not in ORDER))
    yield from (keyword for keyword in known if keyword in schema)


ORDER = (
    *("format", "pattern", "multipleOf", *COUNTS, *LOWER, *UPPER),
    *("required", "patternProperties", "additionalProperties", "additionalItems", "prefixItems", "items"),
    *("const", "enum", "allOf", "oneOf", "anyOf", "$ref", "properties", "type"),
)
