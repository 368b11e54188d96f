"""Answers have only their allowed tokens, drawn as the model would draw them if it had no others."""

import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jaxserve import LLM, RequestError, SamplingParams, StructuredOutput
from jaxserve.core.allowed_tokens import AllowedTokens
from jaxserve.engine.matchers import AllowedTokensMatcher, mask_of
from tests.support.internals import core_of
from tests.support.reference import Reference
from tests.support.thorough import some

VOCAB, END = 500, 2
ALLOWED = [END, 5, 6, 31, 32, 33, 63, 64, 100, 255, 256, 498, 499]
RANDOM = SamplingParams(temperature=1.0, seed=3, max_tokens=30, ignore_eos=True, allowed_token_ids=ALLOWED)
PROMPTS = [list(range(20 + number, 40 + number)) for number in range(6)]


@pytest.fixture(scope="module", params=["native", "xla"])
def llm(request: pytest.FixtureRequest, tiny_model: Path) -> Iterator[LLM]:
    backend = {"kernel_backend": "xla"} if request.param == "xla" else {}
    with LLM(tiny_model, load_format="dummy", warmup=False, max_num_seqs=8, **backend) as llm:
        yield llm


def answers(llm: LLM, params: SamplingParams | list[SamplingParams], prompts=PROMPTS) -> list[tuple[int, ...]]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [answer.token_ids for output in outputs for answer in output.outputs]


def test_greedy_takes_the_likeliest_allowed_token(llm: LLM, reference: Reference) -> None:
    tokens = list(PROMPTS[0])
    for _ in range(8):
        logprobs = reference.logprobs(tokens)[len(tokens) - 1]
        tokens.append(max(ALLOWED, key=lambda token: logprobs[token]))
    params = replace(RANDOM, temperature=0, max_tokens=8)
    assert answers(llm, params, PROMPTS[:1]) == [tuple(tokens[len(PROMPTS[0]) :])]


