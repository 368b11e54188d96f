"""No grammar allows white space without end between the parts of JSON, wherever it is made."""

import json
from collections.abc import Callable

import numpy as np
import pytest

from jaxserve.core.structured import StructuredOutput
from jaxserve.parsing.grammar import tool_grammar
from jaxserve.parsing.schemas import json_rule
from jaxserve.parsing.tools import Tool, ToolUse
from tests.parsing.writers import FORMS, WRITERS
from tests.support.thorough import some

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {"enum": [1]}}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
VALUE = {"a": 5, "b": [1, 1]}
TEXT = json.dumps(VALUE)
LONGEST = 60  # characters of white space that a grammar allows at one place


@pytest.fixture(scope="module")
def longest_space(compiler, tokenizer) -> Callable[[StructuredOutput, str], int]:
    """Return a function that returns the longest white space that is allowed within a text, at any of its places."""
    spaces = {
        token: text.decode()
        for token in range(tokenizer.vocab_size)
        if (text := tokenizer.token_bytes(token)) and not text.strip(b" \n\r\t")
    }

    def longest(structured: StructuredOutput, text: str, begin: int = 0) -> int:
        grammar, found = compiler.compile(structured), 0
        mask = np.zeros(-(-tokenizer.vocab_size // 32), np.uint32)
        for end in range(begin, len(text) + 1):
            if text[:end].count('"') % 2 or text[end - 1 : end].isalnum():
                continue  # in a string, or a name
            answer, length = grammar.start(), 0
            for token in tokenizer.encode(text[:end], add_special_tokens=False):
                answer.accept(token)
            while not answer.error and not answer.ended and length <= LONGEST:
                answer.fill(mask)
                allowed = [each for each in spaces if mask[each // 32] >> (each % 32) & 1]
                if not allowed:
                    break
                token = min(allowed, key=lambda each: len(spaces[each]))
                answer.accept(token)
                length += len(spaces[token])
            found = max(found, length)
        return found

    return longest


TAG = {"type": "tag", "begin": "<a>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</a>"}
TRIGGERED = {"type": "triggered_tags", "triggers": ["<a>"], "tags": [TAG], "at_least_one": True}
OLD = {"structures": [{"begin": "<a>", "schema": SCHEMA, "end": "</a>"}], "triggers": ["<a>"]}
OWN = json.dumps({**SCHEMA, "x-guidance": {"whitespace_flexible": True}})


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"json_object": True}, TEXT),
        ({"json": True}, TEXT),
        ({"json": SCHEMA}, TEXT),
        ({"json": OWN}, TEXT),
        ({"json": {"$ref": "#/$defs/A", "$defs": {"A": SCHEMA}}}, TEXT),
        ({"grammar": f'start: "x" %json {json.dumps(SCHEMA)} // %json {{}}'}, f"x{TEXT}"),
        ({"grammar": f'start: "%json {{}}" a\na: %json {OWN}'}, f"%json {{}}{TEXT}"),
        ({"structural_tag": {"format": TRIGGERED}}, f"<a>{TEXT}"),
        ({"structural_tag": OLD}, f"<a>{TEXT}"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_white_space_in_json_is_bounded(follows, longest_space, given, text: str) -> None:
    structured = StructuredOutput(**given)
    if "structural_tag" not in given:
        assert follows(structured, text)
    assert 0 < longest_space(structured, text, text.index("{") + 1) <= LONGEST


@pytest.mark.parametrize("name", some(FORMS, 7))
def test_white_space_in_required_calls_is_bounded(longest_space, name: str) -> None:
    tools = (Tool("f", SCHEMA), Tool("g", SCHEMA, strict=True))
    grammar = tool_grammar(FORMS[name], ToolUse(tools, required=True), {})
    text = WRITERS[name]([("f", {"a": 5, "b": [1]}), ("g", {"a": 5, "b": [1]})])
    assert longest_space(StructuredOutput(grammar=grammar, strict=True), text) <= LONGEST


def test_white_space_in_an_answer_beside_tools_is_bounded(longest_space) -> None:
    tools = (Tool("f", SCHEMA),)
    grammar = tool_grammar(FORMS["hermes"], ToolUse(tools), {}, json_rule(SCHEMA, strict=False))
    assert longest_space(StructuredOutput(grammar=grammar, strict=True), TEXT) <= LONGEST
