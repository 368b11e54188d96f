"""Calls in a section, each with a name and JSON between special tokens: DeepSeek V3, R1 and V3.1, Kimi K2."""

import re
from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from jaxserve.parsing.events import CallBegun
from jaxserve.parsing.formats.base import ToolFormat
from jaxserve.parsing.json_arguments import arguments
from jaxserve.parsing.json_text import Head
from jaxserve.parsing.source import Parsing, Source
from jaxserve.parsing.tools import Tool

NAME_RUN = re.compile(r"[\w.:-]+")


class CallSection(ToolFormat):
    """A section of calls. What comes between the beginning of a call and its arguments is up to the subclass."""

    call: ClassVar[str]  # the token at the beginning of a call
    sep: ClassVar[str]  # the token after the name or before it
    end: ClassVar[str]  # the token at the end of a call
    fence: ClassVar[str] = ""  # the text between the arguments and the end

    def head(self, source: Source, tools: Sequence[Tool], trigger: str) -> Parsing[Head | None]:
        if trigger != self.call and (yield from source.spaced(self.call)) is None:
            return None
        yield from source.space()
        name = yield from self.introduction(source)
        yield from source.space()
        return Head(name) if name and (yield from source.comes("{")) else None

    @abstractmethod
    def introduction(self, source: Source) -> Parsing[str]:
        """Take a call up to its arguments and return the name of the tool, "" if it is not valid."""

    def body(self, source: Source, tools: Sequence[Tool], head: Head) -> Parsing[None]:
        following: Head | None = head
        while following is not None:
            yield CallBegun(following.name)
            yield from arguments(source, self.end, self.call)
            while (yield from source.attempt(source.spaced("}"))):
                pass
            if self.fence and not (yield from source.attempt(source.spaced(self.fence))):
                yield from source.cut(source.spaced(self.fence))
            while (yield from source.attempt(source.spaced(self.end))):
                pass
            following = yield from source.attempt(self.head(source, tools, ""))

    def after(self) -> str:
        return self.end


class DeepSeekV31(CallSection):
    """A section of calls <｜tool▁call▁begin｜>f<｜tool▁sep｜>{...}<｜tool▁call▁end｜>."""

    name = "deepseek_v31"
    call, sep, end = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
    opening, closing = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    triggers = (opening, call)  # the first is left out at times
    ends = (end, closing)
    markers = (opening, call, sep, end, closing)

    def introduction(self, source: Source) -> Parsing[str]:
        name = yield from source.run(NAME_RUN)
        yield from source.space()
        return name if (yield from source.literal(self.sep)) else ""

    def before(self, name: str) -> str:
        return f"{self.call}{name}{self.sep}"


class DeepSeekV3(DeepSeekV31):
    """The format of V3.1, but with <｜tool▁call▁begin｜>function<｜tool▁sep｜>f and arguments in a Markdown block."""

    name = "deepseek_v3"
    separator = "\n"
    fence = "```"

    def introduction(self, source: Source) -> Parsing[str]:
        if not (yield from super().introduction(source)):
            return ""
        yield from source.space()
        name = yield from source.run(NAME_RUN)
        yield from source.space()
        yield from source.literal("```json")
        return name

    def before(self, name: str) -> str:
        return f"{self.call}function{self.sep}{name}\n```json\n"

    def after(self) -> str:
        return f"\n```{self.end}"


class KimiK2(CallSection):
    """A section of calls <|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{...}<|tool_call_end|>."""

    name = "kimi_k2"
    call, sep, end = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
    opening, closing = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    triggers = (opening, call)  # the first is left out at times
    ends = (end, closing)
    markers = (opening, call, sep, end, closing)

    def introduction(self, source: Source) -> Parsing[str]:
        identifier = yield from source.run(NAME_RUN)
        yield from source.space()
        if not (yield from source.literal(self.sep)):
            return ""
        return re.sub(r":[0-9]+$", "", identifier.removeprefix("functions."))

    def before(self, name: str) -> str:
        return f"{self.call}functions.{name}:0{self.sep}"

    def new_call_id(self, name: str = "", index: int = 0) -> str:
        """Return the id that the model writes itself: in the chat template it stands for the name of the tool."""
        return f"functions.{name}:{index}" if name else super().new_call_id()
