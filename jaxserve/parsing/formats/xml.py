"""Calls as tags with one parameter in each: Qwen3-Coder, GLM 4.5, MiniMax M2, Seed-OSS."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from jaxserve.parsing.events import ArgumentsDelta, CallBegun
from jaxserve.parsing.formats.base import NAME_RUN, ToolFormat, names_of, writable
from jaxserve.parsing.json_text import Head
from jaxserve.parsing.python_text import to_json
from jaxserve.parsing.schemas import (
    COMBINATIONS,
    OF_OBJECTS,
    Parameter,
    json_rule,
    listed_values,
    object_schema,
    parameters_of,
    refuse,
    type_name,
)
from jaxserve.parsing.source import Parsing, Source
from jaxserve.parsing.tools import Tool

STRING, NULLABLE_STRING = frozenset({"string"}), frozenset({"string", "null"})
MAX_LEAST = 1000  # characters; llguidance refuses to count to many more, which is an error for strict tools only
KEY_RUN = re.compile(r'[^<>"\n]+')


class XmlCalls(ToolFormat):
    """A tag, the name of a tool, for each parameter its name and its value, and end tags.

    Values become JSON by the schema of the tool. Those that can only be strings are sent as they come. Others are sent
    when they are complete: as they are if they are literals of JSON or Python, as strings otherwise.
    """

    close: ClassVar[str]  # the end of calls, of which there may be several after one trigger
    name_tags: ClassVar[tuple[str, str]]  # the text before and after the name of a tool
    key_tags: ClassVar[tuple[str, str]]  # the text before and after the name of a parameter
    value_tags: ClassVar[tuple[str, str]]  # the text before and after its value
    end: ClassVar[str]  # the end of one call, "" if there is only that of all
    between: ClassVar[str] = "\n"  # white space between tags that models write
    around: ClassVar[str] = ""  # white space at the edges of a value that is not part of it

    def head(self, source: Source, tools: Sequence[Tool], trigger: str) -> Parsing[Head | None]:
        yield from source.space()
        if trigger != self.name_tags[0] and not (yield from source.literal(self.name_tags[0])):
            return None
        name = yield from source.run(NAME_RUN)
        if not name or not (yield from source.literal(self.name_tags[1])):
            return None
        if not self.end:  # only what follows shows that this is a call
            yield from source.space()
            ends = (yield from source.comes(self.key_tags[0])) or (yield from source.comes(self.close))
            return Head(name) if ends else None
        # Without the tag before it, text about calls would be one.
        return Head(name) if trigger != self.name_tags[0] or name in names_of(tools) else None

    def body(self, source: Source, tools: Sequence[Tool], head: Head) -> Parsing[None]:
        following: Head | None = head
        while following is not None:
            tool = next((tool for tool in tools if tool.name == following.name), None)
            yield CallBegun(following.name)
            yield from self._arguments(source, parameters_of(tool) if tool else {})
            inner = self.end and self.name_tags[0] not in self.triggers  # the end may be that of several calls
            following = (yield from source.attempt(self.head(source, tools, ""))) if inner else None
        if self.end:
            yield from source.attempt(source.spaced(self.close))

    def _arguments(self, source: Source, parameters: Mapping[str, Parameter]) -> Parsing[None]:
        """Yield the arguments of a call, and take its end."""
        separator = ""
        yield ArgumentsDelta("{")
        while (key := (yield from source.attempt(self._key(source)))) is not None:
            yield ArgumentsDelta(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
            separator = ", "
            parameter = parameters.get(key)
            types = parameter.types if parameter else frozenset()
            yield from self._string(source) if types == STRING else self._other(source, types)
        if (yield from source.attempt(self._end_of_call(source))):
            yield ArgumentsDelta("}")

    def _key(self, source: Source) -> Parsing[str | None]:
        """Take the name of a parameter and the tags around it, up to its value."""
        if (yield from source.spaced(self.key_tags[0])) is None:
            return None
        key = yield from source.run(KEY_RUN)
        if not key or not (yield from source.literal(self.key_tags[1])):
            return None
        if self.value_tags[0] and (yield from source.spaced(self.value_tags[0])) is None:
            return None
        if self.around:
            yield from source.literal(self.around)
        return key

    def _string(self, source: Source) -> Parsing[None]:
        """Yield a value that is a string as it arrives."""
        yield ArgumentsDelta('"')
        done = False
        while not done:
            text, end, done = yield from source.piece(self._ends)
            yield ArgumentsDelta(json.dumps(text, ensure_ascii=False)[1:-1])
        if end:
            yield ArgumentsDelta('"')

    def _other(self, source: Source, types: frozenset[str]) -> Parsing[None]:
        """Yield a value of one of the types, or of any, when it is complete."""
        texts, done = [], False
        while not done:
            text, end, done = yield from source.piece(self._ends)
            texts.append(text)
        text = "".join(texts)
        yield ArgumentsDelta(_json_of(text, types) if end else text)

    def _end_of_call(self, source: Source) -> Parsing[bool | None]:
        yield from source.space()
        if self.end and (yield from source.literal(self.end)):
            return True
        return (yield from source.comes(self.close) if self.end else source.literal(self.close)) or None

    @property
    def _ends(self) -> tuple[str, ...]:
        end = self.value_tags[1]
        return (self.around + end, end) if self.around else (end,)

    def before(self, name: str) -> str:
        opening = "" if self.triggers[0] == self.name_tags[0] else self.triggers[0]
        gap = self.between if self.name_tags[0] else ""
        return f"{opening}{gap}{self.name_tags[0]}{name}{self.name_tags[1]}{self.between}"

    def after(self) -> str:
        return f"{self.end}{self.between}{self.close}" if self.end else self.close

    def arguments(self, tool: Tool, rule: str) -> Iterator[str]:
        """Yield a rule for the parameters in the order of the schema."""
        refuse(object_schema(tool), OF_OBJECTS + COMBINATIONS, tool)
        parameters = list(parameters_of(tool).values())
        names = [f"{rule}_{i}" + ("" if parameter.required else "?") for i, parameter in enumerate(parameters)]
        yield f"{rule}: " + (" ".join(names) or '""')
        for i, parameter in enumerate(parameters):
            key = writable(parameter.name, KEY_RUN, tool).join(self.key_tags)
            before = key + (self.between + self.value_tags[0] if self.value_tags[0] else "") + self.around
            yield f"{rule}_{i}: {json.dumps(before)} {rule}_{i}_value {json.dumps(self.between)}"
            yield from self._value_rules(parameter, tool, f"{rule}_{i}_value")

    def _value_rules(self, parameter: Parameter, tool: Tool, rule: str) -> Iterator[str]:
        """Yield a rule for a value and the tag at its end. Strings stand there as they are."""
        end = json.dumps(self.around + self.value_tags[1])
        free = [
            schema for schema in parameter.alternatives if not listed_values(schema) and schema.get("type") != "null"
        ]
        if free and ("string" not in parameter.types or not parameter.types <= NULLABLE_STRING):
            yield f"{rule}: {json_rule(parameter.schema, tool.strict)} {end}"
            return
        texts = dict.fromkeys(map(json.dumps, _choices(parameter)))
        choices = [f"({' | '.join(texts)}) {end}"] if texts else []
        yield f"{rule}: " + " | ".join(choices + [f"{rule}_{i}" for i in range(len(free))])
        tag = self.value_tags[1].replace("/", r"\/")
        for i, schema in enumerate(free):
            terminal = f"{rule}_{i}".upper()
            limits = " & ".join(_limits(schema, tool))
            yield rf"{terminal}: {limits} & ~/(.|\n)*{tag}(.|\n)*/"
            yield f"{rule}_{i}[lazy]: {terminal} {end}"


class Qwen3Coder(XmlCalls):
    """<tool_call><function=f><parameter=a>x</parameter></function></tool_call>, with line breaks between all."""

    name = "qwen3_coder"
    markers = ("<tool_call>", "</tool_call>")
    triggers = ("<tool_call>", "<function=")  # the first is left out at times
    close, end = "</tool_call>", "</function>"
    name_tags, key_tags, value_tags = ("<function=", ">"), ("<parameter=", ">"), ("", "</parameter>")
    separator = around = "\n"


class Glm45(XmlCalls):
    """<tool_call>f<arg_key>a</arg_key><arg_value>x</arg_value></tool_call>."""

    name = "glm45"
    markers = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    triggers = ("<tool_call>",)
    close, end = "</tool_call>", ""
    name_tags, key_tags, value_tags = ("", ""), ("<arg_key>", "</arg_key>"), ("<arg_value>", "</arg_value>")
    separator = "\n"


class Glm47(Glm45):
    """The format of GLM 4.5 without line breaks."""

    name = "glm47"
    separator = between = ""


class MiniMaxM2(XmlCalls):
    """<minimax:tool_call><invoke name="f"><parameter name="a">x</parameter></invoke></minimax:tool_call>."""

    name = "minimax_m2"
    markers = ("<minimax:tool_call>", "</minimax:tool_call>")
    triggers = ("<minimax:tool_call>",)
    close, end = "</minimax:tool_call>", "</invoke>"
    name_tags, key_tags, value_tags = ('<invoke name="', '">'), ('<parameter name="', '">'), ("", "</parameter>")
    separator = "\n"


class SeedOss(XmlCalls):
    """<seed:tool_call><function=f><parameter=a>x</parameter></function></seed:tool_call>."""

    name = "seed_oss"
    markers = ("<seed:tool_call>", "</seed:tool_call>")
    triggers = ("<seed:tool_call>",)
    close, end = "</seed:tool_call>", "</function>"
    name_tags, key_tags, value_tags = ("<function=", ">"), ("<parameter=", ">"), ("", "</parameter>")
    separator = "\n"


def _json_of(text: str, types: frozenset[str]) -> str:
    """Return what a value says as JSON. `types`: those that it may have, none if any."""
    value = to_json(text.strip())
    if value is not None and "string" in types:
        kind = type_name(json.loads(value))
        allowed = kind in types or (kind == "integer" and "number" in types)
        if not allowed or (kind == "string" and types <= NULLABLE_STRING):
            value = None
    return json.dumps(text, ensure_ascii=False) if value is None else value


def _choices(parameter: Parameter) -> list[str]:
    """Return the texts of the values that a schema lists, and of null if it allows that."""
    values = [value for schema in parameter.alternatives for value in listed_values(schema)]
    return [_text_of(value, parameter.types) for value in values] + ["null"] * ("null" in parameter.types)


def _text_of(value: Any, types: frozenset[str]) -> str:
    """Return the text of a value that is read as this value: strings as they are, unless they say something else."""
    if isinstance(value, str) and json.loads(_json_of(value, types)) == value:
        return value
    return json.dumps(value, ensure_ascii=False)


def _limits(schema: Mapping[str, Any], tool: Tool) -> Iterator[str]:
    """Yield regular expressions, all of which a string must match."""
    refuse(schema, ("format", *COMBINATIONS), tool)
    least = schema.get("minLength", 0)
    if not tool.strict and isinstance(least, int):
        least = min(least, MAX_LEAST)
    yield rf"/(.|\n){{{least},{schema.get('maxLength', '')}}}/"
    if "pattern" in schema:
        yield f"/{_whole(str(schema['pattern']))}/"


def _whole(pattern: str) -> str:
    """Return an expression of Lark for texts in which a pattern is found."""
    begin = "" if pattern.startswith("^") else r"(.|\n)*"
    end = "" if re.search(r"(?<!\\)(\\\\)*\$$", pattern) else r"(.|\n)*"
    inner = pattern.removeprefix("^")
    inner = inner if end else inner.removesuffix("$")
    inner = re.sub(r"\\.|/|\n", lambda found: {"/": r"\/", "\n": r"\n"}.get(found.group(), found.group()), inner)
    return f"{begin}({inner}){end}"
