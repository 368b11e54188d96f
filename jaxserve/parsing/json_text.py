"""Reading of JSON inside an answer while it arrives."""

import json
import re
from dataclasses import dataclass
from typing import Any

from jaxserve.parsing.source import Parsing, Source

ARGUMENT_KEYS = ("arguments", "parameters")  # models use either
PLAIN_KEYS = ("name", *ARGUMENT_KEYS)
CALL_KEYS = ("id", "type", *PLAIN_KEYS)
STRING_RUN = re.compile(r'[^"\\\x00-\x1f]+')  # a string with a line break is not valid, which shows at once
FOREIGN_SPACE = re.compile(r"[^ \t\n\r]")  # white space that JSON does not know, such as a no-break space
SCALAR_RUN = re.compile(r"[\w.+-]+")
SCALAR = re.compile(r"true|false|null|-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")


@dataclass(frozen=True)
class Head:
    """The beginning of a call, up to its arguments. `arguments` are those that came before; None: they come next."""

    name: str
    arguments: str | None = None


def call_head(
    source: Source, known: frozenset[str] | None = None, *, needs_arguments: bool = False, plain: bool = False
) -> Parsing[Head | None]:
    """Take a call such as {"name": "f", "arguments": {...}} up to its arguments, None if it is not valid.

    `known`: only objects with the name of one of these tools, with arguments and without fields that no call has are
    calls. None: any with a name are, but without arguments only if they have no such fields, which may be misspelled,
    and if arguments are not needed. `plain`: the name and the arguments are all that the call has.
    """
    name = given = None
    needs_arguments = needs_arguments or known is not None
    follows = yield from source.literal("{")
    while follows:
        key = yield from member_key(source)
        if key is None or (known is not None and key not in (PLAIN_KEYS if plain else CALL_KEYS)):
            return None
        needs_arguments = needs_arguments or key not in CALL_KEYS
        first = yield from source.peek()
        if key in ARGUMENT_KEYS and first == "{" and name is not None:
            return Head(name)
        text = (yield from value(source)) if not plain or first == '"' else None
        if text is None:
            return None
        if key == "name":
            name = _loads(text) if first == '"' else None
            if not name or (known is not None and name not in known):
                return None
        elif key in ARGUMENT_KEYS and (given := _object_in(text)) is None:
            return None
        yield from source.space()
        follows = yield from source.literal(",")
    ended = yield from source.comes("}")
    if not ended or name is None or (needs_arguments and given is None):
        return None
    return Head(name, given or "{}")


def value(source: Source) -> Parsing[str | None]:
    """Take a JSON value and return its text, None as soon as it is not valid."""
    taken: list[str] = []
    brackets: list[str] = []
    wanted = "value"  # what comes next: value, key, colon, more (a comma or the end), or "first" with value or key
    while True:
        taken.append((yield from gap(source)))
        token = yield from _token(source)
        taken.append(token)
        if token in ("{", "[") and wanted in ("value", "first value"):
            brackets.append("}" if token == "{" else "]")
            wanted = "first key" if token == "{" else "first value"
        elif token in ("}", "]") and brackets[-1:] == [token] and wanted in ("more", "first key", "first value"):
            brackets.pop()
            wanted = "more"
        elif token == "," and wanted == "more" and brackets:
            wanted = "key" if brackets[-1] == "}" else "value"
        elif token == ":" and wanted == "colon":
            wanted = "value"
        elif token[:1] == '"' and wanted in ("key", "first key"):
            wanted = "colon"
        elif token and token not in "{}[],:" and wanted in ("value", "first value"):
            wanted = "more"
        else:
            return None
        if wanted == "more" and not brackets:
            return "".join(taken)


def gap(source: Source) -> Parsing[str]:
    """Take white space and return it in characters that may stand between the parts of JSON."""
    return FOREIGN_SPACE.sub(" ", (yield from source.space()))


def _token(source: Source) -> Parsing[str]:
    """Take a string, a scalar or a punctuation mark, "" if none is valid."""
    first = yield from source.peek()
    if first == '"':
        return (yield from _string(source))
    if first and first in "{}[],:":
        return source.take(1)
    scalar = yield from source.run(SCALAR_RUN)
    return scalar if SCALAR.fullmatch(scalar) else ""


def _string(source: Source) -> Parsing[str]:
    """Take a string, "" if it is not valid."""
    taken = [source.take(1)]
    while True:
        taken.append((yield from source.run(STRING_RUN)))
        if (yield from source.peek()) != "\\":
            taken.append(source.take(1))
            text = "".join(taken)
            return text if isinstance(_loads(text), str) else ""
        yield from source.peek(2)
        taken.append(source.take(2))


def member_key(source: Source) -> Parsing[str | None]:
    """Take the name of a field, the colon and white space, and return the name, None if they do not come next."""
    yield from source.space()
    if (yield from source.peek()) != '"':
        return None
    key = _loads((yield from _string(source)))
    yield from source.space()
    colon = yield from source.literal(":")
    yield from source.space()
    return key if colon and isinstance(key, str) else None


def _object_in(text: str) -> str | None:
    """Return the JSON object that a value is or, as some models write it, that a string holds; None for another."""
    loaded = _loads(text)
    if isinstance(loaded, str):
        text, loaded = loaded, _loads(loaded)
    if text == "null":
        return "{}"
    return text if isinstance(loaded, dict) else None


def _loads(text: str) -> Any:
    """Return what JSON says, None if it is not valid."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
