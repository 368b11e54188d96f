"""The calls of Mistral's models."""

import secrets
import string
from collections.abc import Sequence
from dataclasses import dataclass

from jaxserve.parsing.events import CallBegun
from jaxserve.parsing.formats.base import NAME_RUN, ToolFormat
from jaxserve.parsing.formats.json_list import JsonList
from jaxserve.parsing.json_arguments import arguments
from jaxserve.parsing.json_text import Head
from jaxserve.parsing.source import Parsing, Source
from jaxserve.parsing.tools import Tool

OPEN, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


@dataclass(frozen=True)
class NamedHead(Head):
    """The head of a call outside of a list."""


class Mistral(JsonList):
    """[TOOL_CALLS][{"name": "f", "arguments": {...}}, ...], or [TOOL_CALLS]f[ARGS]{...}.

    The newer form is that of version 11 of the tokenizer and later. There the marker comes before each call, [CALL_ID]
    and an id may follow the name, and [ARGS] may be missing. Calls of both forms are understood, whichever the model is
    expected to write.
    """

    name = "mistral"
    markers = (OPEN, CALL_ID, ARGS)
    triggers = (OPEN,)
    opening = f"{OPEN}["
    closing = "]"

    def head(self, source: Source, tools: Sequence[Tool], trigger: str) -> Parsing[Head | None]:
        head = yield from source.attempt(super().head(source, tools, trigger))
        return head if head is not None else (yield from _named_head(source))

    def body(self, source: Source, tools: Sequence[Tool], head: Head) -> Parsing[None]:
        if isinstance(head, NamedHead):
            yield CallBegun(head.name)
            yield from arguments(source, OPEN)
            while (yield from source.attempt(source.spaced("}"))):
                pass
        else:
            yield from super().body(source, tools, head)

    def for_template(self, template: str) -> ToolFormat:
        if ARGS in template:
            return NewerMistral()
        return SpacedMistral() if SpacedMistral.opening in template else self

    def new_call_id(self, name: str = "", index: int = 0) -> str:
        """Return nine letters and digits: the chat templates accept nothing else."""
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


class SpacedMistral(Mistral):
    """The format of models that write white space after the marker."""

    opening = f"{OPEN} ["


class NewerMistral(Mistral):
    """The format of models that write [TOOL_CALLS]f[ARGS]{...}."""

    opening = separator = closing = ""

    def before(self, name: str) -> str:
        return f"{OPEN}{name}{ARGS}"

    def after(self) -> str:
        return ""


def _named_head(source: Source) -> Parsing[Head | None]:
    """Take the name of a tool and what comes between it and the arguments."""
    yield from source.space()
    name = yield from source.run(NAME_RUN)
    yield from source.space()
    if (yield from source.literal(CALL_ID)):
        yield from source.run(NAME_RUN)
    yield from source.literal(ARGS)
    yield from source.space()
    return NamedHead(name) if name and (yield from source.comes("{")) else None
