"""Arguments of calls in tags, one parameter in each, also where the model leaves tags out."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jaxserve.parsing.events import ArgumentsDelta
from jaxserve.parsing.python_text import to_json
from jaxserve.parsing.schemas import may_be_text, type_name
from jaxserve.parsing.source import Parsing, Source
from jaxserve.parsing.text_output import Trimmed

STRING, NULLABLE_STRING = frozenset({"string"}), frozenset({"string", "null"})
KEY_RUN = re.compile(r'[^<>"\n]+')
UNDECLARED_KEY = re.compile(r"[\w.-]+")  # what may be a key inside of a value if the schema names none


@dataclass(frozen=True)
class Tags:
    """The tags of a format, each as the text before and after what it surrounds.

    `ends`: the end of one call, if there is one, and that of all. `openings`: the beginnings of calls. `around`: white
    space at the edges of a value that is not part of it.
    """

    key: tuple[str, str]
    value: tuple[str, str]
    ends: tuple[str, ...]
    openings: tuple[str, ...]
    around: str = ""

    @property
    def marks(self) -> tuple[str, ...]:
        """The texts that may end a value or what stands in the place of one."""
        return (self.value[1], self.key[0], *self.ends, *self.openings)


class TaggedArguments:
    """The reader of one call's arguments.

    A value ends at its end tag, at the start tag of another parameter, or at the end of the call or the beginning of
    the next one. A start tag counts if the schema has that parameter and the call does not have it yet. An end of a
    call counts unless the end tag of the value still comes. What is no parameter between two tags is left out.

    `types`: those of the declared parameters by name. `begins_call`: takes the head of a call, None if none comes next.
    """

    def __init__(
        self,
        source: Source,
        tags: Tags,
        types: Mapping[str, frozenset[str]],
        begins_call: Callable[[], Parsing[bool | None]],
    ):
        self._source, self._tags, self._types, self._begins_call = source, tags, types, begins_call
        self._given: set[str] = set()

    def read(self) -> Parsing[None]:
        """Yield the arguments up to the end of the call, which is not taken."""
        separator = ""
        yield ArgumentsDelta("{")
        while (key := (yield from self._next_key())) is not None:
            self._given.add(key)
            types = self._types.get(key, frozenset())
            before = f"{separator}{json.dumps(key, ensure_ascii=False)}: "
            sent, complete = yield from self._string(before) if types == STRING else self._other(before, types)
            if not complete:
                return
            separator = ", " if sent else separator
        yield ArgumentsDelta("}")

    def _next_key(self) -> Parsing[str | None]:
        """Take tags up to the next value and return its key, None at the end of the call."""
        while (key := (yield from self._source.attempt(self._key()))) is None:
            yield from self._source.space()
            if (yield from self._source.look(self._ends_call())) or not (yield from self._source.attempt(self._skip())):
                return None
        return key

    def _key(self) -> Parsing[str | None]:
        """Take the name of a parameter and the tags around it, up to its value."""
        source, tags = self._source, self._tags
        key = yield from self._key_tag()
        while key is not None and (yield from source.attempt(self._same_key_tag(key))):
            pass
        if tags.value[0]:
            while (yield from source.attempt(source.spaced(tags.value[0]))):
                pass
        return key

    def _key_tag(self) -> Parsing[str | None]:
        """Take the tag with the name of a parameter.

        Where another tag comes before the value, the one after the name may be missing.
        """
        source, tags = self._source, self._tags
        if (yield from source.spaced(tags.key[0])) is None:
            return None
        key = yield from source.run(KEY_RUN)
        ended = yield from source.literal(tags.key[1])
        if not ended and tags.value[0]:
            ended = yield from source.comes(tags.value[0])
        return key.strip() or None if ended else None

    def _same_key_tag(self, key: str) -> Parsing[bool | None]:
        return (yield from self._key_tag()) == key or None

    def _skip(self) -> Parsing[bool | None]:
        """Take what is no parameter, up to the next tag, None if none follows in the whole answer."""
        source, tags = self._source, self._tags
        if (yield from source.literal(tags.value[1])):
            return True
        text, mark, done = source.take(1), "", False
        while not done:
            more, mark, done = yield from source.piece(tags.marks)
            text = (text + more)[: len(max(tags.marks, key=len))]
        if mark and mark != tags.value[1]:
            source.back(len(mark))
        begun = text.startswith(tags.key[0]) or any(each.startswith(text) for each in tags.marks)
        return bool(mark or begun) or None

    def _ends_call(self) -> Parsing[bool]:
        """Return whether the call ends here."""
        if not (yield from self._source.peek()):
            return True
        for end in self._tags.ends:
            if (yield from self._source.comes(end)):
                return True
        return bool((yield from self._begins_call()))

    def _string(self, before: str) -> Parsing[tuple[bool, bool]]:
        """Yield a value that is a string as it arrives, and return whether there is one and whether it is complete."""
        yield ArgumentsDelta(before + '"')
        complete = yield from self._value(lambda text: json.dumps(text, ensure_ascii=False)[1:-1])
        if complete:
            yield ArgumentsDelta('"')
        return True, complete

    def _other(self, before: str, types: frozenset[str]) -> Parsing[tuple[bool, bool]]:
        """Yield a value of one of the types, or of any, when it is complete, and return what `_string` does."""
        texts: list[str] = []
        complete = yield from self._value(texts.append)
        text = "".join(texts)
        value = json_of(text, types) if complete else text
        if value is not None:
            yield ArgumentsDelta(before + value)
        return value is not None, complete

    def _value(self, take: Callable[[str], str | None]) -> Parsing[bool]:
        """Give the pieces of a value to `take`, yield what it returns, and return whether the value is complete."""
        source, tags = self._source, self._tags
        lines = bool(tags.around) and (yield from source.literal(tags.around))
        text, goes_on = Trimmed(), False
        while True:
            ends = (tags.value[1],) if goes_on else tags.marks
            more, mark, done = yield from source.piece(ends, markup=True)
            yield ArgumentsDelta(take(text.add(more)) or "")
            new_line = not lines or "\n" in text.held
            if mark == tags.value[1]:
                if not (yield from source.look(self._goes_on(new_line))):
                    yield ArgumentsDelta(take(text.drop().removesuffix(tags.around)) or "")
                    return True
                yield ArgumentsDelta(take(text.add(mark)) or "")
            elif mark:
                source.back(len(mark))
                ended = yield from source.look(self._ends_value(mark, new_line))
                if ended:
                    return True
                goes_on = ended is False
                yield ArgumentsDelta(take(text.add(source.take(len(mark)))) or "")
            elif done:
                return False

    def _goes_on(self, new_line: bool) -> Parsing[bool]:
        """Return whether the end tag that has just come is text: in the same line, a text and another one follow."""
        if (yield from self._source.peek()) in ("", "\n") and new_line:
            return False
        texts, done = [], False
        while not done:
            text, mark, done = yield from self._source.piece(self._tags.marks)
            texts.append(text)
        return mark == self._tags.value[1] and bool("".join(texts).strip())

    def _ends_value(self, mark: str, new_line: bool) -> Parsing[bool | None]:
        """Return whether a value ends before `mark`, which comes next. False: it goes on to its end tag; None: further.

        `new_line`: the mark is on a new line, or the tags of this call are not on lines of their own.
        """
        source, tags = self._source, self._tags
        if mark == tags.key[0]:
            return (yield from self._begins_parameter(new_line)) or None
        if mark not in tags.ends:
            return (yield from self._begins_call()) or None
        yield from source.literal(mark)
        gap = yield from source.space()
        if mark != tags.ends[-1] and (yield from source.comes(tags.ends[-1])):
            return True
        if not new_line and not gap.startswith(tags.around) and (yield from source.peek()):
            return None
        while not (yield from source.look(self._ends_answer_or_begins_call())):
            _, found, _ = yield from source.piece((tags.value[1], *tags.openings))
            if found == tags.value[1]:
                return False
            if found:
                source.back(len(found))
                if (yield from source.look(self._begins_call())):
                    return True
                source.take(len(found))
        return True

    def _ends_answer_or_begins_call(self) -> Parsing[bool]:
        return not (yield from self._source.peek()) or bool((yield from self._begins_call()))

    def _begins_parameter(self, new_line: bool) -> Parsing[bool]:
        """Return whether the tag of a parameter that the call does not have yet comes next."""
        key = yield from self._key_tag()
        if key is None or key in self._given:
            return False
        if not (key in self._types if self._types else UNDECLARED_KEY.fullmatch(key)):
            return False
        if self._tags.value[0] and (yield from self._source.spaced(self._tags.value[0])) is None:
            return False
        return new_line or (yield from self._source.comes(self._tags.around))


def json_of(text: str, types: frozenset[str]) -> str | None:
    """Return what a value says as JSON, None if it says nothing. `types`: those that it may have, none if any.

    Without a text there is no value, unless it may be a string; it is null where the schema allows that.
    """
    if not text.strip() and not may_be_text(types):
        return "null" if "null" in types else None
    value = to_json(text, exact=may_be_text(types))
    if value is not None and "string" in types:
        kind = type_name(json.loads(value))
        allowed = kind in types or (kind == "integer" and "number" in types)
        if not allowed or (kind == "string" and types <= NULLABLE_STRING):
            value = None
    return json.dumps(text, ensure_ascii=False) if value is None else value
