"""Keyword arguments of calls as Python writes them, also where the model leaves commas, brackets or quotes out."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jaxserve.parsing.events import ArgumentsDelta
from jaxserve.parsing.formats.base import NAME_RUN
from jaxserve.parsing.python_text import SPACE, to_json
from jaxserve.parsing.schemas import may_be_text
from jaxserve.parsing.source import Parsing, Source

OUTSIDE_RUN = re.compile(r"""[^\[\](){}"',]+""")
SKIPPED_RUN = re.compile(r"[^,)\]}]+")
WORDS_RUN = re.compile(r"""[^\[\](){}"',=<]+""")
CLOSERS = {"(": ")", "[": "]", "{": "}"}
KEYWORD = re.compile(r"\s+([^\W\d]\w*)\s*=(?!=)")
COVER = "\0"  # stands for each character of strings and brackets in the outline of a value


@dataclass(frozen=True)
class _Raw:
    """The text of a value, and its outline without strings and brackets.

    `ended`: a comma or bracket follows. `unclosed`: the answer ends in a string.
    """

    text: str
    outline: str
    ended: bool
    unclosed: bool = False


class KeywordArguments:
    """The reader of one call's arguments.

    `types`: those of the declared parameters by name. `tools`: the names of the tools. `begins_call`: takes the head of
    a call, None if none comes next. `ends`: the tags that come after all calls or before others.
    """

    def __init__(
        self,
        source: Source,
        types: Mapping[str, frozenset[str]],
        tools: frozenset[str],
        begins_call: Callable[[], Parsing[object | None]],
        ends: tuple[str, ...],
    ):
        self._source, self._types, self._begins_call, self._ends = source, types, begins_call, ends
        names = "|".join(map(re.escape, tools))
        self._break = "|".join([rf"\s(?:{names}){COVER}", *map(re.escape, ends)])  # where a bracket is missing

    def read(self, first: str) -> Parsing[bool]:
        """Yield the arguments of a call, from the value of the `first` keyword on, and return whether they end."""
        keyword: str | None = first
        separator, ended = "{", not first
        while keyword:
            yield ArgumentsDelta(f"{separator}{json.dumps(keyword, ensure_ascii=False)}: ")
            separator = ", "
            value, ended = yield from self._value(keyword)
            yield ArgumentsDelta(value)
            keyword, ended = (yield from self._next()) if ended else (None, False)
        if ended:
            yield ArgumentsDelta("}" if first else "{}")
        return ended

    def _next(self) -> Parsing[tuple[str | None, bool]]:
        """Take what comes up to the next value and return its keyword, or None and whether the call ends."""
        source = self._source
        while True:
            yield from source.literal(",")
            if (yield from source.attempt(source.spaced(")"))):
                return None, True
            keyword = yield from source.attempt(keyword_before(source))
            if keyword is not None:
                return keyword, False
            yield from source.space()
            if (character := (yield from source.peek())) and character in "]}":
                return None, True
            for end in self._ends:
                if (yield from source.comes(end)):
                    return None, True
            if (yield from source.look(self._begins_call())) is not None:
                return None, True
            if (yield from source.attempt(_skip(source))) is None:
                yield from source.cut(keyword_before(source))
                return None, False

    def _value(self, keyword: str) -> Parsing[tuple[str, bool]]:
        """Take a value and return it as JSON, or as it stands if the answer ends in it, and whether it ends."""
        source = self._source
        raw = yield from source.look(self._raw())
        if raw.unclosed and (raw.text.rstrip().endswith("]") or any(end in raw.text for end in self._ends)):
            raw = yield from source.look(self._raw(quotes=False))  # a quotation mark is missing
        exact = may_be_text(self._types.get(keyword, frozenset()))
        text, ended = raw.text, raw.ended
        value = to_json(text, exact=exact, code=True) if ended else None
        if value is None and (end := self._early_end(raw.outline)) is not None:
            text, ended = text[:end], True
            value = to_json(text, exact=exact, code=True)
        source.take(len(text))
        return (value or json.dumps(text.strip(SPACE), ensure_ascii=False), True) if ended else (text, False)

    def _early_end(self, outline: str) -> int | None:
        """Return the length of a value after which a comma or bracket is missing, None if it has no such end."""
        keyword = KEYWORD.search(outline)
        if keyword and keyword[1] in self._types:
            return keyword.start()
        call = re.search(self._break, outline)
        return call.start() if call else None

    def _raw(self, *, quotes: bool = True) -> Parsing[_Raw]:
        """Take a value as it stands, up to a comma or bracket that is no part of it, or the end of the answer."""
        source = self._source
        texts: list[str] = []
        outline: list[str] = []
        brackets: list[str] = []
        plain = True  # no quotes and brackets yet
        while True:
            texts.append((yield from source.run(OUTSIDE_RUN)))
            outline.append(COVER * len(texts[-1]) if brackets else texts[-1])
            character = yield from source.peek()
            is_string, unclosed = quotes and character in ("'", '"'), False
            ends = character in ")]}" and brackets[-1:] != [character]
            if character == "," and not brackets:
                ends = not plain or not (yield from source.look(_word_alone(source)))
            if not character or ends:
                return _Raw("".join(texts), "".join(outline), ended=bool(character))
            plain = plain and character == ","
            if is_string:
                text, closed = yield from _string(source, character)
                texts.append(text)
                unclosed = not closed
            else:
                if character in CLOSERS:
                    brackets.append(CLOSERS[character])
                elif brackets[-1:] == [character]:
                    brackets.pop()
                texts.append(source.take(1))
            outline.append(COVER * len(texts[-1]))
            if unclosed:
                return _Raw("".join(texts), "".join(outline), ended=False, unclosed=True)


def _word_alone(source: Source) -> Parsing[bool]:
    """Take a comma and what comes up to the next mark, and return whether this is no keyword, call or literal.

    Then it is a part of a text or number without quotes before it, such as 1,000.
    """
    source.take(1)
    word = yield from source.run(WORDS_RUN)
    return bool(word.strip()) and (yield from source.peek()) in tuple(",)")


def _skip(source: Source) -> Parsing[bool | None]:
    """Take what is no keyword argument, None if nothing ends it."""
    yield from source.run(SKIPPED_RUN)
    return bool((yield from source.peek())) or None


def keyword_before(source: Source) -> Parsing[str | None]:
    """Take a keyword and the equals sign."""
    yield from source.space()
    keyword = yield from source.run(NAME_RUN)
    yield from source.space()
    return keyword if keyword and (yield from source.literal("=")) else None


def _string(source: Source, quote: str) -> Parsing[tuple[str, bool]]:
    """Take a string with its quotes, of which there may be three, and return whether it ends."""
    three = yield from source.literal(quote * 3)
    end = quote * 3 if three else quote
    taken = [end if three else source.take(1)]
    while True:
        text, found, done = yield from source.piece(("\\", end))
        taken += [text, found]
        if found == "\\":
            yield from source.peek()
            taken.append(source.take(1))
        elif done:
            return "".join(taken), bool(found)
