"""Reading of JSON inside an answer while it arrives."""

import json
import re
from collections.abc import Generator
from dataclasses import dataclass

from jaxserve.parsing.events import ArgumentsDelta, CallBegun, Event
from jaxserve.parsing.source import Parsing, Source

ARGUMENT_KEYS = ("arguments", "parameters")  # models use either
STRING_RUN = re.compile(r'[^"\\]+')
SCALAR_RUN = re.compile(r'[^\s,:"{}\[\]]+')


@dataclass
class Head:
    """What a call's JSON object says before its arguments begin, or the whole call if they came first or are none."""

    name: str
    arguments: str | None = None  # None: they come next


def call_head(source: Source, end: str = "", known: frozenset[str] | None = None) -> Parsing[Head | None]:
    """Take a call such as {"name": "f", "arguments": {...}} up to its arguments. Without one, take and return nothing.

    `end` never occurs outside of strings in a call. `known`: only calls of these tools are calls; None: of any tool.
    """
    source.mark()
    head = yield from _head(source, end)
    if head is None or (known is not None and head.name not in known):
        source.go_back()
        return None
    source.unmark()
    return head


def call_body(source: Source, head: Head, end: str = "") -> Parsing[None]:
    """Yield the events of the call that has begun with `head`, and take it to its end."""
    yield CallBegun(head.name)
    if head.arguments is None:
        yield from arguments(source, end)
    else:
        yield ArgumentsDelta(head.arguments)
    yield from _rest(source, end)


def arguments(source: Source, end: str = "") -> Generator[Event | None, None, None]:
    """Yield the arguments of a call, an object that comes next, as they arrive.

    They end with the object, or at `end` outside of a string, or with the text.
    """
    value = _Value(source, end)
    while True:
        piece, done = yield from value.piece()
        if piece:
            yield ArgumentsDelta(piece)
        if done:
            return


def _head(source: Source, end: str) -> Parsing[Head | None]:
    """Take a call's object up to its arguments, None if it is not valid."""
    if not (yield from source.literal("{")):
        return None
    name = given = None
    while True:
        yield from source.space()
        key = yield from _string(source, end)
        yield from source.space()
        if key is None or not (yield from source.literal(":")):
            return None
        yield from source.space()
        first = yield from source.peek()
        if key in ARGUMENT_KEYS and first == "{" and name is not None:
            return Head(name)
        value = yield from _value(source, end)
        if value is None:
            return None
        if key == "name" and first == '"':
            name = _loads(value)
        elif key in ARGUMENT_KEYS:
            given = _object_in(value)
            if given is None:
                return None
        yield from source.space()
        if (yield from source.literal(",")):
            continue
        if not isinstance(name, str) or not name or (yield from source.peek()) != "}":
            return None
        return Head(name, given or "{}")


def _object_in(value: str) -> str | None:
    """Return the JSON object that a value is or, as some models write it, that a string holds; None for another."""
    loaded = _loads(value)
    if isinstance(loaded, str):
        value, loaded = loaded, _loads(loaded)
    if loaded is None and value.strip() == "null":
        return "{}"
    return value if isinstance(loaded, dict) else None


def _rest(source: Source, end: str) -> Parsing[None]:
    """Take what follows the arguments in a call's object: further fields, which mean nothing, and its end."""
    while True:
        source.mark()
        yield from source.space()
        if (yield from source.literal("}")):
            source.unmark()
            return
        field = (yield from source.literal(",")) and (yield from _field(source, end))
        if not field:
            source.go_back()
            return
        source.unmark()


def _field(source: Source, end: str) -> Parsing[bool]:
    yield from source.space()
    if (yield from _string(source, end)) is None:
        return False
    yield from source.space()
    if not (yield from source.literal(":")):
        return False
    yield from source.space()
    return (yield from _value(source, end)) is not None


def _string(source: Source, end: str) -> Parsing[str | None]:
    """Take a string and return what it says, None if none comes next."""
    if (yield from source.peek()) != '"':
        return None
    text = yield from _value(source, end)
    loaded = None if text is None else _loads(text)
    return loaded if isinstance(loaded, str) else None


def _value(source: Source, end: str) -> Parsing[str | None]:
    """Take a whole value and return its text, None if it is not valid."""
    pieces, value = [], _Value(source, end)
    while True:
        piece, done = yield from value.piece()
        pieces.append(piece)
        if done:
            text = "".join(pieces)
            return text if value.whole and (text == "null" or _loads(text) is not None) else None


class _Value:
    """A JSON value that is taken while it arrives. Only its strings and brackets are looked at."""

    def __init__(self, source: Source, end: str):
        self._source, self._end = source, end
        self._depth = 0
        self._in_string = False
        self._run = re.compile(rf'[^"{{}}\[\]{re.escape(end[:1])}]+')  # outside of strings
        self.whole = False

    def piece(self) -> Parsing[tuple[str, bool]]:
        """Take what has arrived, as (text, done). The text is not empty unless the value is done."""
        taken: list[str] = []
        while True:
            found = self._step()
            if isinstance(found, str):
                taken.append(found)
            if self.whole:
                return "".join(taken), True
            if isinstance(found, str):
                continue
            if taken:
                return "".join(taken), False
            if found or not (yield from self._source.more()):
                if not found and self._in_string:  # a lone backslash at the end of the text
                    taken.append(self._source.take(1))
                return "".join(taken), True

    def _step(self) -> str | bool:
        """Take the next stretch. Return it, or True if none follows, or False if more text is needed to know."""
        source = self._source
        if not source.ahead:
            return False
        if self._in_string:
            return self._step_in_string()
        if self._end and source.starts_with(self._end):
            return True
        if self._end and source.may_become(self._end):
            return False
        if self._depth and (length := source.match(self._run)):
            return source.take(length)
        if not self._depth and (length := source.match(SCALAR_RUN)):
            return self._step_in_scalar(length)
        if source.starts_with('"'):
            self._in_string = True
        elif source.starts_with("{") or source.starts_with("["):
            self._depth += 1
        elif self._depth and (source.starts_with("}") or source.starts_with("]")):
            self._depth -= 1
            self.whole = self._depth == 0
        elif not self._depth:
            return True
        return source.take(1)

    def _step_in_string(self) -> str | bool:
        source = self._source
        if length := source.match(STRING_RUN):
            return source.take(length)
        if source.starts_with("\\"):
            return source.take(2) if source.ahead > 1 else False
        self._in_string = False
        self.whole = self._depth == 0
        return source.take(1)

    def _step_in_scalar(self, length: int) -> str | bool:
        if length == self._source.ahead and not self._source.complete:
            return False
        self.whole = True
        return self._source.take(length)


def _loads(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
