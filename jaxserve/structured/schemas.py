"""JSON schemas for llguidance: in the form that it can hold and, unless they are meant strictly, without the rest."""

import contextlib
import json
from collections.abc import Mapping
from typing import Any

from jaxserve.core.structured import JSON_WHITESPACE, MAX_GRAMMAR
from jaxserve.parsing.holdable import droppable, holdable, pointer
from jaxserve.structured.errors import DEFINITIONS, parts_of, plain, refusal_of, schema_error, text_of_part

OPTIONS = "x-guidance"  # llguidance's options for a whole schema
# The search for faults ends after so many schemas, and so many of their characters. Then the whole schema is left out.
MAX_TRIES, MAX_CHARACTERS = 4096, 4 * MAX_GRAMMAR
DANGLING = "Pointer '"  # how llguidance begins to say that a reference leads nowhere; in a part, it may lead out of it


def guidance_schema(schema: Any, *, strict: bool) -> tuple[Any, list[str]]:
    """Return a schema for llguidance, and JSON pointers to the keywords that are left out of it.

    `strict`: nothing that constrains answers is left out, so llguidance may refuse the schema. Otherwise it can be
    used, and answers are at least JSON, or an object where the schema says so.
    """
    held, dropped = holdable(schema, strict=strict)
    if held is False and not strict:
        held, dropped = {}, [*dropped, "#"]
    held = {} if held is True else held
    if not isinstance(held, dict):
        return held, dropped
    options = {"whitespace_pattern": JSON_WHITESPACE}
    if strict:
        return {**held, OPTIONS: options}, dropped
    held[OPTIONS] = {**options, "lenient": True, "coerce_one_of": True}
    mending = _Mending(held)
    try:
        mending.mend(held, "#")
    except _TooLong:
        whole = {"type": "object"} if held.get("type") == "object" else {}
        return {**whole, OPTIONS: held[OPTIONS]}, ["#"]
    return held, dropped + mending.dropped


def grammar_fault(kind: str, text: str, message: str) -> str:
    """Return what is wrong with a grammar, and of a JSON schema also where. `message`: what llguidance says."""
    if kind == "json":
        with contextlib.suppress(ValueError, RecursionError):  # of text that is no JSON
            held, _ = guidance_schema(json.loads(text), strict=True)
            message = schema_error(held) or message
    return plain(message)


class _TooLong(Exception):
    """Raised when the search for faults takes too long."""


class _Mending:
    """The search for the keywords without which a schema can be used, from its innermost parts outwards."""

    def __init__(self, root: Mapping[str, Any]):
        self._root, self._tries, self._characters = root, 0, 0
        self.dropped: list[str] = []

    def mend(self, part: dict[str, Any], place: str) -> None:
        """Delete keywords of a part of the schema until it can be used. Without any, it can."""
        while message := self._refusal(part):
            faulty = [(inner, at) for at, inner in parts_of(part, place) if self._is_faulty(inner)]
            for inner, at in faulty:
                self.mend(inner, at)
            if not faulty:
                keyword = self._culprit(part, message)
                del part[keyword]
                self.dropped.append(pointer(place, keyword))

    def _is_faulty(self, part: Mapping[str, Any]) -> bool:
        message = self._refusal(part)
        return bool(message) and not message.startswith(DANGLING)

    def _culprit(self, part: Mapping[str, Any], message: str) -> str:
        """Return the keyword of a part whose loss ends an error and changes least."""
        keywords = [keyword for keyword in droppable(part) if keyword not in (OPTIONS, *DEFINITIONS)]
        found = {each: self._refusal({key: part[key] for key in part if key != each}) for each in keywords}
        mended = [keyword for keyword in keywords if not found[keyword]]
        changed = [keyword for keyword in keywords if found[keyword] != message]
        return (mended or changed or keywords or [next(key for key in part if key != OPTIONS)])[0]

    def _refusal(self, part: Mapping[str, Any]) -> str:
        text = text_of_part(self._root, part)
        self._tries, self._characters = self._tries + 1, self._characters + len(text)
        if self._tries > MAX_TRIES or self._characters > MAX_CHARACTERS:
            raise _TooLong
        return refusal_of(text)
