"""Calls as Python writes them: Llama 3.2 and 4, Olmo 3."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from jaxserve.parsing.events import ArgumentsDelta, CallBegun
from jaxserve.parsing.formats.base import NAME_RUN, ToolFormat, names_of, writable
from jaxserve.parsing.json_text import Head
from jaxserve.parsing.python_text import to_json
from jaxserve.parsing.schemas import COMBINATIONS, OF_OBJECTS, json_rule, object_schema, parameters_of, refuse
from jaxserve.parsing.source import Parsing, Source
from jaxserve.parsing.tools import Tool

OUTSIDE_RUN = re.compile(r"""[^\[\](){}"',]+""")


@dataclass(frozen=True)
class PythonHead(Head):
    """The head of a call up to the value of its first keyword, "" if it has none and is complete."""

    keyword: str = ""


class Pythonic(ToolFormat):
    """[f(a=1, b="x"), g()] at the beginning of an answer.

    Values are literals of Python or JSON. Only calls of tools are calls; without keywords, as in f(1), they are not.
    The arguments are sent keyword by keyword. A value that is no literal is sent as a string.
    """

    name = "pythonic"
    first = "["
    opening, separator, closing = "[", ", ", "]"
    comma: ClassVar[str] = ","  # what the parser wants between two calls, besides white space
    end: ClassVar[str] = "]"  # what may come after the last call
    close: ClassVar[str] = ""  # what may come after this

    def head(self, source: Source, tools: Sequence[Tool], trigger: str) -> Parsing[Head | None]:
        return (yield from _call(source, tools, "["))

    def body(self, source: Source, tools: Sequence[Tool], head: Head) -> Parsing[None]:
        following: Head | None = head
        while isinstance(following, PythonHead):
            yield CallBegun(following.name)
            if not (yield from _arguments(source, following.keyword)):
                return
            following = yield from source.attempt(_call(source, tools, self.comma))
        yield from source.attempt(source.spaced(self.end))
        if self.close:
            yield from source.attempt(source.spaced(self.close))

    def before(self, name: str) -> str:
        return f"{name}("

    def after(self) -> str:
        return ")"

    def arguments(self, tool: Tool, rule: str) -> Iterator[str]:
        """Yield a rule for keywords with JSON values, those that are required first and all others optional."""
        refuse(object_schema(tool), OF_OBJECTS + COMBINATIONS, tool)
        parameters = list(parameters_of(tool).values())
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
            keyword = json.dumps(writable(parameter.name, NAME_RUN, tool) + "=")
            yield f"{rule}_{i}: {keyword} {json_rule(parameter.schema, tool.strict)}"


class Llama4Pythonic(Pythonic):
    """The pythonic format, and anywhere in an answer between <|python_start|> and <|python_end|>."""

    name = "llama4_pythonic"
    markers = ("<|python_start|>", "<|python_end|>")
    triggers = ("<|python_start|>",)
    close = "<|python_end|>"


class Olmo3(Pythonic):
    """<function_calls>, calls as Python writes them, each on a line of its own, and </function_calls>."""

    name = "olmo3"
    markers = ("<function_calls>", "</function_calls>")
    triggers = ("<function_calls>",)
    first = comma = ""
    end = "</function_calls>"
    opening, separator, closing = "<function_calls>\n", "\n", "\n</function_calls>"

    def head(self, source: Source, tools: Sequence[Tool], trigger: str) -> Parsing[Head | None]:
        return (yield from _call(source, tools, ""))


def _call(source: Source, tools: Sequence[Tool], before: str) -> Parsing[Head | None]:
    """Take `before` and a call of a tool up to the value of its first keyword."""
    if (yield from source.spaced(before)) is None:
        return None
    yield from source.space()
    name = yield from source.run(NAME_RUN)
    if name not in names_of(tools) or not (yield from source.literal("(")):
        return None
    if (yield from source.attempt(source.spaced(")"))):
        return PythonHead(name)
    keyword = yield from _keyword(source)
    return None if keyword is None else PythonHead(name, keyword=keyword)


def _keyword(source: Source) -> Parsing[str | None]:
    """Take a keyword and the equals sign."""
    yield from source.space()
    keyword = yield from source.run(NAME_RUN)
    yield from source.space()
    return keyword if keyword and (yield from source.literal("=")) else None


def _arguments(source: Source, first: str) -> Parsing[bool]:
    """Yield the arguments of a call, and return whether they are complete."""
    keyword: str | None = first
    yield ArgumentsDelta("{")
    while keyword:
        yield ArgumentsDelta(f"{json.dumps(keyword, ensure_ascii=False)}: ")
        text = yield from _value(source)
        end = yield from source.peek()
        if not end:
            yield ArgumentsDelta(text)
            return False
        yield ArgumentsDelta(to_json(text.strip()) or json.dumps(text.strip(), ensure_ascii=False))
        if end == ",":
            source.take(1)
        if (yield from source.attempt(source.spaced(")"))):
            break
        if end != ",":
            return False
        keyword = yield from source.attempt(_keyword(source))
        if keyword is None:
            return False
        yield ArgumentsDelta(", ")
    yield ArgumentsDelta("}")
    return True


def _value(source: Source) -> Parsing[str]:
    """Take the text of a value, up to a comma or bracket that is not part of it or the end of the answer."""
    taken: list[str] = []
    depth = 0
    while True:
        taken.append((yield from source.run(OUTSIDE_RUN)))
        character = yield from source.peek()
        if not character or (depth == 0 and character in ",)]}"):
            return "".join(taken)
        if character in "\"'":
            taken.append((yield from _string(source, character)))
            continue
        depth += (character in "([{") - (character in ")]}")
        taken.append(source.take(1))


def _string(source: Source, quote: str) -> Parsing[str]:
    """Take a string with its quotes, of which there may be three."""
    three = yield from source.literal(quote * 3)
    end = quote * 3 if three else quote
    taken = [end if three else source.take(1)]
    while True:
        text, found, done = yield from source.piece(("\\", end))
        taken += [text, found]
        if found == "\\":
            yield from source.peek()
            taken.append(source.take(1))
        elif done:
            return "".join(taken)
