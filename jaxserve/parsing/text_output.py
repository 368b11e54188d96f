"""The white space of an answer: what belongs to it, and what only separates its parts."""

from jaxserve.parsing.events import CallBegun, TextDelta
from jaxserve.parsing.source import Parsing


class Trimmed:
    """Text that arrives in pieces, without white space at its end."""

    def __init__(self) -> None:
        self._held: list[str] = []  # white space after which nothing has come yet

    def add(self, text: str) -> str:
        """Return what is certain now that `text` follows."""
        visible = text.rstrip()
        certain = self.drop() + visible if visible else ""
        self._held.append(text[len(visible) :])
        return certain

    @property
    def held(self) -> str:
        """The white space at the end."""
        return "".join(self._held)

    def drop(self) -> str:
        """Return the white space at the end, and forget it."""
        held, self._held = self.held, []
        return held


def without_separators(parsing: Parsing[None]) -> Parsing[None]:
    """Yield the events of an answer without the white space that separates calls from text and from each other.

    White space before a call and after the last call is dropped; between two stretches of text it stays.
    """
    text = Trimmed()
    begun = called = False  # some text, a call has been sent
    for event in parsing:
        if isinstance(event, TextDelta):
            visible = text.add(event.text)
            if visible and called and not begun:
                visible = visible.lstrip()
            begun = begun or bool(visible)
            yield TextDelta(visible)
            continue
        if isinstance(event, CallBegun):
            called = True
            text.drop()
        yield event
    if not called:
        yield TextDelta(text.drop())
