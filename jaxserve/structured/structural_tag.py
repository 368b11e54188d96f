"""Structural tags: trees of formats that mix free text with structured parts, as grammars for llguidance.

The formats are those that vLLM and SGLang take (xgrammar's), and their older form with `structures` and `triggers`.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from llguidance import grammar_from, regex_to_lark

from jaxserve.parsing.lark import literal, one_of
from jaxserve.structured.errors import grammar_error, schema_error
from jaxserve.structured.schemas import guidance_schema

MAX_REPEAT = 10_000
CONSTANT = {"type", "value"}  # the fields of a const_string
UNLIMITED = ("any_text", "triggered_tags")  # formats that end where the text after them begins


class StructuralTagError(ValueError):
    """Raised for a structural tag that is not valid. `place`: the path of the part at fault, as in "format.tags.0"."""

    def __init__(self, place: str, message: str):
        super().__init__(f"{place}: {message}")


def structural_tag_grammar(given: Any, special: Mapping[str, int], strict: bool) -> str:
    """Return the grammar of a structural tag for llguidance.

    `special`: the ids of the tokenizer's special tokens by text. Raise StructuralTagError if it is not valid, or if it
    is meant `strict`ly and one of its JSON schemas cannot be held.
    """
    given = _object(given, "structural_tag")
    if "structures" in given:
        tree, place = _from_old_form(given), "structural_tag"
    else:
        tree, place = dict(_object(given.get("format"), "format")), "format"
    writer = _Writer(special, strict)
    start = writer.expression(tree, (), place)
    lark = "\n".join(["%llguidance {}", f"start: {start}", *writer.rules]) + "\n"
    if not writer.grammars:
        return lark
    return json.dumps({"grammars": [{"lark_grammar": lark}, *writer.grammars]})


def _from_old_form(given: Mapping[str, Any]) -> dict[str, Any]:
    tags = [
        {
            "type": "tag",
            "begin": tag.get("begin"),
            "content": {"type": "json_schema", "json_schema": tag.get("schema")},
            "end": tag.get("end"),
        }
        for tag in (_object(each, f"structures.{i}") for i, each in enumerate(_list(given["structures"], "structures")))
    ]
    return {"type": "triggered_tags", "triggers": given.get("triggers"), "tags": tags}


class _Writer:
    """A writer of rules. Each method returns an expression of Lark for a format and one of the texts `ends` after it.

    Formats of free text end with the first of `ends`, others before it.
    """

    def __init__(self, special: Mapping[str, int], strict: bool):
        self._special, self._strict = special, strict
        self.rules = [r"TEXT: /(.|\n)*/"]
        self.grammars: list[dict[str, str]] = []
        self._count = 0

    def expression(self, given: Any, ends: Sequence[str], place: str) -> str:
        form = _object(given, place)
        kind = form.get("type")
        write = getattr(self, f"_write_{kind}", None) if isinstance(kind, str) and kind in FORMATS else None
        if write is None:
            raise StructuralTagError(f"{place}.type", f"{str(kind)[:40]!r} must be one of {', '.join(FORMATS)}")
        unknown = sorted(form.keys() - FORMATS[kind] - {"type"})
        if unknown:
            raise StructuralTagError(place, f"a format of type {kind} has no {unknown[0][:40]!r}")
        written = write(form, ends, place)
        takes_ends = kind in UNLIMITED or kind == "sequence"
        return written if takes_ends or not ends else f"{written} {self._one_of(ends)}"

    def _write_const_string(self, form: Mapping[str, Any], ends: Sequence[str], place: str) -> str:
        return literal(_text(form, "value", place), self._special) or '""'

    def _write_json_schema(self, form: Mapping[str, Any], ends: Sequence[str], place: str) -> str:
        if form.get("style", "json") != "json":
            raise StructuralTagError(f"{place}.style", f"{form['style']!r} must be json")
        if form.get("any_order"):
            raise StructuralTagError(f"{place}.any_order", "must be false")
        schema = form.get("json_schema")
        if not isinstance(schema, Mapping):
            raise StructuralTagError(f"{place}.json_schema", "must be a JSON schema")
        held, _ = guidance_schema(schema, strict=self._strict)
        if self._strict and (wrong := schema_error(held)):
            raise StructuralTagError(f"{place}.json_schema", wrong)
        return self._rule(f"%json {json.dumps(schema)}")

    def _write_regex(self, form: Mapping[str, Any], ends: Sequence[str], place: str) -> str:
        pattern = _text(form, "pattern", place)
        if wrong := grammar_error(grammar_from("regex", pattern)):
            raise StructuralTagError(f"{place}.pattern", wrong)
        return self._rule(f"/{regex_to_lark(pattern)}/")

    def _write_grammar(self, form: Mapping[str, Any], ends: Sequence[str], place: str) -> str:
        try:
            grammar = grammar_from("grammar", _text(form, "grammar", place))
        except ValueError as error:
            raise StructuralTagError(f"{place}.grammar", str(error)) from error
        if wrong := grammar_error(grammar):
            raise StructuralTagError(f"{place}.grammar", wrong)
        name = self._name("grammar")
        self.grammars.append({"name": name, "lark_grammar": grammar})
        return f"@{name}"

    def _write_any_text(self, form: Mapping[str, Any], ends: Sequence[str], place: str) -> str:
        if form.get("excludes"):
            raise StructuralTagError(f"{place}.excludes", "is not supported")
        return self._text_until(ends)

    def _write_sequence(self, form: Mapping[str, Any], ends: Sequence[str], place: str) -> str:
        elements = _list(form.get("elements"), f"{place}.elements")
        return " ".join(self._elements([_object(e, place) for e in elements], ends, place, 0)) or '""'

    def _elements(self, elements: list[Mapping[str, Any]], ends: Sequence[str], place: str, index: int) -> list[str]:
        if index == len(elements):
            return []
        element, here, last = elements[index], f"{place}.elements.{index}", index == len(elements) - 1
        if element.get("type") in UNLIMITED and not last:
            text, rest = _split(elements[index + 1], here)
            elements = [*elements[: index + 1], rest, *elements[index + 2 :]]
            written = self.expression(element, (text,), here)
        else:
            written = self.expression(element, ends if last else (), here)
        return [written, *self._elements(elements, ends, place, index + 1)]

    def _write_or(self, form: Mapping[str, Any], ends: Sequence[str], place: str) -> str:
        elements = _list(form.get("elements"), f"{place}.elements")
        if texts := self._constants(elements):
            return self._rule(one_of(texts))
        return self._rule(" | ".join(self.expression(e, (), f"{place}.elements.{i}") for i, e in enumerate(elements)))

    def _constants(self, elements: Sequence[Any]) -> list[str]:
        """Return the texts of formats that are all constant and have no special token, else none."""
        texts = [
            element["value"]
            for element in elements
            if isinstance(element, Mapping) and element.get("type") == "const_string" and element.keys() == CONSTANT
        ]
        if len(texts) < len(elements) or not all(isinstance(text, str) for text in texts):
            return []
        together = "\n".join(texts)
        return [] if any(name in together for name in self._special) else texts

    def _write_optional(self, form: Mapping[str, Any], ends: Sequence[str], place: str) -> str:
        return f"({self.expression(form.get('content'), (), f'{place}.content')})?"

    def _write_plus(self, form: Mapping[str, Any], ends: Sequence[str], place: str) -> str:
        return f"({self.expression(form.get('content'), (), f'{place}.content')})+"

    def _write_star(self, form: Mapping[str, Any], ends: Sequence[str], place: str) -> str:
        return f"({self.expression(form.get('content'), (), f'{place}.content')})*"

    def _write_repeat(self, form: Mapping[str, Any], ends: Sequence[str], place: str) -> str:
        low, high = form.get("min"), form.get("max")
        if not (_is_count(low) and (high == -1 or (_is_count(high) and low <= high))):
            got = f"{str(low)[:40]} and {str(high)[:40]}"
            raise StructuralTagError(
                place, f"min and max are {got}: they must be numbers up to {MAX_REPEAT}, or max -1"
            )
        content = self.expression(form.get("content"), (), f"{place}.content")
        return f"({content}){{{low},{'' if high == -1 else high}}}"

    def _write_tag(self, form: Mapping[str, Any], ends: Sequence[str], place: str) -> str:
        begin, end = _text(form, "begin", place), form.get("end")
        own = [end] if isinstance(end, str) else _list(end, f"{place}.end")
        if not all(isinstance(text, str) for text in own):
            raise StructuralTagError(f"{place}.end", "must be a string or a list of strings")
        own = [text for text in own if text] if any(own) else ()
        content = self.expression(form.get("content"), own, f"{place}.content")
        return self._rule(f"{literal(begin, self._special)} {content}")

    def _write_triggered_tags(self, form: Mapping[str, Any], ends: Sequence[str], place: str) -> str:
        if form.get("excludes"):
            raise StructuralTagError(f"{place}.excludes", "is not supported")
        triggers = [str(text) for text in _list(form.get("triggers"), f"{place}.triggers") if text]
        rests: dict[str, list[str]] = {}
        for index, given in enumerate(_list(form.get("tags"), f"{place}.tags")):
            here = f"{place}.tags.{index}"
            tag = {"type": "tag", **_object(given, here)}
            begin = _text(tag, "begin", here)
            trigger = next((text for text in triggers if begin.startswith(text)), None)
            if trigger is None:
                raise StructuralTagError(f"{here}.begin", f"{begin[:40]!r} must begin with one of the triggers")
            rests.setdefault(trigger, []).append(
                self.expression({**tag, "begin": begin.removeprefix(trigger)}, (), here)
            )
        if not rests:
            raise StructuralTagError(f"{place}.tags", "must have at least one tag")
        first = " | ".join(f"{literal(t, self._special)} ({' | '.join(r)})" for t, r in rests.items())
        later = " | ".join(f"{self._text_until((t,))} ({' | '.join(r)})" for t, r in rests.items())
        after = self._text_until(ends)
        section = self._rule(later)
        if form.get("at_least_one"):
            rest = (self._one_of(ends) if ends else "") if form.get("stop_after_first") else f"({section})* {after}"
            return f"({first}) {rest}"
        if form.get("stop_after_first"):
            return self._rule(f"{after} | {section} {self._one_of(ends) if ends else ''}")
        return f"({section})* {after}"

    def _write_tags_with_separator(self, form: Mapping[str, Any], ends: Sequence[str], place: str) -> str:
        tags = _list(form.get("tags"), f"{place}.tags")
        one = self._rule(
            " | ".join(
                self.expression({"type": "tag", **_object(tag, f"{place}.tags.{i}")}, (), f"{place}.tags.{i}")
                for i, tag in enumerate(tags)
            )
        )
        separator = literal(_text(form, "separator", place), self._special)
        several = one if form.get("stop_after_first") else f"{one} ({separator} {one})*"
        return f"({several})" if form.get("at_least_one") else f"({several})?"

    def _text_until(self, ends: Sequence[str]) -> str:
        """Return an expression for any text up to and with the first of `ends`, or to the end of the answer."""
        if not ends:
            return "TEXT"
        found = [f"TEXT {literal(end, self._special)}" for end in ends if end in self._special]
        plain = [json.dumps(end) for end in ends if end not in self._special]
        if plain:
            name = self._name("until")
            self.rules.append(f"{name}[lazy]: TEXT ({' | '.join(plain)})")
            found.append(name)
        return f"({' | '.join(found)})"

    def _one_of(self, ends: Sequence[str]) -> str:
        return "(" + " | ".join(literal(end, self._special) for end in ends) + ")"

    def _rule(self, body: str) -> str:
        name = self._name("part")
        self.rules.append(f"{name}: {body}")
        return name

    def _name(self, kind: str) -> str:
        self._count += 1
        return f"{kind}_{self._count}"


FORMATS: Mapping[str, frozenset[str]] = {
    "const_string": frozenset({"value"}),
    "json_schema": frozenset({"json_schema", "style", "any_order"}),
    "regex": frozenset({"pattern"}),
    "grammar": frozenset({"grammar"}),
    "any_text": frozenset({"excludes"}),
    "sequence": frozenset({"elements"}),
    "or": frozenset({"elements"}),
    "optional": frozenset({"content"}),
    "plus": frozenset({"content"}),
    "star": frozenset({"content"}),
    "repeat": frozenset({"content", "min", "max"}),
    "tag": frozenset({"begin", "content", "end"}),
    "triggered_tags": frozenset({"triggers", "tags", "at_least_one", "stop_after_first", "excludes"}),
    "tags_with_separator": frozenset({"tags", "separator", "at_least_one", "stop_after_first"}),
}
"""The supported formats with their fields besides `type`."""


def _split(form: Mapping[str, Any], place: str) -> tuple[str, Mapping[str, Any]]:
    """Return the text with which a format begins, at which free text before it ends, and the format without it."""
    name = {"const_string": "value", "tag": "begin"}.get(str(form.get("type")), "")
    text = form.get(name)
    if not isinstance(text, str) or not text:
        raise StructuralTagError(place, "free text must be last, or be followed by a const_string or a tag")
    return text, {**form, name: ""}


def _object(value: Any, place: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise StructuralTagError(place, "must be an object")
    return value


def _list(value: Any, place: str) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise StructuralTagError(place, "must be a list")
    return value


def _text(form: Mapping[str, Any], name: str, place: str) -> str:
    value = form.get(name)
    if not isinstance(value, str):
        raise StructuralTagError(f"{place}.{name}", "must be a string")
    return value


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_REPEAT
