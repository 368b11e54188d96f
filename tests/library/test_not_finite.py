"""A request for which the model computes NaN or infinity ends with an error, and no other request is affected."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import LLM, SamplingParams
from jaxserve.build import build_async_engine
from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import NonFiniteOutput
from jaxserve.engine.client import TokensPrompt
from tests.support.internals import assert_no_request_left, instance_threads_of, instances_of

BAD = 7  # the token whose embedding is not finite
GOOD = list(range(20, 45))
OPTIONS = {"load_format": "dummy", "max_num_seqs": 4, "warmup": False, "max_model_len": 128}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def spoil(engine, value: float) -> None:
    """Give the token BAD an embedding of this value."""
    for steps in engine:
        loaded = steps.executor.blocks[0]
        (weight,) = loaded.leaves
        steps.executor.replace([replace(loaded, leaves=(jnp.asarray(weight).at[BAD].set(value),))])


@pytest.fixture(scope="module", params=["auto", "xla"])
def llm(request, tiny_model: Path) -> Iterator[LLM]:
    with LLM(tiny_model, **OPTIONS, kv_pages=9, kernel_backend=request.param) as llm:
        spoil(instances_of(llm), np.nan)
        yield llm


def tokens(llm: LLM, params: SamplingParams = GREEDY) -> list[tuple[int, ...]]:
    (output,) = llm.generate([GOOD], params, use_tqdm=False)
    return [answer.token_ids for answer in output.outputs]


@pytest.mark.parametrize(
    "asked",
    [
        {"temperature": 0},
        {"temperature": 1, "top_p": 0.9},
        {"temperature": 0, "repetition_penalty": 1.2},
        {"temperature": 1, "logprobs": 2, "n": 3},
        {"temperature": 0, "prompt_logprobs": 2},
    ],
    ids=str,
)
def test_non_finite_request_ends_with_an_error_and_harms_no_other(llm: LLM, asked: dict) -> None:
    expected = tokens(llm)
    beside = llm.stream(GOOD, GREEDY)
    seen = [next(beside).outputs[0].token_ids]
    with pytest.raises(NonFiniteOutput, match="--dtype bfloat16"):
        llm.generate([[5, 6, BAD, 8] * 10], SamplingParams(max_tokens=8, **asked), use_tqdm=False)
    seen += [piece.outputs[0].token_ids for piece in beside]
    assert [sum(seen, ())] == expected
    for _ in range(3):  # in pages that held what is not finite
        assert tokens(llm) == expected
    assert_no_request_left(llm)


def test_non_finite_stream_and_embedding_raise(llm: LLM) -> None:
    with pytest.raises(NonFiniteOutput, match="logits"):
        list(llm.stream([3, BAD], GREEDY))
    with pytest.raises(NonFiniteOutput, match="embeddings"):
        llm.embed([[3, BAD]], use_tqdm=False)
    assert np.isfinite(llm.embed([GOOD], use_tqdm=False)[0]).all()


def test_non_finite_output_of_the_async_engine_raises_and_is_counted(tiny_model: Path) -> None:
    engine = build_async_engine(EngineConfig(model=tiny_model, **OPTIONS))
    spoil([thread.steps for thread in instance_threads_of(engine)], np.inf)

    async def main() -> None:
        for stream in (True, False):
            with pytest.raises(NonFiniteOutput):
                async for _ in engine.generate(TokensPrompt((3, BAD)), GREEDY, stream=stream):
                    pass
        with pytest.raises(NonFiniteOutput):
            await engine.embed(TokensPrompt((3, BAD)))
        text = engine.metrics_text().decode()
        assert f'jaxserve_non_finite_outputs_total{{engine="0",model_name="{tiny_model.name}"}} 3.0' in text
        assert f'finished_reason="error",model_name="{tiny_model.name}"}} 3.0' in text
        await engine.shutdown()

    asyncio.run(main())


@pytest.mark.parametrize(
    "how",
    [{"kernel_backend": "xla"}, {"dtype": "bfloat16"}, {"dtype": "float16"}, {"kv_cache_dtype": "int8"}],
    ids=str,
)
def test_pages_that_held_non_finite_values_are_reusable(tiny_model: Path, how: dict) -> None:
    with LLM(tiny_model, **OPTIONS, kv_pages=8, prefix_caching=False, **how) as llm:
        spoil(instances_of(llm), np.nan)
        prompts = [GOOD[:length] for length in (1, 7, 16, 25)]
        greedy = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        expected = [llm.generate([each], greedy, use_tqdm=False)[0].outputs[0].token_ids for each in prompts]
        with pytest.raises(NonFiniteOutput):
            llm.generate([[BAD] * 111], greedy, use_tqdm=False)  # in all pages
        again = [llm.generate([each], greedy, use_tqdm=False)[0].outputs[0].token_ids for each in prompts]
        assert again == expected
