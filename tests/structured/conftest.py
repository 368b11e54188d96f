"""The compiler of grammars for the bundled tokenizer, and what a grammar allows."""

from collections.abc import Callable

import numpy as np
import pytest

from jaxserve.core.bundled import bundled_model_path
from jaxserve.core.structured import StructuredOutput
from jaxserve.engine.tokenizer import Tokenizer
from jaxserve.structured.compiler import LLGrammarCompiler

PADDED = 64  # tokens that the model has beyond the tokenizer's


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(bundled_model_path())


@pytest.fixture(scope="session")
def compiler(tokenizer: Tokenizer) -> LLGrammarCompiler:
    return LLGrammarCompiler(tokenizer, tokenizer.eos_token_ids)


@pytest.fixture(scope="session")
def follows(compiler: LLGrammarCompiler, tokenizer: Tokenizer) -> Callable[[StructuredOutput, str], bool]:
    """Return a function that says whether a whole text is allowed, token by token, and may end there."""

    def allowed(structured: StructuredOutput, text: str) -> bool:
        answer = compiler.compile(structured).start()
        mask = np.zeros(-(-(tokenizer.vocab_size + PADDED) // 32), np.uint32)
        for token in tokenizer.encode(text, add_special_tokens=False):
            answer.fill(mask)
            if answer.ended or not mask[token // 32] >> (token % 32) & 1:
                return False
            answer.accept(token)
        if answer.ended:
            return True
        answer.fill(mask)
        return any(bool(mask[eos // 32] >> (eos % 32) & 1) for eos in tokenizer.eos_token_ids)

    return allowed
