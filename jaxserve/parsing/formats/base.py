"""What a format of tool calls is: how an answer is parsed, and which texts surround a call."""

import json
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from jaxserve.core.structured import JSON_WHITESPACE
from jaxserve.parsing.source import Parsing, Source
from jaxserve.parsing.tools import Tool


class ToolFormat(ABC):
    """A format in which models write tool calls.

    The texts of a call are for grammars: `opening`, then the calls with `separator` between them, then `closing`.
    """

    name: ClassVar[str]
    # Tokens that the parser must see. Those of them that are special would be left out of the text otherwise.
    markers: ClassVar[tuple[str, ...]] = ()
    # Where free text ends and calls begin; "" if an answer is either text or calls.
    trigger: ClassVar[str]
    # Without a trigger: the character with which calls begin and free text does not.
    first: ClassVar[str] = ""
    opening: ClassVar[str] = ""
    separator: ClassVar[str] = ""
    closing: ClassVar[str] = ""

    @abstractmethod
    def parse(self, source: Source, tools: Sequence[Tool]) -> Parsing[None]:
        """Yield the events of an answer. Calls that are not valid are text."""

    @abstractmethod
    def before(self, name: str) -> str:
        """Return the text of a call of the tool `name` before its arguments."""

    @abstractmethod
    def after(self) -> str:
        """Return the text of a call after its arguments."""

    def new_call_id(self) -> str:
        """Return a new id for a call."""
        return f"call_{uuid.uuid4().hex[:24]}"

    def arguments(self, tool: Tool) -> str:
        """Return a rule of Lark for the arguments of a call."""
        return f"%json {json.dumps(schema_of(tool))}"


def schema_of(tool: Tool) -> dict[str, Any]:
    """Return the JSON schema of a tool's arguments with the options of llguidance.

    Keywords that it does not support are left out of account, unless the tool is strict.
    """
    none = {"properties": {}, "additionalProperties": False}
    options = {"whitespace_pattern": JSON_WHITESPACE, "lenient": not tool.strict}
    return {"type": "object", **(none if tool.parameters is None else tool.parameters), "x-guidance": options}
