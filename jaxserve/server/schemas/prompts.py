"""The four forms of prompts: a string, a list of strings, a list of token ids, a list of lists of token ids."""

from typing import Any

from jaxserve.core.errors import RequestError

PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}},
        {"type": "array", "items": {"type": "integer"}},
        {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
    ]
}


def parse_prompts(value: Any, field: str, limit: int) -> list[str | tuple[int, ...]]:
    """Return the prompts, each a text or token ids.

    Raise RequestError if `value` has another form, or not between 1 and `limit` prompts.
    """
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise _wrong(field, value)
    if value and _is_integer(value[0]):
        return [_token_ids(value, field)]
    if not 1 <= len(value) <= limit:
        message = f"{field} has {len(value)} prompts: it must have from 1 to {limit} (--max-prompts)"
        raise RequestError(message, field=field, value=len(value), limit=limit)
    return [entry if isinstance(entry, str) else _token_ids(entry, field) for entry in value]


def _token_ids(value: Any, field: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(map(_is_integer, value)):
        raise _wrong(field, value)
    return tuple(value)


def _is_integer(value: Any) -> bool:
    return type(value) is int  # excludes bool


def _wrong(field: str, value: Any) -> RequestError:
    message = f"{field} must be a string, a list of strings, a list of token ids, or a list of lists of token ids"
    return RequestError(message, field=field, value=value)
