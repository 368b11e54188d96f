"""Structural tags mix free text with structured parts, in xgrammar's form and in the older one of vLLM."""

import json
from typing import Any

import pytest

from jaxserve.core.errors import RequestError
from jaxserve.core.structured import StructuredOutput

SCHEMA = {"type": "object", "properties": {"city": {"enum": ["a", "b"]}}, "required": ["city"]}
CITY = {"type": "json_schema", "json_schema": {**SCHEMA, "additionalProperties": False}}
JSON = '{"city": "a"}'
CALL = {"type": "tag", "begin": "<function=f>", "content": CITY, "end": "</function>"}
CALLED = f"<function=f>{JSON}</function>"
ANY = {"type": "any_text"}


def const(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def triggered(**fields: Any) -> dict[str, Any]:
    return {"type": "triggered_tags", "triggers": ["<function="], "tags": [CALL], **fields}


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        (const("Hi"), ["Hi"], ["Ho", "Hi there"]),
        (CITY, [JSON], ["{}"]),
        ({"type": "regex", "pattern": "[0-9]{2}/x"}, ["12/x"], ["1/x"]),
        ({"type": "grammar", "grammar": 'root ::= "q" | "r"'}, ["q", "r"], ["s", "qr"]),
        (ANY, ["anything", ""], []),
        (
            {"type": "sequence", "elements": [{"type": "tag", "begin": "<t>", "content": ANY, "end": "</t>"}, CITY]},
            [f"<t>free</t>{JSON}"],
            ["<t></t>x", "no", JSON],
        ),
        ({"type": "sequence", "elements": [ANY, const("END"), const("!")]}, ["some END!"], ["some END", "END?"]),
        ({"type": "sequence", "elements": [ANY, CALL, const("!")]}, [f"x {CALLED}!"], [f"x {CALLED}", "<function=g"]),
        ({"type": "sequence", "elements": []}, [""], ["a"]),
        ({"type": "or", "elements": [const("yes"), CITY]}, ["yes", JSON], ["no"]),
        ({"type": "optional", "content": const("ab")}, ["", "ab"], ["a", "abab"]),
        ({"type": "plus", "content": const("ab")}, ["ab", "abab"], ["", "a"]),
        ({"type": "star", "content": const("ab")}, ["", "ababab"], ["a"]),
        ({"type": "repeat", "min": 1, "max": 2, "content": const("ab")}, ["ab", "abab"], ["", "ababab"]),
        ({"type": "repeat", "min": 2, "max": -1, "content": const("ab")}, ["abab", "ab" * 5], ["ab"]),
        (triggered(), ["text", f"a {CALLED} b {CALLED}", ""], ["<function=g>", "<function=f>{}"]),
        (triggered(stop_after_first=True), ["text", f"a {CALLED}"], [f"{CALLED}a"]),
        (triggered(at_least_one=True), [CALLED, f"{CALLED} b"], ["text"]),
        (triggered(at_least_one=True, stop_after_first=True), [CALLED], ["text", f"{CALLED}a"]),
        (
            {"type": "tag", "begin": "<a>", "content": triggered(), "end": ["</a>", "</b>"]},
            ["<a>x</b>", f"<a>{CALLED} y</a>"],
            ["<a>x", "<a></a>x"],
        ),
        (
            {"type": "tags_with_separator", "tags": [CALL], "separator": ", "},
            ["", CALLED, f"{CALLED}, {CALLED}"],
            ["x", f"{CALLED} {CALLED}"],
        ),
        (
            {
                "type": "tags_with_separator",
                "tags": [CALL],
                "separator": ",",
                "at_least_one": True,
                "stop_after_first": True,
            },
            [CALLED],
            ["", f"{CALLED},{CALLED}"],
        ),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_answer_follows_the_format(follows, form, good, bad):
    asked = StructuredOutput(structural_tag={"type": "structural_tag", "format": form})
    assert [text for text in good if not follows(asked, text)] == []
    assert [text for text in bad if follows(asked, text)] == []


def test_answer_follows_the_older_form(follows):
    structure = {"begin": "<function=f>", "schema": CITY["json_schema"], "end": "</function>"}
    given = {"type": "structural_tag", "structures": [structure], "triggers": ["<function="]}
    asked = StructuredOutput(structural_tag=given)
    assert follows(asked, f"hello {CALLED}")
    assert not follows(asked, "<function=g>")


@pytest.mark.parametrize(
    ("form", "place"),
    [
        (5, "format"),
        ({"type": "poem"}, "format.type"),
        ({"type": "const_string"}, "format.value"),
        ({"type": "const_string", "value": "a", "colour": 1}, "colour"),
        ({"type": "json_schema", "json_schema": {}, "style": "qwen_xml"}, "format.style"),
        ({"type": "json_schema"}, "format.json_schema"),
        (
            {"type": "json_schema", "json_schema": {"items": {"not": {"const": 1}}}},
            "json_schema: the keyword 'not' is not supported",
        ),
        ({"type": "or", "elements": [{"type": "regex", "pattern": "["}]}, "format.elements.0.pattern"),
        ({"type": "or", "elements": [{"type": "regex", "pattern": "(?=a)"}]}, "format.elements.0.pattern"),
        ({"type": "or", "elements": [{"type": "grammar", "grammar": "start: missing"}]}, "format.elements.0.grammar"),
        ({"type": "any_text", "excludes": ["a"]}, "format.excludes"),
        ({"type": "sequence", "elements": [ANY, CITY]}, "format.elements.0"),
        ({"type": "sequence", "elements": [const("a"), {"type": "or", "elements": 5}]}, "format.elements.1.elements"),
        ({"type": "repeat", "min": 3, "max": 2, "content": ANY}, "format"),
        ({"type": "tag", "begin": "a", "content": ANY, "end": [5]}, "format.end"),
        (triggered(triggers=["<x"]), "format.tags.0.begin"),
        (triggered(tags=[]), "format.tags"),
    ],
)
def test_part_at_fault_is_named(compiler, form, place):
    tag = {"type": "structural_tag", "format": form}
    with pytest.raises(RequestError) as refused:
        compiler.compile(StructuredOutput(structural_tag=tag, strict=True, place="here"))
    assert place in str(refused.value)
    assert refused.value.field == "here"
