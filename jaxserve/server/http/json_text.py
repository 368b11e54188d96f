"""JSON as the server writes it."""

import json
from typing import Any

import pydantic_core

from jaxserve.core.unicode_text import valid_unicode


def to_json(value: Any) -> bytes:
    """Return a value as JSON in UTF-8, which cannot hold lone surrogates: they become U+FFFD.

    Raise ValueError if JSON has no such value.
    """
    try:
        return pydantic_core.to_json(value)
    except ValueError:
        return pydantic_core.to_json(_in_unicode(value))


def plain_json(value: Any) -> bytes:
    """Return a value as JSON by another writer, which knows a text for any value: for what tells of a failure."""
    return json.dumps(value, default=str).encode()


def _in_unicode(value: Any) -> Any:
    match value:
        case str():
            return valid_unicode(value)
        case dict():
            return {_in_unicode(name): _in_unicode(entry) for name, entry in value.items()}
        case list() | tuple():
            return [_in_unicode(entry) for entry in value]
    return value
