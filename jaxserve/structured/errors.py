"""What is wrong with a grammar that llguidance refuses, and where in a JSON schema."""

import json
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from jaxserve.core.structured import MAX_GRAMMAR
from jaxserve.parsing.holdable import droppable, pointer
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
ADVICE = ": leave it out, or set strict to false"
UNSUPPORTED = "Unimplemented keys: "  # how llguidance begins to say it
# What llguidance says, as far as it means nothing to those who do not know it.
IN_PLAIN_WORDS = {
    "oneOf not fully supported, falling back to anyOf. This may cause validation errors in some cases.": (
        "the keyword 'oneOf' where several of its schemas may be followed at once"
    ),
    "NoExtensionBias": "it refers to nothing but itself",
    "oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate oneOf with anyOf": (
        "the keyword 'oneOf' is not supported for schemas that the same value may follow: use anyOf"
    ),
}
NO_TOKEN = "NoExtensionBias"  # what it says where no token may come next
CANNOT_WRITE = "the model's vocabulary has no token with which its text can go on"


def schema_error(schema: Any) -> str:
    """Return what is wrong with a JSON schema and the JSON pointer of the place, "" if it can be used."""
    if not isinstance(schema, Mapping):
        return "no value can follow it (#)" if schema is False else "a JSON schema must be an object (#)"
    message = refusal_of(json.dumps(schema))
    if not message:
        return ""
    place, inner = _smallest(schema, message)
    if not message.startswith(UNSUPPORTED):
        keyword = _culprit(schema, inner, message)
        return f"{message} ({pointer(place, keyword) if keyword else place}){ADVICE}"
    keywords = json.loads(message.removeprefix(UNSUPPORTED))
    where = ", ".join(f"{place}/{keyword}" for keyword in keywords if keyword in inner) or place
    return f"the keyword {keywords[0]!r} is not supported ({where}){ADVICE}"


def _smallest(root: Mapping[str, Any], message: str) -> tuple[str, Mapping[str, Any]]:
    """Return the place of the smallest part that alone is refused with the same message, and this part.

    The last part that was found, if the search takes too long.
    """
    place, found, tries, characters = "#", root, 0, 0
    parts = parts_of(root, place)
    while (part := next(parts, None)) is not None:
        text = text_of_part(root, part[1])
        tries, characters = tries + 1, characters + len(text)
        if tries > MAX_TRIES or characters > MAX_CHARACTERS:
            break
        if refusal_of(text) == message:
            place, found = part
            parts = parts_of(found, place)
    return place, found


def _culprit(root: Mapping[str, Any], part: Mapping[str, Any], message: str) -> str:
    """Return the keyword without which a part is not refused with this message, "" if it takes more than one."""
    for keyword in droppable(part):
        if keyword not in (*OPTIONS, *DEFINITIONS):
            without = {key: part[key] for key in part if key != keyword}
            if refusal_of(text_of_part(root, without)) != message:
                return keyword
    return ""


def text_of_part(root: Mapping[str, Any], part: Mapping[str, Any]) -> str:
    """Return a part of a schema as a JSON text of its own, with the definitions to which it may refer."""
    options = {name: root[name] for name in OPTIONS if name in root}
    text = json.dumps({**options, **part})
    definitions = {name: root[name] for name in DEFINITIONS if name in root}
    return json.dumps({**definitions, **options, **part}) if definitions and '"$ref"' in text else text


def parts_of(schema: Mapping[str, Any], place: str) -> Iterator[tuple[str, Any]]:
    """Yield the schemas of which a schema consists, with their places."""
    for keyword in BY_NAME:
        named = schema.get(keyword)
        for name, part in named.items() if isinstance(named, Mapping) else ():
            if isinstance(part, Mapping):
                yield pointer(f"{place}/{keyword}", name), part
    for keyword in DIRECTLY:
        value = schema.get(keyword)
        if isinstance(value, Mapping):
            yield f"{place}/{keyword}", value
        for index, part in enumerate(value if isinstance(value, list) else ()):
            if isinstance(part, Mapping):
                yield f"{place}/{keyword}/{index}", part


def refusal_of(schema: str) -> str:
    """Return the first line of what is wrong with the text of a JSON schema, "" if it can be used."""
    try:
        message = grammar_error(LLMatcher.grammar_from_json_schema(schema))
    except ValueError as error:
        message = plain(str(error))
    return message.partition(" while processing ")[0]  # the definition in which it was found


def grammar_error(grammar: str) -> str:
    """Return what is wrong with a grammar in llguidance's form, "" if it can be used."""
    return plain(LLMatcher.validate_grammar(grammar, limits=LIMITS))


def vocabulary_fault(source: str, message: str) -> str:
    """Return what is wrong with a grammar in llguidance's form, of which `message` came with a model's vocabulary."""
    if not message.startswith(NO_TOKEN):
        return plain(message)
    matcher = LLMatcher(_all_bytes(), source, log_level=0, limits=LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return plain(message) if matcher.get_error().startswith(NO_TOKEN) else CANNOT_WRITE


@cache
def _all_bytes() -> LLTokenizer:
    return LLTokenizer("byte")


def plain(message: str) -> str:
    """Return a message of llguidance without its note that it has no details, and in words that clients understand."""
    message = " ".join(message.removesuffix("<non-verbose/>").split())
    return IN_PLAIN_WORDS.get(message, message)
