"""Grammars in the form in which llguidance takes them.

This module and what it imports load in a few hundredths of a second, since a process of its own runs it (`trial.py`).
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from llguidance import LLMatcher, grammar_from

from jaxserve.parsing.lark import one_of
from jaxserve.structured.schemas import OPTIONS, guidance_schema
from jaxserve.structured.structural_tag import structural_tag_grammar

# Strings, comments and expressions of Lark, in which %json is only text, and %json before a schema.
LARK = re.compile(r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|#[^\n]*|/(?:[^/\\\n]|\\.)+/|%json\s*(?=\{)')


@dataclass(frozen=True)
class GrammarSource:
    """The text of a grammar for llguidance, and JSON pointers to what it leaves out of schemas that it is made of."""

    text: str
    dropped: list[str] = field(default_factory=list)


def grammar_source(kind: str, text: str, strict: bool, special: Mapping[str, int]) -> GrammarSource:
    """Return the grammar that a `StructuredOutput` of a kind describes by its text.

    `strict`: nothing is left out of its JSON schemas. `special`: the ids of the tokenizer's special tokens by text.
    Raise ValueError or RecursionError for text that is not JSON or not a grammar.
    """
    match kind:
        case "json_object":
            return _of_schema({"type": "object"}, strict)
        case "json":
            return _of_schema(json.loads(text), strict)
        case "structural_tag":
            return _with_schemas(structural_tag_grammar(json.loads(text), special, strict), strict)
        case "choice":
            return GrammarSource(LLMatcher.grammar_from_lark(f"start: {one_of(json.loads(text))}"))
    return _with_schemas(grammar_from(kind, text), strict)  # type: ignore[arg-type]


def any_json(schema: str) -> GrammarSource:
    """Return the grammar that stands for a schema that cannot be used at all: of any JSON, or any object."""
    given = json.loads(schema)
    of_objects = isinstance(given, dict) and given.get("type") == "object"
    return replace(_of_schema({"type": "object"} if of_objects else {}, strict=False), dropped=["#"])


def _of_schema(schema: object, strict: bool) -> GrammarSource:
    if not isinstance(schema, dict | bool):
        raise ValueError("a JSON schema must be an object")
    held, dropped = guidance_schema(schema, strict=strict)
    return GrammarSource(LLMatcher.grammar_from_json_schema(json.dumps(held)), dropped)


def _with_schemas(grammar: str, strict: bool) -> GrammarSource:
    """Return a grammar with the JSON schemas within it in the form that llguidance can hold, with bounded white space.

    `strict`: only from schemas with the option `lenient` something may be left out.
    """
    dropped: list[str] = []
    if not grammar.startswith("{"):
        return GrammarSource(_lark_with_schemas(grammar, strict, dropped), dropped)
    whole = json.loads(grammar)
    for part in whole.get("grammars", ()):
        if part.get("lark_grammar"):
            part["lark_grammar"] = _lark_with_schemas(part["lark_grammar"], strict, dropped)
        if part.get("json_schema"):
            part["json_schema"] = _held(part["json_schema"], strict, dropped)
    return GrammarSource(json.dumps(whole), dropped)


def _lark_with_schemas(lark: str, strict: bool, dropped: list[str]) -> str:
    parts, position = [], 0
    while found := LARK.search(lark, position):
        parts.append(lark[position : found.end()])
        position = found.end()
        if found.group().startswith("%json"):
            try:
                schema, position = json.JSONDecoder().raw_decode(lark, position)
            except ValueError:
                continue  # llguidance says what is wrong
            parts.append(json.dumps(_held(schema, strict, dropped)))
    return "".join(parts) + lark[position:]


def _held(schema: Any, strict: bool, dropped: list[str]) -> Any:
    options = schema.get(OPTIONS) if isinstance(schema, dict) else None
    lenient = not strict or (isinstance(options, dict) and options.get("lenient") is True)
    held, left_out = guidance_schema(schema, strict=not lenient)
    dropped += left_out
    return held
