"""What is wrong with a grammar that llguidance refuses, and where in a JSON schema."""

import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from llguidance import LLMatcher

from jaxserve.core.structured import MAX_GRAMMAR
from jaxserve.structured.limits import LIMITS

DEFINITIONS = ("$defs", "definitions")
OPTIONS = ("x-guidance",)  # those of llguidance for a whole schema
# Keywords whose values are schemas by name. The definitions come first: the fault of a schema to which others refer is
# in the definition.
BY_NAME = (*DEFINITIONS, "properties", "patternProperties")
# Keywords whose value is a schema or a list of schemas.
DIRECTLY = ("items", "additionalProperties", "prefixItems", "anyOf", "oneOf", "allOf")
# The search for the place ends after so many schemas, and so many of their characters.
MAX_TRIES, MAX_CHARACTERS = 4096, 4 * MAX_GRAMMAR
UNSUPPORTED = "Unimplemented keys: "  # how llguidance begins to say it
# What llguidance says, as far as it means nothing to those who do not know it.
IN_PLAIN_WORDS = {
    "NoExtensionBias": "it refers to nothing but itself",
    "oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate oneOf with anyOf": (
        "the keyword 'oneOf' is not supported for schemas that the same value may follow: use anyOf"
    ),
}


def grammar_fault(kind: str, text: str, message: str) -> str:
    """Return what is wrong with a grammar, and of a JSON schema also where. `message`: what llguidance says."""
    if kind == "json":
        with contextlib.suppress(ValueError, RecursionError):  # of text that is no JSON
            message = schema_error(json.loads(text)) or message
    return plain(message)


def schema_error(schema: Any) -> str:
    """Return what is wrong with a JSON schema and the JSON pointer of the place, "" if it can be used."""
    if not isinstance(schema, Mapping):
        return "no value can follow it" if schema is False else "a JSON schema must be an object (#)"
    message = _refusal(json.dumps(schema))
    if not message:
        return ""
    place, inner = _smallest(schema, message)
    if not message.startswith(UNSUPPORTED):
        return f"{message} ({place})"
    keywords = json.loads(message.removeprefix(UNSUPPORTED))
    where = ", ".join(f"{place}/{keyword}" for keyword in keywords if keyword in inner) or place
    return f"the keyword {keywords[0]!r} is not supported ({where})"


def _smallest(root: Mapping[str, Any], message: str) -> tuple[str, Mapping[str, Any]]:
    """Return the place of the smallest part that alone is refused with the same message, and this part.

    The last part that was found, if the search takes too long.
    """
    definitions = {name: root[name] for name in DEFINITIONS if name in root}
    options = {name: root[name] for name in OPTIONS if name in root}
    place, found, tries, characters = "#", root, 0, 0
    parts = _parts(root, place)
    while (part := next(parts, None)) is not None:
        text = json.dumps({**options, **part[1]})
        if definitions and '"$ref"' in text:
            text = json.dumps({**definitions, **options, **part[1]})
        tries, characters = tries + 1, characters + len(text)
        if tries > MAX_TRIES or characters > MAX_CHARACTERS:
            break
        if _refusal(text) == message:
            place, found = part
            parts = _parts(found, place)
    return place, found


def _parts(schema: Mapping[str, Any], place: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the schemas of which a schema consists, with their places."""
    for keyword in BY_NAME:
        named = schema.get(keyword)
        for name, part in named.items() if isinstance(named, Mapping) else ():
            if isinstance(part, Mapping):
                yield f"{place}/{keyword}/{name.replace('~', '~0').replace('/', '~1')}", part
    for keyword in DIRECTLY:
        value = schema.get(keyword)
        if isinstance(value, Mapping):
            yield f"{place}/{keyword}", value
        for index, part in enumerate(value if isinstance(value, list) else ()):
            if isinstance(part, Mapping):
                yield f"{place}/{keyword}/{index}", part


def _refusal(schema: str) -> str:
    try:
        message = grammar_error(LLMatcher.grammar_from_json_schema(schema))
    except ValueError as error:
        message = plain(str(error))
    return message.partition("\n  while processing ")[0]  # the definition in which it was found


def grammar_error(grammar: str) -> str:
    """Return what is wrong with a grammar in llguidance's form, "" if it can be used."""
    return plain(LLMatcher.validate_grammar(grammar, limits=LIMITS))


def plain(message: str) -> str:
    """Return a message of llguidance without its note that it has no details, and in words that clients understand."""
    message = message.removesuffix("<non-verbose/>").strip()
    return IN_PLAIN_WORDS.get(message, message)
