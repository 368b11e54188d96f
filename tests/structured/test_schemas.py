"""Without `strict`, no schema is refused: what a grammar cannot hold is left out, and the log names it."""

import json
import logging
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jaxserve.core.errors import RequestError
from jaxserve.core.structured import StructuredOutput
from jaxserve.parsing.holdable import ANNOTATIONS, BY_NAME, LISTS, SINGLE, UNSUPPORTED
from jaxserve.parsing.keyword_values import COUNTS, LOWER, TYPES, UPPER
from jaxserve.structured.errors import refusal_of
from jaxserve.structured.schemas import guidance_schema
from tests.structured.odd_schemas import HELD, NOT_HELD
from tests.support.thorough import THOROUGH

TOKENS = 40


def sample(compiler, tokenizer, structured: StructuredOutput, seed: int) -> Any:
    """Return the value of a random answer, None if it is not complete after many tokens."""
    answer, draw, text = compiler.compile(structured).start(), random.Random(seed), b""
    mask = np.zeros(-(-tokenizer.vocab_size // 32), np.uint32)
    for _ in range(TOKENS):
        answer.fill(mask)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
        ends = [token for token in allowed if token in tokenizer.eos_token_ids]
        token = draw.choice(ends if ends and draw.random() < 0.7 else allowed)
        if answer.ended or token in ends:
            return json.loads(text)
        answer.accept(token)
        assert not answer.error
        text += tokenizer.token_bytes(token)
    return None


def as_held(schema: Any) -> Any:
    """Return a schema with `anyOf` instead of `oneOf`, which only holds for schemas that exclude each other."""
    if isinstance(schema, dict):
        return {"anyOf" if key == "oneOf" else key: as_held(value) for key, value in schema.items()}
    return [as_held(part) for part in schema] if isinstance(schema, list) else schema


@pytest.mark.parametrize("schema", HELD, ids=str)
def test_schema_in_another_form_is_held(compiler, tokenizer, caplog, schema: dict[str, Any]) -> None:
    for strict in (True, False):
        structured = StructuredOutput(json=schema, strict=strict)
        values = [sample(compiler, tokenizer, structured, seed) for seed in range(2)]
        held = {key: value for key, value in schema.items() if key not in ("exclusiveMinimum", "$schema")}
        for value in values:
            if value is not None:
                jsonschema.validate(value, held)
    assert not caplog.records


@pytest.mark.parametrize("schema", NOT_HELD, ids=lambda schema: str(schema)[:80])
def test_what_cannot_be_held_is_left_out_or_refused(compiler, tokenizer, caplog, schema: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"#|refers to nothing but itself"):
        compiler.compile(StructuredOutput(json=schema, strict=True))
    with caplog.at_level(logging.WARNING):
        sample(compiler, tokenizer, StructuredOutput(json=schema), 1)
        compiler.compile(StructuredOutput(json=schema))
    (record,) = [each for each in caplog.records if "not held" in each.getMessage()]
    assert "json: answers are not held to " in record.getMessage()


def test_a_branch_that_no_value_follows_allows_none(compiler, follows) -> None:
    for strict in (True, False):
        asked = StructuredOutput(json={"anyOf": [{"type": "string"}, {"not": {}}]}, strict=strict)
        assert follows(asked, '"a"')
        assert not follows(asked, "5")


def test_a_strict_schema_is_refused_with_the_place_and_advice(compiler) -> None:
    schema = {"type": "object", "properties": {"tags": {"type": "array", "uniqueItems": True}}}
    with pytest.raises(RequestError) as raised:
        compiler.compile(StructuredOutput(json=schema, strict=True))
    assert str(raised.value).endswith("(#/properties/tags/uniqueItems): leave it out, or set strict to false")


@pytest.mark.parametrize(
    ("keyword", "schema"),
    [
        ("pattern", {"type": "string", "pattern": r"^\d+\b"}),
        ("pattern", {"type": "string", "pattern": r"^(a)\1$"}),
        ("$ref", {"$ref": "https://example.com/schema.json"}),
        ("enum", {"type": "integer", "enum": ["a"]}),
        ("enum", {"enum": []}),
        ("minLength", {"type": "string", "minLength": 5, "maxLength": 2}),
        ("oneOf", {"oneOf": [{"type": "integer"}, {"type": "number"}]}),
        ("format", {"type": "string", "format": "email", "pattern": "^[a-z]+$"}),
    ],
)
def test_any_strict_refusal_names_the_keyword_on_one_line(compiler, keyword: str, schema: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as raised:
        compiler.compile(StructuredOutput(json=schema, strict=True))
    assert str(raised.value).endswith(f"(#/{keyword}): leave it out, or set strict to false")
    assert "\n" not in str(raised.value)


def test_only_the_keyword_at_fault_is_left_out(compiler, follows) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer", "multipleOf": 0, "minimum": 3}, "b": {"$ref": "#/$defs/B"}},
        "required": ["a", "b"],
        "additionalProperties": False,
        "$defs": {"B": {"type": "array", "items": {"$ref": "#/$defs/B"}, "uniqueItems": True, "maxItems": 1}},
    }
    asked = StructuredOutput(json=schema)
    assert follows(asked, '{"a": 4, "b": [[]]}')
    assert not follows(asked, '{"a": 2, "b": [[]]}')
    assert not follows(asked, '{"a": 4, "b": [5]}')
    assert not follows(asked, '{"a": 4}')


def test_the_log_names_places_without_line_breaks_and_at_a_bounded_length(compiler, caplog) -> None:
    schema = {
        "properties": {"x" * 5000 + str(i): {"not": {"const": 1}} for i in range(20)} | {"a\nb": {"not": {"const": 1}}}
    }
    with caplog.at_level(logging.WARNING):
        compiler.compile(StructuredOutput(json={"properties": {"a\nb": {"not": {"const": 1}}}}))
        compiler.compile(StructuredOutput(json=schema))
    first, second = (record.getMessage() for record in caplog.records)
    assert first.endswith(r"#/properties/a\nb/not")
    assert len(second) < 2000
    assert second.endswith("and 13 more")


KEYWORDS = (
    *("type", "enum", "const", "required", "pattern", "format", "multipleOf", "$ref", "$schema", "$id"),
    *(*COUNTS, *LOWER, *UPPER, *BY_NAME, *SINGLE, *LISTS, *UNSUPPORTED, *ANNOTATIONS),
)
NAMES = st.sampled_from(("a", "b", "$ref", "type"))
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**64), 2**64),
    st.floats(allow_nan=False),
    st.sampled_from((*TYPES, "any", "#", "#/$defs/a", "#/properties/b", "(", "^a*$", "date", "path", 0, 1, 2, [], {})),
    st.lists(st.sampled_from((*TYPES, "a", 5, None)), max_size=3),
)


