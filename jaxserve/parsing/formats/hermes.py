"""Calls as JSON objects in tags: Hermes, Qwen2.5, Qwen3, Granite 4, InternLM 2.5."""

from collections.abc import Sequence
from typing import ClassVar

from jaxserve.parsing.formats.base import ToolFormat, call_in_json
from jaxserve.parsing.json_arguments import call_body
from jaxserve.parsing.json_text import Head, call_head
from jaxserve.parsing.source import Parsing, Source
from jaxserve.parsing.tools import Tool


class Hermes(ToolFormat):
    """<tool_call>{"name": "f", "arguments": {...}}</tool_call>, once for each call."""

    name = "hermes"
    markers: ClassVar[tuple[str, ...]] = ("<tool_call>", "</tool_call>")
    triggers = ("<tool_call>",)
    separator = "\n"
    close: ClassVar[str] = "</tool_call>"
    ends: ClassVar[tuple[str, ...]] = (close,)

    def head(self, source: Source, tools: Sequence[Tool], trigger: str) -> Parsing[Head | None]:
        yield from source.space()
        return (yield from call_head(source))

    def body(self, source: Source, tools: Sequence[Tool], head: Head) -> Parsing[None]:
        following: Head | None = head
        while following is not None:  # some models write several calls in a tag
            yield from call_body(source, following, self.close, self.triggers[0])
            following = yield from source.attempt(self._next(source))

    def _next(self, source: Source) -> Parsing[Head | None]:
        yield from source.space()
        return (yield from call_head(source, needs_arguments=True))

    def before(self, name: str) -> str:
        return f"{self.triggers[0]}\n{call_in_json(name)}"

    def after(self) -> str:
        return f"}}\n{self.close}"


class InternLM(Hermes):
    """<|action_start|><|plugin|>{"name": "f", "parameters": {...}}<|action_end|>, once for each call."""

    name = "internlm"
    markers = ("<|action_start|>", "<|plugin|>", "<|action_end|>")
    triggers = ("<|action_start|><|plugin|>",)
    separator = ""
    close = "<|action_end|>"
    ends = (close,)

    def after(self) -> str:
        return f"}}{self.close}"
