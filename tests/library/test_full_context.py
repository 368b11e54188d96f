"""A request may use every token of `max_model_len`: a prompt alone, with one token, or an answer up to the end."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve import LLM, PromptTooLong, RequestError, SamplingParams
from tests.support.internals import instances_of
from tests.support.reference import Reference
from tests.support.thorough import some

LIMIT = 96
SCORED = SamplingParams(max_tokens=0, prompt_logprobs=2)
ENGINES: dict[str, dict[str, Any]] = {
    "chunks, and pages that do not divide the limit": {"max_num_batched_tokens": 4 + 32, "page_size": 7},
    "no overlap, no prefix cache": {"overlap": False, "prefix_caching": False},
    "tensor parallel": {"tp": 2},
    "one sequence": {"max_num_seqs": 1},
    "stages": {"pp": 2},
    "pages of one prompt": {"kv_pages": 1 + LIMIT // 16},
    "instances": {"dp": 2},
}


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 500, length).tolist()


@pytest.mark.parametrize("options", some(ENGINES.values(), 3), ids=some(ENGINES, 3))
def test_every_token_of_the_context_can_be_used(tiny_model: Path, reference: Reference, options: dict) -> None:
    engine = {"load_format": "dummy", "warmup": False, "memory_gb": 8, "max_num_seqs": 4, "max_model_len": LIMIT}
    prompts = [prompt(seed, LIMIT) for seed in range(5)]
    with LLM(tiny_model, **engine | options) as llm:
        scored = llm.generate(prompts, SCORED, use_tqdm=False)
        mixed = llm.generate(
            [prompts[0][:-1], prompts[1], prompts[2][:40], prompts[3]],
            [SamplingParams(temperature=0, max_tokens=1), SCORED, SamplingParams(temperature=0, max_tokens=56), SCORED],
            use_tqdm=False,
        )
        assert all(steps.core.idle and steps.core.scheduler.pages.used == 0 for steps in instances_of(llm))
    for given, output in zip(prompts, scored, strict=True):
        expected = reference.logprobs(given)
        (answer,) = output.outputs
        assert (answer.text, answer.token_ids, answer.finish_reason) == ("", (), "length")
        assert output.prompt_logprobs is not None
        first, *rest = output.prompt_logprobs
        assert first is None
        assert len(rest) == LIMIT - 1
        for place, entry in enumerate(rest, start=1):
            assert entry is not None
            assert entry[given[place]].logprob == pytest.approx(expected[place - 1][given[place]], abs=1e-3)
    assert [len(output.outputs[0].token_ids) for output in mixed] == [1, 0, 56, 0]
    assert mixed[1].prompt_logprobs == scored[1].prompt_logprobs


def test_one_token_more_is_refused(tiny_model: Path) -> None:
    options = {"load_format": "dummy", "warmup": False, "max_num_seqs": 4, "max_model_len": LIMIT}
    with LLM(tiny_model, **options) as llm:
        for length, tokens in ((LIMIT + 1, 0), (LIMIT, 1), (LIMIT, None)):
            with pytest.raises(PromptTooLong, match=rf"{LIMIT} tokens \(max_model_len\).* has {length} tokens"):
                llm.generate([prompt(0, length)], SamplingParams(max_tokens=tokens), use_tqdm=False)
        with pytest.raises(RequestError, match="max_tokens is 2, the limit is 1"):
            llm.generate([prompt(0, LIMIT - 1)], SamplingParams(max_tokens=2), use_tqdm=False)
        with pytest.raises(PromptTooLong):
            llm.embed([prompt(0, LIMIT + 1)], use_tqdm=False)
        assert len(llm.embed([prompt(0, LIMIT)], use_tqdm=False)) == 1


def test_nothing_but_the_prompt_for_several_answers_and_streams(tiny_model: Path) -> None:
    options = {"load_format": "dummy", "warmup": False, "max_num_seqs": 4, "max_model_len": LIMIT}
    with LLM(tiny_model, **options) as llm:
        (plain,) = llm.generate([prompt(1, LIMIT)], SCORED, use_tqdm=False)
        several = SamplingParams(n=3, max_tokens=0, prompt_logprobs=2)
        (output,) = llm.generate([prompt(1, LIMIT)], several, use_tqdm=False)
        assert [(answer.index, answer.token_ids) for answer in output.outputs] == [(0, ()), (1, ()), (2, ())]
        assert output.prompt_logprobs == plain.prompt_logprobs
        (piece,) = llm.stream(prompt(1, LIMIT), SCORED)
        assert piece.finished
        assert piece.prompt_logprobs == plain.prompt_logprobs
        # Without log-probabilities, the prompt is in the prefix cache afterwards.
        llm.generate([prompt(2, 90)], SamplingParams(max_tokens=0), use_tqdm=False)
        (cached,) = llm.generate([prompt(2, 90)], SamplingParams(max_tokens=1), use_tqdm=False)
        assert cached.num_cached_tokens == 80