def _nested(schemas: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    values = st.one_of(VALUES, schemas, st.lists(schemas, max_size=3), st.dictionaries(NAMES, schemas, max_size=3))
    return st.dictionaries(st.sampled_from(KEYWORDS), values, max_size=5)


ANY_SCHEMA = st.recursive(st.dictionaries(st.sampled_from(KEYWORDS), VALUES, max_size=4), _nested, max_leaves=6)


@settings(max_examples=3000 if THOROUGH else 60, deadline=None)
@given(ANY_SCHEMA)
def test_any_schema_can_be_used(schema: dict[str, Any]) -> None:
    held, _ = guidance_schema(schema, strict=False)
    assert not refusal_of(json.dumps(held))
    again, dropped = guidance_schema(held, strict=False)
    assert again == held
    assert not dropped


@settings(max_examples=200 if THOROUGH else 10, deadline=None)
@given(ANY_SCHEMA, st.integers(0, 2**32))
def test_answers_follow_what_is_left_of_any_schema(compiler, tokenizer, schema: dict[str, Any], seed: int) -> None:
    value = sample(compiler, tokenizer, StructuredOutput(json=json.dumps(schema)), seed)
    if value is not None and '"$' not in json.dumps(schema):
        held, _ = guidance_schema(schema, strict=False)
        if not isinstance(held.get("items"), list):
            jsonschema.Draft202012Validator(as_held(held)).validate(value)
