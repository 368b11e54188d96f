"""Structured answers follow their grammars in every mode of generation, beside answers that have none."""

import asyncio
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

import jsonschema
import pytest
from pydantic import BaseModel, Field, TypeAdapter

from jaxserve import LLM, AsyncLLM, GrammarTooComplex, RequestError, SamplingParams, StructuredOutput
from jaxserve.core.reasoning import ReasoningSection
from jaxserve.structured.compiler import LLAnswer
from tests.support.internals import core_of
from tests.support.thorough import some

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
OBJECT = StructuredOutput(json=SCHEMA)
EMAIL = StructuredOutput(regex="[a-z]{1,8}@[a-z]{1,8}\\.com")
RANDOM = SamplingParams(temperature=1.0, seed=1, max_tokens=300, structured=OBJECT)
GREEDY = replace(RANDOM, temperature=0)
PROMPTS = [f"def f{number}(" for number in range(6)]


@pytest.fixture(scope="module", params=["native", "xla"])
def llm(request) -> Iterator[LLM]:
    backend = {"kernel_backend": "xla"} if request.param == "xla" else {}
    with LLM(max_num_seqs=6, max_model_len=512, kv_pages=200, warmup=False, **backend) as llm:
        yield llm


def texts(llm: LLM, prompts: list[str], params) -> list[str]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert {answer.finish_reason for output in outputs for answer in output.outputs} == {"stop"}
    return [answer.text for output in outputs for answer in output.outputs]


@pytest.mark.parametrize(
    "options",
    some(
        [
            {"n": 3},
            {"temperature": 0},
            {},
            {"presence_penalty": 1.5, "repetition_penalty": 1.3},
            {"logit_bias": {5: 50}},
            {"min_tokens": 30},
            {"ignore_eos": True},
            {"logprobs": 2},
            {"bad_words": ["name is"]},
            {"top_k": 5, "top_p": 0.5, "min_p": 0.01},
        ],
        2,
    ),
    ids=str,
)
def test_answers_follow_the_schema(llm: LLM, options: dict) -> None:
    for text in texts(llm, PROMPTS, replace(RANDOM, **options)):
        jsonschema.validate(json.loads(text), SCHEMA)


class Person(BaseModel):
    """A model of the same schema."""

    name: str = Field(max_length=12)
    tags: list[Literal["a", "b"]] = Field(max_length=3)


@pytest.mark.parametrize("kind", [Person, TypeAdapter(list[Person] | Person)], ids=["class", "adapter"])
def test_answer_is_one_of_a_pydantic_class(llm: LLM, kind: Any) -> None:
    params = replace(GREEDY, structured=StructuredOutput(json=kind))
    TypeAdapter(kind if kind is Person else list[Person] | Person).validate_json(texts(llm, PROMPTS[:1], params)[0])


def test_answers_with_and_without_a_grammar_share_a_batch(llm: LLM) -> None:
    free = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    params = [GREEDY, free, replace(GREEDY, structured=EMAIL), free, replace(free, structured=EMAIL, n=2), free]
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    jsonschema.validate(json.loads(outputs[0].outputs[0].text), SCHEMA)
    for answer in (*outputs[2].outputs, *outputs[4].outputs):
        assert re.fullmatch(EMAIL.text, answer.text)
    assert [len(outputs[i].outputs[0].token_ids) for i in (1, 3, 5)] == [40, 40, 40]


def test_the_likeliest_allowed_token_is_chosen_and_log_probabilities_are_the_models_own(llm: LLM) -> None:
    free = SamplingParams(temperature=0, max_tokens=1, logprobs=20)
    (output,) = llm.generate(PROMPTS[:1], free, use_tqdm=False)
    ranked = sorted(output.outputs[0].logprobs[0].values(), key=lambda entry: entry.rank)
    texts_by_rank = [entry.decoded_token for entry in ranked]

    def has_likelier_beginning(text: str, before: int) -> bool:
        return any(text.startswith(other) for other in texts_by_rank[:before])

    place = next(n for n in range(3, 20) if not has_likelier_beginning(texts_by_rank[n], n))
    others = [text for text in texts_by_rank[place + 1 :] if not has_likelier_beginning(text, place + 1)]
    choice = StructuredOutput(choice=[*others, texts_by_rank[place]])
    (chosen,) = llm.generate(PROMPTS[:1], replace(free, structured=choice), use_tqdm=False)
    assert others
    assert chosen.outputs[0].text == texts_by_rank[place]
    (entry, *_) = chosen.outputs[0].logprobs[0].values()
    assert entry.rank == place + 1
    assert entry.logprob == pytest.approx(ranked[place].logprob, abs=0.05)


def test_an_answer_that_reaches_max_tokens_is_cut(llm: LLM) -> None:
    (output,) = llm.generate(["a"], replace(GREEDY, max_tokens=4), use_tqdm=False)
    assert (output.outputs[0].finish_reason, len(output.outputs[0].token_ids)) == ("length", 4)


def test_a_seed_gives_the_same_answer_again(llm: LLM) -> None:
    assert texts(llm, PROMPTS[:1], RANDOM) == texts(llm, PROMPTS[:1], RANDOM)


def test_a_stream_has_the_text_of_the_whole_answer(llm: LLM) -> None:
    pieces = [piece.outputs[0] for piece in llm.stream(PROMPTS[0], RANDOM)]
    assert "".join(piece.text for piece in pieces) == texts(llm, PROMPTS[:1], RANDOM)[0]
    assert len(pieces) > 3


def test_a_grammar_that_cannot_be_used_is_refused_and_nothing_else(llm: LLM) -> None:
    with pytest.raises(RequestError, match="no value can follow it"):
        llm.generate(["a"], SamplingParams(structured=StructuredOutput(json={"not": {}}, strict=True)), use_tqdm=False)
    assert texts(llm, PROMPTS[:1], GREEDY)


