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
from jaxserve.parsing.schemas import Parameter, json_rule, object_schema, parameters_of
from jaxserve.parsing.source import Parsing, Source
from jaxserve.parsing.tools import Tool

NAME_RUN = re.compile(r"""[^\s<>()\[\]{}=,;:"'`]+""")  # names of tools and parameters where they are not in quotes


class ToolFormat(ABC):
    """A format in which models write tool calls.

    A call begins with its head, which names the tool. What looks like a call but has no valid head is text. The
    arguments after the head are those that the model writes, as a valid object unless the answer breaks off in them.

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
    # Texts that come after a call, the last of them at its end. After a call that lacks them they are never text.
    ends: ClassVar[tuple[str, ...]] = ()
    # Texts before the calls of a list, at which calls are looked for after one without a valid head.
    resumes: ClassVar[tuple[str, ...]] = ()

    @property
    def tags(self) -> tuple[str, ...]:
        """The triggers in brackets, which are no words of an answer."""
        return tuple(trigger for trigger in self.triggers if trigger.startswith(("<", "[")))

    def begins(self, source: Source, tools: Sequence[Tool]) -> Parsing[bool]:
        """Take a tag and the head of a call, and return whether both come next."""
        tag = yield from source.one_of(self.tags)
        return bool(tag) and (yield from self._head(source, tools, tag)) is not None

    def parse(self, source: Source, tools: Sequence[Tool]) -> Parsing[None]:
        """Yield the events of an answer."""
        missing = (yield from self._calls(source, tools, "")) if self.first else None
        listed = missing is not None and (yield from source.look(_continues(source)))  # inside of a list of calls
        while True:
            ends = missing or ()
            resumes = self.resumes if listed else ()
            marks = self.triggers + ends + resumes
            text, mark, done = yield from source.piece(marks, markup=True, signs=not missing)
            yield TextDelta(text)
            if mark in ends:
                missing, listed = ends[ends.index(mark) + 1 :], False
            elif mark:
                missing = yield from self._calls(source, tools, mark)
                if missing is None:
                    yield TextDelta(mark)
                    missing, listed = ends, listed or mark in self.tags
                else:
                    listed = bool(missing) or (yield from source.look(_continues(source)))
            elif done:
                return

    def _calls(self, source: Source, tools: Sequence[Tool], trigger: str) -> Parsing[tuple[str, ...] | None]:
        """Yield the events of calls and return the ends that they lack, or take nothing and return None.

        A call that breaks off before its arguments, with the answer, is left out if its trigger is in brackets.
        """
        source.exhausted = False
        parse = self.resumed_head if trigger in self.resumes else self._head
        head = yield from source.attempt(parse(source, tools, trigger))
        if head is None and source.exhausted and trigger in self.tags and not source.has((trigger,)):
            source.take(source.ahead)
            return ()
        if head is None:
            return None
        yield from self.body(source, tools, head)
        missing = self.ends
        while (end := (yield from source.attempt(self._end(source)))) is not None:
            missing = missing[missing.index(end) + 1 :] if end in missing else missing
        return missing

    def _head(self, source: Source, tools: Sequence[Tool], trigger: str) -> Parsing[Head | None]:
        """Take the head of the first call after a trigger. A tag may have been written twice."""
        if trigger in self.tags:
            yield from source.attempt(source.spaced(trigger))
        return (yield from self.head(source, tools, trigger))

    def _end(self, source: Source) -> Parsing[str | None]:
        """Take white space and one of the ends, None if none comes next."""
        yield from source.space()
        return (yield from source.one_of(self.ends)) or None

    @abstractmethod
    def head(self, source: Source, tools: Sequence[Tool], trigger: str) -> Parsing[Head | None]:
        """Take the head of the first call after a trigger that has been taken, None if it is not valid.

        `trigger` is "" at the beginning of an answer.
        """

    def resumed_head(self, source: Source, tools: Sequence[Tool], before: str) -> Parsing[Head | None]:
        """Take the head of a call of a tool after one of `resumes`, which has been taken, None if none comes next."""
        return (yield from self.head(source, tools, before))

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


def _continues(source: Source) -> Parsing[bool]:
    """Take white space, and return whether a list of calls goes on after it."""
    yield from source.space()
    return (yield from source.peek()) in (",", ";")


def call_in_json(name: str, arguments_key: str = "arguments") -> str:
    """Return the beginning of a call as a JSON object, up to its arguments."""
    return f'{{"name": {json.dumps(name)}, "{arguments_key}": '


def writable_parameters(tool: Tool, run: re.Pattern[str]) -> list[Parameter]:
    """Return the parameters of a tool whose names can be written without quotes: those that `run` matches.

    Others are left out of a grammar's calls. Raise `RequestError` if a strict tool has one.
    """
    parameters = parameters_of(tool).values()
    name = next((each.name for each in parameters if not run.fullmatch(each.name)), None)
    if name is not None and tool.strict:
        message = f"{tool.place}: the model cannot be made to write the parameter {name!r} of {tool.name!r}: rename it"
        raise RequestError(message, field=tool.place, value=name)
    return [each for each in parameters if run.fullmatch(each.name)]


def names_of(tools: Sequence[Tool]) -> frozenset[str]:
    """Return the names of the tools."""
    return frozenset(tool.name for tool in tools)
