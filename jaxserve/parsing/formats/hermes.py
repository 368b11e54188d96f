"""Calls as JSON in tags, as Hermes, Qwen2.5 and Qwen3 write them."""

import json
from collections.abc import Sequence

from jaxserve.parsing.formats.base import ToolFormat
from jaxserve.parsing.json_text import call_body, call_head
from jaxserve.parsing.source import Parsing, Source
from jaxserve.parsing.text_output import TextOutput
from jaxserve.parsing.tools import Tool

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Hermes(ToolFormat):
    """<tool_call>{"name": "f", "arguments": {...}}</tool_call>, once for each call."""

    name = "hermes"
    markers = (OPEN, CLOSE)
    trigger = OPEN
    separator = "\n"

    def parse(self, source: Source, tools: Sequence[Tool]) -> Parsing[None]:
        output = TextOutput()
        while True:
            text, found, done = yield from source.piece((OPEN,))
            yield from output.text(text)
            if found and not (yield from self._call(source, output)):
                yield from output.text(found)
            elif done and not found:
                yield from output.end()
                return

    def _call(self, source: Source, output: TextOutput) -> Parsing[bool]:
        """Yield the events of a call, or take nothing and return False if it is not valid."""
        source.mark()
        yield from source.space()
        head = yield from call_head(source, CLOSE)
        if head is None:
            source.go_back()
            return False
        source.unmark()
        output.call()
        yield from call_body(source, head, CLOSE)
        source.mark()
        yield from source.space()
        if (yield from source.literal(CLOSE)):
            source.unmark()
        else:
            source.go_back()
        return True

    def before(self, name: str) -> str:
        return f'{OPEN}\n{{"name": {json.dumps(name)}, "arguments": '

    def after(self) -> str:
        return f"}}\n{CLOSE}"
