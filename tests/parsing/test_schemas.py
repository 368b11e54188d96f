"""The types of parameters are read from all ways in which a schema may say them."""

import json
from typing import Any

import pytest

from jaxserve.parsing.schemas import Parameter, parameters_of
from jaxserve.parsing.tools import Tool
from tests.parsing.writers import FORMS, parsed

DEFINITIONS = {
    "Unit": {"enum": ["a", "b"]},
    "Loop": {"$ref": "#/$defs/Loop"},
    "Tree": {"anyOf": [{"$ref": "#/$defs/Tree"}] * 9},
}


def parameter(schema: Any) -> Parameter:
    return parameters_of(Tool("f", {"properties": {"x": schema}, "$defs": DEFINITIONS}))["x"]


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["integer", "null"]}, {"integer", "null"}),
        (
            {"enum": ["a", 1, 1.5, None, True, [], {}]},
            {"string", "integer", "number", "null", "boolean", "array", "object"},
        ),
        ({"const": "a"}, {"string"}),
        ({"anyOf": [{"type": "string"}, {"oneOf": [{"const": 1}, {"type": "null"}]}]}, {"string", "integer", "null"}),
        ({"allOf": [{"$ref": "#/$defs/Unit"}], "description": "d"}, {"string"}),
        ({"$ref": "#/$defs/Unit"}, {"string"}),
        ({"anyOf": [{"type": "string"}, {}]}, set()),
        ({}, set()),
        (True, set()),
        ({"type": 5}, set()),
        ({"$ref": "#/$defs/Nothing"}, set()),
        ({"$ref": "other.json"}, set()),
        ({"$ref": "#/$defs/Loop"}, set()),
        ({"$ref": "#/$defs/Tree"}, set()),
    ],
)
def test_types_are_found(schema: Any, types: set[str]) -> None:
    assert parameter(schema).types == types


def test_alternatives_that_contain_themselves_are_looked_at_once() -> None:
    tree = {"anyOf": [{"$ref": "#/$defs/Tree"}, {"$ref": "#/$defs/Other"}, {"type": "string"}]}
    other = {"anyOf": [{"$ref": "#/$defs/Tree"}] * 20 + [{"type": "array"}]}
    schema = {"properties": {"x": {"$ref": "#/$defs/Tree"}}, "$defs": {"Tree": tree, "Other": other}}
    assert parameters_of(Tool("f", schema))["x"].types == {"string", "array"}


@pytest.mark.parametrize(
    "schema",
    [
        None,
        {},
        {"properties": None},
        {"properties": {"x": None}, "required": 5},
        {"required": [[], 5]},
        {"$ref": "#/x"},
    ],
)
def test_a_schema_that_says_nothing_about_parameters_is_no_error(schema: Any) -> None:
    text = "<tool_call>\n<function=f>\n<parameter=x>\n5\n</parameter>\n</function>\n</tool_call>"
    message = parsed(FORMS["qwen3_coder"], text, tools=[Tool("f", schema)])
    assert [json.loads(call.arguments) for call in message.calls] == [{"x": 5}]


def test_parameters_keep_their_order_and_those_that_are_only_required_come_last() -> None:
    schema = {"properties": {"b": {}, "a": {"type": "string"}}, "required": ["c", "a"]}
    found = parameters_of(Tool("f", schema))
    assert [(name, each.required) for name, each in found.items()] == [("b", False), ("a", True), ("c", True)]
