"""The text around tool calls: which white space belongs to the answer."""

from collections.abc import Iterator

from jaxserve.parsing.events import TextDelta


class TextOutput:
    """The text of an answer, without the white space that only separates calls from text or from each other.

    White space before a call and after the last call is dropped; between two stretches of text it stays.
    """

    def __init__(self) -> None:
        self._held = ""  # white space that may turn out to be dropped
        self._begun = False  # some text has been sent
        self._called = False  # a call has been sent

    def text(self, text: str) -> Iterator[TextDelta]:
        """Yield what can be sent now that `text` follows."""
        text = self._held + text
        if not self._begun and self._called:
            text = text.lstrip()
        visible = text.rstrip()
        self._held = text[len(visible) :]
        if visible:
            self._begun = True
            yield TextDelta(visible)

    def call(self) -> None:
        """Note that a call follows."""
        self._held, self._called = "", True

    def end(self) -> Iterator[TextDelta]:
        """Yield what is left at the end of the answer."""
        if self._held and not self._called:
            yield TextDelta(self._held)
        self._held = ""