def test_parameters_that_leave_no_token_are_named(llm: LLM) -> None:
    params = replace(GREEDY, structured=StructuredOutput(choice=["a"]), bad_words=["a"])
    with pytest.raises(RequestError, match="choice allows no token that bad_words"):
        llm.generate(PROMPTS[:1], params, use_tqdm=False)
    assert texts(llm, PROMPTS[:1], GREEDY)


def test_a_grammar_that_becomes_too_complex_ends_its_request_alone(llm: LLM) -> None:
    grammar = StructuredOutput(grammar='start: s\ns: "a" | s s | s s s | s s s s')
    params = replace(RANDOM, max_tokens=400, min_tokens=390, structured=grammar)
    with pytest.raises(GrammarTooComplex, match=r"grammar cannot go on: .*Too many items"):
        llm.generate(PROMPTS[:1], params, use_tqdm=False)
    assert texts(llm, PROMPTS, RANDOM)


def test_a_grammar_that_becomes_too_complex_with_a_token_says_so(llm: LLM) -> None:
    wide = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(800)}}
    grammar = StructuredOutput(grammar=f'%llguidance {{}}\nstart: "Here it is: " last\nlast: %json {json.dumps(wide)}')
    with pytest.raises(GrammarTooComplex, match=r"grammar cannot go on: .*Too many items"):
        llm.generate(PROMPTS[:1], replace(RANDOM, structured=grammar), use_tqdm=False)


@pytest.mark.parametrize("overlap", [True, False])
def test_preempted_answers_go_on_in_their_grammar(overlap: bool) -> None:
    regex = "([a-z] ){50,60}!"
    options = {"max_num_seqs": 6, "kv_pages": 13, "max_model_len": 192, "prefix_caching": False}
    with LLM(warmup=False, overlap=overlap, **options) as llm:
        params = replace(RANDOM, max_tokens=180, structured=StructuredOutput(regex=regex))
        found = llm.generate(PROMPTS, [replace(params, seed=seed) for seed in range(6)], use_tqdm=False)
        assert core_of(llm).scheduler.num_preemptions > 0
    for output in found:
        assert re.fullmatch(regex, output.outputs[0].text)


FIXED = StructuredOutput(regex='\\{"identifier": "[a-z]{2}", "configuration": "[0-9]{2}"\\}')


@pytest.mark.parametrize("overlap", some([True, False], 1))
def test_forced_tokens_are_computed_together_and_change_no_answer(overlap: bool, monkeypatch) -> None:
    params = SamplingParams(temperature=0, max_tokens=100, structured=FIXED)
    options = {"dtype": "float32", "max_num_seqs": 2, "max_model_len": 256, "memory_gb": 2}
    with LLM(warmup=False, overlap=overlap, **options) as llm:

        def answer_and_steps(prompt: str) -> tuple[tuple[int, ...], str, int]:
            before = core_of(llm).snapshot.steps
            (output,) = llm.generate([prompt], params, use_tqdm=False)
            answer = output.outputs[0]
            return answer.token_ids, answer.text, core_of(llm).snapshot.steps - before

        together = [answer_and_steps(prompt) for prompt in PROMPTS]
        monkeypatch.setattr(LLAnswer, "forced", lambda self: [])
        alone = [answer_and_steps(prompt) for prompt in PROMPTS]
    assert [each[:2] for each in together] == [each[:2] for each in alone]
    assert all(re.fullmatch(FIXED.text, text) for _, text, _ in together)
    assert all(steps < others for (*_, steps), (*_, others) in zip(together, alone, strict=True))


def test_structure_begins_after_the_reasoning_and_its_budget(llm):
    section = ReasoningSection("<think>", "</think>", begun=True, max_tokens=9)
    params = replace(RANDOM, reasoning=section, n=2, stop=["\n\n\n"])
    for text in texts(llm, PROMPTS[:3], params):
        reasoning, end, answer = text.partition("</think>")
        assert end
        assert "</think>" not in reasoning
        jsonschema.validate(json.loads(answer), SCHEMA)


def test_budget_ends_the_reasoning_of_free_text(llm):
    section = ReasoningSection("<think>", "</think>", begun=True, max_tokens=5)
    params = SamplingParams(temperature=1, seed=3, max_tokens=20, ignore_eos=True, reasoning=section)
    (output,) = llm.generate(["def f("], params, use_tqdm=False)
    tokens = output.outputs[0].token_ids
    assert llm.tokenizer.decode(tokens[:5]) + "</think>" == output.outputs[0].text.partition("</think>")[0] + "</think>"
    assert len(tokens) == 20


def test_budget_ends_the_reasoning_of_free_text_beside_other_requests():
    section = ReasoningSection("<think>", "</think>", begun=True, max_tokens=5)
    params = SamplingParams(temperature=1, seed=3, max_tokens=20, ignore_eos=True, reasoning=section)

    async def main() -> str:
        async with AsyncLLM(max_num_seqs=2, max_model_len=256, kv_pages=40, warmup=False) as llm:
            return "".join([piece.outputs[0].text async for piece in llm.stream("def f(", params)])

    assert "</think>" in asyncio.run(main())


def test_end_tag_that_may_not_be_written_is_an_error_that_names_the_budget(llm):
    section = ReasoningSection("<think>", "</think>", begun=True, max_tokens=0)
    first = llm.tokenizer.token(llm.tokenizer.encode("</think>", add_special_tokens=False)[0])
    params = SamplingParams(max_tokens=20, reasoning=section, bad_words=[first])
    with pytest.raises(RequestError, match=r"reasoning\.max_tokens allows no token that bad_words"):
        llm.generate(["def f("], params, use_tqdm=False)
