"""An instance of several stages computes several steps at once, and gives the answers of an instance of one stage."""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest

from jaxserve import LLM, SamplingParams
from jaxserve.core.request import RequestOutput
from jaxserve.core.structured import StructuredOutput
from tests.support.internals import core_of, engine_of, executor_of
from tests.support.slow_stages import SlowStages

OPTIONS = {"dtype": "float32", "warmup": False, "memory_gb": 4, "max_num_seqs": 6, "max_num_batched_tokens": 134}
# Pages for about three of the sequences below at once.
FEW_PAGES = {"kv_pages": 24, "max_model_len": 256}
PROMPT = "def fibonacci(n):\n"
RNG = np.random.default_rng(0)
TOKENS = [RNG.integers(5, 2000, 30 + 23 * i).tolist() for i in range(8)]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=1, seed=3, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.9, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=0, repetition_penalty=1.3, frequency_penalty=0.5, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=1, seed=5, n=3, max_tokens=16, ignore_eos=True),
    SamplingParams(temperature=0, logprobs=2, prompt_logprobs=1, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0, stop=["\n\n"], max_tokens=40),
    SamplingParams(temperature=0, bad_words=["return n"], max_tokens=24, ignore_eos=True),
]
GRAMMARS = [
    SamplingParams(temperature=0, max_tokens=24, structured=StructuredOutput(regex=r"[a-z]{3} = \[(\d, ){4}\d\]")),
    SamplingParams(temperature=1, seed=1, max_tokens=24, structured=StructuredOutput(choice=["one two", "three four"])),
]


def ask(llm: LLM) -> list[RequestOutput]:
    """Return the answers to prompts of several kinds at once, of which some begin alike."""
    prompts = [*TOKENS, *[PROMPT] * (len(PARAMS) + len(GRAMMARS)), TOKENS[-1], TOKENS[-1] + [7, 8, 9]]
    return llm.generate(prompts, [*PARAMS, *PARAMS, *GRAMMARS, PARAMS[0], PARAMS[1]], use_tqdm=False)


def check_equal(answers: list[RequestOutput], expected: list[RequestOutput]) -> None:
    for answer, other in zip(answers, expected, strict=True):
        for one, two in zip(answer.outputs, other.outputs, strict=True):
            assert one.token_ids == two.token_ids
            assert (one.text, one.finish_reason, one.stop_reason) == (two.text, two.finish_reason, two.stop_reason)
            assert one.cumulative_logprob == pytest.approx(two.cumulative_logprob, abs=1e-3)
        for mine, theirs in zip(answer.prompt_logprobs or (), other.prompt_logprobs or (), strict=True):
            assert (mine or {}).keys() == (theirs or {}).keys()


@pytest.fixture(scope="module")
def expected() -> list[list[RequestOutput]]:
    """Return the answers of one stage, the second time from the prefix cache and with other seeds."""
    with LLM(**OPTIONS) as llm:
        return [ask(llm), ask(llm)]


@pytest.mark.parametrize(
    "options",
    [{"pp": 2}, {"pp": 2, "microbatches": "tokens"}, {"pp": 3, **FEW_PAGES}, {"pp": 2, "overlap": False}],
    ids=lambda options: "-".join(map(str, options)),
)
def test_stages_give_the_answers_of_one(expected: list[list[RequestOutput]], options: dict) -> None:
    with LLM(**OPTIONS, **options) as llm:
        for answers in expected:
            check_equal(ask(llm), answers)
        scheduler = core_of(llm).scheduler
        assert scheduler.prefix_hits > 0
        assert (scheduler.num_preemptions > 0) == ("kv_pages" in options)
        assert scheduler.pages.used == 0
