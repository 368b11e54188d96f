"""What a format of tool calls is: how an answer is parsed, and which texts surround a call."""

import json
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar

from jaxserve.core.errors import RequestError
from jaxserve.parsing.events import TextDelta
from jaxserve.parsing.json_text import Head
from jaxserve.parsing.schemas import json_rule, object_schema
from jaxserve.parsing.source import Parsing, Source
from jaxserve.parsing.tools import Tool

NAME_RUN = re.compile(r"""[^\s<>()\[\]{}=,;:"'`]+""")  # names of tools and parameters where they are not in quotes


class ToolFormat(ABC):
    """A format in which models write tool calls.

    A call begins with its head, which names the tool. What looks like a call but has no valid head is text. After the
    head the arguments are sent as the model writes them, valid or not. They are complete JSON only if the model has
    completed them.

    The texts of a call are for grammars: `opening`, then the calls with `separator` between them, then `closing`.
    """

    name: ClassVar[str]
    # Tokens that the parser must see. Those of them that are special would be left out of the text otherwise.
    markers: ClassVar[tuple[str, ...]] = ()
    # Texts at which calls begin. The first is the one in grammars.
    triggers: ClassVar[tuple[str, ...]] = ()
    # The character with which an answer begins if it consists of calls without a trigger.
    first: ClassVar[str] = ""
    opening: ClassVar[str] = ""
    separator: ClassVar[str] = ""
    closing: ClassVar[str] = ""

    def parse(self, source: Source, tools: Sequence[Tool]) -> Parsing[None]:
        """Yield the events of an answer."""
        if self.first:
            yield from self._calls(source, tools, "")
        while True:
            text, trigger, done = yield from source.piece(self.triggers)
            yield TextDelta(text)
            if trigger and not (yield from self._calls(source, tools, trigger)):
                yield TextDelta(trigger)
            elif done and not trigger:
                return

    def _calls(self, source: Source, tools: Sequence[Tool], trigger: str) -> Parsing[bool]:
        """Yield the events of calls, or take nothing and return False if none comes next."""
        head = yield from source.attempt(self.head(source, tools, trigger))
        if head is None:
            return False
        yield from self.body(source, tools, head)
        return True

    @abstractmethod
    def head(self, source: Source, tools: Sequence[Tool], trigger: str) -> Parsing[Head | None]:
        """Take the head of the first call after a trigger that has been taken, None if it is not valid.

        `trigger` is "" at the beginning of an answer.
        """

    @abstractmethod
    def body(self, source: Source, tools: Sequence[Tool], head: Head) -> Parsing[None]:
        """Yield the events of the call that has begun with `head`, and of those that follow without a trigger."""

    @abstractmethod
    def before(self, name: str) -> str:
        """Return the text of a call of the tool `name` before its arguments."""

    @abstractmethod
    def after(self) -> str:
        """Return the text of a call after its arguments."""

    def arguments(self, tool: Tool, rule: str) -> Iterator[str]:
        """Yield lines of Lark that define a rule for the arguments of a call, and rules that begin with its name."""
        yield f"{rule}: {json_rule(object_schema(tool), tool.strict)}"

    def for_template(self, template: str) -> "ToolFormat":
        """Return the variant of the format that a chat template shows."""
        return self

    def new_call_id(self, name: str = "", index: int = 0) -> str:
        """Return a new id for a call. Some ids say the tool's name and the call's number in the conversation."""
        return f"call_{uuid.uuid4().hex[:24]}"


def call_in_json(name: str, arguments_key: str = "arguments") -> str:
    """Return the beginning of a call as a JSON object, up to its arguments."""
    return f'{{"name": {json.dumps(name)}, "{arguments_key}": '


def writable(name: str, run: re.Pattern[str], tool: Tool) -> str:
    """Return the name of a parameter. Raise `RequestError` if it cannot be written without quotes."""
    if run.fullmatch(name):
        return name
    message = f"{tool.place}: the model cannot be made to write the parameter {name!r} of {tool.name!r}: rename it"
    raise RequestError(message, field=tool.place, value=name)


def names_of(tools: Sequence[Tool]) -> frozenset[str]:
    """Return the names of the tools."""
    return frozenset(tool.name for tool in tools)
