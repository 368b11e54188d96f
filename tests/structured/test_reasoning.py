"""What constrains an answer begins after its reasoning, which ends at the latest with its budget."""

from dataclasses import replace

import numpy as np
import pytest

from jaxserve.core.errors import RequestError
from jaxserve.core.reasoning import ReasoningSection
from jaxserve.core.structured import Matcher, StructuredOutput
from jaxserve.structured.compiler import LLGrammarCompiler

TAGS = "<think>", "</think>"
CHOICE = StructuredOutput(choice=["yes", "no"])


class Walk:
    """An answer that is generated token by token."""

    def __init__(self, compiler, tokenizer, section: ReasoningSection, structured: StructuredOutput | None = CHOICE):
        grammar = None if structured is None else compiler.compile(structured)
        self.tokenizer = tokenizer
        self.answer: Matcher = compiler.after_reasoning(grammar, section).start()

    def allowed(self) -> set[int]:
        mask = np.zeros(-(-self.tokenizer.vocab_size // 32), np.uint32)
        self.answer.fill(mask)
        return {token for token in range(self.tokenizer.vocab_size) if mask[token // 32] >> (token % 32) & 1}

    def write(self, text: str) -> None:
        for token in self.tokenizer.encode(text, add_special_tokens=False):
            assert token in self.allowed(), self.tokenizer.token(token)
            self.answer.accept(token)


def test_reasoning_is_free_and_the_text_after_it_is_not(compiler, tokenizer):
    walk = Walk(compiler, tokenizer, ReasoningSection(*TAGS, begun=True))
    walk.write("anything < at </thin all\n")
    everything = set(range(tokenizer.vocab_size)) - set(tokenizer.eos_token_ids)
    assert walk.allowed() == everything  # the answer may not end before its text
    walk.write("</think>")
    assert {tokenizer.token(token)[0] for token in walk.allowed()} == {"y", "n"}
    walk.write("yes")
    assert walk.answer.ended


def test_answer_may_end_inside_its_reasoning_if_nothing_is_demanded(compiler, tokenizer):
    walk = Walk(compiler, tokenizer, ReasoningSection(*TAGS, begun=True, max_tokens=5), None)
    assert walk.allowed() == set(range(tokenizer.vocab_size))
    assert not walk.answer.ended


@pytest.mark.parametrize("structured", [CHOICE, None])
def test_end_tag_is_forced_when_the_budget_is_spent(compiler, tokenizer, structured):
    walk = Walk(compiler, tokenizer, ReasoningSection(*TAGS, begun=True, max_tokens=3), structured)
    end = tokenizer.encode("</think>", add_special_tokens=False)
    for token in tokenizer.encode("a b c", add_special_tokens=False)[:3]:
        assert not walk.answer.forced()
        walk.answer.accept(token)
    assert list(walk.answer.forced()) == end
    for token in end:
        assert walk.allowed() == {token}
        walk.answer.accept(token)
    walk.write("no")


def test_budget_of_zero_closes_the_reasoning_at_once(compiler, tokenizer):
    walk = Walk(compiler, tokenizer, ReasoningSection(*TAGS, begun=True, max_tokens=0))
    walk.write("</think>yes")
    assert walk.answer.ended


def test_text_without_reasoning_is_constrained_from_its_beginning(compiler, tokenizer):
    walk = Walk(compiler, tokenizer, ReasoningSection(*TAGS))
    walk.write("no")
    assert walk.answer.ended


def test_free_text_without_reasoning_has_no_budget(compiler, tokenizer):
    walk = Walk(compiler, tokenizer, ReasoningSection(*TAGS, max_tokens=2), None)
    walk.write("a text that is far longer than two tokens")
    assert not walk.answer.forced()


def test_reasoning_that_the_answer_begins_itself_has_a_budget(compiler, tokenizer):
    walk = Walk(compiler, tokenizer, ReasoningSection(*TAGS, max_tokens=2), None)
    walk.write("\n<think>a b")
    assert walk.answer.forced()


def test_section_ends_with_another_spelling_of_its_tag(compiler, tokenizer):
    section = ReasoningSection(*TAGS, other_starts=("Thought:",), other_ends=("Here is my answer:",))
    walk = Walk(compiler, tokenizer, replace(section, begun=True))
    walk.write("some thought. Here is my answer:yes")
    assert walk.answer.ended
    walk = Walk(compiler, tokenizer, replace(section, max_tokens=2), None)
    walk.write("Thought:a b")
    assert walk.answer.forced()


def test_start_tag_of_one_token_may_come_before_the_text(tokenizer):
    start = "def"  # a token of this vocabulary
    assert len(tokenizer.encode(start, add_special_tokens=False)) == 1
    compiler = LLGrammarCompiler(tokenizer, tokenizer.eos_token_ids)
    walk = Walk(compiler, tokenizer, ReasoningSection(start, "</think>"))
    walk.write("def whatever</think>yes")
    assert walk.answer.ended


@pytest.mark.parametrize("fields", [{"start": ""}, {"end": ""}, {"max_tokens": -1}])
def test_section_with_a_wrong_field_is_refused(fields):
    with pytest.raises(RequestError):
        ReasoningSection(**{"start": "a", "end": "b"} | fields)
