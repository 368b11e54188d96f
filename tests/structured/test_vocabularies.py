"""Structured output with the tokenizers of every construction, not of the bundled model alone."""

import random

import numpy as np
import pytest

from jaxserve.core.errors import RequestError
from jaxserve.core.structured import StructuredOutput
from jaxserve.engine.tokenizer import Tokenizer
from jaxserve.structured.compiler import LLGrammarCompiler
from tests.engine.constructions import ANY_TEXT, KNOWN, UNKNOWN

PIZZA = {"type": "object", "properties": {"a": {"enum": ["🍕", "the fox"]}}, "required": ["a"]} | {
    "additionalProperties": False
}
LACKING = "the model's vocabulary has no token"


def compiler_of(name: str) -> tuple[Tokenizer, LLGrammarCompiler]:
    tokenizer = Tokenizer({**KNOWN, **UNKNOWN}[name]())
    end = tokenizer.token_id("</s>")
    assert end is not None
    return tokenizer, LLGrammarCompiler(tokenizer, (end,))


def answer(tokenizer: Tokenizer, compiler: LLGrammarCompiler, demand: StructuredOutput, choose: random.Random) -> str:
    """Return the text of an answer whose tokens are drawn from all that are allowed. Raise its error."""
    matcher, ids = compiler.compile(demand).start(), []
    mask = np.zeros(-(-tokenizer.vocab_size // 32), np.uint32)
    for _ in range(60):
        matcher.fill(mask)
        allowed = [id for id in range(tokenizer.vocab_size) if mask[id // 32] >> (id % 32) & 1]
        if not allowed:
            raise RuntimeError(matcher.error)
        token = choose.choice(allowed)
        if token == tokenizer.token_id("</s>"):
            break
        matcher.accept(token)
        if matcher.error:
            raise RuntimeError(matcher.error)
        ids.append(token)
        if matcher.ended:
            break
    return b"".join(map(tokenizer.token_bytes, ids)).decode()


@pytest.fixture(scope="module", params=ANY_TEXT)
def any_text(request) -> tuple[Tokenizer, LLGrammarCompiler]:
    return compiler_of(request.param)


@pytest.mark.parametrize(
    ("demand", "texts"),
    [
        ({"choice": ["😀", "🎉", "🐶"]}, {"😀", "🎉", "🐶"}),
        ({"choice": ["Ω"]}, {"Ω"}),
        ({"choice": ["🇫🇷", "the fox", "e\u0301"]}, {"🇫🇷", "the fox", "e\u0301"}),
        ({"regex": " the Ω{2}"}, {" the ΩΩ"}),
        ({"grammar": 'start: "a" "é東" "<tool>"'}, {"aé東<tool>"}),
    ],
)
def test_every_allowed_token_leads_to_a_text_that_follows(any_text, demand, texts) -> None:
    choose = random.Random(0)
    for _ in range(6):
        assert answer(*any_text, StructuredOutput(**demand), choose) in texts


def test_characters_of_several_bytes_are_written_whole(any_text) -> None:
    tokenizer, compiler = any_text
    for schema in ({"type": "string", "maxLength": 4}, PIZZA):
        text = answer(tokenizer, compiler, StructuredOutput(json=schema), random.Random(1))
        assert "\ufffd" not in text


@pytest.mark.parametrize("name", UNKNOWN)
def test_model_whose_bytes_are_unknown_is_refused_with_this_reason(name: str) -> None:
    _, compiler = compiler_of(name)
    for demand in ({"choice": ["a"]}, {"json": {"type": "string"}}):
        with pytest.raises(RequestError, match="does not show which bytes each token stands for"):
            compiler.compile(StructuredOutput(**demand))


@pytest.mark.parametrize("name", ["word_piece", "word_level"])
def test_text_that_no_tokens_write_is_refused_with_this_reason(name: str) -> None:
    tokenizer, compiler = compiler_of(name)
    for demand in ({"choice": ["😀"]}, {"choice": ["Ω"]}, {"json": {"type": "string"}}, {"regex": " theΩ"}):
        with pytest.raises((RequestError, RuntimeError), match=LACKING):
            answer(tokenizer, compiler, StructuredOutput(**demand), random.Random(0))
    assert answer(tokenizer, compiler, StructuredOutput(choice=[" the fox"]), random.Random(0)) == " the fox"


def test_grammar_that_refers_to_itself_alone_says_so() -> None:
    for name in ("byte_level", "word_piece"):
        with pytest.raises(RequestError, match="refers to nothing but itself"):
            compiler_of(name)[1].compile(StructuredOutput(grammar="start: start"))
