"""Grammars are compiled for what requests demand, and refused with the reason and the place."""

import contextlib
import json
from typing import Any

import numpy as np
import pytest

from jaxserve.core.errors import RequestError
from jaxserve.core.structured import MAX_GRAMMAR, StructuredOutput
from jaxserve.structured import compiler as compiler_module
from jaxserve.structured.compiler import LLGrammarCompiler

PADDED = 64  # tokens that the model has beyond the tokenizer's


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("structured", "good", "bad"),
    [
        (StructuredOutput(json=PERSON), '{"name": "é\\n😀", "age": 3}', '{"name": "a", "age": -3}'),
        (StructuredOutput(json=json.dumps(PERSON)), '{"name":"a"}', '{"age": 3}'),
        (StructuredOutput(json=True), "[1, null]", "[1,"),
        (StructuredOutput(json_object=True), '{"a": [{}]}', "[1]"),
        (StructuredOutput(regex="[a-c]{2,3}x?"), "abc", "abcc"),
        (StructuredOutput(choice=["yes", "no"]), "no", "maybe"),
        (StructuredOutput(choice=['a"b', "é"]), 'a"b', "a"),
        (StructuredOutput(grammar='start: "a" start "b" | "c"'), "aacbb", "aacb"),
        (StructuredOutput(grammar='root ::= "x" [0-9]+'), "x12", "x"),
    ],
    ids=lambda value: value.kind if isinstance(value, StructuredOutput) else None,
)
def test_what_follows_the_grammar_is_allowed_and_nothing_else(follows, structured, good, bad) -> None:
    assert follows(structured, good)
    assert not follows(structured, bad)


def test_tokens_that_only_the_model_has_are_never_allowed(compiler, tokenizer) -> None:
    mask = np.full(-(-(tokenizer.vocab_size + PADDED) // 32), 2**32 - 1, np.uint32)
    compiler.compile(StructuredOutput(regex="(?s:.*)")).start().fill(mask)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    assert bits[: tokenizer.vocab_size].sum() > tokenizer.vocab_size / 2
    assert not bits[tokenizer.vocab_size :].any()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"json": {"properties": {"q": {"not": {"type": "string"}}}}},
            "'not' is not supported.*#/properties/q/not",
        ),
        ({"json": {"$defs": {"a/b": {"uniqueItems": True}}, "$ref": "#/$defs/a~1b"}}, "#/\\$defs/a~1b/uniqueItems"),
        (
            {"json": {"properties": {"not": {}, "q": {"not": {"const": 1}}}}},
            r"supported \(#/properties/q/not\): leave it out",
        ),
        ({"json": {"enum": [{"not": 1}], "items": {"not": {"const": 1}}}}, r"supported \(#/items/not\): leave it out"),
        ({"json": {"type": "strnig"}}, r"strnig \(#/type\): leave it out"),
        (
            {"json": {"properties": {"a": {"items": {"type": "strnig"}}}}},
            r"strnig \(#/properties/a/items/type\): leave it out",
        ),
        (
            {"json": {"anyOf": [{"type": "null"}, {"pattern": "["}]}},
            r"unclosed character class \(#/anyOf/1/pattern\): leave it out",
        ),
        (
            {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"pattern": "["}}}},
            r"class \(#/\$defs/a/pattern\): leave it out",
        ),
        (
            {"json": {"items": {"oneOf": [{}, {}]}}},
            r"'oneOf' is not supported .* \(#/items/oneOf\): leave it out",
        ),
        ({"json": {"$ref": "#/$defs/missing"}}, "missing"),
        ({"json": {"$ref": "#"}}, "refers to nothing but itself"),
        ({"json": False}, "no value can follow it"),
        ({"json": "[]"}, "must be an object"),
        ({"json": "{"}, "json cannot be used"),
        ({"regex": "[a-z"}, "unclosed character class"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"grammar": 'start: "a" | foo'}, "unknown name"),
        ({"grammar": "?"}, "grammar cannot be used"),
    ],
    ids=str,
)
def test_what_cannot_be_used_is_refused_with_the_place(compiler, given: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message) as error:
        compiler.compile(StructuredOutput(**given, strict=True))
    assert error.value.field == next(iter(given))


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"regex": "a", "choice": ["a"]},
        {"json": False, "regex": "a"},
        {"choice": []},
        {"choice": "abc"},
        {"choice": ["a", 5]},
        {"regex": ""},
        {"regex": 5},
        {"json": 5},
        {"json": {"a": {1, 2}}},
        {"json_object": "yes"},
        {"regex": "a" * (MAX_GRAMMAR + 1)},
    ],
    ids=lambda given: str(given)[:40],
)
def test_value_of_a_wrong_kind_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        StructuredOutput(**given)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def test_deep_schemas_are_refused_or_cut_and_wide_ones_are_not(compiler) -> None:
    with pytest.raises(RequestError, match="recursion"):
        compiler.compile(StructuredOutput(json=nested(500), strict=True))
    compiler.compile(StructuredOutput(json=nested(200)))
    compiler.compile(StructuredOutput(json={"enum": [f"value {i}" for i in range(5000)]}))


