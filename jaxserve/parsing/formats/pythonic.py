"""Calls as Python writes them: Llama 3.2 and 4, Olmo 3."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from jaxserve.parsing.events import CallBegun
from jaxserve.parsing.formats.base import NAME_RUN, ToolFormat, names_of, writable_parameters
from jaxserve.parsing.formats.keyword_arguments import KeywordArguments, keyword_before
from jaxserve.parsing.json_text import Head
from jaxserve.parsing.schemas import (
    COMBINATIONS,
    OF_OBJECTS,
    json_rule,
    object_schema,
    refuse,
    types_of,
)
from jaxserve.parsing.source import Parsing, Source
from jaxserve.parsing.tools import Tool


@dataclass(frozen=True)
class PythonHead(Head):
    """The head of a call up to the value of its first keyword, "" if it has none and is complete."""

    keyword: str = ""


class Pythonic(ToolFormat):
    """[f(a=1, b="x"), g()] at the beginning of an answer.

    Values are literals of Python or JSON. Only calls of tools are calls; without keywords, as in f(1), they are not.
    The arguments are sent keyword by keyword. A value that is no literal is sent as a string (`KeywordArguments`).
    """

    name = "pythonic"
    first = "["
    opening, separator, closing = "[", ", ", "]"
    resumes: ClassVar[tuple[str, ...]] = (",",)
    end: ClassVar[str] = "]"  # what may come after the last call

    def head(self, source: Source, tools: Sequence[Tool], trigger: str) -> Parsing[Head | None]:
        if (yield from source.spaced("[")) is None:
            return None
        return (yield from _call(source, tools))

    def resumed_head(self, source: Source, tools: Sequence[Tool], before: str) -> Parsing[Head | None]:
        return (yield from _call(source, tools))

    def body(self, source: Source, tools: Sequence[Tool], head: Head) -> Parsing[None]:
        following: Head | None = head
        while isinstance(following, PythonHead):
            name = following.name
            types = types_of(next(tool for tool in tools if tool.name == name))
            yield CallBegun(name)
            tags = (*self.ends, *self.triggers)
            reader = KeywordArguments(source, types, names_of(tools), lambda: _call(source, tools), tags)
            if not (yield from reader.read(following.keyword)):
                return
            while (yield from source.attempt(source.spaced(")"))):
                pass  # one too many
            following = yield from source.attempt(_following(source, tools))
        yield from source.cut(_following(source, tools))
        while self.end and (yield from source.attempt(source.spaced(self.end))):
            pass

    def before(self, name: str) -> str:
        return f"{name}("

    def after(self) -> str:
        return ")"

    def arguments(self, tool: Tool, rule: str) -> Iterator[str]:
        """Yield a rule for keywords with JSON values, those that are required first and all others optional."""
        refuse(object_schema(tool), OF_OBJECTS + COMBINATIONS, tool)
        parameters = writable_parameters(tool, NAME_RUN)
        required = [f"{rule}_{i}" for i, parameter in enumerate(parameters) if parameter.required]
        optional = [f"{rule}_{i}" for i, parameter in enumerate(parameters) if not parameter.required]
        if required:
            yield f"{rule}: " + ' ", " '.join(required) + "".join(f' (", " {each})?' for each in optional)
        else:
            firsts = [f"{each} {rule}_after_{i + 1}" for i, each in enumerate(optional)]
            yield f"{rule}: " + " | ".join(['""', *firsts])
            for i in range(1, len(optional) + 1):
                yield f"{rule}_after_{i}: " + (" ".join(f'(", " {each})?' for each in optional[i:]) or '""')
        for i, parameter in enumerate(parameters):
            keyword = json.dumps(parameter.name + "=")
            yield f"{rule}_{i}: {keyword} {json_rule(parameter.schema, tool.strict)}"


class Llama4Pythonic(Pythonic):
    """The pythonic format, and anywhere in an answer between <|python_start|> and <|python_end|>."""

    name = "llama4_pythonic"
    markers = ("<|python_start|>", "<|python_end|>")
    triggers = ("<|python_start|>",)
    ends = ("<|python_end|>",)


class Olmo3(Pythonic):
    """<function_calls>, calls as Python writes them, each on a line of its own, and </function_calls>."""

    name = "olmo3"
    markers = ("<function_calls>", "</function_calls>")
    triggers = ("<function_calls>",)
    first = end = ""
    ends = ("</function_calls>",)
    resumes = ("\n", ",")
    opening, separator, closing = "<function_calls>\n", "\n", "\n</function_calls>"

    def head(self, source: Source, tools: Sequence[Tool], trigger: str) -> Parsing[Head | None]:
        return (yield from _call(source, tools))


def _call(source: Source, tools: Sequence[Tool]) -> Parsing[Head | None]:
    """Take a call of a tool up to the value of its first keyword."""
    yield from source.space()
    name = yield from source.run(NAME_RUN)
    if name not in names_of(tools) or not (yield from source.literal("(")):
        return None
    if (yield from source.attempt(source.spaced(")"))):
        return PythonHead(name, "{}")
    keyword = yield from keyword_before(source)
    return None if keyword is None else PythonHead(name, keyword=keyword)


def _following(source: Source, tools: Sequence[Tool]) -> Parsing[Head | None]:
    """Take a comma, which may be missing or in another place, and the beginning of the call after it."""
    yield from source.attempt(source.spaced(","))
    return (yield from _call(source, tools))
