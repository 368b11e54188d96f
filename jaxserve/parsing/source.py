"""The text of an answer for parsers that are written as if it were complete, but run while it arrives.

A parser is a generator. It takes text from a `Source`, yields events, and yields None where it needs more text than has
arrived. What it takes depends on the text alone and never on how the text was cut into pieces, so that the events of a
stream add up to the same message as those of the whole text.
"""

import re
from collections.abc import Generator, Iterator
from functools import lru_cache
from itertools import groupby
from typing import TypeVar

from jaxserve.parsing.events import CallBegun, Event, TextDelta
from jaxserve.parsing.unicode_text import ValidUnicode

T = TypeVar("T")
SPACE = re.compile(r"\s+")
Parsing = Generator[Event | None, None, T]


class Source:
    """The text that has arrived and has not been taken yet."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0  # position of the next character
        self._marks: list[int] = []  # positions to which attempts may go back, the latest last
        self.complete = False  # nothing more arrives
        self.exhausted = False  # more was waited for than there is

    def push(self, text: str) -> None:
        """Add text that has arrived."""
        begin = self._marks[0] if self._marks else self._at
        self._text = self._text[begin:] + text
        self._at -= begin
        self._marks = [mark - begin for mark in self._marks]

    @property
    def ahead(self) -> int:
        """Number of characters that have arrived and have not been taken."""
        return len(self._text) - self._at

    def has(self, texts: tuple[str, ...]) -> bool:
        """Return whether one of the texts is in what has arrived."""
        return bool(self._find(texts)[1])

    def match(self, pattern: re.Pattern[str]) -> str:
        """Take what matches the pattern here, of the text that has arrived; "" if nothing does."""
        found = pattern.match(self._text, self._at)
        return self.take(found.end() - self._at) if found else ""

    def take(self, count: int) -> str:
        """Take `count` characters, or fewer if fewer have arrived."""
        taken = self._text[self._at : self._at + count]
        self._at += len(taken)
        return taken

    def attempt(self, parsing: Parsing[T | None]) -> Parsing[T | None]:
        """Run a parser that yields no events. If it returns None, what it has taken comes again."""
        self._marks.append(self._at)
        result = yield from parsing
        mark = self._marks.pop()
        if result is None:
            self._at = mark
        return result

    def look(self, parsing: Parsing[T]) -> Parsing[T]:
        """Run a parser that yields no events and return its result. What it has taken comes again."""
        self._marks.append(self._at)
        result = yield from parsing
        self._at = self._marks.pop()
        return result

    def cut(self, parsing: Parsing[object | None]) -> Parsing[None]:
        """Take everything if a parser that yields no events returns None because the text breaks off in it."""
        self.exhausted = False
        if (yield from self.look(parsing)) is None and self.exhausted:
            self.take(self.ahead)

    def back(self, count: int) -> None:
        """Give back the last `count` characters that have been taken, before more text is waited for."""
        self._at -= count

    def more(self) -> Parsing[bool]:
        """Wait for more text, and return False if none will arrive."""
        ahead = self.ahead
        while self.ahead == ahead:
            if self.complete:
                self.exhausted = True
                return False
            yield None
        return True

    def peek(self, count: int = 1) -> Parsing[str]:
        """Return the next `count` characters without taking them, or fewer at the end."""
        while self.ahead < count and (yield from self.more()):
            pass
        return self._text[self._at : self._at + count]

    def run(self, pattern: re.Pattern[str]) -> Parsing[str]:
        """Take all characters that come next and match the pattern, which is one of runs of certain characters."""
        taken = []
        while True:
            taken.append(self.match(pattern))
            if self.ahead or not (yield from self.more()):
                return "".join(taken)

    def space(self) -> Parsing[str]:
        """Take white space."""
        return (yield from self.run(SPACE))

    def comes(self, text: str) -> Parsing[bool]:
        """Return whether `text` comes next."""
        while self.ahead < len(text) and text.startswith(self._text[self._at :]) and (yield from self.more()):
            pass
        return self._text.startswith(text, self._at)

    def literal(self, text: str) -> Parsing[bool]:
        """Take `text` if it comes next, and return whether it does."""
        if not (yield from self.comes(text)):
            return False
        self.take(len(text))
        return True

    def one_of(self, texts: tuple[str, ...]) -> Parsing[str]:
        """Take the first of the texts that comes next and return it, "" if none does."""
        for text in texts:
            if (yield from self.literal(text)):
                return text
        return ""

    def spaced(self, text: str) -> Parsing[bool | None]:
        """Take white space and `text`, None if they do not come next (for `attempt`)."""
        yield from self.space()
        return (yield from self.literal(text)) or None

    def piece(
        self, ends: tuple[str, ...], *, markup: bool = False, signs: bool = True
    ) -> Parsing[tuple[str, str, bool]]:
        """Take what has arrived before the first of `ends`, as (text, end, done).

        `done`: the end has been found and taken, or the whole text is complete, and `end` is "". Otherwise some text is
        returned, and the end is still to come. Of ends that begin at one place the longest is found. `markup`: the
        beginning of one of `ends` in brackets with which the whole text breaks off is left out, but with `signs` not if
        it is a single character, which may be a sign of its own.
        """
        while True:
            begin, end = self._find(ends)
            certain = self.ahead if self.complete else self.ahead - self._held_back(ends)
            if end and begin - self._at < certain:
                text = self.take(begin - self._at)
                self.take(len(end))
                return text, end, True
            if self.complete:
                cut = self._held_back(tuple(end for end in ends if end[0] in "<[")) if markup else 0
                text = self.take(self.ahead - cut * (cut > signs))
                self.take(self.ahead)
                return text, "", True
            if certain:
                return self.take(certain), "", False
            yield from self.more()

    def until(self, ends: tuple[str, ...]) -> Parsing[str]:
        """Take everything up to and with the first of `ends`, and return this one, "" if none comes."""
        while True:
            _, end, done = yield from self.piece(ends)
            if done:
                return end

    def _find(self, ends: tuple[str, ...]) -> tuple[int, str]:
        """Return the position and text of the first of `ends` that has arrived, "" if none has."""
        found = _any_of(ends).search(self._text, self._at) if ends else None
        return (found.start(), found.group()) if found else (len(self._text), "")

    def _held_back(self, ends: tuple[str, ...]) -> int:
        """Return the number of characters at the end of the text that may be the beginning of one of `ends`."""
        if not ends:
            return 0
        first, longest = _first_of(ends)
        begin = max(self._at, len(self._text) - longest + 1)
        for found in first.finditer(self._text, begin):
            rest = self._text[found.start() :]
            if any(len(end) > len(rest) and end.startswith(rest) for end in ends):
                return len(rest)
        return 0


class Incremental:
    """A parser that is run on a text in pieces."""

    def __init__(self, source: Source, parser: Iterator[Event | None]):
        self._source, self._parser = source, parser
        self._unicode = ValidUnicode()

    def push(self, text: str) -> list[Event]:
        """Add text and return the events that it completes."""
        self._source.push(text)
        return self._run()

    def finish(self) -> list[Event]:
        """Return the last events, after the last text."""
        self._source.complete = True
        return self._run()

    def _run(self) -> list[Event]:
        events: list[Event] = []
        for event in self._parser:
            if event is None:
                break
            events.append(event)
        joined = _joined(events) if len(events) > 1 else events
        return self._unicode.mend(joined, complete=self._source.complete)


class PlainText:
    """The parser of answers that are nothing but text. Nearly all tokens of a server pass through it."""

    def push(self, text: str) -> list[Event]:
        """Return the text as an event."""
        return [TextDelta(text)] if text else []

    def finish(self) -> list[Event]:
        """Return no event: nothing has been held back."""
        return []


def _joined(events: list[Event]) -> Iterator[Event]:
    """Yield the events with the texts of successive ones of a kind in one."""
    for kind, group in groupby(events, type):
        if kind is CallBegun:
            yield from group
        else:
            yield kind("".join(event.text for event in group if not isinstance(event, CallBegun)))


@lru_cache
def _any_of(ends: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(end) for end in sorted(ends, key=len, reverse=True)))


@lru_cache
def _first_of(ends: tuple[str, ...]) -> tuple[re.Pattern[str], int]:
    """Return an expression for the first characters of `ends`, and the length of the longest of them."""
    return re.compile("[" + re.escape("".join(end[0] for end in ends)) + "]"), max(map(len, ends))