def test_equal_grammars_are_compiled_once_and_old_ones_are_dropped(tokenizer, monkeypatch) -> None:
    monkeypatch.setattr(compiler_module, "CACHED", 2)
    compiler = LLGrammarCompiler(tokenizer, tokenizer.eos_token_ids)
    first = compiler.compile(StructuredOutput(regex="a"))
    compiler.compile(StructuredOutput(regex="b"))
    assert compiler.compile(StructuredOutput(regex="a", place="guided_regex")) is first
    compiler.compile(StructuredOutput(regex="c"))
    assert compiler.compile(StructuredOutput(regex="a")) is first
    compiler.compile(StructuredOutput(regex="d"))
    compiler.compile(StructuredOutput(regex="e"))
    assert compiler.compile(StructuredOutput(regex="a")) is not first


def test_a_model_without_an_end_is_told_so(tokenizer) -> None:
    with pytest.raises(RequestError, match="no token that ends a text"):
        LLGrammarCompiler(tokenizer, ()).compile(StructuredOutput(regex="a"))


AMBIGUOUS = StructuredOutput(grammar='start: s\ns: "a" | s s | s s s | s s s s')


def test_a_grammar_too_complex_for_its_first_token_is_refused(compiler) -> None:
    letters = " | ".join(f'"{chr(97 + number)}" s' for number in range(26))
    with pytest.raises(RequestError, match="Too many items"):
        compiler.compile(StructuredOutput(grammar=f'start: s\ns: s s s | s s | "a" | {letters}'))


def test_a_grammar_that_becomes_too_complex_says_so(compiler, tokenizer) -> None:
    answer = compiler.compile(AMBIGUOUS).start()
    mask = np.zeros(-(-tokenizer.vocab_size // 32), np.uint32)
    (token,) = tokenizer.encode("a", add_special_tokens=False)
    for _ in range(500):
        answer.fill(mask)
        if answer.error:
            break
        answer.accept(token)
    assert "Too many items" in answer.error
    assert "verbose" not in answer.error
    assert not mask.any(), "no token can be sampled, which ends the request"


def test_error_of_a_grammar_made_of_parts_is_that_of_the_part_at_fault(compiler) -> None:
    schemas = [{"items": {"type": "integer"}}, {"items": {"type": "strnig"}}]
    parts = [StructuredOutput(json=schema, strict=True, place=f"tools.{i}") for i, schema in enumerate(schemas)]
    grammar = "\n".join(["%llguidance {}", "start: a b", *map("{}: %json {}".format, "ab", map(json.dumps, schemas))])
    with pytest.raises(
        RequestError, match=r"tools\.1 cannot be used: Invalid type: strnig \(#/items/type\): leave"
    ) as error:
        compiler.compile(StructuredOutput(grammar=grammar, strict=True, place="tools", parts=parts))
    assert error.value.field == "tools.1"


def chain(length: int, link: str, last: str) -> str:
    return "".join([*(link.format(i, i + 1) for i in range(length)), last.format(length)])


REFERENCES = '{{"$ref": "#/$defs/0", "$defs": {{{}}}}}'
ARRAYS = '"{}":' + '{{"items":' * 60 + '{{"$ref":"#/$defs/{}"}}' + "}}" * 60 + ","


@pytest.mark.parametrize(
    "deep",
    [
        StructuredOutput(grammar=chain(8000, 'r{}: r{} | "a"\n', 'r{}: "z"\nstart: r0')),
        StructuredOutput(json=REFERENCES.format(chain(7000, '"{}":{{"$ref":"#/$defs/{}"}},', '"{}":{{}}'))),
        StructuredOutput(json=REFERENCES.format(chain(300, ARRAYS, '"{}":{{}}'))),
    ],
    ids=["rules", "references", "arrays"],
)
def test_deep_grammar_is_compiled_or_refused_and_ends_no_process(compiler, deep: StructuredOutput) -> None:
    with contextlib.suppress(RequestError):
        compiler.compile(deep)
