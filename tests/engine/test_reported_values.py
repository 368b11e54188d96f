"""What metrics and load reports say of a real engine is what it has done."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxserve.build import build, build_async_engine
from jaxserve.core.config import EngineConfig
from jaxserve.core.request import Request, RequestMetrics, RequestOutput
from jaxserve.core.sampling import SamplingParams
from jaxserve.engine.async_engine import AsyncEngine
from jaxserve.engine.client import TokensPrompt
from jaxserve.server.load import load_of
from jaxserve.telemetry import EngineMetrics

OPTIONS = {"load_format": "dummy", "warmup": False, "max_num_seqs": 4, "kv_pages": 60, "metrics_prefix": "both"}


def prompt(seed: int, length: int) -> TokensPrompt:
    return TokensPrompt(tuple(np.random.default_rng(seed).integers(3, 500, length).tolist()))


def asking(max_tokens: int, **values: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **values)


@asynccontextmanager
async def opened(model: Path, **options: Any) -> AsyncIterator[AsyncEngine]:
    engine = build_async_engine(EngineConfig(model=model, **OPTIONS | options))
    try:
        yield engine
    finally:
        await engine.shutdown()


async def answer(engine: AsyncEngine, asked: TokensPrompt, params: SamplingParams) -> RequestOutput:
    """Return the last output of a request."""
    async for output in engine.generate(asked, params):
        last = output
    return last


class Page:
    """The metrics of an engine under vLLM's names."""

    def __init__(self, metrics: EngineMetrics, prefix: str = "vllm:"):
        families = text_string_to_metric_families(metrics.render().decode())
        self.prefix = prefix
        self.samples = [sample for family in families for sample in family.samples if sample.name.startswith(prefix)]

    def __call__(self, name: str, **labels: str) -> float:
        """Return a value, summed over series that differ in other labels."""
        found = [s for s in self.samples if s.name == self.prefix + name and labels.items() <= s.labels.items()]
        assert found, name
        return sum(sample.value for sample in found)


def test_counts_are_those_of_the_requests(tiny_model: Path) -> None:
    async def main() -> None:
        async with opened(tiny_model) as engine:
            await answer(engine, prompt(1, 40), asking(5))
            await answer(engine, prompt(1, 40), asking(7))  # finds two pages of 16 tokens
            await answer(engine, prompt(2, 20), asking(9, n=3))
            await engine.embed(prompt(3, 11))
            page = Page(engine.metrics)
        assert page("prompt_tokens_total") == 40 + 40 + 20 + 11
        assert page("prompt_tokens_cached_total") == 32
        assert page("generation_tokens_total") == 5 + 7 + 3 * 9
        assert page("request_success_total", finished_reason="length") == 3
        assert page("request_success_total", finished_reason="stop") == 1  # the embedding
        assert page("request_prompt_tokens_sum") == 40 + 40 + 20 + 11
        assert page("request_prefill_kv_computed_tokens_sum") == 40 + 8 + 20 + 11
        assert page("request_generation_tokens_sum") == 5 + 7 + 3 * 9
        assert page("request_max_num_generation_tokens_sum") == 5 + 7 + 9
        assert page("request_params_n_sum") == 1 + 1 + 3 + 1
        assert page("request_params_max_tokens_sum") == 5 + 7 + 9
        assert page("time_to_first_token_seconds_count") == 1 + 1 + 3
        assert page("inter_token_latency_seconds_count") == 4 + 6 + 3 * 8
        # Steps compute each prompt without what is cached, and every token but the last. Two of the three answers only
        # compute the 4 tokens after the first page of their prompt.
        assert page("iteration_tokens_total_sum") == (40 + 8 + 20 + 2 * 4 + 11) + (4 + 6 + 3 * 8)

    asyncio.run(main())


