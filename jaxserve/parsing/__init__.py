"""Parsing of answers: reasoning and tool calls are found in the text while it is generated.

One incremental parser yields events (events.py). A stream sends them as they come, and a whole answer is their sum, so
that both say the same. The package is about text alone: it needs no engine and no server.
"""

from jaxserve.parsing.events import ParsedMessage
from jaxserve.parsing.parser import AnswerFormat
from jaxserve.parsing.registry import reasoning_format, tool_format
from jaxserve.parsing.tools import Tool, ToolUse

__all__ = ["AnswerFormat", "ParsedMessage", "Tool", "ToolUse", "reasoning_format", "tool_format"]
