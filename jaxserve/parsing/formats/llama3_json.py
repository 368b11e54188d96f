"""Calls as JSON objects that are a whole answer: Llama 3."""

from collections.abc import Sequence

from jaxserve.parsing.formats.base import ToolFormat, call_in_json, names_of
from jaxserve.parsing.json_arguments import call_body
from jaxserve.parsing.json_text import Head, call_head
from jaxserve.parsing.source import Parsing, Source
from jaxserve.parsing.tools import Tool

TAG = "<|python_tag|>"


class Llama3Json(ToolFormat):
    """{"name": "f", "parameters": {...}} at the beginning of an answer or after <|python_tag|>.

    Further calls follow after a semicolon, a comma or white space alone. Only objects with the name of a tool are
    calls, others are text.
    """

    name = "llama3_json"
    markers = (TAG,)
    triggers = (TAG,)
    first = "{"
    resumes = ("{",)
    separator = "; "

    def head(self, source: Source, tools: Sequence[Tool], trigger: str) -> Parsing[Head | None]:
        yield from source.space()
        return (yield from call_head(source, names_of(tools)))

    def resumed_head(self, source: Source, tools: Sequence[Tool], before: str) -> Parsing[Head | None]:
        source.back(len(before))
        return (yield from call_head(source, names_of(tools), plain=True))

    def body(self, source: Source, tools: Sequence[Tool], head: Head) -> Parsing[None]:
        following: Head | None = head
        while following is not None:
            yield from call_body(source, following)
            following = yield from source.attempt(self._next(source, tools))
        yield from source.cut(self._next(source, tools))

    def _next(self, source: Source, tools: Sequence[Tool]) -> Parsing[Head | None]:
        yield from source.space()
        yield from source.one_of((";", ","))
        yield from source.space()
        yield from source.literal(TAG)
        return (yield from self.head(source, tools, ""))

    def before(self, name: str) -> str:
        return call_in_json(name, "parameters")

    def after(self) -> str:
        return "}"
