"""Calls as tags with one parameter in each: Qwen3-Coder, GLM 4.5, MiniMax M2, Seed-OSS."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from jaxserve.parsing.events import CallBegun
from jaxserve.parsing.formats.base import NAME_RUN, ToolFormat, names_of, writable_parameters
from jaxserve.parsing.formats.tagged_values import KEY_RUN, NULLABLE_STRING, TaggedArguments, Tags, json_of
from jaxserve.parsing.json_text import Head
from jaxserve.parsing.lark import one_of
from jaxserve.parsing.schemas import (
    COMBINATIONS,
    OF_OBJECTS,
    Parameter,
    json_rule,
    listed_values,
    object_schema,
    refuse,
    types_of,
)
from jaxserve.parsing.source import Parsing, Source
from jaxserve.parsing.tools import Tool

MAX_LEAST = 1000  # characters; llguidance refuses to count to many more, which is an error for strict tools only


class XmlCalls(ToolFormat):
    """A tag, the name of a tool, for each parameter its name and its value, and end tags.

    Values become JSON by the schema of the tool. Those that can only be strings are sent as they come. Others are sent
    when they are complete: as they are if they are literals of JSON or Python, as strings otherwise.
    """

    close: ClassVar[str]  # the end of calls, of which there may be several after one trigger
    end: ClassVar[str]  # the end of one call, "" if there is only that of all
    name_tags: ClassVar[tuple[str, str]]  # the text before and after the name of a tool
    key_tags: ClassVar[tuple[str, str]]  # the text before and after the name of a parameter
    value_tags: ClassVar[tuple[str, str]]  # the text before and after its value
    between: ClassVar[str] = "\n"  # white space between tags that models write
    several: ClassVar[bool] = False  # whether calls follow each other before the end of all
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
            while (yield from source.attempt(self._same_head(source, following.name))):
                pass
            tool = next((tool for tool in tools if tool.name == following.name), None)
            types = types_of(tool) if tool else {}
            yield CallBegun(following.name)
            yield from TaggedArguments(source, self._tags, types, lambda: self._begins_call(source, tools)).read()
            following = (yield from source.attempt(self._following(source, tools))) if self.several else None

    def _following(self, source: Source, tools: Sequence[Tool]) -> Parsing[Head | None]:
        """Take the end of a call and the head of one that follows without a trigger."""
        yield from source.attempt(source.spaced(self.end))
        return (yield from self.head(source, tools, ""))

    @property
    def _tags(self) -> Tags:
        openings = dict.fromkeys(filter(None, (*self.triggers, self.name_tags[0])))
        return Tags(self.key_tags, self.value_tags, self.ends, tuple(openings), self.around)

    def _begins_call(self, source: Source, tools: Sequence[Tool]) -> Parsing[bool | None]:
        """Take the head of a call of a tool, None if none comes next."""
        tags = self._tags
        opening = yield from source.one_of(tags.openings)
        head = (yield from self.head(source, tools, opening)) if opening else None
        if head is None or head.name not in names_of(tools):
            return None
        yield from source.space()
        return bool((yield from source.one_of((tags.key[0], *tags.ends)))) or None

    def _same_head(self, source: Source, name: str) -> Parsing[bool | None]:
        before, after = self.name_tags
        return (yield from source.spaced(f"{before}{name}{after}")) if before else None

    def before(self, name: str) -> str:
        opening = "" if self.triggers[0] == self.name_tags[0] else self.triggers[0]
        gap = self.between if self.name_tags[0] else ""
        return f"{opening}{gap}{self.name_tags[0]}{name}{self.name_tags[1]}{self.between}"

    def after(self) -> str:
        return f"{self.end}{self.between}{self.close}" if self.end else self.close

    def arguments(self, tool: Tool, rule: str) -> Iterator[str]:
        """Yield a rule for the parameters in the order of the schema."""
        refuse(object_schema(tool), OF_OBJECTS + COMBINATIONS, tool)
        parameters = writable_parameters(tool, KEY_RUN)
        names = [f"{rule}_{i}" + ("" if parameter.required else "?") for i, parameter in enumerate(parameters)]
        yield f"{rule}: " + (" ".join(names) or '""')
        for i, parameter in enumerate(parameters):
            key = parameter.name.join(self.key_tags)
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
        texts = dict.fromkeys(_choices(parameter))
        choices = [f"{one_of(texts)} {end}"] if texts else []
        yield f"{rule}: " + " | ".join(choices + [f"{rule}_{i}" for i in range(len(free))])
        tags = "|".join(tag.replace("/", r"\/") for tag in (self.value_tags[1], self.key_tags[0], *self.ends))
        for i, schema in enumerate(free):
            terminal = f"{rule}_{i}".upper()
            limits = " & ".join(_limits(schema, tool))
            yield rf"{terminal}: {limits} & ~/(.|\n)*({tags})(.|\n)*/"
            yield f"{rule}_{i}[lazy]: {terminal} {end}"


class Qwen3Coder(XmlCalls):
    """<tool_call><function=f><parameter=a>x</parameter></function></tool_call>, with line breaks between all."""

    name = "qwen3_coder"
    markers = ("<tool_call>", "</tool_call>")
    triggers = ("<tool_call>", "<function=")  # the first is left out at times
    close, end = "</tool_call>", "</function>"
    ends = (end, close)
    name_tags, key_tags, value_tags = ("<function=", ">"), ("<parameter=", ">"), ("", "</parameter>")
    separator = around = "\n"


class Glm45(XmlCalls):
    """<tool_call>f<arg_key>a</arg_key><arg_value>x</arg_value></tool_call>."""

    name = "glm45"
    markers = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    triggers = ("<tool_call>",)
    close, end = "</tool_call>", ""
    ends = (close,)
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
    triggers = ("<minimax:tool_call>", '<invoke name="')
    several = True
    close, end = "</minimax:tool_call>", "</invoke>"
    ends = (end, close)
    name_tags, key_tags, value_tags = ('<invoke name="', '">'), ('<parameter name="', '">'), ("", "</parameter>")
    separator = "\n"


class SeedOss(XmlCalls):
    """<seed:tool_call><function=f><parameter=a>x</parameter></function></seed:tool_call>."""

    name = "seed_oss"
    markers = ("<seed:tool_call>", "</seed:tool_call>")
    triggers = ("<seed:tool_call>", "<function=")
    several = True
    close, end = "</seed:tool_call>", "</function>"
    ends = (end, close)
    name_tags, key_tags, value_tags = ("<function=", ">"), ("<parameter=", ">"), ("", "</parameter>")
    separator = "\n"


def _choices(parameter: Parameter) -> list[str]:
    """Return the texts of the values that a schema lists, and of null if it allows that."""
    values = [value for schema in parameter.alternatives for value in listed_values(schema)]
    return [_text_of(value, parameter.types) for value in values] + ["null"] * ("null" in parameter.types)


def _text_of(value: Any, types: frozenset[str]) -> str:
    """Return the text of a value that is read as this value: strings as they are, unless they say something else."""
    if isinstance(value, str) and json.loads(json_of(value, types) or "null") == value:
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
