"""Parsing of answers: reasoning and tool calls are found in the text while it is generated.

One incremental parser yields events (events.py). A stream sends them as they come, and a whole answer is their sum, so
that both say the same. The package is about text alone: it needs no engine and no server.
"""

from jaxserve.parsing.events import ArgumentsDelta, CallBegun, ParsedMessage
from jaxserve.parsing.formats.base import ToolFormat
from jaxserve.parsing.json_arguments import call_body
from jaxserve.parsing.json_text import Head, call_head
from jaxserve.parsing.parser import AnswerFormat
from jaxserve.parsing.reasoning import ReasoningFormat
from jaxserve.parsing.registry import reasoning_format, tool_format
from jaxserve.parsing.source import Parsing, Source
from jaxserve.parsing.tools import Tool, ToolUse

__all__ = [
    "AnswerFormat",
    "ArgumentsDelta",
    "CallBegun",
    "Head",
    "ParsedMessage",
    "Parsing",
    "ReasoningFormat",
    "Source",
    "Tool",
    "ToolFormat",
    "ToolUse",
    "call_body",
    "call_head",
    "reasoning_format",
    "tool_format",
]
