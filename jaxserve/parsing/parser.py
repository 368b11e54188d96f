"""The parser of one answer: reasoning first, then text and tool calls."""

from dataclasses import dataclass

from jaxserve.core.reasoning import ReasoningSection
from jaxserve.parsing.events import CallBegun, TextDelta
from jaxserve.parsing.formats.base import ToolFormat
from jaxserve.parsing.reasoning import Calls, reasoning
from jaxserve.parsing.source import Incremental, Parsing, PlainText, Source
from jaxserve.parsing.text_output import without_separators
from jaxserve.parsing.tools import ToolUse

Parser = Incremental | PlainText


@dataclass(frozen=True)
class AnswerFormat:
    """The parts that the answers to one request may have besides text.

    `section`: the reasoning with which they begin; None if there is none or if it stays in the text. `tool_format` and
    `tool_use`: how calls are written, and the tools that they may call. `calls_before`: the number of calls in the
    conversation.
    """

    section: ReasoningSection | None = None
    tool_format: ToolFormat | None = None
    tool_use: ToolUse | None = None
    calls_before: int = 0

    def parser(self) -> Parser:
        """Return a parser for one answer."""
        if self.section is None and self.tool_use is None:
            return PlainText()
        source = Source()
        return Incremental(source, self._parse(source))

    def new_call_id(self, name: str, index: int) -> str:
        """Return a new id for the call with this index in an answer (`ToolFormat.new_call_id`)."""
        return "" if self.tool_format is None else self.tool_format.new_call_id(name, self.calls_before + index)

    def _calls(self, source: Source) -> Calls | None:
        """Return the calls that end reasoning without an end tag."""
        form, use = self.tool_format, self.tool_use
        if form is None or use is None:
            return None
        return Calls(form.tags, lambda: form.begins(source, use.tools))

    def _parse(self, source: Source) -> Parsing[None]:
        if self.section is not None:
            yield from reasoning(source, self.section, self._calls(source))
        if self.tool_format is None or self.tool_use is None:
            yield from _text(source)
            return
        events = without_separators(self.tool_format.parse(source, self.tool_use.tools))
        yield from events if self.tool_use.parallel else _first_call(events)


def _text(source: Source) -> Parsing[None]:
    """Yield everything as text."""
    done = False
    while not done:
        text, _, done = yield from source.piece(())
        yield TextDelta(text)


def _first_call(events: Parsing[None]) -> Parsing[None]:
    """Yield the events up to the end of the first call, and take but leave out what follows."""
    calls = 0
    for event in events:
        calls += isinstance(event, CallBegun)
        if event is None or (calls <= 1 and not (calls and isinstance(event, TextDelta))):
            yield event
