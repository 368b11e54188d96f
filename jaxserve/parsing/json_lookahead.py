"""Arguments that are nearly JSON: which of a model's marks are JSON's own, and which belong to a value.

Each function tells it from what comes next. It takes what it reads, and so is for `Source.look`.
"""

import re

from jaxserve.parsing.source import Parsing, Source

BARE_KEY = re.compile(r"[\w$.-]+")
BARE_ENTRY = re.compile(r"[^\"'{}\[\]:,]+")
BETWEEN = re.compile(r"[,\s]+")
COMMENTS = ("//", "# ", "/*")
NEXT_CALL = '{"name"'
MAX_INNER = 64  # quotation marks inside of a string, so that the work for an answer grows with its length only


def begins_key(source: Source) -> Parsing[bool]:
    """Return whether a key and a colon come next. One of the key's quotation marks may be missing."""
    yield from source.space()
    quote = yield from source.one_of(('"', "'"))
    if quote:
        ended = (yield from source.until((quote, "\n", "\\"))) == quote
    else:
        ended = bool((yield from source.run(BARE_KEY)))
        yield from source.one_of(('"', "'"))
    yield from source.space()
    return ended and (yield from source.comes(":"))


def begins_set(source: Source) -> Parsing[bool]:
    """Return whether a set of Python comes next: the first entry of an object would have a colon after its key."""
    if (yield from source.spaced("{")) is None:
        return False
    yield from source.space()
    quote = yield from source.one_of(('"', "'"))
    if quote:
        if (yield from source.until((quote, "\n", "\\"))) != quote:
            return False
    elif not (yield from source.run(BARE_ENTRY)).strip():
        return False
    yield from source.space()
    return (yield from source.peek()) in (",", "}")


def ends_bare_value(source: Source) -> Parsing[bool]:
    """Return whether the comma or line break that comes next ends a value without quotes, in an object."""
    yield from source.run(BETWEEN)
    first = yield from source.peek()
    if not first or first in "\"'{}[]<" or (yield from source.one_of(COMMENTS)):
        return True
    return (yield from begins_key(source))


def ends_string(source: Source, quote: str, ends: tuple[str, ...], *, in_object: bool) -> Parsing[bool]:
    """Return whether the quotation mark that comes next ends a value, or else is a part of it that lacks a backslash.

    It is a part of it if nothing follows that comes after a value in JSON, but after another such mark there does.
    `ends`: the texts at which the string ends in any case.
    """
    source.take(len(quote))
    yield from source.space()
    first = yield from source.peek()
    if first == ",":
        if not in_object:
            return True
        source.take(1)
        yield from source.space()
        first = yield from source.peek()
        if not first or first in "\"'{}[]," or (yield from source.one_of(COMMENTS)):
            return True
    if not first or first in ":}]{[" or (first in "\"'" and not in_object):
        return True
    if in_object and (yield from source.look(begins_key(source))):
        return True
    return not (yield from _goes_on(source, quote, ends))


def _goes_on(source: Source, quote: str, ends: tuple[str, ...]) -> Parsing[bool]:
    """Return whether a string goes on to a quotation mark after which comes what follows a value in JSON."""
    ends = (*ends, NEXT_CALL)
    for _ in range(MAX_INNER):
        while (mark := (yield from source.until((quote, "\\", *ends)))) == "\\":
            yield from source.peek()
            source.take(1)
        if mark != quote:
            return False
        yield from source.space()
        first = yield from source.peek()
        if first and first in ",}]":
            return True
    return False
