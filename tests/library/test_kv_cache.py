"""A KV cache in int8: more pages, and answers close to those of full precision."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from jaxserve import LLM, ConfigError, EngineConfig, SamplingParams
from jaxserve.build import build
from jaxserve.core.request import RequestOutput
from jaxserve.engine.client import TokensPrompt
from jaxserve.engine.sync_engine import SyncEngine
from jaxserve.planning.resolve import resolve
from tests.support.internals import core_of, executor_of
from tests.support.reference import Reference
from tests.support.sizes import page_bytes
from tests.support.thorough import some

OPTIONS = {"load_format": "dummy", "max_num_seqs": 8, "memory_gb": 4, "kv_cache_dtype": "int8"}
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)
PROMPTS = [np.random.default_rng(i).integers(3, 499, length).tolist() for i, length in enumerate((1, 16, 33, 64, 150))]
SAME = 2e-4  # of a log-probability: the order of a sum may round a code up instead of down
NEAR = 5e-3  # difference of a log-probability to full precision, in this model


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    with LLM(tiny_model, warmup=False, **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def in_int8(tiny_model: Path) -> Reference:
    return Reference(tiny_model, kv_dtype="int8")


def check(outputs: list[RequestOutput], reference: Reference, tolerance: float) -> float:
    """Check that every token is the likeliest but for ties, and return the largest difference to the reference."""
    worst = 0.0
    for output in outputs:
        (answer,), p = output.outputs, list(output.prompt_token_ids)
        expected = reference.logprobs(p + list(answer.token_ids))
        assert answer.logprobs is not None
        for i, token in enumerate(answer.token_ids):
            row = expected[len(p) + i - 1]
            assert row[token] == pytest.approx(row.max(), abs=tolerance)
            worst = max(worst, abs(answer.logprobs[i][token].logprob - row[token]))
    assert worst <= tolerance
    return worst


def test_int8_pools_hold_codes_and_scales(llm: LLM) -> None:
    pools = executor_of(llm).pools[:]
    assert len(pools) == 3, "one for each layer"
    for (pool,) in pools:
        assert (pool.dtype, pool.shape[1:]) == ("int8", (2, 2, 16, 16 + 4))


def test_int8_cache_answers_equal_a_forward_pass_with_rounded_kv(llm: LLM, in_int8: Reference) -> None:
    check(llm.generate(PROMPTS, PARAMS, use_tqdm=False), in_int8, SAME)


def test_int8_cache_answers_are_near_full_precision(llm: LLM, reference: Reference) -> None:
    worst = check(llm.generate(PROMPTS, PARAMS, use_tqdm=False), reference, NEAR)
    assert worst > SAME, "nothing was rounded"


def test_int8_cached_prefix_gives_the_same_answer(llm: LLM, in_int8: Reference) -> None:
    p = np.random.default_rng(20).integers(3, 499, 100).tolist()
    first, again = (llm.generate([p], PARAMS, use_tqdm=False) for _ in range(2))
    assert (first[0].num_cached_tokens, again[0].num_cached_tokens) == (0, 96)
    check(first + again, in_int8, SAME)


def test_int8_cache_recomputes_preempted_requests(tiny_model: Path, in_int8: Reference) -> None:
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, logprobs=1)
    prompts = [np.random.default_rng(30 + i).integers(3, 499, 40).tolist() for i in range(3)]
    with LLM(tiny_model, warmup=False, kv_pages=12, max_model_len=128, **OPTIONS) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        scheduler = core_of(llm).scheduler
        assert scheduler.num_preemptions > 0
        assert scheduler.pages.used == 0
    check(outputs, in_int8, SAME)


@pytest.mark.parametrize(("tp", "pp"), some([(2, 2), (4, 1), (2, 1)], 1))
def test_int8_cache_split_over_devices_gives_the_same_answers(
    tiny_model: Path, in_int8: Reference, tp: int, pp: int
) -> None:
    with LLM(tiny_model, warmup=False, tp=tp, pp=pp, **(OPTIONS | {"memory_gb": 8})) as llm:
        pools = executor_of(llm).pools[:]
        assert len(pools) == 3, "one for each layer"
        for (pool,) in pools:
            assert len(pool.addressable_shards) == tp
            assert {shard.data.shape[1] for shard in pool.addressable_shards} == {1}
        check(llm.generate(PROMPTS, PARAMS, use_tqdm=False), in_int8, SAME)


def test_serving_with_an_int8_cache_compiles_nothing(tiny_model: Path) -> None:
    built = build(EngineConfig(model=tiny_model, max_num_batched_tokens=8 + 64, **OPTIONS))
    engine, before = SyncEngine(built.loops, built.info, None, built.clock), dict(built.compilations.counts)
    assert before["block"] > 0
    for p in PROMPTS:
        engine.add(TokensPrompt(tuple(p)), PARAMS)
    while not engine.idle:
        engine.step()
    assert built.compilations.counts == before
    built.close()


def test_int8_page_count_follows_from_the_page_bytes(tiny_model: Path) -> None:
    def resolved(**options):
        return resolve(EngineConfig(model=tiny_model, **(OPTIONS | options)))

    full, int8 = resolved(kv_cache_dtype="auto"), resolved()
    layers, heads, size, dim = 3, 2, 16, 16
    assert page_bytes(full) == layers * heads * 2 * size * dim * 4  # float32
    assert page_bytes(int8) == layers * heads * 2 * size * (dim + 4)
    fixed = full.ledger.used - full.ledger.entries["kv"]
    budget = (fixed + 40.5 * page_bytes(full)) / 1e9
    pages = [r.plan.instances[0].stages[0].kv_pages for r in (resolved(kv_cache_dtype="auto", memory_gb=budget),
                                                              resolved(memory_gb=budget))]  # fmt: skip
    assert pages == [40, int(40.5 * 64 / 20)]


def test_ledger_counts_the_int8_pools_bytes(tiny_model: Path) -> None:
    built = build(EngineConfig(model=tiny_model, warmup=False, **OPTIONS))
    assert built.resolved.ledger.entries["kv"] == built.instances[0].executor.pools.nbytes
    assert built.instances[0].core.plan_fields.kv_bytes == built.resolved.ledger.entries["kv"]
    built.close()


def test_unknown_kv_cache_dtype_is_refused(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype is 'fp8': use int8"):
        LLM(tiny_model, **(OPTIONS | {"kv_cache_dtype": "fp8"}))
