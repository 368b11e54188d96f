"""Grammars in the form in which llguidance takes them.

This module and what it imports load in a few hundredths of a second, since a process of its own runs it (`trial.py`).
"""

import json
from collections.abc import Mapping

from llguidance import LLMatcher, grammar_from

from jaxserve.core.structured import JSON_WHITESPACE
from jaxserve.structured.structural_tag import structural_tag_grammar


def grammar_source(kind: str, text: str, special: Mapping[str, int]) -> str:
    """Return the grammar that a `StructuredOutput` of a kind describes by its text.

    `special`: the ids of the tokenizer's special tokens by text. Raise ValueError or RecursionError for text that is
    not JSON or not a grammar.
    """
    options = {"whitespace_pattern": JSON_WHITESPACE}
    if kind == "json_object":
        return LLMatcher.grammar_from_json_schema('{"type": "object"}', defaults=options)
    if kind == "json":
        # What is always valid, as llguidance takes it; what never is, "false", it refuses.
        return LLMatcher.grammar_from_json_schema("{}" if text.strip() == "true" else text, defaults=options)
    if kind == "structural_tag":
        return structural_tag_grammar(json.loads(text), special)
    return grammar_from(kind, text)  # type: ignore[arg-type]
