"""Valid Unicode in events: pairs of surrogates become the characters that they stand for, others U+FFFD."""

import re
from collections.abc import Iterable

from jaxserve.core.unicode_text import valid_unicode
from jaxserve.parsing.events import ArgumentsDelta, CallBegun, Event

HIGH, LOW = r"\\u[dD][89abAB][0-9a-fA-F]{2}", r"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
# Escapes in JSON, read from the left, so that a backslash that is escaped itself begins none: a pair; one that the next
# piece of the text may complete; a surrogate alone; the beginning of what may be one; any other.
ESCAPE = re.compile(
    rf"(?P<pair>{HIGH}{LOW})|(?P<open>{HIGH}(?:\\(?:u(?:[dD](?:[c-fC-F][0-9a-fA-F]?)?)?)?)?\Z)|(?P<alone>{HIGH}|{LOW})"
    r"|(?P<begun>\\(?:u(?:[dD](?:[89a-fA-F][0-9a-fA-F]?)?)?)?\Z)|\\.",
    re.DOTALL,
)


class ValidUnicode:
    """The events of an answer, of which the text is valid Unicode, and so is what escapes in arguments stand for."""

    def __init__(self) -> None:
        self._held = ""  # an escape at the end of arguments that more of them may complete

    def mend(self, events: Iterable[Event], *, complete: bool) -> list[Event]:
        """Return the events of a piece of an answer that say something. `complete`: it is the last one."""
        mended: list[Event] = []
        for event in events:
            if isinstance(event, CallBegun):
                mended += self._rest()
                event.name = valid_unicode(event.name)
                mended.append(event)
                continue
            if isinstance(event, ArgumentsDelta):
                event.text = self._escapes(event.text)
            elif self._held:
                mended += self._rest()
            event.text = valid_unicode(event.text)
            if event.text:
                mended.append(event)
        return mended + self._rest() if complete else mended

    def _rest(self) -> list[Event]:
        """Return what has been held back, after which no more arguments come."""
        return [ArgumentsDelta(self._escapes("", complete=True))] if self._held else []

    def _escapes(self, text: str, *, complete: bool = False) -> str:
        """Return more of a call's arguments without escapes of surrogates, and hold back one that may go on."""
        text, self._held = self._held + text, ""
        if "\\" not in text:
            return text

        def mended(found: re.Match[str]) -> str:
            escape = found.group()
            match found.lastgroup:
                case "pair":
                    return valid_unicode(chr(int(escape[2:6], 16)) + chr(int(escape[8:], 16)))
                case "alone":
                    return "\ufffd"
                case "open" | "begun" if not complete:
                    self._held = escape
                    return ""
                case "open":
                    return "\ufffd" + escape[6:]
            return escape

        return ESCAPE.sub(mended, text)