@pytest.mark.parametrize(
    "options",
    some(
        [
            {},
            {"n": 3},
            {"top_k": 3, "top_p": 0.9, "min_p": 0.01},
            {"presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.3},
            {"logit_bias": {7: 100, 5: -100, 6: 2}},
            {"logprobs": 2, "prompt_logprobs": 1},
            {"min_tokens": 20, "ignore_eos": False},
            {"temperature": 0, "repetition_penalty": 1.5},
        ],
        4,
    ),
    ids=str,
)
def test_answers_have_only_allowed_tokens(llm: LLM, options: dict) -> None:
    found = answers(llm, replace(RANDOM, **options))
    assert {token for tokens in found for token in tokens} <= set(ALLOWED)
    assert len({*found}) > 1
    assert all(len(tokens) >= options.get("min_tokens", 30) for tokens in found)
    assert answers(llm, replace(RANDOM, **options)) == found


def test_all_tokens_allowed_change_nothing(llm: LLM) -> None:
    free = replace(RANDOM, allowed_token_ids=None, top_p=0.9)
    assert answers(llm, replace(free, allowed_token_ids=list(range(VOCAB)))) == answers(llm, free)


def test_other_answers_in_the_batch_are_unchanged(llm: LLM) -> None:
    free = replace(RANDOM, allowed_token_ids=None)
    alone = answers(llm, free)
    mixed = answers(llm, [RANDOM, free, replace(RANDOM, logprobs=1), free, RANDOM, free])
    assert mixed[1::2] == alone[1::2]
    assert mixed[0::2] == answers(llm, RANDOM)[0::2]


def test_log_probabilities_are_those_of_the_model_itself(llm: LLM, reference: Reference) -> None:
    (output,) = llm.generate(PROMPTS[:1], replace(RANDOM, logprobs=3, max_tokens=4), use_tqdm=False)
    (answer,) = output.outputs
    expected = reference.logprobs([*PROMPTS[0], *answer.token_ids])
    for i, entry in enumerate(answer.logprobs or ()):
        row = expected[len(PROMPTS[0]) + i - 1]
        assert set(np.argsort(-row)[:3]) <= set(entry)
        for token, logprob in entry.items():
            assert logprob.logprob == pytest.approx(row[token], abs=1e-4)
            assert logprob.rank == 1 + int((row > row[token]).sum())


def test_answer_ends_by_a_token_only_if_that_is_allowed(llm: LLM) -> None:
    ends = replace(RANDOM, ignore_eos=False, allowed_token_ids=[END, 5])
    assert all(set(tokens[:-1]) <= {5} and tokens[-1] == END for tokens in answers(llm, ends))
    assert all(len(tokens) == 30 for tokens in answers(llm, replace(ends, allowed_token_ids=[5, 6])))


def test_other_parameters_that_forbid_all_allowed_tokens_end_the_request(llm: LLM) -> None:
    params = replace(RANDOM, ignore_eos=False, allowed_token_ids=[END], min_tokens=2)
    with pytest.raises(RequestError, match="allowed_token_ids allows no token that bad_words, min_tokens") as caught:
        answers(llm, params, PROMPTS[:1])
    assert caught.value.field == "allowed_token_ids"
    assert answers(llm, RANDOM)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "at least one token id"),
        (5, "at least one token id"),
        ([5, -1], "has -1: its entries must be token ids"),
        ([5, True], "has True"),
        ([5, 1.0], r"has 1\.0"),
        ([5, "6"], "has '6'"),
        ([5, 2**31], "has 2147483648"),
        ([5, VOCAB], "has the token id 500: token ids are 0 to 499"),
    ],
)
def test_invalid_ids_are_named(llm: LLM, ids, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        answers(llm, SamplingParams(allowed_token_ids=ids), PROMPTS[:1])
    assert caught.value.field == "allowed_token_ids"


@pytest.mark.parametrize("overlap", some([True, False], 1))
def test_preempted_answers_have_only_allowed_tokens(tiny_model: Path, overlap: bool) -> None:
    options = {"max_num_seqs": 6, "kv_pages": 13, "max_model_len": 192, "prefix_caching": False, "overlap": overlap}
    with LLM(tiny_model, load_format="dummy", warmup=False, **options) as llm:
        found = answers(llm, [replace(RANDOM, seed=seed, max_tokens=100) for seed in range(6)])
        assert core_of(llm).scheduler.num_preemptions > 0
    assert {token for tokens in found for token in tokens} <= set(ALLOWED)


# together with a grammar


@pytest.fixture(scope="module")
def coder() -> Iterator[LLM]:
    with LLM(max_num_seqs=4, max_model_len=256, kv_pages=100, warmup=False) as coder:
        yield coder


def tokens_of(llm: LLM, *texts: str) -> list[int]:
    return [token for text in texts for token in llm.tokenizer.encode(text, add_special_tokens=False)]


def test_grammar_chooses_among_the_allowed_tokens(coder: LLM) -> None:
    choice = StructuredOutput(choice=["yes", "no", "maybe"])
    for wanted in choice.choice or ():
        params = SamplingParams(n=3, max_tokens=20, structured=choice, allowed_token_ids=tokens_of(coder, wanted))
        (output,) = coder.generate(["Is it?"], params, use_tqdm=False)
        assert {answer.text for answer in output.outputs} == {wanted}


@pytest.mark.parametrize("bad_words", [None, ["yes"]])
def test_grammar_without_an_allowed_token_ends_the_request(coder: LLM, bad_words: list[str] | None) -> None:
    allowed = tokens_of(coder, "yes" if bad_words else "no")
    params = SamplingParams(structured=StructuredOutput(choice=["yes"]), allowed_token_ids=allowed, bad_words=bad_words)
    with pytest.raises(RequestError, match="choice and allowed_token_ids together allow no token") as caught:
        coder.generate(["a"], params, use_tqdm=False)
    assert caught.value.field == "choice"
    assert coder.generate(["a"], replace(params, allowed_token_ids=None, bad_words=None), use_tqdm=False)


# the set


def test_ids_are_sorted_and_kept_once() -> None:
    params = SamplingParams(allowed_token_ids=[7, 3, 7])
    assert list(params.allowed_token_ids or ()) == [3, 7]
    assert params == SamplingParams(allowed_token_ids=(3, 7)) == pickle.loads(pickle.dumps(params))
    assert params != SamplingParams(allowed_token_ids=[3])
    assert replace(params, n=2).allowed_token_ids is params.allowed_token_ids


@pytest.mark.parametrize("vocab", [33, 64, 65])
def test_mask_has_a_bit_for_each_token(vocab: int) -> None:
    mask = mask_of(AllowedTokens([0, 31, 32]), vocab)
    assert mask.dtype == np.uint32
    assert mask.tolist() == [1 | 1 << 31, 1, 0][: len(mask)]
    assert len(mask) == -(-vocab // 32)


def test_only_a_grammar_needs_the_newest_token_before_the_next_is_drawn() -> None:
    mask = mask_of(AllowedTokens([5]), 64)
    assert AllowedTokensMatcher(mask, None).static
    padded = np.full(4, 0xFFFFFFFF, np.uint32)
    AllowedTokensMatcher(mask, None).fill(padded)
    assert padded.tolist() == [1 << 5, 0, 0, 0]
