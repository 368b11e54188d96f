"""Calls as a JSON list after a marker: Granite 3, Phi-4-mini, Jamba, Hunyuan-A13B, earlier models of Mistral."""

from collections.abc import Sequence
from typing import ClassVar

from jaxserve.parsing.formats.base import ToolFormat, call_in_json, names_of
from jaxserve.parsing.json_arguments import call_body
from jaxserve.parsing.json_text import Head, call_head
from jaxserve.parsing.source import Parsing, Source
from jaxserve.parsing.tools import Tool


class JsonList(ToolFormat):
    """A marker, [{"name": "f", "arguments": {...}}, ...], and in some formats a closing marker."""

    separator = ", "
    resumes = ("{",)
    close: ClassVar[str] = ""

    def head(self, source: Source, tools: Sequence[Tool], trigger: str) -> Parsing[Head | None]:
        opened = yield from source.attempt(source.spaced("["))
        yield from source.space()
        return (yield from call_head(source, needs_arguments=not opened))

    def resumed_head(self, source: Source, tools: Sequence[Tool], before: str) -> Parsing[Head | None]:
        source.back(len(before))
        return (yield from call_head(source, names_of(tools), plain=True))

    def body(self, source: Source, tools: Sequence[Tool], head: Head) -> Parsing[None]:
        following: Head | None = head
        while following is not None:
            yield from call_body(source, following, self.close, self.triggers[0])
            following = yield from source.attempt(_next(source))
        yield from source.cut(_next(source))
        while (yield from source.attempt(source.spaced("]"))):
            pass

    def before(self, name: str) -> str:
        return call_in_json(name)

    def after(self) -> str:
        return "}"


class Granite(JsonList):
    """<|tool_call|>[{"name": "f", "arguments": {...}}, ...], or the same with <tool_call>."""

    name = "granite"
    markers = ("<|tool_call|>", "<tool_call>")
    triggers = markers
    opening = "<|tool_call|>["
    closing = "]"


class Phi4Mini(JsonList):
    """functools[{"name": "f", "arguments": {...}}, ...]."""

    name = "phi4_mini_json"
    triggers = ("functools",)
    opening = "functools["
    closing = "]"


class Jamba(JsonList):
    """<tool_calls>[{"name": "f", "arguments": {...}}, ...]</tool_calls>."""

    name = "jamba"
    markers = ("<tool_calls>", "</tool_calls>")
    triggers = ("<tool_calls>",)
    close = "</tool_calls>"
    ends = (close,)
    opening = "<tool_calls>["
    closing = "]</tool_calls>"


def _next(source: Source) -> Parsing[Head | None]:
    """Take a comma, which may be missing, and the head of the call after it."""
    yield from source.attempt(source.spaced(","))
    yield from source.space()
    return (yield from call_head(source, needs_arguments=True))
