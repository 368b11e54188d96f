"""Calls as a JSON list after a marker: Granite 3, Phi-4-mini, Jamba, Hunyuan-A13B, earlier models of Mistral."""

from collections.abc import Sequence
from typing import ClassVar

from jaxserve.parsing.formats.base import ToolFormat, call_in_json
from jaxserve.parsing.json_text import Head, call_body, call_head
from jaxserve.parsing.source import Parsing, Source
from jaxserve.parsing.tools import Tool


class JsonList(ToolFormat):
    """A marker, [{"name": "f", "arguments": {...}}, ...], and in some formats a closing marker."""

    separator = ", "
    close: ClassVar[str] = ""

    def head(self, source: Source, tools: Sequence[Tool], trigger: str) -> Parsing[Head | None]:
        return (yield from _next(source, "["))

    def body(self, source: Source, tools: Sequence[Tool], head: Head) -> Parsing[None]:
        following: Head | None = head
        while following is not None:
            yield from call_body(source, following, self.close)
            following = yield from source.attempt(_next(source, ","))
        yield from source.attempt(source.spaced("]"))
        if self.close:
            yield from source.attempt(source.spaced(self.close))

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
    opening = "<tool_calls>["
    closing = "]</tool_calls>"


def _next(source: Source, before: str) -> Parsing[Head | None]:
    """Take the beginning of the list or a comma, and the head of the call after it."""
    if (yield from source.spaced(before)) is None:
        return None
    yield from source.space()
    return (yield from call_head(source))
