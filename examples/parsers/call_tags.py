"""An example of a parser of tool calls, for a model that writes `<call name="f">{...}</call>` for each call.

    python examples/parsers/call_tags.py     # parse an answer that arrives in pieces of five characters
    jaxserve serve MODEL --tool-parser-plugin examples/parsers/call_tags.py

In jaxserve itself it would be a class in jaxserve/parsing/formats/, and a member of FORMATS in
jaxserve/parsing/registry.py.
"""

from collections.abc import Sequence
from typing import ClassVar

from jaxserve.parsing import Head, Parsing, Source, Tool, ToolFormat, ToolUse, call_body
from jaxserve.parsing.events import ParsedMessage
from jaxserve.parsing.formats.base import NAME_RUN
from jaxserve.parsing.parser import AnswerFormat

BEGIN, END = '<call name="', "</call>"


class CallTags(ToolFormat):
    """<call name="f">{...}</call>, once for each call."""

    name = "call_tags"
    triggers: ClassVar[tuple[str, ...]] = (BEGIN,)
    ends: ClassVar[tuple[str, ...]] = (END,)
    separator = "\n"

    def head(self, source: Source, tools: Sequence[Tool], trigger: str) -> Parsing[Head | None]:
        name = yield from source.run(NAME_RUN)
        closed = yield from source.literal('">')
        yield from source.space()
        begins = yield from source.comes("{")
        return Head(name) if name and closed and begins else None  # None: no call but text

    def body(self, source: Source, tools: Sequence[Tool], head: Head) -> Parsing[None]:
        yield from call_body(source, head, END, BEGIN)  # mends what is not quite JSON

    def before(self, name: str) -> str:
        return f'{BEGIN}{name}">'

    def after(self) -> str:
        return END


def main() -> None:
    """Print the text and the calls of an answer."""
    answer = 'I will look.\n<call name="weather">{"city": "Oslo"}</call>\n<call name="now">{}</call>'
    parser = AnswerFormat(None, CallTags(), ToolUse((Tool("weather", {"type": "object"}), Tool("now")))).parser()
    pieces = [answer[begin : begin + 5] for begin in range(0, len(answer), 5)]
    events = [event for piece in pieces for event in parser.push(piece)] + parser.finish()
    message = ParsedMessage.of(events)
    print(f"text: {message.text!r}")
    for call in message.calls:
        print(f"{call.name}({call.arguments})")


if __name__ == "__main__":
    main()
