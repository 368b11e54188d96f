"""The text of an answer for parsers that are written as if it were complete, but run while it arrives.

A parser is a generator. It takes text from a `Source`, yields events, and yields None where it needs more text than has
arrived. What it takes depends on the text alone and never on how the text was cut into pieces, so that the events of a
stream add up to the same message as those of the whole text.
"""

import re
from collections.abc import Generator, Iterator, Sequence
from typing import TypeVar

from jaxserve.parsing.events import Event

T = TypeVar("T")
SPACE = re.compile(r"\s+")
Parsing = Generator[Event | None, None, T]


class Source:
    """The text that has arrived and has not been taken yet."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0  # position of the next character
        self._marks: list[int] = []  # positions to which `go_back` returns, the latest last
        self.complete = False  # nothing more arrives

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

    def starts_with(self, text: str) -> bool:
        """Return whether `text` has arrived and comes next."""
        return self._text.startswith(text, self._at)

    def match(self, pattern: re.Pattern[str]) -> int:
        """Return how many characters that have arrived match the pattern from here on."""
        found = pattern.match(self._text, self._at)
        return found.end() - self._at if found else 0

    def may_become(self, text: str) -> bool:
        """Return whether what has arrived is only the beginning of `text`, and more may arrive."""
        return not self.complete and self.ahead < len(text) and text.startswith(self._text[self._at :])

    def take(self, count: int) -> str:
        """Take `count` characters, or fewer if fewer have arrived."""
        taken = self._text[self._at : self._at + count]
        self._at += len(taken)
        return taken

    def mark(self) -> None:
        """Remember the present position until `unmark` or `go_back`, which must follow."""
        self._marks.append(self._at)

    def unmark(self) -> None:
        """Forget the position that was remembered last."""
        self._marks.pop()

    def go_back(self) -> None:
        """Return to the position that was remembered last, and forget it."""
        self._at = self._marks.pop()

    def more(self) -> Parsing[bool]:
        """Wait for more text, and return False if none will arrive."""
        ahead = self.ahead
        while self.ahead == ahead:
            if self.complete:
                return False
            yield None
        return True

    def peek(self, count: int = 1) -> Parsing[str]:
        """Return the next `count` characters without taking them, or fewer at the end."""
        while self.ahead < count and (yield from self.more()):
            pass
        return self._text[self._at : self._at + count]

    def space(self) -> Parsing[str]:
        """Take white space."""
        taken = ""
        while (yield from self.peek()).isspace():
            taken += self.take(self.match(SPACE))
        return taken

    def literal(self, text: str) -> Parsing[bool]:
        """Take `text` if it comes next, and return whether it does."""
        for length in range(1, len(text) + 1):
            if (yield from self.peek(length)) != text[:length]:
                return False
        self.take(len(text))
        return True

    def until(self, *ends: str) -> "Parsing[tuple[str, str]]":
        """Take text before the first of `ends`; return it with the end that was found, "" if there is none."""
        taken = []
        while True:
            piece, end, done = yield from self.piece(ends)
            taken.append(piece)
            if done:
                return "".join(taken), end

    def piece(self, ends: Sequence[str]) -> Parsing[tuple[str, str, bool]]:
        """Take what has arrived before the first of `ends`, as (text, end, done).

        `done`: the end has been found and taken, or the whole text is complete, and `end` is "". Otherwise some text is
        returned, and the end is still to come.
        """
        while True:
            found = self._find(ends)
            if found is not None:
                begin, end = found
                text = self.take(begin - self._at)
                self.take(len(end))
                return text, end, True
            if self.complete:
                return self.take(self.ahead), "", True
            certain = self.ahead - self._held_back(ends)
            if certain:
                return self.take(certain), "", False
            yield from self.more()

    def _find(self, ends: Sequence[str]) -> tuple[int, str] | None:
        """Return the position and text of the first of `ends`, None if it may still turn out to be part of another."""
        found = [(begin, -len(end), end) for end in ends if (begin := self._text.find(end, self._at)) >= 0]
        if not found:
            return None
        begin, _, end = min(found)
        if not self.complete and len(self._text) - self._held_back(ends) <= begin:
            return None
        return begin, end

    def _held_back(self, ends: Sequence[str]) -> int:
        """Return the number of characters at the end of the text that may be the beginning of one of `ends`."""
        longest = 0
        for end in ends:
            for length in range(min(len(end) - 1, self.ahead), longest, -1):
                if self._text.endswith(end[:length]):
                    longest = length
                    break
        return longest


class Incremental:
    """A parser that is run on a text in pieces."""

    def __init__(self, source: Source, parser: Iterator[Event | None]):
        self._source, self._parser = source, parser

    def push(self, text: str) -> list[Event]:
        """Add text and return the events that it completes."""
        self._source.push(text)
        return self._run()

    def finish(self) -> list[Event]:
        """Return the last events, after the last text."""
        self._source.complete = True
        return self._run()

    def _run(self) -> list[Event]:
        events = []
        for event in self._parser:
            if event is None:
                break
            events.append(event)
        return events