def test_seconds_are_those_of_the_requests(tiny_model: Path) -> None:
    async def main() -> None:
        async with opened(tiny_model) as engine:
            outputs = await asyncio.gather(*(answer(engine, prompt(n, 20), asking(4 + n)) for n in range(6)))
            page = Page(engine.metrics)
        times: list[RequestMetrics] = [output.metrics for output in outputs]
        for name, start, end in (
            ("time_to_first_token_seconds", "arrival", "first_token"),
            ("request_queue_time_seconds", "arrival", "first_scheduled"),
            ("request_prefill_time_seconds", "first_scheduled", "first_token"),
            ("request_decode_time_seconds", "first_token", "last_token"),
            ("request_inference_time_seconds", "first_scheduled", "last_token"),
            ("e2e_request_latency_seconds", "arrival", "finished"),
            ("inter_token_latency_seconds", "first_token", "last_token"),  # the sum of all gaps
        ):
            spent = sum(getattr(each, end) - getattr(each, start) for each in times)
            assert page(f"{name}_sum") == pytest.approx(spent), name

    asyncio.run(main())


def test_gauges_are_those_of_the_scheduler(tiny_model: Path) -> None:
    built = build(EngineConfig(model=tiny_model, dp=2, **OPTIONS))
    first = built.instances[0]
    requests = [(prompt(1, 40), asking(5)), (prompt(2, 20), asking(5, n=2))]
    for index, (asked, params) in enumerate(requests):
        first.add(Request(str(index), asked.token_ids, params, arrival=built.clock.now()))
    first.step()
    first.step()  # takes the outcome of the first step
    for index in range(5):  # one slot is left, so that four wait, two of them for the prompt of the first
        first.add(Request(f"more-{index}", prompt(index, 30).token_ids, asking(5), arrival=built.clock.now()))
    first.add(Request("siblings", prompt(9, 30).token_ids, asking(5, n=3), arrival=built.clock.now()))
    first.step()
    scheduler, page = first.core.scheduler, Page(built.metrics)
    waiting = scheduler.num_waiting
    assert page("num_requests_running", engine="0") == len(scheduler.running) == 4
    assert page("num_requests_waiting", engine="0") == waiting == 4 + 3
    assert page("num_requests_waiting_by_reason", engine="0", reason="deferred") == 2
    assert page("num_requests_waiting_by_reason", engine="0", reason="capacity") == waiting - 2
    assert page("kv_cache_usage_perc", engine="0") == scheduler.pages.used / 60
    assert page("num_requests_running", engine="1") == page("generation_tokens_total", engine="1") == 0
    (cache,) = [s.labels for s in page.samples if s.name == "vllm:cache_config_info" and s.labels["engine"] == "0"]
    assert cache["num_gpu_blocks"] == cache["num_gpu_blocks_override"] == "60"
    assert cache["kv_cache_size_tokens"] == str(60 * 16)
    assert float(cache["kv_cache_max_concurrency"]) == 60 * 16 / built.info.max_model_len
    built.close()


@pytest.mark.parametrize(("policy", "grows"), [("static", False), ("morph-performance", True)])
def test_capacity_is_what_the_plan_holds_and_the_policy_may_make_of_it(
    tiny_model: Path, policy: str, grows: bool
) -> None:
    async def main() -> None:
        async with opened(tiny_model, policy=policy, max_model_len=256) as engine:
            load, page = load_of(engine, 0), Page(engine.metrics, "jaxserve_")
            assert engine.control is not None
            pages = engine.control.status()["kv_pages"]
        assert load["kv_capacity_tokens"] == page("kv_capacity_tokens") == pages["total"] * 16 == 60 * 16
        assert load["kv_capacity_max_tokens"] == page("kv_capacity_max_tokens")
        assert (load["kv_capacity_max_tokens"] > load["kv_capacity_tokens"]) == grows
        assert load["kv_capacity_max_tokens"] <= pages["most"] * 16
        assert load["kv_capacity_max_seconds"] == page("kv_capacity_max_seconds") >= 0
        assert load["policy"] == policy

    asyncio.run(main())
